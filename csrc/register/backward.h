// The kernel: dK and dV of a tile of keys, and what its keys add to dQ. One step (one tile of queries), time down, two
// roles and two buffers of dS:
//
//   copies           role 0                              role 1
//   Q, dO (j) arrive
//   ==================================================== barrier of the block: dS (j - 1) is there too
//   Q, dO (j + 1) |  S^T = K Q^T                         its part of dQ (j - 1) = dS K, added to the sums
//                 |  P = exp(S - lse) ---- P ------>     dP^T = V dO^T
//                 |  its part of dQ (j - 1)              dS = P (dP - delta) --> shared memory
//                 |  dV += P^T dO                        dK += dS^T Q
//
// Warps w and w + kRoleWarps sit on the same scheduler: what one of them does not leave to the tensor cores lies under
// the other's products.
#pragma once

#include "common/tile_map.h"
#include "cutlass/arch/memory_sm80.h"
#include "register/backward_traits.h"

namespace memeff {
namespace registers {

struct BackwardArgs {
  BackwardParams p;
  uint32_t blocks;                                   // size of the grid
  uint32_t splits;                                   // parts of the loop
  cutlass::FastDivmod by_tiles, by_heads, by_group;  // tiles of keys, key heads, heads_per_group (tile_map.h)
  float exponent;                                    // scale * log2(e), the very number that the forward kernels use
  int32_t sum_columns;                               // of query_sums
};

template <typename Traits>
struct BackwardBlock {
  using Element = typename Traits::Element;
  using HeadStart = typename Traits::HeadStart;
  using KeyTile = typename Traits::KeyTile;
  using QueryTile = typename Traits::QueryTile;
  using ScoreTile = typename Traits::ScoreTile;
  using Scores = typename Traits::Scores;
  using ScoreWeights = typename Traits::ScoreWeights;
  using Gradient = typename Traits::Gradient;
  static constexpr int kTileM = Traits::kTileM, kTileN = Traits::kTileN, kMaxK = Traits::kMaxK;
  static constexpr int kRoles = Traits::kRoles, kParts = Traits::kParts, kThreads = Traits::kThreads;
  static constexpr bool kDelayed = Traits::kDsBuffers == 2;  // dQ of a step is computed in the next one
  // Barriers of parts of the block; 0 is that of all.
  enum Barrier { kWeightsReady = 1, kWeightsShared = 5, kDsShared = 7 };

  // One step of the loop: a tile of the queries of one of the heads that share the keys.
  struct Step {
    int head, tile;
  };
  // Queries [first, last) of a tile see a key.
  struct Seen {
    int first, last;
  };

  BackwardArgs const& args;
  BackwardParams const& p;
  ForwardParams const& f;
  typename Traits::SharedStorage& smem;
  Problem const& n;       // in shared memory: seldom read, no registers
  Visibility const& see;  // likewise
  int thread, lane, warp;
  int role, group, part;           // of this warp
  uint32_t batch, head, kv_group;  // head: the first of the query heads that share the keys
  uint32_t kv_member;
  int key0, stored;     // first key of the tile; rows that the gradients have, <= 0: nothing to do
  int split;            // part of the loop
  int first_tile, end;  // tiles of queries that see something of the keys
  int steps = 0;        // this block's part of the loop
  Step before, now, next;

  CUTLASS_DEVICE BackwardBlock(BackwardArgs const& args_, typename Traits::SharedStorage& smem_)
      : args(args_), p(args_.p), f(args_.p.forward), smem(smem_), n(smem_.n), see(smem_.see) {
    thread = threadIdx.x;
    lane = thread & 31;
    warp = cutlass::canonical_warp_idx_sync();
    role = kRoles == 1 ? 0 : warp / Traits::kRoleWarps;
    const int of_role = kRoles == 1 ? warp : warp % Traits::kRoleWarps;
    group = of_role / kParts, part = of_role % kParts;
    uint32_t rest = blockIdx.x;
    split = 0;
    if (args.splits > 1) split = rest % args.splits, rest /= args.splits;
    const Quotient by_tiles = divide(rest, args.by_tiles), by_heads = divide(by_tiles.quotient, args.by_heads);
    batch = by_heads.quotient, head = by_heads.rest * p.heads_per_kv;
    const Quotient by_group = divide(head, args.by_group);
    kv_group = by_group.quotient, kv_member = by_group.rest;
    const Located found = locate_problem<true>(f, batch, kTileM, by_tiles.rest, true);
    if (thread == 0) {
      smem.n = found.problem;
      smem.see = Visibility(f, found.problem.queries, found.problem.keys);
      smem.start = start_of(found.problem);
    }
    __syncthreads();
    key0 = found.tile * kTileM;
    stored = min(n.key_rows - key0, kTileM);
    if (stored <= 0) return;
    const int keys = key_count();
    first_tile = see.first_query(key0) / kTileN;
    end = (see.limit_query(key0 + keys - 1) + kTileN - 1) / kTileN;
    if (keys == 0 || end < first_tile) end = first_tile;
    const int per_head = end - first_tile;
    const int64_t all = int64_t(per_head) * p.heads_per_kv;
    int first = 0;
    steps = int(all);
    if (args.splits > 1) {
      first = int(all * split / args.splits);
      steps = int(all * (split + 1) / args.splits) - first;
    }
    if (steps == 0) return;
    const int first_head = first > 0 ? first / per_head : 0;
    before = now = {first_head, first_tile + first - first_head * per_head};
    next = after(now);
  }

  CUTLASS_DEVICE HeadStart start_of(Problem const& problem) const {
    const auto begin = [&](TensorView const& view, int row) {
      return static_cast<Element const*>(view.data) + head_offset(view, batch, kv_group, kv_member) +
             offset(row, view.stride_m);
    };
    HeadStart start;
    start.query = begin(f.query, problem.query_row);
    start.grad_out = begin(p.grad_out, problem.query_row);
    start.key = begin(f.key, problem.key_row);
    start.value = begin(f.value, problem.key_row);
    start.lse = f.lse.data + head_offset(f.lse, batch, kv_group, kv_member) + problem.query_row;
    start.delta = p.delta + row_of(problem, 0);
    if constexpr (Traits::kDropout) start.dropout = DropoutHead(f.dropout, problem.number() * f.heads + head);
    return start;
  }
  // The first row of one of the sharing heads among all [B, H, M].
  CUTLASS_DEVICE int64_t row_of(Problem const& problem, int member) const {
    return offset(offset(batch, f.heads) + head + member, f.queries) + problem.query_row;
  }
  CUTLASS_DEVICE Step after(Step step) const {
    if (++step.tile == end) step.tile = first_tile, ++step.head;
    return step;
  }
  CUTLASS_DEVICE int key_count() const { return max(min(n.keys - key0, kTileM), 0); }

  // --- copies ---

  CUTLASS_DEVICE void start_keys() const {
    const int keys = key_count();
    copy_tile<KeyTile, kThreads>(ptx::shared_address(smem.key), smem.start.key + offset(key0, f.key.stride_m),
                                 f.key.stride_m, keys, f.head_dim, thread);
    copy_tile<KeyTile, kThreads>(ptx::shared_address(smem.value), smem.start.value + offset(key0, f.value.stride_m),
                                 f.value.stride_m, keys, f.value_dim, thread);
  }
  CUTLASS_DEVICE void start_queries(Step const& step, int buffer) const {
    const int row0 = step.tile * kTileN, rows = n.queries - row0;
    copy_tile<QueryTile, kThreads>(
        ptx::shared_address(smem.query[buffer]),
        smem.start.query + offset(step.head, f.query.stride_h) + offset(row0, f.query.stride_m), f.query.stride_m, rows,
        f.head_dim, thread);
    copy_tile<QueryTile, kThreads>(
        ptx::shared_address(smem.grad_out[buffer]),
        smem.start.grad_out + offset(step.head, p.grad_out.stride_h) + offset(row0, p.grad_out.stride_m),
        p.grad_out.stride_m, rows, f.value_dim, thread);
  }

  // lse and delta of a step on their way to shared memory: one query a thread.
  struct Statistics {
    float lse, delta;
  };
  CUTLASS_DEVICE Statistics load_statistics(Step const& step) const {
    Statistics x{-negative_infinity(), 0.f};
    const int row = step.tile * kTileN + thread;
    if (thread < kTileN && row < n.queries) {
      x.lse = smem.start.lse[offset(step.head, f.lse.stride_h) + row];
      x.delta = smem.start.delta[offset(step.head, f.queries) + row];
    }
    return x;
  }
  CUTLASS_DEVICE void store_statistics(Statistics const& x, int ds_buffer) const {
    if (thread >= kTileN) return;
    const bool sees = x.lse != negative_infinity();
    smem.lse[ds_buffer][thread] = sees ? x.lse * kLog2e : -negative_infinity();
    smem.delta[ds_buffer][thread] = sees ? x.delta : 0.f;
  }

  // --- scores ---

  CUTLASS_DEVICE int warp_key() const { return group * Traits::kWarpKeys; }

  // S^T of queries query0 .. of the tile (is_dp: dP^T).
  CUTLASS_DEVICE void multiply_scores(Scores& s, int buffer, int query0, bool is_dp) const {
    const uint32_t a = ptx::shared_address(is_dp ? smem.value : smem.key) + KeyTile::down_first(warp_key(), 0, lane);
    const uint32_t b = ptx::shared_address(is_dp ? smem.grad_out[buffer] : smem.query[buffer]) +
                       QueryTile::across_first(query0, 0, lane);
    s.clear();
    multiply_rows<Element, KeyTile, QueryTile>(s, a, b, is_dp ? f.value_dim : f.head_dim);
  }
  // dV += W dO (of_key: dK += W Q), W of queries query0 ..
  CUTLASS_DEVICE void add_gradient(Gradient& sums, ScoreWeights const& w, int buffer, int query0, bool of_key) const {
    const uint32_t b = ptx::shared_address(of_key ? smem.query[buffer] : smem.grad_out[buffer]) +
                       QueryTile::down_first(query0, part * Traits::kColumns, lane);
    multiply_weights<Element, QueryTile>(sums, w, b);
  }

  // Are all of both tiles' rows there, and does every query see every key?
  CUTLASS_DEVICE bool all_visible(int query0) const {
    return query0 + kTileN <= n.queries && key0 + kTileM <= see.limit(query0) && key0 >= see.first(query0 + kTileN - 1);
  }
  // The rows of this lane's scores: those of accumulators 2 * half of tile i are number 2 * i + half.
  CUTLASS_DEVICE void find_seen(Seen (&seen)[4], int query0) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int key = key0 + warp_key() + i * 8 + (lane >> 2);
      seen[i] = Seen{0, 0};
      if (key < n.keys) seen[i] = Seen{see.first_query(key) - query0, see.limit_query(key) - query0};
    }
  }

  CUTLASS_DEVICE float weight(float s, float lse) const {
    // P <= 1 whatever S rounds to (docs/decisions.md); NaN stays
    return ptx::exp2_approx(ptx::min_or_nan(__fmaf_rn(s, args.exponent, -lse), 0.f));
  }

  // Calls f(x, i, j, half, column, visible) for each pair of a lane's scores x[0], x[1]: a row and columns `column` and
  // the next of the tile. visible(e): of x[e].
  template <bool kMasked, typename F>
  CUTLASS_DEVICE void each_pair(Scores& s, int tile0, int query0, F each) const {
    Seen seen[4];
    if constexpr (kMasked) find_seen(seen, tile0);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Scores::kTilesN; ++j) {
      const int column = query0 + j * 8 + (lane & 3) * 2;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Scores::kTilesM; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const Seen row = seen[2 * i + half];
          each(&s.at[i][j][2 * half], i, j, half, column,
               [&](int e) { return !kMasked || (column + e >= row.first && column + e < row.last); });
        }
      }
    }
  }

  CUTLASS_DEVICE float2 statistic(float const* of_tile, int column) const {
    return *reinterpret_cast<float2 const*>(of_tile + column);
  }

  // S -> P, -P where it is dropped; also rounded. tile0: the tile's first query; query0: within it, the first of these
  // scores.
  template <bool kMasked>
  CUTLASS_DEVICE void weigh(Scores& s, ScoreWeights& w, int ds_buffer, int tile0, int query0) const {
    each_pair<kMasked>(s, tile0, query0, [&](float* x, int i, int j, int half, int column, auto visible) {
      const float2 lse = statistic(smem.lse[ds_buffer], column);
      const float first = weight(x[0], lse.x), second = weight(x[1], lse.y);
      x[0] = visible(0) ? first : 0.f;
      x[1] = visible(1) ? second : 0.f;
      if (!Traits::kDropout) w.pair(i, j, half) = pack<Element>(x[0], x[1]);
    });
    if constexpr (Traits::kDropout) {
      using Coord = SumsCoord<Scores>;
      DropoutHead draw = smem.start.dropout;
      draw.batch_head += now.head;
      each_cell<Coord, true>(draw, key0 + warp_key(), tile0 + query0, lane, [&](int i, int j, bool kept) {
        float& x = Coord::element(s, i, j);
        x = kept ? x : -x;
      });
      each_pair<false>(s, 0, 0, [&](float* x, int i, int j, int half, int, auto) {
        w.pair(i, j, half) = pack<Element>(x[0], x[1]);
      });
    }
  }
  // Dropped weights become 0.
  CUTLASS_DEVICE void drop(ScoreWeights& w) const {
    if constexpr (Traits::kDropout) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < ScoreWeights::kTilesM * ScoreWeights::kSteps * 4; ++i) {
        uint32_t& x = w.at[i / 4 / ScoreWeights::kSteps][i / 4 % ScoreWeights::kSteps][i % 4];
        x = positive_part<Element>(x);
      }
    }
  }

  // dS of one element; p < 0 (-0 too): dropped.
  CUTLASS_DEVICE float differentiated(float p, float dp, float delta) const {
    if constexpr (Traits::kDropout) dp = signbit(p) ? 0.f : dp * f.dropout.keep_scale;
    return (Traits::kDropout ? fabsf(p) : p) * (dp - delta);
  }
  // dP -> dS, rounded. weights(i, j, half): a pair of P.
  template <bool kMasked, typename F>
  CUTLASS_DEVICE void differentiate(Scores& dp, ScoreWeights& w, int ds_buffer, int tile0, int query0,
                                    F weights) const {
    each_pair<kMasked>(dp, tile0, query0, [&](float* x, int i, int j, int half, int column, auto visible) {
      const float2 delta = statistic(smem.delta[ds_buffer], column), two = weights(i, j, half);
      const float first = differentiated(two.x, x[0], delta.x), second = differentiated(two.y, x[1], delta.y);
      w.pair(i, j, half) = pack<Element>(visible(0) ? first : 0.f, visible(1) ? second : 0.f);
    });
  }

  // dS^T of this warp's keys and queries query0 .., to shared memory.
  CUTLASS_DEVICE void store_ds(ScoreWeights const& w, int ds_buffer, int query0) const {
    const uint32_t to = ptx::shared_address(smem.ds[ds_buffer]) + ScoreTile::down_first(warp_key(), query0, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < ScoreWeights::kTilesM; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < ScoreWeights::kSteps; ++step) {
        ptx::store_matrices((to ^ sixteen_columns(step)) + i * ScoreTile::kSixteenRows, w.at[i][step]);
      }
    }
  }
  // The same the other way.
  CUTLASS_DEVICE void load_ds(ScoreWeights& w, int ds_buffer, int query0) const {
    const uint32_t from = ptx::shared_address(smem.ds[ds_buffer]) + ScoreTile::down_first(warp_key(), query0, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < ScoreWeights::kTilesM; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < ScoreWeights::kSteps; ++step) {
        ptx::load_matrices<false>(w.at[i][step], (from ^ sixteen_columns(step)) + i * ScoreTile::kSixteenRows);
      }
    }
  }

  // Where a warp of role 0 leaves P for others: registers by lane. One part: dS of the same keys lies there afterwards.
  CUTLASS_DEVICE uint4* weights_place(int ds_buffer, int of_part) const {
    constexpr int kPieces = Traits::kWarpKeys * Traits::kScoreWidth / 8;  // of 16 bytes, of one warp
    uint4* place = reinterpret_cast<uint4*>(smem.ds[ds_buffer]);
    if constexpr (kParts > 1) place = smem.p;
    return place + (group * kParts + of_part) * kPieces + lane;
  }
  CUTLASS_DEVICE void hand_over(ScoreWeights const& w, int ds_buffer) const {
    uint4* to = weights_place(ds_buffer, part);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * ScoreWeights::kSteps; ++i) {
      to[i * 32] = reinterpret_cast<uint4 const&>(w.at[i / ScoreWeights::kSteps][i % ScoreWeights::kSteps]);
    }
  }
  CUTLASS_DEVICE void take_over(ScoreWeights& w, int ds_buffer, int of_part) const {
    uint4 const* from = weights_place(ds_buffer, of_part);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * ScoreWeights::kSteps; ++i) {
      reinterpret_cast<uint4&>(w.at[i / ScoreWeights::kSteps][i % ScoreWeights::kSteps]) = from[i * 32];
    }
  }

  // --- dQ ---

  // This warp's part of dQ = dS K of a step: added to the sums.
  CUTLASS_DEVICE void add_query_gradient(Step const& step, int ds_buffer) const {
    if (p.query_sums == nullptr) return;
    const int row0 = warp % Traits::kQueryGroups * 32;
    const int column0 = warp / Traits::kQueryGroups * Traits::kQueryColumns;
    const uint32_t a = ptx::shared_address(smem.ds[ds_buffer]) + ScoreTile::across_first(0, row0, lane);
    const int row = step.tile * kTileN + row0 + (lane >> 2);
    float* to = p.query_sums + offset(row_of(n, step.head) + row, args.sum_columns) + column0 + (lane & 3) * 4;
    CUTLASS_PRAGMA_UNROLL
    for (int column = 0; column < Traits::kQueryColumns; column += Traits::kQueryStep) {
      const uint32_t b = ptx::shared_address(smem.key) + KeyTile::down_first(0, column0 + column, lane);
      typename Traits::QueryGradient sums;
      sums.clear();
      multiply_columns<Element, ScoreTile, KeyTile>(sums, a, b);
      add_to_sums(sums, to + column, n.queries - row, args.sum_columns - column0 - column);
    }
  }
  // A row's 16 columns lie as the lanes hold them: c = 8 j + 2 t + e at 4 t + 2 j + e (reduce/query_gradient.cu).
  CUTLASS_DEVICE void add_to_sums(typename Traits::QueryGradient const& sums, float* to, int rows, int columns) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Traits::QueryGradient::kTilesN; j += 2) {
        float const* low = &sums.at[i / 2][j][i % 2 * 2];
        float const* high = &sums.at[i / 2][j + 1][i % 2 * 2];
        if (i * 8 < rows && j * 8 < columns) {
          ptx::add_to_global(to + offset(i * 8, args.sum_columns) + j * 8, low[0], low[1], high[0], high[1]);
        }
      }
    }
  }

  // --- one step ---

  template <bool kMasked>
  CUTLASS_DEVICE void step_alone(Gradient& value, Gradient& key, int buffer, int ds_buffer) const {
    const int tile0 = now.tile * kTileN;
#pragma unroll 1
    for (int query0 = 0; query0 < kTileN; query0 += Traits::kScoreWidth) {
      Scores s, dp;
      multiply_scores(s, buffer, query0, false);
      multiply_scores(dp, buffer, query0, true);
      ScoreWeights w, ds;
      weigh<kMasked>(s, w, ds_buffer, tile0, query0);
      drop(w);
      differentiate<kMasked>(dp, ds, ds_buffer, tile0, query0, [&](int i, int j, int half) {
        return make_float2(s.at[i][j][2 * half], s.at[i][j][2 * half + 1]);
      });
      store_ds(ds, ds_buffer, query0);
      add_gradient(value, w, buffer, query0, false);
      add_gradient(key, ds, buffer, query0, true);
    }
  }

  template <bool kMasked>
  CUTLASS_DEVICE void step_in_role(ScoreWeights& w, Scores& s, int ds_buffer) const {
    const int tile0 = now.tile * kTileN, query0 = part * Traits::kScoreWidth;
    const int pair = kWeightsReady + group * kParts + part;
    if (role == 0) {
      weigh<kMasked>(s, w, ds_buffer, tile0, query0);
      hand_over(w, ds_buffer);
      ptx::arrive_threads(pair, 64);
      drop(w);
    } else {
      ptx::sync_threads(pair, 64);
      take_over(w, ds_buffer, part);
      differentiate<kMasked>(s, w, ds_buffer, tile0, query0,
                             [&](int i, int j, int half) { return unpack<Element>(w.pair(i, j, half)); });
      if (kParts == 1) __syncwarp();  // every lane has its P
      store_ds(w, ds_buffer, query0);
    }
  }
  // The other half of the queries' weights, of this warp's role and keys.
  CUTLASS_DEVICE void other_part(ScoreWeights& w, int ds_buffer) const {
    ptx::sync_threads((role == 0 ? kWeightsShared : kDsShared) + group, 32 * kParts);
    if (role == 0) {
      take_over(w, ds_buffer, 1 - part);
      drop(w);
    } else {
      load_ds(w, ds_buffer, (1 - part) * Traits::kScoreWidth);
    }
  }

  CUTLASS_DEVICE void step_with_roles(Gradient& sums, int buffer, int ds_buffer, bool delayed) const {
    const bool of_key = role == 1;
    if (delayed && of_key) add_query_gradient(before, ds_buffer ^ 1);
    Scores s;
    ScoreWeights w;
    multiply_scores(s, buffer, part * Traits::kScoreWidth, of_key);
    if (all_visible(now.tile * kTileN)) {
      step_in_role<false>(w, s, ds_buffer);
    } else {
      step_in_role<true>(w, s, ds_buffer);
    }
    if (delayed && !of_key) add_query_gradient(before, ds_buffer ^ 1);
    add_gradient(sums, w, buffer, part * Traits::kScoreWidth, of_key);
    if constexpr (kParts > 1) {
      other_part(w, ds_buffer);
      add_gradient(sums, w, buffer, (1 - part) * Traits::kScoreWidth, of_key);
    }
  }

  template <int kCount>
  CUTLASS_DEVICE void loop(Gradient (&sums)[kCount]) {
    start_keys();
    start_queries(now, 0);
    cutlass::arch::cp_async_fence();
    store_statistics(load_statistics(now), 0);
    int buffer = 0;
    for (int step = 0; step < steps; ++step) {
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // operands, statistics and the last step's dS are there; the other buffers are used
      const bool more = step + 1 < steps;
      Statistics statistics;
      if (more) {
        start_queries(next, buffer ^ 1);
        statistics = load_statistics(next);
      }
      cutlass::arch::cp_async_fence();
      const int ds_buffer = kDelayed ? buffer : 0;
      if constexpr (kRoles == 1) {
        if (kDelayed && step > 0) add_query_gradient(before, ds_buffer ^ 1);
        if (all_visible(now.tile * kTileN)) {
          step_alone<false>(sums[0], sums[1], buffer, ds_buffer);
        } else {
          step_alone<true>(sums[0], sums[1], buffer, ds_buffer);
        }
      } else {
        step_with_roles(sums[0], buffer, ds_buffer, kDelayed && step > 0);
      }
      if (!kDelayed) __syncthreads();  // dS is there, the statistics are used
      if (more) store_statistics(statistics, kDelayed ? buffer ^ 1 : 0);
      if (!kDelayed) add_query_gradient(now, 0);
      buffer ^= 1;
      before = now, now = next, next = after(next);
    }
    __syncthreads();  // the last dS is there
    if (kDelayed) add_query_gradient(before, buffer ^ 1);
  }

  // --- dK, dV ---

  CUTLASS_DEVICE void store_gradient(Gradient const& sums, bool of_key, float scale) const {
    GradView const& view = of_key ? p.grad_key : p.grad_value;
    if (view.data == nullptr) return;  // not wanted
    const int width = of_key ? f.head_dim : f.value_dim;
    const int64_t at = head_offset(view, batch, kv_group, kv_member) + offset(n.key_row + key0, view.stride_m);
    if (view.splits > 1) {
      store_partial(sums, static_cast<float*>(view.data) + offset(split, view.stride_split) + at, view.stride_m, width,
                    scale);
      return;
    }
    char* tile = of_key ? smem.key : smem.value;
    const uint32_t to = ptx::shared_address(tile) + KeyTile::down_first(warp_key(), part * Traits::kColumns, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Gradient::kTilesN; j += 2) {
        uint32_t x[4];
        CUTLASS_PRAGMA_UNROLL
        for (int k = 0; k < 4; ++k) {
          float const* two = &sums.at[i][j + k / 2][k % 2 * 2];
          x[k] = pack<Element>(two[0] * scale, two[1] * scale);
        }
        ptx::store_matrices((to ^ sixteen_columns(j / 2)) + i * KeyTile::kSixteenRows, x);
      }
    }
    __syncwarp();
    constexpr int kPieces = Traits::kColumns / 8;
    static_assert(32 % kPieces == 0 || kPieces == 32, "a warp writes whole rows");
    Element* data = static_cast<Element*>(view.data) + at;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < Traits::kWarpKeys; first += 32 / kPieces) {
      const int row = warp_key() + first + lane / kPieces;
      const int piece = part * kPieces + lane % kPieces;
      if (row < stored && piece * 8 < width) {
        *reinterpret_cast<uint4*>(data + offset(row, view.stride_m) + piece * 8) =
            *reinterpret_cast<uint4 const*>(tile + KeyTile::at(row, piece));
      }
    }
  }
  CUTLASS_DEVICE void store_partial(Gradient const& sums, float* data, int64_t stride, int width, float scale) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = warp_key() + i * 8 + (lane >> 2);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Gradient::kTilesN; ++j) {
        const int column = part * Traits::kColumns + j * 8 + (lane & 3) * 2;
        float const* two = &sums.at[i / 2][j][i % 2 * 2];
        if (row < stored && column < width) {
          *reinterpret_cast<float2*>(data + offset(row, stride) + column) = make_float2(two[0] * scale, two[1] * scale);
        }
      }
    }
  }

  CUTLASS_DEVICE void run() {
    if (stored <= 0) return;
    Gradient sums[kRoles == 1 ? 2 : 1];  // dV and dK, or the role's
    CUTLASS_PRAGMA_UNROLL
    for (auto& x : sums) x.clear();
    if (steps > 0) loop(sums);
    __syncthreads();  // K and V are used
    if constexpr (kRoles == 1) {
      store_gradient(sums[0], false, f.dropout.keep_scale);
      store_gradient(sums[1], true, f.scale);
    } else {
      store_gradient(sums[0], role == 1, role == 1 ? f.scale : f.dropout.keep_scale);
    }
  }
};

}  // namespace registers
}  // namespace memeff
