// The forward kernel of K and Kv beyond 256 on wgmma and TMA: one warp copies, two warpgroups compute. Each slab of
// value columns has blocks of its own, which compute S anew; Q stays in shared memory, keys and values pass
// through one ring in the order in which they are needed. n runs from the last key block to the first:
//
//   ring         K(n) .. .. .. .. | K(n-1) .. .. .. .. | V(n) .. | K(n-2) .. .. .. .. | V(n-1) .. | ...
//   warpgroup    S(n) softmax(n)    S(n-1)               O += P(n) V(n)
//                                                        softmax(n-1)                  ...
//
// A stage goes back when its products are done: in S all but the newest have been waited for. The warpgroups run ahead
// as far as the ring, and turns where a row has them, let them: one's softmax falls beside the other's products.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "hopper/output.h"
#include "hopper/slab_traits.h"
#include "hopper/warpgroup_rows.h"

namespace memeff {
namespace hopper {

template <typename Traits>
struct SlabBlock {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using CoordS = typename Traits::CoordS;
  using Rows = WarpgroupRows<Traits>;
  using Place = Ring<Traits::kStages>;
  static constexpr int kTileM = Traits::kTileM, kTileN = Traits::kTileN, kConsumers = Traits::kConsumers;
  static constexpr int kStageChunks = Traits::kStageChunks, kKeyChunkBytes = Traits::kKeyChunkBytes;
  using Scores = Accumulators<kTileN>;
  using Outputs = Accumulators<Traits::kWidth>;
  using Weights = uint32_t[Traits::kScores / 2];

  ForwardArgs const& args;
  ForwardParams const& p;
  SharedStorage& smem;
  int thread, warp, lane;  // within the warpgroup
  int consumer;            // -1 in the warpgroup that copies
  Place ring;              // the stage that comes next
  uint32_t query_phase = 0;
  int tile_place = 0;  // of the tile that comes next

  CUTLASS_DEVICE SlabBlock(ForwardArgs const& args_, SharedStorage& smem_) : args(args_), p(args_.p), smem(smem_) {
    const int all = cutlass::canonical_warp_idx_sync();
    thread = threadIdx.x % 128, warp = all % 4, lane = threadIdx.x % 32, consumer = all / 4 - 1;
  }

  CUTLASS_DEVICE int key_chunks() const { return (p.head_dim + kChunk - 1) / kChunk; }
  CUTLASS_DEVICE int row_group() const { return Traits::kRowGroups > 1 ? consumer : 0; }
  CUTLASS_DEVICE int column_group() const { return Traits::kColumnGroups > 1 ? consumer : 0; }

  CUTLASS_DEVICE void run() { run_in_roles<Traits>(*this); }

  CUTLASS_DEVICE void start_barriers() {
    auto& b = smem.barriers;
    const int arrivals = 4 * kConsumers;  // a lane of each warp
    b.query_full.init(1);
    b.query_empty.init(arrivals);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kStages; ++i) {
      b.full[i].init(1);
      b.empty[i].init(arrivals);
    }
    cutlass::arch::fence_barrier_init();
  }

  // --- the warp that copies: all lanes look for tiles, one copies ---

  // Where a tile's operands lie: in registers, every copy needs them.
  struct Source {
    int member, group, batch;
    CUTLASS_DEVICE explicit Source(TileCoord const& at)
        : member(int(at.member)), group(int(at.group)), batch(int(at.batch)) {}
    CUTLASS_DEVICE void copy(Operand const& from, char* to, cutlass::arch::ClusterTransactionBarrier& full, int column,
                             int row, cute::TMA::CacheHintSm90 hint) const {
      cute::SM90_TMA_LOAD_5D::copy(&from.map, reinterpret_cast<uint64_t*>(&full), uint64_t(hint), to, column, row,
                                   from.step_h ? member : 0, from.step_g ? group : 0, from.step_b ? batch : 0);
    }
    CUTLASS_DEVICE void fetch(Operand const& from, int column, int row) const {
      cute::SM90_TMA_LOAD_5D::PREFETCH::copy(&from.map, column, row, from.step_h ? member : 0, from.step_g ? group : 0,
                                             from.step_b ? batch : 0);
    }
  };

  // Tiles lie in shared memory from when they are found, one ahead: their queries are fetched to L2 early.
  CUTLASS_DEVICE void copy_tiles() {
    uint32_t turn = 0;
    tile_place = -1;  // none yet
#pragma unroll 1
    for (;;) {
      const int next = (tile_place + 1) % Traits::kPlaces;
      if (tile_place < 0 || smem.tiles[tile_place].rows > 0) find_next(turn, next);
      if (tile_place >= 0) {
        ForwardTile const& tile = smem.tiles[tile_place];
        if (lane == 0) copy_tile(tile, smem.tiles[next]);
        __syncwarp();
        if (tile.rows <= 0) break;
      }
      tile_place = next;
    }
  }

  // The next tile that has rows; rows = 0: there is none. The slabs of a tile are neighbours in the order of tiles:
  // they run at the same time and share its keys in L2.
  CUTLASS_DEVICE void find_next(uint32_t& turn, int to) {
    const uint32_t slabs = (p.value_dim + Traits::kValueTile - 1) / Traits::kValueTile;
    ForwardTile tile{};
    for (; tile.rows <= 0; ++turn) {
      const uint32_t number = tile_number(args, turn);
      if (number >= args.map.blocks * slabs) {
        if (args.order == Order::kPairs && turn % 2 == 1) continue;  // the last head has no partner
        tile.rows = 0;
        break;
      }
      tile = find_tile<kTileM, kTileN>(args, number / slabs);
      tile.at.slab = number % slabs;
    }
    if (lane == 0) smem.tiles[to] = tile;
    __syncwarp();
  }

  CUTLASS_DEVICE void copy_tile(ForwardTile const& tile, ForwardTile const& next) {
    smem.barriers.query_empty.wait(query_phase ^ 1);
    query_phase ^= 1;
    __threadfence_block();
    smem.barriers.query_full.arrive();
    if (tile.rows <= 0) return;
    const Source from(tile.at);
    const int chunks = key_chunks(), after = tile.after_block, first = tile.first_block;
    const int value_column = int(tile.at.slab) * Traits::kValueTile;
    int row = tile.n.key_row + (after - 1) * kTileN;
    if (first < after) copy_keys<true>(from, chunks, row, tile.n.query_row + tile.row0);
    fetch_queries(next, chunks);
#pragma unroll 1
    for (int block = after - 1; block > first; --block, row -= kTileN) {
      copy_keys<false>(from, chunks, row - kTileN, 0);
      copy_values(from, value_column, row);
    }
    if (first < after) copy_values(from, value_column, row);
  }

  CUTLASS_DEVICE void fetch_queries(ForwardTile const& next, int chunks) const {
    if (next.rows <= 0) return;
    const Source from(next.at);
    const int row = next.n.query_row + next.row0;
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) from.fetch(args.query, c * kChunk, row);
  }

  // The next stage of the ring, empty; `bytes` will arrive.
  CUTLASS_DEVICE cutlass::arch::ClusterTransactionBarrier& open_stage(int bytes) const {
    auto& full = smem.barriers.full[ring.stage];
    smem.barriers.empty[ring.stage].wait(ring.phase ^ 1);
    full.arrive_and_expect_tx(bytes);
    return full;
  }

  // Keys; of a tile's first block each stage brings the queries' chunks too.
  template <bool kQueries>
  CUTLASS_DEVICE void copy_keys(Source const& from, int chunks, int row, int query_row) {
    constexpr int kBytes = kKeyChunkBytes + kQueries * Traits::kQueryChunkBytes;
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; chunk += kStageChunks) {
      auto& full = open_stage(min(chunks - chunk, kStageChunks) * kBytes);
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kStageChunks; ++c) {
        if (c > 0 && chunk + c >= chunks) break;
        from.copy(args.key, smem.ring[ring.stage] + c * kKeyChunkBytes, full, (chunk + c) * kChunk, row,
                  cute::TMA::CacheHintSm90::EVICT_LAST);
        if constexpr (kQueries) {
          from.copy(args.query, smem.query + (chunk + c) * Traits::kQueryChunkBytes, full, (chunk + c) * kChunk,
                    query_row, cute::TMA::CacheHintSm90::EVICT_NORMAL);
        }
      }
      ring.next();
    }
  }

  // The slab's values; columns that the operand does not have arrive as zeros.
  CUTLASS_DEVICE void copy_values(Source const& from, int column, int row) {
    constexpr int kChunks = Traits::kColumnGroups * Traits::kValueChunks;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; chunk += kStageChunks) {
      auto& full = open_stage(min(kChunks - chunk, kStageChunks) * kKeyChunkBytes);
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < kStageChunks; ++c) {
        if (kChunks % kStageChunks != 0 && chunk + c >= kChunks) break;
        from.copy(args.value, smem.ring[ring.stage] + c * kKeyChunkBytes, full, column + (chunk + c) * kChunk, row,
                  cute::TMA::CacheHintSm90::EVICT_LAST);
      }
      ring.next();
    }
  }

  // --- a warpgroup that computes ---

  CUTLASS_DEVICE static uint32_t address(void const* in_shared) { return cute::cast_smem_ptr_to_uint(in_shared); }
  CUTLASS_DEVICE void wait_stage() const { smem.barriers.full[ring.stage].wait(ring.phase); }
  CUTLASS_DEVICE void release(cutlass::arch::ClusterBarrier& empty) const {
    if (lane == 0) empty.arrive();
  }
  // The oldest of the last `held` stages that this warpgroup took, and those behind it.
  CUTLASS_DEVICE void release_stages(int held, int count) const {
    int stage = ring.stage - held;
    if (stage < 0) stage += Traits::kStages;
    for (int i = 0; i < count; ++i) {
      release(smem.barriers.empty[stage]);
      if (++stage == Traits::kStages) stage = 0;
    }
  }

  // S is started by one warpgroup after the other, so that one's softmax falls beside the other's products: barrier i
  // is warpgroup i's turn. Only where the ring holds all of K: a warpgroup that waits for its turn gives nothing back.
  static constexpr bool kTurns = Traits::kTurns;
  static constexpr uint32_t kTurnThreads = 256;  // the warpgroup that waits and the one that passes the turn on
  CUTLASS_DEVICE void take_turn() const {
    if constexpr (kTurns) cutlass::arch::NamedBarrier::sync(kTurnThreads, uint32_t(consumer));
  }
  CUTLASS_DEVICE void pass_turn() const {
    if constexpr (kTurns) cutlass::arch::NamedBarrier::arrive(kTurnThreads, uint32_t(1 - consumer));
  }

  // Starts S = Q K^T. When it returns, the last stage alone is in flight, and not yet released.
  CUTLASS_DEVICE void start_scores_of(Scores& s) {
    uint64_t a = make_descriptor(address(smem.query) + row_group() * 64 * kRowBytes, Traits::kQueryChunkBytes);
    const int chunks = key_chunks();
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kScores; ++i) s[i] = 0.f;  // a flag instead would have ptxas serialize (C7515)
    take_turn();
    fence(s);
    int left = chunks;
#pragma unroll 1
    for (; left >= kStageChunks; left -= kStageChunks) start_stage<kStageChunks>(s, a, left < chunks);
    if constexpr (kStageChunks > 1) {
      static_assert(kStageChunks == 2, "one chunk is left");
      if (left > 0) start_stage<1>(s, a, left < chunks);
    }
    pass_turn();
  }
  // kChunks chunks of Q, whose descriptor moves on, and of K.
  template <int kChunks>
  CUTLASS_DEVICE void start_stage(Scores& s, uint64_t& a, bool has_before) {
    using Atom = typename Atoms<Element, kTileN>::Scores;
    wait_stage();
    const uint64_t b = make_descriptor(address(smem.ring[ring.stage]), kKeyChunkBytes);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kChunks; ++c) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kStepsPerChunk; ++step) {
        issue_ss<Atom>(advance(a, c * Traits::kQueryChunkBytes + step * kStepBytesAlong),
                       advance(b, c * kKeyChunkBytes + step * kStepBytesAlong), s, true,
                       std::make_index_sequence<kTileN / 2>());
      }
    }
    cute::warpgroup_commit_batch();
    a = advance(a, kChunks * Traits::kQueryChunkBytes);
    ring.next();
    if (has_before) {
      cute::warpgroup_wait<1>();
      release_stages(2, 1);
    }
  }

  // Stages of V that are another warpgroup's. Waited for all the same: an arrival before would count for the stage's
  // contents before.
  CUTLASS_DEVICE void pass_stages(int groups) {
    if constexpr (Traits::kColumnGroups > 1) {
#pragma unroll 1
      for (int i = 0; i < groups * Traits::kParts; ++i) {
        wait_stage();
        release(smem.barriers.empty[ring.stage]);
        ring.next();
      }
    }
  }

  // Starts O += P V, with this warpgroup's columns of V. rows_left: rows of V that are this sequence's, those behind
  // them are cleared, lest 0 * NaN counts.
  CUTLASS_DEVICE void start_values_of(Outputs& o, Weights const& weights, int rows_left) {
    pass_stages(column_group());
    fence(o);
    start_part<0>(o, weights, rows_left);
    cute::warpgroup_commit_batch();
  }
  template <int kPart>
  CUTLASS_DEVICE void start_part(Outputs& o, Weights const& weights, int rows_left) {
    if constexpr (kPart < Traits::kParts) {
      constexpr int kBegin = kPart * kStageChunks * kChunk;
      constexpr int kRest = Traits::kWidth - kBegin,
                    kColumns = kRest < kStageChunks * kChunk ? kRest : kStageChunks * kChunk;
      using Atom = typename Atoms<Element, kColumns>::Values;
      wait_stage();
      if (rows_left < kTileN) clear_rows(rows_left, kColumns / kChunk);
      const uint64_t v = make_descriptor(address(smem.ring[ring.stage]), kKeyChunkBytes);
      cute::warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < Traits::kPvSteps; ++step) {
        issue_rs_at<Atom, kBegin / 2>(weights + 4 * step, advance(v, step * kStepBytesAcross), o,
                                      std::make_index_sequence<kColumns / 2>());
      }
      ring.next();
      start_part<kPart + 1>(o, weights, rows_left);
    }
  }
  // Behind the wait for O.
  CUTLASS_DEVICE void release_values() {
    release_stages(Traits::kParts, Traits::kParts);
    pass_stages(Traits::kColumnGroups - 1 - column_group());
  }

  // Every warpgroup clears for itself: zeros over another's zeros.
  CUTLASS_DEVICE void clear_rows(int first, int chunks) const {
    __syncwarp();
    char* v = smem.ring[ring.stage];
    hopper::clear_rows<kKeyChunkBytes>(v, first, kTileN, chunks, thread, 128);
    cutlass::arch::NamedBarrier::sync(128, uint32_t(kConsumers + consumer));
  }

  // Key blocks that no row of this warpgroup has a limit in.
  struct Whole {
    int begin, end;
    CUTLASS_DEVICE bool has(int block) const { return block >= begin && block < end; }
  };
  CUTLASS_DEVICE Whole whole_of(ForwardTile const& tile) const {
    const int row = tile.row0 + 64 * row_group();
    return {(tile.see.first(row + 63) + kTileN - 1) / kTileN, tile.see.limit(row) / kTileN};
  }
  // Of V in this block, for clear_rows: only a packed sequence has other rows behind it.
  CUTLASS_DEVICE int rows_left(ForwardTile const& tile, int block) const {
    return is_packed(p.sequences) && block == tile.after_block - 1 ? tile.n.keys - block * kTileN : kTileN;
  }

  // S -> P of this block; alpha: the factor for what was accumulated before.
  CUTLASS_DEVICE void weigh(Scores& s, float (&alpha)[CoordS::kRows], Rows& rows, ForwardTile const& tile, int block,
                            bool masked) {
    fence(s);
    if (block == tile.first_block) release(smem.barriers.query_empty);
    rows.finish(s, nullptr, block, masked);
    rows.weigh(s, alpha);
  }

  // Waits for S, with kLater products behind it in flight; `held` stages were taken since its last one, and with it.
  // With two column groups that comes before V, or the stage could be the one that V waits for.
  template <int kLater>
  CUTLASS_DEVICE void finish_scores(int held) const {
    cute::warpgroup_wait<kLater>();
    release_stages(held, 1);
  }

  // S(block) and O += P(block + 1) V(block + 1), then P(block). alpha: of the block before, and then of this one.
  template <bool kMasked>
  CUTLASS_DEVICE void step(Rows& rows, Outputs& o, Weights& weights, float (&alpha)[CoordS::kRows],
                           ForwardTile const& tile, int block) {
    Scores s;
    start_scores_of(s);
    rescale<Traits>(o, alpha);
    if constexpr (Traits::kColumnGroups > 1) finish_scores<0>(1);
    start_values_of(o, weights, kMasked ? rows_left(tile, block + 1) : kTileN);
    if constexpr (Traits::kColumnGroups == 1) finish_scores<1>(1 + Traits::kParts);
    weigh(s, alpha, rows, tile, block, kMasked);
    cute::warpgroup_wait<0>();
    fence(o);
    release_values();
    pack_weights<Element>(weights, s, AllKept{});
  }

  CUTLASS_DEVICE void first_step(Rows& rows, Weights& weights, float (&alpha)[CoordS::kRows], ForwardTile const& tile,
                                 Whole const& whole) {
    Scores s;
    const int block = tile.after_block - 1;
    start_scores_of(s);
    finish_scores<0>(1);
    weigh(s, alpha, rows, tile, block, !whole.has(block));
    pack_weights<Element>(weights, s, AllKept{});
  }

  CUTLASS_DEVICE void compute_tile(ForwardTile const& tile, Rows& rows, Outputs& o) {
    const Whole whole = whole_of(tile);
    Weights weights;
    float alpha[CoordS::kRows];
    first_step(rows, weights, alpha, tile, whole);
    int block = tile.after_block - 2;
    const int first = tile.first_block;
    // The second block clears the first one's values: it counts as masked where those are cut.
    const int masked = rows_left(tile, block + 1) < kTileN ? block : whole.end;
#pragma unroll 1
    for (; block >= first && (block >= whole.end || block >= masked); --block)
      step<true>(rows, o, weights, alpha, tile, block);
#pragma unroll 1
    for (; block >= first && block >= whole.begin; --block) step<false>(rows, o, weights, alpha, tile, block);
#pragma unroll 1
    for (; block >= first; --block) step<true>(rows, o, weights, alpha, tile, block);
    rescale<Traits>(o, alpha);
    start_values_of(o, weights, rows_left(tile, first));
    cute::warpgroup_wait<0>();
    fence(o);
    release_values();
  }

  CUTLASS_DEVICE void compute_tiles() {
    if (consumer == kConsumers - 1) pass_turn();  // the first turn is warpgroup 0's
    Rows rows(args.exponent, args.premultiply, 16 * warp + 64 * row_group(), lane);
#pragma unroll 1
    for (;; tile_place = (tile_place + 1) % Traits::kPlaces, query_phase ^= 1) {
      smem.barriers.query_full.wait(query_phase);
      __syncwarp();  // the compiler reads the tile's place after this
      ForwardTile const& tile = smem.tiles[tile_place];
      if (tile.rows <= 0) break;
      Outputs o;
      rows.start(tile, p);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Traits::kOutputs; ++i) o[i] = 0.f;
      const bool any = tile.first_block < tile.after_block;
      if (any) compute_tile(tile, rows, o);
      store(tile, rows, o);
      __syncwarp();
      if (!any) release(smem.barriers.query_empty);
    }
    if (consumer == 0) take_turn();  // leaves no barrier half full
  }

  CUTLASS_DEVICE void store(ForwardTile const& tile, Rows& rows, Outputs& o) const {
    float inverse[CoordS::kRows];
    rows.finish_sums(inverse, 1.f);
    if (tile.at.slab == 0 && column_group() == 0) store_lse<Traits>(p, tile, rows, row_group(), warp, lane);
    const int column = int(tile.at.slab) * Traits::kValueTile + column_group() * Traits::kWidth;
    store_output<Traits>(p, tile, o, inverse, row_group(), warp, lane, column);
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) slab_kernel(__grid_constant__ const ForwardArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  SlabBlock<Traits>(args, *reinterpret_cast<typename Traits::SharedStorage*>(memory)).run();
}

}  // namespace hopper
}  // namespace memeff
