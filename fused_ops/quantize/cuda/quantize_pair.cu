// SPDX-License-Identifier: Apache-2.0
//
// x [rows, cols] bf16 -> NVFP4 along its rows, and NVFP4 of its transpose, from one read.
//
// Every byte is that of fused_ops/quantize/reference.py. A thread holds whole blocks of 16 values:
// two blocks of a row, then the same 16 rows of two columns, which the tile's copy in shared memory
// gives it. What is wanted is chosen by macros, R_* for the rows and C_* for the columns:
//
//   POW2      power-of-two block scales, else E4M3
//   SR        stochastic rounding
//   CHOICE    0; 1 better_of_two (pow2) or 4over6_mse
//   NUMERATOR 2688 or 1536
//   FORM      0 codes and scales, 1 E4M3 values, 2 bf16 values
//   SHIFT     values of FORM 1 are code * scale * 2^-SHIFT
//   C_HADAMARD  columns are rotated in groups of 16 rows first
//   C_SIGNS     the rotation's signs if they are known now: bit i is set if sign i is -1; else -1
//
// Compile with -fmad=false: each written operation rounds once. Blackwell (sm_100a, sm_103a) has a
// conversion to E2M1 of its own, which makes the codes that are rounded to nearest.

#include <cuda_fp16.h>
#include <cstdint>

namespace {

constexpr int kRows = 64;    // of a tile: four blocks of a column
constexpr int kWords = 64;   // 32-bit words of two columns: eight blocks of a row
constexpr int kThreads = 256;
constexpr float kFltMax = 3.4028234663852886e38f;
constexpr float kRnSixth = 0.16666667163372040f;
constexpr uint32_t kInfinity = 0x7F800000u;

__device__ float float_of(uint32_t bits) { return __uint_as_float(bits); }
__device__ uint32_t bits_of(float x) { return __float_as_uint(x); }

__device__ float min_nan(float x, float y) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

__device__ float saturate(float x) { return __saturatef(x); }

__device__ uint32_t max_halves(uint32_t x, uint32_t y) { return __vmaxu2(x, y); }

// ---- randomness: Philox4x32-10 of the counter (row, block, 0, 0) -----------------------------

__device__ uint4 philox(uint32_t k0, uint32_t k1, uint32_t row, uint32_t block) {
  uint32_t c0 = row, c1 = block, c2 = 0, c3 = 0;
#pragma unroll
  for (int i = 0; i < 10; ++i) {
    const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}

__device__ uint32_t word_of(const uint4& r, int i) {
  return i == 0 ? r.x : i == 1 ? r.y : i == 2 ? r.z : r.w;
}

// ---- rotation: v diag(signs) H / 4, summed in the order of the elements, rounded to bf16 ------

constexpr __host__ __device__ int bit_length(int x) { return x == 0 ? 0 : 1 + bit_length(x >> 1); }

__device__ float signed_quarter(const float* signs, int i) {
  if (C_SIGNS < 0) return __ldg(signs + i);
  return (C_SIGNS >> i) & 1 ? -0.25f : 0.25f;
}

// Sums of outputs whose signs agree so far are shared: 170 additions a block instead of 240.
// Returns the bits of the largest magnitude.
__device__ uint32_t rotate(float (&v)[16], const float* signs) {
  float sum[16];
  sum[0] = v[0] * signed_quarter(signs, 0);
#pragma unroll
  for (int i = 1; i < 16; ++i) {
    const float x = v[i] * signed_quarter(signs, i);
    const int before = 1 << bit_length(i - 1), now = 1 << bit_length(i);
#pragma unroll
    for (int j = 15; j >= 0; --j) {
      if (j < now) sum[j] = __popc(i & j) & 1 ? sum[j % before] - x : sum[j % before] + x;
    }
  }
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(sum[2 * i + 1]), "f"(sum[2 * i]));
    v[2 * i] = float_of(pair << 16);
    v[2 * i + 1] = float_of(pair & 0xFFFF0000u);
    top = max_halves(top, pair & 0x7FFF7FFFu);
  }
  return max(top << 16, top & 0xFFFF0000u);
}

__device__ uint32_t largest_bits(const float (&v)[16]) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) top = max(top, bits_of(v[i]) & 0x7FFFFFFFu);
  return top;
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

__device__ float e4m3_value(uint32_t byte) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(byte)));
  return __half2float(__ushort_as_half(uint16_t(halves)));
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
  // Within the range of the quick sums no code saturates beyond 6 and nothing underflows.
  if (t.amax > 1e-15f && t.amax < 1e30f && a * factor6 < 7.f && a * factor4 < 7.f &&
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
    block.byte = e4m3_byte(min_nan(float_of(bits) * (t.s_enc * kRnSixth), kFltMax));
    block.factor = block_factor(block.byte, t);
  } else {
    four_over_six(v, float_of(bits), t, block);
  }
  return block;
}

// ---- codes -------------------------------------------------------------------------------------

// Two values as halves sign | code << 9: E2M1 times 2^-14 in fp16, whose subnormal numbers have the
// steps below 1. Toward zero, so that adding the dither to the bits keeps the exact sum's floor.
__device__ uint32_t stochastic_pair(float first, float second, uint32_t dither) {
  uint32_t halves;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(second), "f"(first));
  return (halves + (dither << 1)) & 0xFE00FE00u;
}

__device__ __half2 as_half2(uint32_t bits) { return *reinterpret_cast<__half2*>(&bits); }
__device__ uint32_t as_bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }

// Sixteen rounded values as pairs in fp16: times 2^-14 (UNITS), or as they are (never with SR).
template <bool SR, bool UNITS>
__device__ void round_pairs(
    float (&v)[16], const Block& block, float top, const uint4& random, uint32_t (&pairs)[8]) {
  float factor = block.factor;
  if (!(top * factor <= (SR ? 6.f : 6.99f))) {
    // Values that saturate become some that are above 6 by what rounding takes away again.
    const float most = __fdiv_rn(6.f, factor) * 1.000001f;
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = fmaxf(fminf(v[i], most), -most);
  }
  if (SR) {
    // Times 2^-14, where that loses nothing.
    if (factor < 1e-30f) {
#pragma unroll
      for (int i = 0; i < 16; ++i) v[i] *= 6.103515625e-05f;
    } else {
      factor *= 6.103515625e-05f;
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float first = v[2 * i] * factor, second = v[2 * i + 1] * factor;
    uint32_t halves;
    if (SR) {
      const uint32_t word = word_of(random, i / 2);
      const uint32_t dither = __byte_perm(word, 0u, i % 2 ? 0x4342u : 0x4140u);
      halves = stochastic_pair(first, second, dither);
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;"
          : "=r"(halves)
          : "f"(nearest(second)), "f"(nearest(first)));
      if (UNITS) halves = as_bits(__hmul2(as_half2(halves), __float2half2_rn(6.103515625e-05f)));
    }
    pairs[i] = halves;
  }
}

// Eight codes of four pairs, the first in the lowest nibble.
__device__ uint32_t pack_codes(const uint32_t (&pairs)[8], int first) {
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // + 0 takes the sign from a zero.
    const uint32_t p = as_bits(__hadd2(as_half2(pairs[first + i]), __float2half2_rn(0.f)));
    const uint32_t codes = ((p >> 9) & 0x00070007u) | ((p >> 12) & 0x00080008u);
    packed |= ((codes | (codes >> 12)) & 0xFFu) << (8 * i);
  }
  return packed;
}

// Values times scale, without negative zeros: exact in fp16 for every E4M3 scale times 2^-SHIFT.
template <bool UNITS>
__device__ void scale_pairs(uint32_t (&pairs)[8], float scale) {
  const __half2 up = __float2half2_rn(128.f), zero = __float2half2_rn(0.f);
  const __half2 rest = __float2half2_rn(UNITS ? scale * 128.f : scale);
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
  // Seven carries into the top bit of every nibble but that of a zero, which has no sign.
  const uint32_t magnitude = packed & 0x77777777u;
  return magnitude | (packed & (magnitude + 0x77777777u) & 0x88888888u);
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
    scale_pairs<UNITS>(pairs, e4m3_value(byte) * (1.f / (1 << SHIFT)));
#pragma unroll
    for (int i = 0; i < words_of(FORM); ++i) {
      out[i] = FORM == 1 ? to_e4m3(pairs[2 * i % 8], pairs[(2 * i + 1) % 8]) : to_bf16(pairs[i]);
    }
  }
}

// Rounds a block and gives what is written of it.
template <int FORM, int SHIFT, bool SR>
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
  round_pairs<SR, kUnits>(v, block, float_of(bits), random, pairs);
  finish<FORM, SHIFT, kUnits>(pairs, block.byte, out);
}

// Blocks of this warp that are out of range, added to the tile's counts.
__device__ void count(const Block& block, bool inside, int* counts) {
  const uint32_t active = __activemask();
  const uint32_t above = __ballot_sync(active, inside && block.above);
  const uint32_t below = __ballot_sync(active, inside && block.below);
  if ((above | below) != 0 && threadIdx.x % 32 == unsigned(__ffs(int(active)) - 1)) {
    if (above) atomicAdd(counts, __popc(above));
    if (below) atomicAdd(counts + 1, __popc(below));
  }
}

template <int N>
__device__ void store(void* to, const uint32_t (&words)[N]) {
  if constexpr (N == 2) {
    *static_cast<uint2*>(to) = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      static_cast<uint4*>(to)[i / 4] =
          make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
  }
}

struct Output {
  const float* amax;
  uint8_t* main;
  uint8_t* scales;
  float* used;
  int* counts;
  const int64_t* key;  // two words in device memory; null: k0, k1
  uint32_t k0, k1;
};

struct Arguments {
  const uint4* x;
  const float* signs;
  Output row, column;
  int64_t rows, cols;
  uint32_t row0, col0;
};

__device__ uint2 key_of(const Output& p) {
  if (p.key == nullptr) return make_uint2(p.k0, p.k1);
  return make_uint2(uint32_t(__ldg(p.key)), uint32_t(__ldg(p.key + 1)));
}

// ---- the kernel ----------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads, 4) quantize_pair(const Arguments p) {
  constexpr int kRowWords = words_of(R_FORM), kColWords = words_of(C_FORM);
  constexpr int kTile = kRows * kWords;
  // A column of the tile, and words between two that spread them over the banks.
  constexpr int kColumn = (kRows / 16) * kColWords, kPitch = kColumn + (kColWords == 2 ? 2 : 4);
  constexpr int kStaged = 2 * kWords * kPitch;
  __shared__ __align__(16) uint32_t tile[kTile > kStaged ? kTile : kStaged];
  __shared__ int counts[4];
  const int64_t first_row = int64_t(blockIdx.y) * kRows, first_col = int64_t(blockIdx.x) * 128;
  if (R_POW2 || C_POW2) {
    if (threadIdx.x < 4) counts[threadIdx.x] = 0;
    __syncthreads();
  }

  const Tensor row_tensor = tensor_of<R_POW2>(*p.row.amax, R_NUMERATOR);
  const uint2 row_key = R_SR ? key_of(p.row) : make_uint2(0, 0);
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows * 8; i += kThreads) {
    const int r = i / 8, g = i % 8;
    const int64_t row = first_row + r, col = first_col + 16 * g;
    if (row >= p.rows || col >= p.cols) continue;
    const uint4* from = p.x + (row * p.cols + col) / 8;
    const uint4 low = __ldg(from), high = __ldg(from + 1);
    const uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint4* kept = reinterpret_cast<uint4*>(tile + r * kWords + 8 * g);
    kept[0] = low;
    kept[1] = high;
    uint32_t top = 0;
    float v[16];
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      top = max_halves(top, w[k] & 0x7FFF7FFFu);
      v[2 * k] = float_of(w[k] << 16);
      v[2 * k + 1] = float_of(w[k] & 0xFFFF0000u);
    }
    const uint32_t bits = max(top << 16, top & 0xFFFF0000u);
    const Block block = scale_of<R_POW2, R_CHOICE>(v, bits, row_tensor);
    uint4 random = make_uint4(0, 0, 0, 0);
    if (R_SR) {
      random = philox(
          row_key.x, row_key.y, uint32_t(row) + p.row0, uint32_t(col / 16) + p.col0 / 16);
    }
    uint32_t out[kRowWords];
    encode<R_FORM, R_SHIFT, R_SR>(v, block, bits, random, out);
    const int64_t number = row * (p.cols / 16) + col / 16;
    store(p.row.main + number * kRowWords * 4, out);
    if (R_FORM == 0) p.row.scales[number] = uint8_t(block.byte);
    if (R_POW2) count(block, true, counts);
  }
  __syncthreads();

  const Tensor column_tensor = tensor_of<C_POW2>(*p.column.amax, C_NUMERATOR);
  const uint2 column_key = C_SR ? key_of(p.column) : make_uint2(0, 0);
  const int word = threadIdx.x % kWords, part = threadIdx.x / kWords;
  const int64_t col = first_col + 2 * word, block_row = first_row / 16 + part;
  const bool inside = block_row * 16 < p.rows && col < p.cols;
  uint32_t w[16];
#pragma unroll
  for (int k = 0; k < 16; ++k) w[k] = inside ? tile[(16 * part + k) * kWords + word] : 0u;
  __syncthreads();  // the tile becomes the place where columns are put together
  const int64_t blocks = p.rows / 16;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    float v[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) v[k] = float_of(w[k] << (16 - 16 * half) & 0xFFFF0000u);
    const uint32_t bits = C_HADAMARD ? rotate(v, p.signs) : largest_bits(v);
    const Block block = scale_of<C_POW2, C_CHOICE>(v, bits, column_tensor);
    uint4 random = make_uint4(0, 0, 0, 0);
    if (C_SR) {
      random = philox(
          column_key.x, column_key.y, uint32_t(col + half) + p.col0,
          uint32_t(block_row) + p.row0 / 16);
    }
    uint32_t out[kColWords];
    encode<C_FORM, C_SHIFT, C_SR>(v, block, bits, random, out);
    if (C_POW2) count(block, inside, counts + 2);
    if (inside && C_FORM == 0) {
      p.column.scales[(col + half) * blocks + block_row] = uint8_t(block.byte);
    }
    store(tile + (2 * word + half) * kPitch + part * kColWords, out);
  }
  __syncthreads();

  // A column of the tile lies in one piece, and so it does in the result.
  constexpr int kPiece = kColWords < 4 ? 2 : 4;  // words
  constexpr int kPieces = kColumn / kPiece;
  for (int i = threadIdx.x; i < 128 * kPieces; i += kThreads) {
    const int column = i / kPieces, piece = i % kPieces;
    const int64_t at = first_row / 16 * kColWords + piece * kPiece;
    if (first_col + column >= p.cols || at >= blocks * kColWords) continue;
    const uint32_t* from = tile + column * kPitch + piece * kPiece;
    uint8_t* to = p.column.main + ((first_col + column) * blocks * kColWords + at) * 4;
    if constexpr (kPiece == 2) {
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from);
    } else {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    }
  }
  if (R_POW2 && threadIdx.x < 2 && counts[threadIdx.x]) {
    atomicAdd(p.row.counts + threadIdx.x, counts[threadIdx.x]);
  }
  if (C_POW2 && threadIdx.x < 2 && counts[2 + threadIdx.x]) {
    atomicAdd(p.column.counts + threadIdx.x, counts[2 + threadIdx.x]);
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    if (R_POW2) *p.row.used = 2688.f * power(row_tensor.shift);
    if (C_POW2) *p.column.used = 2688.f * power(column_tensor.shift);
  }
}

}  // namespace

// pointers: x, signs, then of the row and of the column operand amax, main, scales, used, counts,
// key (null where numbers hold it). numbers: rows, cols, row0, col0, and both keys. Returns the
// launch's cudaError_t.
extern "C" int nibble_quantize_pair(void* stream, void* const* pointers, const int64_t* numbers) {
  Arguments p;
  p.x = static_cast<const uint4*>(pointers[0]);
  p.signs = static_cast<const float*>(pointers[1]);
  Output* outputs[2] = {&p.row, &p.column};
  for (int i = 0; i < 2; ++i) {
    void* const* from = pointers + 2 + 6 * i;
    *outputs[i] = Output{
        static_cast<const float*>(from[0]), static_cast<uint8_t*>(from[1]),
        static_cast<uint8_t*>(from[2]), static_cast<float*>(from[3]), static_cast<int*>(from[4]),
        static_cast<const int64_t*>(from[5]), uint32_t(numbers[4 + 2 * i]), uint32_t(numbers[5 + 2 * i])};
  }
  p.rows = numbers[0];
  p.cols = numbers[1];
  p.row0 = uint32_t(numbers[2]);
  p.col0 = uint32_t(numbers[3]);
  const dim3 grid(unsigned((p.cols + 127) / 128), unsigned((p.rows + kRows - 1) / kRows));
  quantize_pair<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  return int(cudaGetLastError());
}
