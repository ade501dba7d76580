# SPDX-License-Identifier: Apache-2.0
"""Which part of the operands of a linear layer a rank holds: groups of an amax, and origins.

One operand of a GEMM may be cut over several ranks. Then its amax is the maximum over all of them
and its dither is keyed by global rows and columns, so that every layout computes the same codes.
Which axis of which tensor is cut:

              x [tokens, in]     w [out, in]     dy [tokens, out]
    column    -                  out             out
    row       in                 in              -
    context   tokens             -               tokens

With sequence parallelism a column layer gathers the tokens of x first, so x is whole there; the
row layer's dy is whole because its reduce-scatter is outside the layer, or gathered here before it
is looked at (`models.comm`; `models.gather` moves codes instead).

A cut need not be in one piece. Context parallelism gives a rank two pieces of the sequence, and a
column layer whose output has parts (gate and up; z, x, B, C and dt of Mamba) cuts each part by
itself. The tokens of one expert that lie on different ranks have no order that all layouts share:
their amax is shared, and their rows are only kept apart.
"""

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from fused_ops.linear import Runs
from fused_ops.linear_call import Origin, Run
from fused_ops.recipe import GemmRecipe

Kind = Literal["column", "row", "duplicated"]

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
# Columns whose dither is one Philox value.
_DITHER = 16
# Rows by which the tokens of one expert on different ranks are kept apart in the dither.
_RAGGED_STRIDE = 1 << 24


@dataclass(frozen=True, kw_only=True)
class OperandCuts:
    """How the operands of one call of a linear layer are cut over ranks."""

    kind: Kind
    recipe: GemmRecipe
    tp_group: dist.ProcessGroup | None = None
    """Ranks that share the weight (and, "duplicated", the tokens)."""
    cp_group: dist.ProcessGroup | None = None
    """Ranks that share the sequence."""
    expert_group: dist.ProcessGroup | None = None
    """Ranks that have the same experts and other tokens of the same micro-batch."""
    amax_scope: str = "layout_invariant"
    weight_shape: tuple[int, int] = (0, 0)
    """Local [out, in]."""
    segments: tuple[int, ...] = ()
    """Local sizes of the parts of `out` that are cut one by one; empty for a single part."""
    tokens: int = 0
    """Tokens of the GEMM on this rank: of its own part of the sequence only."""

    def amax_groups(self, name: str) -> list[dist.ProcessGroup]:
        """The groups over which the amax of the operand `name` is taken."""
        if self.amax_scope == "shard" or not self._is_cut:
            return []
        by_row = self.recipe.spec(*name.split(".")).row_scaled
        return [
            group
            for axis, group in self._cuts(name.split(".")[1])
            if not by_row or axis == _CONTRACTED[name]  # else the ranks hold different rows
        ]

    def origin(self, name: str) -> Origin:
        """Global (row, column) of the first element of x, w or dy here, or the runs it is made of.

        A boundary between runs that is no multiple of the operand's blocks cannot be kept: the
        runs then count as one, and the codes depend on the layout (`dimension_notes` in
        `models.precision_table` says where).
        """
        if not self._is_cut:
            return 0, 0
        gemm, tensor = name.split(".")
        spec, contracted = self.recipe.spec(gemm, tensor), _CONTRACTED[name]
        tile = spec.block[0] if spec.block else 1
        row, column = (
            self._runs(tensor, axis, spec.multiple, spec.is_random)
            if axis == contracted
            else self._runs(tensor, axis, tile, False)
            for axis in _AXES[tensor]
        )
        if len(row) == len(column) == 1:
            return row[0][1], column[0][1]
        return Runs(rows=row, columns=column)

    def contraction_groups(self, gemm: str) -> list[dist.ProcessGroup]:
        """The groups whose ranks each have a part of the sum of a GEMM ("fprop", ...), all of the
        same shape. Tokens of an expert on several ranks are left out: their numbers differ."""
        name = f"{gemm}.{'x' if gemm == 'fprop' else 'dy'}"
        return [
            group
            for axis, group in self._cuts(name.split(".")[1])
            if axis == _CONTRACTED[name] and group is not self.expert_group
        ]

    @property
    def _is_cut(self) -> bool:
        """Whether any other rank holds a part of some operand."""
        groups = (self.tp_group, self.cp_group, self.expert_group)
        return any(group is not None and group.size() > 1 for group in groups)

    def _runs(self, tensor: str, axis: str, multiple: int, dithered: bool) -> tuple[Run, ...]:
        """The pieces of the global axis that this rank's part is put together from.

        One piece in their place if a block of `multiple` would lie across the end of one. Along a
        dithered axis each begins with a block of dither, as if shards that are no multiples of
        those were padded.
        """
        out_features, in_features = self.weight_shape
        size = {"tokens": self.tokens, "out": out_features, "in": in_features}[axis]
        groups = {group for cut, group in self._cuts(tensor) if cut == axis}
        if not groups:
            return ((size, 0),)
        if axis == "tokens":
            runs = _whole(self._token_runs(), multiple)
            return _aligned(runs) if dithered else runs
        (group,) = groups
        rank, ranks = dist.get_rank(group), group.size()
        parts = self.segments if axis == "out" and self.segments else (size,)
        if any(part % multiple for part in parts[:-1]):
            parts = (size,)
        wide = parts
        if dithered:
            wide = tuple(-(-part // _DITHER) * _DITHER for part in parts)
        starts = [ranks * sum(wide[:i]) + rank * part for i, part in enumerate(wide)]
        return tuple(zip(parts, starts))

    def _token_runs(self) -> tuple[Run, ...]:
        if self.expert_group is not None:
            return ((self.tokens, dist.get_rank(self.expert_group) * _RAGGED_STRIDE),)
        start, whole = 0, self.tokens
        if self.kind == "duplicated" and self.tp_group is not None:
            start, whole = dist.get_rank(self.tp_group) * self.tokens, whole * self.tp_group.size()
        if self.cp_group is None or self.cp_group.size() == 1:
            return ((self.tokens, start),)
        rank, half = dist.get_rank(self.cp_group), whole // 2
        pieces = ((0, rank), (half, 2 * self.cp_group.size() - 1 - rank))
        runs = []
        for first, piece in pieces:  # the part of [start, start + tokens) that lies in each piece
            low, high = max(start, first), min(start + self.tokens, first + half)
            if low < high:
                runs.append((high - low, piece * half + low - first))
        return tuple(runs)

    def _cuts(self, tensor: str) -> list[tuple[str, dist.ProcessGroup]]:
        """(axis, group) of each way in which x, w or dy is cut over more than one rank."""
        cuts: list[tuple[str, dist.ProcessGroup]] = []
        if self.tp_group is not None and self.tp_group.size() > 1:
            axis = _CUT.get((self.kind, tensor))
            if self.kind == "duplicated" and tensor != "w":
                axis = "tokens"
            if axis is not None:
                cuts.append((axis, self.tp_group))
        for group in (self.cp_group, self.expert_group):
            if tensor != "w" and group is not None and group.size() > 1:
                cuts.append(("tokens", group))
        return cuts


def _aligned(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """The runs, each beginning with a block of dither."""
    return tuple((length, -(-start // _DITHER) * _DITHER) for length, start in runs)


def _whole(runs: tuple[Run, ...], multiple: int) -> tuple[Run, ...]:
    """The runs, or one in their place if a block would lie across the end of one."""
    if any(length % multiple for length, _ in runs[:-1]):
        return ((sum(length for length, _ in runs), runs[0][1]),)
    return runs
