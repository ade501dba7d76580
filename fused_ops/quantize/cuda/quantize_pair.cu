// SPDX-License-Identifier: Apache-2.0
//
// x [rows, cols] bf16 -> NVFP4 along its rows, and NVFP4 of its transpose, from one read.
//
// Every byte is that of fused_ops/quantize/reference.py. Blocks of threads take one tile after the
// other, and have the next copied to shared memory meanwhile. A thread holds whole blocks of 16
// values: two blocks of a row, then the same 16 rows of two columns, both from the tile's copy. Rotations are products of tensor cores where those are proved to give the sums of the
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
// and how, which changes no byte:
//
//   TILE_ROWS    of a tile, 32, 64 or 128: four threads each
//   TILE_STAGES  copies of tiles in shared memory: 1, or 2 so that the next is read early
//   TILE_BLOCKS  blocks of threads that fit a multiprocessor: bounds their registers
//   TILE_WAVES   blocks of threads launched for each that fits; 0: one for each tile
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
  const uint8_t* x;
  const float* signs;
  Output row, column;
  uint32_t rows, cols, row0, col0;
  uint32_t wide, high;            // tiles
  uint32_t step_wide, step_high;  // from a tile to the next of a block of threads
};

__device__ uint2 key_of(const Output& p) {
  if (p.key == nullptr) return make_uint2(p.k0, p.k1);
  return make_uint2(uint32_t(__ldg(p.key)), uint32_t(__ldg(p.key + 1)));
}

// ---- the kernel ----------------------------------------------------------------------------------

constexpr int kStages = TILE_STAGES, kTile = kRows * kWords, kParts = kRows / 16;
constexpr int kColumn = kParts * words_of(C_FORM);  // words of a column of the tile's result
// Words between two columns that spread them over the banks.
constexpr int kPitch = kColumn + (words_of(C_FORM) == 2 ? 2 : 4);
// Rows in bf16 pass through it too.
constexpr int kStaged = 2 * kWords * kPitch > 8 * kThreads ? 2 * kWords * kPitch : 8 * kThreads;

// A byte of each part.
template <int N> struct Bytes { using type = uint16_t; };
template <> struct Bytes<4> { using type = uint32_t; };
template <> struct Bytes<8> { using type = uint64_t; };
using Parts = Bytes<kParts>::type;

// What all tiles of a block of threads share.
struct Shared {
  uint4 matrix[32];              // of the rotation
  uint4 starts[kRows + 128];     // of the randomness of the tile's rows and columns
  RoundKeys keys[2];
  Tensor tensors[2];
  int counts[4];
  alignas(16) uint8_t scales[128 * kParts];  // of the tile's columns
};

// Starts to copy a tile, zeros where x has ended: of no bytes, the address is not looked at.
__device__ void request(
    const Arguments& p, uint32_t* tile, uint32_t first_row, uint32_t first_col) {
  constexpr int kStep = kThreads / 16;
  const int unit = threadIdx.x % 16, first = threadIdx.x / 16;
  uint32_t to = uint32_t(__cvta_generic_to_shared(tile + place(first, unit)));
  const uint8_t* from = p.x + (int64_t(first_row + first) * p.cols + first_col + 8 * unit) * 2;
  const int64_t pitch = int64_t(p.cols) * (2 * kStep);
  int left = first_col + 8 * unit < p.cols ? int(p.rows - first_row) - first : 0;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to + i * (kStep * kWords * 4)), "l"(from), "r"(left > 0 ? 16 : 0)
                 : "memory");
    from += pitch, left -= kStep;
  }
}

__device__ void close_requests() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the latest LEFT groups have arrived, for the thread that asked for them.
template <int LEFT>
__device__ void wait_for_requests() {
  asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}

__device__ void start_randomness(
    const Arguments& p, Shared& shared, uint32_t first_row, uint32_t first_col) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kRows + 128; i += kThreads) {
    if (i < kRows) {
      if (R_SR) shared.starts[i] = start_of_row(shared.keys[0], first_row + p.row0 + i);
    } else {
      const uint32_t column = first_col + p.col0 + i - kRows;
      if (C_SR) shared.starts[i] = start_of_row(shared.keys[1], column);
    }
  }
}

// The bf16 values of a warp's 32 blocks of four rows, each thread its own, into whole lines.
__device__ void store_rows(
    uint32_t* staged, const uint32_t (&out)[8], uint8_t* to, int left, uint32_t pitch) {
  const int lane = threadIdx.x % 32;
  uint32_t* warp = staged + threadIdx.x / 32 * 256;
  const int mine = (2 * lane ^ (lane >> 2 & 1)) * 4;
  __syncwarp();
  *reinterpret_cast<uint4*>(warp + mine) = make_uint4(out[0], out[1], out[2], out[3]);
  *reinterpret_cast<uint4*>(warp + (mine ^ 4)) = make_uint4(out[4], out[5], out[6], out[7]);
  __syncwarp();
  const uint32_t* from = warp + (lane ^ (lane >> 3 & 1)) * 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 unit = *reinterpret_cast<const uint4*>(from + 128 * i);
    if (left > 2 * i) *reinterpret_cast<uint4*>(to + 2 * i * int64_t(pitch)) = unit;
  }
}

// Quantizes the tile's rows, and returns the sum of `outside`.
template <int FORM>
__device__ uint32_t quantize_rows(
    const Arguments& p, const Shared& shared, const uint32_t* tile, uint32_t* staged,
    uint32_t first_row, uint32_t first_col) {
  constexpr int kWordsOut = words_of(FORM), kStep = kThreads / 8;
  const int lane = threadIdx.x % 32, g = threadIdx.x % 8;
  const int first = threadIdx.x / 8;
  const Tensor tensor = shared.tensors[0];
  const uint32_t row_blocks = p.cols / 16, block = first_col / 16 + g;
  int64_t number = int64_t(first_row + first) * row_blocks + block;
  // Rows to go; none where the block's columns are not there.
  int left = block < row_blocks ? int(p.rows - first_row) - first : 0;
  // Of the 16 bytes that store_rows has this thread write.
  const int lines = threadIdx.x / 32 * 4 + lane / 16;
  uint8_t* line = p.row.main +
      ((int64_t(first_row + lines) * p.cols + first_col) * 2 + lane % 16 * 16);
  int lines_left = first_col + lane % 16 * 8 < p.cols ? int(p.rows - first_row) - lines : 0;
  const uint32_t* low_at = tile + place(first, 2 * g);
  const uint32_t* high_at = tile + (place(first, 2 * g) ^ 4);
  const uint4* start = shared.starts + first;
  uint2 of_block = make_uint2(0, 0);
  if (R_SR) of_block = start_of_block(shared.keys[0], block + p.col0 / 16);
  uint32_t sum = 0;
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const uint4 low = *reinterpret_cast<const uint4*>(low_at);
    const uint4 high = *reinterpret_cast<const uint4*>(high_at);
    const uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float v[16];
    const uint32_t bits = unpack(w, v);
    const Block found = scale_of<R_POW2, R_CHOICE>(v, bits, tensor);
    uint4 random = make_uint4(0, 0, 0, 0);
    if (R_SR) random = philox(shared.keys[0], *start, of_block);
    uint32_t out[kWordsOut];
    encode<R_POW2, FORM, R_SHIFT, R_SR>(v, found, bits, random, out);
    if (R_POW2) sum += outside(found);  // a block of zeros is not
    if constexpr (FORM == 2) {
      store_rows(staged, out, line, lines_left, p.cols * 2);
      line += int64_t(kStep) * p.cols * 2, lines_left -= kStep;
    } else if (left > 0) {
      store(p.row.main + number * kWordsOut * 4, out);
      if (FORM == 0) p.row.scales[number] = uint8_t(found.byte);
    }
    left -= kStep, number += int64_t(kStep) * row_blocks, start += kStep;
    low_at += kStep * kWords, high_at += kStep * kWords;
  }
  return sum;
}

// Quantizes the tile's columns into `staged`, a column after the other; returns as quantize_rows.
__device__ uint32_t quantize_columns(
    const Arguments& p, Shared& shared, uint32_t* tile, uint32_t* staged, uint32_t first_row) {
  constexpr int kWordsOut = words_of(C_FORM);
  const int word = threadIdx.x % kWords, part = threadIdx.x / kWords;
  const Tensor tensor = shared.tensors[1];
  const int turned = turned_place(part, word / 32, word % 32);
  uint32_t w[16], sum = 0;
  if (C_HADAMARD) {
    turn(tile, part, word / 32, p.signs, shared.matrix);
  } else {
#pragma unroll
    for (int k = 0; k < 16; ++k) w[k] = word_at(tile, 16 * part + k, word);
  }
  uint2 of_block = make_uint2(0, 0);
  if (C_SR) of_block = start_of_block(shared.keys[1], (first_row + p.row0) / 16 + part);
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
    const Block found = scale_of<C_POW2, C_CHOICE>(v, bits, tensor);
    const int column = 2 * word + half;
    uint4 random = make_uint4(0, 0, 0, 0);
    if (C_SR) random = philox(shared.keys[1], shared.starts[kRows + column], of_block);
    uint32_t out[kWordsOut];
    encode<C_POW2, C_FORM, C_SHIFT, C_SR>(v, found, bits, random, out);
    if (C_POW2) sum += outside(found);  // a block beyond x is of zeros
    if (C_FORM == 0) shared.scales[column * kParts + part] = uint8_t(found.byte);
    store(staged + column * kPitch + part * kWordsOut, out);
  }
  return sum;
}

// A column of the tile lies in one piece, and so it does in the result.
__device__ void write_columns(
    const Arguments& p, const Shared& shared, const uint32_t* staged, uint32_t first_row,
    uint32_t first_col) {
  constexpr int kWordsOut = words_of(C_FORM);
  constexpr int kPiece = kWordsOut < 4 ? 2 : 4;  // words
  constexpr int kPieces = kColumn / kPiece, kStep = kThreads / kPieces;
  const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
  const uint32_t words = p.rows / 16 * kWordsOut;  // of a column of the result
  const uint32_t at = first_row / 16 * kWordsOut + piece * kPiece;
  const uint32_t* from = staged + first * kPitch + piece * kPiece;
  uint8_t* to = p.column.main + (int64_t(first_col + first) * words + at) * 4;
  const int left = at < words ? int(p.cols - first_col) : 0;
#pragma unroll
  for (int column = 0; column < 128; column += kStep) {
    if (column + first < left) {
      if constexpr (kPiece == 2) {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(from + column * kPitch);
      } else {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + column * kPitch);
      }
    }
    to += int64_t(words) * (4 * kStep);
  }
  if (C_FORM == 0) {
    // The scales of a column in one piece where they are aligned.
    const uint32_t blocks = p.rows / 16, parts = min(blocks - first_row / 16, uint32_t(kParts));
    for (uint32_t i = threadIdx.x; i < min(128u, p.cols - first_col); i += kThreads) {
      uint8_t* scales = p.column.scales + (int64_t(first_col + i) * blocks + first_row / 16);
      if (blocks % kParts == 0) {
        *reinterpret_cast<Parts*>(scales) =
            *reinterpret_cast<const Parts*>(shared.scales + kParts * i);
      } else {
        for (uint32_t k = 0; k < parts; ++k) scales[k] = shared.scales[i * kParts + k];
      }
    }
  }
}

// What is shared by all tiles, by threads of the first warps.
__device__ void prepare(const Arguments& p, Shared& shared) {
  const uint32_t i = threadIdx.x;
  if (i < 4) shared.counts[i] = 0;
  if (R_SR) make_round_keys(key_of(p.row), shared.keys[0]);
  if (C_SR) make_round_keys(key_of(p.column), shared.keys[1]);
  if (C_HADAMARD && i < 32) shared.matrix[i] = rotation_words(p.signs);
  if (i == 32) shared.tensors[0] = tensor_of<R_POW2>(*p.row.amax, R_NUMERATOR);
  if (i == 64) shared.tensors[1] = tensor_of<C_POW2>(*p.column.amax, C_NUMERATOR);
}

// Adds the blocks that were outside to the tensors' counters, and tells their scales.
__device__ void hand_in(const Arguments& p, const Shared& shared) {
  const uint32_t i = threadIdx.x;
  if (R_POW2 && i < 2 && shared.counts[i]) atomicAdd(p.row.counts + i, shared.counts[i]);
  if (C_POW2 && i < 2 && shared.counts[2 + i]) {
    atomicAdd(p.column.counts + i, shared.counts[2 + i]);
  }
  if (blockIdx.x == 0 && i == 0) {
    if (R_POW2) *p.row.used = 2688.f * power(shared.tensors[0].shift);
    if (C_POW2) *p.column.used = 2688.f * power(shared.tensors[1].shift);
  }
}

__global__ void __launch_bounds__(kThreads, TILE_BLOCKS) quantize_pair(const Arguments p) {
  extern __shared__ __align__(16) uint32_t memory[];
  __shared__ __align__(16) Shared shared;
  uint32_t* const staged = memory + kStages * kTile;
  uint32_t wide = blockIdx.x % p.wide, high = blockIdx.x / p.wide;
  int stage = 0;
  request(p, memory, high * kRows, wide * 128);
  close_requests();
  prepare(p, shared);
  __syncthreads();
  while (high < p.high) {
    const uint32_t first_row = high * kRows, first_col = wide * 128;
    uint32_t* const tile = memory + stage * kTile;
    wide += p.step_wide, high += p.step_high;
    if (wide >= p.wide) wide -= p.wide, ++high;
    if (kStages == 2) {
      stage ^= 1;
      if (high < p.high) request(p, memory + stage * kTile, high * kRows, wide * 128);
      close_requests();
    }
    if (R_SR || C_SR) start_randomness(p, shared, first_row, first_col);
    wait_for_requests<kStages - 1>();
    __syncthreads();
    const uint32_t of_rows = quantize_rows<R_FORM>(p, shared, tile, staged, first_row, first_col);
    if (R_POW2) count(of_rows, shared.counts);
    __syncthreads();
    const uint32_t of_columns = quantize_columns(p, shared, tile, staged, first_row);
    if (C_POW2) count(of_columns, shared.counts + 2);
    __syncthreads();
    if (kStages == 1) {
      if (high < p.high) request(p, memory, high * kRows, wide * 128);
      close_requests();
    }
    write_columns(p, shared, staged, first_row, first_col);
  }
  hand_in(p, shared);
}

}  // namespace

// pointers: x, signs, then of the row and of the column operand amax, main, scales, used, counts,
// key (null where numbers hold it). numbers: rows, cols, row0, col0, and both keys. Returns the
// launch's cudaError_t.
extern "C" int nibble_quantize_pair(void* stream, void* const* pointers, const int64_t* numbers) {
  Arguments p;
  p.x = static_cast<const uint8_t*>(pointers[0]);
  p.signs = static_cast<const float*>(pointers[1]);
  Output* outputs[2] = {&p.row, &p.column};
  for (int i = 0; i < 2; ++i) {
    void* const* from = pointers + 2 + 6 * i;
    *outputs[i] = Output{
        static_cast<const float*>(from[0]), static_cast<uint8_t*>(from[1]),
        static_cast<uint8_t*>(from[2]), static_cast<float*>(from[3]), static_cast<int*>(from[4]),
        static_cast<const int64_t*>(from[5]), uint32_t(numbers[4 + 2 * i]), uint32_t(numbers[5 + 2 * i])};
  }
  p.rows = uint32_t(numbers[0]);
  p.cols = uint32_t(numbers[1]);
  p.row0 = uint32_t(numbers[2]);
  p.col0 = uint32_t(numbers[3]);
  p.wide = (p.cols + 127) / 128;
  p.high = (p.rows + kRows - 1) / kRows;
  int device = 0, processors = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  constexpr int kBytes = (kStages * kTile + kStaged) * 4;
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(
        quantize_pair, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  }
  if (status != cudaSuccess) return int(status);
  const int64_t tiles = int64_t(p.wide) * p.high;
  const int64_t most = int64_t(processors) * TILE_BLOCKS * TILE_WAVES;
  const uint32_t blocks = uint32_t(TILE_WAVES == 0 || tiles < most ? tiles : most);
  p.step_wide = blocks % p.wide;
  p.step_high = blocks / p.wide;
  quantize_pair<<<blocks, kThreads, kBytes, static_cast<cudaStream_t>(stream)>>>(p);
  return int(cudaGetLastError());
}
