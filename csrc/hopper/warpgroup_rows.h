// The online softmax of one warpgroup's scores.
#pragma once

#include "common/pack.h"
#include "hopper/traits.h"

namespace memeff {
namespace hopper {

// Which weights of a lane's two rows dropout keeps, in kCalls calls: a bit a weight, bit t of each half of the word of
// the t-th call.
template <typename Element, int kCalls>
struct KeptWeights {
  static_assert(kCalls <= 8, "the ones of both types end in 7 zeros");
  static constexpr uint32_t kOne = std::is_same_v<Element, cutlass::half_t> ? 0x3c00 : 0x3f80;
  uint32_t words[4];

  KeptWeights() = default;
  // The place of a bit holds what clamp() gives less threshold - 1.
  CUTLASS_DEVICE explicit KeptWeights(int32_t threshold) {
    const uint32_t shift = 0u - uint32_t(threshold - 1) * 0x10001 * ((1u << kCalls) - 1);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) words[i] = shift;
  }
  // Both numbers of a word become threshold where they are kept, else threshold - 1. p = 1: always threshold - 1.
  CUTLASS_DEVICE static uint32_t clamp(uint32_t word, int32_t threshold) {
    const uint32_t low = (uint32_t(threshold - 1) & 0xffff) * 0x10001;
    const uint32_t high = uint32_t(threshold < 0xffff ? threshold : 0xffff) * 0x10001;
    return __vminu2(__vmaxu2(word, low), high);
  }
  CUTLASS_DEVICE void note(int t, uint4 call, int32_t threshold) {
    words[0] += clamp(call.x, threshold) << t, words[1] += clamp(call.y, threshold) << t;
    words[2] += clamp(call.z, threshold) << t, words[3] += clamp(call.w, threshold) << t;
  }
  // Sets what is dropped of two weights to 0: by a product, whose pipe the generator leaves idle. A NaN stays one, as
  // the sum of its row is.
  CUTLASS_DEVICE void apply(uint32_t& x, int word, int t) const {
    const uint32_t kept = (words[word] & (0x10001u << t)) * (kOne >> t);
    x = std::is_same_v<Element, cutlass::half_t> ? ptx::multiply_f16(x, kept) : ptx::multiply_bf16(x, kept);
  }
};
struct AllKept {};

// The rows of one thread of a consumer warpgroup: which keys they see, maxima, sums.
template <typename Traits>
struct WarpgroupRows {
  using CoordS = typename Traits::CoordS;
  using Exponent = typename Traits::Exponent;
  using Element = typename Traits::Element;
  static constexpr int kTileN = Traits::kTileN, kRows = CoordS::kRows;
  using Scores = Accumulators<kTileN>;
  using Kept = std::conditional_t<Traits::kDropout, KeptWeights<Element, kTileN / 16>, AllKept>;

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
      const int high = see->limit(row + CoordS::kRowStep * i) - key0 - lane_column;
      const int low = kLeft ? see->first(row + CoordS::kRowStep * i) - key0 - lane_column : 0;
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

  // The row's new maximum as a reference; alpha: the factor for what was accumulated before.
  CUTLASS_DEVICE float raise(Scores const& s, int i, float& alpha) {
    float max = s[CoordS::index(i, 0)];
    CUTLASS_PRAGMA_UNROLL
    for (int j = 1; j < CoordS::kColumns; ++j) max = fmaxf(max, s[CoordS::index(i, j)]);
    max = chained::reduce_row<CoordS>(max, [](float a, float b) { return fmaxf(a, b); });
    const float before = state.max[i];
    state.max[i] = fmaxf(before, max);
    const float reference = Exponent::reference(state.max[i], exponent);
    alpha = Exponent::rescale(before, reference, exponent);
    return reference;
  }

  // s -> weights.
  CUTLASS_DEVICE void weigh(Scores& s, float (&alpha)[kRows]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const float reference = raise(s, i, alpha[i]);
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

  // The same with dropout. Calls of the generator, chains of 20 instructions, go beside exponentials.
  CUTLASS_DEVICE void weigh_and_draw(Scores& s, float (&alpha)[kRows], Kept& kept, int block, int32_t threshold) {
    const float reference[kRows] = {raise(s, 0, alpha[0]), raise(s, 1, alpha[1])};
    float sum[kRows] = {};
    kept = Kept(threshold);
    CUTLASS_PRAGMA_UNROLL
    for (int t = 0; t < kTileN / 16; ++t) {
      kept.note(t, pair_cells(dropout, row, block * kTileN + 16 * t, lane), threshold);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 4 * t; j < 4 * t + 4; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRows; ++i) {
          float& x = s[CoordS::index(i, j)];
          x = Exponent::weight(x, reference[i], exponent);
          sum[i] += x;
        }
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) state.sum[i] = state.sum[i] * alpha[i] + sum[i];
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

// Weights as operand A of the second product: registers 4 k .. 4 k + 3 are keys 16 k .. 16 k + 15: the first row's keys
// up to 7, the second row's, the first row's from 8 on, the second row's.
template <typename Element, int kScores, typename Kept>
CUTLASS_DEVICE void pack_weights(uint32_t (&to)[kScores / 2], float const (&s)[kScores], Kept const& kept) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kScores / 2; ++i) {
    to[i] = pack<Element>(s[2 * i], s[2 * i + 1]);
    if constexpr (!std::is_same_v<Kept, AllKept>) kept.apply(to[i], i % 2 * 2 + i / 2 % 2, i / 4);
  }
}

}  // namespace hopper
}  // namespace memeff
