# SPDX-License-Identifier: Apache-2.0
"""What a linear layer does across ranks: gather inputs, reduce gradients and amaxes.

Where its operands are cut, and how that keeps their codes, is `models.operand_cuts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.gather import TokenPart, maxima, packing_reason
from models.operand_cuts import OperandCuts


@dataclass(frozen=True, kw_only=True)
class TensorParallelComm(OperandCuts):
    """The ranks of one call of a linear layer; see `fused_ops.linear.Comm`."""

    gather_tokens: bool = False
    """Sequence parallel column layer: gather x's first axis, reduce-scatter its gradient."""
    scatter_tokens: bool = False
    """Sequence parallel row layer that reduce-scatters its output itself, and gathers dy."""
    all_reduce_input_grad: bool = False
    """Column layer without sequence parallelism."""
    packed: bool = False
    """Gathers move codes where they can."""

    def gather_input(self, x: Tensor) -> Tensor:
        """x [s / ranks, ...] -> [s, ...] if tokens are cut over the tensor-parallel ranks."""
        return self._gathered(x) if self.gather_tokens else x

    def _gathered(self, part: Tensor) -> Tensor:
        assert self.tp_group is not None, "gathering needs a group"
        full = part.new_empty(part.shape[0] * self.tp_group.size(), *part.shape[1:])
        dist.all_gather_into_tensor(full, part.contiguous(), group=self.tp_group)
        return full

    def scatter_output(self, y: Tensor) -> Tensor:
        """y [s, ...] of each rank, summed -> [s / ranks, ...] if this layer scatters it."""
        if not self.scatter_tokens:
            return y
        assert self.tp_group is not None, "reducing needs a group"
        part = y.new_empty(y.shape[0] // self.tp_group.size(), *y.shape[1:])
        dist.reduce_scatter_tensor(part, y.contiguous(), group=self.tp_group)
        return part

    def gather_output_grad(self, dy: Tensor) -> Tensor:
        """dy [s / ranks, ...] -> [s, ...] if this layer scatters its output."""
        return self._gathered(dy) if self.scatter_tokens else dy

    def part(self, names: tuple[str, ...]) -> TokenPart | None:
        """The tokens of X or dY that this rank exchanges as codes, if it does."""
        cut = self.gather_tokens if names[0].endswith(".x") else self.scatter_tokens
        if not (self.packed and cut and is_distributed(self.tp_group)):
            return None
        assert self.tp_group is not None, "parts need a group"
        tokens = self.tokens // self.tp_group.size()
        specs = [(name, self.recipe.spec(*name.split("."))) for name in names]
        if any(packing_reason(name, spec, tokens) for name, spec in specs):
            return None
        return TokenPart(self)

    def reduce_input_grad(self, dx: Tensor) -> tuple[Tensor, Any]:
        """The sum over ranks, begun but not awaited: wgrad runs meanwhile."""
        if self.gather_tokens:
            assert self.tp_group is not None, "reducing needs a group"
            part = dx.new_empty(dx.shape[0] // self.tp_group.size(), *dx.shape[1:])
            work = dist.reduce_scatter_tensor(
                part, dx.contiguous(), group=self.tp_group, async_op=True
            )
            return part, work
        if self.all_reduce_input_grad:
            dx = dx.contiguous()
            return dx, dist.all_reduce(dx, group=self.tp_group, async_op=True)
        return dx, None

    def reduce_amax(self, name: str, amax: Tensor) -> Tensor:
        """Maximum over the ranks that hold parts of the operand `name`."""
        return self.reduce_amaxes((name,), (amax,))[0]

    def reduce_amaxes(self, names: Sequence[str], amaxes: Sequence[Tensor]) -> list[Tensor]:
        """`reduce_amax` of several operands; in one collective if the same ranks hold parts."""
        return maxima([self.amax_groups(name) for name in names], amaxes)


def token_count(x: Tensor, group_size: int = 1) -> int:
    """Rows of the GEMM for x [s, b, features] when `group_size` ranks hold parts of s."""
    return x.numel() // x.shape[-1] * group_size


def is_distributed(group: dist.ProcessGroup | None) -> bool:
    """Whether more than one rank is in the group."""
    return group is not None and torch.distributed.is_initialized() and group.size() > 1
