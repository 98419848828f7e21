// Adds a tensor bias to the scores a thread holds: logits = scale * s + bias, any broadcast, any strides, any
// alignment.
//
// Rows and columns outside [0, M) x [0, N) are never read: rows are clamped to M - 1 (their result is not stored),
// columns are left for the mask. A pair of adjacent columns is one load where the host found that every pair is
// aligned.
#pragma once

#include "common/offset.h"
#include "common/softmax.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace memeff {

struct BiasTile {
  const char* data;  // the head's bias, [M, N]
  int64_t stride_m, stride_n;
  DType dtype;
  bool pairs;  // stride_n == 1 and elements (row, 2i) are aligned to two elements
};

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

}  // namespace memeff
