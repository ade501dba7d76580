# SPDX-License-Identifier: Apache-2.0
"""RMSNorm in Triton: one pass forward, one pass backward, and a small sum over partial sums.

A row is one group of features of one token; x is [tokens, groups, size]. The gradient of the weight
is summed in FP32 by a fixed number of programs, each over its rows in order, and then over the
programs in order: the result depends on no timing. triton_backend.py calls these.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (the compiler traces types)
# mypy: ignore-errors

import triton
import triton.language as tl

TARGETS = ("sm_90", "sm_100", "sm_120")


@triton.jit
def _gain(weight_ptr, first, column, within, ZERO_CENTERED: tl.constexpr):
    gain = tl.load(weight_ptr + first + column, mask=within, other=0.0).to(tl.float32)
    return gain + 1.0 if ZERO_CENTERED else gain


@triton.jit
def _place(token, group, groups, size, column):
    """Offsets [ROWS, BLOCK] of the elements of rows."""
    return ((token.to(tl.int64) * groups + group) * size)[:, None] + column[None, :]


@triton.jit
def rmsnorm_forward(
    x_ptr, weight_ptr, y_ptr, rstd_ptr, tokens, groups, size, eps,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y, and 1 / sqrt(mean square + eps) of each row. Grid: tokens / ROWS, groups."""
    group = tl.program_id(1)
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    within = column < size
    mask = (token < tokens)[:, None] & within[None, :]
    place = _place(token, group, groups, size, column)
    x = tl.load(x_ptr + place, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / size + eps)
    gain = _gain(weight_ptr, group * size, column, within, ZERO_CENTERED)
    y = x * rstd[:, None] * gain[None, :]
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + token.to(tl.int64) * groups + group, rstd, mask=token < tokens)


@triton.jit
def rmsnorm_backward(
    x_ptr, weight_ptr, rstd_ptr, dy_ptr, more_ptr, dx_ptr, partial_ptr, tokens, groups, size,
    ZERO_CENTERED: tl.constexpr, MORE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx (MORE: plus another gradient of x), and partial sums of dweight [programs, features].

    Grid: programs, groups. The next rows are loaded before those at hand are summed.
    """
    group = tl.program_id(1)
    step = tl.num_programs(0) * ROWS
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    within = column < size
    gain = _gain(weight_ptr, group * size, column, within, ZERO_CENTERED)
    total = tl.full([ROWS, BLOCK], 0.0, tl.float32)
    mask = (token < tokens)[:, None] & within[None, :]
    place = _place(token, group, groups, size, column)
    next_x = tl.load(x_ptr + place, mask=mask, other=0.0)
    next_dy = tl.load(dy_ptr + place, mask=mask, other=0.0)
    for _ in range(tl.program_id(0) * ROWS, tokens, step):
        x, dy = next_x.to(tl.float32), next_dy.to(tl.float32)
        here, here_mask, here_token = place, mask, token
        token += step
        mask = (token < tokens)[:, None] & within[None, :]
        place = _place(token, group, groups, size, column)
        next_x = tl.load(x_ptr + place, mask=mask, other=0.0)
        next_dy = tl.load(dy_ptr + place, mask=mask, other=0.0)
        rstd_place = rstd_ptr + here_token.to(tl.int64) * groups + group
        rstd = tl.load(rstd_place, mask=here_token < tokens, other=0.0)[:, None]
        normal = x * rstd
        total += dy * normal
        dy *= gain[None, :]
        dx = (dy - normal * (tl.sum(dy * normal, axis=1) / size)[:, None]) * rstd
        if MORE:
            dx += tl.load(more_ptr + here, mask=here_mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + here, dx.to(dx_ptr.dtype.element_ty), mask=here_mask)
    features = groups * size
    partial = partial_ptr + tl.program_id(0).to(tl.int64) * features + group * size
    tl.store(partial + column, tl.sum(total, axis=0), mask=within)


@triton.jit
def sum_partials(partial_ptr, out_ptr, programs, features, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """[programs, features] fp32 -> their sum over programs, always in the same order."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full([ROWS, BLOCK], 0.0, tl.float32)
    for start in range(0, programs, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < programs)[:, None] & (column < features)[None, :]
        total += tl.load(
            partial_ptr + row[:, None] * features + column[None, :], mask=mask, other=0.0
        )
    out = tl.sum(total, axis=0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + column, out, mask=column < features)
