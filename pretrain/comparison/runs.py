# SPDX-License-Identifier: Apache-2.0
"""Run folders read for a comparison, and runs of several seeds put together as rows."""

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fused_ops.errors import ConfigError
from models.config import ModelConfig
from pretrain.checkpoint.compare import flatten
from pretrain.config import PretrainConfig
from pretrain.config_file import decode_all, encode
from pretrain.data.config import DataConfig
from pretrain.environment import ENVIRONMENT_FILE
from pretrain.history import METRICS_FILE, read_metrics
from pretrain.report.sections import four_bit_share

FORWARDS = {"own": "val_loss", "bf16": "val_loss_bf16"}
"""Which forward pass a validation used: the run's own, quantized one, or GEMMs in 16 bits."""

Point = tuple[int, float]
# Settings that say where and how a run computes, and not what it trains.
_ELSEWHERE: tuple[str, ...] = ("run.", "log.", "checkpoint.", "monitor.", "parallel.")
_ELSEWHERE += ("data.prefetch", "data.cache", "data.storage")
_ELSEWHERE += ("train.eval_interval", "train.eval_also_bf16", "train.profile_steps")
_ELSEWHERE += ("train.threads", "train.dry_run", "train.micro_batch_size")
_ELSEWHERE += ("train.deterministic", "train.cuda_graph_impl")
RECIPE = ("precision.", "optimizer.oscillation_reset")
"""What low precision does, resets of weights that hop between two codes included."""
_SEED = re.compile(r"[-_.](?:s|seed)?[-_.]?\d+$")


@dataclass(frozen=True)
class RunData:
    """What a run folder says."""

    path: Path
    name: str
    seed: int
    steps: int
    """Of the whole run."""
    settings: Mapping[str, Any]
    """Flat, without where and how it computed."""
    losses: Sequence[Point]
    """(step, training loss), by step; of a step that was taken again, the last."""
    tokens: Mapping[int, int]
    """Tokens consumed after each step."""
    validation: Mapping[tuple[str, str], Sequence[Point]]
    """By (forward, set): (step, loss), of losses that are finite."""
    tokens_per_s: float | None
    memory_gib: float | None
    four_bit_share: float | None
    card: str
    commit: str
    """Of the code; that it was changed, and what its digest is, where it was not that commit's."""
    data: str = ""
    """Fingerprints of what its training and validation data held; empty where it is not known."""
    main_set: str = ""
    """Of validation sets with names the first: `validation` has it under "" too."""
    awaits_validation: bool = False
    """It validates, and has not done so after its last step: not yet, or the line is torn."""

    @property
    def finished(self) -> bool:
        """Whether its last step was taken, and what it ends with is known."""
        taken = bool(self.losses) and self.losses[-1][0] >= self.steps
        return taken and not self.awaits_validation

    def final_loss(self, forward: str = "own") -> float | None:
        """Of the validation after the last step; None where it is not finished, or not finite."""
        points = self.validation.get((forward, ""))
        ended = self.finished and points and points[-1][0] >= self.steps
        return points[-1][1] if points and ended else None

    @property
    def other_sets(self) -> list[str]:
        """Names of its further validation sets."""
        names = dict.fromkeys(name for _, name in self.validation)
        return [name for name in names if name not in ("", self.main_set)]


@dataclass
class Row:
    """Runs that differ in their seed alone."""

    label: str
    runs: dict[int, RunData] = field(default_factory=dict)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Of the first seed; the others' are the same."""
        return next(iter(self.runs.values())).settings

    @property
    def is_high(self) -> bool:
        """Whether its precision names 16-bit recipes alone."""
        own = self.settings
        steps = [*(own.get("precision.rules") or []), *(own.get("precision.schedule") or [])]
        plans = [v for k, v in own.items() if k.startswith("precision.phases.pretraining")]
        recipes = {own.get("precision.recipe"), *(step["recipe"] for step in steps)}
        return recipes <= {None, "fp32", "bf16", "fp16"} and not any(
            [own.get("precision.plan"), *plans]
        )


def find_runs(folders: Iterable[str | Path]) -> list[Path]:
    """The run folders in each folder: itself, or those right below it, in order of names.

    Raises:
        ConfigError: a folder that is not a run's and holds no such folder.
    """
    found, problems = [], []
    for folder in map(Path, folders):
        if (folder / METRICS_FILE).exists():
            found.append(folder)
            continue
        below = sorted(path.parent for path in folder.glob(f"*/{METRICS_FILE}"))
        if not below:
            problems.append(
                f"{folder} must be the folder of a run, or hold such folders: {METRICS_FILE} is "
                "missing; name runs/NAME"
            )
        found += below
    if problems:
        raise ConfigError(problems)
    return list(dict.fromkeys(found))


def read_run(folder: Path, rows: Sequence[Mapping[str, Any]] | None = None) -> RunData:
    """Reads one run folder; `rows`: of its metrics.jsonl, where that has been read already.

    Raises ConfigError where its configuration or losses are missing, or are not what
    `python -m pretrain` writes.
    """
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text())
        flat = flatten(config)
        name, seed, steps = (flat[k] for k in ("run.name", "run.seed", "train.steps"))
        identity: dict[str, Any] = {"name": str(name), "seed": int(seed), "steps": int(steps)}
        identity["settings"] = trained_settings(config)
    except (OSError, yaml.YAMLError, KeyError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder}/config.yaml must be a run's resolved configuration; it cannot be read "
            f"({type(error).__name__}); compare folders that `python -m pretrain` has written"
        ) from error
    if identity["steps"] < 1:
        raise ConfigError(
            f"{folder} must be a run of at least one step; config.yaml has train.steps {steps}; "
            "start it again with the steps that it is to take, or leave the run out"
        )
    rows = read_metrics(folder / METRICS_FILE) if rows is None else rows
    if not any("loss" in row for row in rows):
        raise ConfigError(f"{folder} must have trained at least one step; {METRICS_FILE} has none")
    try:
        return RunData(path=folder, **identity, **_metrics(rows, int(steps)), **_records(folder))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder / METRICS_FILE} must hold numbers; it cannot be read ({error}); mend its "
            "lines, or leave the run out"
        ) from error


def _metrics(rows: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """What the rows of metrics.jsonl say. Raises ValueError or TypeError for what is no number."""
    training = [row for row in rows if "loss" in row]
    speeds = [float(row["tokens_per_s"]) for row in training if "tokens_per_s" in row]
    memory = [float(row["memory_gib"]) for row in training if "memory_gib" in row]
    validation = _validation(rows)
    validated = [row["step"] for row in rows if any(map(_forward_of, row))]
    names = dict.fromkeys(name for _, name in validation)
    main = next(iter(names), "") if "" not in names else ""
    for forward in FORWARDS if main else ():
        if (forward, main) in validation:
            validation[forward, ""] = validation[forward, main]
    return {
        "losses": sorted({row["step"]: float(row["loss"]) for row in training}.items()),
        "tokens": {row["step"]: int(row["tokens"]) for row in rows if "tokens" in row},
        "validation": validation,
        "main_set": main,
        "awaits_validation": bool(validated) and max(validated) < steps,
        # The first steps compile and warm up.
        "tokens_per_s": statistics.median(speeds[len(speeds) // 10 :]) if speeds else None,
        "memory_gib": max(memory) if memory else None,
    }


def _records(folder: Path) -> dict[str, Any]:
    """What a run has written about its machine, code, data and precision; missing parts are
    unknown."""
    environment, precision = _json(folder / ENVIRONMENT_FILE), _json(folder / "precision.json")
    if not isinstance(environment, Mapping):
        environment = {}
    table = {"rows": precision} if isinstance(precision, list) else precision
    code, data = environment.get("code"), environment.get("data")
    return {
        "four_bit_share": four_bit_share(table) if isinstance(table, Mapping) else None,
        "card": _card(environment.get("gpus"), environment),
        "commit": _commit(code) if isinstance(code, Mapping) else "",
        "data": json.dumps(data, sort_keys=True) if data else "",
    }


def trained_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings of a resolved configuration, without those of where and how it computed."""
    model = {**config.get("model", {}), "preset": None}  # resolved already, as the preset was then
    now, problems, _ = decode_all(PretrainConfig, {**config, "model": model})
    resolved = config
    if now is not None and not problems:
        resolved = encode(now)
        resolved["model"]["preset"] = config.get("model", {}).get("preset")
    flat = {**_defaults(), **flatten(resolved)}
    return {key: value for key, value in flat.items() if not key.startswith(_ELSEWHERE)}


@cache
def _defaults() -> Mapping[str, Any]:
    """Settings that a run of older code does not name: it had what is the default now. For
    configurations that are no longer valid; others have them from being read."""
    model, data = ModelConfig(), DataConfig(train="")
    sections = {
        each.name: encode(each.default_factory())
        for each in fields(PretrainConfig)
        if each.default_factory is not MISSING
    }
    return flatten({"model": encode(model), "data": encode(data), **sections})


def _commit(code: Mapping[str, Any]) -> str:
    """The commit where the code was exactly that, and otherwise the digest of the code."""
    commit = str(code.get("commit", ""))[:12]
    if commit and not code.get("dirty"):
        return commit
    sources = f"sources {str(code.get('sources', ''))[:12]}" if code.get("sources") else ""
    return ", ".join(part for part in (commit and f"{commit} changed", sources) if part)


def _card(gpus: Any, environment: Any) -> str:
    if isinstance(gpus, list) and gpus:
        first = gpus[0]
        return str(first.get("name", first) if isinstance(first, Mapping) else first)
    return str(environment.get("cpu", "")) if isinstance(environment, Mapping) else ""


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _validation(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[Point]]:
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        for key, value in row.items():
            if forward := _forward_of(key):
                points = found.setdefault((forward, key.partition("/")[2]), {})
                if math.isfinite(float(value)):
                    points[row["step"]] = float(value)
    return {key: sorted(points.items()) for key, points in found.items()}


def _forward_of(key: str) -> str | None:
    """Of FORWARDS, the one that a key of metrics.jsonl is a validation loss of."""
    kind = key.partition("/")[0]
    return next((forward for forward, name in FORWARDS.items() if name == kind), None)


def group_runs(runs: Sequence[RunData]) -> list[Row]:
    """Rows of runs whose settings are the same but for the seed, in order of first appearance.

    A row is called by its runs' common name without the seed: v1-s1 and v1-s2 are v1. Rows of one
    name are told apart by their folders.

    Raises:
        ConfigError: two runs have one seed and one set of settings.
    """
    groups: dict[str, Row] = {}
    problems = []
    for run in runs:
        key = json.dumps(run.settings, sort_keys=True, default=str)
        row = groups.setdefault(key, Row(_SEED.sub("", run.name)))
        if run.seed in row.runs:
            problems.append(
                f"a seed may come once in a row; {run.path} and {row.runs[run.seed].path} have "
                f"seed {run.seed} and the same settings; leave one of them out"
            )
        row.runs[run.seed] = run
    if problems:
        raise ConfigError(problems)
    rows = list(groups.values())
    for strip in (True, False):
        names = Counter(row.label for row in rows)
        for row in rows:
            if names[row.label] > 1:
                path = str(next(iter(row.runs.values())).path)
                row.label = _SEED.sub("", path) if strip else path
    return rows


def differences(row: Row, base: Row) -> list[str]:
    """Settings beside the recipe in which a row differs from the base: no fair comparison then."""
    return apart(beside_recipe(base.settings), beside_recipe(row.settings))


def beside_recipe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of flat settings those that say nothing of low precision."""
    return {key: value for key, value in settings.items() if not key.startswith(RECIPE)}


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """ "setting: its value in one and in the other" of all that differ, of flat settings."""
    return [
        f"{key}: {one.get(key)} and {other.get(key)}"
        for key in sorted(one.keys() | other.keys())
        if one.get(key) != other.get(key)
    ]
