# SPDX-License-Identifier: Apache-2.0
"""Whether runs of one seed began with the same weights and the same data, whenever they were run.

A run's first training loss is one forward pass before any update. Rows whose forward computes in
the same precision have the same first loss, to the bit on one kind of GPU with one set of kernels:
so rows that were added to a study later, with other code, are held against the earlier ones.
"""

from collections.abc import Hashable, Mapping
from typing import Any

from fused_ops.recipe import is_quantized
from pretrain.comparison.runs import Row
from pretrain.config import PretrainConfig, precision_plan


def starts(configs: Mapping[str, PretrainConfig], rows: Mapping[str, Row]) -> list[list[Any]]:
    """[row, other row, seeds, largest relative difference of their first losses] for each row that
    has a row with the same forward before it, the first such one.

    Args:
        configs: by row, any seed's.
        rows: by row, finished runs.
    """
    found: list[list[Any]] = []
    first_of: dict[Hashable, list[str]] = {}
    for name, row in rows.items():
        alike = first_of.setdefault(_forward(configs[name]), [])
        for other in alike:
            seeds = sorted(row.runs.keys() & rows[other].runs.keys())
            apart = [_apart(row, rows[other], seed) for seed in seeds]
            if seeds:
                found.append([name, other, seeds, float(f"{max(apart):.3g}")])
                break
        alike.append(name)
    return found


def _forward(config: PretrainConfig) -> Hashable:
    """What decides the forward of the first step."""
    plan = precision_plan(config)
    plan.consumed_samples = 0
    key = []
    for name, recipe in plan.recipes().items():
        x, w = recipe.specs("fprop")
        key.append((name, x, w, recipe.decode if is_quantized(x) or is_quantized(w) else ""))
    return tuple(key)


def _apart(row: Row, other: Row, seed: int) -> float:
    """Of the losses of the first step that both tell."""
    own, wanted = dict(row.runs[seed].losses), dict(other.runs[seed].losses)
    step = min(own.keys() & wanted.keys())
    return abs(own[step] - wanted[step]) / abs(wanted[step])
