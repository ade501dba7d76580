# SPDX-License-Identifier: Apache-2.0
"""One row's gap over another's, with Fieller's interval; also of several models together.

Source: E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16 (1954). The
interval holds every ratio r for which the mean over seeds of a - r b does not differ from 0 in
Student's test, the gaps a and b of a seed being paired. Where b itself is not distinguishable from
0, no ratio is excluded on one side, and there is no interval.

Models that have read the same data have the order of it in common within a seed. Several models
together are therefore paired by seed too: each seed counts once, with the means over the models.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pretrain.comparison.gaps import final_gaps, t95
from pretrain.comparison.runs import Row


@dataclass(frozen=True)
class Ratio:
    """The ratio of two means over seeds; `low` and `high` are None without an interval."""

    value: float
    low: float | None
    high: float | None
    seeds: tuple[int, ...]

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            why = "one seed" if len(self.seeds) == 1 else "no interval"
            return f"{self.value:.2f} ({why})"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def fieller(top: Mapping[int, float], bottom: Mapping[int, float]) -> Ratio | None:
    """The ratio of mean top to mean bottom over their common seeds; None without any."""
    seeds = sorted(top.keys() & bottom.keys())
    if not seeds:
        return None
    a, b = [top[seed] for seed in seeds], [bottom[seed] for seed in seeds]
    mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
    if mean_b == 0:
        return None
    low, high = _limits(a, b, mean_a, mean_b)
    return Ratio(mean_a / mean_b, low, high, tuple(seeds))


def _limits(
    a: list[float], b: list[float], mean_a: float, mean_b: float
) -> tuple[float | None, float | None]:
    """Roots of (mean_a - r mean_b)^2 = t^2 / n (s_aa - 2 r s_ab + r^2 s_bb) in r."""
    count = len(a)
    if count < 2:
        return None, None
    share = t95(count - 1) ** 2 / count
    s_ab = statistics.covariance(a, b)
    square = mean_b**2 - share * statistics.variance(b)
    cross = mean_a * mean_b - share * s_ab
    constant = mean_a**2 - share * statistics.variance(a)
    if square <= 0:
        return None, None
    root = math.sqrt(max(cross**2 - square * constant, 0.0))
    return (cross - root) / square, (cross + root) / square


def together(parts: Sequence[tuple[Mapping[int, float], Mapping[int, float]]]) -> Ratio | None:
    """The ratio of the means over several models, each model counting once.

    Args:
        parts: of each model the gaps (top, bottom) by seed.

    None with fewer than two models, or without a seed that all of them have.
    """
    if len(parts) < 2:
        return None
    seeds = set.intersection(*(set(top.keys() & bottom.keys()) for top, bottom in parts))
    top, bottom = (
        {seed: statistics.fmean(gaps[seed] for gaps in side) for seed in seeds}
        for side in zip(*parts)
    )
    return fieller(top, bottom)


def gap_ratio(row: Row, other: Row, base: Row, forward: str = "own") -> Ratio | None:
    """The row's final gap over another row's, both against the base of each seed."""
    return fieller(final_gaps(row, base, forward), final_gaps(other, base, forward))
