# SPDX-License-Identifier: Apache-2.0
"""What a linear layer does across ranks: gather inputs, reduce gradients and amaxes, origins.

One operand of a GEMM may be cut over several ranks. Then its amax is the maximum over all of them
and its dither is keyed by global rows and columns, so that every layout computes the same codes.
Which axis of which tensor is cut:

              x [tokens, in]     w [out, in]     dy [tokens, out]
    column    -                  out             out
    row       in                 in              -
    context   tokens             -               tokens

With sequence parallelism a column layer gathers the tokens of x first, so x is whole there; the
row layer's dy is whole because its reduce-scatter is outside the layer.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops.recipe import GemmRecipe

Kind = Literal["column", "row", "duplicated"]
AMAX_SCOPES = ("layout_invariant", "shard")

# (kind, tensor) -> the axis of the tensor that tensor parallelism cuts.
_CUT = {
    ("column", "w"): "out",
    ("column", "dy"): "out",
    ("row", "x"): "in",
    ("row", "w"): "in",
}
# Operand -> the axis that its GEMM contracts; the other one has the rows of a row-scaled amax.
_CONTRACTED = {
    "fprop.x": "in",
    "fprop.w": "in",
    "dgrad.dy": "out",
    "dgrad.w": "out",
    "wgrad.dy": "tokens",
    "wgrad.x": "tokens",
}
_AXES = {"x": ("tokens", "in"), "w": ("out", "in"), "dy": ("tokens", "out")}


@dataclass(frozen=True, kw_only=True)
class TensorParallelComm:
    """The ranks of one call of a linear layer; see `fused_ops.linear.Comm`."""

    kind: Kind
    recipe: GemmRecipe
    tp_group: dist.ProcessGroup | None = None
    """Ranks that share the weight (and, "duplicated", the tokens)."""
    cp_group: dist.ProcessGroup | None = None
    """Ranks that share the sequence."""
    gather_tokens: bool = False
    """Sequence parallel column layer: gather x's first axis, reduce-scatter its gradient."""
    all_reduce_input_grad: bool = False
    """Column layer without sequence parallelism."""
    amax_scope: str = "layout_invariant"
    weight_shape: tuple[int, int] = (0, 0)
    """Local [out, in]."""
    tokens: int = 0
    """Tokens of the GEMM on this rank: of its own part of the sequence only."""

    def gather_input(self, x: Tensor) -> Tensor:
        """x [s / ranks, ...] -> [s, ...] if tokens are cut over the tensor-parallel ranks."""
        if not self.gather_tokens:
            return x
        assert self.tp_group is not None, "gathering needs a group"
        full = x.new_empty(x.shape[0] * self.tp_group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(full, x.contiguous(), group=self.tp_group)
        return full

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
        if self.amax_scope == "shard":
            return amax
        for axis, group in self._cuts(name.split(".")[1]):
            by_row = self.recipe.spec(*name.split(".")).row_scaled
            if by_row and axis != _CONTRACTED[name]:
                continue  # the ranks hold different rows
            amax = amax.clone()  # the caller's may serve another operand
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        return amax

    def origin(self, name: str) -> tuple[int, int]:
        """Global (row, column) of the first element of x, w or dy here.

        Under context parallelism the tokens of a rank count as one run; its two pieces of the
        sequence are not told apart.
        """
        tensor = name.split(".")[1]
        out_features, in_features = self.weight_shape
        size = {"tokens": self.tokens, "out": out_features, "in": in_features}
        start = dict.fromkeys(size, 0)
        for axis, group in self._cuts(tensor):
            start[axis] = dist.get_rank(group) * size[axis]
        row, column = _AXES[tensor]
        return start[row], start[column]

    def _cuts(self, tensor: str) -> list[tuple[str, dist.ProcessGroup]]:
        """(axis, group) of each way in which x, w or dy is cut over more than one rank."""
        cuts: list[tuple[str, dist.ProcessGroup]] = []
        if self.tp_group is not None and self.tp_group.size() > 1:
            axis = _CUT.get((self.kind, tensor))
            if self.kind == "duplicated" and tensor != "w":
                axis = "tokens"
            if axis is not None:
                cuts.append((axis, self.tp_group))
        if tensor != "w" and self.cp_group is not None and self.cp_group.size() > 1:
            cuts.append(("tokens", self.cp_group))
        return cuts


def token_count(x: Tensor, group_size: int = 1) -> int:
    """Rows of the GEMM for x [s, b, features] when `group_size` ranks hold parts of s."""
    return x.numel() // x.shape[-1] * group_size


def is_distributed(group: dist.ProcessGroup | None) -> bool:
    """Whether more than one rank is in the group."""
    return group is not None and torch.distributed.is_initialized() and group.size() > 1
