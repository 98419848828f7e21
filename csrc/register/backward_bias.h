// The bias in the backward kernel of this family: 16 bits of the inputs' type, unit stride over keys, rows of whole 16
// bytes (KernelRow::bias_alignment).
//
// A warp copies what its own scores need, 32 keys of each query, by cp.async: the copies of a step start in the step
// before. 32 queries by 32 keys take the bytes of dS^T of the same keys and queries, rows and columns exchanged:
//
//   dS^T   row key,     pieces of 8 queries        bias   row query,   pieces of 8 keys
//
// so with one role dS is written over the bias that it came from, and the bias of step j + 1 arrives where dS of j - 1
// was, behind a barrier after its last use. Two roles: a place of its own that role 0 alone knows.
//
// S = scale * S + bias in one FFMA, then minus lse, as the forward kernels add and the chained ones subtract.
// A bias of full extent: dBias is dS, read back transposed and written 16 bytes a lane.
#pragma once

#include "register/backward_warp.h"

namespace memeff {
namespace registers {

template <typename Traits>
struct BiasedWarp : BackwardWarp<Traits> {
  using Warp = BackwardWarp<Traits>;
  using typename Warp::Element;
  using typename Warp::Scores;
  using typename Warp::ScoreTile;
  using typename Warp::Seen;
  using typename Warp::Step;
  using Warp::args;
  using Warp::batch;
  using Warp::f;
  using Warp::head;
  using Warp::key0;
  using Warp::kTileN;
  using Warp::lane;
  using Warp::n;
  using Warp::p;
  using Warp::part;
  using Warp::smem;
  using Warp::warp_key;
  static constexpr bool kBias = Traits::kBias;
  static constexpr int kSquares = Traits::kTileN / 32 / Traits::kParts;  // of 32 queries, that the warp has scores of

  CUTLASS_DEVICE BiasedWarp(BackwardArgs const& args_, typename Traits::SharedStorage& smem_) : Warp(args_, smem_) {}

  CUTLASS_DEVICE uint32_t bias_place(int ds_buffer) const {
    if constexpr (Traits::kBiasInDs) {
      return ptx::shared_address(smem.ds[ds_buffer]);
    } else {
      return ptx::shared_address(smem.bias);
    }
  }

  // Starts the copies of a step; zeros beyond the last query and key, and where there is no bias. Every lane is done
  // with what lies there.
  CUTLASS_DEVICE void start_bias(Step const& step, int ds_buffer) const {
    if constexpr (kBias) {
      const int row = lane >> 2, piece = lane & 3, square0 = part * kSquares;
      const int query = step.tile * kTileN + square0 * 32 + row, key = key0 + warp_key() + piece * 8;
      const int bytes = smem.start.bias == nullptr ? 0 : min(max(2 * (n.keys - key), 0), 16);
      Element const* from = smem.start.bias + offset(step.head, f.bias.stride_h) + offset(query, f.bias.stride_m) + key;
      const uint32_t to = bias_place(ds_buffer) + ScoreTile::at(warp_key() + row, square0 * 4 + piece);
      const int64_t eight_rows = offset(8, f.bias.stride_m);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSquares * 4; ++i) {
        ptx::copy_async((to ^ i / 4 * 64) + i % 4 * 8 * ScoreTile::kRowBytes, from,
                        query + i * 8 < n.queries ? bytes : 0);
        from += eight_rows;
      }
    }
  }

  CUTLASS_DEVICE float biased_weight(float s, float bias, float lse, float low) const {
    const float t = __fmaf_rn(s, f.scale, bias) - lse;
    return ptx::exp2_approx(ptx::min_or_nan(__fmaf_rn(t, kLog2e, -low), 0.f));  // P <= 1, NaN stays
  }

  // S -> P. query0: the first query of the scores in the tile.
  template <bool kMasked>
  CUTLASS_DEVICE void weigh_step(Scores& s, int ds_buffer, int query0, Seen const& seen) const {
    if constexpr (!kBias) {
      this->template weigh<kMasked>(s, smem.lse[ds_buffer] + query0, seen);
    } else {
      const uint32_t from = bias_place(ds_buffer) + ScoreTile::across_first(warp_key(), query0, lane);
      float const *lse = smem.lse[ds_buffer] + query0, *low = smem.lse_low[ds_buffer] + query0;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Scores::kTilesN; j += 2) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Scores::kTilesM; ++i) {
          uint32_t bias[4];  // keys 0-7 and 8-15 of tile j, then of tile j + 1
          ptx::load_matrices<true>(bias, (from ^ (j / 4 * 64 + i * 32)) + j / 2 % 2 * ScoreTile::kSixteenRows);
          CUTLASS_PRAGMA_UNROLL
          for (int k = 0; k < 4; ++k) {
            const int tile = j + k / 2, half = k % 2, column = tile * 8 + (lane & 3) * 2;
            const float2 of = this->statistic(lse, column), rest = this->statistic(low, column);
            const float2 two = unpack<Element>(bias[k]);
            float* x = &s.at[i][tile][2 * half];
            x[0] = biased_weight(x[0], two.x, of.x, rest.x);
            x[1] = biased_weight(x[1], two.y, of.y, rest.y);
            if (kMasked) {
              const uint32_t row = seen.rows[2 * i + half] >> 2 * tile;
              x[0] = (row & 1) != 0 ? x[0] : 0.f;
              x[1] = (row & 2) != 0 ? x[1] : 0.f;
            }
          }
        }
      }
    }
  }

  // --- dBias ---

  CUTLASS_DEVICE Element* bias_gradient(int head_member) const {
    GradBiasView const& to = p.grad_bias;
    const int group = int(head) / f.heads_per_group, member = int(head) % f.heads_per_group + head_member;
    return static_cast<Element*>(to.data) + offset(batch, to.stride_b) + offset(group, to.stride_g) +
           offset(member, to.stride_h);
  }
  // Eight keys of a query, as many as there are.
  CUTLASS_DEVICE void store_eight(Element* to, int query, int key, uint4 const& x) const {
    if (query >= n.queries || key >= n.keys) return;
    to += offset(query, p.grad_bias.stride_m) + key;
    if (args.bias_store == 8) {
      __stcs(reinterpret_cast<uint4*>(to), x);
      return;
    }
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 8; ++i) {
      if (key + i < n.keys) reinterpret_cast<uint16_t*>(to)[i] = uint16_t(pairs[i / 2] >> i % 2 * 16);
    }
  }

  // dS of this warp's keys and the queries of its scores, which this warp has stored.
  //
  // Matrix m of an ldmatrix.x4 has in its rows 2t, 2t + 1 keys 8t + 2q, 8t + 2q + 1, q = (m + t) % 4, so lane t of four
  // receives eight keys in a row from 8t on, in pairs q = t, t + 1, t + 2, t + 3 modulo 4; eight rows with all
  // remainders of 8 meet no bank twice.
  CUTLASS_DEVICE void write_bias(Step const& step, int ds_buffer, int query0) const {
    if constexpr (kBias) {
      if (args.bias_store == 0) return;
      __syncwarp();
      const int t = lane >> 1 & 3, pair = (lane >> 3) + t & 3;
      const uint32_t from = ptx::shared_address(smem.ds[ds_buffer]) +
                            ScoreTile::at(warp_key() + 8 * t + 2 * pair + (lane & 1), query0 / 8);
      Element* to = bias_gradient(step.head);
      const int query = step.tile * kTileN + query0 + (lane >> 2), key = key0 + warp_key() + (lane & 3) * 8;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Scores::kTilesN; ++i) {
        uint32_t x[4];
        ptx::load_matrices<true>(x, from ^ i * 16);
        store_eight(to, query + i * 8, key, in_order(x));
      }
    }
  }
  // x[m] is pair (m + t) % 4, t = lane % 4.
  CUTLASS_DEVICE uint4 in_order(uint32_t const (&x)[4]) const {
    const bool one = lane & 1, two = lane & 2;
    uint32_t y[4], z[4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) y[i] = one ? x[(i + 3) & 3] : x[i];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) z[i] = two ? y[(i + 2) & 3] : y[i];
    return make_uint4(z[0], z[1], z[2], z[3]);
  }
  // Zeros for queries first .. end of the block's keys.
  CUTLASS_DEVICE void clear_bias(int head_member, int first, int end) const {
    if constexpr (kBias) {
      if (args.bias_store == 0) return;
      constexpr int kPieces = Traits::kTileM / 8;
      Element* to = bias_gradient(head_member);
#pragma unroll 1
      for (int i = this->thread; i < (end - first) * kPieces; i += Traits::kThreads) {
        store_eight(to, first + i / kPieces, key0 + i % kPieces * 8, uint4{});
      }
    }
  }
};

}  // namespace registers
}  // namespace memeff
