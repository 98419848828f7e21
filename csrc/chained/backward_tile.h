// What every backward kernel does with one pair of tiles: S and dP, then P and dS (backward_traits.h has the roles).
#pragma once

#include "chained/backward_traits.h"
#include "chained/streamed_product.h"
#include "common/bias.h"
#include "common/dropout.h"
#include "common/tile_map.h"
#include "common/visibility.h"

namespace memeff {
namespace chained {

struct BackwardArgs {
  BackwardParams p;
  uint32_t blocks;       // size of the grid
  uint32_t owner_heads;  // query heads, or key heads where keys own
  uint32_t owner_tiles, loop_tiles;
  uint32_t slabs;                                    // column slabs of the output
  uint32_t splits;                                   // parts of the loop
  cutlass::FastDivmod by_tiles, by_heads, by_group;  // owner_tiles, owner_heads, heads_per_group (tile_map.h)
  float exponent;                                    // scale * log2(e), the very number that the forward kernels use
  bool bias_pairs;
  int bias_copy;    // bytes of a copy to shared memory, 0: direct (common/bias.h)
  bool write_bias;  // the queries' kernel writes dBias too: every tile of it is one tile of dS
};

// A batch entry and a query head.
struct Head {
  uint32_t batch, head;
  uint32_t group, member;  // head = group * heads_per_group + member

  CUTLASS_DEVICE static Head of(uint32_t batch, uint32_t head, BackwardArgs const& args) {
    const Quotient by_group = divide(head, args.by_group);
    return {batch, head, by_group.quotient, by_group.rest};
  }
};

template <typename Traits>
struct BackwardTile {
  using Element = typename Traits::Element;
  using HeadStart = typename Traits::HeadStart;
  using Coord = typename Traits::CoordS;
  using FragmentS = typename Traits::FragmentS;
  using QkMma = typename Traits::QkMma;
  using OutMma = typename Traits::OutMma;
  using Source = TileSource<Element>;
  static constexpr int kTileM = Traits::kTileM, kTileN = Traits::kTileN;
  static constexpr bool kOwnerKeys = Traits::kOwnerKeys;

  // Rows row0 .. row0 + rows of one side: both of its operands.
  struct Side {
    Source first, second;
    int row0, rows;
  };

  BackwardArgs const& args;
  BackwardParams const& p;
  ForwardParams const& f;
  typename Traits::SharedStorage& smem;
  Problem const& n;       // in shared memory: seldom read, no registers
  Visibility const& see;  // likewise
  int thread, warp, lane;
  int warp_row, warp_column;  // this warp's place in the tile of scores
  int statistics0 = 0;        // where the tile's statistics start in shared memory

  CUTLASS_DEVICE BackwardTile(BackwardArgs const& args_, typename Traits::SharedStorage& smem_)
      : args(args_), p(args_.p), f(args_.p.forward), smem(smem_), n(smem_.n), see(smem_.see) {
    thread = threadIdx.x;
    warp = cutlass::canonical_warp_idx_sync();
    lane = thread & 31;
    warp_row = warp % Traits::kWarpsM * (kTileM / Traits::kWarpsM);
    warp_column = warp / Traits::kWarpsM * (kTileN / Traits::kWarpsN);
  }

  // What the block works on, before anything else: its sequence, and (not kBias) its first head.
  CUTLASS_DEVICE void set_problem(Problem const& problem, Head const& head) const {
    if (thread == 0) smem.start = start_of(problem, head);
    set_problem(problem);
  }
  CUTLASS_DEVICE void set_problem(Problem const& problem) const {
    if (thread == 0) {
      smem.n = problem;
      smem.see = Visibility(f, problem.queries, problem.keys);
    }
    __syncthreads();
  }

  CUTLASS_DEVICE HeadStart start_of(Problem const& problem, Head const& at) const {
    const auto begin = [&](TensorView const& view, int row) {
      return static_cast<Element const*>(view.data) + head_offset(view, at.batch, at.group, at.member) +
             offset(row, view.stride_m);
    };
    const int64_t statistic = head_offset(f.lse, at.batch, at.group, at.member) + problem.query_row;
    HeadStart start;
    start.query = begin(f.query, problem.query_row);
    start.grad_out = begin(p.grad_out, problem.query_row);
    start.key = begin(f.key, problem.key_row);
    start.value = begin(f.value, problem.key_row);
    start.lse = f.lse.data + statistic;
    start.lse_low = f.lse.low == nullptr ? nullptr : f.lse.low + statistic;
    start.delta = p.delta + offset(offset(at.batch, f.heads) + at.head, f.queries) + problem.query_row;
    const bool own = f.sequences.own_bias;
    start.bias = f.bias.data == nullptr ? nullptr
                                        : bias_at(f.bias, own ? problem.number() : at.batch, at.group, at.member,
                                                  own ? 0 : problem.query_row, own ? 0 : problem.key_row);
    if constexpr (Traits::kDropout) {
      if (f.dropout.seed != nullptr) start.dropout = DropoutHead(f.dropout, problem.number() * f.heads + at.head);
    }
    return start;
  }

  CUTLASS_DEVICE Side query_side(HeadStart const& at, int row0, int tile) const {
    const int rows = rows_of(n.queries - row0, tile);
    return {source(at.query, f.query, row0, rows, f.head_dim), source(at.grad_out, p.grad_out, row0, rows, f.value_dim),
            row0, rows};
  }
  CUTLASS_DEVICE Side key_side(HeadStart const& at, int row0, int tile) const {
    const int rows = rows_of(n.keys - row0, tile);
    return {source(at.key, f.key, row0, rows, f.head_dim), source(at.value, f.value, row0, rows, f.value_dim), row0,
            rows};
  }
  CUTLASS_DEVICE static int rows_of(int left, int tile) { return left < 0 ? 0 : left < tile ? left : tile; }
  CUTLASS_DEVICE static Source source(Element const* start, TensorView const& view, int row, int rows, int columns) {
    return {start + offset(row, view.stride_m), view.stride_m, rows, columns};
  }

  // lse and delta of kStatRows queries from row0 on. Barriers before and after are the caller's.
  CUTLASS_DEVICE void load_statistics(HeadStart const& at, int row0) const {
    for (int i = thread; i < Traits::kStatRows; i += Traits::kThreads) {
      const int row = row0 + i;
      float lse = -negative_infinity(), low = 0.f, delta = 0.f;
      if (row < n.queries) {
        const float natural = at.lse[row];
        if (natural != negative_infinity()) {
          lse = Traits::kBias ? natural : natural * kLog2e;
          if constexpr (Traits::kLow) {
            low = at.lse_low != nullptr ? at.lse_low[row] : 0.f;
            if (Traits::kExact) low = __fmaf_rn(natural, kLog2e, -lse) + __fmaf_rn(natural, kLog2eLow, low * kLog2e);
          }
          delta = at.delta[row];
        }
      }
      smem.lse[i] = lse;
      if constexpr (Traits::kLow) smem.lse_low[i] = low;
      smem.delta[i] = delta;
    }
  }

  // --- products ---

  // P or dS, as operand A of an output product.
  template <typename Ref>
  CUTLASS_DEVICE void store(FragmentS const& x, Ref operand) const {
    Traits::ProbabilityStore::store(x, operand.data(), operand.layout(), warp_row, warp_column, lane);
  }

  template <typename Buffer>
  CUTLASS_DEVICE static auto score_a(Buffer& buffer) {
    return typename QkMma::Base::TensorRefA{buffer.data(), Traits::QkStorage::LayoutA()};
  }
  template <typename Buffer>
  CUTLASS_DEVICE static auto score_b(Buffer& buffer) {
    return typename QkMma::Base::TensorRefB{buffer.data(), Traits::QkStorage::LayoutB()};
  }
  template <typename Buffer>
  CUTLASS_DEVICE static auto out_a(Buffer& buffer) {
    return typename OutMma::Base::TensorRefA{buffer.data(), Traits::OutStorage::LayoutA()};
  }
  // The same bytes as score_b's, read as B of an output product.
  template <typename Buffer>
  CUTLASS_DEVICE static auto out_b(Buffer& buffer) {
    return typename OutMma::Base::TensorRefB{buffer.data(), Traits::OutStorage::LayoutB()};
  }

  // Resident: starts the copies of one side's operands.
  CUTLASS_DEVICE void load_owner(Side const& side, int buffer = 0) const {
    auto& pair = smem.operands.owner[buffer];
    load_pair<typename Traits::QueryLoader>(side, score_a(pair.first), score_a(pair.second));
  }
  CUTLASS_DEVICE void load_loop(Side const& side, int buffer) const {
    auto& pair = smem.operands.loop[buffer];
    load_pair<typename Traits::KeyLoader>(side, score_b(pair.first), score_b(pair.second));
  }
  template <typename Loader, typename Ref>
  CUTLASS_DEVICE void load_pair(Side const& side, Ref to_first, Ref to_second) const {
    Loader first(to_first, thread), second(to_second, thread);
    first.start(side.first.data, side.first.row_stride, side.rows, f.head_dim);
    second.start(side.second.data, side.second.row_stride, side.rows, f.value_dim);
  }
  // In parts, one operand at a time by way of `place`: its copies start, and are split once they have landed.
  template <typename Loader, typename Ref>
  CUTLASS_DEVICE void start_parts(Source const& from, Ref to, void* place) const {
    Loader(to, place, thread).start(from.data, from.row_stride, from.rows, from.columns);
    cutlass::arch::cp_async_fence();
  }
  template <typename Loader, typename Ref>
  CUTLASS_DEVICE void finish_parts(Ref to, void* place) const {
    cutlass::arch::cp_async_wait<0>();
    Loader(to, place, thread).finish();
  }
  CUTLASS_DEVICE bool is_by_fma() const {  // as in the forward kernels
    if (f.head_dim <= Traits::kFmaDepth) return true;
    return f.head_dim <= Traits::kFewFmaDepth && are_few_scores(n.queries, n.keys);
  }
  CUTLASS_DEVICE void multiply_resident(FragmentS& s, FragmentS& dp, int buffer, int owner_buffer = 0) const {
    auto& loop = smem.operands.loop[buffer];
    auto& owner = smem.operands.owner[owner_buffer];
    const auto a1 = score_a(owner.first), a2 = score_a(owner.second);
    const auto b1 = score_b(loop.first), b2 = score_b(loop.second);
    s.clear();
    if (Traits::kFmaScores && is_by_fma()) {
      if constexpr (Traits::kFmaScores) multiply_by_fma(s, a1, b1, f.head_dim);
    } else if constexpr (!Traits::kFmaScores || Traits::kFmaDepth < Traits::Qk::kMaxK) {
      const QkMma scores(a1, b1, thread, warp, lane);
      scores(s, f.head_dim);
    }
    dp.clear();
    if constexpr (!Traits::kNeedsDp) return;
    if constexpr (Traits::kFmaScores) {  // so few products that fp32 rounds less than 3xTF32 does
      if (f.value_dim <= 4) {
        multiply_by_fma(dp, a2, b2, f.value_dim);
        return;
      }
    }
    const QkMma products(a2, b2, thread, warp, lane);
    products(dp, f.value_dim);
  }
  template <typename RefA, typename RefB>
  CUTLASS_DEVICE void multiply_by_fma(FragmentS& acc, RefA const& a, RefB const& b, int depth) const {
    Traits::FmaScores::add(acc, a.data(), a.layout(), b.data(), b.layout(), warp_row, warp_column, lane, depth);
  }

  // Streamed: `pass` is the started first product; ends behind a barrier after which the pipeline may be refilled.
  template <typename Product, typename Pass>
  CUTLASS_DEVICE void multiply_streamed(FragmentS& s, FragmentS& dp, Product& product, Pass& pass, Side const& owner,
                                        Side const& loop) const {
    product.finish(s, pass, owner.first, loop.first);
    __syncthreads();
    if constexpr (Traits::kNeedsDp) {
      pass = product.start(owner.second, loop.second);
      product.finish(dp, pass, owner.second, loop.second);
      __syncthreads();
    }
  }

  // --- S -> P, dP -> dS ---

  CUTLASS_DEVICE float weight(float s, int statistic) const {
    const float lse = smem.lse[statistic];
    float t = Traits::kBias ? s - lse : __fmaf_rn(s, args.exponent, -lse);
    if constexpr (Traits::kLow) t -= smem.lse_low[statistic];
    t = t > 0.f ? 0.f : t;  // P <= 1 whatever S rounds to (docs/decisions.md); NaN stays
    return exp2_of<Traits::kNearestExp>(Traits::kBias ? t * kLog2e : t);
  }

  // The same without the rounding errors of the exponent, each up to half an ulp of it: they show where few queries, or
  // queries that all err alike (scale = 0), decide over a gradient.
  CUTLASS_DEVICE float fine_weight(float s, int statistic) const {
    const float lse = smem.lse[statistic], low = smem.lse_low[statistic];
    const float x = Traits::kBias ? s : __fmul_rn(s, args.exponent);
    const float product_error = Traits::kBias ? 0.f : __fmaf_rn(s, args.exponent, -x);
    const float high = __fsub_rn(x, lse), t = __fsub_rn(high, low);
    if (t <= -151.f) return 0.f;  // errors of infinities are NaN
    float error = product_error + sum_error(x, -lse, high) + sum_error(high, -low, t);
    if (t > 0.f) return 1.f;  // as in weight()
    float power = t;
    if constexpr (Traits::kBias) {
      power = __fmul_rn(t, kLog2e);
      error = __fmaf_rn(error, kLog2e, __fmaf_rn(t, kLog2eLow, __fmaf_rn(t, kLog2e, -power)));
    }
    const float w = exp2_of<Traits::kNearestExp>(power);
    return __fmaf_rn(w, error * kLn2, w);
  }
  CUTLASS_DEVICE bool is_fine() const { return n.queries <= kFewQueries || f.scale == 0.f; }

  // The address of the bias of a query and a key.
  CUTLASS_DEVICE const char* bias_from(HeadStart const& at, int query, int key) const {
    return at.bias + (offset(query, f.bias.stride_m) + offset(key, f.bias.stride_n)) * bytes_of(f.bias.dtype);
  }

  // Starts the copy of the bias of two tiles, where it passes through shared memory. Visible behind a barrier.
  CUTLASS_DEVICE void start_bias(HeadStart const& at, Side const& owner, Side const& loop) const {
    if constexpr (Traits::kStageBias) {
      if (f.bias.data == nullptr || (!Traits::kStageAnyBias && args.bias_copy == 0)) return;
      const Side& queries = kOwnerKeys ? loop : owner;
      const int key0 = kOwnerKeys ? owner.row0 : loop.row0;
      copy_bias<Traits::kThreads, Traits::kBiasRowBytes>(smem.bias, f.bias, bias_from(at, queries.row0, key0),
                                                         args.bias_copy, queries.rows, n.keys - key0, thread);
      cutlass::arch::cp_async_fence();
    }
  }

  CUTLASS_DEVICE void add_bias_to(FragmentS& s, HeadStart const& at, Side const& owner, Side const& loop) const {
    if (f.bias.data == nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < FragmentS::kElements; ++e) s[e] *= f.scale;
      return;
    }
    if constexpr (Traits::kStageBias) {
      if (Traits::kStageAnyBias || args.bias_copy != 0) {
        add_staged_bias<Element, Coord, Traits::kBiasRowBytes, kOwnerKeys>(s, smem.bias, f.bias, f.scale, warp_row,
                                                                           warp_column, lane);
        return;
      }
    }
    if constexpr (!Traits::kStageAnyBias) {
      BiasTile bias;
      bias.data = kOwnerKeys ? bias_from(at, 0, owner.row0) : bias_from(at, owner.row0, 0);
      bias.stride_m = kOwnerKeys ? f.bias.stride_n : f.bias.stride_m;
      bias.stride_n = kOwnerKeys ? f.bias.stride_m : f.bias.stride_n;
      bias.dtype = f.bias.dtype;
      bias.pairs = !kOwnerKeys && args.bias_pairs;
      add_bias<Element, Coord>(s, bias, f.scale, warp_row, loop.row0 + warp_column, lane, owner.rows,
                               kOwnerKeys ? n.queries : n.keys);
    }
  }

  // Are all of both tiles' rows there, and does every query see every key?
  CUTLASS_DEVICE bool all_visible(Side const& owner, Side const& loop) const {
    const int query0 = kOwnerKeys ? loop.row0 : owner.row0, queries = kOwnerKeys ? kTileN : kTileM;
    const int key0 = kOwnerKeys ? owner.row0 : loop.row0, keys = kOwnerKeys ? kTileM : kTileN;
    return query0 + queries <= n.queries && key0 + keys <= see.limit(query0) && key0 >= see.first(query0 + queries - 1);
  }
  // Does some query see some key?
  CUTLASS_DEVICE bool any_visible(Side const& queries, Side const& keys) const {
    return keys.row0 < see.limit(queries.row0 + queries.rows - 1) && keys.row0 + keys.rows > see.first(queries.row0);
  }

  // s: raw products -> P, with dropped weights 0 where P is wanted; dp -> dS.
  CUTLASS_DEVICE void weigh(FragmentS& s, FragmentS& dp, HeadStart const& at, Side const& owner,
                            Side const& loop) const {
    if constexpr (Traits::kBias) add_bias_to(s, at, owner, loop);
    if constexpr (Traits::kFine) {
      if (is_fine()) {
        weigh_tile<true, true>(s, dp, at, owner, loop);
        return;
      }
    }
    if (all_visible(owner, loop)) {
      weigh_tile<false, false>(s, dp, at, owner, loop);
    } else {
      weigh_tile<true, false>(s, dp, at, owner, loop);
    }
  }

  // Columns [first, last) of a row's scores are visible; by predicate, not by arithmetic: what lies beyond the ends may
  // be anything (FAULTS B05, B42).
  struct Columns {
    int first, last;
  };
  CUTLASS_DEVICE Columns visible_columns(int row, Side const& owner, Side const& loop) const {
    const int at = owner.row0 + row;
    if (at >= (kOwnerKeys ? n.keys : n.queries)) return {0, 0};
    if (kOwnerKeys) return {see.first_query(at) - loop.row0, see.limit_query(at) - loop.row0};
    return {see.first(at) - loop.row0, see.limit(at) - loop.row0};
  }

  template <bool kMasked, bool kFine>
  CUTLASS_DEVICE void weigh_tile(FragmentS& s, FragmentS& dp, HeadStart const& at, Side const& owner,
                                 Side const& loop) const {
    Columns visible[Coord::kRows];
    if constexpr (kMasked) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Coord::kRows; ++i) visible[i] = visible_columns(warp_row + Coord::row(lane, i), owner, loop);
    }
    const auto element = [&](int i, int j, bool kept) {
      const int column = warp_column + Coord::column(lane, j);
      const int statistic = statistics0 + (kOwnerKeys ? column : warp_row + Coord::row(lane, i));
      float& x = s[Coord::index(i, j)];
      float& y = dp[Coord::index(i, j)];
      float w;
      if constexpr (kFine) {
        w = fine_weight(x, statistic);
      } else {
        w = weight(x, statistic);
      }
      if constexpr (Traits::kDropout) y = kept ? y * f.dropout.keep_scale : 0.f;
      float ds = w * (y - smem.delta[statistic]);
      if constexpr (kMasked) {
        const bool seen = column >= visible[i].first && column < visible[i].last;
        w = seen ? w : 0.f;
        ds = seen ? ds : 0.f;
      }
      x = Traits::kDropout && !kept ? 0.f : w;
      y = ds;
    };
    if constexpr (Traits::kDropout) {
      if (f.dropout.seed != nullptr) {
        each_cell<Coord, kOwnerKeys>(at.dropout, owner.row0 + warp_row, loop.row0 + warp_column, lane, element);
        return;
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Coord::kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Coord::kColumns; ++j) element(i, j, true);
    }
  }
};

}  // namespace chained
}  // namespace memeff
