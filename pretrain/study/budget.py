# SPDX-License-Identifier: Apache-2.0
"""What a study costs: rates measured with as many runs beside each other as there will be."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fused_ops.errors import ConfigError
from pretrain.config import make_config
from pretrain.history import METRICS_FILE, read_metrics
from pretrain.study.place import Places, run_all
from pretrain.study.plan import Study, StudyRun, steps_done, tokens_of

BUDGET_FILE = "budget.json"


@dataclass(frozen=True)
class Cost:
    """One run of the study, and the time that it still takes."""

    run: StudyRun
    tokens: int
    """That are still to be trained on."""
    rate: float | None
    """Tokens/s of one run with its neighbours; None: its model was not measured."""
    measured: bool
    """Whether this row itself was measured, not a slower one of its model."""

    @property
    def hours(self) -> float:
        """Of one slot."""
        return self.tokens / self.rate / 3600.0 if self.rate else 0.0


def trial_rows(study: Study) -> list[str]:
    """What is measured where nobody says: the base row and the first other one, since steps in 4
    bits have taken up to 1.3 times as long as the base row's at 30 M parameters (STUDY.md)."""
    return list(dict.fromkeys([study.base_row, *(run.row for run in study.runs)]))[:2]


def measure(
    study: Study,
    rows: Sequence[str],
    places: Places,
    folder: Path,
    *,
    steps: int,
    minutes: float | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, dict[str, float]]:
    """{model: {row: tokens/s of one run}}, written to `folder`/budget.json as it grows.

    Each model and row trains for `steps` steps, one copy on every slot of the first device; the
    median step of the second half counts. Evaluations, checkpoints, monitored steps and resets of
    weights that oscillate are left out of it: the study takes as much longer as they take.
    """
    path = folder / BUDGET_FILE
    rates = read_rates(folder)
    first = Places(places.gpus[:1], places.per_device)
    for model in study.models:
        for row in rows:
            run = next((r for r in study.runs if (r.model, r.row) == (model, row)), None)
            if run is None or row in rates.get(model, {}):
                continue
            copies = [_trial(run, number, steps, folder) for number in range(len(first.slots))]
            outcome = run_all(copies, first, folder / "budget", minutes=minutes, tell=tell)
            if outcome.stopped or outcome.not_started:
                tell(f"{model}-{row}: not measured, time is over")
                return rates
            if outcome.failed:
                continue
            speeds = [_rate(copy.folder) for copy in copies]
            rates.setdefault(model, {})[row] = statistics.fmean(speeds)
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(rates, indent=1) + "\n")
    return rates


def _trial(run: StudyRun, number: int, steps: int, folder: Path) -> StudyRun:
    data = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in run.data.items()
    }
    data["run"] = {**data["run"], "dir": str(folder / "budget"), "seed": number}
    data["run"]["name"] = f"{run.model}-{run.row}-s{number}"
    data["train"] = {**data.get("train", {}), "steps": steps, "eval_interval": 0}
    data["train"]["profile_steps"] = []
    data["optimizer"] = {**data.get("optimizer", {}), "warmup_steps": None}
    data["optimizer"]["oscillation_reset"] = None
    data["data"] = {**data["data"], "valid": None}
    data["checkpoint"] = {"interval": 0, "keep_last": 1}
    data["monitor"] = {}
    data["log"] = {"report": False}
    return StudyRun(run.model, run.row, number, data)


def _rate(folder: Path) -> float:
    rows = [row for row in read_metrics(folder / METRICS_FILE) if "tokens_per_s" in row]
    return statistics.median(row["tokens_per_s"] for row in rows[len(rows) // 2 :])


def costs(study: Study, rates: Mapping[str, Mapping[str, float]]) -> list[Cost]:
    """What is left of each run; a row that was not measured takes its model's slowest rate."""
    found = []
    for run in study.runs:
        config = make_config(run.data)
        total, known = tokens_of(config), rates.get(run.model, {})
        left = round(total * max(0.0, 1 - steps_done(run) / max(run.steps, 1)))
        rate = known.get(run.row) or min(known.values(), default=None)
        found.append(Cost(run, left, rate, run.row in known))
    return found


def render(found: Sequence[Cost], places: Places, hours: float | None = None) -> str:
    """The budget: one line a model and row, hours of one slot and of the whole, what fits."""
    slots = len(places.slots)
    groups: dict[tuple[str, str], list[Cost]] = {}
    for cost in found:
        groups.setdefault((cost.run.model, cost.run.row), []).append(cost)
    head = ("model", "row", "runs", "tokens left", "tokens/s", "hours a run", "hours so far")
    lines: list[Sequence[str]] = [head]
    total, fits = 0.0, 0
    for (model, row), members in groups.items():
        total += sum(cost.hours for cost in members) / slots
        rate = members[0].rate
        speed = "?" if rate is None else f"{rate:.0f}{'' if members[0].measured else ' *'}"
        longest = max(cost.hours for cost in members)
        tokens = sum(cost.tokens for cost in members)
        late = hours is not None and total > hours
        fits += not late
        place = f"{total:.2f}" + (" too late" if late else "")
        lines.append((model, row, str(len(members)), f"{tokens:,}", speed, f"{longest:.2f}", place))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths)).rstrip() for line in lines]
    text.append("")
    text.append(f"{len(found)} runs, {slots} at once: {total:.2f} hours of training")
    if any(cost.rate and not cost.measured for cost in found):
        text.append(
            "* not measured: counted at the slowest rate measured of that model; a row that is "
            "slower still takes longer: name it with --budget-rows"
        )
    if any(cost.rate is None for cost in found):
        text.append("? not measured: counted as nothing; name its model's rows with --budget-rows")
    if hours is not None:
        text.append(f"{fits} of {len(groups)} rows end within {hours:g} hours; cut rows, not seeds")
    return "\n".join(text)


def read_rates(folder: Path) -> dict[str, dict[str, float]]:
    """What `measure` has written; {} without it. Raises ConfigError where it is damaged."""
    path = folder / BUDGET_FILE
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
        return {m: {row: float(rate) for row, rate in rows.items()} for m, rows in found.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} must hold the rates of models and rows; it cannot be read ({error}); delete "
            "it, and --budget measures them again"
        ) from None
