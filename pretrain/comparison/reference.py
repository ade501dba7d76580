# SPDX-License-Identifier: Apache-2.0
"""Reference gaps that ship as data: is the gap of this run what others have seen?

A reference file is JSON, one row of runs of one model:

    {"format": "nibble reference gaps", "version": 1,
     "name": "dense-30m/nvfp4",            model and row
     "precision": {"recipe": "nvfp4", ...},  what identifies the row: `precision_key`, of resets of
                                           weights that oscillate "optimizer.oscillation_reset.*"
     "tokens_per_parameter": 5.2,          at the end; parameters without embeddings
     "source": "...",                      where it was measured: card, commit, or a publication
     "runs": [{"seed": 1, "gaps": [[tokens, own, bf16], ...]}, ...]}

Gaps are in per cent against the BF16 run of the same seed; null where a forward was not validated.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fused_ops.errors import ConfigError
from fused_ops.recipe import RECIPES, recipe_from_dict
from models.precision_config import PrecisionConfig
from pretrain.checkpoint.compare import flatten
from pretrain.comparison.gaps import (
    Interval,
    broken_seeds,
    final_gaps,
    interval,
    paired_gaps,
    t95,
)
from pretrain.comparison.runs import RECIPE, Row
from pretrain.config_file import apply_overrides, encode

FORMAT, VERSION = "nibble reference gaps", 1
_SAME_LENGTH = 2.0
_SECTION = "precision."
# Of the section, what says how and where the same numbers are computed.
_IGNORED = ("amax_scope", "check_finite", "backend", "communicate", "allow_reference")


@dataclass(frozen=True)
class Reference:
    """The final gaps of one reference row."""

    name: str
    precision: Mapping[str, Any]
    tokens_per_parameter: float
    source: str
    gaps: Mapping[str, Sequence[float]]
    """By forward, the last gap of each seed."""


def precision_key(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What of a row's settings decides how low precision changes its numbers, without what is as by
    default: of the precision section, which is left out of the names, and of resets."""
    default = flatten(encode(PrecisionConfig()), _SECTION)
    return {
        key.removeprefix(_SECTION): value
        for key, value in sorted(settings.items())
        if key.startswith(RECIPE)
        and value not in (None, [], {})
        and value != default.get(key)
        and key.split(".")[1] not in _IGNORED
    }


def settings_of(key: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that `precision_key` gives this of."""
    return {k if k.startswith(RECIPE) else _SECTION + k: value for k, value in key.items()}


def _by_arithmetic(key: Mapping[str, Any]) -> dict[str, Any]:
    """The key with built-in names for a run's own recipes that compute what these do."""
    own: dict[str, Any] = {"recipes": {}}
    apply_overrides(own, [(path, v) for path, v in key.items() if path.startswith("recipes.")])
    names: dict[str, str] = {}
    for name, operands in own["recipes"].items():
        with suppress(ConfigError, TypeError):  # of other code, or damaged: alike by name alone
            made = recipe_from_dict({"name": name, **operands})
            alike = [known for known, one in RECIPES.items() if replace(one, name=name) == made]
            if alike:
                names[name] = alike[0]
    return {
        path: _renamed(value, names, path)
        for path, value in key.items()
        if path.split(".")[0] != "recipes" or path.split(".")[1] not in names
    }


def _renamed(value: Any, names: Mapping[str, str], path: str) -> Any:
    """A setting, in which recipes have other names."""
    if isinstance(value, list):
        return [_renamed(one, names, path) for one in value]
    if isinstance(value, Mapping):
        return {key: _renamed(one, names, key) for key, one in value.items()}
    return names.get(value, value) if path.split(".")[-1] == "recipe" else value


def read_references(folder: Path) -> list[Reference]:
    """All reference files of a folder. Raises ConfigError for one that is damaged."""
    found, problems = [], []
    for path in sorted(folder.rglob("*.json")):
        try:
            data = json.loads(path.read_text())
            rows = data if isinstance(data, list) else [data]
            found += [_reference(row) for row in rows]
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            problems.append(
                f"{path} must be {FORMAT!r}, version {VERSION} ({type(error).__name__}: {error}); "
                "write it with --write-reference"
            )
    if not found and not problems:
        problems.append(f"{folder} must hold reference files (*.json); there is none")
    if problems:
        raise ConfigError(problems)
    return found


def _reference(data: Mapping[str, Any]) -> Reference:
    if (data["format"], data["version"]) != (FORMAT, VERSION):
        raise ValueError(f"format {data['format']!r}, version {data['version']}")
    if not 0 < float(data["tokens_per_parameter"]) < math.inf:
        raise ValueError(f"tokens_per_parameter {data['tokens_per_parameter']!r}")
    last = [run["gaps"][-1] for run in data["runs"]]
    for _, *gaps in last:
        if broken := [gap for gap in gaps if gap is not None and not math.isfinite(gap)]:
            raise ValueError(f"gap {broken[0]}")
    return Reference(
        name=str(data["name"]),
        precision=dict(data["precision"]),
        tokens_per_parameter=float(data["tokens_per_parameter"]),
        source=str(data["source"]),
        gaps={
            forward: [float(point[i]) for point in last if point[i] is not None]
            for i, forward in ((1, "own"), (2, "bf16"))
        },
    )


def write_reference(
    row: Row, base: Row, name: str, tokens_per_parameter: float, folder: Path
) -> Path | None:
    """Writes the gaps of a row of finished runs; None where there are none."""
    seeds = sorted(final_gaps(row, base))
    runs = []
    for seed in seeds:
        own = paired_gaps(row, base, "own")[seed]
        bf16 = dict(paired_gaps(row, base, "bf16").get(seed, []))
        tokens = row.runs[seed].tokens
        points = [
            [tokens.get(step, step), round(gap, 5), _maybe_rounded(bf16.get(step))]
            for step, gap in own
        ]
        runs.append({"seed": seed, "gaps": points})
    if not runs:
        return None
    first = row.runs[seeds[0]]
    data = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "precision": precision_key(row.settings),
        "tokens_per_parameter": round(tokens_per_parameter, 2),
        "source": f"{first.card or 'card'}, commit {first.commit or 'not recorded'}",
        "runs": runs,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name.replace('/', '-')}.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def _maybe_rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def judge(
    row: Row, base: Row, tokens_per_parameter: float, references: Sequence[Reference]
) -> list[str]:
    """Sentences: the row's final gap beside the references of the same precision, nearest first.

    Where a reference has several seeds, "as expected" means inside the 95 % interval in which the
    mean of so many new seeds falls; where it has one, or was trained more than twice or less than
    half as long for its size (gaps grow with training), only the difference is told.
    """
    if broken := broken_seeds(row):
        return [f"{row.label}: no finite end in {len(broken)} of {len(row.runs)} seeds: not judged"]
    key = precision_key(row.settings)
    arithmetic = _by_arithmetic(key)
    near = sorted(
        (ref for ref in references if _by_arithmetic(ref.precision) == arithmetic),
        key=lambda ref: abs(math.log(ref.tokens_per_parameter / tokens_per_parameter)),
    )
    if not near:
        return [f"{row.label}: no reference has its precision {json.dumps(key)}"]
    said = []
    for forward in ("own", "bf16"):
        own = interval(final_gaps(row, base, forward))
        if own is None:
            continue
        with_gaps = [ref for ref in near if ref.gaps[forward]]
        label = f"{row.label} at {tokens_per_parameter:.3g} tokens a parameter"
        said += [_sentence(label, forward, own, ref, tokens_per_parameter) for ref in with_gaps[:3]]
    return said or [f"{row.label}: no seed has finished together with the base's"]


def _sentence(
    label: str, forward: str, own: Interval, reference: Reference, tokens_per_parameter: float
) -> str:
    gaps, seeds = reference.gaps[forward], len(own.seeds)
    mean = statistics.fmean(gaps)
    times = reference.tokens_per_parameter / tokens_per_parameter
    place = f"{reference.name} at {reference.tokens_per_parameter:g}"
    text = f"{label}, {forward} forward: {own.mean:+.2f} %; {place}: {mean:+.2f} %"
    if len(gaps) < 2:
        return f"{text} (one run: no interval; {reference.source})"
    spread = statistics.stdev(gaps) * math.sqrt(1 / len(gaps) + 1 / seeds)
    half = t95(len(gaps) - 1) * spread
    inside = abs(own.mean - mean) <= half
    verdict = "as expected" if inside else "larger" if own.mean > mean else "smaller"
    if not 1 / _SAME_LENGTH <= times <= _SAME_LENGTH:
        verdict = f"no verdict, it was trained {times:.2g} times as long for its size"
    return f"{text} +- {half:.2f} for {seeds} seeds: {verdict} ({reference.source})"
