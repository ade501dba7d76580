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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops.codecs import roundup
from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.linear import Runs
from fused_ops.linear_call import LocalComm, Origin, Run
from fused_ops.operands import join
from fused_ops.recipe import is_quantized

if TYPE_CHECKING:
    from models.comm import TensorParallelComm

_DITHER = 16
# Tensors begin at multiples of so many bytes of a message, so that they can be viewed in place.
ALIGNED = 16


def runs_along_tokens(name: str) -> bool:
    """Whether the blocks of an operand made of X or dY lie along the tokens."""
    return name.startswith("wgrad")


def packing_reason(name: str, spec: OperandSpec, tokens: int) -> str | None:
    """Why `tokens` tokens of X or dY cannot become a part of the operand `name`, or None."""
    if not is_quantized(spec):
        return f"{name} is not quantized"
    if spec.source == "forward":
        return f"{name} is made of the forward's operand"
    multiple = spec.block[0] if spec.block else 1
    if runs_along_tokens(name):
        multiple = max(spec.multiple, _DITHER if spec.is_random else 1)
    if tokens % multiple:
        return f"{name} has blocks of {multiple} tokens and a rank {tokens}"
    return None


@dataclass(frozen=True)
class TokenPart(LocalComm):
    """This rank's part of the tokens of a linear layer; see `fused_ops.linear_call.Part`."""

    whole: "TensorParallelComm"

    def reduce_amax(self, name: str, amax: Tensor) -> Tensor:
        """Of the gathered operand: also in `amax_scope: shard`, where that is what one shard is."""
        whole = self.whole
        if runs_along_tokens(name) or not whole.recipe.spec(*name.split(".")).row_scaled:
            amax = amax.clone()  # the caller's may serve another operand
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=whole.tp_group)
        return whole.reduce_amax(name, amax)

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

        How many blocks were out of range stays with the ranks: it is None in the result.
        """
        group, axis = self.whole.tp_group, int(runs_along_tokens(name))
        assert group is not None, "gathering needs a group"
        fields = _moving(operand, axis)
        parts = [getattr(operand, field).contiguous() for field in fields]
        flat = [_bytes(part) for part in parts]
        message = torch.cat(flat) if len(flat) > 1 else flat[0]
        found = message.new_empty(group.size() * message.numel())
        work = dist.all_gather_into_tensor(found, message, group=group, async_op=True)

        def finish() -> QuantizedTensor:
            assert work is not None, "an asynchronous collective"
            work.wait()
            pieces = []
            for own in found.view(group.size(), -1):
                views, at = {}, 0
                for field, part, size in zip(fields, parts, [f.numel() for f in flat]):
                    length = part.numel() * part.element_size()
                    views[field] = own[at : at + length].view(part.dtype).view(part.shape)
                    at += size
                pieces.append(replace(operand, out_of_range=None, **views))
            return join(pieces, axis)

        return finish


def _moving(operand: QuantizedTensor, axis: int) -> tuple[str, ...]:
    """The tensors of an operand that differ between ranks."""
    fields: tuple[str, ...] = ("codes",)
    if operand.spec.block is not None:
        fields += ("scales",)
    return (*fields, "amax") if operand.spec.row_scaled and axis == 0 else fields


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.view(-1).view(torch.uint8)
    missing = roundup(flat.numel(), ALIGNED) - flat.numel()
    return torch.nn.functional.pad(flat, (0, missing)) if missing else flat


def _within(runs: Iterable[Run], first: int, last: int) -> tuple[Run, ...]:
    """What of the runs lies in [first, last) of the axis that they are put together along."""
    found, at = [], 0
    for length, start in runs:
        low, high = max(first, at), min(last, at + length)
        if low < high:
            found.append((high - low, start + low - at))
        at += length
    return tuple(found)
