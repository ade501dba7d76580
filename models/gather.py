# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel gathers in codes: `precision.communicate: packed`.

The tensor-parallel ranks hold parts of the tokens of X (column layers) and of dY (row layers), and
their GEMMs contract or multiply all of them. With the amax of the whole, blocks that lie in one
part and the dither of the whole's rows and columns, a rank's codes are those that quantizing the
gathered tensor gives, byte for byte: so each quantizes its part, and codes and block scales move.

    forward     X by rows for fprop
    backward    X by rotated columns for wgrad (kept as this rank's part), while dgrad computes;
                dY by rows for dgrad and by rotated columns for wgrad

Column blocks and rotations run along the tokens: where a part is no multiple of them, or an operand
is not quantized, tokens are gathered in BF16 (`packing_reason`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.linear import Runs
from fused_ops.linear_call import LocalComm, Origin, Run
from fused_ops.recipe import is_quantized
from models.operand_cuts import OperandCuts

_DITHER = 16
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def runs_along_tokens(name: str) -> bool:
    """Whether the blocks of an operand made of X or dY lie along the tokens."""
    return name.startswith("wgrad")


def packing_reason(name: str, spec: OperandSpec, tokens: int) -> str | None:
    """Why `tokens` tokens of X or dY cannot become a part of the operand `name`, or None."""
    if not is_quantized(spec):
        return f"{name} is not quantized"
    if spec.source == "forward":
        return f"{name} is made of the forward's operand"
    if not tokens:
        return f"{name} has no tokens, and so no codes"
    multiple = spec.block[0] if spec.block else 1
    if runs_along_tokens(name):
        multiple = max(spec.multiple, _DITHER if spec.is_random else 1)
    if tokens % multiple:
        return f"{name} has blocks of {multiple} tokens and a rank {tokens}"
    return None


@dataclass(frozen=True)
class TokenPart(LocalComm):
    """This rank's part of the tokens of a linear layer; see `fused_ops.linear_call.Part`."""

    whole: OperandCuts

    def reduce_amax(self, name: str, amax: Tensor) -> Tensor:
        """Of the gathered operand: also in `amax_scope: shard`, where that is what one shard is."""
        return self.reduce_amaxes((name,), (amax,))[0]

    def reduce_amaxes(self, names: Sequence[str], amaxes: Sequence[Tensor]) -> list[Tensor]:
        """`reduce_amax` of several operands; in one collective if the same ranks hold parts."""
        return maxima([self._amax_groups(name) for name in names], amaxes)

    def _amax_groups(self, name: str) -> list[dist.ProcessGroup]:
        whole = self.whole
        assert whole.tp_group is not None, "parts need a group"
        by_row = whole.recipe.spec(*name.split(".")).row_scaled
        own = [whole.tp_group] if runs_along_tokens(name) or not by_row else []
        return own + whole.amax_groups(name)

    def origin(self, name: str) -> Origin:
        """Where this rank's rows of the gathered operand lie."""
        whole = self.whole
        assert whole.tp_group is not None, "parts need a group"
        part = whole.tokens // whole.tp_group.size()
        start = dist.get_rank(whole.tp_group) * part
        origin = whole.origin(name)
        if not isinstance(origin, Runs):
            return origin[0] + start, origin[1]
        rows = origin.rows
        if len(rows) == 1:
            rows = ((whole.tokens, rows[0][1]),)
        return Runs(rows=_within(rows, start, start + part), columns=origin.columns)

    def gather(self, name: str, operand: QuantizedTensor) -> Callable[[], QuantizedTensor]:
        """The operand of all ranks' tokens: the exchange is begun, and the result waits for it.

        Codes and scales move together, each to where it is read: rows as they come, columns side by
        side. How many blocks were out of range stays with the ranks: it is None in the result.
        """
        group, axis = self.whole.tp_group, int(runs_along_tokens(name))
        assert group is not None, "gathering needs a group"
        parts = {field: getattr(operand, field).contiguous() for field in _moving(operand, axis)}
        found = {field: part.new_empty(group.size(), *part.shape) for field, part in parts.items()}
        with dist._coalescing_manager(group, async_ops=True) as exchange:
            for field, part in parts.items():
                dist.all_gather_into_tensor(_bytes(found[field]), _bytes(part), group=group)
        rows, cols = operand.shape
        shape = (rows, cols * group.size()) if axis else (rows * group.size(), cols)

        def finish() -> QuantizedTensor:
            exchange.wait()
            join = _beside if axis else _below
            whole: dict[str, Any] = {field: join(pieces) for field, pieces in found.items()}
            return replace(operand, out_of_range=None, shape=shape, **whole)

        return finish


def maxima(groups: Sequence[Sequence[dist.ProcessGroup]], amaxes: Sequence[Tensor]) -> list[Tensor]:
    """Each amax, left as it is, as the maximum over the ranks of its groups, one after the other.

    Single values that have the same groups go together.
    """
    first = list(groups[0])
    if len(amaxes) > 1 and all(list(g) == first and a.dim() == 0 for g, a in zip(groups, amaxes)):
        if not first:
            return list(amaxes)
        # Each begins at a multiple of 16 bytes, as tensors do for which kernels were compiled.
        together = torch.stack([amax for amax in amaxes for _ in range(4)])
        for group in first:
            dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
        return list(together[::4].unbind())
    found = []
    for own, amax in zip(groups, amaxes):
        if own:
            amax = amax.clone()  # the caller's may serve another operand
        for group in own:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        found.append(amax)
    return found


def _moving(operand: QuantizedTensor, axis: int) -> tuple[str, ...]:
    """The tensors of an operand that differ between ranks."""
    fields: tuple[str, ...] = ("codes",)
    if operand.spec.block is not None:
        fields += ("scales",)
    return (*fields, "amax") if operand.spec.row_scaled and axis == 0 else fields


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _below(pieces: Tensor) -> Tensor:
    """[ranks, rows, ...] -> [ranks * rows, ...], in place."""
    return pieces.flatten(0, 1)


def _beside(pieces: Tensor) -> Tensor:
    """[ranks, rows, cols] -> [rows, ranks * cols], copied in the widest words that fit."""
    size = pieces.shape[2] * pieces.element_size()
    word = next(w for w in _WORDS if size % w.itemsize == 0)
    whole = _bytes(pieces).view(word).view(*pieces.shape[:2], -1).transpose(0, 1)
    return whole.contiguous().view(pieces.shape[1], -1).view(pieces.dtype)


def _within(runs: Iterable[Run], first: int, last: int) -> tuple[Run, ...]:
    """What of the runs lies in [first, last) of the axis that they are put together along."""
    found, at = [], 0
    for length, start in runs:
        low, high = max(first, at), min(last, at + length)
        if low < high:
            found.append((high - low, start + low - at))
        at += length
    return tuple(found)
