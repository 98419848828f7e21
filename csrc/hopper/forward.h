// The forward kernel on wgmma and TMA: one warp copies, warpgroups compute 64 queries each. A block stays
// on its SM and takes tile after tile, so that one tile's end and the next one's start overlap.
//
//   copies      Q K(n) | K(n-1) V(n) | K(n-2) V(n-1) | ...                     rings of kStages in shared memory
//   warpgroup 0        | S(n-1), O += P(n) V(n) | softmax(n-1) | S(n-2), ...
//   warpgroup 1                                 | S(n-1), O += P(n) V(n) | softmax(n-1) | ...
//
// Within a warpgroup the tensor cores run S of the next key block and P V of this one while it turns the former into
// weights; the last P V of a tile runs beside the first S of the next tile, and O is written meanwhile. Between
// warpgroups named barriers let one issue its products while another computes exponentials. P stays in registers as
// operand A. Key blocks run from the last to the first.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "hopper/output.h"
#include "hopper/warpgroup_rows.h"

namespace memeff {
namespace hopper {

template <typename Traits>
struct ForwardBlock {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using CoordS = typename Traits::CoordS;
  using NamedBarrier = cutlass::arch::NamedBarrier;
  using Rows = WarpgroupRows<Traits>;
  using Kept = typename Rows::Kept;
  using RingOf = Ring<Traits::kStages>;
  static constexpr int kTileM = Traits::kTileM, kTileN = Traits::kTileN, kConsumers = Traits::kConsumers;
  using Scores = Accumulators<kTileN>;
  using Outputs = Accumulators<Traits::kWidth>;
  using Weights = uint32_t[Traits::kScores / 2];

  ForwardArgs const& args;
  ForwardParams const& p;
  SharedStorage& smem;
  int thread, warp, lane, consumer;  // consumer: -1 in the warpgroup that copies; warp: within the warpgroup
  RingOf keys, values, biases;       // the stages that come next
  Ring<Traits::kQueryBuffers> queries;
  int place = 0;  // of the tile that comes next

  CUTLASS_DEVICE ForwardBlock(ForwardArgs const& args_, SharedStorage& smem_) : args(args_), p(args_.p), smem(smem_) {
    const int all = cutlass::canonical_warp_idx_sync();
    thread = threadIdx.x % 128, warp = all % 4, lane = threadIdx.x % 32, consumer = all / 4 - 1;
  }

  CUTLASS_DEVICE void run() { run_in_roles<Traits>(*this); }

  CUTLASS_DEVICE void start_barriers() {
    auto& b = smem.barriers;
    const int arrivals = 4 * kConsumers;  // a lane of each warp
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kQueryBuffers; ++i) {
      b.query_full[i].init(1);
      b.query_empty[i].init(arrivals);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kStages; ++i) {
      b.key_full[i].init(1);
      b.value_full[i].init(1);
      b.key_empty[i].init(arrivals);
      b.value_empty[i].init(arrivals);
      b.bias_full[i].init(1);
      b.bias_empty[i].init(arrivals);
    }
    cutlass::arch::fence_barrier_init();
  }

  // --- the warp that copies: all lanes look for tiles, one copies ---

  // Where a tile's operands lie: in registers, every copy needs them.
  struct Source {
    int member, group, batch, query_row, key_row;
    CUTLASS_DEVICE explicit Source(ForwardTile const& tile)
        : member(int(tile.at.member)),
          group(int(tile.at.group)),
          batch(int(tile.at.batch)),
          query_row(tile.n.query_row + tile.row0),
          key_row(tile.n.key_row) {}
  };

  CUTLASS_DEVICE void copy_tiles() {
    uint32_t turn = 0;
    announce(turn);
    for (int own = 0;; own = (own + 1) % Traits::kPlaces) {
      ForwardTile const& tile = smem.tiles[own];
      if (tile.rows <= 0) break;
      const int first = tile.first_block, after = tile.after_block;
      const Source from(tile);
      // Q of the next tile comes early where it has a buffer of its own.
      const int early = Traits::kQueryBuffers > 1 ? max(after - 2, first) : first - 1;
      for (int block = after - 1; block >= first; --block) {
        if (lane == 0) {
          copy_keys(from, block);
          copy_bias(from, block);
          if (block + 1 < after) copy_values(from, block + 1);
        }
        __syncwarp();
        if (block == early) announce(turn);
      }
      if (lane == 0 && first < after) copy_values(from, first);
      __syncwarp();
      if (early < first || first >= after) announce(turn);
    }
  }

  // Finds the next tile that has rows, or that there is none, and makes it known with the arrival of its queries.
  CUTLASS_DEVICE void announce(uint32_t& turn) {
    ForwardTile tile{};
    for (; tile.rows <= 0; ++turn) {
      const uint32_t number = tile_number(args, turn);
      if (number >= args.map.blocks) {
        if (args.order == Order::kPairs && turn % 2 == 1) continue;  // the last head has no partner
        break;
      }
      tile = find_tile<kTileM, kTileN>(args, number);
    }
    if (tile.rows < 0) tile.rows = 0;
    if (lane == 0) {
      smem.barriers.query_empty[queries.stage].wait(queries.phase ^ 1);
      smem.tiles[place] = tile;
      __threadfence_block();
      auto& full = smem.barriers.query_full[queries.stage];
      if (tile.rows > 0 && tile.first_block < tile.after_block) {
        copy_queries(Source(tile), full);
      } else {
        full.arrive();
      }
      place = (place + 1) % Traits::kPlaces;
      queries.next();
    }
    __syncwarp();
  }

  // kChunks chunks of a tile from `column` on, kBytes each.
  template <int kChunks, int kBytes>
  CUTLASS_DEVICE void copy(Operand const& from, char* to, cutlass::arch::ClusterTransactionBarrier& full,
                           Source const& at, int column, int row, cute::TMA::CacheHintSm90 hint) const {
    full.arrive_and_expect_tx(kChunks * kBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < kChunks; ++c) copy_box(from, to + c * kBytes, full, at, column + c * kChunk, row, hint);
  }
  CUTLASS_DEVICE void copy_box(Operand const& from, char* to, cutlass::arch::ClusterTransactionBarrier& full,
                               Source const& at, int column, int row, cute::TMA::CacheHintSm90 hint) const {
    const int member = from.step_h ? at.member : 0, group = from.step_g ? at.group : 0;
    const int batch = from.step_b ? at.batch : 0;
    cute::SM90_TMA_LOAD_5D::copy(&from.map, reinterpret_cast<uint64_t*>(&full), uint64_t(hint), to, column, row, member,
                                 group, batch);
  }

  CUTLASS_DEVICE void copy_queries(Source const& from, cutlass::arch::ClusterTransactionBarrier& full) const {
    constexpr auto kHint = cute::TMA::CacheHintSm90::EVICT_FIRST;
    char* to = smem.query[queries.stage];
    if constexpr (Traits::kPairs) {  // of 16 rows the even ones, then the odd ones (WarpgroupCoord)
      full.arrive_and_expect_tx(Traits::kQueryBytes);
      CUTLASS_PRAGMA_UNROLL
      for (int c = 0; c < Traits::kChunks; ++c) {
#pragma unroll 1
        for (int piece = 0; piece < kTileM / 8; ++piece)
          copy_box(args.query, to + c * Traits::kQueryChunkBytes + piece * kPeriodBytes, full, from, c * kChunk,
                   from.query_row + piece / 2 * 16 + piece % 2, kHint);
      }
    } else {
      copy<Traits::kChunks, Traits::kQueryChunkBytes>(args.query, to, full, from, 0, from.query_row, kHint);
    }
  }

  CUTLASS_DEVICE void copy_keys(Source const& from, int block) {
    smem.barriers.key_empty[keys.stage].wait(keys.phase ^ 1);
    copy<Traits::kChunks, Traits::kKeyChunkBytes>(args.key, smem.key[keys.stage], smem.barriers.key_full[keys.stage],
                                                  from, 0, from.key_row + block * kTileN,
                                                  cute::TMA::CacheHintSm90::EVICT_LAST);
    keys.next();
  }
  CUTLASS_DEVICE void copy_bias(Source const& from, int block) {
    if constexpr (Traits::kBias) {
      smem.barriers.bias_empty[biases.stage].wait(biases.phase ^ 1);
      copy<Traits::kBiasChunks, Traits::kQueryChunkBytes>(
          args.bias, smem.bias[biases.stage], smem.barriers.bias_full[biases.stage], from,
          from.key_row + block * kTileN, from.query_row, cute::TMA::CacheHintSm90::EVICT_NORMAL);
      biases.next();
    }
  }
  CUTLASS_DEVICE void copy_values(Source const& from, int block) {
    smem.barriers.value_empty[values.stage].wait(values.phase ^ 1);
    copy<Traits::kChunks, Traits::kKeyChunkBytes>(args.value, smem.value[values.stage],
                                                  smem.barriers.value_full[values.stage], from, 0,
                                                  from.key_row + block * kTileN, cute::TMA::CacheHintSm90::EVICT_LAST);
    values.next();
  }

  // --- a warpgroup that computes ---

  // Products are issued by one warpgroup after the other: barrier i is warpgroup i's turn. Every warpgroup has a turn
  // for each key block of the tile.
  static constexpr uint32_t kTurnThreads = 256;  // the warpgroup that waits and the one that passes the turn on
  CUTLASS_DEVICE void take_turn() const {
    if constexpr (kConsumers > 1) NamedBarrier::sync(kTurnThreads, uint32_t(consumer));
  }
  CUTLASS_DEVICE void pass_turn() const {
    if constexpr (kConsumers > 1)
      NamedBarrier::arrive(kTurnThreads, uint32_t(consumer + 1 == kConsumers ? 0 : consumer + 1));
  }
  CUTLASS_DEVICE void sync_consumers() const { NamedBarrier::sync(Traits::kConsumerThreads, uint32_t(kConsumers)); }

  CUTLASS_DEVICE void release(cutlass::arch::ClusterBarrier& empty) const {
    if (lane == 0) empty.arrive();
  }
  CUTLASS_DEVICE void wait_keys() const { smem.barriers.key_full[keys.stage].wait(keys.phase); }
  CUTLASS_DEVICE void wait_values() const { smem.barriers.value_full[values.stage].wait(values.phase); }
  CUTLASS_DEVICE const char* wait_bias() {
    if constexpr (Traits::kBias) {
      smem.barriers.bias_full[biases.stage].wait(biases.phase);
      __syncwarp();  // the compiler reads it after this
      return smem.bias[biases.stage];
    }
    return nullptr;
  }
  CUTLASS_DEVICE void release_bias() {
    if constexpr (Traits::kBias) {
      __syncwarp();  // all lanes have read it
      release(smem.barriers.bias_empty[biases.stage]);
      biases.next();
    }
  }
  CUTLASS_DEVICE void release_keys() {
    release(smem.barriers.key_empty[keys.stage]);
    keys.next();
  }
  CUTLASS_DEVICE void release_values() {
    release(smem.barriers.value_empty[values.stage]);
    values.next();
  }

  CUTLASS_DEVICE void release_queries() {
    release(smem.barriers.query_empty[queries.stage]);
    queries.next();
  }

  CUTLASS_DEVICE static uint32_t address(void const* in_shared) { return cute::cast_smem_ptr_to_uint(in_shared); }

  CUTLASS_DEVICE void start_scores_of(Scores& s) const {
    const uint64_t a =
        make_descriptor(address(smem.query[queries.stage]) + consumer * 64 * kRowBytes, Traits::kQueryChunkBytes);
    const uint64_t b = make_descriptor(address(smem.key[keys.stage]), Traits::kKeyChunkBytes);
    fence(s);
    cute::warpgroup_arrive();
    start_scores<Element, kTileN, Traits::kQkSteps>(s, a, Traits::kQueryChunkBytes, b, Traits::kKeyChunkBytes);
    cute::warpgroup_commit_batch();
  }
  CUTLASS_DEVICE void start_values_of(Outputs& o, Weights const& weights) const {
    const uint64_t v = make_descriptor(address(smem.value[values.stage]), Traits::kKeyChunkBytes);
    fence(o);
    cute::warpgroup_arrive();
    start_values<Element, Traits::kWidth, Traits::kPvSteps>(o, weights, v);
    cute::warpgroup_commit_batch();
  }

  // Rows of V behind a packed sequence's last key are those of another: zeros, lest 0 * NaN counts. All consumers,
  // each behind its turn for the tile's last block (who waits here holds up nobody's turn), while that block's values
  // come next.
  CUTLASS_DEVICE void clear_tail(ForwardTile const& tile) const {
    const int left = tile.n.keys - (tile.after_block - 1) * kTileN;
    if (!is_packed(p.sequences) || left >= kTileN) return;
    wait_values();
    __syncwarp();
    char* v = smem.value[values.stage];
    clear_rows<Traits::kKeyChunkBytes>(v, left, kTileN, Traits::kChunks, consumer * 128 + thread,
                                       Traits::kConsumerThreads);
    sync_consumers();
  }

  // What a warpgroup does of a tile.
  struct Share {
    int begin, end;              // key blocks that some of its rows sees
    int whole_begin, whole_end;  // hidden from none of them
    bool rows;                   // it has valid queries

    CUTLASS_DEVICE bool any() const { return begin < end; }
    CUTLASS_DEVICE bool is_whole(int block) const { return block >= whole_begin && block < whole_end; }
  };
  CUTLASS_DEVICE Share share_of(ForwardTile const& tile) const {
    const int row = tile.row0 + 64 * consumer, left = tile.rows - 64 * consumer;
    const int last = row + (left < 64 ? left : 64) - 1;
    const int begin = tile.see.first(row), end = left > 0 ? tile.see.limit(last) : 0;
    Share share;
    share.rows = left > 0;
    share.begin = begin / kTileN;
    share.end = begin < end ? (end + kTileN - 1) / kTileN : share.begin;
    share.whole_begin = max((tile.see.first(row + 63) + kTileN - 1) / kTileN, share.begin);
    share.whole_end = tile.see.limit(row) / kTileN;
    return share;
  }

  // A block that no row of this warpgroup sees.
  CUTLASS_DEVICE void skip(ForwardTile const& tile, int block) {
    wait_keys();
    release_keys();
    wait_bias();
    release_bias();
    take_turn();
    pass_turn();
    if (block == tile.after_block - 1) clear_tail(tile);
    wait_values();
    release_values();
  }

  // S -> P of this block; alpha: the factor for what was accumulated before.
  CUTLASS_DEVICE void weigh(Scores& s, float (&alpha)[CoordS::kRows], Rows& rows, Kept& kept, Share const& share,
                            int block, bool masked) {
    fence(s);
    release_keys();
    if (block == share.begin) release_queries();
    rows.finish(s, wait_bias(), block, masked);
    release_bias();
    if constexpr (Traits::kDropout) {
      rows.weigh_and_draw(s, alpha, kept, block, p.dropout.threshold);
    } else {
      rows.weigh(s, alpha);
    }
  }

  // S(block) and O += P(block + 1) V(block + 1), then P(block).
  template <bool kMasked>
  CUTLASS_DEVICE void step(Rows& rows, Outputs& o, Weights& weights, Share const& share, int block) {
    Scores s;
    Kept kept;
    float alpha[CoordS::kRows];
    wait_keys();
    take_turn();
    start_scores_of(s);
    wait_values();
    start_values_of(o, weights);
    pass_turn();
    cute::warpgroup_wait<1>();
    weigh(s, alpha, rows, kept, share, block, kMasked);
    cute::warpgroup_wait<0>();
    fence(o);
    release_values();
    rescale<Traits>(o, alpha);
    pack_weights<Element>(weights, s, kept);
  }

  CUTLASS_DEVICE void take_scores(Scores& s) {
    wait_keys();
    take_turn();
    start_scores_of(s);
    pass_turn();
  }
  // The tile's last product with V.
  CUTLASS_DEVICE void take_values(Outputs& o, Weights const& weights) {
    wait_values();
    start_values_of(o, weights);
  }
  CUTLASS_DEVICE void finish_values(Outputs& o) {
    cute::warpgroup_wait<0>();
    fence(o);
    release_values();
  }

  CUTLASS_DEVICE void start_rows(ForwardTile const& tile, Rows& rows, Outputs& o) const {
    rows.start(tile, p);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kOutputs; ++i) o[i] = 0.f;
  }

  // P of a tile's first block.
  CUTLASS_DEVICE void finish_first(Scores& s, Rows& rows, Weights& weights, Share const& share) {
    Kept kept;
    float alpha[CoordS::kRows];
    cute::warpgroup_wait<0>();
    weigh(s, alpha, rows, kept, share, share.end - 1, !share.is_whole(share.end - 1));
    pack_weights<Element>(weights, s, kept);
  }

  // The end of tile `before` and the first block of `tile` together.
  CUTLASS_DEVICE void change_tile(ForwardTile const& before, ForwardTile const& tile, Rows& rows, Outputs& o,
                                  Weights& weights, Share const& share) {
    Scores s;
    take_values(o, weights);
    take_scores(s);
    cute::warpgroup_wait<1>();
    fence(o);
    release_values();
    store(before, rows, o);
    start_rows(tile, rows, o);
    finish_first(s, rows, weights, share);
    clear_tail(tile);
  }

  // The first block of `tile` by itself, behind those that this warpgroup does not see. False: it sees none.
  CUTLASS_DEVICE bool begin_tile(ForwardTile const& tile, Rows& rows, Outputs& o, Weights& weights,
                                 Share const& share) {
    start_rows(tile, rows, o);
    const int end = share.any() ? share.end : tile.first_block;
#pragma unroll 1
    for (int block = tile.after_block - 1; block >= end; --block) skip(tile, block);
    if (!share.any()) {
      release_queries();
      if (share.rows) store(tile, rows, o);
      return false;
    }
    Scores s;
    take_scores(s);
    finish_first(s, rows, weights, share);
    if (share.end == tile.after_block) clear_tail(tile);
    return true;
  }

  CUTLASS_DEVICE void compute_tiles() {
    if (consumer == kConsumers - 1) pass_turn();  // the first turn is warpgroup 0's
    Outputs o;
    Weights weights;
    Rows rows(args.exponent, args.premultiply, 16 * warp + 64 * consumer, lane);
    bool pending = false;  // of the tile before: its last product with V, and its output
    for (;; place = (place + 1) % Traits::kPlaces) {
      smem.barriers.query_full[queries.stage].wait(queries.phase);
      __syncwarp();  // the compiler reads the tile's place after this
      ForwardTile const& tile = smem.tiles[place];
      ForwardTile const& before = smem.tiles[(place + Traits::kPlaces - 1) % Traits::kPlaces];
      const Share share = share_of(tile);
      if (pending && share.any() && share.end == tile.after_block) {
        change_tile(before, tile, rows, o, weights, share);
      } else {
        if (pending) {
          take_values(o, weights);
          finish_values(o);
          store(before, rows, o);
        }
        if (tile.rows <= 0) break;
        pending = begin_tile(tile, rows, o, weights, share);
        if (!pending) continue;
      }
      int block = share.end - 2;
#pragma unroll 1
      for (; block >= share.whole_end && block >= share.begin; --block) step<true>(rows, o, weights, share, block);
#pragma unroll 1
      for (; block >= share.whole_begin; --block) step<false>(rows, o, weights, share, block);
#pragma unroll 1
      for (; block >= share.begin; --block) step<true>(rows, o, weights, share, block);
      if (block >= tile.first_block) {  // windows: values come in order
        take_values(o, weights);
        finish_values(o);
        store(tile, rows, o);
        pending = false;
#pragma unroll 1
        for (; block >= tile.first_block; --block) skip(tile, block);
      }
    }
    if (consumer == 0) take_turn();  // leaves no barrier half full
  }

  CUTLASS_DEVICE void store(ForwardTile const& tile, Rows& rows, Outputs& o) const {
    float inverse[CoordS::kRows];
    rows.finish_sums(inverse, p.dropout.keep_scale);
    store_lse<Traits>(p, tile, rows, consumer, warp, lane);
    store_output<Traits>(p, tile, o, inverse, consumer, warp, lane);
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    forward_kernel(__grid_constant__ const ForwardArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  ForwardBlock<Traits>(args, *reinterpret_cast<typename Traits::SharedStorage*>(memory)).run();
}

}  // namespace hopper
}  // namespace memeff
