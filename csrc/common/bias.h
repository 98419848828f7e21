// Adds a tensor bias to the scores a thread holds: logits = scale * s + bias, any broadcast, any strides, any
// alignment.
//
// Two paths, chosen on the host (bias_copy_width):
//   through shared memory   a tile of 64 keys a row is copied by cp.async beside the key tile, in whole 16-byte (or
//                           4-byte) pieces, and read in the accumulators' order, transposed where keys own the rows;
//                           the backward kernels copy what does not lie so element by element
//   direct                  each thread loads what it needs when the scores are there; a pair of adjacent columns is
//                           one load where the host found that every pair is aligned
// Rows and columns outside [0, M) x [0, N) are never read from global memory: direct rows are clamped to M - 1 (their
// result is not stored), all others are left for the mask.
#pragma once

#include "common/offset.h"
#include "common/ptx.h"
#include "common/sequences.h"
#include "common/softmax.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace memeff {

struct BiasTile {
  const char* data;  // the head's bias from a tile's first row on
  int64_t stride_m, stride_n;
  DType dtype;
  bool pairs;  // stride_n == 1 and elements (row, 2i) are aligned to two elements
};

// The address of an element.
CUTLASS_DEVICE const char* bias_at(BiasView const& bias, int64_t batch, int group, int member, int64_t query,
                                   int64_t key) {
  const int64_t at =
      head_offset(bias, batch, group, member) + offset(query, bias.stride_m) + offset(key, bias.stride_n);
  return static_cast<const char*>(bias.data) + at * bytes_of(bias.dtype);
}

// Does the bias cover all packed sequences at once, so that one of them may start at any element of it?
inline bool is_packed_bias(Sequences const& s) { return is_packed(s) && !s.own_bias; }

// True when the elements (row, even column) of every row of the bias are aligned to two elements.
inline bool bias_in_pairs(BiasView const& bias, Sequences const& sequences) {
  if (is_packed_bias(sequences)) return false;
  const int64_t odd = (bias.stride_b | bias.stride_g | bias.stride_h | bias.stride_m) & 1;
  return bias.stride_n == 1 && odd == 0 && reinterpret_cast<uintptr_t>(bias.data) % (2 * bytes_of(bias.dtype)) == 0;
}

// A bool is read as a byte: CUTLASS packs arrays of bool by the bit.
using BoolByte = uint8_t;

template <typename T>
CUTLASS_DEVICE float bias_value(T x) {
  if constexpr (std::is_same<T, BoolByte>::value) {
    return x != 0 ? 0.f : negative_infinity();
  } else {
    return float(x);
  }
}

// --- direct ---

// Coord: AccCoord. row0, column0: this warp's first row and key; lane's elements follow Coord.
template <typename T, typename Coord, typename Fragment>
CUTLASS_DEVICE void add_bias_of(Fragment& s, BiasTile const& bias, float scale, int row0, int column0, int lane,
                                int rows, int keys) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coord::kRows; ++i) {
    const int row = row0 + Coord::row(lane, i);
    T const* line = reinterpret_cast<T const*>(bias.data) + offset(row < rows ? row : rows - 1, bias.stride_m);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coord::kColumns; j += 2) {
      const int column = column0 + Coord::column(lane, j);
      float& low = s[Coord::index(i, j)];
      float& high = s[Coord::index(i, j + 1)];
      if (bias.pairs && column + 1 < keys) {
        const auto two = *reinterpret_cast<cutlass::AlignedArray<T, 2> const*>(line + column);
        low = low * scale + bias_value<T>(two[0]);
        high = high * scale + bias_value<T>(two[1]);
      } else {
        low = low * scale + (column < keys ? bias_value<T>(line[offset(column, bias.stride_n)]) : 0.f);
        high = high * scale + (column + 1 < keys ? bias_value<T>(line[offset(column + 1, bias.stride_n)]) : 0.f);
      }
    }
  }
}

// T: the query's element type.
template <typename T, typename Coord, typename Fragment>
CUTLASS_DEVICE void add_bias(Fragment& s, BiasTile const& bias, float scale, int row0, int column0, int lane, int rows,
                             int keys) {
  if (bias.dtype == DType::kBool) {
    add_bias_of<BoolByte, Coord>(s, bias, scale, row0, column0, lane, rows, keys);
  } else if (bias.dtype == DType::kF32 && !std::is_same<T, float>::value) {
    add_bias_of<float, Coord>(s, bias, scale, row0, column0, lane, rows, keys);
  } else {
    add_bias_of<T, Coord>(s, bias, scale, row0, column0, lane, rows, keys);
  }
}

// --- through shared memory ---

constexpr int kBiasKeys = 64;  // keys in a tile
// Bytes from one query to the next: 64 elements and a gap that keeps the reads of a warp, straight and transposed, free
// of bank conflicts.
constexpr int bias_row_bytes(int element_bytes) { return element_bytes * kBiasKeys + 16; }

template <int kQueries, int kRowBytes>
struct BiasStage {
  alignas(16) char bias[kQueries * kRowBytes];
};

// The width of the copies, 16 or 4 bytes; 0: the bias cannot be copied in pieces (or is wider than `element_bytes`).
inline int bias_copy_width(BiasView const& bias, int element_bytes) {
  if (bias.data == nullptr || bias.stride_n != 1 || bytes_of(bias.dtype) > element_bytes) return 0;
  const int64_t strides = bias.stride_b | bias.stride_g | bias.stride_h | bias.stride_m;
  const uint64_t odd = uint64_t(strides) * uint64_t(bytes_of(bias.dtype)) | reinterpret_cast<uintptr_t>(bias.data);
  return odd % 16 == 0 ? 16 : odd % 4 == 0 ? 4 : 0;
}

template <int kWidth, int kThreads, int kRowBytes>
CUTLASS_DEVICE void copy_bias_of(char* to, const char* from, int64_t row_bytes, int queries, int bytes, int tile_bytes,
                                 int thread) {
  const int pieces = tile_bytes / kWidth;  // of a row; a power of two
  for (int i = thread; i < queries * pieces; i += kThreads) {
    const int row = i / pieces, at = i % pieces * kWidth, left = bytes - at;
    // No byte beyond the row's end is read; an address that is, is not used.
    ptx::copy_async<kWidth>(to + row * kRowBytes + at, from + offset(row, row_bytes) + (left > 0 ? at : 0),
                            left < 0        ? 0
                            : left < kWidth ? left
                                            : kWidth);
  }
}

// One element at a time, any strides.
template <typename T, int kThreads, int kRowBytes>
CUTLASS_DEVICE void gather_bias(char* to, BiasView const& bias, const char* from, int queries, int keys, int thread) {
#pragma unroll 1  // seldom run: no registers for it
  for (int i = thread; i < queries * kBiasKeys; i += kThreads) {
    const int row = i / kBiasKeys, column = i % kBiasKeys;
    if (column >= keys) continue;
    reinterpret_cast<T*>(to + row * kRowBytes)[column] =
        reinterpret_cast<T const*>(from)[offset(row, bias.stride_m) + offset(column, bias.stride_n)];
  }
}

// Starts the copies of `queries` rows of up to 64 keys, from element `from` on; the caller commits and waits. A bias
// that is the same for all queries is one row. width 0: element by element, done when this returns.
template <int kThreads, int kRowBytes>
CUTLASS_DEVICE void copy_bias(char* to, BiasView const& bias, const char* from, int width, int queries, int keys,
                              int thread) {
  const int bytes = bytes_of(bias.dtype), tile_bytes = kBiasKeys * bytes;
  const int rows = bias.stride_m == 0 ? 1 : queries;
  const int row_bytes = (keys < kBiasKeys ? keys : kBiasKeys) * bytes;
  if (width == 16) {
    copy_bias_of<16, kThreads, kRowBytes>(to, from, bias.stride_m * bytes, rows, row_bytes, tile_bytes, thread);
  } else if (width == 4) {
    copy_bias_of<4, kThreads, kRowBytes>(to, from, bias.stride_m * bytes, rows, row_bytes, tile_bytes, thread);
  } else if (bytes == 1) {
    gather_bias<uint8_t, kThreads, kRowBytes>(to, bias, from, rows, keys, thread);
  } else if (bytes == 2) {
    gather_bias<uint16_t, kThreads, kRowBytes>(to, bias, from, rows, keys, thread);
  } else {
    gather_bias<uint32_t, kThreads, kRowBytes>(to, bias, from, rows, keys, thread);
  }
}

// row0, column0: this warp's place in the tile of scores.
template <typename T, typename Coord, bool kTransposed, typename Fragment>
CUTLASS_DEVICE void add_staged_bias_of(Fragment& s, const char* tile, int row_bytes, float scale, int row0, int column0,
                                       int lane) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coord::kRows; ++i) {
    const int row = row0 + Coord::row(lane, i);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coord::kColumns; j += 2) {
      const int column = column0 + Coord::column(lane, j);
      float& low = s[Coord::index(i, j)];
      float& high = s[Coord::index(i, j + 1)];
      if constexpr (kTransposed) {  // rows are keys, columns are queries
        T const* at = reinterpret_cast<T const*>(tile + column * row_bytes) + row;
        T const* next = reinterpret_cast<T const*>(tile + (column + 1) * row_bytes) + row;
        low = low * scale + bias_value<T>(*at);
        high = high * scale + bias_value<T>(*next);
      } else {
        const auto two =
            *reinterpret_cast<cutlass::AlignedArray<T, 2> const*>(tile + row * row_bytes + column * int(sizeof(T)));
        low = low * scale + bias_value<T>(two[0]);
        high = high * scale + bias_value<T>(two[1]);
      }
    }
  }
}

// kTransposed: the scores' rows are keys. T: the query's element type.
template <typename T, typename Coord, int kRowBytes, bool kTransposed, typename Fragment>
CUTLASS_DEVICE void add_staged_bias(Fragment& s, const char* tile, BiasView const& bias, float scale, int row0,
                                    int column0, int lane) {
  const int row_bytes = bias.stride_m == 0 ? 0 : kRowBytes;
  if (bias.dtype == DType::kBool) {
    add_staged_bias_of<BoolByte, Coord, kTransposed>(s, tile, row_bytes, scale, row0, column0, lane);
  } else if (kRowBytes >= bias_row_bytes(4) && bias.dtype == DType::kF32) {
    add_staged_bias_of<float, Coord, kTransposed>(s, tile, row_bytes, scale, row0, column0, lane);
  } else {
    add_staged_bias_of<T, Coord, kTransposed>(s, tile, row_bytes, scale, row0, column0, lane);
  }
}

}  // namespace memeff
