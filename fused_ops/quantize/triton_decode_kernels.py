# SPDX-License-Identifier: Apache-2.0
"""Codes of any block format -> numbers, in Triton: operands of BF16 cores, and dequantization."""

# ruff: noqa: ANN001, ANN201 (the compiler traces types)
# mypy: ignore-errors

import triton
import triton.language as tl

from fused_ops.quantize.triton_block_kernels import e4m3_value, float_of

TARGETS = ("sm_90", "sm_100", "sm_120")


@triton.jit
def decode_codes(
    codes_ptr, scales_ptr, amax_ptr, out_ptr, rows, width, blocks,
    ELEMENT: tl.constexpr, SCALE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    NUMERATOR: tl.constexpr, ROW_SCALED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """codes [rows, width] -> out [rows, width], (code * scale) * (amax / NUMERATOR).

    ELEMENT: 0 E2M1 (two codes a byte), 1 E4M3, 2 E5M2. SCALE: 0 E4M3, 1 E8M0, 2 fp32; one for
    TILE rows and BLOCK columns. NUMERATOR 0: without a tensor scale. out: bf16 or fp32. Grid:
    tiles of ROWS x COLS, those of a row neighbours.
    """
    across = (width + COLS - 1) // COLS
    row = ((tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS))[:, None]
    col = ((tl.program_id(0) % across) * COLS + tl.arange(0, COLS))[None, :]
    inside = (row < rows) & (col < width)
    index = row.to(tl.int64) * width + col
    if ELEMENT == 0:
        code = tl.load(codes_ptr + index // 2, mask=inside, other=0).to(tl.int32)
        code = code >> ((col & 1) * 4)
        # The three bits as the top of a subnormal or small float: 2**126 makes E2M1 of it.
        value = float_of(((code & 7) << 22) | ((code & 8) << 28)) * (2.0**126)
    else:
        byte = tl.load(codes_ptr + index, mask=inside, other=0)
        kind: tl.constexpr = tl.float8e4nv if ELEMENT == 1 else tl.float8e5
        value = byte.to(kind, bitcast=True).to(tl.float32)
    place = (row // TILE).to(tl.int64) * blocks + col // BLOCK
    scale = tl.load(scales_ptr + place, mask=inside, other=0)
    if SCALE == 0:
        scale = e4m3_value(scale)
    elif SCALE == 1:
        bits = scale.to(tl.int32)
        bits = tl.where(bits == 255, 0x7FC00000, tl.where(bits == 0, 1 << 22, bits << 23))
        scale = float_of(bits)
    value = value * scale
    if NUMERATOR > 0:
        amax = tl.load(amax_ptr + row, mask=row < rows) if ROW_SCALED else tl.load(amax_ptr)
        value = value * tl.div_rn(amax, NUMERATOR)
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=inside)
