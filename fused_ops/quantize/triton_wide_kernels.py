# SPDX-License-Identifier: Apache-2.0
"""Quantizers in Triton whose thread holds one long piece: MX, FP8 blocks, rotations over 16.

A piece is SIZE values along the contraction axis: a block of 32 (MX) or 128 (FP8 blockwise), or a
group that is rotated, whose blocks of 16 are then NVFP4's. Every operation rounds as the
reference's does; triton_block_kernels.py has what is shared with quantizers of blocks of 16.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF005 (the compiler traces types; tuples are its own)
# mypy: ignore-errors

import triton
import triton.language as tl

from fused_ops.quantize.triton_block_kernels import (
    FLT_MAX,
    RN_SIXTH,
    bits_of,
    block_factor,
    decoded_values,
    e4m3_byte,
    e4m3_value,
    eden_byte,
    encode_word,
    float_of,
    load_words,
    min_nan,
    pack_bf16,
    pack_e4m3,
    philox,
    rotate,
    store_words,
    tensor_encode,
    unpack,
)

TARGETS = ("sm_90", "sm_100", "sm_120")


@triton.constexpr_function
def _lower(i, half):
    """Whether element i is the first of its pair in the stage of a transform with this distance."""
    return i & half == 0


@triton.jit
def _load_value(address, inside, BF16: tl.constexpr):
    """fp32 of the bf16 or fp32 at each int64 address, 0 where inside (int32) is 0.

    Not tl.load: for each of these the compiler looks at all of a kernel (128 of them: a minute).
    """
    if BF16:
        word = tl.inline_asm_elementwise(
            """{ .reg .pred p; .reg .b16 h, z;
            setp.ne.s32 p, $2, 0; mov.b16 z, 0; mov.b16 h, 0;
            @p ld.global.b16 h, [$1]; mov.b32 $0, {z, h}; }""",
            "=r,l,r",
            [address, inside],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        word = tl.inline_asm_elementwise(
            """{ .reg .pred p;
            setp.ne.s32 p, $2, 0; mov.b32 $0, 0;
            @p ld.global.b32 $0, [$1]; }""",
            "=&r,l,r",
            [address, inside],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return float_of(word)


@triton.jit
def _load(x_ptr, lane, block, inside, depth, stride, BF16: tl.constexpr, COLUMNS: tl.constexpr,
          SIZE: tl.constexpr):  # fmt: skip
    """The SIZE values of each (lane, block) as fp32.

    Rows: of row `lane`, 16-byte loads, the row padded to whole pieces. COLUMNS: of column `lane`,
    rows from `depth` on are zero.
    """
    v = ()
    if COLUMNS:
        size: tl.constexpr = 2 if BF16 else 4
        first = block.to(tl.int64) * SIZE
        rows = tl.where(inside, tl.minimum(depth - first, SIZE), 0).to(tl.int32)
        address = x_ptr.to(tl.int64) + (first * stride + lane) * size
        step = stride.to(tl.int64) * size
        for i in tl.static_range(0, SIZE):
            v = v + (_load_value(address + i * step, (rows > i).to(tl.int32), BF16),)
    else:
        size: tl.constexpr = 2 if BF16 else 4
        offset = tl.where(inside, lane.to(tl.int64) * stride + block * SIZE, 0) * size
        address = x_ptr.to(tl.int64) + offset
        words = ()
        for part in tl.static_range(0, SIZE * size // 16):
            words = words + load_words(address + 16 * part)
        if BF16:
            v = unpack(words)
        else:
            for i in tl.static_range(0, SIZE):
                v = v + (float_of(words[i]),)
    return v


@triton.jit
def _transform(v, signs_ptr, SIZE: tl.constexpr):
    """v diag(signs) H, rounded to bf16; signs: fp32 [SIZE] of +-RN(1 / sqrt(SIZE)).

    Sums of pairs at distance 1, 2, 4 .. SIZE / 2: log2(SIZE) additions a value.
    """
    w = ()
    for i in tl.static_range(0, SIZE):
        w = w + (v[i] * tl.load(signs_ptr + i),)
    for stage in tl.static_range(0, 7):
        if 1 << stage < SIZE:
            new = ()
            for i in tl.static_range(0, SIZE):
                if _lower(i, 1 << stage):
                    new = new + (w[i] + w[i + (1 << stage)],)
                else:
                    new = new + (w[i - (1 << stage)] - w[i],)
            w = new
    words = ()
    for i in tl.static_range(0, SIZE // 2):
        words = words + (pack_bf16(w, 2 * i),)
    return unpack(words)


@triton.jit
def _rotated(v, signs_ptr, ROTATION: tl.constexpr):
    """v, rotated if ROTATION is not 0."""
    if ROTATION == 16:
        v = unpack(rotate(v, signs_ptr))
    elif ROTATION > 16:
        v = _transform(v, signs_ptr, ROTATION)
    return v


@triton.jit
def _largest(v):
    """Bits of the largest magnitude: NaN lies above Inf. -> int32"""
    top = bits_of(v[0]) & 0x7FFFFFFF
    for i in tl.static_range(1, len(v)):
        top = tl.maximum(top, bits_of(v[i]) & 0x7FFFFFFF)
    return top


@triton.jit
def _over_lanes(bits, SIDE: tl.constexpr, LANES: tl.constexpr):
    """Largest of SIDE neighbours, given back to each of them."""
    top = tl.max(tl.reshape(bits, [LANES // SIDE, SIDE]), axis=1)
    spread = tl.broadcast_to(tl.expand_dims(top, 1), [LANES // SIDE, SIDE])
    return tl.reshape(spread, [LANES])


@triton.jit
def _part(v, first: tl.constexpr):
    """The 16 values from `first` on."""
    found = ()
    for i in tl.static_range(0, 16):
        found = found + (v[first + i],)
    return found


@triton.jit
def _nvfp4_block(v, amax, k0, k1, row, block, NUMERATOR: tl.constexpr, EDEN: tl.constexpr,
                 STOCHASTIC: tl.constexpr):  # fmt: skip
    """Scale byte, factor and the four words of dither of blocks of 16."""
    s_enc, s_dec = tensor_encode(amax, NUMERATOR)
    a = float_of(_largest(v))
    if EDEN:
        byte = e4m3_byte(min_nan((a * RN_SIXTH) * s_enc, FLT_MAX))
    else:
        byte = e4m3_byte(min_nan(a * (s_enc * RN_SIXTH), FLT_MAX))
    factor = block_factor(byte, s_dec)
    r0, r1, r2, r3 = 0, 0, 0, 0
    if EDEN or STOCHASTIC:
        r0, r1, r2, r3 = philox(k0, k1, row, block)
    if EDEN:
        byte = eden_byte(v, byte, factor, r0)
    return byte, factor, r0, r1, r2, r3


@triton.jit
def _nvfp4(
    v, amax, k0, k1, row, block, base, scales_ptr, place, inside,
    NUMERATOR: tl.constexpr, EDEN: tl.constexpr, STOCHASTIC: tl.constexpr,
    FORM: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Writes the blocks of 16 of a piece: codes and scales (FORM 0), E4M3 (1) or bf16 (2) values.

    base: address of the first code or value; place: number of the first block; block: its global
    number in the row, uint32.
    """
    mask = inside.to(tl.int32)
    low, high = mask, mask
    scales = ()
    for k in tl.static_range(0, len(v) // 16):
        part = _part(v, 16 * k)
        byte, factor, r0, r1, r2, r3 = _nvfp4_block(
            part, amax, k0, k1, row, block + k, NUMERATOR, EDEN, STOCHASTIC
        )
        if FORM == 0:
            scales = scales + (byte,)
            first = encode_word(part, 0, factor, r0, r1, STOCHASTIC)
            second = encode_word(part, 8, factor, r2, r3, STOCHASTIC)
            if k % 2 == 1:
                store_words(base + 8 * (k - 1), low, high, first, second, mask)
            elif k == len(v) // 16 - 1:
                _store_pair(base + 8 * k, first, second, inside)
            low, high = first, second
        else:
            scale = e4m3_value(byte) * (2.0**-SHIFT)
            w = decoded_values(part, factor, scale, r0, r1, r2, r3, STOCHASTIC)
            if FORM == 1:
                store_words(
                    base + 16 * k,
                    pack_e4m3(w, 0), pack_e4m3(w, 4), pack_e4m3(w, 8), pack_e4m3(w, 12), mask,
                )  # fmt: skip
            else:
                _store_bf16(base + 32 * k, w, mask)
    if len(scales) == 8:
        address = scales_ptr.to(tl.int64) + place
        _store_pair(address, _four_bytes(scales, 0), _four_bytes(scales, 4), inside)
    else:
        for k in tl.static_range(0, len(scales)):
            tl.store(scales_ptr + place + k, scales[k], mask=inside)


@triton.jit
def _four_bytes(b, first: tl.constexpr):
    """Four uint8 in one int32, the first the lowest."""
    word = b[first].to(tl.int32) | (b[first + 1].to(tl.int32) << 8)
    return word | (b[first + 2].to(tl.int32) << 16) | (b[first + 3].to(tl.int32) << 24)


@triton.jit
def _store_pair(address, low, high, inside):
    """Eight bytes at each int64 address, where inside."""
    tl.store(address.to(tl.pointer_type(tl.int32)), low, mask=inside)
    tl.store((address + 4).to(tl.pointer_type(tl.int32)), high, mask=inside)


@triton.jit
def _store_bf16(address, w, mask):
    """bf16 of the values at each int64 address; mask: int32."""
    for k in tl.static_range(0, len(w) // 8):
        store_words(
            address + 16 * k,
            pack_bf16(w, 8 * k), pack_bf16(w, 8 * k + 2),
            pack_bf16(w, 8 * k + 4), pack_bf16(w, 8 * k + 6), mask,
        )  # fmt: skip


@triton.jit
def pack_e5m2(v, first: tl.constexpr):
    """Elements first .. first + 3 as E5M2 bytes of an int32, nearest even, saturating."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 a, b;
        cvt.rn.satfinite.e5m2x2.f32 a, $2, $1;
        cvt.rn.satfinite.e5m2x2.f32 b, $4, $3;
        mov.b32 $0, {a, b}; }""",
        "=r,r,r,r,r",
        [v[first], v[first + 1], v[first + 2], v[first + 3]],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _store_fp8(v, factor, address, mask, E5M2: tl.constexpr):
    """FP8 bytes of v * factor at each int64 address; mask: int32."""
    w = ()
    for i in tl.static_range(0, len(v)):
        w = w + (v[i] * factor,)
    for k in tl.static_range(0, len(v) // 16):
        words = ()
        for i in tl.static_range(0, 4):
            if E5M2:
                words = words + (pack_e5m2(w, 16 * k + 4 * i),)
            else:
                words = words + (pack_e4m3(w, 16 * k + 4 * i),)
        store_words(address + 16 * k, words[0], words[1], words[2], words[3], mask)


@triton.jit
def _store_decoded(v, factor, scale, address, mask, r, ELEMENT: tl.constexpr,
                   STOCHASTIC: tl.constexpr):  # fmt: skip
    """bf16 of code * scale at each int64 address, the codes those of v * factor; no -0.

    r: words of dither, four for 16 values; mask: int32.
    """
    for k in tl.static_range(0, len(v) // 16):
        part = _part(v, 16 * k)
        if ELEMENT == 0:
            w = decoded_values(
                part, factor, scale, r[4 * k], r[4 * k + 1], r[4 * k + 2], r[4 * k + 3], STOCHASTIC
            )
        else:
            w = ()
            for i in tl.static_range(0, 16):
                w = w + (tl.fma(_fp8_value(part[i] * factor, ELEMENT == 2), scale, 0.0),)
        _store_bf16(address + 32 * k, w, mask)


@triton.jit
def _fp8_value(t, E5M2: tl.constexpr):
    """fp32 rounded to FP8, nearest even, saturating."""
    largest: tl.constexpr = 57344.0 if E5M2 else 448.0
    kind: tl.constexpr = tl.float8e5 if E5M2 else tl.float8e4nv
    t = tl.clamp(t, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    return t.to(kind).to(tl.float32)


@triton.jit
def _e8m0(bits, INVERSE_MAX: tl.constexpr):
    """E8M0 byte (int32), rounded up, and its inverse (fp32), of blocks with these amax bits."""
    x = float_of(bits) * INVERSE_MAX
    b = bits_of(x)
    up = ((b & 0x7FFFFF) != 0) & (b > 0x400000)
    code = tl.minimum((b >> 23) + up.to(tl.int32), 254)
    code = tl.where(x == x, code, 255)
    inverse = tl.where(code == 254, 1 << 22, (254 - code) << 23)
    return code, float_of(tl.where(code == 255, 0x7FC00000, inverse))


@triton.jit
def _mx(
    v, bits, k0, k1, row, block, base, mask,
    ELEMENT: tl.constexpr, INVERSE_MAX: tl.constexpr, STOCHASTIC: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Writes the codes of blocks of 32, or (FORM 2) bf16 values; their E8M0 bytes.

    ELEMENT: 0 E2M1, 1 E4M3, 2 E5M2. block: global number of the first 16 values in the row, uint32.
    """
    code, factor = _e8m0(bits, INVERSE_MAX)
    r = (0, 0, 0, 0, 0, 0, 0, 0)
    if STOCHASTIC:
        r0, r1, r2, r3 = philox(k0, k1, row, block)
        r4, r5, r6, r7 = philox(k0, k1, row, block + 1)
        r = (r0, r1, r2, r3, r4, r5, r6, r7)
    if FORM == 2:
        bits = tl.where(code == 0, 1 << 22, code << 23)
        scale = float_of(tl.where(code == 255, 0x7FC00000, bits))
        _store_decoded(v, factor, scale, base, mask, r, ELEMENT, STOCHASTIC)
    elif ELEMENT == 0:
        words = ()
        for k in tl.static_range(0, 4):
            words = words + (encode_word(v, 8 * k, factor, r[2 * k], r[2 * k + 1], STOCHASTIC),)
        store_words(base, words[0], words[1], words[2], words[3], mask)
    else:
        _store_fp8(v, factor, base, mask, ELEMENT == 2)
    return code.to(tl.uint8)


@triton.jit
def _fp8_scale(bits, LARGEST: tl.constexpr, CAP: tl.constexpr, POW2: tl.constexpr):
    """LARGEST / amax, at most CAP; 1 if amax is 0, Inf or NaN; POW2: its mantissa cleared."""
    amax = float_of(bits)
    scale = tl.minimum(tl.div_rn(LARGEST, amax), CAP)
    scale = tl.where((bits > 0) & (bits < 0x7F800000), scale, 1.0)
    return float_of(bits_of(scale) & 0x7F800000) if POW2 else scale


@triton.jit
def _place(lanes, blocks, LANES: tl.constexpr, FLAT: tl.constexpr):
    """Lane and block of each thread; FLAT: neighbours are blocks of a row, else lanes."""
    number = tl.arange(0, LANES)
    if FLAT:
        index = tl.program_id(0).to(tl.int64) * LANES + number
        lane = index // blocks
        return lane.to(tl.int32), (index - lane * blocks).to(tl.int32)
    groups = (lanes + LANES - 1) // LANES
    lane = (tl.program_id(0) % groups) * LANES + number
    return lane, number * 0 + tl.program_id(0) // groups


@triton.jit(do_not_specialize=["lanes", "blocks", "depth", "stride"])
def wide_amax(
    x_ptr, signs_ptr, out_ptr, lanes, blocks, depth, stride,
    BF16: tl.constexpr, COLUMNS: tl.constexpr, ROTATION: tl.constexpr, SIZE: tl.constexpr,
    LANES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Amax after the rotation into out (fp32 bits, int32, zero before); see quantize_wide."""
    lane, block = _place(lanes, blocks, LANES, FLAT)
    inside = (lane < lanes) & (block < blocks)
    v = _load(x_ptr, lane, block, inside, depth, stride, BF16, COLUMNS, SIZE)
    bits = tl.where(inside, _largest(_rotated(v, signs_ptr, ROTATION)), 0)
    tl.atomic_max(out_ptr, tl.max(bits, axis=0), sem="relaxed")


@triton.jit(do_not_specialize=["lanes", "blocks", "depth", "stride", "k0", "k1", "row0", "block0"])
def quantize_wide(
    x_ptr, signs_ptr, amax_ptr, key_ptr, codes_ptr, scales_ptr,
    lanes, blocks, depth, stride, k0, k1, row0, block0,
    BF16: tl.constexpr, COLUMNS: tl.constexpr, ROTATION: tl.constexpr, SIZE: tl.constexpr,
    KIND: tl.constexpr, ELEMENT: tl.constexpr, NUMERATOR: tl.constexpr, CAP: tl.constexpr,
    POW2: tl.constexpr, EDEN: tl.constexpr, STOCHASTIC: tl.constexpr, ROW_SCALED: tl.constexpr,
    TILE: tl.constexpr, FORM: tl.constexpr, SHIFT: tl.constexpr, KEY_ON_DEVICE: tl.constexpr,
    LANES: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """Quantizes x [lanes, blocks * SIZE], or with COLUMNS the transpose of x [depth, lanes].

    KIND: 0 NVFP4 in blocks of 16 (amax: scalar, or of each lane if ROW_SCALED), 1 MX, 2 FP8
    blockwise. ELEMENT: see _mx. NUMERATOR: 2688 or 1536 of NVFP4, 1 / largest element of MX, the
    largest element of FP8. TILE: lanes that share a scale. x_ptr: rows: bytes of the matrix padded
    to pieces; COLUMNS: int16 (bf16) or int32. Grid: one program for LANES pieces.
    """
    lane, block = _place(lanes, blocks, LANES, FLAT)
    inside = (lane < lanes) & (block < blocks)
    mask = inside.to(tl.int32)
    if KEY_ON_DEVICE:
        k0 = tl.load(key_ptr)
        k1 = tl.load(key_ptr + 1)
    k0, k1 = k0.to(tl.uint32), k1.to(tl.uint32)
    v = _load(x_ptr, lane, block, inside, depth, stride, BF16, COLUMNS, SIZE)
    v = _rotated(v, signs_ptr, ROTATION)
    row = (lane + row0).to(tl.uint32)
    first = (block * (SIZE // 16) + block0).to(tl.uint32)
    piece = lane.to(tl.int64) * blocks + block
    if KIND == 0:
        amax = tl.load(amax_ptr + lane, mask=inside, other=0.0) if ROW_SCALED else tl.load(amax_ptr)
        width: tl.constexpr = SIZE // 2 if FORM == 0 else SIZE * FORM
        _nvfp4(
            v, amax, k0, k1, row, first, codes_ptr.to(tl.int64) + piece * width, scales_ptr,
            piece * (SIZE // 16), inside, NUMERATOR, EDEN, STOCHASTIC, FORM, SHIFT,
        )  # fmt: skip
    else:
        bits = tl.where(inside, _largest(v), 0)
        if TILE > 1:
            bits = _over_lanes(bits, TILE, LANES)
        if FORM == 2:
            base = codes_ptr.to(tl.int64) + piece * (2 * SIZE)
        elif ELEMENT == 0:
            base = codes_ptr.to(tl.int64) + piece * (SIZE // 2)
        else:
            base = codes_ptr.to(tl.int64) + piece * SIZE
        if KIND == 1:
            scale = _mx(
                v, bits, k0, k1, row, first, base, mask, ELEMENT, NUMERATOR, STOCHASTIC, FORM
            )
        else:
            factor = _fp8_scale(bits, NUMERATOR, CAP, POW2)
            scale = tl.div_rn(1.0, factor)
            if FORM == 2:
                _store_decoded(v, factor, scale, base, mask, (), ELEMENT, False)
            else:
                _store_fp8(v, factor, base, mask, ELEMENT == 2)
        if FORM == 0:
            offset = (lane // TILE).to(tl.int64) * blocks + block
            tl.store(scales_ptr + offset, scale, mask=inside & (lane % TILE == 0))
