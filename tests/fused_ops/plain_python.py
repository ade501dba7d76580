# SPDX-License-Identifier: Apache-2.0
"""A second definition of every quantizer, in Python numbers, one element at a time.

Written from the formats' papers with exact fractions and an explicit rounding after each operation,
sharing no code and no method with fused_ops: the two can only agree if both are right.
"""

from bisect import bisect_left
from fractions import Fraction

FLT_MAX = Fraction((2**24 - 1) * 2**104)
INF = "inf"


def floor_log2(x):
    """Largest e with 2**e <= x, for x > 0."""
    x = Fraction(x)
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def ceil_log2(x):
    """Smallest e with 2**e >= x, for x > 0."""
    return floor_log2(x) if Fraction(2) ** floor_log2(x) == x else floor_log2(x) + 1


def round_binary(x, digits, smallest_exponent, largest=None):
    """Nearest number of `digits` significant bits, ties to even; subnormals below the smallest."""
    x = Fraction(x)
    if x == 0:
        return x
    magnitude = abs(x)
    unit = Fraction(2) ** (max(floor_log2(magnitude), smallest_exponent) - digits + 1)
    count, rest = divmod(magnitude, unit)
    if rest * 2 > unit or (rest * 2 == unit and count % 2):
        count += 1
    result = count * unit
    if largest is not None and result > largest:
        result = largest
    return result if x > 0 else -result


def f32(x):
    """One fp32 rounding, saturating: callers only round what stays finite, or cap it."""
    return round_binary(x, 24, -126, FLT_MAX)


def e2m1_value(code):
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    if exponent:
        magnitude = Fraction(2) ** (exponent - 1) * (1 + Fraction(mantissa, 2))
    else:
        magnitude = Fraction(mantissa, 2)
    return -magnitude if sign else magnitude


def fp8_value(code, element):
    """E4M3 or E5M2 value of a byte; None for NaN, INF for infinity."""
    exponent_bits, mantissa_bits, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}[element]
    mantissa = code & (1 << mantissa_bits) - 1
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    if element == "e4m3" and code & 0x7F == 0x7F:
        return None
    if element == "e5m2" and exponent == 31:
        return None if mantissa else INF
    if exponent:
        magnitude = (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)
    else:
        magnitude = Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    return -magnitude if code >> 7 else magnitude


def nearest_code(x, table):
    """Code of the nearest of (value, code) pairs in ascending order, ties to the even code."""
    x = abs(Fraction(x))
    place = bisect_left(table, (x, 0))
    around = table[max(place - 1, 0) : place + 1] or table[-1:]
    return min(around, key=lambda entry: (abs(entry[0] - x), entry[1] & 1))[1]


E2M1_TABLE = [(e2m1_value(code), code) for code in range(8)]
FP8_TABLES = {
    "e4m3": [(fp8_value(code, "e4m3"), code) for code in range(0x7F)],
    "e5m2": [(fp8_value(code, "e5m2"), code) for code in range(0x7C)],
}
ELEMENT_MAX = {"e2m1": 6, "e4m3": 448, "e5m2": 57344}


def e2m1_code(x):
    code = nearest_code(x, E2M1_TABLE)
    return code | 8 if x < 0 and code else code


def fp8_code(x, element="e4m3"):
    code = nearest_code(x, FP8_TABLES[element])
    return code | 0x80 if x < 0 else code


def e2m1_stochastic(x, u):
    """Lower neighbour, or the upper one if u (in [0, 1)) reaches the rest of the way."""
    magnitude = min(abs(Fraction(x)), Fraction(6))
    lower = max(code for value, code in E2M1_TABLE if value <= magnitude)
    if lower < 7:
        low, high = E2M1_TABLE[lower][0], E2M1_TABLE[lower + 1][0]
        if (magnitude - low) / (high - low) + u >= 1:
            lower += 1
    return lower | 8 if x < 0 and lower else lower


def e8m0_up(x):
    return 0 if x == 0 else min(max(ceil_log2(x) + 127, 0), 254)


def philox(counter, key):
    """Philox4x32-10 from its paper, on Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [right // 2**32 ^ c[1] ^ k[0], right % 2**32, left // 2**32 ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def dither_byte(row, col, key):
    word = philox((row, col // 16, 0, 0), key)[col % 16 // 4]
    return word >> 8 * (col % 4) & 255


def dither_24(row, col, key):
    place = col % 16
    word = philox((row, col // 16, 1 + place // 8, 0), key)[place % 8 // 2]
    return dither_byte(row, col, key) << 16 | word >> 16 * (place % 2) & 0xFFFF


def encode_scale(amax, numerator):
    if amax == 0:
        return Fraction(1)
    return min(f32(Fraction(numerator) / amax), FLT_MAX)


def inverse_scale(scale_code, s_enc):
    """min(1 / (s * (1 / S_enc)), FLT_MAX)."""
    product = f32(fp8_value(scale_code, "e4m3") * f32(1 / s_enc))
    return FLT_MAX if product == 0 else min(f32(1 / product), FLT_MAX)


SIXTH = f32(Fraction(1, 6))


def nvfp4_block(xs, amax, numerator=2688):
    """(codes, scale byte) of one block, nearest rounding."""
    s_enc = encode_scale(amax, numerator)
    largest = max(abs(x) for x in xs)
    scale = fp8_code(min(f32(largest * f32(s_enc * SIXTH)), FLT_MAX))
    factor = inverse_scale(scale, s_enc)
    return [e2m1_code(f32(x * factor)) for x in xs], scale


def four_over_six_block(xs, amax, squared):
    s_enc = encode_scale(amax, 1536)
    base = f32(f32(max(abs(x) for x in xs) / Fraction(6)) * s_enc)
    results = []
    for scale in (fp8_code(base), fp8_code(f32(base * Fraction(3, 2)))):
        factor = inverse_scale(scale, s_enc)
        codes = [e2m1_code(f32(x * factor)) for x in xs]
        total = Fraction(0)
        for x, code in zip(xs, codes):
            decoded = f32(e2m1_value(code) * fp8_value(scale, "e4m3"))
            decoded = f32(f32(decoded * amax) / 1536)
            error = abs(f32(decoded - x))
            total = f32(total + (f32(error * error) if squared else error))
        results.append((total, codes, scale))
    six, four = results
    return four[1:] if four[0] < six[0] else six[1:]


def ms_eden_block(xs, amax, word):
    s_enc = encode_scale(amax, 1536)
    scale = fp8_code(f32(f32(max(abs(x) for x in xs) * SIXTH) * s_enc))
    factor = inverse_scale(scale, s_enc)
    fitted = [f32(x * factor) for x in xs]
    codes = [e2m1_code(t) for t in fitted]
    square = cross = Fraction(0)
    for t, code in zip(fitted, codes):
        square = f32(square + t * t)
        cross = f32(cross + t * e2m1_value(code))
    correction = f32(square / cross) if cross else Fraction(1)
    wanted = min(f32(fp8_value(scale, "e4m3") * correction), Fraction(448))
    lower = max(code for value, code in FP8_TABLES["e4m3"] if value <= wanted)
    if lower < 0x7E:
        low, high = FP8_TABLES["e4m3"][lower][0], FP8_TABLES["e4m3"][lower + 1][0]
        if (wanted - low) / (high - low) + Fraction(word & 0xFFFFF, 2**20) >= 1:
            lower += 1
    return codes, lower


def pow2_exponent(amax):
    """Smallest e with 6 * 2**e >= amax."""
    return -200 if amax == 0 else ceil_log2(Fraction(amax) / 6)


def pow2_block(xs, shift, better=False):
    """(codes, exponent) of one block, clamped to what the shift can store."""

    def clamp(exponent):
        return max(shift - 6, min(shift + 8, exponent))

    first = clamp(pow2_exponent(max(abs(x) for x in xs)))
    best = None
    for exponent in (first, clamp(first - 1)) if better else (first,):
        unit = Fraction(2) ** exponent
        codes = [e2m1_code(x / unit) for x in xs]
        total = Fraction(0)
        for x, code in zip(xs, codes):
            error = f32(
                e2m1_value(code) - abs(x) / unit if x >= 0 else -e2m1_value(code) + x / unit
            )
            error *= unit / Fraction(2) ** first
            total = f32(total + f32(error * error))
        if best is None or total < best[0]:
            best = total, codes, exponent
    return best[1], best[2]


def mx_block(xs, element):
    """(codes, E8M0 byte) of one block."""
    largest = max(abs(x) for x in xs)
    scale = e8m0_up(f32(largest * f32(Fraction(1, ELEMENT_MAX[element]))))
    inverse = Fraction(2) ** (127 - scale)
    encode = e2m1_code if element == "e2m1" else lambda x: fp8_code(x, element)
    return [encode(f32(x * inverse)) for x in xs], scale


def fp8_scaled(xs, amax, element="e4m3", pow2=False, largest=FLT_MAX):
    """(codes, fp32 encode scale) of values that share an amax."""
    scale = Fraction(1) if amax == 0 else min(f32(ELEMENT_MAX[element] / amax), largest)
    if pow2:
        scale = Fraction(2) ** floor_log2(scale)
    return [fp8_code(f32(x * scale), element) for x in xs], scale
