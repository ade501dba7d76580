# SPDX-License-Identifier: Apache-2.0
"""Casts to FP8 with one scale a tensor, in Triton: rows, columns, or both from one read."""

# ruff: noqa: ANN001, ANN201, ANN202 (the compiler traces types)
# mypy: ignore-errors

import triton
import triton.language as tl

from fused_ops.quantize.triton_block_kernels import FLT_MAX, bits_of, float_of

TARGETS = ("sm_90", "sm_100", "sm_120")


@triton.jit
def _encode_scale(amax, LARGEST: tl.constexpr, POW2: tl.constexpr):
    """LARGEST / amax, at most FLT_MAX; 1 if amax is 0, Inf or NaN; POW2: its mantissa cleared."""
    scale = tl.minimum(tl.div_rn(LARGEST, amax), FLT_MAX)
    usual = (amax > 0.0) & (amax <= FLT_MAX)
    scale = tl.where(usual, scale, 1.0)
    return float_of(bits_of(scale) & 0x7F800000) if POW2 else scale


@triton.jit
def cast_fp8(
    x_ptr, amax_ptr, row_ptr, col_ptr, scale_ptr, count_ptr, rows, cols, row_stride, col_stride,
    E5M2: tl.constexpr, LARGEST: tl.constexpr, POW2: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, COUNT: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """x [rows, cols] -> FP8 bytes of x * scale, as it is (ROW) and transposed (COLUMN).

    scale_ptr gets 1 / scale; count_ptr (int32, zero before), with COUNT, how many values saturate.
    Strides are those of the outputs' rows.
    """
    first_row, first_col = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1) * COLS
    r, c = tl.arange(0, ROWS), tl.arange(0, COLS)
    here = (first_row + r < rows)[:, None] & (first_col + c < cols)[None, :]
    x_ptr += first_row * cols + first_col
    x = tl.load(x_ptr + (r[:, None] * cols + c[None, :]), mask=here, other=0.0).to(tl.float32)
    scale = _encode_scale(tl.load(amax_ptr), LARGEST, POW2)
    fitted = x * scale
    if COUNT:
        above = tl.sum(tl.sum((tl.abs(fitted) > LARGEST).to(tl.int32), axis=1), axis=0)
        if above != 0:
            tl.atomic_add(count_ptr, above, sem="relaxed")
    fitted = tl.clamp(fitted, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    kind: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
    byte = fitted.to(kind).to(tl.uint8, bitcast=True)
    if ROW:
        row_ptr += first_row * row_stride + first_col
        tl.store(row_ptr + (r[:, None] * row_stride + c[None, :]), byte, mask=here)
    if COLUMN:
        col_ptr += first_col.to(tl.int64) * col_stride + first_row
        there = (first_col + c < cols)[:, None] & (first_row + r < rows)[None, :]
        # Ranges of its own, not transposed ones: the compiler sees which addresses are neighbours.
        tl.store(col_ptr + (c[:, None] * col_stride + r[None, :]), tl.trans(byte), mask=there)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr, tl.div_rn(1.0, scale))
