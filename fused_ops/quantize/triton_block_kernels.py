# SPDX-License-Identifier: Apache-2.0
"""Device functions of the quantizers in Triton: one thread holds the 16 values of a block.

A block is a tuple of 16 fp32 tensors, element j of each block in the j-th, so that the rotation,
the sums over a block in their order, and the packing of codes need no exchange between threads.
Every operation rounds as the reference's does; kernels are launched with enable_fp_fusion off.
"""

# ruff: noqa: ANN001, ANN201, ANN202, RUF005 (the compiler traces types; tuples are its own)
# mypy: ignore-errors

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
RN_SIXTH = tl.constexpr(0.16666667163372040)
RN_1536TH = tl.constexpr(0.0006510416860692203)
ANY_NAN = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def min_nan(x, y):
    """min that keeps NaN."""
    return tl.minimum(x, y, propagate_nan=ANY_NAN)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def low_half(w):
    """The bf16 in the low half of each 32-bit word, as fp32."""
    return float_of(w << 16)


@triton.jit
def high_half(w):
    return float_of(w & -65536)


@triton.jit
def load_words(address):
    """16 bytes at each int64 address as four int32 tensors (a tensor's own thread loads them)."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def pin_int64(x):
    """x; the compiler moves no change of layout from behind this to before it."""
    return tl.inline_asm_elementwise(
        "mov.b64 $0, $1;", "=l,l", [x], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def pin_int32(x):
    """See pin_int64."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def block_bits(v):
    """Bits of the largest magnitude of a block: NaN lies above Inf. -> int32"""
    top = bits_of(v[0]) & 0x7FFFFFFF
    for i in tl.static_range(1, 16):
        top = tl.maximum(top, bits_of(v[i]) & 0x7FFFFFFF)
    return top


@triton.jit
def packed_max(words):
    """Largest magnitudes of the low and of the high halves of bf16 words, as their bits: int32."""
    top = words[0] & 0x7FFF7FFF
    for i in tl.static_range(1, len(words)):
        top = tl.inline_asm_elementwise(
            "max.u16x2 $0, $1, $2;",
            "=r,r,r",
            [top, words[i] & 0x7FFF7FFF],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return top


@triton.jit
def packed_bits(words):
    """fp32 bits of the largest magnitude in bf16 words."""
    top = packed_max(words)
    return tl.maximum(top << 16, top & -65536)


@triton.jit
def unpack(words):
    """The bf16 values of words, as fp32, low half first."""
    v = ()
    for i in tl.static_range(0, len(words)):
        v = v + (low_half(words[i]), high_half(words[i]))
    return v


@triton.jit
def round_bf16(v):
    """16 fp32 -> 8 words of two bf16, nearest even."""
    words = ()
    for i in tl.static_range(0, 8):
        words = words + (
            tl.inline_asm_elementwise(
                "cvt.rn.bf16x2.f32 $0, $2, $1;",
                "=r,r,r",
                [v[2 * i], v[2 * i + 1]],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            ),
        )
    return words


@triton.constexpr_function
def _distinct(last):
    """Outputs told apart by the signs of inputs 0 .. last."""
    return 1 << last.bit_length()


@triton.constexpr_function
def _is_negative(i, j):
    """Sign of entry (i, j) of Sylvester's matrix."""
    return (i & j).bit_count() % 2 == 1


@triton.constexpr_function
def _byte_of(i):
    """prmt selector: byte i % 4 of the first operand below the upper bytes of 2**23."""
    return f"prmt.b32 $0, $1, $2, 0x765{i % 4};"


@triton.jit
def rotate(v, signs_ptr):
    """v diag(signs) H / 4, summed in the order of the elements, rounded to bf16: 8 words.

    Sums of outputs whose signs agree so far are shared: 170 additions a block instead of 240.
    signs_ptr: fp32 [16] of +-0.25.
    """
    sums = (v[0] * tl.load(signs_ptr),)
    for i in tl.static_range(1, 16):
        plus = tl.load(signs_ptr + i)
        minus = -plus
        new = ()
        for j in tl.static_range(0, _distinct(i)):
            sign = minus if _is_negative(i, j) else plus
            new = new + (tl.fma(v[i], sign, sums[j % _distinct(i - 1)]),)
        sums = new
    return round_bf16(sums)


@triton.jit
def philox(k0, k1, row, block):
    """Philox4x32-10 of counter (row, block, 0, 0): uint32 in, four int32 tensors out."""
    c0, c1 = row, block
    c2 = row * 0
    c3 = c2
    for _ in tl.static_range(0, 10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = p1.to(tl.uint32)
        c3 = p0.to(tl.uint32)
        k0 = (k0 + 0x9E3779B9).to(tl.uint32)
        k1 = (k1 + 0xBB67AE85).to(tl.uint32)
    return (
        c0.to(tl.int32, bitcast=True),
        c1.to(tl.int32, bitcast=True),
        c2.to(tl.int32, bitcast=True),
        c3.to(tl.int32, bitcast=True),
    )


@triton.jit
def _rounded(a):
    """a >= 0, below 2**104, to the nearest multiple of half the power of two below max(a, 1).

    By adding and subtracting 2**22 times that power; the product, which is exact, rides in the
    additions: the integer units are the bottleneck.
    """
    power_below = float_of(bits_of(tl.maximum(a, 1.0)) & 0x7F800000)
    return tl.fma(power_below, -4194304.0, tl.fma(power_below, 4194304.0, a))


@triton.jit
def nearest_value(a):
    """a >= 0 rounded to the E2M1 grid, ties to even, at most 6."""
    return _rounded(tl.minimum(a, 6.0))


@triton.jit
def _nearest_code(t):
    """Bits of 2**23 + E2M1 code of |t|, ties to even, saturating; int32.

    code = R(4 sat(a / 2)) + R(2 sat(a / 2 - 1)) + R(sat(a / 2 - 2)): what a has below 2, between
    2 and 4, and above, each in its own steps. Whole steps below are even, so ties stay right.
    Multiplications with saturation instead of minima and masks: the integer units are the
    bottleneck, at half the rate of the floating-point ones.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .f32 a, x, r;
        abs.f32 a, $1;
        mul.rn.sat.f32 x, a, 0f3F000000;
        fma.rn.f32 r, x, 0f40800000, 0f4B000000;
        fma.rn.sat.f32 x, a, 0f3F000000, 0fBF800000;
        fma.rn.f32 r, x, 0f40000000, r;
        fma.rn.sat.f32 x, a, 0f3F000000, 0fC0000000;
        add.rn.f32 r, r, x;
        mov.b32 $0, r; }""",
        "=r,f",
        [t],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _stochastic_code(t, u):
    """As _nearest_code, but floor(code's position + u); 0 <= u < 1 in 256ths.

    Sums toward zero keep the floor of the exact sum.
    """
    return tl.inline_asm_elementwise(
        """{ .reg .f32 a, x, r;
        abs.f32 a, $1;
        mul.rn.sat.f32 x, a, 0f3F000000;
        fma.rz.f32 r, x, 0f40800000, $2;
        fma.rn.sat.f32 x, a, 0f3F000000, 0fBF800000;
        fma.rz.f32 r, x, 0f40000000, r;
        fma.rn.sat.f32 x, a, 0f3F000000, 0fC0000000;
        add.rz.f32 r, r, x;
        add.rz.f32 r, r, 0f4B000000;
        mov.b32 $0, r; }""",
        "=r,f,f",
        [t, u],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _dither(word, i: tl.constexpr):
    """Byte i % 4 of a random word / 256, fp32, exact."""
    bits = tl.inline_asm_elementwise(
        _byte_of(i), "=r,r,r", [word, word * 0 + 0x4B000000], dtype=tl.int32, is_pure=True, pack=1
    )
    return tl.fma(float_of(bits), 0.00390625, -32768.0)


@triton.jit
def _sign_bytes(v0, v1, v2, v3):
    """The bytes of four fp32 tensors that hold their signs, in one int32."""
    return tl.inline_asm_elementwise(
        """{ .reg .b32 a, b;
        prmt.b32 a, $1, $2, 0x0073;
        prmt.b32 b, $3, $4, 0x0073;
        prmt.b32 $0, a, b, 0x5410; }""",
        "=r,r,r,r,r",
        [v0, v1, v2, v3],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def encode_word(v, first: tl.constexpr, factor, random0, random1, STOCHASTIC: tl.constexpr):
    """Codes of elements first .. first + 7 of v * factor in one int32, the first the lowest.

    random0, random1: int32 words whose bytes are the dither of these elements. STOCHASTIC: 1 rounds
    elements so; with 2 the block's scale is what is random.
    """
    codes = bits_of(factor) * 0
    for k in tl.static_range(0, 8):
        t = v[first + 7 - k] * factor
        if STOCHASTIC == 1:
            code = _stochastic_code(t, _dither(random0 if k > 3 else random1, 7 - k))
        else:
            code = _nearest_code(t)
        codes = codes * 16 + code
    codes += 0x05000000  # less what the eight times 2**23 have left in the word
    even = _sign_bytes(v[first], v[first + 2], v[first + 4], v[first + 6])
    odd = _sign_bytes(v[first + 1], v[first + 3], v[first + 5], v[first + 7])
    signs = ((even >> 4) & 0x0F0F0F0F) | (odd & -0x0F0F0F10)
    # A zero has no sign: 7 carries into the top bit of every nibble but that of a zero.
    return codes | (signs & (codes + 0x77777777) & -0x77777778)


@triton.jit
def nearest_signed(t):
    """t rounded to the E2M1 grid, ties to even, at most 6 in magnitude; never -0."""
    anchor = float_of((bits_of(tl.maximum(tl.abs(t), 1.0)) & 0x7F800000) + ((22 << 23) + (1 << 22)))
    return tl.maximum(tl.minimum((t + anchor) - anchor, 6.0), -6.0)


@triton.jit
def stochastic_signed(t, u):
    """As nearest_signed, with the dither u of `_stochastic_code`; may be -0."""
    # The low bits of the code as those of a subnormal or small float: 2**126 makes E2M1 of it.
    bits = (_stochastic_code(t, u) << 22) | (bits_of(t) & (-0x7FFFFFFF - 1))
    return float_of(bits) * (2.0**126)


@triton.jit
def decoded_values(v, factor, scale, r0, r1, r2, r3, STOCHASTIC: tl.constexpr):
    """The 16 values code * scale of blocks v whose codes are those of v * factor; no -0."""
    out = ()
    for i in tl.static_range(0, 16):
        t = v[i] * factor
        if STOCHASTIC == 1:
            word = (r0 if i < 4 else r1) if i < 8 else (r2 if i < 12 else r3)
            r = stochastic_signed(t, _dither(word, i))
        else:
            r = nearest_signed(t)
        out = out + (tl.fma(r, scale, 0.0),)
    return out


@triton.jit
def pack_e4m3(v, first: tl.constexpr):
    """Elements first .. first + 3 as E4M3 bytes of an int32, nearest even, saturating."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 a, b;
        cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 b, $4, $3;
        mov.b32 $0, {a, b}; }""",
        "=r,r,r,r,r",
        [v[first], v[first + 1], v[first + 2], v[first + 3]],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def pack_bf16(v, first: tl.constexpr):
    """Elements first and first + 1 as bf16 in an int32, nearest even."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;",
        "=r,r,r",
        [v[first], v[first + 1]],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def store_words(address, w0, w1, w2, w3, inside):
    """16 bytes at each int64 address, where inside (int32) is not zero."""
    tl.inline_asm_elementwise(
        """{ .reg .pred p; setp.ne.s32 p, $6, 0;
        @p st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0; }""",
        "=r,l,r,r,r,r,r",
        [address, w0, w1, w2, w3, inside],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def join_words(low, high):
    """Two int32 as one int64, the first lower."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def tensor_encode(amax, numerator):
    """S_enc and 1 / S_enc of a tensor's amax."""
    s_enc = min_nan(tl.div_rn(numerator, amax), FLT_MAX)
    s_enc = tl.where((amax == 0.0) | (s_enc == 0.0), 1.0, s_enc)
    return s_enc, tl.div_rn(1.0, s_enc)


@triton.jit
def e4m3_byte(x):
    """fp32 x >= 0 -> E4M3 byte (uint8), saturating; NaN stays NaN."""
    return min_nan(x, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def e4m3_value(byte):
    return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def block_factor(byte, s_dec):
    """e = min(1 / (s * (1 / S_enc)), FLT_MAX)."""
    return min_nan(tl.div_rn(1.0, e4m3_value(byte) * s_dec), FLT_MAX)


@triton.jit
def _over_1536(x):
    """x / 1536 with one rounding: Markstein's correction of x times the rounded reciprocal."""
    quotient = x * RN_1536TH
    return tl.fma(tl.fma(quotient, -1536.0, x), RN_1536TH, quotient)


@triton.jit
def decode_error(v, byte, factor, amax, SQUARED: tl.constexpr, NORMAL: tl.constexpr):
    """Sum of the errors of a block after decoding, elements in their order."""
    decode = e4m3_value(byte)
    total = decode
    for i in tl.static_range(0, 16):
        a = tl.abs(v[i])
        value = nearest_value(a * factor) * decode * amax
        error = (_over_1536(value) if NORMAL else tl.div_rn(value, 1536.0)) - a
        error = error * error if SQUARED else tl.abs(error)
        total = error if i == 0 else total + error
    return total


@triton.jit
def scaled_error(v, factor):
    """Sum of the squared errors of a block in units of its scale, quickly: see four_over_six."""
    total = factor * 0.0
    for i in tl.static_range(0, 16):
        t = tl.abs(v[i] * factor)
        error = _rounded(t) - t
        total = tl.fma(error, error, total)
    return total


@triton.jit
def _decoded_choice(v, byte6, byte4, factor6, factor4, amax, SQUARED: tl.constexpr):
    """Whether the second candidate errs less, by the definition."""
    # Without denormal numbers near, the division needs no true one.
    if (amax > 1e-15) & (amax < 1e30):
        error6 = decode_error(v, byte6, factor6, amax, SQUARED, True)
        error4 = decode_error(v, byte4, factor4, amax, SQUARED, True)
    else:
        error6 = decode_error(v, byte6, factor6, amax, SQUARED, False)
        error4 = decode_error(v, byte4, factor4, amax, SQUARED, False)
    return error4 < error6


@triton.jit
def four_over_six(v, a, s_enc, s_dec, amax, SQUARED: tl.constexpr):
    """Scale byte and factor of the candidate, amax to 6 or to 4, that errs less.

    Squared errors are first summed in units of the scale, which takes half the operations. These
    sums and the definition's differ by their roundings: an error by at most 2**-21 of its value t,
    a sum by at most 2**-20 |t| sqrt(sum) + 2**-19 sum, which is below 2**-16 sum + 2**-26 |t|**2
    with |t|**2 <= 16 * 7**2. Where no block of the tile is nearer to a tie, they decide.
    """
    base = tl.div_rn(a, 6.0) * s_enc
    byte6 = e4m3_byte(base)
    byte4 = e4m3_byte(base * 1.5)
    factor6 = block_factor(byte6, s_dec)
    factor4 = block_factor(byte4, s_dec)
    if SQUARED:
        value6, value4 = e4m3_value(byte6), e4m3_value(byte4)
        unit6, unit4 = value6 * value6, value4 * value4
        error6, error4 = scaled_error(v, factor6) * unit6, scaled_error(v, factor4) * unit4
        margin = (error6 + error4) * 2.0e-5 + (unit6 + unit4) * 1.2e-5
        sure = (tl.abs(error6 - error4) > margin) & (a * factor6 < 7.0) & (a * factor4 < 7.0)
        unsure = tl.where(sure | (a == 0.0), 0, 1)
        doubtful = tl.max(tl.max(unsure, axis=1), axis=0)
        four = error4 < error6
        # Nor do they where squares of the definition's over- or underflow.
        if (doubtful != 0) | (amax < 1e-12) | (amax > 1e15):
            four = _decoded_choice(v, byte6, byte4, factor6, factor4, amax, True)
    else:
        four = _decoded_choice(v, byte6, byte4, factor6, factor4, amax, False)
    return tl.where(four, byte4, byte6), tl.where(four, factor4, factor6)


@triton.jit
def eden_byte(v, byte, factor, random):
    """MS-EDEN's scale (`ms_eden.corrected_scales`) of blocks v whose codes are those of v * factor.

    byte: their scale before; random: int32, of which 20 bits are the dither.
    """
    square, cross = factor * 0.0, factor * 0.0
    for i in tl.static_range(0, 16):
        t = v[i] * factor
        square = tl.fma(t, t, square)
        cross = tl.fma(t, nearest_signed(t), cross)
    ratio = tl.div_rn(square, cross)
    usable = (cross != 0.0) & (tl.abs(ratio) < float("inf"))
    # 2**-120 makes E4M3's subnormals fp32's: dropping 20 bits rounds to E4M3 everywhere.
    wanted = e4m3_value(byte) * tl.where(usable, ratio, 1.0)
    small = bits_of(wanted * (2.0**-120))
    corrected = e4m3_byte(float_of(((small + (random & 0xFFFFF)) >> 20) << 20) * (2.0**120))
    return tl.where(wanted == wanted, corrected, byte)  # the bits of NaN would overflow


@triton.jit
def ceil_exponent(bits):
    """Smallest e with 6 * 2**e >= the magnitude with these bits."""
    return ((bits + 0x3FFFFF) >> 23) - 129


@triton.jit
def power(exponent):
    return float_of((exponent + 127) << 23)


@triton.jit
def shift_of(amax):
    """Shift (int32 scalar) that stores the scale of a block with this amax as 2**8."""
    bits = bits_of(amax)
    bits = tl.where((bits & 0x7FFFFFFF) < 0x7F800000, bits, 0)
    return tl.minimum(tl.maximum(ceil_exponent(bits) - 8, -120), 116)


@triton.jit
def pow2_error(v, exponent, unit, shift):
    """Sum of squared errors with this scale, in units of a scale 1 / unit times as large."""
    factor = power(-exponent - shift)
    total = factor
    for i in tl.static_range(0, 16):
        fitted = tl.abs(v[i] * factor)
        error = (nearest_value(fitted) - fitted) * unit
        total = error * error if i == 0 else total + error * error
    return total


@triton.jit
def pow2_scale(bits, shift, LOWEST: tl.constexpr):
    """Exponent in range, and whether a block lies above (1) or below (65536) it, of amax bits.

    LOWEST: smallest exponent that is in range; one more than the smallest scale's where half the
    scale is tried too.
    """
    bits = tl.where(bits < 0x7F800000, bits, 0)
    wanted = ceil_exponent(bits) - shift
    outside = tl.where(wanted > 8, 1, 0) + tl.where((wanted < LOWEST) & (bits > 0), 65536, 0)
    return tl.minimum(tl.maximum(wanted, -6), 8), outside


@triton.jit
def better_of_two(v, exponent, shift):
    """The exponent, or one less if the squared error is smaller."""
    smaller = tl.maximum(exponent - 1, -6)
    large = pow2_error(v, exponent, 1.0, shift)
    small = pow2_error(v, smaller, power(smaller - exponent), shift)
    return tl.where(small < large, smaller, exponent)
