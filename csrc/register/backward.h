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

#include "cutlass/arch/memory_sm80.h"
#include "register/backward_bias.h"

namespace memeff {
namespace registers {

template <typename Traits>
struct BackwardBlock : BiasedWarp<Traits> {
  using Warp = BiasedWarp<Traits>;
  using typename Warp::Element;
  using typename Warp::Gradient;
  using typename Warp::KeyTile;
  using typename Warp::QueryTile;
  using typename Warp::Scores;
  using typename Warp::ScoreWeights;
  using typename Warp::Seen;
  using typename Warp::Step;
  using HeadStart = typename Traits::HeadStart;
  using Warp::args;
  using Warp::batch;
  using Warp::f;
  using Warp::group;
  using Warp::head;
  using Warp::key0;
  using Warp::kParts;
  using Warp::kTileM;
  using Warp::kTileN;
  using Warp::lane;
  using Warp::n;
  using Warp::p;
  using Warp::part;
  using Warp::role;
  using Warp::see;
  using Warp::smem;
  using Warp::thread;
  using Warp::warp_key;
  static constexpr int kRoles = Traits::kRoles, kThreads = Traits::kThreads;
  static constexpr bool kDelayed = Traits::kDsBuffers == 2;  // dQ of a step is computed in the next one
  // Barriers of parts of the block; 0 is that of all.
  enum Barrier { kWeightsReady = 1, kWeightsShared = 5, kDsShared = 7 };

  uint32_t kv_group, kv_member;  // of the head
  int stored;                    // rows that the gradients have, <= 0: nothing to do
  int split;                     // part of the loop
  int first_tile, end;           // tiles of queries that see something of the keys
  int turn;                      // the tile that a head begins with
  int steps = 0;                 // this block's part of the loop
  Step before, now, next;

  CUTLASS_DEVICE BackwardBlock(BackwardArgs const& args_, typename Traits::SharedStorage& smem_) : Warp(args_, smem_) {
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
    turn = first_tile;
    if constexpr (Traits::kTurned) {
      turn += int(int64_t(found.tile) * per_head / ((n.keys + kTileM - 1) / kTileM));
    }
    before = now = {first_head, turn + first - first_head * per_head};
    if (now.tile >= end) now.tile -= per_head, before = now;
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
    start.delta = p.delta + this->row_of(problem, 0);
    if constexpr (Traits::kDropout) {
      if (!Traits::kBias || f.dropout.seed != nullptr)
        start.dropout = DropoutHead(f.dropout, problem.number() * f.heads + head);
    }
    if constexpr (Traits::kBias) {
      const int64_t statistic = start.lse - f.lse.data;
      start.lse_low = f.lse.low == nullptr ? nullptr : f.lse.low + statistic;
      start.bias = f.bias.data == nullptr
                       ? nullptr
                       : static_cast<Element const*>(f.bias.data) + head_offset(f.bias, batch, kv_group, kv_member);
    }
    return start;
  }
  CUTLASS_DEVICE Step after(Step step) const {
    if (++step.tile == end) step.tile = first_tile;
    if (step.tile == turn) ++step.head;
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
    float lse, delta, low = 0.f;
  };
  CUTLASS_DEVICE Statistics load_statistics(Step const& step) const {
    Statistics x{-negative_infinity(), 0.f};
    const int row = step.tile * kTileN + thread;
    if (thread < kTileN && row < n.queries) {
      x.lse = smem.start.lse[offset(step.head, f.lse.stride_h) + row];
      x.delta = smem.start.delta[offset(step.head, f.queries) + row];
      if constexpr (Traits::kBias) {
        if (smem.start.lse_low != nullptr) x.low = smem.start.lse_low[offset(step.head, f.lse.stride_h) + row];
      }
    }
    return x;
  }
  CUTLASS_DEVICE void store_statistics(Statistics const& x, int ds_buffer) const {
    if (thread >= kTileN) return;
    const bool sees = x.lse != negative_infinity();
    smem.lse[ds_buffer][thread] = !sees ? -negative_infinity() : Traits::kBias ? x.lse : x.lse * kLog2e;
    smem.delta[ds_buffer][thread] = sees ? x.delta : 0.f;
    if constexpr (Traits::kBias) smem.lse_low[ds_buffer][thread] = sees ? x.low * kLog2e : 0.f;
  }

  // --- one step ---

  // S -> marked weights; the generator runs beside the product.
  template <bool kMasked>
  CUTLASS_DEVICE void weigh_dropped(Scores& s, ScoreWeights& w, Seen& seen, int buffer, int ds_buffer,
                                    int query0) const {
    constexpr int kSteps = KeyTile::kColumns / 16;
    const int query = now.tile * kTileN + query0;
    const auto draw = this->draw_of(now.head);
    typename Warp::Marks marks;
    this->multiply_scores(s, buffer, query0, false, [&](int step) {
      CUTLASS_PRAGMA_UNROLL
      for (int call = step * Warp::kCalls / kSteps; call < (step + 1) * Warp::kCalls / kSteps; ++call) {
        this->draw_marks(marks, call, draw, query);
      }
    });
    if (kMasked) seen = this->find_seen(query);
    this->template weigh_step<kMasked>(s, ds_buffer, query0, seen);
    this->round(s, w);
    CUTLASS_PRAGMA_UNROLL
    for (int call = 0; call < Warp::kCalls; ++call) this->apply_marks(w, marks, call);
  }

  template <bool kMasked>
  CUTLASS_DEVICE void step_alone(Gradient& value, Gradient& key, int buffer, int ds_buffer) const {
#pragma unroll 1
    for (int query0 = 0; query0 < kTileN; query0 += Traits::kScoreWidth) {
      Scores s, dp;
      ScoreWeights w, ds;
      Seen seen;
      if constexpr (Traits::kDrawsBeside) {
        weigh_dropped<kMasked>(s, w, seen, buffer, ds_buffer, query0);
        this->multiply_scores(dp, buffer, query0, true);
      } else {
        this->multiply_scores(s, buffer, query0, false);
        this->multiply_scores(dp, buffer, query0, true);
        if (kMasked) seen = this->find_seen(now.tile * kTileN + query0);
        this->template weigh_step<kMasked>(s, ds_buffer, query0, seen);
        this->round(s, w);
        this->mark_dropped(w, now.head, now.tile * kTileN + query0);
      }
      if constexpr (Traits::kDropout) {
        this->template differentiate_dropped<kMasked>(dp, ds, smem.delta[ds_buffer] + query0, seen,
                                                      [&](int i, int j, int half) { return w.pair(i, j, half); });
        this->drop(w);
      } else {
        this->template differentiate<kMasked>(
            dp, ds, smem.delta[ds_buffer] + query0, seen,
            [&](int i, int j, int half) { return make_float2(s.at[i][j][2 * half], s.at[i][j][2 * half + 1]); });
      }
      if (Traits::kBiasInDs) __syncwarp();  // every lane has its bias
      this->store_ds(ds, ds_buffer, query0);
      this->add_gradient(value, w, buffer, query0, false);
      this->add_gradient(key, ds, buffer, query0, true);
      this->write_bias(now, ds_buffer, query0);
    }
  }

  // Role 0: S -> P, handed over; role 1: dP and these -> dS. w: operand A of the role's gradient.
  template <bool kMasked>
  CUTLASS_DEVICE void step_in_role(ScoreWeights& w, Scores& s, int ds_buffer, bool more) const {
    const int query0 = part * Traits::kScoreWidth, pair = kWeightsReady + group * kParts + part;
    Seen seen;
    if (kMasked) seen = this->find_seen(now.tile * kTileN + query0);
    if (role == 0) {
      this->template weigh_step<kMasked>(s, ds_buffer, query0, seen);
      if (Traits::kBias && more) {
        __syncwarp();  // every lane has its bias
        this->start_bias(next, 0);
        cutlass::arch::cp_async_fence();
      }
      this->round(s, w);
      this->mark_dropped(w, now.head, now.tile * kTileN + query0);
      this->hand_over(w, ds_buffer);
      ptx::arrive_threads(pair, 64);
      this->drop(w);
    } else {
      ptx::sync_threads(pair, 64);
      this->take_over(w, ds_buffer, part);
      const auto packed = [&](int i, int j, int half) { return w.pair(i, j, half); };
      if constexpr (Traits::kDropout) {
        this->template differentiate_dropped<kMasked>(s, w, smem.delta[ds_buffer] + query0, seen, packed);
      } else {
        this->template differentiate<kMasked>(s, w, smem.delta[ds_buffer] + query0, seen, [&](int i, int j, int half) {
          return unpack<Element>(packed(i, j, half));
        });
      }
      if (kParts == 1) __syncwarp();  // every lane has its P
      this->store_ds(w, ds_buffer, query0);
      this->write_bias(now, ds_buffer, query0);
    }
  }
  // The other half of the queries' weights, of this warp's role and keys.
  CUTLASS_DEVICE void other_part(ScoreWeights& w, int ds_buffer) const {
    ptx::sync_threads((role == 0 ? kWeightsShared : kDsShared) + group, 32 * kParts);
    if (role == 0) {
      this->take_over(w, ds_buffer, 1 - part);
      this->drop(w);
    } else {
      this->load_ds(w, ds_buffer, (1 - part) * Traits::kScoreWidth);
    }
  }

  CUTLASS_DEVICE void step_with_roles(Gradient& sums, int buffer, int ds_buffer, bool delayed, bool more) const {
    const bool of_key = role == 1, whole = this->all_visible(now.tile * kTileN);
    if (delayed && of_key) this->add_query_gradient(before, ds_buffer ^ 1);
    Scores s;
    ScoreWeights w;
    this->multiply_scores(s, buffer, part * Traits::kScoreWidth, of_key);
    if (whole) {
      step_in_role<false>(w, s, ds_buffer, more);
    } else {
      step_in_role<true>(w, s, ds_buffer, more);
    }
    if (delayed && !of_key) this->add_query_gradient(before, ds_buffer ^ 1);
    this->add_gradient(sums, w, buffer, part * Traits::kScoreWidth, of_key);
    if constexpr (kParts > 1) {
      other_part(w, ds_buffer);
      this->add_gradient(sums, w, buffer, (1 - part) * Traits::kScoreWidth, of_key);
    }
  }

  template <int kCount>
  CUTLASS_DEVICE void loop(Gradient (&sums)[kCount]) {
    start_keys();
    start_queries(now, 0);
    if (Traits::kBias && role == 0) this->start_bias(now, 0);
    cutlass::arch::cp_async_fence();
    store_statistics(load_statistics(now), 0);
    int buffer = 0;
    for (int step = 0; step < steps; ++step) {
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // operands, statistics and the last step's dS are there; the other buffers are used
      const bool more = step + 1 < steps;
      const int ds_buffer = kDelayed ? buffer : 0;
      Statistics statistics;
      if (more) {
        start_queries(next, buffer ^ 1);
        statistics = load_statistics(next);
      }
      cutlass::arch::cp_async_fence();
      if constexpr (kRoles == 1) {
        if (kDelayed && step > 0) this->add_query_gradient(before, ds_buffer ^ 1);
        if constexpr (Traits::kBiasInDs) {
          __syncthreads();  // every warp is done with dS of the last step
          if (more) this->start_bias(next, ds_buffer ^ 1);
          cutlass::arch::cp_async_fence();
        }
        if (this->all_visible(now.tile * kTileN)) {
          step_alone<false>(sums[0], sums[1], buffer, ds_buffer);
        } else {
          step_alone<true>(sums[0], sums[1], buffer, ds_buffer);
        }
      } else {
        step_with_roles(sums[0], buffer, ds_buffer, kDelayed && step > 0, more);
      }
      if (!kDelayed) __syncthreads();  // dS is there, the statistics are used
      if (more) store_statistics(statistics, kDelayed ? buffer ^ 1 : 0);
      if (!kDelayed) this->add_query_gradient(now, 0);
      buffer ^= 1;
      before = now, now = next, next = after(next);
    }
    __syncthreads();  // the last dS is there
    if (kDelayed) this->add_query_gradient(before, buffer ^ 1);
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

  // dBias of tiles that no step visits.
  CUTLASS_DEVICE void clear_unseen() const {
    for (int member = 0; member < p.heads_per_kv; ++member) {
      this->clear_bias(member, 0, first_tile * kTileN);
      this->clear_bias(member, end * kTileN, n.queries);
    }
  }

  CUTLASS_DEVICE void run() {
    if (stored <= 0) return;
    Gradient sums[kRoles == 1 ? 2 : 1];  // dV and dK, or the role's
    CUTLASS_PRAGMA_UNROLL
    for (auto& x : sums) x.clear();
    if (steps > 0) loop(sums);
    if (Traits::kBias && split == 0) clear_unseen();
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
