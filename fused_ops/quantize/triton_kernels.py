# SPDX-License-Identifier: Apache-2.0
"""Quantizers and amaxes in Triton. The definition, and every byte, is the reference's.

A program takes a tile of blocks; each thread loads whole blocks of 16 values, along a row, or of
one (fp32) or two (bf16) columns. Written for NVIDIA's Hopper and later; see triton_backend.py for
what calls them.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF005, SIM102 (the compiler traces types; tuples are its own)
# mypy: ignore-errors

import triton
import triton.language as tl

from fused_ops.quantize.triton_block_kernels import (
    FLT_MAX,
    RN_SIXTH,
    better_of_two,
    block_bits,
    block_factor,
    decoded_values,
    e4m3_byte,
    e4m3_value,
    eden_byte,
    encode_word,
    float_of,
    four_over_six,
    high_half,
    join_words,
    load_words,
    low_half,
    min_nan,
    pack_bf16,
    pack_e4m3,
    packed_bits,
    packed_max,
    philox,
    pin_int32,
    pin_int64,
    pow2_scale,
    power,
    rotate,
    shift_of,
    store_words,
    tensor_encode,
    unpack,
)

TARGETS = ("sm_90", "sm_100", "sm_120")


@triton.jit
def _tile_max(bits, SIDE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Largest of SIDE neighbours along axis 0, given back to each of them: [ROWS, COLS]."""
    grouped = tl.reshape(bits, [ROWS // SIDE, SIDE, COLS])
    top = tl.max(grouped, axis=1)
    spread = tl.broadcast_to(tl.expand_dims(top, 1), [ROWS // SIDE, SIDE, COLS])
    return tl.reshape(spread, [ROWS, COLS])


@triton.jit
def _scale(
    v, bits, amax, POW2: tl.constexpr, CHOICE: tl.constexpr, NUMERATOR: tl.constexpr
):  # fmt: skip
    """Scale byte (uint8), factor (fp32) and out-of-range count (int32) of blocks.

    v: 16 fp32 tensors; bits: int32, of their largest magnitude, or that of their tile; amax: of
    the tensor, fp32 scalar. CHOICE: 0 none, 1 better_of_two or 4over6_mse, 2 4over6_mae, 3 the
    order of operations of MS-EDEN.
    """
    outside = bits * 0
    if POW2:
        shift = shift_of(amax)
        exponent, outside = pow2_scale(bits, shift, -5 if CHOICE == 1 else -6)
        if CHOICE == 1:
            exponent = better_of_two(v, exponent, shift)
        factor = power(-exponent - shift)
        byte = tl.where(bits < 0x7F800000, (exponent + 7) << 3, 0x7F).to(tl.uint8)
    else:
        s_enc, s_dec = tensor_encode(amax, NUMERATOR)
        a = float_of(bits)
        if CHOICE == 0:
            byte = e4m3_byte(min_nan(a * (s_enc * RN_SIXTH), FLT_MAX))
            factor = block_factor(byte, s_dec)
        elif CHOICE == 3:
            byte = e4m3_byte(min_nan((a * RN_SIXTH) * s_enc, FLT_MAX))
            factor = block_factor(byte, s_dec)
        else:
            byte, factor = four_over_six(v, a, s_enc, s_dec, amax, CHOICE == 1)
    return byte, factor, outside


@triton.jit
def _random(k0, k1, row, block, STOCHASTIC: tl.constexpr):
    """The 16 bytes of dither of each block; row, block: global coordinates, uint32.

    STOCHASTIC: 0 none are needed, 1 elements are rounded with them, 2 the block's scale (MS-EDEN).
    """
    if STOCHASTIC:
        r0, r1, r2, r3 = philox(k0, k1, row, block)
    else:
        r0, r1, r2, r3 = 0, 0, 0, 0
    return r0, r1, r2, r3


@triton.jit
def _codes(v, factor, r0, r1, r2, r3, STOCHASTIC: tl.constexpr):
    """Codes of blocks in int64."""
    low = encode_word(v, 0, factor, r0, r1, STOCHASTIC)
    high = encode_word(v, 8, factor, r2, r3, STOCHASTIC)
    return join_words(low, high)


@triton.jit
def _load_row_blocks(x_ptr, row, group, inside, stride, BF16: tl.constexpr):
    """Words of 16 consecutive values of a row for each (row, group); `inside` by clamping.

    Loads outside are of the tensor's first block; the caller masks what is made of them.
    """
    size: tl.constexpr = 2 if BF16 else 4  # bytes of a value, and loads of 16 bytes
    offset = tl.where(inside, row.to(tl.int64) * stride + group * 16, 0) * size
    address = x_ptr.to(tl.int64) + offset
    words = ()
    for part in tl.static_range(0, size):
        words = words + load_words(address + 16 * part)
    return words


@triton.jit
def _floats(words):
    v = ()
    for i in tl.static_range(0, len(words)):
        v = v + (float_of(words[i]),)
    return v


@triton.jit
def _block(words, signs_ptr, BF16: tl.constexpr, HADAMARD: tl.constexpr):
    """Values of blocks, rotated if so wanted, and bits of their largest magnitudes.

    words: of bf16 pairs (8) or fp32 (16), in the order of a block.
    """
    v = unpack(words) if BF16 else _floats(words)
    if HADAMARD:
        pairs = rotate(v, signs_ptr)
        v = unpack(pairs)
        bits = packed_bits(pairs)
    elif BF16:
        bits = packed_bits(words)
    else:
        bits = block_bits(v)
    return v, bits


@triton.jit
def _key(k0, k1, key_ptr, KEY_ON_DEVICE: tl.constexpr):
    if KEY_ON_DEVICE:
        k0 = tl.load(key_ptr)
        k1 = tl.load(key_ptr + 1)
    return k0.to(tl.uint32), k1.to(tl.uint32)


@triton.jit
def _finish(amax, outside, used_ptr, count_ptr, POW2: tl.constexpr):
    """The tensor scale of pow2, and its counters of blocks out of range."""
    if POW2:
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(used_ptr, 2688.0 * power(shift_of(amax)))
        total = tl.sum(tl.reshape(outside, [outside.numel]), axis=0)
        if total != 0:
            tl.atomic_add(count_ptr, total & 0xFFFF, sem="relaxed")
            tl.atomic_add(count_ptr + 1, total >> 16, sem="relaxed")


@triton.jit
def _rows(
    x_ptr, amax, signs_ptr, key0, key1, codes_ptr, scales_ptr, row, group, rows, blocks, stride,
    row0, block0,
    BF16: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr, CHOICE: tl.constexpr,
    NUMERATOR: tl.constexpr, HADAMARD: tl.constexpr, TILE: tl.constexpr,
    FORM: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Reads, quantizes and writes the blocks (row [R, 1], group [1, G]); how many are outside."""
    inside = (row < rows) & (group < blocks)
    words = _load_row_blocks(x_ptr, row, group, inside, stride, BF16)
    v, bits = _block(words, signs_ptr, BF16, HADAMARD)
    bits = tl.where(inside, bits, 0)
    if TILE:
        bits = _tile_max(bits, 16, row.shape[0], group.shape[1])
    zero = bits * 0
    byte, factor, outside = _scale(v, bits, amax, POW2, CHOICE, NUMERATOR)
    r0, r1, r2, r3 = _random(
        key0, key1, (zero + row + row0).to(tl.uint32), (zero + group + block0).to(tl.uint32),
        STOCHASTIC,
    )  # fmt: skip
    if STOCHASTIC == 2:
        byte = eden_byte(v, byte, factor, r0)
    offset = row.to(tl.int64) * blocks + group
    if FORM == 0:
        tl.store(codes_ptr + offset, _codes(v, factor, r0, r1, r2, r3, STOCHASTIC), mask=inside)
        if TILE:
            first = inside & (row % 16 == 0)
            tl.store(scales_ptr + (row // 16).to(tl.int64) * blocks + group, byte, mask=first)
        else:
            tl.store(scales_ptr + offset, byte, mask=inside)
    else:
        scale = e4m3_value(byte) * (2.0**-SHIFT)
        w = decoded_values(v, factor, scale, r0, r1, r2, r3, STOCHASTIC)
        _store_block(codes_ptr.to(tl.int64), offset, w, inside.to(tl.int32), FORM)
    if TILE:
        outside = tl.where(row % 16 == 0, outside, 0)
    return tl.where(inside, outside, 0)


@triton.jit(do_not_specialize=["rows", "k0", "k1", "row0", "block0"])
def quantize_rows(
    x_ptr, amax_ptr, signs_ptr, key_ptr, codes_ptr, scales_ptr, used_ptr, count_ptr,
    rows, blocks, stride, k0, k1, row0, block0,
    BF16: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr, CHOICE: tl.constexpr,
    NUMERATOR: tl.constexpr, HADAMARD: tl.constexpr, TILE: tl.constexpr,
    FORM: tl.constexpr, SHIFT: tl.constexpr,
    KEY_ON_DEVICE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """[rows, 16 blocks] -> codes int64 [rows, blocks], scales uint8 [rows (/ 16), blocks].

    TILE: 16 rows share a scale. FORM: 0 codes and scales; instead of them, code * scale * 2**-SHIFT
    in E4M3 (1) or bf16 (2). Grid: tiles of ROWS x GROUPS blocks.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
    amax = tl.load(amax_ptr)
    key0, key1 = _key(k0, k1, key_ptr, KEY_ON_DEVICE)
    outside = _rows(
        x_ptr, amax, signs_ptr, key0, key1, codes_ptr, scales_ptr, row, group,
        rows, blocks, stride, row0, block0,
        BF16, POW2, STOCHASTIC, CHOICE, NUMERATOR, HADAMARD, TILE, FORM, SHIFT,
    )  # fmt: skip
    _finish(amax, outside, used_ptr, count_ptr, POW2)


@triton.jit
def _store_block(base, offset, v, inside, FORM: tl.constexpr):
    """The 16 values of the block number `offset`: E4M3 (FORM 1) or bf16 (2); a thread its own."""
    if FORM == 1:
        store_words(
            base + offset * 16,
            pack_e4m3(v, 0), pack_e4m3(v, 4), pack_e4m3(v, 8), pack_e4m3(v, 12), inside,
        )  # fmt: skip
    else:
        for half in tl.static_range(0, 2):
            store_words(
                base + offset * 32 + half * 16,
                pack_bf16(v, 8 * half), pack_bf16(v, 8 * half + 2),
                pack_bf16(v, 8 * half + 4), pack_bf16(v, 8 * half + 6), inside,
            )  # fmt: skip


@triton.jit
def _store_column_block(out_ptr, offset, v, inside, FORM: tl.constexpr):
    """As _store_block, exchanged between threads first so that rows are written in one piece."""
    if FORM == 1:
        words = tl.join(
            pin_int64(join_words(pack_e4m3(v, 0), pack_e4m3(v, 4))),
            pin_int64(join_words(pack_e4m3(v, 8), pack_e4m3(v, 12))),
        )
        place = tl.expand_dims(offset * 2, 2) + tl.arange(0, 2)[None, None, :]
        tl.store(out_ptr + place, words, mask=tl.expand_dims(inside, 2))
    else:
        even = tl.join(
            pin_int64(join_words(pack_bf16(v, 0), pack_bf16(v, 2))),
            pin_int64(join_words(pack_bf16(v, 8), pack_bf16(v, 10))),
        )
        odd = tl.join(
            pin_int64(join_words(pack_bf16(v, 4), pack_bf16(v, 6))),
            pin_int64(join_words(pack_bf16(v, 12), pack_bf16(v, 14))),
        )
        words = tl.join(even, odd)
        words = tl.reshape(words, [words.shape[0], words.shape[1], 4])
        place = tl.expand_dims(offset * 4, 2) + tl.arange(0, 4)[None, None, :]
        tl.store(out_ptr + place, words, mask=tl.expand_dims(inside, 2))


@triton.jit
def _load_column_words(x_ptr, block, word, inside, rows, stride, EVEN: tl.constexpr):
    """32-bit words of 16 consecutive rows for each (block of rows, word of a row).

    stride: words in a row. EVEN: rows is a multiple of 16, so that only `inside` masks.
    """
    first = block.to(tl.int64) * 16
    words = ()
    for i in tl.static_range(0, 16):
        mask = inside if EVEN else inside & (first + i < rows)
        words = words + (tl.load(x_ptr + (first + i) * stride + word, mask=mask, other=0),)
    return words


@triton.jit
def _column(words, half: tl.constexpr, signs_ptr, BF16: tl.constexpr, HADAMARD: tl.constexpr):
    """As _block, of one of the columns in words of 16 rows."""
    v = ()
    for i in tl.static_range(0, 16):
        if BF16:
            v = v + (high_half(words[i]) if half else low_half(words[i]),)
        else:
            v = v + (float_of(words[i]),)
    if HADAMARD:
        pairs = rotate(v, signs_ptr)
        v = unpack(pairs)
        bits = packed_bits(pairs)
    elif BF16:
        top = packed_max(words)  # of both columns: computed once
        bits = top & -65536 if half else top << 16
    else:
        bits = block_bits(v)
    return v, bits


@triton.jit
def _columns(
    x_ptr, amax, signs_ptr, key0, key1, codes_ptr, scales_ptr, block, word, rows, cols, blocks,
    row0, block0,
    BF16: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr, CHOICE: tl.constexpr,
    NUMERATOR: tl.constexpr, HADAMARD: tl.constexpr, TILE: tl.constexpr,
    FORM: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """As _rows, of the columns in words [1, W] of the blocks of rows [B, 1]."""
    per_word: tl.constexpr = 2 if BF16 else 1
    inside = (block < blocks) & (word * per_word < cols)
    words = _load_column_words(x_ptr, block, word, inside, rows, cols // per_word, EVEN)
    if TILE:
        top = packed_bits(words) if BF16 else block_bits(_floats(words))
        top = _tile_max(tl.trans(top), 16 // per_word, word.shape[1], block.shape[0])
        top = tl.trans(top)
    total = inside.to(tl.int32) * 0
    for half in tl.static_range(0, per_word):
        v, bits = _column(words, half, signs_ptr, BF16, HADAMARD)
        bits = top if TILE else bits
        byte, factor, outside = _scale(v, bits, amax, POW2, CHOICE, NUMERATOR)
        total += _write_column(
            v, byte, factor, outside, key0, key1, word * per_word + half, block, row0, block0,
            blocks, inside, codes_ptr, scales_ptr, STOCHASTIC, TILE, FORM, SHIFT,
        )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["rows", "k0", "k1", "row0", "block0"])
def quantize_columns(
    x_ptr, amax_ptr, signs_ptr, key_ptr, codes_ptr, scales_ptr, used_ptr, count_ptr,
    rows, cols, blocks, k0, k1, row0, block0,
    BF16: tl.constexpr, POW2: tl.constexpr, STOCHASTIC: tl.constexpr, CHOICE: tl.constexpr,
    NUMERATOR: tl.constexpr, HADAMARD: tl.constexpr, TILE: tl.constexpr,
    FORM: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr,
    KEY_ON_DEVICE: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """x [rows, cols] -> its transpose: codes int64 [cols, blocks], scales likewise.

    TILE: 16 columns share a scale. FORM: see quantize_rows. Grid: tiles of BLOCKS x 16 rows,
    WORDS x 4 bytes of columns. cols is even for bf16.
    """
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    amax = tl.load(amax_ptr)
    key0, key1 = _key(k0, k1, key_ptr, KEY_ON_DEVICE)
    total = _columns(
        x_ptr, amax, signs_ptr, key0, key1, codes_ptr, scales_ptr, block, word,
        rows, cols, blocks, row0, block0,
        BF16, POW2, STOCHASTIC, CHOICE, NUMERATOR, HADAMARD, TILE, FORM, SHIFT, EVEN,
    )  # fmt: skip
    _finish(amax, total, used_ptr, count_ptr, POW2)


@triton.jit(do_not_specialize=["rows", "k0", "k1", "k2", "k3", "row0", "col0"])
def quantize_pair(
    x_ptr, signs_ptr,
    r_amax_ptr, r_codes_ptr, r_scales_ptr, r_used_ptr, r_count_ptr, r_key_ptr,
    c_amax_ptr, c_codes_ptr, c_scales_ptr, c_used_ptr, c_count_ptr, c_key_ptr,
    rows, cols, blocks, k0, k1, k2, k3, row0, col0,
    R_POW2: tl.constexpr, R_STOCHASTIC: tl.constexpr, R_CHOICE: tl.constexpr,
    R_NUMERATOR: tl.constexpr, R_FORM: tl.constexpr, R_SHIFT: tl.constexpr,
    C_POW2: tl.constexpr, C_STOCHASTIC: tl.constexpr, C_CHOICE: tl.constexpr,
    C_NUMERATOR: tl.constexpr, C_FORM: tl.constexpr, C_SHIFT: tl.constexpr,
    C_HADAMARD: tl.constexpr, R_KEY_ON_DEVICE: tl.constexpr, C_KEY_ON_DEVICE: tl.constexpr,
    BLOCKS: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """x bf16 [rows, cols], both multiples of 16 -> as it is, and its transpose, in 1x16 blocks.

    One program reads its tile of 16 BLOCKS rows and WORDS 32-bit words twice, the second time from
    the cache: from memory x is read once. r_*: along rows (k0, k1 its key); c_*: the transpose
    (k2, k3). row0, col0: global place of x, multiples of 16.
    """
    c_amax = tl.load(c_amax_ptr)
    c_key0, c_key1 = _key(k2, k3, c_key_ptr, C_KEY_ON_DEVICE)
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    c_total = _columns(
        x_ptr, c_amax, signs_ptr, c_key0, c_key1, c_codes_ptr, c_scales_ptr, block, word, rows,
        cols, blocks, col0, row0 // 16,
        True, C_POW2, C_STOCHASTIC, C_CHOICE, C_NUMERATOR, C_HADAMARD, False, C_FORM, C_SHIFT,
        True,
    )  # fmt: skip
    _finish(c_amax, c_total, c_used_ptr, c_count_ptr, C_POW2)
    r_amax = tl.load(r_amax_ptr)
    r_key0, r_key1 = _key(k0, k1, r_key_ptr, R_KEY_ON_DEVICE)
    group = (tl.program_id(1) * (WORDS // 8) + tl.arange(0, WORDS // 8))[None, :]
    r_total = tl.zeros([ROWS, WORDS // 8], tl.int32)
    for step in range(0, 16 * BLOCKS // ROWS):
        row = (tl.program_id(0) * (16 * BLOCKS) + step * ROWS + tl.arange(0, ROWS))[:, None]
        r_total += _rows(
            x_ptr, r_amax, signs_ptr, r_key0, r_key1, r_codes_ptr, r_scales_ptr, row,
            group, rows, cols // 16, cols, row0, col0 // 16,
            True, R_POW2, R_STOCHASTIC, R_CHOICE, R_NUMERATOR, False, False, R_FORM, R_SHIFT,
        )  # fmt: skip
    _finish(r_amax, r_total, r_used_ptr, r_count_ptr, R_POW2)


@triton.jit
def _write_column(
    v, byte, factor, outside, key0, key1, column, block, row0, block0, blocks, inside,
    codes_ptr, scales_ptr,
    STOCHASTIC: tl.constexpr, TILE: tl.constexpr, FORM: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Codes and scales, or values, of blocks of the columns `column`; what of them is outside."""
    zero = outside * 0
    r0, r1, r2, r3 = _random(
        key0, key1, (zero + column + row0).to(tl.uint32), (zero + block + block0).to(tl.uint32),
        STOCHASTIC,
    )  # fmt: skip
    if STOCHASTIC == 2:
        byte = eden_byte(v, byte, factor, r0)
    offset = column.to(tl.int64) * blocks + block
    first = inside & (column % 16 == 0) if TILE else inside
    if FORM == 0:
        codes = _codes(v, factor, r0, r1, r2, r3, STOCHASTIC)
        tl.store(codes_ptr + offset, pin_int64(codes), mask=inside)
        byte = pin_int32(byte.to(tl.int32)).to(tl.uint8)
        if TILE:
            tl.store(scales_ptr + (column // 16).to(tl.int64) * blocks + block, byte, mask=first)
        else:
            tl.store(scales_ptr + offset, byte, mask=inside)
    else:
        scale = e4m3_value(byte) * (2.0**-SHIFT)
        w = decoded_values(v, factor, scale, r0, r1, r2, r3, STOCHASTIC)
        _store_column_block(codes_ptr, offset, w, inside, FORM)
    return tl.where(first, outside, 0)


@triton.jit
def _requantize(
    q_ptr, q_scales_ptr, q_amax, amax, codes_ptr, scales_ptr, block, word, rows, words, blocks,
    POW2: tl.constexpr, CHOICE: tl.constexpr, NUMERATOR: tl.constexpr, Q_NUMERATOR: tl.constexpr,
    Q_TILE: tl.constexpr, FORM: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """See requantize_columns; of the words [1, W] of blocks of rows [B, 1]."""
    inside = (block < blocks) & (word < words)
    packed = _load_column_words(q_ptr, block, word, inside, rows, words, EVEN)
    first = block.to(tl.int64) * 16
    unit = tl.div_rn(q_amax, Q_NUMERATOR)
    scales = ()
    for i in tl.static_range(0, 16):
        mask = inside if EVEN else inside & (first + i < rows)
        row = block.to(tl.int64) if Q_TILE else first + i
        byte = tl.load(q_scales_ptr + row * (words // 2) + word // 2, mask=mask, other=0)
        scales = scales + (e4m3_value(byte),)
    total = inside.to(tl.int32) * 0
    for nibble in range(0, 8):
        v = ()
        for i in tl.static_range(0, 16):
            code = packed[i] >> (4 * nibble)
            bits = ((code & 7) << 22) | ((code & 8) << 28)
            v = v + (((float_of(bits) * (2.0**126)) * scales[i]) * unit,)
        byte, factor, outside = _scale(v, block_bits(v), amax, POW2, CHOICE, NUMERATOR)
        total += _write_column(
            v, byte, factor, outside, 0, 0, word * 8 + nibble, block, 0, 0, blocks, inside,
            codes_ptr, scales_ptr, False, False, FORM, SHIFT,
        )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["rows"])
def requantize_columns(
    q_ptr, q_scales_ptr, q_amax_ptr, amax_ptr, codes_ptr, scales_ptr, used_ptr, count_ptr,
    rows, words, blocks,
    POW2: tl.constexpr, CHOICE: tl.constexpr, NUMERATOR: tl.constexpr, Q_NUMERATOR: tl.constexpr,
    Q_TILE: tl.constexpr, FORM: tl.constexpr, SHIFT: tl.constexpr, EVEN: tl.constexpr,
    BLOCKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """NVFP4 [rows, 8 words] -> the transpose of its decoded values, quantized again.

    q_ptr: int32 words of eight codes along a row; q_scales_ptr: a byte for two words (and, Q_TILE,
    16 rows). Values are code * scale, exact, times q_amax / Q_NUMERATOR, as dequantized in fp32.
    """
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    amax = tl.load(amax_ptr)
    total = _requantize(
        q_ptr, q_scales_ptr, tl.load(q_amax_ptr), amax, codes_ptr, scales_ptr, block, word,
        rows, words, blocks,
        POW2, CHOICE, NUMERATOR, Q_NUMERATOR, Q_TILE, FORM, SHIFT, EVEN,
    )  # fmt: skip
    _finish(amax, total, used_ptr, count_ptr, POW2)


@triton.jit
def _finite_only(bits, FINITE: tl.constexpr):
    return tl.where(bits < 0x7F800000, bits, 0) if FINITE else bits


@triton.jit
def amax_flat(
    x_ptr, out_ptr, flag_ptr, words,
    BF16: tl.constexpr, FLAG: tl.constexpr, SIZE: tl.constexpr, ITERS: tl.constexpr,
):  # fmt: skip
    """Largest magnitude of `words` 32-bit words into out (fp32 bits, int32, zero before).

    FLAG: the byte at flag_ptr becomes 1 if it is Inf or NaN.
    """
    first = tl.program_id(0).to(tl.int64) * (SIZE * ITERS)
    top = tl.zeros([SIZE], tl.int32)
    for i in tl.static_range(0, ITERS):
        offset = first + i * SIZE + tl.arange(0, SIZE)
        word = tl.load(x_ptr + offset, mask=offset < words, other=0)
        if BF16:
            word = tl.maximum((word & 0x7FFF) << 16, word & 0x7FFF0000)
        top = tl.maximum(top, word & 0x7FFFFFFF)
    _hand_in(tl.max(top, axis=0), out_ptr, flag_ptr, FLAG)


@triton.jit
def _hand_in(top, out_ptr, flag_ptr, FLAG: tl.constexpr):
    tl.atomic_max(out_ptr, top, sem="relaxed")
    if FLAG:
        if top >= 0x7F800000:
            tl.store(flag_ptr, 1)


@triton.jit(do_not_specialize=["rows"])
def amax_rows(
    x_ptr, signs_ptr, out_ptr, rows, blocks, stride,
    BF16: tl.constexpr, HADAMARD: tl.constexpr, FINITE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Amax over row blocks, rotated or not; FINITE leaves out blocks with Inf or NaN."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
    inside = (row < rows) & (group < blocks)
    words = _load_row_blocks(x_ptr, row, group, inside, stride, BF16)
    _, bits = _block(words, signs_ptr, BF16, HADAMARD)
    bits = _finite_only(tl.where(inside, bits, 0), FINITE)
    tl.atomic_max(out_ptr, tl.max(tl.max(bits, axis=1), axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["rows"])
def amax_columns(
    x_ptr, signs_ptr, out_ptr, plain_ptr, flag_ptr, rows, cols, blocks,
    BF16: tl.constexpr, HADAMARD: tl.constexpr, FINITE: tl.constexpr, PLAIN: tl.constexpr,
    FLAG: tl.constexpr, EVEN: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Amax over column blocks: see amax_rows and quantize_columns. PLAIN: that of x itself too."""
    per_word: tl.constexpr = 2 if BF16 else 1
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    inside = (block < blocks) & (word * per_word < cols)
    words = _load_column_words(x_ptr, block, word, inside, rows, cols // per_word, EVEN)
    top = tl.zeros([BLOCKS, WORDS], tl.int32)
    for half in tl.static_range(0, per_word):
        _, bits = _column(words, half, signs_ptr, BF16, HADAMARD)
        top = tl.maximum(top, _finite_only(bits, FINITE))
    top = tl.where(inside, top, 0)
    tl.atomic_max(out_ptr, tl.max(tl.max(top, axis=1), axis=0), sem="relaxed")
    if PLAIN:
        own = tl.where(inside, packed_bits(words) if BF16 else block_bits(_floats(words)), 0)
        _hand_in(tl.max(tl.max(own, axis=1), axis=0), plain_ptr, flag_ptr, FLAG)


@triton.jit(do_not_specialize=["rows"])
def decode_blocks(
    codes_ptr, scales_ptr, out_ptr, rows, blocks,
    E4M3: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """NVFP4 -> code * block scale, no -0: exact bf16, or times 2**-SHIFT rounded to E4M3.

    codes int64 (bf16: int32) [rows, words], scales uint8 -> out [rows, 16 blocks], 16 bytes a
    thread. Grid: SIZE words each; words are blocks, or for bf16 half blocks.
    """
    half: tl.constexpr = 0 if E4M3 else 1
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < (rows.to(tl.int64) * blocks << half)
    code = tl.load(codes_ptr + index, mask=inside, other=0)
    place = index >> half
    if TILE:
        place = (place // blocks // 16) * blocks + place % blocks
    scale = tl.load(scales_ptr + place, mask=inside, other=0).to(tl.float8e4nv, bitcast=True)
    scale = scale.to(tl.float32) * (2.0**-SHIFT)
    v = ()
    for i in tl.static_range(0, 16 >> half):
        nibble = (
            code.to(tl.int32) >> (4 * i) if i < 8 else (code >> 32).to(tl.int32) >> (4 * i - 32)
        )
        # The three bits as the top of a subnormal or small float: 2**126 makes E2M1 of it.
        bits = ((nibble & 7) << 22) | ((nibble & 8) << 28)
        v = v + (tl.fma(float_of(bits) * (2.0**126), scale, 0.0),)
    mask = inside.to(tl.int32)
    address = out_ptr.to(tl.int64) + index * 16
    if E4M3:
        store_words(
            address, pack_e4m3(v, 0), pack_e4m3(v, 4), pack_e4m3(v, 8), pack_e4m3(v, 12), mask
        )
    else:
        store_words(
            address, pack_bf16(v, 0), pack_bf16(v, 2), pack_bf16(v, 4), pack_bf16(v, 6), mask
        )


@triton.jit(do_not_specialize=["rows"])
def decode_columns(
    codes_ptr, scales_ptr, out_ptr, rows, words, blocks,
    SHIFT: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """NVFP4 [rows, 8 words] in 16x16 tiles -> the transpose of code * block scale in E4M3.

    As decode_blocks; codes int32, out int64 [8 words, 2 blocks]. rows is a multiple of 16. Grid:
    tiles of BLOCKS x 16 rows, WORDS words.
    """
    block = (tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS))[:, None]
    word = (tl.program_id(1) * WORDS + tl.arange(0, WORDS))[None, :]
    inside = (block < blocks) & (word < words)
    packed = _load_column_words(codes_ptr, block, word, inside, rows, words, True)
    place = block.to(tl.int64) * (words // 2) + word // 2
    scale = e4m3_value(tl.load(scales_ptr + place, mask=inside, other=0)) * (2.0**-SHIFT)
    for nibble in range(0, 8):
        v = ()
        for i in tl.static_range(0, 16):
            code = packed[i] >> (4 * nibble)
            bits = ((code & 7) << 22) | ((code & 8) << 28)
            v = v + (tl.fma(float_of(bits) * (2.0**126), scale, 0.0),)
        offset = (word * 8 + nibble).to(tl.int64) * blocks + block
        _store_column_block(out_ptr, offset, v, inside, 1)
