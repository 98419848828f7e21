// S = Q K^T by FFMA, from the same shared-memory operands as ResidentMma, for fp32 and K <= 32.
//
// Tensor cores truncate every addend of a step; with few products a score that is twice torch's error (measured, K = 16
// with large logits), and nothing averages it. At such K the first product is the smaller part of the work, so it can
// afford to be exact to fp32: one fused multiply-add after the other, k ascending.
#pragma once

#include "cutlass/cutlass.h"

namespace memeff {
namespace chained {

// Coord: AccCoord of S. The operands' layouts keep four consecutive k of a row (query or key) in 16 bytes.
template <typename Coord, typename LayoutA, typename LayoutB>
struct FmaProduct {
  template <typename Fragment>
  CUTLASS_DEVICE static void add(Fragment& acc, float const* a, LayoutA const& layout_a, float const* b,
                                 LayoutB const& layout_b, int row0, int column0, int lane, int depth) {
#pragma unroll 1
    for (int k = 0; k < depth; k += 4) {  // the tail of K is zero-filled
      float4 rows[Coord::kRows];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Coord::kRows; ++i) {
        rows[i] = *reinterpret_cast<float4 const*>(a + layout_a({row0 + Coord::row(lane, i), k}));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Coord::kColumns; ++j) {
        const float4 column = *reinterpret_cast<float4 const*>(b + layout_b({k, column0 + Coord::column(lane, j)}));
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Coord::kRows; ++i) {
          float& s = acc[Coord::index(i, j)];
          s = __fmaf_rn(rows[i].x, column.x, s);
          s = __fmaf_rn(rows[i].y, column.y, s);
          s = __fmaf_rn(rows[i].z, column.z, s);
          s = __fmaf_rn(rows[i].w, column.w, s);
        }
      }
    }
  }
};

}  // namespace chained
}  // namespace memeff
