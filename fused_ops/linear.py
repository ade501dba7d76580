# SPDX-License-Identifier: Apache-2.0
"""The linear layer: one autograd function, three GEMMs, each operand as its recipe says.

    fprop   Y  = X  . W^T + b    [tokens, out]    blocks of X and W lie along in
    dgrad   dX = dY . W          [tokens, in]     blocks of dY and W lie along out
    wgrad   dW = dY^T . X        [out, in]        blocks of dY and X lie along tokens

Blocks lie along the axis that a GEMM contracts, so each of the three tensors is needed along two
axes, and codes along one are not those along the other. X and dY are quantized twice from the
high-precision tensor; W, and X where its recipe says `source: forward`, may be quantized again from
the codes that the forward multiplied. What is saved for backward is X as the operand of wgrad:
codes, not BF16. Nothing waits for the device unless `check_finite` asks for it. torch.compile
leaves the function out of its graphs.

What one operand goes through is in `operands`, the weight's codes are in `weight_operands`, the
products in `scaled_matmul`. Where ranks hold parts of the tokens of X or dY, these are gathered
first; or each quantizes its own part as a piece of the whole (`Part`), and the codes are gathered.
The values are the same.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fused_ops.dispatch import outside_graph
from fused_ops.formats import Operand, QuantizedTensor
from fused_ops.linear_call import Comm, LinearCall, LocalComm, Observer, Part, Runs
from fused_ops.main_grad import Zeros, note_added, sum_of
from fused_ops.operands import (
    Source,
    observe,
    operand_form,
    pack,
    quantize_both,
    quantize_operand,
    unpack,
)
from fused_ops.quantize import dequantize
from fused_ops.recipe import GemmRecipe, is_quantized
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.weight_operands import transposed_weight, weight_operand

__all__ = ["Comm", "LinearCall", "LocalComm", "Observer", "Runs", "linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, call: LinearCall) -> Tensor:
    """x . weight^T + bias, forward and backward as `call.recipe` says.

    Args:
        x: [..., in], fp32, bf16 or fp16; this rank's part if `call.comm` gathers.
        weight: [out, in], same dtype.
        bias: [out] or None.
        call: recipe, key, ranks, and where things are kept.

    Returns:
        [..., out] in x's dtype.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        FloatingPointError: Inf or NaN in an operand that is quantized, if `call.check_finite`.
    """
    if is_dynamo_compiling():
        # Keys change every step and codes are kept in Python: constants of a graph would be stale.
        return outside_graph(linear, x, weight, bias, call=call)
    check_shapes(x, weight, bias, call)
    return _Linear.apply(x, without_gradient(weight), bias, call)


def check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall) -> None:
    """ValueError with rule, value and remedy."""
    layer = call.name or "a linear layer"
    if x.dim() < 1 or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"{layer}: the last axis of x must be the weight's, got x {tuple(x.shape)} and weight "
            f"{tuple(weight.shape)}; transpose one or correct the layer's input size"
        )
    if x.dtype != weight.dtype:
        raise ValueError(
            f"{layer}: x and weight must have one dtype, got {x.dtype} and {weight.dtype}; cast "
            "the input, or build the layer with params_dtype of the input"
        )
    if not x.dtype.is_floating_point or x.dtype.itemsize not in (2, 4):
        raise ValueError(f"{layer}: x must be fp32, bf16 or fp16, got {x.dtype}; cast it")
    if bias is not None and tuple(bias.shape) != (weight.shape[-2],):
        raise ValueError(
            f"{layer}: bias must be [{weight.shape[-2]}], got {tuple(bias.shape)}; "
            "it has one value per row of the weight"
        )


def without_gradient(weight: Tensor) -> Tensor:
    """The weight, detached under no_grad: then X is not made an operand of a wgrad to come."""
    return weight if torch.is_grad_enabled() else weight.detach()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: LinearCall
    ) -> Tensor:
        ctx.save_input = ctx.needs_input_grad[1]
        spec = call.spec("wgrad.x")
        # In high precision this rank's part is kept, and gathered again in the backward.
        ctx.save_part = not is_quantized(spec) and spec.source == "tensor"
        names = input_operands(call.recipe, ctx.save_input)
        both, part = len(names) == 2, _part(call, names)
        full = x if part else call.comm.gather_input(x)
        own = replace(call, comm=part) if part else call
        flat = full.reshape(-1, full.shape[-1])
        source, kept = Source(flat, call.nonfinite), None
        form = operand_form(call, "fprop", flat, (flat.shape[0], weight.shape[0]))
        if part or (ctx.save_input and spec.source == "forward"):
            form = "codes"  # they move, or wgrad's operand is made of them
        if both:
            qx, kept = quantize_both(own, ("fprop.x", "wgrad.x"), source, (form, "codes"))
        else:
            qx = quantize_operand(own, "fprop.x", source, form=form)
        ctx.part = part if both else None
        gathered = _gather(part, "fprop.x", qx) if part else None
        qw = weight_operand(call, "fprop.w", weight)  # while X moves
        qx = gathered() if gathered else qx
        observe(call, "fprop.x", flat, qx)
        observe(call, "fprop.w", weight, qw)
        if kept is not None:
            observe(call, "wgrad.x", flat, kept)
        y = scaled_matmul(
            qx, qw, out_dtype=x.dtype, bias=bias, decode=call.recipe.decode,
            row_block=call.row_block, implementation=call.implementation,
        )  # fmt: skip
        tensors: list[Tensor] = []
        if ctx.save_input:
            if kept is None:
                kept = x if ctx.save_part else wgrad_input(call, flat, qx)
            tensors, ctx.rest = pack(kept)
        ctx.save_for_backward(weight, *tensors)
        # Of the whole input, whose first axis ranks cut.
        parts = len(y) // len(flat) if part else 1
        ctx.shape = (parts * full.shape[0], *full.shape[1:])
        ctx.call, ctx.weight, ctx.has_bias = call, weight, bias is not None
        return call.comm.scatter_output(y.view(*ctx.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        weight, *tensors = ctx.saved_tensors
        dx = dw = db = handle = None
        needed = {"dgrad.dy": ctx.needs_input_grad[0], "wgrad.dy": ctx.save_input}
        names = tuple(name for name in needed if needed[name])
        part = _part(call, names)
        dy = dy if part else call.comm.gather_output_grad(dy)
        dy = dy.reshape(-1, dy.shape[-1])
        gathered_input = None
        operands = dict(zip(names, _dy_operands(call, dy, names, weight.shape[1], part)))
        if ctx.save_input and ctx.part:  # while dgrad computes, and after dY's amaxes
            gathered_input = _gather(ctx.part, "wgrad.x", unpack(tensors, ctx.rest))
        if ctx.needs_input_grad[0]:
            product = _dgrad(call, dy, operands["dgrad.dy"](), weight)
            dx, handle = call.comm.reduce_input_grad(product.view(ctx.shape))
        if ctx.save_input:
            x_t = gathered_input() if gathered_input else unpack(tensors, ctx.rest)
            if ctx.save_part:
                full = call.comm.gather_input(tensors[0]).reshape(-1, ctx.shape[-1])
                x_t = wgrad_input(call, full, full)
            main_grad = sum_of(ctx.weight) if call.main_grad else None
            dw = wgrad(call, dy, x_t, main_grad, weight.dtype, dy_t=operands["wgrad.dy"]())
            if call.main_grad:
                dw = dummy_gradient(ctx.weight)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = dy.sum(0)
        if handle is not None:
            handle.wait()
        return dx, dw, db, None


def input_operands(recipe: GemmRecipe, backward: bool) -> tuple[str, ...]:
    """The operands that are made of X itself in the forward, the one of wgrad if `backward`.

    Not those of wgrad that are not quantized, nor those made of the forward's operand.
    """
    spec = recipe.wgrad_x
    both = backward and is_quantized(spec) and spec.source == "tensor"
    return ("fprop.x", "wgrad.x") if both else ("fprop.x",)


def _part(call: LinearCall, names: tuple[str, ...]) -> Part | None:
    """This rank's part of X or dY, if its codes are to move.

    An observer, and a call with `check_finite`, are shown whole operands.
    """
    if not names or call.observer is not None or call.check_finite:
        return None
    return call.comm.part(names)


def _gather(part: Part, name: str, operand: Operand) -> Callable[[], Operand]:
    assert isinstance(operand, QuantizedTensor), "codes move"
    return part.gather(name, operand)


def wgrad_input(
    call: LinearCall, x: Tensor, forward: Operand, amax: Tensor | None = None
) -> Operand:
    """X^T [in, tokens] as the operand of wgrad; the forward's own if that is to be decoded later.

    Args:
        x: [tokens, in].
        forward: X [tokens, in] as the forward multiplied it, which the operand is made of if its
            source is "forward". In high precision it stays in these codes until wgrad reads it.
        amax: see `quantize_operand`.
    """
    spec, source = call.spec("wgrad.x"), x
    if spec.source == "forward" and not isinstance(forward, Tensor):
        if not is_quantized(spec):
            return forward
        assert isinstance(forward, QuantizedTensor), "the forward operand is kept in codes"
        source = dequantize(forward)
    operand = quantize_operand(call, "wgrad.x", source, columns=True, amax=amax)
    observe(call, "wgrad.x", x, operand)
    return operand


def dgrad(
    call: LinearCall, dy: Tensor, weight: Tensor, expert: int = 0, amax: Tensor | None = None
) -> Tensor:
    """dX = dY . W [tokens, in] in dy's dtype.

    Args:
        dy: [tokens, out].
        weight: [out, in].
        expert: which of a stack the weight is.
        amax: of dY, see `quantize_operand`.
    """
    return _dgrad(call, dy, quantize_operand(call, "dgrad.dy", dy, amax=amax), weight, expert)


def _dy_operands(
    call: LinearCall, dy: Tensor, names: tuple[str, ...], inputs: int, part: Part | None
) -> list[Callable[[], Operand]]:
    """dY as operands of dgrad and wgrad: those in `names`, in their order; call one for it.

    Args:
        dy: [tokens, out], or this rank's part of the tokens.
        inputs: features of the layer's input.
        part: gathers the codes, which may take until an operand is asked for.
    """
    own = replace(call, comm=part) if part else call
    source = Source(dy, call.nonfinite)
    made: list[Operand] = []
    if len(names) == 2:
        tokens, outputs = dy.shape
        forms = ("codes", "codes")
        if not part:
            forms = (
                operand_form(call, "dgrad", dy, (tokens, inputs)),
                operand_form(call, "wgrad", dy, (outputs, inputs)),
            )
        made += quantize_both(own, ("dgrad.dy", "wgrad.dy"), source, forms)
    elif names:
        made.append(quantize_operand(own, names[0], source, columns=names[0] == "wgrad.dy"))
    if part:
        return [_gather(part, name, operand) for name, operand in zip(names, made)]
    return [partial(_same, operand) for operand in made]


def _same(operand: Operand) -> Operand:
    return operand


def _dgrad(call: LinearCall, dy: Tensor, qdy: Operand, weight: Tensor, expert: int = 0) -> Tensor:
    # dY may be this rank's part alone: the form follows the tokens that are multiplied.
    qw: Operand | None = transposed_weight(call, weight, dy, qdy.shape[0], expert)
    if qw is None:
        qw = weight_operand(call, "dgrad.w", weight, expert)
    observe(call, "dgrad.dy", dy, qdy)
    observe(call, "dgrad.w", weight, qw)
    return scaled_matmul(
        qdy, qw, out_dtype=dy.dtype, decode=call.recipe.decode, implementation=call.implementation
    )


def wgrad(
    call: LinearCall,
    dy: Tensor,
    x_t: Operand,
    main_grad: Tensor | Zeros | None,
    dtype: torch.dtype,
    amax: Tensor | None = None,
    dy_t: Operand | None = None,
) -> Tensor:
    """dW = dY^T . X [out, in], added to main_grad (fp32) if that is given, else new in `dtype`.

    Args:
        dy: [tokens, out].
        x_t: what `wgrad_input` gave: X^T [in, tokens], or X in the forward's codes.
        amax: of dY^T, see `quantize_operand`.
        dy_t: dY^T [out, tokens] as an operand, if it has been made already.
    """
    if not (isinstance(x_t, Tensor) or is_quantized(call.spec("wgrad.x"))):
        assert isinstance(x_t, QuantizedTensor), "the forward operand is kept in codes"
        x_t = dequantize(x_t, dy.dtype).t()
        observe(call, "wgrad.x", x_t.t(), x_t)
    if dy_t is None:
        dy_t = quantize_operand(call, "wgrad.dy", dy, columns=True, amax=amax)
    observe(call, "wgrad.dy", dy, dy_t)
    return scaled_matmul(
        dy_t, x_t, out_dtype=dtype, accumulate=main_grad, decode=call.recipe.decode,
        implementation=call.implementation,
    )  # fmt: skip


def dummy_gradient(weight: Tensor) -> Tensor | None:
    """What backward returns for a weight whose gradient is in main_grad already.

    megatron-core's data-parallel hook wants a gradient to arrive, and ignores its values when
    `grad_added_to_main_grad` is set; without that attribute there is no such hook.
    """
    note_added(weight)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.shape, dtype=weight.dtype, device=weight.device)
