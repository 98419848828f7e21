// Where a thread's accumulators lie in its warp's tile, for the three accumulator layouts of CUTLASS 2.x.
//
// Every layout is a product of row slots and column slots:
//   element index(i, j)  is at  row(lane, i), column(lane, j),   i < kRows, j < kColumns
// Column slots 2j and 2j + 1 are adjacent columns, the first even. rows_shared(mask): lanes l and l ^ mask hold the
// same rows. Equal kRows and kRowMap: two accumulators give every lane the same rows. kQuadCells: row slots 2i, 2i + 1
// are 8 rows apart and column slots 4j .. 4j + 3 are columns c, c + 1, c + 8, c + 9 of a block of 16
// (common/dropout.h).
#pragma once

#include "common/offset.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/warp/mma_simt_tile_iterator.h"
#include "cutlass/gemm/warp/mma_tensor_op_tile_iterator.h"
#include "cutlass/gemm/warp/mma_tensor_op_tile_iterator_sm70.h"

namespace memeff {
namespace chained {

template <typename AccumulatorIterator>
struct AccCoord;

// Turing and later: m16n8 instructions. A lane holds rows lane/4 and lane/4 + 8, columns 2 * (lane % 4) and the next.
template <typename Shape, typename Element, typename Instruction, typename Delta>
struct AccCoord<cutlass::gemm::warp::MmaTensorOpAccumulatorTileIterator<Shape, Element, cutlass::layout::RowMajor,
                                                                        Instruction, Delta>> {
  static constexpr int kTilesM = Shape::kRow / 16;
  static constexpr int kTilesN = Shape::kColumn / 8;
  static constexpr int kRows = 2 * kTilesM;
  static constexpr int kColumns = 2 * kTilesN;
  // Rows 8 apart keep their place in every operand layout of this architecture (the swizzles repeat after 8 rows).
  static constexpr bool kRowsRepeat = true;
  static constexpr bool kQuadCells = true;
  static constexpr int kRowMap = 0;

  CUTLASS_DEVICE static int row(int lane, int i) { return i * 8 + (lane >> 2); }
  CUTLASS_DEVICE static int column(int lane, int j) { return (j >> 1) * 8 + (j & 1) + (lane & 3) * 2; }
  CUTLASS_HOST_DEVICE static constexpr int index(int i, int j) {
    return ((j >> 1) * kTilesM + (i >> 1)) * 4 + (i & 1) * 2 + (j & 1);
  }
  CUTLASS_HOST_DEVICE static constexpr bool rows_shared(int mask) { return mask == 1 || mask == 2; }
};

// Volta: quads of lanes compute interleaved 8x8 blocks; a warp tile is a grid of 32x32 super tiles.
template <typename Shape, typename Element, typename Instruction, typename Delta>
struct AccCoord<cutlass::gemm::warp::MmaVoltaTensorOpAccumulatorTileIterator<Shape, Element, cutlass::layout::RowMajor,
                                                                             Instruction, Delta>> {
  static constexpr int kTilesM = Shape::kRow / 32;
  static constexpr int kTilesN = Shape::kColumn / 32;
  static constexpr int kRows = 4 * kTilesM;
  static constexpr int kColumns = 8 * kTilesN;
  static constexpr bool kRowsRepeat = false;
  static constexpr bool kQuadCells = false;
  static constexpr int kRowMap = 0;

  // i = (super tile, half, pair): bits (.., 1, 0)
  CUTLASS_DEVICE static int row(int lane, int i) {
    const int quad = lane >> 2;
    return (i >> 2) * 32 + ((i >> 1) & 1) * 4 + (i & 1) * 2 + (((quad & 4) >> 1) + (quad & 1)) * 8 + (lane & 1);
  }
  // j = (super tile, half, block of 16, parity)
  CUTLASS_DEVICE static int column(int lane, int j) {
    const int quad = lane >> 2;
    return (j >> 3) * 32 + ((j >> 2) & 1) * 4 + ((j >> 1) & 1) * 16 + (j & 1) + ((quad >> 1) & 1) * 8 + (lane & 2);
  }
  CUTLASS_HOST_DEVICE static constexpr int index(int i, int j) {
    return (((((j >> 3) * kTilesM + (i >> 2)) * 2 + ((j >> 2) & 1)) * 2 + ((i >> 1) & 1)) * 8) + ((j >> 1) & 1) * 4 +
           (i & 1) * 2 + (j & 1);
  }
  CUTLASS_HOST_DEVICE static constexpr bool rows_shared(int mask) { return mask == 2 || mask == 8; }
};

// SIMT: lanes form a rectangle given by the policy; each owns LaneMmaShape blocks, repeated over the warp tile.
template <typename Shape, typename Element, typename Policy, int kPartitionsK, int kGroup>
struct AccCoord<cutlass::gemm::warp::MmaSimtTileIterator<Shape, cutlass::gemm::Operand::kC, Element,
                                                         cutlass::layout::RowMajor, Policy, kPartitionsK, kGroup>> {
  using Iterator = cutlass::gemm::warp::MmaSimtTileIterator<Shape, cutlass::gemm::Operand::kC, Element,
                                                            cutlass::layout::RowMajor, Policy, kPartitionsK, kGroup>;
  using Iterations = typename Iterator::Iterations;
  using Delta = typename Iterator::Delta;
  static constexpr int kBlockM = Policy::LaneMmaShape::kM;
  static constexpr int kBlockN = Policy::LaneMmaShape::kN;
  static constexpr int kRows = Iterations::kRow * kBlockM;
  static constexpr int kColumns = Iterations::kColumn * kBlockN;
  static constexpr bool kRowsRepeat = false;
  static constexpr bool kQuadCells = false;

  CUTLASS_DEVICE static cutlass::MatrixCoord lane_origin(int lane) {
    return Policy::get_lane_layout().inverse(lane) * cutlass::MatrixCoord(kBlockM, kBlockN);
  }
  CUTLASS_DEVICE static int row(int lane, int i) {
    return (i / kBlockM) * Delta::kRow + i % kBlockM + lane_origin(lane).row();
  }
  CUTLASS_DEVICE static int column(int lane, int j) {
    return (j / kBlockN) * Delta::kColumn + j % kBlockN + lane_origin(lane).column();
  }
  CUTLASS_HOST_DEVICE static constexpr int index(int i, int j) {
    return j % kBlockN + kBlockN * (j / kBlockN + Iterations::kColumn * i);
  }
  // Row-major-interleaved lanes: the low log2(interleave) bits and the bits above the lane rectangle's width choose
  // rows.
  static constexpr int kInterleave = Policy::LaneLayout::kInterleave;
  static constexpr int kRowMap = (kInterleave * 64 + Policy::WarpShape::kColumn) * 64 + kBlockM;
  CUTLASS_HOST_DEVICE static constexpr bool rows_shared(int mask) {
    return mask >= kInterleave && mask < kInterleave * Policy::WarpShape::kColumn;
  }
};

// Writes value(i, element) of a warp's accumulators, the i-th of a lane's rows, to data where they lie within rows x
// columns. row0, column0: the warp tile's place.
template <typename Coord, typename F>
CUTLASS_DEVICE void store_within(float* data, int64_t stride, int row0, int column0, int rows, int columns, int lane,
                                 F value) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coord::kRows; ++i) {
    const int row = row0 + Coord::row(lane, i);
    float* line = data + offset(row, stride);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coord::kColumns; ++j) {
      const int column = column0 + Coord::column(lane, j);
      if (row < rows && column < columns) line[column] = value(i, Coord::index(i, j));
    }
  }
}

// Combines a per-row value over the lanes of a warp that hold parts of the same rows.
template <typename Coord, typename Combine>
CUTLASS_DEVICE float reduce_row(float value, Combine combine) {
  CUTLASS_PRAGMA_UNROLL
  for (int mask = 1; mask < 32; mask <<= 1) {
    if (Coord::rows_shared(mask)) value = combine(value, __shfl_xor_sync(0xffffffff, value, mask));
  }
  return value;
}

}  // namespace chained
}  // namespace memeff
