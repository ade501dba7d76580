# SPDX-License-Identifier: Apache-2.0
"""study.yaml: models, rows and seeds, and the runs that they make, in order.

    base: base.yaml            what all runs share: a run file beside study.yaml
    base_row: bf16             what the others are compared with
    models: {NAME: {section: {key: value}}}
    rows: {NAME: {section: {key: value}, file: plan-{model}.yaml}}
    stages: [{models: [...], rows: [...], seeds: [...]}, ...]

A run is the base file, then its model's changes, then its row's; it is called MODEL-ROW-sSEED. In a
stage, models come first, then rows, then seeds: where time ends, rows are missing and not seeds.
`file` is a YAML file of more changes, such as the plan that tools.rank_layers writes; while it is
not there its row is left out, and that is said.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ConfigDict, StrictInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as config_dataclass

from fused_ops.errors import ConfigError
from models.presets import merge_preset
from pretrain.config import PretrainConfig, make_config, start_problems
from pretrain.config_file import apply_overrides, parse_overrides, read_yaml
from pretrain.data.manifest import load_manifest
from pretrain.heartbeat import read_heartbeat
from pretrain.history import METRICS_FILE, read_metrics
from pretrain.pretrain_config import TrainConfig

STUDY_FILE = "study.yaml"
MAX_EPOCHS = 4.0
"""Of the training data: beyond it a run says little about fresh text."""
_STRICT = ConfigDict(extra="forbid")
_OWN = ("name", "seed", "dir")
"""Of the run section, what the study decides."""
Changes = dict[str, Any]


@config_dataclass(kw_only=True, frozen=True, config=_STRICT)
class Stage:
    """Some rows of some models."""

    models: list[str]
    rows: list[str]
    seeds: list[StrictInt]


@config_dataclass(kw_only=True, frozen=True, config=_STRICT)
class StudyConfig:
    """What study.yaml holds."""

    base: str
    base_row: str
    models: dict[str, Changes]
    rows: dict[str, Changes]
    stages: list[Stage]


@dataclass(frozen=True)
class StudyRun:
    """One run: its place in the study and its whole run file."""

    model: str
    row: str
    seed: int
    data: Mapping[str, Any]
    """Plain values, as `python -m pretrain` reads them."""

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.model}-{self.row}-s{self.seed}"

    @property
    def folder(self) -> Path:
        """Where it leaves its files."""
        return Path(self.data["run"]["dir"]) / self.name

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return int(self.data.get("train", {}).get("steps", TrainConfig().steps))


@dataclass
class Study:
    """The runs of a study, in order; `notes` say what was left out."""

    runs: list[StudyRun]
    base_row: str
    notes: list[str] = field(default_factory=list)

    @property
    def models(self) -> list[str]:
        """In order of their first run."""
        return list(dict.fromkeys(run.model for run in self.runs))


def load_study(folder: Path, runs_dir: Path, overrides: Sequence[str] = ()) -> Study:
    """The study in `folder`; its runs lie in `runs_dir`.

    Args:
        folder: holds study.yaml.
        runs_dir: where run folders go.
        overrides: `section.key=value`, for all runs.

    Raises:
        ConfigError: every problem found, of the study and of its runs.
    """
    try:
        data = read_yaml(folder / STUDY_FILE)
        config = TypeAdapter(StudyConfig).validate_python(data)
    except ValidationError as error:
        raise ConfigError(
            f"{folder / STUDY_FILE}: {'.'.join(map(str, one['loc']))}: {one['msg']}; see the head "
            "of pretrain/study/plan.py"
            for one in error.errors()
        ) from None
    problems = _names_problems(config)
    problems += _own_problems("behind DIR", [key for key, _ in parse_overrides(overrides)])
    if problems:
        raise ConfigError(problems)
    base = read_yaml(folder / config.base)
    if not isinstance(base.setdefault("run", {}), Mapping):
        raise ConfigError(f"{folder / config.base}: run must be a section; got {base['run']!r}")
    study = Study([], config.base_row)
    seen: dict[str, tuple[str, str]] = {}
    for stage in config.stages:
        for model in stage.models:
            for row in stage.rows:
                changes = _row_changes(config, folder, model, row, study.notes)
                if changes is None:
                    continue
                for seed in stage.seeds:
                    merged = _merged(base, config.models[model], changes)
                    name = f"{model}-{row}-s{seed}"
                    merged["run"].update(seed=seed, dir=str(runs_dir), name=name)
                    apply_overrides(merged, parse_overrides(overrides))
                    run = StudyRun(model, row, seed, merged)
                    if run.name not in seen:
                        study.runs.append(run)
                    problems += _twice(run, seen.setdefault(run.name, (model, row)))
    if problems or not config.stages:
        raise ConfigError(problems or "stages must name models, rows and seeds; there is none")
    _check_runs(study)
    return study


def _names_problems(config: StudyConfig) -> list[str]:
    problems = []
    if config.base_row not in config.rows:
        problems.append(f"base_row must be one of rows; got {config.base_row!r}")
    for number, stage in enumerate(config.stages):
        for kind, names, known in (
            ("models", stage.models, config.models),
            ("rows", stage.rows, config.rows),
        ):
            problems += [
                f"stages.{number}.{kind}: {name!r} is not among {kind}: {', '.join(known)}"
                for name in names
                if name not in known
            ]
        problems += [
            f"stages.{number}.{kind} must not be empty: no run would come of this stage"
            for kind in ("models", "rows", "seeds")
            if not getattr(stage, kind)
        ]
    for kind, all_changes in (("models", config.models), ("rows", config.rows)):
        for name, changes in all_changes.items():
            run = changes.get("run")
            given = [f"run.{key}" for key in run] if isinstance(run, Mapping) else []
            problems += _own_problems(f"{kind}.{name}", given)
            if "run" in changes and not isinstance(run, Mapping):
                problems.append(f"{kind}.{name}: run must be a section; got {run!r}")
    return problems


def _own_problems(place: str, given: Sequence[str]) -> list[str]:
    return [
        f"{place}: {key} cannot be set: a study calls its runs MODEL-ROW-sSEED, and has their "
        "seeds from stages and their folder from --runs"
        for key in given
        if key in ["run", *(f"run.{own}" for own in _OWN)]
    ]


def _twice(run: StudyRun, other: tuple[str, str]) -> list[str]:
    """A problem where another model and row give the same name."""
    if other == (run.model, run.row):
        return []
    return [
        f"a run's name must tell its model and row; {run.name} is of model {run.model}, row "
        f"{run.row}, and of model {other[0]}, row {other[1]}; rename one of them"
    ]


def _row_changes(
    config: StudyConfig, folder: Path, model: str, row: str, notes: list[str]
) -> Changes | None:
    changes = dict(config.rows[row])
    file = changes.pop("file", None)
    if file is None:
        return changes
    if not isinstance(file, str):
        raise ConfigError(f"rows.{row}.file must be a name of a YAML file; got {file!r}")
    path = folder / file.replace("{model}", model)
    if not path.exists():
        notes.append(
            f"{model}-{row} is left out: it needs {path}; write it with "
            f"python -m tools.rank_layers CONFIG CKPT_DIR --output {path}"
        )
        return None
    return _merged(changes, read_yaml(path))


def _merged(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sections merged key by key; `megatron` inside the model's likewise."""
    merged: dict[str, Any] = copy.deepcopy(dict(base))
    for more in changes:
        for section, values in more.items():
            own = merged.get(section)
            if section == "model" and isinstance(own, Mapping):
                merged[section] = merge_preset(own, values)
            elif isinstance(own, Mapping) and isinstance(values, Mapping):
                merged[section] = {**own, **copy.deepcopy(dict(values))}
            else:
                merged[section] = copy.deepcopy(values)
    return merged


def _check_runs(study: Study) -> None:
    """Each row of each model once; the seed changes nothing of what is checked."""
    problems, checked = [], set()
    for run in study.runs:
        if (run.model, run.row) in checked:
            continue
        checked.add((run.model, run.row))
        try:
            problems += _epoch_problems(run, make_config(run.data))
        except ConfigError as error:
            problems += [f"{run.model}-{run.row}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(dict.fromkeys(problems))


def tokens_of(config: PretrainConfig) -> int:
    """Training tokens of a run."""
    return config.train.total_samples * config.model.seq_length


def _epoch_problems(run: StudyRun, config: PretrainConfig) -> list[str]:
    if not isinstance(config.data.train, str):
        return []
    try:
        available = load_manifest(config.data.train).tokens
    except (OSError, ValueError):
        return []  # the start says what is wrong with the data
    epochs = tokens_of(config) / max(available, 1)
    if epochs <= MAX_EPOCHS:
        return []
    return [
        f"{run.model}-{run.row}: a run of a study reads its data at most {MAX_EPOCHS:g} times; "
        f"{tokens_of(config)} tokens are {epochs:.1f} epochs of {config.data.train}; lower "
        "train.steps"
    ]


def select(runs: Sequence[StudyRun], texts: Sequence[str]) -> list[StudyRun]:
    """The runs whose names contain one of the texts, in the order of the texts; all without texts.

    `dense-30m-nvfp4-s` is one row, where `nvfp4` is many.

    Raises:
        ConfigError: texts that are in no name.
    """
    texts = [text.strip() for text in texts if text.strip()]
    if not texts:
        return list(runs)
    problems = [
        f"--only must be part of a run's name; no run has {text!r}; --list tells the names"
        for text in texts
        if not any(text in run.name for run in runs)
    ]
    if problems:
        raise ConfigError(problems)
    found = {run.name: run for text in texts for run in runs if text in run.name}
    return list(found.values())


def start_problems_of(study: Study) -> list[str]:
    """What this machine lacks for the study: data, packages. One row of each model is asked."""
    found: list[str] = []
    for model in study.models:
        run = next(run for run in study.runs if run.model == model)
        found += [f"{model}: {problem}" for problem in start_problems(make_config(run.data), 1)]
    return found


def has_ended(run: StudyRun) -> bool:
    """Whether the run has ended by itself, after however many steps."""
    return read_heartbeat(run.folder).get("phase") == "done"


def is_finished(run: StudyRun) -> bool:
    """Whether the run has taken its last step and ended by itself."""
    return has_ended(run) and steps_done(run) >= run.steps


def steps_done(run: StudyRun) -> int:
    """Steps that its metrics tell of."""
    rows = read_metrics(run.folder / METRICS_FILE)
    return max((row["step"] for row in rows if "loss" in row), default=0)


def write_run_file(run: StudyRun, folder: Path) -> Path:
    """Writes the run's own file to `folder`/NAME.yaml, to be started or read; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump(dict(run.data), sort_keys=False, width=100))
    return path
