// SPDX-License-Identifier: Apache-2.0
//
// Rotation of the columns of a tile in shared memory; macros as in quantize_pair.cu.

#pragma once

#include <cstdint>

namespace {

constexpr int kRows = TILE_ROWS;  // of a tile: as many blocks of a column as 16 go into it
constexpr int kWords = 64;        // 32-bit words of two columns: eight blocks of a row
constexpr int kThreads = kRows / 16 * kWords;
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
__device__ uint4 rotation_words(const float* signs) {
  uint32_t b[4];
  const int lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
  const uint32_t both = 0x80008000u;
  uint32_t entry = 0x3E803E80u ^ (g & 1 ? 0x80000000u : 0u) ^ (q >> 1 & g >> 1 & 1 ? both : 0u);
  b[0] = entry ^ is_negative(signs, 2 * q) << 15 ^ is_negative(signs, 2 * q + 1) << 31;
  entry ^= g & 4 ? both : 0u;
  b[1] = entry ^ is_negative(signs, 2 * q + 8) << 15 ^ is_negative(signs, 2 * q + 9) << 31;
  b[2] = b[0] ^ (q & 1 ? both : 0u);
  b[3] = b[1] ^ (q & 1 ? both : 0u);
  return make_uint4(b[0], b[1], b[2], b[3]);
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

// The tile in shared memory: 16 bytes number `unit` of a row, spread over the banks for reads of
// eight blocks of a row and for those of eight rows.
__device__ int place(int row, int unit) {
  return row * kWords + ((unit ^ (row & 7) ^ (unit >> 3)) << 2);
}

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

// As turn_in_order, by tensor cores where that is proved to be the same. matrix: of each lane, by
// rotation_words.
__device__ void turn(
    uint32_t* tile, int part, int side, const float* signs, const uint4* matrix) {
  const int lane = threadIdx.x % 32, q = lane % 4, g = lane / 4;
  uint32_t turned[4][4];
  const uint4 kept = matrix[lane];
  const uint32_t b[4] = {kept.x, kept.y, kept.z, kept.w};
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

}  // namespace
