# SPDX-License-Identifier: Apache-2.0
"""How far runs of one row and seed would lie apart, from all rows together.

The logarithm of a final loss is modelled as row + seed + error, the errors of one size in all rows
(a randomized block design: seeds are the blocks). Its residuals have more degrees of freedom than a
row's own seeds, so that rows of two or three seeds get an interval that is worth something; the
price is the assumption that all rows scatter alike.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pretrain.comparison.gaps import t95
from pretrain.comparison.runs import Row


@dataclass(frozen=True)
class Spread:
    """The standard deviation of a run's final loss, in per cent of it."""

    percent: float
    freedom: int
    """Degrees of freedom of the estimate."""

    def half(self, seeds: int) -> float:
        """Half of the 95 % interval of the mean difference of two rows over so many seeds."""
        return t95(self.freedom) * self.percent * math.sqrt(2.0 / seeds)


def spread(rows: Sequence[Row], forward: str = "own") -> Spread | None:
    """Of the finished runs of the rows, the base among them; None where nothing is left over."""
    cells = [
        (i, seed, math.log(loss))
        for i, row in enumerate(rows)
        for seed, run in row.runs.items()
        if (loss := run.final_loss(forward)) is not None
    ]
    seeds = sorted({seed for _, seed, _ in cells})
    names = sorted({i for i, _, _ in cells})
    if not cells:
        return None
    design = np.zeros((len(cells), len(names) + len(seeds)))
    for number, (i, seed, _) in enumerate(cells):
        design[number, names.index(i)] = 1.0
        design[number, len(names) + seeds.index(seed)] = 1.0
    values = np.array([value for _, _, value in cells])
    solution, _, rank, _ = np.linalg.lstsq(design, values, rcond=None)
    freedom = len(cells) - int(rank)
    if freedom < 1:
        return None
    residual = values - design @ solution
    return Spread(100.0 * math.sqrt(float(residual @ residual) / freedom), freedom)
