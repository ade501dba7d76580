# SPDX-License-Identifier: Apache-2.0
"""results.json: what the finished runs of a study came to, small enough to ship.

    {"format": "nibble study results", "version": 1, "base_row": "bf16",
     "models": [{"name", "steps", "tokens", "data_tokens", "tokens_per_parameter",
       "starts": [[row, other row, [seeds], relative difference of first losses], ...],
       "rows": [{"row", "precision", "four_bit", "four_bit_all", "low_bit", "numerics",
         "runs": [{"seed", "card", "commit", "tokens_per_s", "memory_gib",
                   "losses": [[step, tokens, mean loss], ...],
                   "validation": [[step, tokens, own forward, BF16 forward or null], ...]}]}]}]}

Tables and figures are made from this file alone, whether the runs are still there or not. Training
losses are means over a forty-eighth of the run. `precision` is what differs from the defaults, also
in resets of weights that oscillate, `four_bit` the share of the FLOPs of the block linears' GEMMs
whose operands both have 4 bits, over the whole run, `four_bit_all` that of all matrix products
(attention, routers, output layer too),
`low_bit` that of the block linears' whose operands have at most 8 bits,
`numerics` of the first seed (pretrain/study/evidence.py). `starts` tells whether rows with one
forward began alike (pretrain/study/starts.py).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from fused_ops.errors import ConfigError
from fused_ops.keys import GEMMS
from fused_ops.recipe import bits
from models.flops import fixed_parts
from pretrain.comparison.compare import tokens_per_parameter
from pretrain.comparison.gaps import mean_to_the_end, parts
from pretrain.comparison.reference import precision_key, settings_of
from pretrain.comparison.runs import Row, RunData, differences
from pretrain.config import PretrainConfig, make_config, precision_plan
from pretrain.data.manifest import DataError, Manifest, load_manifest
from pretrain.study.evidence import evidence
from pretrain.study.plan import Study, StudyRun, has_ended, tokens_of
from pretrain.study.starts import starts
from pretrain.study.trained import Trained, problems_of, read_all

FORMAT, VERSION = "nibble study results", 1
RESULTS_FILE = "results.json"
REFERENCE_ROW = "nvfp4"
"""V1, which gaps are divided by."""
_BINS = 48


@dataclass
class StudyRow:
    """One row of one model: its finished runs and what is known of its precision."""

    row: Row
    precision: Mapping[str, Any]
    four_bit: float
    numerics: Mapping[str, Any]
    four_bit_all: float | None = None
    """None in a file that does not tell it."""
    low_bit: float = 0.0


@dataclass
class ModelResults:
    """The rows of one model, the base among them."""

    name: str
    steps: int
    tokens: int
    data_tokens: int | None
    """Of the training data; None where the data was not there when the file was written."""
    tokens_per_parameter: float
    starts: Sequence[Sequence[Any]] = ()
    rows: list[StudyRow] = field(default_factory=list)

    @property
    def epochs(self) -> float | None:
        """How often the training data was read."""
        return self.tokens / self.data_tokens if self.data_tokens else None

    def find(self, label: str) -> StudyRow | None:
        """The row of this name."""
        return next((row for row in self.rows if row.row.label == label), None)


def write_results(study: Study, path: Path) -> int:
    """Writes the finished runs of the study to `path`; returns how many there are.

    Nothing is written where there are none. Where the training data is not here, how many tokens
    it has is taken from the file before.

    Raises:
        ConfigError: runs that were trained otherwise than study.yaml says; rows that differ in more
            than their precision, or that read other data; runs in the file that have not finished
            here, which would be lost.
    """
    ended = read_all(run for run in study.runs if has_ended(run))
    # What was trained otherwise may be why runs seem lost: that alone is said first.
    if problems := problems_of(ended):
        raise ConfigError(problems)
    finished = [(run, there) for run, there in ended if there.finished]
    if not finished:
        return 0
    before = read_results(path)[1] if path.exists() else []
    if problems := _lost([run for run, _ in finished], before, path):
        raise ConfigError(problems)
    models: list[dict[str, Any]] = []
    for model in study.models:
        of_model = [(run, there) for run, there in finished if run.model == model]
        if of_model:
            known = next((one.data_tokens for one in before if one.name == model), None)
            models.append(_model(model, of_model, study.base_row, known, problems))
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    data = {"format": FORMAT, "version": VERSION, "base_row": study.base_row, "models": models}
    path.write_text(json.dumps(data, separators=(",", ":")).replace('{"row"', '\n{"row"') + "\n")
    return len(finished)


def _lost(finished: Sequence[StudyRun], before: Sequence[ModelResults], path: Path) -> list[str]:
    """A problem where the file has runs that are not here."""
    here = {run.name for run in finished}
    gone = [
        run.name
        for model in before
        for one in model.rows
        for run in one.row.runs.values()
        if run.name not in here
    ]
    if not gone:
        return []
    return [
        f"a report must not lose runs; {path} has {len(gone)} that have not finished in "
        f"{finished[0].folder.parent} ({_few(gone)}); put their folders there too, or delete the "
        "file to begin anew"
    ]


def _model(
    model: str, finished: Sequence[Trained], base_row: str, known: int | None, problems: list[str]
) -> dict[str, Any]:
    runs = [run for run, _ in finished]
    names = list(dict.fromkeys(run.row for run in runs))
    rows: dict[str, Row] = {}
    for run, there in finished:
        rows.setdefault(run.row, Row(run.row)).runs[run.seed] = there
    problems += _data_problems(model, [there for _, there in finished])
    base = rows.get(base_row)
    for name, row in rows.items():
        if base is not None and (texts := differences(row, base)):
            problems.append(
                f"{model}-{name} must differ from {base_row} in precision alone (and in resets of "
                f"weights that oscillate); it does in {'; '.join(texts)}"
            )
    first = {name: next(run for run in runs if run.row == name) for name in names}
    configs = {name: make_config(run.data) for name, run in first.items()}
    config = configs[names[0]]
    return {
        "name": model,
        "steps": runs[0].steps,
        "tokens": tokens_of(config),
        "data_tokens": held.tokens if (held := _manifest(config)) else known,
        "tokens_per_parameter": round(tokens_per_parameter(rows[names[0]]), 3),
        "starts": starts(configs, rows),
        "rows": [_row(first[name], configs[name], rows[name]) for name in names],
    }


def _data_problems(model: str, runs: Sequence[RunData]) -> list[str]:
    """One where runs have recorded other contents of their data than the first that has."""
    known = [run for run in runs if run.data]
    other = [run.name for run in known if run.data != known[0].data]
    if not other:
        return []
    return [
        f"runs of {model} must have read the same data; {_few(other)} read other tokens than "
        f"{known[0].name} (data in environment.json); train them on the same shards, or move "
        "their folders away"
    ]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _manifest(config: PretrainConfig) -> Manifest | None:
    """Of the training data; None where it is not here, or is a blend."""
    try:
        return load_manifest(config.data.train) if isinstance(config.data.train, str) else None
    except DataError:
        return None


def _row(first: StudyRun, config: PretrainConfig, row: Row) -> dict[str, Any]:
    """`first`: the run of its first seed, `config` what that trained."""
    held = _manifest(config)
    vocab_size = held.vocab_size if held else None
    four_bit, four_bit_all, low_bit = shares(config, vocab_size)
    return {
        "row": first.row,
        "precision": precision_key(row.settings),
        "four_bit": round(four_bit, 4),
        "four_bit_all": None if four_bit_all is None else round(four_bit_all, 4),
        "low_bit": round(low_bit, 4),
        "numerics": evidence(first.folder, first.steps),
        "runs": [_run(row.runs[seed]) for seed in sorted(row.runs)],
    }


def _run(run: RunData) -> dict[str, Any]:
    own, bf16 = run.validation.get(("own", ""), []), dict(run.validation.get(("bf16", ""), []))
    return {
        "seed": run.seed,
        "card": run.card,
        "commit": run.commit,
        "tokens_per_s": None if run.tokens_per_s is None else round(run.tokens_per_s),
        "memory_gib": run.memory_gib,
        "losses": [
            [step, run.tokens.get(step, step), round(loss, 5) if math.isfinite(loss) else None]
            for step, loss in _binned(run)
        ],
        "validation": [
            [step, run.tokens.get(step, step), loss, bf16.get(step)] for step, loss in own
        ],
    }


def _binned(run: RunData) -> list[tuple[int, float]]:
    losses = dict(run.losses)
    return [
        (part[-1], mean_to_the_end([losses[step] for step in part]))
        for part in parts(list(losses), run.steps, _BINS)
    ]


def shares(
    config: PretrainConfig, vocab_size: int | None = None
) -> tuple[float, float | None, float]:
    """Shares of FLOPs over the run: with both operands in 4 bits (of the block linears' GEMMs, of
    all matrix products: attention's, routers' and the output layer's too), and with both in 8 or
    fewer, of the block linears'.

    The schedule counts by samples; causal attention counts half of its scores; scans are no GEMMs.
    `vocab_size` is the data's, for a model that takes it; without any there is no second share.
    """
    known = config.model.vocab_size or vocab_size
    plan, total = precision_plan(config, known), config.train.total_samples
    marks = sorted({0, total, *(min(mark, total) for mark in plan.boundaries or [])})
    linears = len(GEMMS) * sum(module.flops for module in plan.modules)
    others = len(GEMMS) * sum(part.flops for part in fixed_parts(plan.shape) if part.gemm)
    found = {4: 0.0, 8: 0.0}
    for first, last in pairwise(marks):
        plan.consumed_samples = first
        recipes = plan.recipes()
        for module in plan.modules:
            for gemm in GEMMS:
                widest = max(map(bits, recipes[module.name].specs(gemm)))
                for most in found:
                    found[most] += (widest <= most) * module.flops * (last - first) / total
    every = found[4] / max(linears + others, 1) if known else None
    return found[4] / max(linears, 1), every, found[8] / max(linears, 1)


def read_results(path: Path) -> tuple[str, list[ModelResults]]:
    """(name of the base row, models). Raises ConfigError where the file is missing or damaged."""
    try:
        data = json.loads(path.read_text())
        if (data["format"], data["version"]) != (FORMAT, VERSION):
            raise ValueError(f"format {data['format']!r}, version {data['version']}")
        return str(data["base_row"]), [_read_model(model) for model in data["models"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} must be {FORMAT!r}, version {VERSION} ({type(error).__name__}: {error}); "
            "python -m tools.study DIR --report FILE writes it from finished runs"
        ) from None


def _read_model(data: Mapping[str, Any]) -> ModelResults:
    known = {key: value for key, value in data.items() if key != "rows"}
    found = ModelResults(**known)
    for one in data["rows"]:
        row = Row(one["row"])
        for run in one["runs"]:
            row.runs[run["seed"]] = _read_run(run, one, found)
        found.rows.append(
            StudyRow(
                row=row,
                precision=one["precision"],
                four_bit=one["four_bit"],
                numerics=one["numerics"],
                four_bit_all=one.get("four_bit_all"),
                low_bit=one.get("low_bit", one["four_bit"]),
            )
        )
    return found


def _read_run(run: Mapping[str, Any], row: Mapping[str, Any], model: ModelResults) -> RunData:
    losses = [(s, math.nan if loss is None else loss) for s, _, loss in run["losses"]]
    own = [(s, loss) for s, _, loss, _ in run["validation"]]
    validation = {("own", ""): own} if own else {}
    bf16 = [(s, value) for s, _, _, value in run["validation"] if value is not None]
    if bf16:
        validation["bf16", ""] = bf16
    return RunData(
        path=Path(),
        name=f"{model.name}-{row['row']}-s{run['seed']}",
        seed=run["seed"],
        steps=model.steps,
        settings=settings_of(row["precision"]),
        losses=losses,
        tokens={s: tokens for s, tokens, *_ in [*run["losses"], *run["validation"]]},
        validation=validation,
        tokens_per_s=run["tokens_per_s"],
        memory_gib=run["memory_gib"],
        four_bit_share=row["four_bit"],
        card=run["card"],
        commit=run["commit"],
    )
