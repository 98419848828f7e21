// Short sequences, backward: one block a (batch entry, head) makes dQ, dK and dV. Q, K, V, dO lie whole in shared
// memory; strips of queries (dQ) and of keys (dK and dV), 16 or 32 of them, are the items that its warps take, one
// after the other. An item is all in registers: its own rows are operand A of S and dP (or of their transposes), P and
// dS become operand A of the output products as they lie. No atomics, nothing but gradients is written: the same bits
// on every run.
//
//   strip of queries, a part of the keys at a time        strip of keys, a part of the queries at a time
//     S = Q K^T    dP = dO V^T                              S^T = K Q^T    dP^T = V dO^T
//     P = exp(S - lse)                                      P^T = exp(S^T - lse)
//     dS = P (dP - delta)                                   dS^T = P^T (dP^T - delta)
//     dQ += dS K                                            dV += P^T dO   dK += dS^T Q
#pragma once

#include "common/tile_map.h"
#include "register/strip.h"

namespace memeff {
namespace registers {

// kLength: the longest M and N. kMaxK: the largest K and Kv. kPart: rows of the other side at a time, what is left of
// kLength is one of 16. kStrips: of 16 rows, of an item.
template <typename Element_, int kLength_, int kMaxK_, int kPart_, int kStrips_, int kWarps_, int kBlocksPerSm_>
struct ShortBackwardTraits {
  using Element = Element_;
  static constexpr int kLength = kLength_, kMaxK = kMaxK_, kPart = kPart_, kStrips = kStrips_, kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kTileM = kLength, kTileN = kLength, kValueTile = kMaxK;
  static constexpr int kOperandBytes = kLength * Rows<kMaxK>::kRowBytes;
  struct SharedStorage {
    alignas(128) char operands[4][kOperandBytes];  // of enum Operand
    float lse[kLength];                            // times log2(e); +inf: the query has no weights
    float delta[kLength];
    int taken;  // items that warps have taken
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(sizeof(Element) == 2 && kLength % 16 == 0 && kMaxK % 16 == 0, "whole steps of m16n8k16");
  static_assert(kStrips * (kMaxK * 3 / 2 + kPart) <= 224, "dK, dV, their own rows, S and dP fit a lane's registers");
  static_assert(kSmemBytes <= 227 * 1024, "no GPU gives a thread block more than 227 KiB of shared memory");
};

struct ShortBackwardArgs {
  BackwardParams p;
  TileMap map;
  float exponent;  // scale * log2(e), the very number that the forward kernels use
};

template <typename Traits>
struct ShortBackwardBlock {
  using Element = typename Traits::Element;
  static constexpr int kMaxK = Traits::kMaxK, kLength = Traits::kLength, kPart = Traits::kPart;
  static constexpr int kStrips = Traits::kStrips, kRows = 16 * kStrips;
  enum Operand { kQuery, kKey, kValue, kGradOut };
  using Own = QueryFragment<Element, kStrips, kMaxK>;
  using Output = StripFragment<kStrips, kMaxK>;
  template <int kColumns>
  using Scores = StripFragment<kStrips, kColumns>;

  ShortBackwardArgs const& args;
  BackwardParams const& p;
  ForwardParams const& f;
  typename Traits::SharedStorage& smem;
  int thread, lane;
  TileCoord at;
  Visibility see;

  CUTLASS_DEVICE ShortBackwardBlock(ShortBackwardArgs const& args_, typename Traits::SharedStorage& smem_)
      : args(args_), p(args_.p), f(args_.p.forward), smem(smem_), see(f, f.queries, f.keys) {
    thread = threadIdx.x;
    lane = thread & 31;
    at = locate(args.map, blockIdx.x);
  }

  // --- what the block reads ---

  CUTLASS_DEVICE void start_operand(Operand which, TensorView const& view, int rows, int columns) const {
    auto const* from = static_cast<Element const*>(view.data) + head_offset(view, at.batch, at.group, at.member);
    copy_rows<Rows<kMaxK>, Traits::kThreads, kLength>(smem.operands[which], from, view.stride_m, rows, columns, thread);
  }

  CUTLASS_DEVICE void load() const {
    start_operand(kQuery, f.query, f.queries, f.head_dim);
    start_operand(kKey, f.key, f.keys, f.head_dim);
    start_operand(kValue, f.value, f.keys, f.value_dim);
    start_operand(kGradOut, p.grad_out, f.queries, f.value_dim);
    cutlass::arch::cp_async_fence();
    float const* lse = f.lse.data + head_offset(f.lse, at.batch, at.group, at.member);
    float const* delta = p.delta + offset(offset(at.batch, f.heads) + at.head, f.queries);
    for (int row = thread; row < kLength; row += Traits::kThreads) {
      const float natural = row < f.queries ? lse[row] : negative_infinity();
      const bool weighs = natural != negative_infinity();
      smem.lse[row] = weighs ? natural * kLog2e : -negative_infinity();
      smem.delta[row] = weighs ? delta[row] : 0.f;
    }
    if (thread == 0) smem.taken = 0;
    cutlass::arch::cp_async_wait<0>();
    __syncthreads();
  }

  CUTLASS_DEVICE uint32_t rows_at(Operand which, int row) const {
    return ptx::shared_address(smem.operands[which]) + row * Rows<kMaxK>::kRowBytes;
  }

  // --- one part of an item ---

  // s = own rows times rows [row0, row0 + kColumns) of an operand, transposed.
  template <int kColumns>
  CUTLASS_DEVICE void multiply(Scores<kColumns>& s, Own const& own, Operand which, int row0) const {
    const KeyReader<Element, kStrips, kMaxK> reader(rows_at(which, row0), lane);
    s.clear();
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kColumns / 8; ++tile) reader.multiply(&s[4 * kStrips * tile], own, tile);
  }

  CUTLASS_DEVICE float weight(float s, float lse) const {
    const float t = __fmaf_rn(s, args.exponent, -lse);
    return ptx::exp2_approx(t > 0.f ? 0.f : t);  // P <= 1 whatever S rounds to (docs/decisions.md); NaN stays
  }

  // s -> P, dp -> dS, both rounded, pairs as multiply_values takes them. kKeys: rows are keys, columns queries; the
  // fragment starts at row0, column0. kMasked: by predicate, not by arithmetic, what lies beyond may be anything.
  template <bool kKeys, bool kMasked, int kColumns>
  CUTLASS_DEVICE void weigh(Scores<kColumns>& s, Scores<kColumns>& dp, int row0, int column0) const {
    using Coord = StripCoord<kStrips, kColumns>;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Coord::kRows; ++i) {
      const int row = row0 + Coord::row(lane, i);
      int first = 0, limit = 0;
      if constexpr (kMasked) {
        first = (kKeys ? see.first_query(row) : see.first(row)) - column0;
        limit = (kKeys ? see.limit_query(row) : see.limit(row)) - column0;
      }
      float2 lse, delta;
      if constexpr (!kKeys) lse.x = lse.y = smem.lse[row], delta.x = delta.y = smem.delta[row];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Coord::kColumns; j += 2) {
        const int column = Coord::column(lane, j);
        if constexpr (kKeys) {
          lse = *reinterpret_cast<float2 const*>(&smem.lse[column0 + column]);
          delta = *reinterpret_cast<float2 const*>(&smem.delta[column0 + column]);
        }
        float& x = s[Coord::index(i, j)];
        float& y = dp[Coord::index(i, j)];
        float2 w = make_float2(weight(x, lse.x), weight(s[Coord::index(i, j + 1)], lse.y));
        float2 ds = make_float2(w.x * (y - delta.x), w.y * (dp[Coord::index(i, j + 1)] - delta.y));
        if constexpr (kMasked) {
          const bool sees_low = column >= first && column < limit,
                     sees_high = column + 1 >= first && column + 1 < limit;
          w = make_float2(sees_low ? w.x : 0.f, sees_high ? w.y : 0.f);
          ds = make_float2(sees_low ? ds.x : 0.f, sees_high ? ds.y : 0.f);
        }
        if constexpr (kKeys) x = __uint_as_float(pack<Element>(w.x, w.y));
        y = __uint_as_float(pack<Element>(ds.x, ds.y));
      }
    }
  }

  template <bool kKeys, int kColumns>
  CUTLASS_DEVICE void weigh_where_seen(Scores<kColumns>& s, Scores<kColumns>& dp, int row0, int column0) const {
    const bool ends = !kKeys && column0 + kColumns > f.keys;  // queries beyond the end have no weights anyway
    if (f.anchor != Anchor::kNone || ends) {
      weigh<kKeys, true, kColumns>(s, dp, row0, column0);
    } else {
      weigh<kKeys, false, kColumns>(s, dp, row0, column0);
    }
  }

  // --- items ---

  CUTLASS_DEVICE void store(GradView const& view, Output const& x, int row, int rows, int columns, float scale) const {
    auto* to = static_cast<Element*>(view.data) + head_offset(view, at.batch, at.group, at.member) +
               offset(row, view.stride_m);
    float factor[2 * kStrips];
    bool dead[2 * kStrips];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kStrips; ++i) factor[i] = scale, dead[i] = false;
    store_rows<Element, kStrips, kMaxK>(to, view.stride_m, x, factor, dead, rows - row, columns, lane);
  }

  CUTLASS_DEVICE void make_query_gradient(int row) const {
    Own query, grad_out;
    query.load(rows_at(kQuery, row), lane);
    grad_out.load(rows_at(kGradOut, row), lane);
    Output dq;
    dq.clear();
    const int last = row + kRows <= f.queries ? row + kRows - 1 : f.queries - 1;
    each_part<kPart, kLength>(see.first(row), see.limit(last), [&](int key, auto width) {
      Scores<width> s, dp;
      multiply<width>(s, query, kKey, key);
      multiply<width>(dp, grad_out, kValue, key);
      weigh_where_seen<false, width>(s, dp, row, key);
      multiply_values<Element, kStrips, width, kMaxK>(dq, dp, rows_at(kKey, key), lane);
    });
    store(p.grad_query, dq, row, f.queries, f.head_dim, f.scale);
  }

  CUTLASS_DEVICE void make_key_gradients(int row) const {
    Own key, value;
    key.load(rows_at(kKey, row), lane);
    value.load(rows_at(kValue, row), lane);
    Output dk, dv;
    dk.clear();
    dv.clear();
    const int last = row + kRows <= f.keys ? row + kRows - 1 : f.keys - 1;
    each_part<kPart, kLength>(see.first_query(row), see.limit_query(last), [&](int query, auto width) {
      Scores<width> s, dp;
      multiply<width>(s, key, kQuery, query);
      multiply<width>(dp, value, kGradOut, query);
      weigh_where_seen<true, width>(s, dp, row, query);
      multiply_values<Element, kStrips, width, kMaxK>(dv, s, rows_at(kGradOut, query), lane);
      multiply_values<Element, kStrips, width, kMaxK>(dk, dp, rows_at(kQuery, query), lane);
    });
    if (p.grad_key.data != nullptr) store(p.grad_key, dk, row, f.keys, f.head_dim, f.scale);
    if (p.grad_value.data != nullptr) store(p.grad_value, dv, row, f.keys, f.value_dim, 1.f);
  }

  // The last strip ends with the tile; rows that it shares with the one before are written twice, the same bits.
  CUTLASS_DEVICE static int first_row(int strip) {
    return kRows * strip < kLength - kRows ? kRows * strip : kLength - kRows;
  }

  // The next item that no warp has taken.
  CUTLASS_DEVICE int take() const {
    int item = 0;
    if (lane == 0) item = atomicAdd(&smem.taken, 1);
    return __shfl_sync(0xffffffffu, item, 0);
  }

  CUTLASS_DEVICE void run() const {
    load();
    // Strips of keys first: they are the longer items.
    const int keys = p.grad_key.data != nullptr || p.grad_value.data != nullptr ? (f.keys + kRows - 1) / kRows : 0;
    const int queries = p.grad_query.data != nullptr ? (f.queries + kRows - 1) / kRows : 0;
#pragma unroll 1
    for (int item = take(); item < keys + queries; item = take()) {
      if (item < keys) {
        make_key_gradients(first_row(item));
      } else {
        make_query_gradient(first_row(item - keys));
      }
    }
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    short_backward_kernel(__grid_constant__ const ShortBackwardArgs args) {
  extern __shared__ __align__(128) char memory[];
  ShortBackwardBlock<Traits>(args, *reinterpret_cast<typename Traits::SharedStorage*>(memory)).run();
}

}  // namespace registers
}  // namespace memeff
