# SPDX-License-Identifier: Apache-2.0
"""Quantizers and amaxes of all groups of rows (experts) in one launch.

A program takes a tile of 64 rows of one group and finds in tables (`fused_ops.groups`) which: every
group is a matrix of its own, with its amax, its key, and dither rows counted from its first row.
Row operands lie as the rows do; column operands in the column layout, each group padded to 16.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (the compiler traces types)
# mypy: ignore-errors

import triton
import triton.language as tl

from fused_ops.quantize.triton_amax_kernels import raise_rotated
from fused_ops.quantize.triton_block_kernels import packed_bits, power, shift_of
from fused_ops.quantize.triton_fp8_kernels import _encode_scale
from fused_ops.quantize.triton_kernels import (
    _columns,
    _hand_in,
    _load_column_words,
    _requantize,
    _rows,
)

TARGETS = ("sm_90", "sm_100", "sm_120")


@triton.jit
def _place(place_ptr, tile_ptr):
    """Of this program's tile: group, first row, rows, first block, and its number in the group."""
    tile = tl.program_id(0)
    group = tl.load(tile_ptr + tile)
    place_ptr += 8 * group
    local = tile - tl.load(place_ptr + 3)
    return group, tl.load(place_ptr), tl.load(place_ptr + 1), tl.load(place_ptr + 2), local


@triton.jit
def _blocks_of_tile(first, count, local, blocks, BLOCKS: tl.constexpr):
    """Numbers [BLOCKS, 1] of this tile's blocks in the column layout; `blocks`, which is out of
    range, behind the group's end."""
    block = local * BLOCKS + tl.arange(0, BLOCKS)
    return tl.where(block < tl.cdiv(count, 16), first + block, blocks)[:, None]


@triton.jit
def _group_key(key_ptr, group, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        k0, k1 = tl.load(key_ptr + 2 * group), tl.load(key_ptr + 2 * group + 1)
    else:
        k0, k1 = group * 0, group * 0
    return k0.to(tl.uint32), k1.to(tl.uint32)


@triton.jit
def _finish_group(amax, outside, used_ptr, count_ptr, group, first, POW2: tl.constexpr):
    """As _finish, of a group; first: whether this is the group's first program."""
    if POW2:
        if first:
            tl.store(used_ptr + group, 2688.0 * power(shift_of(amax)))
        total = tl.sum(tl.reshape(outside, [outside.numel]), axis=0)
        if total != 0:
            tl.atomic_add(count_ptr + 2 * group, total & 0xFFFF, sem="relaxed")
            tl.atomic_add(count_ptr + 2 * group + 1, total >> 16, sem="relaxed")


@triton.jit(do_not_specialize=["row0", "row_block0", "column0", "column_block0"])
def grouped_quantize(
    x_ptr, signs_ptr, place_ptr, tile_ptr,
    r_amax_ptr, r_key_ptr, r_codes_ptr, r_scales_ptr, r_used_ptr, r_count_ptr,
    c_amax_ptr, c_key_ptr, c_codes_ptr, c_scales_ptr, c_used_ptr, c_count_ptr,
    cols, blocks, row0, row_block0, column0, column_block0,
    ROW: tl.constexpr, COLUMN: tl.constexpr, TILE: tl.constexpr,
    R_POW2: tl.constexpr, R_STOCHASTIC: tl.constexpr, R_CHOICE: tl.constexpr,
    R_NUMERATOR: tl.constexpr, R_FORM: tl.constexpr, R_SHIFT: tl.constexpr,
    C_POW2: tl.constexpr, C_STOCHASTIC: tl.constexpr, C_CHOICE: tl.constexpr,
    C_NUMERATOR: tl.constexpr, C_FORM: tl.constexpr, C_SHIFT: tl.constexpr,
    C_HADAMARD: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x bf16 [rows, cols], cols a multiple of 16 -> as it is (ROW), and its transpose (COLUMN).

    The transpose is [cols, 16 blocks]. See quantize_pair, and quantize_rows for TILE, FORM, SHIFT.
    row0, row_block0: global row, and column / 16, of a group's first element; column0,
    column_block0: the same of the transpose. Grid: tiles x WORDS 32-bit words.
    """
    group, start, count, first, local = _place(place_ptr, tile_ptr)
    is_first = (local == 0) & (tl.program_id(1) == 0)
    if COLUMN:
        amax = tl.load(c_amax_ptr + group)
        k0, k1 = _group_key(c_key_ptr, group, C_STOCHASTIC)
        block = _blocks_of_tile(first, count, local, blocks, 4)
        word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
        # Rows are counted by blocks of the column layout: as if x were padded like it.
        shifted = x_ptr + (start - first * 16).to(tl.int64) * (cols // 2)
        outside = _columns(
            shifted, amax, signs_ptr, k0, k1, c_codes_ptr, c_scales_ptr, block, word,
            first * 16 + count, cols, blocks, column0, column_block0 - first,
            True, C_POW2, C_STOCHASTIC, C_CHOICE, C_NUMERATOR, C_HADAMARD, TILE, C_FORM, C_SHIFT,
            False,
        )  # fmt: skip
        _finish_group(amax, outside, c_used_ptr, c_count_ptr, group, is_first, C_POW2)
    if ROW:
        amax = tl.load(r_amax_ptr + group)
        k0, k1 = _group_key(r_key_ptr, group, R_STOCHASTIC)
        chunk = (tl.program_id(1) * (WORDS // 8) + tl.arange(0, WORDS // 8))[None, :]
        words: tl.constexpr = 1 if R_FORM == 0 else 2 * R_FORM  # int64 of a block
        ahead = start.to(tl.int64) * (cols // 16)
        scales_ahead = ahead // 16 if TILE else ahead
        total = tl.zeros([ROWS, WORDS // 8], tl.int32)
        for step in range(0, 64 // ROWS):
            row = (local * 64 + step * ROWS + tl.arange(0, ROWS))[:, None]
            total += _rows(
                x_ptr + start.to(tl.int64) * (cols // 2), amax, signs_ptr, k0, k1,
                r_codes_ptr + ahead * words, r_scales_ptr + scales_ahead, row, chunk,
                count, cols // 16, cols, row0, row_block0,
                True, R_POW2, R_STOCHASTIC, R_CHOICE, R_NUMERATOR, False, TILE, R_FORM, R_SHIFT,
            )  # fmt: skip
        _finish_group(amax, total, r_used_ptr, r_count_ptr, group, is_first, R_POW2)


@triton.jit
def grouped_amax(
    x_ptr, signs_ptr, place_ptr, tile_ptr, plain_ptr, rotated_ptr, flag_ptr, cols,
    ROTATED: tl.constexpr, FLAG: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Amax of each group of rows of x bf16, and (ROTATED) of its rotated columns: fp32 bits.

    plain_ptr, rotated_ptr: int32 [groups], zero before. FLAG: see amax_flat. Grid: tiles x WORDS.
    """
    group, start, count, _, local = _place(place_ptr, tile_ptr)
    block = (local * 4 + tl.arange(0, 4))[:, None]
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    inside = (block * 16 < count) & (word * 2 < cols)
    x_ptr += start.to(tl.int64) * (cols // 2)
    words = _load_column_words(x_ptr, block, word, inside, count, cols // 2, False)
    own = tl.where(inside, packed_bits(words), 0)
    _hand_in(tl.max(tl.max(own, axis=1), axis=0), plain_ptr + group, flag_ptr, FLAG)
    if ROTATED:
        rotated_ptr += group
        raise_rotated(words, tl.load(rotated_ptr, volatile=True), signs_ptr, rotated_ptr, False)


@triton.jit
def grouped_requantize(
    q_ptr, q_scales_ptr, q_amax_ptr, amax_ptr, codes_ptr, scales_ptr, used_ptr, count_ptr,
    place_ptr, tile_ptr, words, blocks,
    POW2: tl.constexpr, CHOICE: tl.constexpr, NUMERATOR: tl.constexpr, Q_NUMERATOR: tl.constexpr,
    Q_TILE: tl.constexpr, FORM: tl.constexpr, SHIFT: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """requantize_columns of each group of rows, all of whole blocks. Grid: tiles x WORDS."""
    group, _, count, first, local = _place(place_ptr, tile_ptr)
    block = _blocks_of_tile(first, count, local, blocks, 4)
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    amax = tl.load(amax_ptr + group)
    total = _requantize(
        q_ptr, q_scales_ptr, tl.load(q_amax_ptr + group), amax, codes_ptr, scales_ptr, block, word,
        blocks * 16, words, blocks,
        POW2, CHOICE, NUMERATOR, Q_NUMERATOR, Q_TILE, FORM, SHIFT, True,
    )  # fmt: skip
    is_first = (local == 0) & (tl.program_id(1) == 0)
    _finish_group(amax, total, used_ptr, count_ptr, group, is_first, POW2)


@triton.jit
def grouped_cast_fp8(
    x_ptr, amax_ptr, row_ptr, col_ptr, scale_ptr, place_ptr, tile_ptr, cols, col_stride,
    E5M2: tl.constexpr, LARGEST: tl.constexpr, POW2: tl.constexpr,
    ROW: tl.constexpr, COLUMN: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """cast_fp8 of each group of rows of x bf16 [rows, cols]: as it is, and in the column layout.

    scale_ptr gets 1 / scale of each group. Padding of columns is zero. Grid: tiles x COLS.
    """
    group, start, count, first, local = _place(place_ptr, tile_ptr)
    row = local * 64 + tl.arange(0, 64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    here = (row < count)[:, None] & (col < cols)[None, :]
    from_start = (start + row).to(tl.int64)[:, None] * cols + col[None, :]
    x = tl.load(x_ptr + from_start, mask=here, other=0.0).to(tl.float32)
    scale = _encode_scale(tl.load(amax_ptr + group), LARGEST, POW2)
    fitted = tl.clamp(x * scale, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    kind: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
    byte = fitted.to(kind).to(tl.uint8, bitcast=True)
    if ROW:
        tl.store(row_ptr + from_start, byte, mask=here)
    if COLUMN:
        there = (col < cols)[:, None] & (row < tl.cdiv(count, 16) * 16)[None, :]
        place = col.to(tl.int64)[:, None] * col_stride + (first * 16 + row)[None, :]
        tl.store(col_ptr + place, tl.trans(byte), mask=there)
    if (local == 0) & (tl.program_id(1) == 0):
        tl.store(scale_ptr + group, tl.div_rn(1.0, scale))
