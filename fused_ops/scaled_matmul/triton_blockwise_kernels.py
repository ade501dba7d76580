# SPDX-License-Identifier: Apache-2.0
"""Products of FP8 operands with an fp32 scale a block of 128 along the contraction, in Triton.

A block of 128 products of codes is summed by the cores, multiplied by both scales in fp32, and
added in fp32: DeepSeek-V3's order (arXiv 2412.19437). Codes are exact in bf16, and so are the
products, which FP8 cores would align to fewer bits.
"""

# ruff: noqa: ANN001, ANN201, ANN202 (the compiler traces types)
# mypy: ignore-errors

import triton
import triton.language as tl

TARGETS = ("sm_90", "sm_100", "sm_120")
BLOCK = tl.constexpr(128)
_GROUP = tl.constexpr(8)


@triton.jit
def _tile(codes_ptr, row, inside, k, width, E5M2: tl.constexpr, CORES: tl.constexpr):
    """Codes [rows, 128] from column k on, as the type that is multiplied."""
    place = row.to(tl.int64)[:, None] * width + k + tl.arange(0, BLOCK)[None, :]
    byte = tl.load(codes_ptr + place, mask=inside[:, None], other=0)
    kind: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
    value = byte.to(kind, bitcast=True).to(tl.float32)
    return value.to(tl.bfloat16) if CORES else value


@triton.jit(do_not_specialize=["m"])
def blockwise_matmul(
    a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, out_ptr, m, n, blocks,
    A_E5M2: tl.constexpr, B_E5M2: tl.constexpr, A_TILE: tl.constexpr, B_TILE: tl.constexpr,
    ACCUMULATE: tl.constexpr, CORES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """out [m, n] = a . b^T, or += with ACCUMULATE (fp32); a codes [m, 128 blocks], b [n, ..].

    Scales: decode factors fp32 [rows / TILE, blocks]. CORES: products of bf16; else of fp32, for
    the interpreter. Grid: tiles of M x N, in bands of _GROUP along m.
    """
    tiles_m, tiles_n = (m + M - 1) // M, (n + N - 1) // N
    band = _GROUP * tiles_n
    first = tl.program_id(0) // band * _GROUP
    size = tl.minimum(tiles_m - first, _GROUP)
    inner = tl.program_id(0) % band
    row = (first + inner % size) * M + tl.arange(0, M)
    col = (inner // size) * N + tl.arange(0, N)
    row_inside, col_inside = row < m, col < n
    total = tl.zeros([M, N], tl.float32)
    for block in range(0, blocks):
        k = block * BLOCK
        a = _tile(a_ptr, row, row_inside, k, blocks * BLOCK, A_E5M2, CORES)
        b = _tile(b_ptr, col, col_inside, k, blocks * BLOCK, B_E5M2, CORES)
        part = tl.dot(a, b.T, input_precision="ieee")
        a_scale = tl.load(
            a_scale_ptr + (row // A_TILE).to(tl.int64) * blocks + block, mask=row_inside, other=0.0
        )
        b_scale = tl.load(
            b_scale_ptr + (col // B_TILE).to(tl.int64) * blocks + block, mask=col_inside, other=0.0
        )
        total += part * a_scale[:, None] * b_scale[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * n + col[None, :]
    here = row_inside[:, None] & col_inside[None, :]
    if ACCUMULATE:
        total += tl.load(place, mask=here, other=0.0)
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=here)
