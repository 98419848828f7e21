// S = Q K^T by FFMA, from the same shared-memory operands as ResidentMma, for fp32 where K <= 32 or a tile has few
// rows.
//
// Tensor cores truncate every addend of a step: about one unit in the last place of the sum. With few products that is
// twice torch's error and nothing averages it (K <= 32), and a single query is computed by torch with tree sums. In
// both cases the first product is the smaller part of the work or latency hides it, so it can afford to be exact to
// fp32: fused multiply-adds, sums of kChunk products added up.
#pragma once

#include "cutlass/cutlass.h"

namespace memeff {
namespace chained {

// Coord: AccCoord of S. The operands' layouts keep four consecutive k of a row (query or key) in 16 bytes.
template <typename Coord, typename LayoutA, typename LayoutB>
struct FmaProduct {
  static constexpr int kChunk = 16;
  static constexpr int kBlock = Coord::kColumns < 8 ? Coord::kColumns : 8;  // columns at a time: fewer sums live

  template <typename Fragment>
  CUTLASS_DEVICE static void add(Fragment& acc, float const* a, LayoutA const& layout_a, float const* b,
                                 LayoutB const& layout_b, int row0, int column0, int lane, int depth) {
    CUTLASS_PRAGMA_UNROLL
    for (int j0 = 0; j0 < Coord::kColumns; j0 += kBlock) {
#pragma unroll 1
      for (int k0 = 0; k0 < depth; k0 += kChunk) {
        float sum[Coord::kRows][kBlock] = {};
#pragma unroll 1
        for (int k = k0; k < k0 + kChunk && k < depth; k += 4) {  // the tail of K is zero-filled
          float4 rows[Coord::kRows];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < Coord::kRows; ++i) {
            rows[i] = *reinterpret_cast<float4 const*>(a + layout_a({row0 + Coord::row(lane, i), k}));
          }
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kBlock; ++j) {
            const int column = column0 + Coord::column(lane, j0 + j);
            const float4 key = *reinterpret_cast<float4 const*>(b + layout_b({k, column}));
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Coord::kRows; ++i) {
              sum[i][j] = __fmaf_rn(rows[i].x, key.x, sum[i][j]);
              sum[i][j] = __fmaf_rn(rows[i].y, key.y, sum[i][j]);
              sum[i][j] = __fmaf_rn(rows[i].z, key.z, sum[i][j]);
              sum[i][j] = __fmaf_rn(rows[i].w, key.w, sum[i][j]);
            }
          }
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Coord::kRows; ++i) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kBlock; ++j) acc[Coord::index(i, j0 + j)] += sum[i][j];
        }
      }
    }
  }
};

}  // namespace chained
}  // namespace memeff
