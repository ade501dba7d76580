# SPDX-License-Identifier: Apache-2.0
"""How a run's tensor-parallel ranks cut the weights, where it shows in their codes.

A rank quantizes the rows and columns that it holds. With the amax shared, its blocks are those of
the whole weight as long as every cut lies between two of them. Where rows are cut elsewhere, codes
are made rank by rank as the run makes them, and files hold them, since scales are written row by
row. Where columns are cut within a block there is no place for both halves' scales.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_ops.formats import OperandSpec
from models.gemms import GemmShape
from models.precision_table import ROW_PARALLEL, output_parts

# Linear layers whose weight every rank holds whole.
_WHOLE = ("fc1_latent_proj", "fc2_latent_proj")


@dataclass(frozen=True)
class Cut:
    """One weight [out, in] over tensor-parallel ranks."""

    ranks: int
    parts: tuple[int, ...] = ()
    """Sizes of the parts of `out`, each cut over the ranks by itself; empty: `in` is cut."""

    def problem(self, spec: OperandSpec, columns: int) -> str | None:
        """Why the ranks' codes cannot be written; None when they can."""
        if self.parts or spec.block is None or columns % (self.ranks * spec.block[1]) == 0:
            return None
        return (
            f"each of the run's {self.ranks} tensor-parallel ranks has {columns // self.ranks} of "
            f"their {columns} inputs, no multiple of {spec.block[1]}, and blocks of its own"
        )

    def shards(self, spec: OperandSpec) -> list[Tensor] | None:
        """The rows of each rank, in its order; None where its blocks are those of the whole."""
        tile = spec.block[0] if spec.block else 1
        if all(part % (self.ranks * tile) == 0 for part in self.parts):
            return None
        parts = torch.arange(sum(self.parts)).split(self.parts)
        return [torch.cat([p.chunk(self.ranks)[rank] for p in parts]) for rank in range(self.ranks)]


def weight_cuts(
    modules: Iterable[GemmShape], config: Any, tensor: int, expert_tensor: int
) -> dict[str, Cut]:
    """The cut of every weight that a run's ranks have in pieces, by global name.

    Args:
        config: megatron-core's TransformerConfig of the model.
        tensor: tensor-parallel size of the run.
        expert_tensor: that of routed experts.
    """
    found = {}
    for module in modules:
        ranks = expert_tensor if ".mlp.experts." in module.name else tensor
        if ranks == 1 or module.name.endswith(_WHOLE):
            continue
        rows = module.name.endswith(ROW_PARALLEL)
        found[module.name] = Cut(ranks, () if rows else tuple(output_parts(module, config)))
    return found
