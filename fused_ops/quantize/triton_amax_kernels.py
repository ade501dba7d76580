# SPDX-License-Identifier: Apache-2.0
"""Amaxes of rotated columns, and of the matrix itself, in one read that computes few rotations.

Each of the 16 rotated values of a block is a sum of +-x / 4, so none is larger than a quarter of
the sum of the block's magnitudes: 16 additions, where the rotation needs 170. A block whose bound
is at most a rotated amax that is known already cannot raise it and is not rotated. What is known
grows while the kernel runs and is shared by its programs; that an old value was read costs time
only, so the result is that of all blocks, whatever the order.

The bound covers rounding. Let u = 2**-24, L the exact sum of the magnitudes. x / 4 is exact for
bf16. A sum of 16 terms with 15 rounded additions, of whatever order, is off by a factor within
(1 + u)**15 of each partial sum's terms (additions that give subnormal numbers are exact), so a
rotated value is at most (1 + u)**15 L / 4, and the computed sum L' is at least (1 - u)**15 L. With
c = (1 + 2**-19) / 4, the rounded L' c is at least (1 - u)**16 (1 + 32 u) L / 4, which is more than
(1 + u)**15 L / 4; where L' c is subnormal all of these sums are exact. The known amax is a bf16
number, and rounding to bf16 keeps order: what is at most this number is so after rounding. A bound
that is Inf or NaN is above every finite amax: such blocks are rotated.
"""

# ruff: noqa: ANN001, ANN201, ANN202, SIM102 (the compiler traces types)
# mypy: ignore-errors

import triton
import triton.language as tl

from fused_ops.quantize.triton_block_kernels import (
    bits_of,
    high_half,
    low_half,
    packed_bits,
    packed_max,
    rotate,
)

TARGETS = ("sm_90", "sm_100", "sm_120")

BOUND = tl.constexpr((1 + 2.0**-19) / 4)


@triton.jit
def _load_block_words(x_ptr, block, word, inside, rows, stride, EVEN: tl.constexpr):
    """As _load_column_words of triton_kernels, each row's address from the one before."""
    first = block * 16
    address = x_ptr + first.to(tl.int64) * stride + word
    words = ()
    for i in tl.static_range(0, 16):
        mask = inside if EVEN else inside & (first + i < rows)
        words = words + (tl.load(address, mask=mask, other=0),)  # noqa: RUF005
        address += stride
    return words


@triton.jit
def rotated_bound(v):
    """Bits of a number that no rotated value of the blocks v (16 fp32) exceeds; Inf, NaN stay."""
    total = tl.abs(v[0])
    for i in tl.static_range(1, 16):
        total += tl.abs(v[i])
    return bits_of(total * BOUND) & 0x7FFFFFFF


@triton.jit
def raise_rotated(words, known, signs_ptr, out_ptr, FINITE: tl.constexpr):
    """Rotates the columns of `words` (16 int32, two bf16 each) that may exceed `known`.

    known: int32 scalar, bits of an amax that is surely reached; what is found is added to out_ptr.
    FINITE leaves out blocks with Inf or NaN. Returns what is known then.
    """
    for half in tl.static_range(0, 2):
        v = ()
        for i in tl.static_range(0, 16):
            v = v + (high_half(words[i]) if half else low_half(words[i]),)  # noqa: RUF005
        unsure = tl.where(rotated_bound(v) > known, 1, 0)
        if tl.max(tl.max(unsure, axis=1), axis=0) != 0:
            bits = packed_bits(rotate(v, signs_ptr))
            if FINITE:
                bits = tl.where(bits < 0x7F800000, bits, 0)
            top = tl.max(tl.max(bits, axis=1), axis=0)
            if top > known:
                known = tl.maximum(top, tl.atomic_max(out_ptr, top, sem="relaxed"))
    return known


@triton.jit(do_not_specialize=["rows"])
def amax_rotated(
    x_ptr, signs_ptr, out_ptr, plain_ptr, flag_ptr, rows, cols, blocks,
    FINITE: tl.constexpr, PLAIN: tl.constexpr, FLAG: tl.constexpr, EVEN: tl.constexpr,
    BLOCKS: tl.constexpr, WORDS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Amax of the columns of x bf16 [rows, cols] after their rotation: fp32 bits, zero before.

    PLAIN: that of x itself into plain_ptr; FLAG: see amax_flat. Grid: words of 32 bits, rows;
    a program takes TILES tiles of 16 BLOCKS rows and WORDS words, one below the other.
    """
    word = (tl.program_id(0) * WORDS + tl.arange(0, WORDS))[None, :]
    own = tl.zeros([BLOCKS, WORDS], tl.int32)
    known = 0
    for tile in range(0, TILES):
        block = (tl.program_id(1) * TILES + tile) * BLOCKS + tl.arange(0, BLOCKS)[:, None]
        inside = (block < blocks) & (word * 2 < cols)
        known = tl.maximum(known, tl.load(out_ptr, volatile=True))
        words = _load_block_words(x_ptr, block, word, inside, rows, cols // 2, EVEN)
        if PLAIN:
            own = packed_max(words + (own,))  # noqa: RUF005
        known = raise_rotated(words, known, signs_ptr, out_ptr, FINITE)
    if PLAIN:
        top = tl.max(tl.max(tl.maximum(own << 16, own & -65536), axis=1), axis=0)
        if top > tl.load(plain_ptr, volatile=True):
            tl.atomic_max(plain_ptr, top, sem="relaxed")
        if FLAG:
            if top >= 0x7F800000:
                tl.store(flag_ptr, 1)
