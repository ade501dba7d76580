# SPDX-License-Identifier: Apache-2.0
"""SwiGLU and squared ReLU in Triton: one read and one write a pass, FP32 in between.

A program takes a piece of one row, or, where a row has a factor whose gradient is a sum over the
row, the whole of it. Written for NVIDIA's Hopper and later; triton_backend.py calls them.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (the compiler traces types)
# mypy: ignore-errors

import triton
import triton.language as tl

TARGETS = ("sm_90", "sm_100", "sm_120")


@triton.jit
def _load(pointer, column, inside):
    return tl.load(pointer + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def activation_forward(
    x_ptr, scale_ptr, y_ptr, features,
    GATED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x [rows, (2) features], scale [rows] -> y [rows, features]. Grid: rows, pieces of a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    if GATED:
        gate = _load(x_ptr + row * features * 2, column, inside)
        up = _load(x_ptr + row * features * 2 + features, column, inside)
        y = gate / (1.0 + tl.exp(-gate)) * up
    else:
        positive = tl.maximum(_load(x_ptr + row * features, column, inside), 0.0)
        y = positive * positive
    if SCALED:
        y *= tl.load(scale_ptr + row).to(tl.float32)
    tl.store(y_ptr + row * features + column, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activation_backward(
    x_ptr, scale_ptr, dy_ptr, dx_ptr, dscale_ptr, features, span,
    GATED: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of x and of scale. Grid: rows, pieces of `span` columns (scaled: whole rows)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * span
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_ptr + row).to(tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(first, first + span, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < features
        dy = _load(dy_ptr + row * features, column, inside)
        if GATED:
            gate = _load(x_ptr + row * features * 2, column, inside)
            up = _load(x_ptr + row * features * 2 + features, column, inside)
            sigmoid = 1.0 / (1.0 + tl.exp(-gate))
            silu = gate * sigmoid
            if SCALED:
                total += dy * silu * up
                dy *= scale
            d_gate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
            place = dx_ptr + row * features * 2 + column
            tl.store(place, d_gate.to(dx_ptr.dtype.element_ty), mask=inside)
            tl.store(place + features, (dy * silu).to(dx_ptr.dtype.element_ty), mask=inside)
        else:
            positive = tl.maximum(_load(x_ptr + row * features, column, inside), 0.0)
            if SCALED:
                total += dy * positive * positive
                dy *= scale
            dx = 2.0 * positive * dy
            place = dx_ptr + row * features + column
            tl.store(place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if SCALED:
        tl.store(dscale_ptr + row, tl.sum(total, axis=0).to(dscale_ptr.dtype.element_ty))
