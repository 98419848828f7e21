// Reads a tile that lies in shared memory as B of S = A B^T (32-bit elements, unit stride along the contraction of S)
// as B of an output product, whose contraction runs over the tile's rows: one copy of a tile serves both products.
//
// CUTLASS's crosswise layout keeps a row's 16-byte groups, eight of them at a time, exchanged by (row & 7). A lane of
// an m16n8k8 product reads rows k + lane % 4 and k + 4 + lane % 4 of column n + lane / 4:
//
//   rows 0..3 x 8 columns = 4 rows x 2 groups -> eight different groups of four banks: no conflict
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"

namespace memeff {
namespace chained {

// Same use as a warp-level operand iterator. kColumns: the warp's; kPitch: elements from one row of the tile to the
// next.
template <typename Fragment, int kColumns, int kPitch>
class TransposedOperand {
 public:
  // Where the pairs of groups 0, 2, 4, 6 of the first rows lie; the second rows (+ 4) exchange 0 and 4, 2 and 6.
  CUTLASS_DEVICE TransposedOperand(float const* tile, int column0, int lane) {
    const int row = lane & 3, group = (column0 / 4 & 7) + (lane >> 4), rest = (lane >> 2) & 3;
    CUTLASS_PRAGMA_UNROLL
    for (int pair = 0; pair < 4; ++pair) {
      at_[pair] = tile + row * kPitch + column0 / 32 * 32 + (((group ^ (2 * pair)) ^ row) * 4) + rest;
    }
  }

  // Columns column0 + 8 n + lane / 4, n = 0 .. kColumns / 8, of rows k and k + 4 of the current step of eight rows.
  CUTLASS_DEVICE void load(Fragment& fragment) const {
    CUTLASS_PRAGMA_UNROLL
    for (int n = 0; n < kColumns / 8; ++n) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int pair = (n & 3) ^ (2 * half);
        fragment[2 * n + half] = at_[pair][row_ + half * 4 * kPitch + n / 4 * 32];
      }
    }
  }
  CUTLASS_DEVICE void set_kgroup_index(int) {}
  CUTLASS_DEVICE TransposedOperand& operator++() {
    row_ += 8 * kPitch;
    return *this;
  }

 private:
  float const* at_[4];
  int row_ = 0;
};

}  // namespace chained
}  // namespace memeff
