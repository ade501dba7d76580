# SPDX-License-Identifier: Apache-2.0
"""The linear layer of a stack of experts: one weight and one amax an expert, ragged tokens.

Each expert is its own matrix for the quantizer: blocks, Hadamard groups and padding end with its
tokens, so padding never enters an amax. Dither is keyed with the expert's number. On a GPU all
experts are taken together where they can be (`fused_ops.grouped_cuda`); here they go one by one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fused_ops import grouped_cuda
from fused_ops.dispatch import outside_graph
from fused_ops.formats import Operand, QuantizedTensor
from fused_ops.linear import (
    check_shapes,
    dgrad,
    dummy_gradient,
    wgrad,
    wgrad_input,
    without_gradient,
)
from fused_ops.linear_call import LinearCall
from fused_ops.main_grad import Zeros, sum_of
from fused_ops.operands import (
    amax_of,
    has_shared_amax,
    observe,
    pack,
    quantize_operand,
    unpack,
)
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.weight_operands import weight_operand


def grouped_linear(
    x: Tensor, weight: Tensor, tokens_per_expert: Sequence[int] | Tensor, *, call: LinearCall
) -> Tensor:
    """Rows of expert e, x_e [T_e, in], times weight[e]^T: forward and backward as the recipe says.

    Args:
        x: [tokens, in], sorted by expert. Rows after the last expert's are ignored: they give zero
            and get zero gradient.
        weight: [experts, out, in], same dtype.
        tokens_per_expert: how many rows each expert has; 0 is fine. A tensor on a device is read,
            which waits for the device.
        call: `key.expert` is the global number of the first expert here; `main_grad` is fp32
            [experts, out, in]. `comm.reduce_amax` gets the amaxes of all experts in one tensor;
            `comm.origin` gives the row of each expert's own first token (0 unless its tokens are
            cut over ranks).

    Returns:
        [tokens, out] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or counts that do not fit.
    """
    if is_dynamo_compiling():
        return outside_graph(grouped_linear, x, weight, tokens_per_expert, call=call)
    if isinstance(tokens_per_expert, Tensor):
        tokens_per_expert = tokens_per_expert.tolist()
    counts = [int(n) for n in tokens_per_expert]
    if weight.dim() != 3 or x.dim() != 2:
        raise ValueError(
            "grouped_linear needs x [tokens, in] and weight [experts, out, in], got "
            f"{tuple(x.shape)} and {tuple(weight.shape)}; stack the experts' weights"
        )
    check_shapes(x, weight, None, call)
    if len(counts) != len(weight) or min(counts, default=0) < 0 or sum(counts) > len(x):
        raise ValueError(
            f"tokens_per_expert must be {len(weight)} counts that sum to at most {len(x)} rows, "
            f"got {counts}; count the rows that were dispatched to this rank"
        )
    weight = without_gradient(weight)
    if grouped_cuda.reason(x, weight, call) is None:
        return grouped_cuda.GroupedLinearTogether.apply(x, weight, counts, call)
    return _GroupedLinear.apply(x, weight, counts, call)


def _experts(call: LinearCall, count: int) -> list[LinearCall]:
    """The call of each expert."""
    keys = [call.key.with_expert(e) for e in range(count)]
    return [replace(call, key=key, name=f"{call.name} expert {key.expert}") for key in keys]


def _amaxes(call: LinearCall, name: str, parts: Sequence[Tensor], columns: bool) -> list[Any]:
    """Each expert's amax, reduced over ranks all at once; None where the recipe needs none.

    Also of experts without tokens here: other ranks may have some, and wait for this one.
    """
    spec = call.spec(name)
    if not has_shared_amax(spec):
        return [None] * len(parts)
    own = [amax_of(call, name, part, columns=columns) for part in parts]
    if spec.row_scaled:  # ranks that share these rows hold as many of each expert
        rows = call.comm.reduce_amax(name, torch.cat(own))
        return list(rows.split([len(amax) for amax in own]))
    return list(call.comm.reduce_amax(name, torch.stack(own)))


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int], call: LinearCall) -> Tensor:
        calls = _experts(call, len(counts))
        parts = x[: sum(counts)].split(counts)
        y = x.new_empty(x.shape[0], weight.shape[1])
        y[sum(counts) :].zero_()
        outputs = y[: sum(counts)].split(counts)
        forward_amaxes = _amaxes(call, "fprop.x", parts, False)
        ctx.save_input = ctx.needs_input_grad[1]
        forwards: list[Operand] = []
        for e, part in enumerate(parts):
            qx = quantize_operand(calls[e], "fprop.x", part, amax=forward_amaxes[e])
            forwards.append(qx)
            if not counts[e]:
                continue
            qw = weight_operand(calls[e], "fprop.w", weight[e], e)
            observe(calls[e], "fprop.x", part, qx)
            observe(calls[e], "fprop.w", weight[e], qw)
            product = scaled_matmul(
                qx, qw, out_dtype=x.dtype, decode=call.recipe.decode,
                row_block=call.row_block, implementation=call.implementation,
            )  # fmt: skip
            outputs[e].copy_(product)
        ctx.packed = []
        tensors: list[Tensor] = []
        if ctx.save_input:
            amaxes = _amaxes(call, "wgrad.x", _wgrad_sources(call, parts, forwards), True)
            for e, part in enumerate(parts):
                saved, rest = pack(wgrad_input(calls[e], part, forwards[e], amaxes[e]))
                tensors += saved
                ctx.packed.append((len(saved), rest))
        ctx.save_for_backward(weight, *tensors)
        ctx.calls, ctx.counts, ctx.weight, ctx.shape = calls, counts, weight, x.shape
        ctx.call = call
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        counts: list[int] = ctx.counts
        weight, *tensors = ctx.saved_tensors
        parts = dy[: sum(counts)].split(counts)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = dy.new_empty(ctx.shape)
            dx[sum(counts) :].zero_()
            outputs = dx[: sum(counts)].split(counts)
            amaxes = _amaxes(call, "dgrad.dy", parts, False)
            for e, part in enumerate(parts):
                if counts[e]:
                    outputs[e].copy_(dgrad(ctx.calls[e], part, weight[e], e, amaxes[e]))
        if ctx.save_input:
            amaxes = _amaxes(call, "wgrad.dy", parts, True)
            main_grad = sum_of(ctx.weight) if call.main_grad else None
            own = None if main_grad is not None else torch.zeros_like(weight)
            start = 0
            for e, (size, rest) in enumerate(ctx.packed):
                x_t = unpack(tensors[start : start + size], rest)
                start += size
                if not counts[e]:
                    continue
                target = _part_of(main_grad, e)
                product = wgrad(ctx.calls[e], parts[e], x_t, target, weight.dtype, amaxes[e])
                if own is not None:
                    own[e] = product
            dw = dummy_gradient(ctx.weight) if call.main_grad else own
        return dx, dw, None, None


def _part_of(main_grad: Tensor | Zeros | None, expert: int) -> Tensor | Zeros | None:
    if isinstance(main_grad, Zeros):
        return Zeros(main_grad.tensor[expert])
    return None if main_grad is None else main_grad[expert]


def _wgrad_sources(
    call: LinearCall, parts: Sequence[Tensor], forwards: Sequence[Operand]
) -> Sequence[Tensor]:
    """What the operand of wgrad is quantized from: x, or the dequantized forward operand."""
    if call.spec("wgrad.x").source != "forward":
        return parts
    return [
        forward.dequantize() if isinstance(forward, QuantizedTensor) else part
        for part, forward in zip(parts, forwards)
    ]
