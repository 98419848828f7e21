// A warp's 16 rows of O from registers to global memory, 16 bytes a store, without shared memory.
#pragma once

#include "hopper/warpgroup_rows.h"

namespace memeff {
namespace hopper {

template <typename Traits>
CUTLASS_DEVICE void rescale(Accumulators<Traits::kWidth>& o, float const (&factor)[2]) {
  using Coord = typename Traits::CoordO;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coord::kRows; ++i) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coord::kColumns; ++j) o[Coord::index(i, j)] *= factor[i];
  }
}

// Four lanes hold a row's words of four 8-column tiles: lane t the t-th word (two columns) of each. After this lane t
// holds the four words of tile t.
//   lane 0: a0 b0 c0 d0        a0 a1 a2 a3
//   lane 1: a1 b1 c1 d1   ->   b0 b1 b2 b3
//   lane 2: a2 b2 c2 d2        c0 c1 c2 c3
//   lane 3: a3 b3 c3 d3        d0 d1 d2 d3
CUTLASS_DEVICE uint4 transpose_quad(uint4 w, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  const auto swap = [](uint32_t x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); };
  const uint32_t ab = swap(odd ? w.x : w.y, 1), cd = swap(odd ? w.z : w.w, 1);
  // Words 2k, 2k + 1 (k = upper) of the first or second tile, and of the third or fourth.
  const uint32_t low0 = odd ? ab : w.x, low1 = odd ? w.y : ab;
  const uint32_t high0 = odd ? cd : w.z, high1 = odd ? w.w : cd;
  const uint32_t far0 = swap(upper ? low0 : high0, 2), far1 = swap(upper ? low1 : high1, 2);
  return upper ? make_uint4(far0, far1, high0, high1) : make_uint4(low0, low1, far0, far1);
}

// inverse: the factor of each row, 0 where a row sees nothing. column0: the output's column that o starts with.
template <typename Traits>
CUTLASS_DEVICE void store_output(ForwardParams const& p, ForwardTile const& tile, Accumulators<Traits::kWidth>& o,
                                 float const (&inverse)[2], int consumer, int warp, int lane, int column0 = 0) {
  using Element = typename Traits::Element;
  using Coord = typename Traits::CoordO;
  const int row0 = 64 * consumer + 16 * warp + Coord::row(lane, 0);
  Element* out = static_cast<Element*>(p.out.data) +
                 head_offset(p.out, tile.at.batch, int(tile.at.group), int(tile.at.member)) +
                 offset(tile.n.query_row + tile.row0, p.out.stride_m) + column0 + 8 * (lane & 3);
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coord::kRows; ++i) {
    const int row = row0 + Coord::kRowStep * i;
    Element* line = out + offset(row, p.out.stride_m);
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < Traits::kWidth / 32; ++group) {
      uint32_t words[4];
      CUTLASS_PRAGMA_UNROLL
      for (int t = 0; t < 4; ++t) {
        const int j = 8 * group + 2 * t;
        words[t] = pack<Element>(o[Coord::index(i, j)] * inverse[i], o[Coord::index(i, j + 1)] * inverse[i]);
      }
      uint4 piece = transpose_quad(make_uint4(words[0], words[1], words[2], words[3]), lane);
      // 0 for a row that sees nothing, whatever 0 * V gave.
      if (inverse[i] == 0.f) piece = make_uint4(0, 0, 0, 0);
      if (row < tile.rows && column0 + 32 * group + 8 * (lane & 3) < p.value_dim)
        *reinterpret_cast<uint4*>(line + 32 * group) = piece;
    }
  }
}

template <typename Traits>
CUTLASS_DEVICE void store_lse(ForwardParams const& p, ForwardTile const& tile, WarpgroupRows<Traits> const& rows,
                              int consumer, int warp, int lane) {
  using Exponent = typename Traits::Exponent;
  using Coord = typename Traits::CoordS;
  if (p.lse.data == nullptr || lane % 4 != 0) return;
  float* lse = p.lse.data + head_offset(p.lse, tile.at.batch, int(tile.at.group), int(tile.at.member)) +
               tile.n.query_row + tile.row0;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coord::kRows; ++i) {
    const int row = 64 * consumer + 16 * warp + Coord::row(lane, i);
    if (row >= tile.rows) continue;
    const float reference = Exponent::reference(rows.state.max[i], rows.exponent);
    const float2 both = log_sum_exp<Exponent>(reference, rows.state.sum[i]);
    lse[row] = both.x;
    if (p.lse.low != nullptr) lse[row + (p.lse.low - p.lse.data)] = both.y;
  }
}

}  // namespace hopper
}  // namespace memeff
