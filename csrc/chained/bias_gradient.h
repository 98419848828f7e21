// Writes dBias, in the bias' dtype (fp32 for partial sums).
#pragma once

#include "common/offset.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace memeff {
namespace chained {

// Elements from the gradient's start to one head's.
CUTLASS_DEVICE int64_t bias_gradient_at(GradBiasView const& bias, int64_t batch, int group, int member) {
  return offset(batch, bias.stride_b) + offset(group, bias.stride_g) + offset(member, bias.stride_h);
}

CUTLASS_DEVICE void write_bias_element(GradBiasView const& bias, int64_t head, int row, int column, float value) {
  const int64_t at = head + offset(row, bias.stride_m) + offset(column, bias.stride_n);
  if (bias.dtype == DType::kF32) {
    static_cast<float*>(bias.data)[at] = value;
  } else if (bias.dtype == DType::kF16) {
    static_cast<cutlass::half_t*>(bias.data)[at] = cutlass::half_t(value);
  } else {
    static_cast<cutlass::bfloat16_t*>(bias.data)[at] = cutlass::bfloat16_t(value);
  }
}

// Adjacent columns are one store where every pair is aligned.
template <typename T, typename Coord, typename Fragment>
CUTLASS_DEVICE void write_bias_tile_of(Fragment const& ds, GradBiasView const& bias, int64_t head, int row0,
                                       int column0, int rows, int columns, int lane) {
  T* const data = static_cast<T*>(bias.data) + head;
  const bool pairs =
      bias.stride_n == 1 && bias.stride_m % 2 == 0 && reinterpret_cast<uintptr_t>(data) % (2 * sizeof(T)) == 0;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coord::kRows; ++i) {
    const int row = row0 + Coord::row(lane, i);
    if (row >= rows) continue;
    T* const line = data + offset(row, bias.stride_m);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coord::kColumns; j += 2) {
      const int column = column0 + Coord::column(lane, j);
      const T low = T(ds[Coord::index(i, j)]), high = T(ds[Coord::index(i, j + 1)]);
      if (pairs && column + 1 < columns) {
        cutlass::AlignedArray<T, 2> two;
        two[0] = low, two[1] = high;
        *reinterpret_cast<cutlass::AlignedArray<T, 2>*>(line + column) = two;
      } else {
        if (column < columns) line[offset(column, bias.stride_n)] = low;
        if (column + 1 < columns) line[offset(column + 1, bias.stride_n)] = high;
      }
    }
  }
}

// One warp's accumulators of dS. T: the inputs' element type. head: bias_gradient_at; row0, column0: of the warp's
// tile.
template <typename T, typename Coord, typename Fragment>
CUTLASS_DEVICE void write_bias_tile(Fragment const& ds, GradBiasView const& bias, int64_t head, int row0, int column0,
                                    int rows, int columns, int lane) {
  if (bias.dtype == DType::kF32) {
    write_bias_tile_of<float, Coord>(ds, bias, head, row0, column0, rows, columns, lane);
  } else {
    write_bias_tile_of<T, Coord>(ds, bias, head, row0, column0, rows, columns, lane);
  }
}

}  // namespace chained
}  // namespace memeff
