# SPDX-License-Identifier: Apache-2.0
"""Products of all groups in one launch: ragged rows, or a ragged contraction.

A program forms one tile of the output of one group; tables on the device say which (see
`fused_ops.groups`). Operands are bf16, or FP8 whose sums are split: every SPLIT products are summed
by the cores and then added in fp32. Loads go by pointers, or by tensor descriptors (Hopper's TMA),
which put zeros behind the ends of a group.
"""

# ruff: noqa: ANN001, ANN201, ANN202, SIM108 (the compiler traces types)
# mypy: ignore-errors

import triton
import triton.language as tl

TARGETS = ("sm_90", "sm_100", "sm_120")
_GROUP = tl.constexpr(8)


@triton.jit
def _tile_of(local, tiles_m, tiles_n):
    """Tile (m, n) number `local`, in bands of _GROUP tiles along m that share what they read."""
    width = _GROUP * tiles_n
    first = local // width * _GROUP
    size = tl.minimum(tiles_m - first, _GROUP)
    inner = local % width
    return first + inner % size, inner // size


@triton.jit
def _factor(a_scale_ptr, b_scale_ptr, group, SCALED: tl.constexpr, FACTOR: tl.constexpr):
    """alpha of a group: each operation one rounding."""
    if SCALED:
        alpha = tl.load(a_scale_ptr + group) * tl.load(b_scale_ptr + group) * FACTOR
    else:
        alpha = 1.0
    return alpha


@triton.jit
def _describe(ptr, rows, inner, stride, BY_K: tl.constexpr, SIDE: tl.constexpr, K: tl.constexpr):
    """Descriptor of an operand [rows, inner], or, not BY_K, of its transpose in memory."""
    if BY_K:
        found = tl.make_tensor_descriptor(
            ptr, shape=[rows, inner], strides=[stride, 1], block_shape=[SIDE, K]
        )
    else:
        found = tl.make_tensor_descriptor(
            ptr, shape=[inner, rows], strides=[stride, 1], block_shape=[K, SIDE]
        )
    return found


@triton.jit
def _fetch(descriptor, row, inner, BY_K: tl.constexpr):
    """A tile [rows, inner] of an operand."""
    if BY_K:
        tile = descriptor.load([row, inner])
    else:
        tile = descriptor.load([inner, row]).T
    return tile


@triton.jit
def _read(ptr, rows, stride, k, limit, BY_K: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile [rows, k] by pointers; rows int64 and in range; zeros from `limit` on along k."""
    if BY_K:
        address = ptr + rows[:, None] * stride + k[None, :]
    else:
        address = ptr + k[None, :].to(tl.int64) * stride + rows[:, None]
    if EVEN_K:
        tile = tl.load(address)
    else:
        tile = tl.load(address, mask=k[None, :] < limit, other=0.0)
    return tile


@triton.jit
def _dot(a, b, acc, SPLIT: tl.constexpr):
    if SPLIT == 0:
        acc = tl.dot(a, b.T, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b.T, acc, max_num_imprecise_acc=SPLIT)
    return acc


@triton.jit
def _write_part(ptr, acc, row, col, rows, cols, ACCUMULATE: tl.constexpr):
    row += tl.arange(0, acc.shape[0])
    col += tl.arange(0, acc.shape[1])
    here = (row < rows)[:, None] & (col < cols)[None, :]
    place = ptr + row.to(tl.int64)[:, None] * cols + col[None, :]
    if ACCUMULATE:
        acc = tl.load(place, mask=here, other=0.0) + acc
    tl.store(place, acc.to(ptr.dtype.element_ty), mask=here)


@triton.jit
def _write(ptr, acc, row, col, rows, cols, ACCUMULATE: tl.constexpr):
    """acc to the tile at (row, col) of a matrix [rows, cols], or added to what is there."""
    half: tl.constexpr = acc.shape[1] // 2
    if ACCUMULATE and acc.shape[1] > 64:
        # Half by half: there are not registers for all that is read and all that is written.
        left, right = tl.split(tl.permute(tl.reshape(acc, [acc.shape[0], 2, half]), (0, 2, 1)))
        _write_part(ptr, left, row, col, rows, cols, True)
        _write_part(ptr, right, row, col + half, rows, cols, True)
    else:
        _write_part(ptr, acc, row, col, rows, cols, ACCUMULATE)


@triton.jit
def grouped_rows(
    a_ptr, b_ptr, out_ptr, a_scale_ptr, b_scale_ptr, place_ptr, tile_ptr,
    n, k, stride_a, stride_b, expert_b,
    SCALED: tl.constexpr, FACTOR: tl.constexpr, B_BY_K: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr, DESCRIBED: tl.constexpr, LEVEL: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """out[rows of e] = alpha_e a[rows of e] . b_e^T: a [tokens, k], b_e [n, k], out [tokens, n].

    expert_b: elements from b_e to b_(e+1). n and k are multiples of 16; sides of tiles are M, N, K,
    LEVEL is the column of `place` with the first tile of M rows. Grid: tiles.
    """
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(n, N)
    group = tl.load(tile_ptr + pid // tiles_n)
    start = tl.load(place_ptr + 8 * group)
    count = tl.load(place_ptr + 8 * group + 1)
    local = pid - tl.load(place_ptr + 8 * group + LEVEL) * tiles_n
    tile_m, tile_n = _tile_of(local, tl.cdiv(count, M), tiles_n)
    m = tile_m * M + tl.arange(0, M)
    col = tile_n * N + tl.arange(0, N)
    b_ptr += group.to(tl.int64) * expert_b
    acc = tl.zeros([M, N], tl.float32)
    if DESCRIBED:
        a_block = _describe(a_ptr, start + count, k, stride_a, True, M, K)
        b_block = _describe(b_ptr, n, k, stride_b, B_BY_K, N, K)
        for step in range(0, tl.cdiv(k, K)):
            a = _fetch(a_block, start + tile_m * M, step * K, True)
            b = _fetch(b_block, tile_n * N, step * K, B_BY_K)
            acc = _dot(a, b, acc, SPLIT)
    else:
        # Rows and columns out of range are others, read twice: they are not stored.
        a_rows = (start + tl.minimum(m, count - 1)).to(tl.int64)
        cols = tl.max_contiguous(tl.multiple_of(col % n, 16), 16).to(tl.int64)
        for step in range(0, tl.cdiv(k, K)):
            at = step * K + tl.arange(0, K)
            a = _read(a_ptr, a_rows, stride_a, at, k, True, EVEN_K)
            b = _read(b_ptr, cols, stride_b, at, k, B_BY_K, EVEN_K)
            acc = _dot(a, b, acc, SPLIT)
    acc = acc * _factor(a_scale_ptr, b_scale_ptr, group, SCALED, FACTOR)
    out_ptr += start.to(tl.int64) * n
    _write(out_ptr, acc, tile_m * M, tile_n * N, count, n, False)


@triton.jit
def grouped_inner(
    a_ptr, b_ptr, out_ptr, a_scale_ptr, b_scale_ptr, place_ptr,
    m, n, stride_a, stride_b,
    SCALED: tl.constexpr, FACTOR: tl.constexpr, BY_K: tl.constexpr, SPLIT: tl.constexpr,
    ACCUMULATE: tl.constexpr, DESCRIBED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """out[e] = alpha_e a_e . b_e^T, or added to it: a_e [m, tokens of e], b_e [n, tokens of e].

    BY_K: a [m, columns] and b [n, columns] in the column layout; otherwise [tokens, m] and
    [tokens, n]. Groups without tokens give zeros. m, n: multiples of 16. Grid: groups x tiles.
    """
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(m, M), tl.cdiv(n, N)
    group = pid // (tiles_m * tiles_n)
    tile_m, tile_n = _tile_of(pid % (tiles_m * tiles_n), tiles_m, tiles_n)
    count = tl.load(place_ptr + 8 * group + 1)
    if BY_K:
        first = tl.load(place_ptr + 8 * group + 2) * 16
        length = tl.cdiv(count, 16) * 16
    else:
        first = tl.load(place_ptr + 8 * group)
        length = count
    row = tile_m * M + tl.arange(0, M)
    col = tile_n * N + tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    if DESCRIBED:
        end = tl.maximum(first + length, 1)  # of a group without tokens, which reads nothing
        a_block = _describe(a_ptr, m, end, stride_a, BY_K, M, K)
        b_block = _describe(b_ptr, n, end, stride_b, BY_K, N, K)
        for step in range(0, tl.cdiv(length, K)):
            a = _fetch(a_block, tile_m * M, first + step * K, BY_K)
            b = _fetch(b_block, tile_n * N, first + step * K, BY_K)
            acc = _dot(a, b, acc, SPLIT)
    else:
        rows = tl.max_contiguous(tl.multiple_of(row % m, 16), 16).to(tl.int64)
        cols = tl.max_contiguous(tl.multiple_of(col % n, 16), 16).to(tl.int64)
        for step in range(0, tl.cdiv(length, K)):
            at = first + step * K + tl.arange(0, K)
            a = _read(a_ptr, rows, stride_a, at, first + length, BY_K, False)
            b = _read(b_ptr, cols, stride_b, at, first + length, BY_K, False)
            acc = _dot(a, b, acc, SPLIT)
    if count > 0:  # the scales of a group without tokens may be anything
        acc = acc * _factor(a_scale_ptr, b_scale_ptr, group, SCALED, FACTOR)
    out_ptr += group.to(tl.int64) * m * n
    rows = tl.where(count > 0, m, 0) if ACCUMULATE else m
    _write(out_ptr, acc, tile_m * M, tile_n * N, rows, n, ACCUMULATE)
