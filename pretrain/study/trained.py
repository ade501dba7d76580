# SPDX-License-Identifier: Apache-2.0
"""Whether the runs that are there were trained as study.yaml says now.

A run is known by the name of its folder. Where study.yaml, or what is given behind DIR, has changed
since, the folder holds another run than the one that it is taken for. Where data lies, where runs
go and what computes them may differ: runs of several machines are put together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pretrain.comparison.runs import RunData, apart, read_run, trained_settings
from pretrain.config import make_config
from pretrain.config_file import encode
from pretrain.history import METRICS_FILE, read_metrics
from pretrain.study.plan import StudyRun

_FEW = 4
Trained = tuple[StudyRun, RunData]
"""A run of the study, and what its folder says."""


def placeless(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings with the data's folders left out; how many sources there are, and their
    weights, stay."""
    found = dict(settings)
    for key, value in settings.items():
        if key == "data.train" and isinstance(value, list):
            found[key] = [one.get("weight", 1.0) for one in value]
        elif key == "data.train" or key.split(".")[:2] == ["data", "valid"]:
            found[key] = value is not None
    return found


def read_all(runs: Iterable[StudyRun]) -> list[Trained]:
    """The runs that have taken a step, each with what its folder says, whichever machine it was
    trained on.

    Raises ConfigError for a folder that cannot be read.
    """
    found = []
    for run in runs:
        rows = read_metrics(run.folder / METRICS_FILE)
        if any("loss" in row for row in rows):
            there = read_run(run.folder, rows)
            found.append((run, replace(there, settings=placeless(there.settings))))
    return found


def changes(trained: Sequence[Trained]) -> dict[str, list[str]]:
    """{run: ["setting: value there and value of the study now", ...]} of those that differ."""
    wanted: dict[tuple[str, str], dict[str, Any]] = {}
    found = {}
    for run, there in trained:
        key = (run.model, run.row)
        if key not in wanted:
            wanted[key] = placeless(trained_settings(encode(make_config(run.data))))
        texts = apart(
            {**there.settings, "run.seed": there.seed},
            {**wanted[key], "run.seed": run.data["run"]["seed"]},
        )
        if texts:
            found[run.name] = texts
    return found


def problems_of(trained: Sequence[Trained]) -> list[str]:
    """A problem for each row whose folders hold runs of other settings than the study's."""
    by_row: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    by_name = {run.name: run for run, _ in trained}
    for name, texts in changes(trained).items():
        row = f"{by_name[name].model}-{by_name[name].row}"
        by_row.setdefault((row, tuple(texts)), []).append(name)
    return [
        f"a run must have been trained as study.yaml has it now; {', '.join(names)} in "
        f"{by_name[names[0]].folder.parent} and {row} of the study have {told(texts)}; set it "
        "back, in study.yaml or behind DIR, or move the folders away and train again"
        for (row, texts), names in by_row.items()
    ]


def told(texts: Sequence[str]) -> str:
    """A few of the differences in one line."""
    more = len(texts) - _FEW
    return "; ".join(texts[:_FEW]) + (f" and {more} more" if more > 0 else "")
