// The online softmax of one warpgroup's scores.
#pragma once

#include "common/pack.h"
#include "hopper/traits.h"

namespace memeff {
namespace hopper {

// The rows of one thread of a consumer warpgroup: which keys they see, maxima, sums.
template <typename Traits>
struct WarpgroupRows {
  using CoordS = typename Traits::CoordS;
  using Exponent = typename Traits::Exponent;
  static constexpr int kTileN = Traits::kTileN, kRows = CoordS::kRows;
  using Scores = Accumulators<kTileN>;

  float exponent, premultiply;  // as in chained/forward_tile.h
  int row_in_tile, lane;        // the first of its rows
  int row;                      // and within the sequence
  Visibility const* see;
  typename Traits::DropoutState dropout;
  SoftmaxState<kRows, false> state;

  // warp_row: the warp's first row within the tile.
  CUTLASS_DEVICE WarpgroupRows(float exponent_, float premultiply_, int warp_row, int lane_)
      : exponent(exponent_), premultiply(premultiply_), row_in_tile(warp_row + CoordS::row(lane_, 0)), lane(lane_) {}

  CUTLASS_DEVICE void start(ForwardTile const& tile, ForwardParams const& p) {
    row = tile.row0 + row_in_tile;
    see = &tile.see;
    dropout = typename Traits::DropoutState(p.dropout, tile.n.number() * p.heads + tile.at.head);
    state = SoftmaxState<kRows, false>();
  }

  // Raw products -> what Exponent takes; with `masked` the hidden ones become -inf. bias: the tile in shared memory,
  // all queries of the block, in chunks of 64 keys swizzled as operands are (wgmma.h).
  CUTLASS_DEVICE void finish(Scores& s, const char* bias, int block, bool masked) const {
    if constexpr (Traits::kBias) {
      add_bias(s, bias + row_in_tile * kRowBytes);
    } else if (premultiply != 1.f) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < Traits::kScores; ++e) s[e] *= premultiply;
    }
    if (!masked) return;
    if (see->left < 0) {
      hide<false>(s, block * kTileN);
    } else {
      hide<true>(s, block * kTileN);
    }
  }

  // Columns outside [first, limit) of each row become -inf. kLeft: first is not 0.
  template <bool kLeft>
  CUTLASS_DEVICE void hide(Scores& s, int key0) const {
    const int lane_column = CoordS::column(lane, 0);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int high = see->limit(row + 8 * i) - key0 - lane_column;
      const int low = kLeft ? see->first(row + 8 * i) - key0 - lane_column : 0;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < CoordS::kColumns; ++j) {
        const int column = CoordS::column(0, j);
        if (column >= high || (kLeft && column < low)) s[CoordS::index(i, j)] = negative_infinity();
      }
    }
  }

  CUTLASS_DEVICE void add_bias(Scores& s, const char* line) const {
    using Pair = cutlass::AlignedArray<typename Traits::Element, 2>;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < CoordS::kColumns; j += 2) {  // 16-byte piece j / 2 of the row, the lane's 4 bytes of it
      const int chunk = j / 16, piece = (j / 2 % 8) ^ (lane >> 2);
      const char* at = line + chunk * Traits::kQueryChunkBytes + piece * 16 + (lane & 3) * 4;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        const Pair two = *reinterpret_cast<Pair const*>(at + 8 * i * kRowBytes);
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 2; ++k) {
          float& x = s[CoordS::index(i, j + k)];
          x = __fmaf_rn(x, premultiply, float(two[k]));
        }
      }
    }
  }

  // s -> weights; alpha: the factor for what was accumulated before.
  CUTLASS_DEVICE void weigh(Scores& s, float (&alpha)[kRows]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float max = s[CoordS::index(i, 0)];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 1; j < CoordS::kColumns; ++j) max = fmaxf(max, s[CoordS::index(i, j)]);
      max = chained::reduce_row<CoordS>(max, [](float a, float b) { return fmaxf(a, b); });
      const float before = state.max[i];
      state.max[i] = fmaxf(before, max);
      const float reference = Exponent::reference(state.max[i], exponent);
      alpha[i] = Exponent::rescale(before, reference, exponent);
      float sum = 0.f;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < CoordS::kColumns; ++j) {
        float& x = s[CoordS::index(i, j)];
        x = Exponent::weight(x, reference, exponent);
        sum += x;
      }
      state.sum[i] = state.sum[i] * alpha[i] + sum;
    }
  }

  CUTLASS_DEVICE void drop(Scores& s, int block) const {
    if constexpr (Traits::kDropout) {
      each_cell<CoordS, false>(dropout, row - CoordS::row(lane, 0), block * kTileN, lane, [&](int i, int j, bool kept) {
        if (!kept) s[CoordS::index(i, j)] = 0.f;
      });
    }
  }

  // Adds the sums up over the lanes of a row. inverse: the factor of O, 0 for a row that sees nothing.
  CUTLASS_DEVICE void finish_sums(float (&inverse)[kRows], float keep_scale) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      state.sum[i] = chained::reduce_row<CoordS>(state.sum[i], [](float a, float b) { return a + b; });
      inverse[i] = state.sum[i] == 0.f ? 0.f : 1.f / state.sum[i];
      if constexpr (Traits::kDropout) inverse[i] *= keep_scale;
    }
  }
};

// Weights as operand A of the second product: registers 4 k .. 4 k + 3 are keys 16 k .. 16 k + 15.
template <typename Element, int kScores>
CUTLASS_DEVICE void pack_weights(uint32_t (&to)[kScores / 2], float const (&s)[kScores]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kScores / 2; ++i) {
    to[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
  }
}

}  // namespace hopper
}  // namespace memeff
