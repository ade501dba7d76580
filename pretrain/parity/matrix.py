# SPDX-License-Identifier: Apache-2.0
"""The matrix: every layout of every case against one process, with the bound of each."""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fused_ops.errors import ConfigError
from pretrain.config import PretrainConfig, layout_start_problems
from pretrain.engine import Engine
from pretrain.parity.layouts import Layout, parse_layout, shares_experts_over_samples
from pretrain.parity.orders import one_code_flipped, summed_in_halves
from pretrain.parity.ranks import Ranks, RanksFailed
from pretrain.parity.toy import SAMPLES, VOCAB, Case, read_case, run_config
from pretrain.parity.trace import Trace, check, read_pieces
from pretrain.parity.train import (
    IN_ORDER,
    ONE_PROCESS,
    Trajectory,
    build,
    save_weights,
    train,
    weights_of,
)
from pretrain.preflight import plan_of

FIGURES = ("loss", "grad_norm", "weight", "update")
FP32_BOUNDS = {"loss": 1e-5, "grad_norm": 1e-5, "weight": 1e-5, "update": 1e-4}
"""An update is far smaller than a weight, and has the rounding of the weight in full."""
BAND_FACTOR = 3.0
"""One more draw of a noise exceeds so many times the largest of five in one case of a thousand."""
_SHIFTS = (1, 3, 5)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far two trainings lie apart; each the largest over steps or weights."""

    loss: float
    """Of losses, relative."""
    grad_norm: float
    """Of gradient norms, relative."""
    weight: float
    """Of single weights, relative to the largest of their tensor."""
    update: float
    """Of the changes of a tensor: root mean square, relative to that of the changes; the mean over
    tensors that change, since the changes of one may be little more than noise."""
    worst: str = ""
    """The tensor whose changes differ most."""

    def exceeds(self, bound: "Difference") -> list[str]:
        """Which of the figures is above the bound."""
        return [name for name in FIGURES if not getattr(self, name) <= getattr(bound, name)]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the matrix."""

    case: Case
    layout: Layout
    difference: Difference | None = None
    """None: it did not run."""
    bound: Difference | None = None
    band: str = ""
    """Where the bound comes from."""
    refused: str = ""
    """Why the pattern or the recipe cannot have this layout: refused before anything starts."""
    failed: str = ""
    """What a rank said when it should have trained."""
    note: str = ""
    """Blocks of the recipe that this layout cuts, so that its codes cannot be those of one process;
    or what a look at every operand found."""

    @property
    def passes(self) -> bool:
        """Whether it ran within its bound."""
        if self.difference is None or self.bound is None:
            return False
        return not self.difference.exceeds(self.bound)


@dataclass
class _Reference:
    """One process: where it starts, where it comes to, and its bands."""

    start: Path
    start_weights: dict[str, torch.Tensor]
    trajectory: Trajectory
    weights: dict[str, torch.Tensor]
    bands: dict[str, Difference] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be compared.

    Args:
        layouts, patterns, recipes: every combination of the three; see `parse_layout`, `read_case`.
        gpus: 0 trains on the CPU with gloo; else at most so many GPUs with NCCL.
        steps: optimizer steps of each training.
        draws: orders of summation that make a band.
        timeout: seconds that the ranks of one number of processes may take.
    """

    layouts: Sequence[str]
    patterns: Sequence[str]
    recipes: Sequence[str]
    gpus: int = 0
    steps: int = 3
    timeout: float = 3600.0
    draws: int = 5

    def combinations(self) -> list[tuple[Case, Layout]]:
        """Every case with every layout."""
        layouts = [parse_layout(name) for name in dict.fromkeys(self.layouts)]
        return [
            (read_case(pattern, recipe, self.steps), layout)
            for pattern in dict.fromkeys(self.patterns)
            for recipe in dict.fromkeys(self.recipes)
            for layout in layouts
        ]

    @property
    def device(self) -> str:
        """Of the ranks."""
        return "cuda" if self.gpus else "cpu"


def refusal(case: Case, layout: Layout, gpus: int) -> str:
    """Why this cannot run, or nothing."""
    if gpus and layout.processes > gpus:
        return f"it needs {layout.processes} GPUs, and {gpus} are given"
    try:
        config: PretrainConfig = run_config(case, layout)
    except ConfigError as error:
        return "; ".join(error.problems)
    return "; ".join(layout_start_problems(config, layout.processes))


def cut_blocks(case: Case, layout: Layout) -> str:
    """What `tools.preflight` would note of blocks that lie across ranks, or nothing."""
    notes = plan_of(run_config(case, layout), VOCAB).notes()
    return next((note for note in notes if "not those of one process" in note), "")


def run(plan: Plan) -> Iterator[Row]:
    """Trains everything and yields a row for each combination: those that are refused, then those
    of each number of processes, the smallest first, as soon as they have trained.

    Raises:
        ConfigError: a name that is no layout, pattern or recipe.
    """
    combinations = plan.combinations()
    _check_names(plan)
    refused = {
        (case, layout.name): refusal(case, layout, plan.gpus) for case, layout in combinations
    }
    wanted = [pair for pair in combinations if not refused[pair[0], pair[1].name]]
    with tempfile.TemporaryDirectory(prefix="parity-") as name:
        folder = Path(name)
        cases = list(dict.fromkeys(case for case, _ in wanted))
        starts = {case: _start(case, plan.device, folder) for case in cases}
        groups = {
            count: _ranks(count, [p for p in wanted if p[1].processes == count], starts, plan)
            for count in sorted({layout.processes for _, layout in wanted})
        }
        references: dict[Case, _Reference] = {}
        for case, layout in combinations:
            if text := refused[case, layout.name]:
                yield Row(case=case, layout=layout, refused=text)
        for count, start in groups.items():
            ranks, failure = start(), "no rank left a result"
            end = time.monotonic() + plan.timeout
            try:
                for case in cases:
                    if case not in references and time.monotonic() < end:
                        references[case] = _reference(case, wanted, starts[case], folder, plan)
                ranks.wait(max(0.0, end - time.monotonic()))
            except RanksFailed as error:
                failure = str(error)
            finally:
                ranks.stop()
            yield from _rows(
                [pair for pair in wanted if pair[1].processes == count],
                references, folder, plan, failure,
            )  # fmt: skip


def _check_names(plan: Plan) -> None:
    """Names that are wrong in every layout are the user's mistake, not a refusal."""
    problems: list[str] = []
    for pattern in plan.patterns:
        for recipe in plan.recipes:
            try:
                run_config(read_case(pattern, recipe, plan.steps), ONE_PROCESS)
            except ConfigError as error:
                problems += error.problems
    if problems:
        raise ConfigError(dict.fromkeys(problems))


def _start(case: Case, device: str, folder: Path) -> Path:
    place = folder / f"start-{_key(case)}"
    save_weights(build(case, ONE_PROCESS, device), place)
    return place


def _key(case: Case) -> str:
    text = f"{case.pattern}-{case.recipe}-{case.dtype}"
    return "".join(f"{ord(c):x}" if c in "*/+|" else c for c in text)


def _ranks(
    count: int,
    pairs: Sequence[tuple[Case, Layout]],
    starts: dict[Case, Path],
    plan: Plan,
) -> Callable[[], Ranks]:
    names = [layout.name for _, layout in pairs]  # one layout after the other: its groups are kept
    tasks = [
        {
            "name": f"{_key(case)}-{layout.name}",
            "case": vars(case),
            "layout": layout.name,
            "start": str(starts[case]),
        }
        for case, layout in sorted(pairs, key=lambda pair: names.index(pair[1].name))
    ]
    request = {"device": plan.device, "tasks": tasks}
    folder = next(iter(starts.values())).parent
    return lambda: Ranks(folder / f"ranks{count}", count, request)


def _reference(
    case: Case, wanted: Sequence[tuple[Case, Layout]], start: Path, folder: Path, plan: Plan
) -> _Reference:
    """One process as it is, and as its rounding alone would have it."""
    engine = build(case, ONE_PROCESS, plan.device)
    trajectory = train(case, engine, start)
    save_weights(engine, folder / f"one-{_key(case)}")
    reference = _Reference(
        start=start,
        start_weights=weights_of(case, engine, start),
        trajectory=trajectory,
        weights=weights_of(case, engine, folder / f"one-{_key(case)}"),
    )
    if case.name == "fp32":
        return reference
    own = [layout for other, layout in wanted if other == case]
    reference.bands["orders"] = _band(
        [_again(case, reference, folder, plan, order=i) for i in range(plan.draws)]
    )
    if any(shares_experts_over_samples(layout, case.pattern) for layout in own):
        tokens = [_again(case, reference, folder, plan, shift=shift) for shift in _SHIFTS]
        reference.bands["tokens"] = _band([*tokens, reference.bands["orders"]])
    return reference


def _again(
    case: Case,
    reference: _Reference,
    folder: Path,
    plan: Plan,
    *,
    order: int | None = None,
    shift: int = 0,
    flip: int | None = None,
) -> Difference:
    """One process with another order of summation, a flipped code, or samples in other places."""
    engine = build(case, ONE_PROCESS, plan.device)
    places = tuple((sample + shift) % SAMPLES for sample in IN_ORDER)
    with ExitStack() as changed:
        if order is not None:
            changed.enter_context(summed_in_halves(order))
        if flip is not None:
            changed.enter_context(one_code_flipped(flip))
        trajectory = train(case, engine, reference.start, places)
    place = folder / f"again-{_key(case)}-{order}-{shift}-{flip}"
    save_weights(engine, place)
    return compare(reference, trajectory, weights_of(case, engine, place))


def compare(
    reference: _Reference, trajectory: Trajectory, weights: dict[str, torch.Tensor]
) -> Difference:
    """Largest differences of a training from the reference."""
    losses = zip(trajectory.losses, reference.trajectory.losses)
    norms = zip(trajectory.grad_norms, reference.trajectory.grad_norms)
    weight, updates = 0.0, {}
    for name, expected in reference.weights.items():
        difference = (weights[name] - expected).double()
        moved = (expected - reference.start_weights[name]).double()
        weight = max(weight, _ratio(difference.abs().max(), expected.abs().max()))
        if bool(moved.any()):  # a 16-bit weight of 1 may not move at all; `weight` judges it
            updates[name] = _ratio(difference.norm(), moved.norm())
    return Difference(
        loss=max(abs(a - b) / abs(b) for a, b in losses),
        grad_norm=max(abs(a - b) / abs(b) for a, b in norms),
        weight=weight,
        update=sum(updates.values()) / max(len(updates), 1),
        worst=max(updates, key=lambda name: updates[name], default=""),
    )


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> float:
    """part / whole; 0 of 0 is 0, and NaN stays."""
    if float(part) == 0.0:
        return 0.0
    return float(part) / float(whole) if float(whole) else math.inf


def _band(draws: Sequence[Difference]) -> Difference:
    return _difference({name: max(getattr(d, name) for d in draws) for name in FIGURES})


def _difference(figures: dict[str, float]) -> Difference:
    return Difference(
        loss=figures["loss"],
        grad_norm=figures["grad_norm"],
        weight=figures["weight"],
        update=figures["update"],
    )


def bound_of(case: Case, layout: Layout, bands: dict[str, Difference]) -> tuple[Difference, str]:
    """What a layout may differ by, and why."""
    if case.name == "fp32":
        return _difference(FP32_BOUNDS), "fp32"
    kind = "tokens" if shares_experts_over_samples(layout, case.pattern) else "orders"
    return _wide(bands[kind]), kind


def _wide(band: Difference) -> Difference:
    return _difference(
        {name: max(FP32_BOUNDS[name], BAND_FACTOR * getattr(band, name)) for name in FIGURES}
    )


def _looked_at(row: Row, reference: _Reference, folder: Path, plan: Plan) -> Row:
    """A row out of its band, judged by every operand of the training, which is trained again.

    Between FP32 activations rounding is rare flips of single codes, and each takes the training
    elsewhere: a few orders of sums may have seen none. If every rank quantizes as one process would
    the same tensors, and these agree until a first code differs, the measure is what one flipped
    code does in one process.
    """
    case, layout = row.case, row.layout
    one, place = Trace(), folder / f"trace-{_key(case)}-{layout.name}"
    task = {
        "name": "seen",
        "case": vars(case),
        "layout": layout.name,
        "start": str(reference.start),
    }
    ranks = Ranks(place, layout.processes, {"device": plan.device, "tasks": [task], "trace": True})
    try:
        engine = build(case, ONE_PROCESS, plan.device)
        one.attach(engine)
        train(case, engine, reference.start)
        ranks.wait(plan.timeout)
    except RanksFailed as error:
        return replace(row, note=str(error))
    finally:
        ranks.stop()
    trajectory = Trajectory(**json.loads((place / "seen.json").read_text()))
    again = compare(reference, trajectory, weights_of(case, engine, place / "seen"))
    if again != row.difference:
        return replace(row, note=f"trained again, with whole operands, it comes to {again}")
    found = check(one, read_pieces(place / "seen", layout.processes), FP32_BOUNDS["weight"])
    if found.fault or not found.first:
        return replace(row, note=found.fault or "no code differs from those of one process")
    if "flips" not in reference.bands:
        draws = [_again(case, reference, folder, plan, flip=i) for i in range(plan.draws)]
        reference.bands["flips"] = _band(draws)
    note = f"{found.operands} operands are those of one process; the first flip: {found.first}"
    return replace(row, bound=_wide(reference.bands["flips"]), band="flips", note=note)


def _can_be_looked_at(row: Row) -> bool:
    """Whether a row is out of its band where one flip is enough for that: between activations in
    FP32, in a recipe with codes, where every layer's tokens have an order."""
    codes = row.case.dtype == "fp32" and row.case.name != "fp32"
    return codes and not (row.passes or row.note or "E" in row.case.pattern)


def _rows(
    pairs: Sequence[tuple[Case, Layout]],
    references: dict[Case, _Reference],
    folder: Path,
    plan: Plan,
    failure: str,
) -> Iterator[Row]:
    """What the ranks of one number of processes left, beside one process."""
    reader: tuple[Case, Engine] | None = None
    for case, layout in pairs:
        place = folder / f"ranks{layout.processes}" / f"{_key(case)}-{layout.name}"
        report = place.with_name(place.name + ".json")
        if not report.exists():
            yield Row(case=case, layout=layout, failed=failure)
            continue
        if case not in references:
            late = f"its reference was not begun within {plan.timeout:.0f} s"
            yield Row(case=case, layout=layout, failed=late)
            continue
        trajectory = Trajectory(**json.loads(report.read_text()))
        if reader is None or reader[0] != case:
            reader = case, build(case, ONE_PROCESS, plan.device)
        bound, kind = bound_of(case, layout, references[case].bands)
        found = compare(references[case], trajectory, weights_of(case, reader[1], place))
        note = cut_blocks(case, layout)
        row = Row(case=case, layout=layout, difference=found, bound=bound, band=kind, note=note)
        yield _looked_at(row, references[case], folder, plan) if _can_be_looked_at(row) else row
