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

#include "encode.cuh"

namespace {

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
