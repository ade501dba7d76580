# SPDX-License-Identifier: Apache-2.0
"""Relative loss gaps between rows of runs, paired by seed, and Student's interval of their mean.

gap = (loss - base) / base, in per cent: positive is worse than the base of the same seed
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from pretrain.comparison.runs import Point, Row, RunData

DIVERGED = 0.1
"""A run has diverged where its loss stays by more than this share above the base's."""
_BINS = 60

# 97.5 % points of Student's distribution, degrees of freedom 1 to 30 (two-sided 95 %).
_T95 = (
    *(12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.30600, 2.26216, 2.22814),
    *(2.20099, 2.17881, 2.16037, 2.14479, 2.13145, 2.11991, 2.10982, 2.10092, 2.09302, 2.08596),
    *(2.07961, 2.07387, 2.06866, 2.06390, 2.05954, 2.05553, 2.05183, 2.04841, 2.04523, 2.04227),
)


def t95(freedom: int) -> float:
    """The 97.5 % point of Student's distribution; beyond 30 by its expansion in 1 / freedom."""
    if freedom <= len(_T95):
        return _T95[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % t interval; without one where there is a single seed."""

    mean: float
    half: float | None
    seeds: tuple[int, ...]

    @property
    def verdict(self) -> str:
        """What may be said of the sign: "above", "below", "not distinguishable", "one seed"."""
        if self.half is None:
            return "one seed"
        if abs(self.mean) <= self.half:
            return "not distinguishable"
        return "above" if self.mean > 0 else "below"


def interval(values: Mapping[int, float]) -> Interval | None:
    """Of one value a seed; None without values."""
    if not values:
        return None
    found = list(values.values())
    half = None
    if len(found) > 1:
        half = t95(len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
    return Interval(statistics.fmean(found), half, tuple(sorted(values)))


def paired_gaps(
    row: Row, base: Row, forward: str = "own", name: str = ""
) -> dict[int, list[Point]]:
    """{seed: (step, gap in per cent)} at the steps where both have validated.

    The base's loss is of the same forward. A base of 16 bits that did not validate twice has one
    forward; any other base then has no gap of the 16-bit one. Where "" stands for sets of other
    names there is none either.
    """
    found = {}
    for seed in sorted(row.runs.keys() & base.runs.keys()):
        if not name and row.runs[seed].main_set != base.runs[seed].main_set:
            continue
        own = row.runs[seed].validation.get((forward, name), [])
        others = base.runs[seed].validation
        once = others.get(("own", name), []) if base.is_high else []
        wanted = dict(others.get((forward, name)) or once)
        points = [
            (step, 100.0 * (loss - wanted[step]) / wanted[step])
            for step, loss in own
            if step in wanted
        ]
        if points:
            found[seed] = points
    return found


def final_gaps(row: Row, base: Row, forward: str = "own", name: str = "") -> dict[int, float]:
    """{seed: gap at the last step}, of the seeds whose both runs are finished at the same one."""
    gaps = paired_gaps(row, base, forward, name)
    return {
        seed: points[-1][1]
        for seed, points in gaps.items()
        if end_together(row.runs[seed], base.runs[seed]) and points[-1][0] >= row.runs[seed].steps
    }


def gap_differences(row: Row, other: Row, base: Row, forward: str = "own") -> Interval | None:
    """The row's final gap less the other's, in points, paired by seed; None without a pair."""
    a, b = final_gaps(row, base, forward), final_gaps(other, base, forward)
    return interval({seed: a[seed] - b[seed] for seed in a.keys() & b.keys()})


def end_together(run: RunData, base: RunData) -> bool:
    """Whether both are finished, after as many steps: in the middle of a run, before its learning
    rate falls, a loss is higher than at the end of a shorter one."""
    return run.finished and base.finished and run.steps == base.steps


def broken_seeds(row: Row) -> list[int]:
    """Seeds whose run has taken its last step without a finite loss there, in training or in one
    of its own validations. They have no final gap, so that a mean over the others would flatter the
    row."""
    found = []
    for seed, run in sorted(row.runs.items()):
        own = [points for (forward, _), points in run.validation.items() if forward == "own"]
        ended = all(points and points[-1][0] >= run.steps for points in own)
        if run.finished and not (_finite(run.losses[-1][1]) and ended):
            found.append(seed)
    return found


def training_gaps(row: Row, base: Row, bins: int = _BINS) -> dict[int, list[Point]]:
    """{seed: (step, gap in per cent)} of the training loss, each point a mean over a part of the
    run; steps whose loss is not finite in both are left out."""
    found = {}
    for seed in sorted(row.runs.keys() & base.runs.keys()):
        losses, wanted = dict(row.runs[seed].losses), dict(base.runs[seed].losses)
        steps = [s for s in sorted(losses.keys() & wanted.keys()) if _finite(losses[s], wanted[s])]
        points = []
        for part in parts(steps, row.runs[seed].steps, bins):
            own, other = sum(losses[s] for s in part), sum(wanted[s] for s in part)
            points.append((part[-1], 100.0 * (own - other) / other))
        if points:
            found[seed] = points
    return found


def parts(steps: Sequence[int], total: int, count: int) -> list[list[int]]:
    """Increasing steps of a run of `total` by the `count` equal parts of it that they lie in.

    Where a part ends does not depend on which steps are there, so that parts of several seeds go
    together; those without steps are left out.
    """
    return [list(part) for _, part in groupby(steps, lambda step: -(-step * count // total))]


def first_difference(run: RunData, base: RunData) -> int | None:
    """The first step whose training losses are not the same to the bit; None: all are. A loss that
    is no number in both is the same."""
    wanted = dict(base.losses)
    for step, loss in run.losses:
        other = wanted.get(step, loss)
        if loss != other and not (math.isnan(loss) and math.isnan(other)):
            return step
    return None


def diverged_at(run: RunData, base: RunData, share: float = DIVERGED) -> int | None:
    """The first step from which a run stays `share` above the base to its end, or is not finite.

    Losses are means over a sixtieth of the run, so that a spike that heals is none; steps whose
    loss is not finite are left out, and where they end such a part, it is not finite. Nothing is
    above a base that is not.
    """
    wanted = dict(base.losses)
    losses = {step: loss for step, loss in run.losses if step in wanted}
    start = None
    for part in parts(list(losses), run.steps, _BINS):
        own = mean_to_the_end([losses[step] for step in part])
        other = mean_to_the_end([wanted[step] for step in part])
        if math.isfinite(own) and not own > (1 + share) * other:
            start = None
        elif start is None:
            start = part[0]
    return start


def mean_to_the_end(losses: Sequence[float]) -> float:
    """Of the losses that are finite; NaN where the last is not."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return statistics.fmean(finite) if finite and math.isfinite(losses[-1]) else math.nan


def mean_curve(curves: Mapping[int, Sequence[Point]]) -> list[tuple[int, float, float, float]]:
    """(step, mean, lowest, highest) over the seeds, at steps that all of them have."""
    if not curves:
        return []
    common = set.intersection(*({step for step, _ in points} for points in curves.values()))
    values = [dict(points) for points in curves.values()]
    rows = []
    for step in sorted(common):
        found = [each[step] for each in values]
        rows.append((step, statistics.fmean(found), min(found), max(found)))
    return rows


def _finite(*values: float) -> bool:
    return all(map(math.isfinite, values))
