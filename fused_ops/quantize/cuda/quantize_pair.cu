// SPDX-License-Identifier: Apache-2.0
//
// x [rows, cols] bf16 -> NVFP4 along its rows, and NVFP4 of its transpose, from one read.
//
// Every byte is that of fused_ops/quantize/reference.py. A thread holds whole blocks of 16 values:
// two blocks of a row, then the same 16 rows of two columns, which the tile's copy in shared memory
// gives it. Rotations are products of tensor cores where those are proved to give the sums of the
// reference's order. What is wanted is chosen by macros, R_* for the rows and C_* for the columns:
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
constexpr uint32_t kWarp = 0xFFFFFFFFu;
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

// Magnitudes of two bf16 numbers: not by a mask, whose unit is the busiest here.
__device__ uint32_t magnitudes_of(uint32_t pair) {
  uint32_t r;
  asm("abs.bf16x2 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

__device__ uint32_t max_halves(uint32_t x, uint32_t y) { return __vmaxu2(x, y); }

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

__device__ uint4 philox(const RoundKeys& keys, uint32_t row, uint32_t block) {
  uint4 c = make_uint4(row, block, 0, 0);
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const uint4 k = keys.pairs[i];
    philox_round(c, k.x, k.y);
    philox_round(c, k.z, k.w);
  }
  return c;
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

__device__ uint32_t to_bf16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Sums of outputs whose signs agree so far are shared: 170 additions a block instead of 240.
__device__ void rotate(const float (&v)[16], const float* signs, uint32_t (&pairs)[8]) {
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
#pragma unroll
  for (int i = 0; i < 8; ++i) pairs[i] = to_bf16x2(sum[2 * i], sum[2 * i + 1]);
}

// Words of bf16 pairs as 16 values; returns the bits of the largest magnitude.
__device__ uint32_t unpack(const uint32_t (&pairs)[8], float (&v)[16]) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[2 * i] = float_of(pairs[i] << 16);
    v[2 * i + 1] = float_of(pairs[i] & 0xFFFF0000u);
    top = max_halves(top, magnitudes_of(pairs[i]));
  }
  return max(top << 16, top & 0xFFFF0000u);
}

__device__ uint32_t largest_bits(const float (&v)[16]) {
  uint32_t top = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) top = max(top, bits_of(v[i]) & 0x7FFFFFFFu);
  return top;
}

// ---- rotation by tensor cores -------------------------------------------------------------------
//
// A product of tensor cores is a sum in an unknown order, in at least single precision. Rounded to
// bf16 it is the reference's in two cases that are looked for; a warp that has a block of neither
// sums in order. Let L be the sum of a block's magnitudes.
//
//   1. Every nonzero |x| >= T with T >= 2^-16 L. x has 8 significant bits, so all products x / 4
//      are multiples of q > 2^-8 T / 4, and no partial sum exceeds L / 4 < 2^24 q: all are exact.
//   2. Both s - E and s + E round to the same bf16 number, where s is the tensor cores' sum. It is
//      off by at most 16 roundings of 2^-23, the reference's by 15 of 2^-24, each relative to no
//      more than L / 4, and s +- E by 2^-24: together less than E = 2^-20 L.
//
// Sizes at which a tensor core might flush or overflow are left to the sum in order.

// Four 8 x 8 matrices of shared memory, transposed; each thread names a row of 16 bytes.
__device__ void load_transposed(uint32_t (&a)[4], const uint32_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(uint32_t(__cvta_generic_to_shared(row)))
               : "memory");
}

// [16, 16] times [16, 8].
__device__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f));
}

__device__ uint32_t is_negative(const float* signs, int i) {
  return C_SIGNS < 0 ? bits_of(__ldg(signs + i)) >> 31 : uint32_t(C_SIGNS) >> i & 1u;
}

// This thread's part of diag(signs) H / 4 as the right factor of two products, two words each.
// Their columns are such outputs that a thread gets four neighbours: 4 q, 4 q + 1 from the first,
// 4 q + 2, 4 q + 3 from the second product, q its number in a group of four threads.
__device__ void rotation_words(uint32_t (&b)[4], const float* signs) {
  const int lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
  const uint32_t both = 0x80008000u;
  uint32_t entry = 0x3E803E80u ^ (g & 1 ? 0x80000000u : 0u) ^ (q >> 1 & g >> 1 & 1 ? both : 0u);
  b[0] = entry ^ is_negative(signs, 2 * q) << 15 ^ is_negative(signs, 2 * q + 1) << 31;
  entry ^= g & 4 ? both : 0u;
  b[1] = entry ^ is_negative(signs, 2 * q + 8) << 15 ^ is_negative(signs, 2 * q + 9) << 31;
  b[2] = b[0] ^ (q & 1 ? both : 0u);
  b[3] = b[1] ^ (q & 1 ? both : 0u);
}

// What proves the sums of a thread's two columns, c = lane / 4 and c + 8 of a tile of 16.
struct Proof {
  uint32_t doubt;     // zero where the first case is given
  float most;         // 2^-16 L of the larger column
  float e0, e1;       // E of both
};

// The first case, looked for by a thread in its eight elements; all threads of a warp call it.
__device__ Proof prove(const uint32_t (&a)[4]) {
  uint32_t magnitudes[4], least = 0xFFFFFFFFu;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    magnitudes[i] = magnitudes_of(a[i]);
    // Less one, so that a zero is the largest.
    least = __viaddmin_u16x2(magnitudes[i], 0xFFFFFFFFu, least);
  }
  // L times 2^12 (1 + 2^-5), more than all that rounding takes, to bf16 at last. Inf from 2^116 on,
  // which is above all magnitudes; from below, 2^-103 is.
  float sums[4];
  multiply(sums, magnitudes, 0x45844584u, 0x45844584u);
  Proof proof;
  proof.most = fmaxf(fmaxf(sums[0], sums[2]) * 3.7252903e-09f, 9.8607613e-32f);
  const uint32_t bound = __byte_perm(bits_of(proof.most), 0u, 0x3232u);
  proof.doubt = __vminu2(least, bound) ^ bound;
  proof.e0 = fmaxf(sums[0] * 2.3283064e-10f, 9.8607613e-32f);
  proof.e1 = fmaxf(sums[2] * 2.3283064e-10f, 9.8607613e-32f);
  return proof;
}

__device__ uint32_t differing(float first, float second, float e) {
  return to_bf16x2(first - e, second - e) ^ to_bf16x2(first + e, second + e);
}

// Lanes of a warp whose sums neither case proves. A column's elements, and its sums, lie in four.
__device__ uint32_t unproved(const Proof& proof, const float (&d0)[4], const float (&d1)[4]) {
  uint32_t doubt = proof.doubt;
  doubt |= __shfl_xor_sync(kWarp, doubt, 1);
  doubt |= __shfl_xor_sync(kWarp, doubt, 2);
  const uint32_t apart =
      differing(d0[0], d0[1], proof.e0) | differing(d1[0], d1[1], proof.e0) |
      differing(d0[2], d0[3], proof.e1) | differing(d1[2], d1[3], proof.e1);
  return __ballot_sync(kWarp, doubt != 0u && (apart != 0u || !(proof.most < kFltMax)));
}

// The tile in shared memory: 16 bytes number `unit` of a row, spread over the banks.
__device__ int place(int row, int unit) { return row * kWords + ((unit ^ (row & 7)) << 2); }

// A word of two columns of the tile: of the row and the pair of columns.
__device__ uint32_t word_at(const uint32_t* tile, int row, int word) {
  return tile[place(row, word / 4) + word % 4];
}

// Where the rotated columns 2 n and 2 n + 1 of a warp's 64 lie: in the place of their rows. The
// 16 bytes number i (0 and 1 of the first, 2 and 3 of the second) are at this index ^ 4 i.
__device__ int turned_place(int part, int side, int n) {
  return place(16 * part + n / 2, 8 * side + n % 2 * 4);
}

// Rotates 16 rows of 64 columns of the tile, which are this warp's, by sums in order.
__device__ void turn_in_order(uint32_t* tile, int part, int side, const float* signs) {
  const int lane = threadIdx.x % 32;
  uint32_t w[16];
#pragma unroll
  for (int k = 0; k < 16; ++k) w[k] = word_at(tile, 16 * part + k, 32 * side + lane);
  __syncwarp();
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    float v[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) v[k] = float_of(w[k] << (16 - 16 * half) & 0xFFFF0000u);
    uint32_t pairs[8];
    rotate(v, signs, pairs);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<uint4*>(tile + (turned_place(part, side, lane) ^ (8 * half + 4 * i))) =
          make_uint4(pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]);
    }
  }
}

// Sums in order of the columns c and c + 8 of 64, an output a thread; four lanes g (c % 8) take
// them as `turn` keeps them.
__device__ void sum_in_order(
    const uint32_t* tile, int part, int side, int c, const float* signs, uint32_t (&turned)[4]) {
  const int lane = threadIdx.x % 32, output = lane % 16, q = lane % 4;
  // Bit k: the sign of element k.
  uint32_t negative = __ballot_sync(kWarp, is_negative(signs, output) != 0u);
  negative ^= (output & 1 ? 0xAAAAu : 0u) ^ (output & 2 ? 0xCCCCu : 0u) ^
      (output & 4 ? 0xF0F0u : 0u) ^ (output & 8 ? 0xFF00u : 0u);
  const int word = 32 * side + c / 2 + lane / 16 * 4;
  float sum = 0.f;
#pragma unroll 4
  for (int k = 0; k < 16; ++k) {
    const uint32_t w = word_at(tile, 16 * part + k, word);
    const float x = float_of(w << (c & 1 ? 0 : 16) & 0xFFFF0000u) * 0.25f;
    const float term = negative >> k & 1u ? -x : x;
    sum = k == 0 ? term : sum + term;
  }
  const uint32_t pair = to_bf16x2(sum, __shfl_down_sync(kWarp, sum, 1));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t found = __shfl_sync(kWarp, pair, i / 2 * 16 + 4 * q + i % 2 * 2);
    if (lane / 4 == c % 8) turned[i] = found;
  }
}

// As turn_in_order, by tensor cores where that is proved to be the same.
__device__ void turn(uint32_t* tile, int part, int side, const float* signs) {
  const int lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
  uint32_t b[4], turned[4][4];
  rotation_words(b, signs);
  const int rows = place(16 * part + lane % 8 + lane / 16 * 8, 8 * side + lane / 8 % 2);
  int left = 4;  // columns pay to be summed one by one
#pragma unroll
  for (int t = 0; t < 4; ++t) {  // of 16 columns
    uint32_t a[4];
    load_transposed(a, tile + (rows ^ (8 * t)));
    float d0[4], d1[4];
    multiply(d0, a, b[0], b[1]);
    multiply(d1, a, b[2], b[3]);
    const Proof proof = prove(a);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      turned[t][2 * i] = to_bf16x2(d0[2 * i], d0[2 * i + 1]);
      turned[t][2 * i + 1] = to_bf16x2(d1[2 * i], d1[2 * i + 1]);
    }
    if (__any_sync(kWarp, proof.doubt != 0u)) {
      uint32_t open = unproved(proof, d0, d1);
      while (open != 0u && left > 0) {
        const int four = (__ffs(int(open)) - 1) / 4;
        sum_in_order(tile, part, side, 16 * t + four, signs, turned[t]);
        open &= ~(0xFu << (4 * four));
        --left;
      }
      if (open != 0u) left = -1;
    }
  }
  if (left < 0) {
    turn_in_order(tile, part, side, signs);
  } else {
    __syncwarp();
    // Of column 8 i + g four outputs from 4 q on.
    const int first = turned_place(part, side, g / 2) ^ (g % 2 * 8 + q / 2 * 4 + q % 2 * 2);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      *reinterpret_cast<uint2*>(tile + ((first ^ (8 * (i % 4))) + 2 * i * kWords)) =
          make_uint2(turned[i / 2][i % 2 * 2], turned[i / 2][i % 2 * 2 + 1]);
    }
  }
  __syncwarp();
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

// Two values as halves sign | code << 9 | rest: E2M1 times 2^-14 in fp16, whose subnormal numbers
// have the steps below 1. Toward zero, so that adding the dither to the bits keeps the exact sum's
// floor; what is below the code is not needed any more.
__device__ uint32_t stochastic_pair(float first, float second, uint32_t dither) {
  uint32_t halves;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(second), "f"(first));
  return halves + (dither << 1);
}

__device__ __half2 as_half2(uint32_t bits) { return *reinterpret_cast<__half2*>(&bits); }
__device__ uint32_t as_bits(__half2 x) { return *reinterpret_cast<uint32_t*>(&x); }

// The two elements of pair i. Codes are put together from every second element: see pack_codes.
template <bool CODES>
constexpr __device__ int element_of(int i, int which) {
  return CODES ? 4 * (i / 2) + i % 2 + 2 * which : 2 * i + which;
}

// Sixteen rounded values as pairs in fp16: times 2^-14 (UNITS), or as they are (never with SR).
// Below the code, CODES leaves bits of the dither's sum.
template <bool SR, bool UNITS, bool CODES>
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
    const float first = v[element_of<CODES>(i, 0)] * factor;
    const float second = v[element_of<CODES>(i, 1)] * factor;
    uint32_t halves;
    if (SR) {
      const uint32_t word = word_of(random, i / 2);
      const uint32_t bytes = CODES ? (i % 2 ? 0x4341u : 0x4240u) : (i % 2 ? 0x4342u : 0x4140u);
      halves = stochastic_pair(first, second, __byte_perm(word, 0u, bytes));
      if (!CODES) halves &= 0xFE00FE00u;
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;"
          : "=r"(halves)
          : "f"(nearest(second)), "f"(nearest(first)));
      if (UNITS) halves = as_bits(__hmul2(as_half2(halves), __float2half2_rn(6.103515625e-05f)));
    }
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
  round_pairs<SR, kUnits, FORM == 0>(v, block, float_of(bits), random, pairs);
  finish<FORM, SHIFT, kUnits>(pairs, block.byte, out);
}

// Whether a block is above (1) or below (65536) the range of its scales.
__device__ uint32_t outside(const Block& block) {
  return (block.above ? 1u : 0u) + (block.below ? 65536u : 0u);
}

// Sums of `outside`, added to the tile's counts.
__device__ void count(uint32_t sum, int* counts) {
  sum = __reduce_add_sync(kWarp, sum);
  if (sum != 0 && threadIdx.x % 32 == 0) {
    atomicAdd(counts, int(sum & 0xFFFFu));
    atomicAdd(counts + 1, int(sum >> 16));
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

// Quantizes the tile's rows, keeps x in shared memory, and returns the sum of `outside`.
__device__ uint32_t quantize_rows(
    const Arguments& p, const Tensor& tensor, const RoundKeys& keys, uint32_t* tile,
    int64_t first_row, int64_t first_col) {
  constexpr int kWordsOut = words_of(R_FORM), kStep = kThreads / 8;
  const int g = threadIdx.x % 8;
  const int64_t row_blocks = p.cols / 16;
  int64_t number = (first_row + threadIdx.x / 8) * row_blocks + first_col / 16 + g;
  // Rows to go; none where the block's columns are not there.
  int left = first_col + 16 * g < p.cols ? int(min(p.rows - first_row, int64_t(kRows))) : 0;
  left -= threadIdx.x / 8;
  uint32_t* kept = tile + place(threadIdx.x / 8, 2 * g);
  const int other = place(threadIdx.x / 8, 2 * g + 1) - place(threadIdx.x / 8, 2 * g);
  uint32_t row = uint32_t(first_row) + threadIdx.x / 8 + p.row0, sum = 0;
  const uint32_t group = uint32_t(first_col / 16) + g + p.col0 / 16;
#pragma unroll 1
  for (int i = 0; i < kRows / kStep; ++i) {
    const bool inside = left > 0;
    uint4 low = make_uint4(0, 0, 0, 0), high = low;
    if (inside) {
      low = __ldg(p.x + 2 * number);
      high = __ldg(p.x + 2 * number + 1);
    }
    *reinterpret_cast<uint4*>(kept) = low;
    *reinterpret_cast<uint4*>(kept + other) = high;
    const uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float v[16];
    const uint32_t bits = unpack(w, v);
    const Block block = scale_of<R_POW2, R_CHOICE>(v, bits, tensor);
    uint4 random = make_uint4(0, 0, 0, 0);
    if (R_SR) random = philox(keys, row, group);
    uint32_t out[kWordsOut];
    encode<R_FORM, R_SHIFT, R_SR>(v, block, bits, random, out);
    if (R_POW2) sum += outside(block);  // a block of zeros is not
    if (inside) {
      store(p.row.main + number * kWordsOut * 4, out);
      if (R_FORM == 0) p.row.scales[number] = uint8_t(block.byte);
    }
    left -= kStep, row += kStep, number += kStep * row_blocks, kept += kStep * kWords;
  }
  return sum;
}

// Quantizes the tile's columns into `staged`, a column after the other; returns as quantize_rows.
template <int PITCH>
__device__ uint32_t quantize_columns(
    const Arguments& p, const Tensor& tensor, const RoundKeys& keys, uint32_t* tile,
    uint32_t* staged, int64_t first_row, int64_t first_col) {
  constexpr int kWordsOut = words_of(C_FORM);
  const int word = threadIdx.x % kWords, part = threadIdx.x / kWords;
  const int64_t col = first_col + 2 * word, block_row = first_row / 16 + part;
  const bool inside = block_row * 16 < p.rows && col < p.cols;
  const int turned = turned_place(part, word / 32, word % 32);
  uint32_t w[16], sum = 0;
  if (C_HADAMARD) {
    turn(tile, part, word / 32, p.signs);
  } else {
#pragma unroll
    for (int k = 0; k < 16; ++k) w[k] = word_at(tile, 16 * part + k, word);
  }
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    float v[16];
    uint32_t bits;
    if (C_HADAMARD) {
      uint32_t pairs[8];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 four = *reinterpret_cast<const uint4*>(tile + (turned ^ (8 * half + 4 * i)));
        pairs[4 * i] = four.x, pairs[4 * i + 1] = four.y;
        pairs[4 * i + 2] = four.z, pairs[4 * i + 3] = four.w;
      }
      bits = unpack(pairs, v);
    } else {
#pragma unroll
      for (int k = 0; k < 16; ++k) v[k] = float_of(w[k] << (16 - 16 * half) & 0xFFFF0000u);
      bits = largest_bits(v);
    }
    const Block block = scale_of<C_POW2, C_CHOICE>(v, bits, tensor);
    uint4 random = make_uint4(0, 0, 0, 0);
    if (C_SR) {
      random =
          philox(keys, uint32_t(col + half) + p.col0, uint32_t(block_row) + p.row0 / 16);
    }
    uint32_t out[kWordsOut];
    encode<C_FORM, C_SHIFT, C_SR>(v, block, bits, random, out);
    if (C_POW2 && inside) sum += outside(block);
    if (inside && C_FORM == 0) {
      p.column.scales[(col + half) * (p.rows / 16) + block_row] = uint8_t(block.byte);
    }
    store(staged + (2 * word + half) * PITCH + part * kWordsOut, out);
  }
  return sum;
}

// A column of the tile lies in one piece, and so it does in the result.
template <int PITCH>
__device__ void write_columns(
    const Arguments& p, const uint32_t* staged, int64_t first_row, int64_t first_col) {
  constexpr int kWordsOut = words_of(C_FORM), kColumn = kRows / 16 * kWordsOut;
  constexpr int kPiece = kWordsOut < 4 ? 2 : 4;  // words
  constexpr int kPieces = kColumn / kPiece, kStep = kThreads / kPieces;
  const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
  const int64_t words = p.rows / 16 * kWordsOut;  // of a column of the result
  const int64_t at = first_row / 16 * kWordsOut + piece * kPiece;
  if (at >= words) return;
  const uint32_t* from = staged + first * PITCH + piece * kPiece;
  uint8_t* to = p.column.main + ((first_col + first) * words + at) * 4;
  const int64_t left = p.cols - first_col;
#pragma unroll
  for (int column = 0; column < 128; column += kStep) {
    if (column + first < left) {
      if constexpr (kPiece == 2) {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from + column * PITCH);
      } else {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + column * PITCH);
      }
    }
    to += kStep * words * 4;
  }
}

__global__ void __launch_bounds__(kThreads, 4) quantize_pair(const Arguments p) {
  constexpr int kColumn = kRows / 16 * words_of(C_FORM);
  // Words between two columns that spread them over the banks.
  constexpr int kPitch = kColumn + (words_of(C_FORM) == 2 ? 2 : 4);
  __shared__ __align__(16) uint32_t tile[kRows * kWords];
  __shared__ __align__(16) uint32_t staged[2 * kWords * kPitch];
  __shared__ RoundKeys keys[2];
  __shared__ int counts[4];
  const int64_t first_row = int64_t(blockIdx.y) * kRows, first_col = int64_t(blockIdx.x) * 128;
  if (threadIdx.x < 4) counts[threadIdx.x] = 0;
  if (R_SR) make_round_keys(key_of(p.row), keys[0]);
  if (C_SR) make_round_keys(key_of(p.column), keys[1]);
  __syncthreads();
  const Tensor row_tensor = tensor_of<R_POW2>(*p.row.amax, R_NUMERATOR);
  const uint32_t of_rows = quantize_rows(p, row_tensor, keys[0], tile, first_row, first_col);
  if (R_POW2) count(of_rows, counts);
  __syncthreads();
  const Tensor column_tensor = tensor_of<C_POW2>(*p.column.amax, C_NUMERATOR);
  const uint32_t of_columns =
      quantize_columns<kPitch>(p, column_tensor, keys[1], tile, staged, first_row, first_col);
  if (C_POW2) count(of_columns, counts + 2);
  __syncthreads();
  write_columns<kPitch>(p, staged, first_row, first_col);
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
