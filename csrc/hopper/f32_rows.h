// The online softmax of one warpgroup's scores, and what becomes of weights and sums of fp16 parts.
#pragma once

#include "hopper/f32_traits.h"
#include "hopper/warpgroup_rows.h"

namespace memeff {
namespace hopper_f32 {

constexpr float kWeightTop = 32768.f;  // what a weight of 1 becomes before it is split

// 1 / x of a power of two.
CUTLASS_DEVICE float reciprocal_of_power(float x) { return __int_as_float(0x7f000000 - __float_as_int(x)); }

template <typename Traits>
struct Rows : hopper::WarpgroupRows<Traits> {
  using Base = hopper::WarpgroupRows<Traits>;
  using CoordS = typename Traits::CoordS;
  using Exponent = typename Traits::Exponent;
  using Scores = Accumulators<Traits::kTileN>;
  using Base::lane;
  using Base::row_in_tile;
  using Base::state;
  static constexpr int kRows = CoordS::kRows, kColumns = CoordS::kColumns;

  float factors[kRows];  // of the exponent: with the query's scale
  float value_scale;     // of the largest row of V so far: O counts in units of it

  using Base::Base;

  // scales: of the tile's first query.
  CUTLASS_DEVICE void start(ForwardTile const& tile, ForwardParams const& p, const float* scales) {
    Base::start(tile, p);
    value_scale = __int_as_float((kLeast + 127) << 23);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int at = row_in_tile + 8 * i;
      const float scale = at < tile.rows ? __ldg(scales + at) : 1.f;
      factors[i] = fmaxf(this->exponent * scale, 1.17549435e-38f);  // -inf times it stays -inf
    }
  }

  // Products of parts -> scores in units of the query's scale; with `masked` the hidden ones become -inf.
  CUTLASS_DEVICE void finish(Scores& s, const float* key_scales, int block, bool masked) const {
    const float* scales = key_scales + 2 * (lane & 3);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kColumns; j += 2) {
      const float2 two = make_float2(scales[4 * j], scales[4 * j + 1]);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        s[CoordS::index(i, j)] *= two.x;
        s[CoordS::index(i, j + 1)] *= two.y;
      }
    }
    if (this->premultiply != 1.f) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < Traits::kScores; ++e) s[e] *= this->premultiply;
    }
    if (!masked) return;
    if (this->see->left < 0) {
      this->template hide<false>(s, block * Traits::kTileN);
    } else {
      this->template hide<true>(s, block * Traits::kTileN);
    }
  }

  // s -> weights; alpha: the factor for what was accumulated before.
  CUTLASS_DEVICE void weigh(Scores& s, float (&alpha)[kRows]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      float max = s[CoordS::index(i, 0)];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 1; j < kColumns; ++j) max = fmaxf(max, s[CoordS::index(i, j)]);
      max = chained::reduce_row<CoordS>(max, [](float a, float b) { return fmaxf(a, b); });
      const float before = state.max[i];
      state.max[i] = fmaxf(before, max);
      const float reference = Exponent::reference(state.max[i], factors[i]);
      alpha[i] = Exponent::rescale(before, reference, factors[i]);
      float sums[2] = {0.f, 0.f};  // side by side: half the rounding errors
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        float& x = s[CoordS::index(i, j)];
        x = Exponent::weight(x, reference, factors[i]);
        sums[j % 2] += x;
      }
      state.sum[i] = state.sum[i] * alpha[i] + (sums[0] + sums[1]);
    }
  }

  // Weights in units of fp16's top, with the scale of each row of V; alpha takes what that unit has changed by.
  // keys: those of the block that belong to the sequence.
  CUTLASS_DEVICE void scale_values(Scores& s, float (&alpha)[kRows], const float* value_scales, int keys) {
    float largest = value_scale;
    CUTLASS_PRAGMA_UNROLL
    for (int key = 0; key < Traits::kTileN; key += 32) {
      if (key + lane < keys) largest = fmaxf(largest, value_scales[key + lane]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    const float inverse = reciprocal_of_power(largest);
    const float change = value_scale * inverse;
    value_scale = largest;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) alpha[i] *= change;
    const float unit = kWeightTop * inverse;
    const float* scales = value_scales + 2 * (lane & 3);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kColumns; j += 2) {
      const float2 two = make_float2(scales[4 * j], scales[4 * j + 1]);
      // Rows of V behind the sequence's last key may be larger: their weights are 0, and 0 * inf would be NaN.
      const float x = fminf(two.x * unit, kWeightTop), y = fminf(two.y * unit, kWeightTop);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        s[CoordS::index(i, j)] *= x;
        s[CoordS::index(i, j + 1)] *= y;
      }
    }
  }
};

// Weights as operand A of the second product (warpgroup_rows.h: pack_weights), in parts.
template <int kParts, int kScores>
CUTLASS_DEVICE void split_weights(uint32_t (&to)[kParts][kScores / 2], float const (&s)[kScores]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kScores / 2; ++i) {
    const uint32_t high = pack<cutlass::half_t>(s[2 * i], s[2 * i + 1]);
    to[0][i] = high;
    if constexpr (kParts == 2) {
      const float2 both = __half22float2(reinterpret_cast<__half2 const&>(high));
      to[1][i] = pack<cutlass::half_t>(__fsub_rn(s[2 * i], both.x), __fsub_rn(s[2 * i + 1], both.y));
    }
  }
}

// --- products of parts: corrections first, the large products last (docs/performance.md) ---

// lo hi, hi lo, hi hi: the part of each side, 0 is hi.
template <int kParts>
struct Terms {
  static constexpr int kCount = kParts == 2 ? 3 : 1;
  CUTLASS_HOST_DEVICE static constexpr int a(int term) { return kParts == 2 && term == 0; }
  CUTLASS_HOST_DEVICE static constexpr int b(int term) { return kParts == 2 && term == 1; }
};

template <typename Atom, int kCount, size_t... kI>
CUTLASS_DEVICE void issue_rs_add(uint32_t const* a, uint64_t b, float (&acc)[kCount], bool add,
                                 std::index_sequence<kI...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, acc[kI]..., add ? sm90::ScaleOut::One : sm90::ScaleOut::Zero);
}

// Starts acc = Q K^T, kN keys, over the steps [kBegin, kEnd) of 16 columns. a, b: descriptors of hi.
template <typename Traits, int kN, int kBegin, int kEnd>
CUTLASS_DEVICE void start_scores_in_parts(Accumulators<kN>& acc, uint64_t a, uint64_t b) {
  using Atom = typename Atoms<cutlass::half_t, kN>::Scores;
  using T = Terms<Traits::kParts>;
  CUTLASS_PRAGMA_UNROLL
  for (int term = 0; term < T::kCount; ++term) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = kBegin; step < kEnd; ++step) {
      const int chunk = step / kStepsPerChunk, along = step % kStepsPerChunk * kStepBytesAlong;
      issue_ss<Atom>(advance(a, T::a(term) * Traits::kQueryPartBytes + chunk * Traits::kQueryChunkBytes + along),
                     advance(b, T::b(term) * Traits::kKeyPartBytes + chunk * Traits::kKeyChunkBytes + along), acc,
                     term > 0 || step > kBegin, std::make_index_sequence<kN / 2>());
    }
  }
}

// Starts acc = P V, or with `add` acc += P V. v: descriptor of hi.
template <typename Traits>
CUTLASS_DEVICE void start_values_in_parts(Accumulators<Traits::kWidth>& acc,
                                          uint32_t const (&weights)[Traits::kParts][Traits::kScores / 2], uint64_t v,
                                          bool add) {
  using Atom = typename Atoms<cutlass::half_t, Traits::kWidth>::Values;
  using T = Terms<Traits::kParts>;
  CUTLASS_PRAGMA_UNROLL
  for (int term = 0; term < T::kCount; ++term) {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < Traits::kPvSteps; ++step) {
      issue_rs_add<Atom>(weights[T::a(term)] + 4 * step,
                         advance(v, T::b(term) * Traits::kKeyPartBytes + step * kStepBytesAcross), acc,
                         add || term + step > 0, std::make_index_sequence<Traits::kWidth / 2>());
    }
  }
}

}  // namespace hopper_f32
}  // namespace memeff
