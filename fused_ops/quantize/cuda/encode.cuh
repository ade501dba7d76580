// SPDX-License-Identifier: Apache-2.0
//
// Block scales, dither, and codes of a block that one thread holds; see quantize_pair.cu.

#pragma once

#include <cuda_fp16.h>

#include "rotation.cuh"

namespace {

// ---- randomness: Philox4x32-10 of the counter (row, block, 0, 0) -----------------------------

// The keys of ten rounds, two words each.
struct RoundKeys {
  uint4 pairs[5];
};

__device__ void make_round_keys(uint2 key, RoundKeys& keys) {
  const uint32_t i = threadIdx.x;
  if (i < 5) {
    keys.pairs[i] = make_uint4(
        key.x + 2 * i * 0x9E3779B9u, key.y + 2 * i * 0xBB67AE85u,
        key.x + (2 * i + 1) * 0x9E3779B9u, key.y + (2 * i + 1) * 0xBB67AE85u);
  }
}

__device__ void philox_round(uint4& c, uint32_t k0, uint32_t k1) {
  const uint64_t p0 = uint64_t(c.x) * 0xD2511F53u, p1 = uint64_t(c.z) * 0xCD9E8D57u;
  c = make_uint4(
      uint32_t(p1 >> 32) ^ c.y ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c.w ^ k1, uint32_t(p0));
}

// What three rounds of the counter (row, block, 0, 0) need of the row.
__device__ uint4 start_of_row(const RoundKeys& keys, uint32_t row) {
  const uint4 first = keys.pairs[0], second = keys.pairs[1];
  const uint64_t p0 = uint64_t(row) * 0xD2511F53u;
  const uint64_t q1 = uint64_t(uint32_t(p0 >> 32) ^ first.y) * 0xCD9E8D57u;
  const uint64_t s0 = uint64_t(uint32_t(q1 >> 32) ^ first.z) * 0xD2511F53u;
  return make_uint4(
      uint32_t(p0) ^ first.w, uint32_t(q1) ^ second.x, uint32_t(s0 >> 32) ^ second.y, uint32_t(s0));
}

// And of the block.
__device__ uint2 start_of_block(const RoundKeys& keys, uint32_t block) {
  const uint64_t q0 = uint64_t(block ^ keys.pairs[0].x) * 0xD2511F53u;
  return make_uint2(uint32_t(q0 >> 32), uint32_t(q0));
}

// All ten rounds.
__device__ uint4 philox(const RoundKeys& keys, const uint4& row, const uint2& block) {
  const uint64_t s1 = uint64_t(block.x ^ row.x) * 0xCD9E8D57u;
  uint4 c = make_uint4(uint32_t(s1 >> 32) ^ row.y, uint32_t(s1), row.z ^ block.y, row.w);
  philox_round(c, keys.pairs[1].z, keys.pairs[1].w);
#pragma unroll
  for (int i = 2; i < 5; ++i) {
    const uint4 k = keys.pairs[i];
    philox_round(c, k.x, k.y);
    philox_round(c, k.z, k.w);
  }
  return c;
}

__device__ uint32_t word_of(const uint4& r, int i) {
  return i == 0 ? r.x : i == 1 ? r.y : i == 2 ? r.z : r.w;
}

// ---- rounding to the E2M1 grid, ties to even ---------------------------------------------------

// 1.5 * 2^22 times 1, 2 or 4: adding it leaves steps of 0.5 below 2, 1 below 4, 2 above.
__device__ float anchor_of(float t) {
  const float two = saturate(__fmaf_rn(fabsf(t), 16777216.f, -33554432.f));
  const float four = saturate(__fmaf_rn(fabsf(t), 16777216.f, -67108864.f));
  return __fmaf_rn(four, 12582912.f, __fmaf_rn(two, 6291456.f, 6291456.f));
}

// Not saturated: right for |t| < 7.
__device__ float nearest(float t) {
  const float anchor = anchor_of(t);
  return (t + anchor) - anchor;
}

__device__ float clamp6(float r) { return fmaxf(fminf(r, 6.f), -6.f); }

// ---- scales ------------------------------------------------------------------------------------

struct Block {
  uint32_t byte;      // of the E4M3 scale
  float factor;       // codes are those of value * factor
  bool above, below;  // pow2: out of range
};

__device__ uint32_t e4m3_byte(float x) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.f), "f"(min_nan(x, 448.f)));
  return r & 0xFFu;
}

// In fp16, the lower half.
__device__ uint32_t e4m3_halves(uint32_t byte) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(byte)));
  return halves;
}

__device__ float e4m3_value(uint32_t byte) {
  return __half2float(__ushort_as_half(uint16_t(e4m3_halves(byte))));
}

__device__ float power(int exponent) { return float_of(uint32_t(exponent + 127) << 23); }

__device__ int ceil_exponent(uint32_t bits) { return (int(bits + 0x3FFFFFu) >> 23) - 129; }

__device__ int shift_of(float amax) {
  uint32_t bits = bits_of(amax);
  if ((bits & 0x7FFFFFFFu) >= kInfinity) bits = 0;
  return min(max(ceil_exponent(bits) - 8, -120), 116);
}

// What all blocks of a tensor share.
struct Tensor {
  float amax, s_enc, s_dec;
  int shift;
};

template <bool POW2>
__device__ Tensor tensor_of(float amax, float numerator) {
  Tensor t{amax, 1.f, 1.f, 0};
  if (POW2) {
    t.shift = shift_of(amax);
  } else {
    float s = min_nan(__fdiv_rn(numerator, amax), kFltMax);
    if (amax == 0.f || s == 0.f) s = 1.f;
    t.s_enc = s;
    t.s_dec = __fdiv_rn(1.f, s);
  }
  return t;
}

__device__ float block_factor(uint32_t byte, const Tensor& t) {
  return min_nan(__fdiv_rn(1.f, e4m3_value(byte) * t.s_dec), kFltMax);
}

// Sum of squared errors after decoding, one fp32 rounding an operation, elements in their order.
__device__ float decoded_error(const float (&v)[16], uint32_t byte, float factor, float amax) {
  const float scale = e4m3_value(byte);
  float total = 0.f;
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    float a = 0.f;
#pragma unroll
    for (int k = 0; k < 16; ++k) a = i == k ? fabsf(v[k]) : a;
    const float value = (clamp6(nearest(a * factor)) * scale) * amax;
    const float error = __fdiv_rn(value, 1536.f) - a;
    total = i == 0 ? error * error : total + error * error;
  }
  return total;
}

// The same, in units of the block's own scale and with other roundings.
__device__ float scaled_error(const float (&v)[16], float factor) {
  float total = 0.f;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float t = v[i] * factor;
    const float error = nearest(t) - t;
    total = __fmaf_rn(error, error, total);
  }
  return total;
}

// Which of two candidate scales errs less is decided by quick sums where they differ by more than
// their roundings can: an error carries at most 2^-21 of its value's magnitude, so a sum at most
// 2^-20 of itself and 2^-20 |v| sqrt(sum), which is below 2^-13 sum + 2^-26 |v|^2.
__device__ bool undecided(float first, float second, float squares) {
  const float margin = __fmaf_rn(first + second, 1.220703125e-4f, squares * 5.9604645e-8f);
  return !(fabsf(first - second) > margin);
}

__device__ void four_over_six(const float (&v)[16], float a, const Tensor& t, Block& block) {
  const float base = __fdiv_rn(a, 6.f) * t.s_enc;
  const uint32_t byte6 = e4m3_byte(base), byte4 = e4m3_byte(base * 1.5f);
  const float factor6 = block_factor(byte6, t), factor4 = block_factor(byte4, t);
  bool four, exact = true;
  // Within the range of the quick sums no code saturates beyond 6, and no square of the definition's
  // over- or underflows.
  if (t.amax > 1e-12f && t.amax < 1e15f && a * factor6 < 7.f && a * factor4 < 7.f &&
      byte6 >= 1u && byte6 < 0x7Fu) {
    const float unit = e4m3_value(byte4) / e4m3_value(byte6);
    const float error6 = scaled_error(v, factor6);
    const float error4 = scaled_error(v, factor4) * (unit * unit);
    exact = undecided(error6, error4, 576.f);  // |v|^2 <= 16 * 6^2 in these units
    four = error4 < error6;
  }
  if (exact) {
    four = decoded_error(v, byte4, factor4, t.amax) < decoded_error(v, byte6, factor6, t.amax);
  }
  block.byte = four ? byte4 : byte6;
  block.factor = four ? factor4 : factor6;
}

__device__ float pow2_error(const float (&v)[16], int exponent, float unit, int shift) {
  const float factor = power(-exponent - shift);
  float total = 0.f;
#pragma unroll 1
  for (int i = 0; i < 16; ++i) {
    float x = 0.f;
#pragma unroll
    for (int k = 0; k < 16; ++k) x = i == k ? v[k] : x;
    const float fitted = fabsf(x * factor);
    const float error = (clamp6(nearest(fitted)) - fitted) * unit;
    total = i == 0 ? error * error : total + error * error;
  }
  return total;
}

// The exponent, or one less if the squared error is smaller, saturation included.
__device__ int better_of_two(const float (&v)[16], uint32_t bits, int exponent, int shift) {
  const int smaller = max(exponent - 1, -6);
  if (smaller == exponent || bits == 0) return exponent;
  const float factor = power(-exponent - shift);
  const float top = float_of(bits) * factor;
  if (top <= 6.f && top >= 1.f) {
    float large = 0.f, small = 0.f;
    const float half = factor + factor;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float t = v[i] * factor, t2 = v[i] * half;
      const float error = nearest(t) - t, error2 = clamp6(nearest(t2)) - t2;
      large = __fmaf_rn(error, error, large);
      small = __fmaf_rn(error2, error2, small);
    }
    small *= 0.25f;
    // Errors are exact here: only the squares and their sums round.
    if (fabsf(large - small) > (large + small) * 1e-5f) return small < large ? smaller : exponent;
  }
  const float large = pow2_error(v, exponent, 1.f, shift);
  return pow2_error(v, smaller, 0.5f, shift) < large ? smaller : exponent;
}

template <bool POW2, int CHOICE>
__device__ Block scale_of(const float (&v)[16], uint32_t bits, const Tensor& t) {
  Block block{0u, 0.f, false, false};
  if (POW2) {
    const bool finite = bits < kInfinity;
    const int wanted = ceil_exponent(finite ? bits : 0u) - t.shift;
    block.above = wanted > 8;
    block.below = finite && bits > 0u && wanted < (CHOICE == 1 ? -5 : -6);
    int exponent = min(max(wanted, -6), 8);
    if (CHOICE == 1) exponent = better_of_two(v, bits, exponent, t.shift);
    block.factor = power(-exponent - t.shift);
    block.byte = finite ? uint32_t(exponent + 7) << 3 : 0x7Fu;
  } else if (CHOICE == 0) {
    block.byte = e4m3_byte(float_of(bits) * (t.s_enc * kRnSixth));
    block.factor = block_factor(block.byte, t);
  } else {
    four_over_six(v, float_of(bits), t, block);
  }
  return block;
}

// ---- codes -------------------------------------------------------------------------------------

// Two values as halves sign | code << 9 | rest: E2M1 times 2^-14 in fp16, whose subnormal numbers
// have the steps below 1. Toward zero, so that adding the dither to the bits keeps the exact sum's
// floor; what is below the code is not needed any more.
__device__ uint32_t to_halves(float first, float second) {
  uint32_t halves;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(second), "f"(first));
  return halves;
}

// Magnitudes above 6 times 2^-14, NaN among them, become that.
__device__ uint32_t saturate_halves(uint32_t halves) {
  uint32_t r;
  asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(halves), "r"(0x0E000E00u));
  return r;
}

__device__ __half2 as_half2(uint32_t bits) { return *reinterpret_cast<__half2*>(&bits); }
__device__ uint32_t as_bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }

// The two elements of pair i. Codes are put together from every second element: see pack_codes.
template <bool CODES>
constexpr __device__ int element_of(int i, int which) {
  return CODES ? 4 * (i / 2) + i % 2 + 2 * which : 2 * i + which;
}

// Sixteen values rounded stochastically, as pairs in fp16 times 2^-14. Below the code, CODES leaves
// bits of the dither's sum. POW2: the factor is a power of two.
template <bool POW2, bool CODES>
__device__ void dither_pairs(
    float (&v)[16], const Block& block, float top, const uint4& random, uint32_t (&pairs)[8]) {
  float factor = block.factor * 6.103515625e-05f;
  if (!POW2 && block.factor < 1e-30f) {  // where that would lose bits
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] *= 6.103515625e-05f;
    factor = block.factor;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    pairs[i] = to_halves(v[element_of<CODES>(i, 0)] * factor, v[element_of<CODES>(i, 1)] * factor);
  }
  // An E4M3 scale that was rounded down lets values pass 6, in half of the blocks.
  if (!POW2 || !(top * block.factor <= 6.f)) {
#pragma unroll
    for (int i = 0; i < 8; ++i) pairs[i] = saturate_halves(pairs[i]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t bytes = CODES ? (i % 2 ? 0x4341u : 0x4240u) : (i % 2 ? 0x4342u : 0x4140u);
    pairs[i] += __byte_perm(word_of(random, i / 2), 0u, bytes) << 1;
    if (!CODES) pairs[i] &= 0xFE00FE00u;
  }
}

// Sixteen values rounded to nearest, as pairs in fp16: times 2^-14 (UNITS), or as they are.
template <bool UNITS, bool CODES>
__device__ void nearest_pairs(
    float (&v)[16], const Block& block, float top, uint32_t (&pairs)[8]) {
  const float factor = block.factor;
  if (!(top * factor <= 6.99f)) {
    // Values that saturate become some that are above 6 by what rounding takes away again.
    const float most = __fdiv_rn(6.f, factor) * 1.000001f;
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = fmaxf(fminf(v[i], most), -most);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float first = v[element_of<CODES>(i, 0)] * factor;
    const float second = v[element_of<CODES>(i, 1)] * factor;
    uint32_t halves;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;"
        : "=r"(halves)
        : "f"(nearest(second)), "f"(nearest(first)));
    if (UNITS) halves = as_bits(__hmul2(as_half2(halves), __float2half2_rn(6.103515625e-05f)));
    pairs[i] = halves;
  }
}

// Nibbles without the sign of those that are zero: seven carries into the top bit of all others.
__device__ uint32_t unsigned_zeros(uint32_t packed) {
  return packed & (((packed & 0x77777777u) + 0x77777777u) | 0x77777777u);
}

// Eight codes of four pairs (elements 0, 2; 1, 3; 4, 6; 5, 7), the first in the lowest nibble.
__device__ uint32_t pack_codes(const uint32_t (&pairs)[8], int first) {
  // Bytes sign, three bits, code, one bit: of the even and of the odd elements.
  const uint32_t even = __byte_perm(pairs[first], pairs[first + 2], 0x7531u);
  const uint32_t odd = __byte_perm(pairs[first + 1], pairs[first + 3], 0x7531u);
  uint32_t packed = (even >> 1) & 0x07070707u;
  packed |= (even >> 4) & 0x08080808u;
  packed |= (odd << 3) & 0x70707070u;
  packed |= odd & 0x80808080u;
  return unsigned_zeros(packed);
}

// Values times the E4M3 scale times 2^-SHIFT, without negative zeros: exact in fp16.
template <bool UNITS, int SHIFT>
__device__ void scale_pairs(uint32_t (&pairs)[8], uint32_t byte) {
  const __half2 up = __float2half2_rn(128.f), zero = __float2half2_rn(0.f);
  const __half2 unit = __float2half2_rn((UNITS ? 128.f : 1.f) / (1 << SHIFT));
  const __half2 rest = __hmul2(as_half2(__byte_perm(e4m3_halves(byte), 0u, 0x1010u)), unit);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const __half2 pair = as_half2(pairs[i]);
    pairs[i] = as_bits(__hfma2(UNITS ? __hmul2(pair, up) : pair, rest, zero));
  }
}

__device__ uint32_t to_e4m3(uint32_t low, uint32_t high) {
  uint16_t a, b;
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(a) : "r"(low));
  asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(b) : "r"(high));
  return uint32_t(a) | uint32_t(b) << 16;
}

__device__ uint32_t to_bf16(uint32_t pair) {
  const float2 f = __half22float2(as_half2(pair));
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(f.y), "f"(f.x));
  return r;
}

#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL)
#define NATIVE_E2M1 1
// Eight codes of v * factor from `first` on, as pack_codes gives them.
__device__ uint32_t native_codes(const float (&v)[16], float factor, int first) {
  uint32_t packed;
  asm("{ .reg .b8 a, b, c, d;\n"
      "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n"
      "mov.b32 %0, {a, b, c, d}; }"
      : "=r"(packed)
      : "f"(v[first] * factor), "f"(v[first + 1] * factor), "f"(v[first + 2] * factor),
        "f"(v[first + 3] * factor), "f"(v[first + 4] * factor), "f"(v[first + 5] * factor),
        "f"(v[first + 6] * factor), "f"(v[first + 7] * factor));
  return unsigned_zeros(packed);
}
#endif

constexpr __host__ __device__ int words_of(int form) { return form == 0 ? 2 : form == 1 ? 4 : 8; }

// What is written of a block, as words.
template <int FORM, int SHIFT, bool UNITS>
__device__ void finish(uint32_t (&pairs)[8], uint32_t byte, uint32_t (&out)[words_of(FORM)]) {
  if constexpr (FORM == 0) {
    out[0] = pack_codes(pairs, 0);
    out[1] = pack_codes(pairs, 4);
  } else {
    scale_pairs<UNITS, SHIFT>(pairs, byte);
#pragma unroll
    for (int i = 0; i < words_of(FORM); ++i) {
      out[i] = FORM == 1 ? to_e4m3(pairs[2 * i % 8], pairs[(2 * i + 1) % 8]) : to_bf16(pairs[i]);
    }
  }
}

// Rounds a block and gives what is written of it.
template <bool POW2, int FORM, int SHIFT, bool SR>
__device__ void encode(
    float (&v)[16], const Block& block, uint32_t bits, const uint4& random,
    uint32_t (&out)[words_of(FORM)]) {
#ifdef NATIVE_E2M1
  if constexpr (FORM == 0 && !SR) {
    out[0] = native_codes(v, block.factor, 0);
    out[1] = native_codes(v, block.factor, 8);
    return;
  }
#endif
  constexpr bool kUnits = SR || FORM == 0;
  uint32_t pairs[8];
  if constexpr (SR) {
    dither_pairs<POW2, FORM == 0>(v, block, float_of(bits), random, pairs);
  } else {
    nearest_pairs<kUnits, FORM == 0>(v, block, float_of(bits), pairs);
  }
  finish<FORM, SHIFT, kUnits>(pairs, block.byte, out);
}

}  // namespace
