# SPDX-License-Identifier: Apache-2.0
"""One row's gap over another's, with Fieller's interval; also of several models together.

Source: E. C. Fieller, "Some problems in interval estimation", J. R. Stat. Soc. B 16 (1954). The
interval holds every ratio r for which the mean over seeds of a - r b does not differ from 0 in
Student's test, the gaps a and b of a seed being paired. Where b itself is not distinguishable from
0, no ratio is excluded on one side, and there is no interval.

Several models have gaps of other sizes, which scatter otherwise, and seeds that have nothing in
common. Together their ratio is that of the gaps' means over the models, each model counting once,
and the test that of B. L. Welch, "The generalization of Student's problem when several different
population variances are involved", Biometrika 34 (1947): the variances of the models' means are
added, and the degrees of freedom are Satterthwaite's.
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


_FARTHEST = 64.0
"""A ratio that is this far from the measured one and not excluded: there is no interval."""


@dataclass(frozen=True)
class _Welch:
    """The gaps of two rows, by model and by seed, as pairs."""

    pairs: tuple[tuple[tuple[float, float], ...], ...]

    def holds(self, ratio: float) -> bool:
        """Whether a - ratio b, summed over the models' means, is not told from 0."""
        total, variances = 0.0, []
        for pairs in self.pairs:
            rest = [a - ratio * b for a, b in pairs]
            total += statistics.fmean(rest)
            variances.append((statistics.variance(rest) / len(rest), len(rest) - 1))
        variance = sum(own for own, _ in variances)
        if variance == 0:
            return total == 0
        freedom = variance**2 / sum(own**2 / count for own, count in variances)
        return total**2 <= t95(math.floor(freedom * (1 + 1e-9))) ** 2 * variance

    def edge(self, inside: float, direction: int) -> float | None:
        """The ratio nearest to `inside` from which on it is excluded; None: far away."""
        step = 2.0**-10
        while self.holds(inside + direction * step):
            step *= 2
            if step > _FARTHEST:
                return None
        outside, inside = inside + direction * step, inside + direction * step / 2
        while abs(outside - inside) > 1e-9:
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if self.holds(middle) else (inside, middle)
        return inside


def together(parts: Sequence[tuple[Mapping[int, float], Mapping[int, float]]]) -> Ratio | None:
    """The ratio of the means of several models' mean gaps, with Welch's interval.

    Args:
        parts: of each model the gaps (top, bottom) by seed. A model with fewer than two common
            seeds has no spread, and is left out.

    None with fewer than two models.
    """
    pairs = [
        tuple((top[seed], bottom[seed]) for seed in sorted(top.keys() & bottom.keys()))
        for top, bottom in parts
    ]
    pairs = [each for each in pairs if len(each) > 1]
    below = sum(statistics.fmean(b for _, b in each) for each in pairs)
    if len(pairs) < 2 or below == 0:
        return None
    value = sum(statistics.fmean(a for a, _ in each) for each in pairs) / below
    welch = _Welch(tuple(pairs))
    low, high = (welch.edge(value, direction) for direction in (-1, 1))
    if low is None or high is None:
        low = high = None
    return Ratio(value, low, high, tuple(range(sum(map(len, pairs)))))


def gap_ratio(row: Row, other: Row, base: Row, forward: str = "own") -> Ratio | None:
    """The row's final gap over another row's, both against the base of each seed."""
    return fieller(final_gaps(row, base, forward), final_gaps(other, base, forward))
