// The fp32 forward kernel on wgmma and TMA: operands in fp16 parts (f32_plan.h), one warp copies, two or three
// warpgroups compute 64 queries each. A block stays on its SM and takes tile after tile.
//
//   copies      Q K(n) | K(n-1) V(n) | K(n-2) V(n-1) | ...                       rings of kStages in shared memory
//   warpgroup   | S(n) | softmax(n) | S(n-1) | T = P(n) V(n), softmax(n-1) | O = alpha O + T | S(n-2) | ...
//
// S and T are three products each (lo hi, hi lo, hi hi) into sums that start from zero, S two of them up to K = 64. The
// tensor cores run T of this key block while the warpgroup turns S of the next one into weights, and S of the other
// warpgroup: they take turns. Key blocks run from the last to the first. With one part (TF32) a product is one, S one
// sum, S and T are issued together, and O accumulates by itself.
#pragma once

#include "common/wide.h"
#include "cute/arch/copy_sm90_tma.hpp"
#include "hopper/f32_rows.h"

namespace memeff {
namespace hopper_f32 {

struct ForwardArgs : hopper::ForwardArgs {
  Operand key_scales, value_scales;
  TensorView query_scales;  // [batches, groups, members, rows], stride_m 1
};

template <typename Traits>
struct ForwardBlock {
  using SharedStorage = typename Traits::SharedStorage;
  using CoordS = typename Traits::CoordS;
  using CoordO = typename Traits::CoordO;
  using TileRows = Rows<Traits>;
  using NamedBarrier = cutlass::arch::NamedBarrier;
  static constexpr int kTileM = Traits::kTileM, kTileN = Traits::kTileN, kConsumers = Traits::kConsumers;
  using Scores = Accumulators<kTileN>;
  using Outputs = Accumulators<Traits::kWidth>;
  using Weights = uint32_t[Traits::kParts][Traits::kScores / 2];

  ForwardArgs const& args;
  ForwardParams const& p;
  SharedStorage& smem;
  int thread, warp, lane, consumer;    // consumer: -1 in the warpgroup that copies; warp: within the warpgroup
  Ring<Traits::kStages> keys, values;  // the stages that come next
  uint32_t query_phase = 0;

  CUTLASS_DEVICE ForwardBlock(ForwardArgs const& args_, SharedStorage& smem_) : args(args_), p(args_.p), smem(smem_) {
    const int all = cutlass::canonical_warp_idx_sync();
    thread = threadIdx.x % 128, warp = all % 4, lane = threadIdx.x % 32, consumer = all / 4 - 1;
  }

  CUTLASS_DEVICE void run() { hopper::run_in_roles<Traits>(*this); }

  CUTLASS_DEVICE void start_barriers() {
    auto& b = smem.barriers;
    const int arrivals = 4 * kConsumers;  // a lane of each warp
    b.query_full.init(1);
    b.query_empty.init(arrivals);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kStages; ++i) {
      b.key_full[i].init(1);
      b.value_full[i].init(1);
      b.key_empty[i].init(arrivals);
      b.value_empty[i].init(arrivals);
    }
    cutlass::arch::fence_barrier_init();
  }

  // The block's turn-th tile into the warp's place, tiles without rows or keys included. False: there is no more.
  CUTLASS_DEVICE bool next_tile(uint32_t& turn, ForwardTile& place) {
    uint32_t number = tile_number(args, turn);
    if (number >= args.map.blocks && args.order == Order::kPairs && turn % 2 == 1) {  // the last head has no partner
      ++turn;
      number = tile_number(args, turn);
    }
    if (number >= args.map.blocks) return false;
    ++turn;
    const ForwardTile tile = find_tile<kTileM, kTileN>(args, number);
    __syncwarp();  // nobody reads the one before any more
    if (lane == 0) place = tile;
    __syncwarp();
    return true;
  }

  // --- the warp that copies ---

  // Where a tile's operands lie: in registers, every copy needs them.
  struct Source {
    int member, group, batch, query_row, key_row;
  };

  CUTLASS_DEVICE void copy_tiles() {
    ForwardTile& tile = smem.tiles[0];
    for (uint32_t turn = 0; next_tile(turn, tile);) {
      const int first = tile.first_block, after = tile.after_block;
      if (tile.rows <= 0 || first >= after) continue;
      if (lane != 0) continue;
      const Source from{int(tile.at.member), int(tile.at.group), int(tile.at.batch), tile.n.query_row + tile.row0,
                        tile.n.key_row};
      smem.barriers.query_empty.wait(query_phase ^ 1);
      query_phase ^= 1;
      smem.barriers.query_full.arrive_and_expect_tx(Traits::kQueryBytes);
      copy<Traits::kQueryChunkBytes>(args.query, smem.query, smem.barriers.query_full, from, from.query_row,
                                     cute::TMA::CacheHintSm90::EVICT_FIRST);
      for (int block = after - 1; block >= first; --block) {
        copy_keys(from, block);
        if (block + 1 < after) copy_values(from, block + 1);
      }
      copy_values(from, first);
    }
  }

  // kBytes: of a chunk of 64 columns.
  template <int kBytes>
  CUTLASS_DEVICE void copy(Operand const& from, char* to, cutlass::arch::ClusterTransactionBarrier& full,
                           Source const& at, int row, cute::TMA::CacheHintSm90 hint) const {
    const int member = from.step_h ? at.member : 0, group = from.step_g ? at.group : 0;
    const int batch = from.step_b ? at.batch : 0;
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < Traits::kChunks; ++c) {
      cute::SM90_TMA_LOAD_5D::copy(&from.map, reinterpret_cast<uint64_t*>(&full), uint64_t(hint), to + c * kBytes,
                                   c * kChunk, row, member, group, batch);
    }
  }
  CUTLASS_DEVICE void copy_scales(Operand const& from, float* to, cutlass::arch::ClusterTransactionBarrier& full,
                                  Source const& at, int row) const {
    cute::SM90_TMA_LOAD_5D::copy(&from.map, reinterpret_cast<uint64_t*>(&full),
                                 uint64_t(cute::TMA::CacheHintSm90::EVICT_LAST), to, row, 0,
                                 from.step_h ? at.member : 0, from.step_g ? at.group : 0, from.step_b ? at.batch : 0);
  }

  CUTLASS_DEVICE void copy_keys(Source const& from, int block) {
    auto& full = smem.barriers.key_full[keys.stage];
    smem.barriers.key_empty[keys.stage].wait(keys.phase ^ 1);
    full.arrive_and_expect_tx(Traits::kKeyBytes + 2 * Traits::kScaleBytes);
    const int row = from.key_row + block * kTileN;
    copy<Traits::kKeyChunkBytes>(args.key, smem.key[keys.stage], full, from, row, cute::TMA::CacheHintSm90::EVICT_LAST);
    copy_scales(args.key_scales, smem.key_scales[keys.stage], full, from, row & ~3);
    copy_scales(args.value_scales, smem.value_scales[keys.stage], full, from, row & ~3);
    keys.next();
  }
  CUTLASS_DEVICE void copy_values(Source const& from, int block) {
    auto& full = smem.barriers.value_full[values.stage];
    smem.barriers.value_empty[values.stage].wait(values.phase ^ 1);
    full.arrive_and_expect_tx(Traits::kKeyBytes);
    copy<Traits::kKeyChunkBytes>(args.value, smem.value[values.stage], full, from, from.key_row + block * kTileN,
                                 cute::TMA::CacheHintSm90::EVICT_LAST);
    values.next();
  }

  // --- a warpgroup that computes ---

  // Products are issued by one warpgroup after the other: barrier i is warpgroup i's turn. Every warpgroup has a turn
  // for each key block of the tile.
  static constexpr uint32_t kTurnThreads = 256;  // the warpgroup that waits and the one that passes the turn on
  CUTLASS_DEVICE void take_turn() const { NamedBarrier::sync(kTurnThreads, uint32_t(consumer)); }
  CUTLASS_DEVICE void pass_turn() const {
    NamedBarrier::arrive(kTurnThreads, uint32_t(consumer + 1 == kConsumers ? 0 : consumer + 1));
  }

  CUTLASS_DEVICE void release(cutlass::arch::ClusterBarrier& empty) const {
    if (lane == 0) empty.arrive();
  }
  CUTLASS_DEVICE void wait_keys() const {
    smem.barriers.key_full[keys.stage].wait(keys.phase);
    __syncwarp();  // the compiler reads the scales after this
  }
  CUTLASS_DEVICE void release_keys() {
    __syncwarp();  // all lanes have read the scales
    release(smem.barriers.key_empty[keys.stage]);
    keys.next();
  }
  CUTLASS_DEVICE void wait_values() const { smem.barriers.value_full[values.stage].wait(values.phase); }
  CUTLASS_DEVICE void release_values() {
    release(smem.barriers.value_empty[values.stage]);
    values.next();
  }

  CUTLASS_DEVICE static uint32_t address(void const* in_shared) { return cute::cast_smem_ptr_to_uint(in_shared); }

  CUTLASS_DEVICE void start_scores_of(Scores& s) const {
    constexpr int kSteps = Traits::kHalves ? Traits::kQkSteps / 2 : Traits::kQkSteps;
    fence(s);
    cute::warpgroup_arrive();
    start_scores_in_parts<Traits, kTileN, 0, kSteps>(s, query_descriptor(), key_descriptor(0));
    cute::warpgroup_commit_batch();
  }
  // The other half of the columns, if one is left, added to s. Waits for all products. scratch: registers that T takes
  // next.
  template <int kCount>
  CUTLASS_DEVICE void finish_scores_of(Scores& s, float (&scratch)[kCount]) const {
    if constexpr (!Traits::kHalves) {
      cute::warpgroup_wait<0>();
      fence(s);
      return;
    }
    constexpr int kPiece = Traits::kPiece, kSteps = Traits::kQkSteps;
    CUTLASS_PRAGMA_UNROLL
    for (int piece = 0; piece < Traits::kPieces; ++piece) {
      static_assert(kPiece / 2 <= kCount, "a piece of S fits into T");
      auto& more = reinterpret_cast<Accumulators<kPiece>&>(scratch);
      fence(more);
      cute::warpgroup_arrive();
      start_scores_in_parts<Traits, kPiece, kSteps / 2, kSteps>(more, query_descriptor(), key_descriptor(piece));
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      fence(more);
      if (piece == 0) fence(s);
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < kPiece / 2; ++e) s[piece * kPiece / 2 + e] += more[e];
    }
  }
  CUTLASS_DEVICE uint64_t query_descriptor() const {
    return make_descriptor(address(smem.query) + consumer * 64 * kRowBytes, Traits::kQueryChunkBytes);
  }
  CUTLASS_DEVICE uint64_t key_descriptor(int piece) const {
    return make_descriptor(address(smem.key[keys.stage]) + piece * Traits::kPiece * kRowBytes, Traits::kKeyChunkBytes);
  }
  CUTLASS_DEVICE void start_values_of(Outputs& t, Weights const& weights) const {
    const uint64_t v = make_descriptor(address(smem.value[values.stage]), Traits::kKeyChunkBytes);
    fence(t);
    cute::warpgroup_arrive();
    start_values_in_parts<Traits>(t, weights, v, !Traits::kStaged);
    cute::warpgroup_commit_batch();
  }

  // Rows of V behind a packed sequence's last key are those of another: zeros, lest 0 * NaN counts. Each warpgroup by
  // itself writes them before its products read them; the other one's zeros are the same.
  CUTLASS_DEVICE void clear_tail(ForwardTile const& tile) const {
    const int left = tile.n.keys - (tile.after_block - 1) * kTileN;
    if (!is_packed(p.sequences) || left >= kTileN) return;
    wait_values();
    __syncwarp();
    char* v = smem.value[values.stage];
    hopper::clear_rows<Traits::kKeyChunkBytes>(v, left, kTileN, Traits::kChunks, thread, 128);
    NamedBarrier::sync(128, uint32_t(kConsumers + consumer));
  }

  // What a warpgroup does of a tile.
  struct Share {
    int begin, end;              // key blocks that some of its rows sees
    int whole_begin, whole_end;  // hidden from none of them
  };
  CUTLASS_DEVICE Share share_of(ForwardTile const& tile) const {
    const int row = tile.row0 + 64 * consumer, left = tile.rows - 64 * consumer;
    const int last = row + (left < 64 ? left : 64) - 1;
    const int begin = tile.see.first(row), end = left > 0 ? tile.see.limit(last) : 0;
    Share share;
    share.begin = begin / kTileN;
    share.end = begin < end ? (end + kTileN - 1) / kTileN : share.begin;
    share.whole_begin = max((tile.see.first(row + 63) + kTileN - 1) / kTileN, share.begin);
    share.whole_end = tile.see.limit(row) / kTileN;
    return share;
  }

  // A block that no row of this warpgroup sees.
  CUTLASS_DEVICE void skip() {
    wait_keys();
    release_keys();
    take_turn();
    pass_turn();
    wait_values();
    release_values();
  }

  // S -> P of this block, in units of the top; alpha: the factor for what was accumulated before.
  CUTLASS_DEVICE void weigh(Scores& s, float (&alpha)[CoordS::kRows], TileRows& rows, ForwardTile const& tile,
                            int block, bool masked) {
    fence(s);
    const int shift = tile.n.key_row & 3;  // of the scales
    rows.finish(s, smem.key_scales[keys.stage] + shift, block, masked);
    rows.weigh(s, alpha);
    rows.scale_values(s, alpha, smem.value_scales[keys.stage] + shift, tile.n.keys - block * kTileN);
    release_keys();
  }

  CUTLASS_DEVICE void release_queries_behind(Share const& share, int block) {
    if (block == share.begin) release(smem.barriers.query_empty);
  }

  // O takes T = P V of the block that `alpha` is of.
  CUTLASS_DEVICE static void take(Outputs& o, Outputs const& t, float const (&alpha)[CoordO::kRows]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordO::kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < CoordO::kColumns; ++j) {
        const int e = CoordO::index(i, j);
        o[e] = Traits::kStaged ? __fmaf_rn(o[e], alpha[i], t[e]) : __fmul_rn(o[e], alpha[i]);
      }
    }
  }

  // S(block) and P(block + 1) V(block + 1), then P(block). alpha: of block + 1, then of block.
  template <bool kMasked>
  CUTLASS_DEVICE void step(TileRows& rows, Outputs& o, Weights& weights, float (&alpha)[CoordS::kRows],
                           ForwardTile const& tile, Share const& share, int block) {
    Scores s;
    float next[CoordS::kRows];
    wait_keys();
    take_turn();
    start_scores_of(s);
    if constexpr (Traits::kStaged) {
      Outputs t;
      finish_scores_of(s, t);
      wait_values();
      start_values_of(t, weights);
      pass_turn();
      release_queries_behind(share, block);
      weigh(s, next, rows, tile, block, kMasked);
      cute::warpgroup_wait<0>();
      fence(t);
      take(o, t, alpha);
      alpha[0] = next[0], alpha[1] = next[1];
    } else {
      wait_values();
      start_values_of(o, weights);
      pass_turn();
      cute::warpgroup_wait<1>();
      release_queries_behind(share, block);
      weigh(s, next, rows, tile, block, kMasked);
      cute::warpgroup_wait<0>();
      fence(o);
      take(o, o, next);
    }
    release_values();
    split_weights<Traits::kParts>(weights, s);
  }

  // The tile's last product with V.
  CUTLASS_DEVICE void finish_values(Outputs& o, Weights const& weights, float const (&alpha)[CoordS::kRows]) {
    wait_values();
    if constexpr (Traits::kStaged) {
      Outputs t;
      start_values_of(t, weights);
      cute::warpgroup_wait<0>();
      fence(t);
      take(o, t, alpha);
    } else {
      start_values_of(o, weights);
      cute::warpgroup_wait<0>();
      fence(o);
    }
    release_values();
  }

  CUTLASS_DEVICE void compute_blocks(ForwardTile const& tile, TileRows& rows, Outputs& o) {
    const Share share = share_of(tile);
    int block = tile.after_block - 1;
    const int skipped = share.begin < share.end ? share.end : tile.first_block;
#pragma unroll 1
    for (; block >= skipped; --block) skip();
    if (block < tile.first_block) {
      release(smem.barriers.query_empty);
      return;
    }
    Weights weights;
    float alpha[CoordS::kRows];
    {
      Scores s;
      wait_keys();
      take_turn();
      start_scores_of(s);
      if constexpr (Traits::kStaged) {
        Accumulators<Traits::kPiece> scratch;
        finish_scores_of(s, scratch);
      }
      pass_turn();
      if (block == tile.after_block - 1) clear_tail(tile);
      cute::warpgroup_wait<0>();
      release_queries_behind(share, block);
      weigh(s, alpha, rows, tile, block, !(block >= share.whole_begin && block < share.whole_end));
      split_weights<Traits::kParts>(weights, s);
    }
    --block;
#pragma unroll 1
    for (; block >= share.whole_end && block >= share.begin; --block)
      step<true>(rows, o, weights, alpha, tile, share, block);
#pragma unroll 1
    for (; block >= share.whole_begin; --block) step<false>(rows, o, weights, alpha, tile, share, block);
#pragma unroll 1
    for (; block >= share.begin; --block) step<true>(rows, o, weights, alpha, tile, share, block);
    finish_values(o, weights, alpha);
#pragma unroll 1
    for (; block >= tile.first_block; --block) skip();
  }

  CUTLASS_DEVICE void compute_tiles() {
    if (consumer == kConsumers - 1) pass_turn();  // the first turn is warpgroup 0's
    TileRows rows(args.exponent, args.premultiply, 16 * warp + 64 * consumer, lane);
    ForwardTile& tile = smem.tiles[1 + 4 * consumer + warp];
    for (uint32_t turn = 0; next_tile(turn, tile);) {
      if (tile.rows <= 0) continue;
      const float* scales = static_cast<const float*>(args.query_scales.data) +
                            head_offset(args.query_scales, tile.at.batch, int(tile.at.group), int(tile.at.member)) +
                            tile.n.query_row + tile.row0;
      rows.start(tile, p, scales);
      Outputs o;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Traits::kOutputs; ++i) o[i] = 0.f;
      if (tile.first_block < tile.after_block) {
        smem.barriers.query_full.wait(query_phase);
        query_phase ^= 1;
        compute_blocks(tile, rows, o);
      }
      store(tile, rows, o);
    }
    if (consumer == 0) take_turn();  // leaves no barrier half full
  }

  CUTLASS_DEVICE void store(ForwardTile const& tile, TileRows& rows, Outputs const& o) const {
    float inverse[CoordS::kRows];
    rows.finish_sums(inverse, 1.f);
    store_lse(tile, rows);
    store_output(tile, rows, o, inverse);
  }

  CUTLASS_DEVICE void store_lse(ForwardTile const& tile, TileRows const& rows) const {
    if (p.lse.data == nullptr || lane % 4 != 0) return;
    float* lse = p.lse.data + head_offset(p.lse, tile.at.batch, int(tile.at.group), int(tile.at.member)) +
                 tile.n.query_row + tile.row0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) {
      const int row = rows.row_in_tile + 8 * i;
      if (row >= tile.rows) continue;
      const float reference = FoldedScale::reference(rows.state.max[i], rows.factors[i]);
      const float2 both = log_sum_exp<FoldedScale>(reference, rows.state.sum[i]);
      lse[row] = both.x;
      if (p.lse.low != nullptr) lse[row + (p.lse.low - p.lse.data)] = both.y;
    }
  }

  // Four lanes write 32 bytes of a row together. inverse: 0 for a row that sees nothing, whatever 0 * V gave.
  CUTLASS_DEVICE void store_output(ForwardTile const& tile, TileRows const& rows, Outputs const& o,
                                   float const (&inverse)[CoordO::kRows]) const {
    float* out = static_cast<float*>(p.out.data) +
                 head_offset(p.out, tile.at.batch, int(tile.at.group), int(tile.at.member)) +
                 offset(tile.n.query_row + tile.row0, p.out.stride_m) + 2 * (lane & 3);
    constexpr float kUnit = 1.f / (kWeightTop * float(1 << kTop));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordO::kRows; ++i) {
      const int row = rows.row_in_tile + 8 * i;
      const float factor = inverse[i] * kUnit;
      float* line = out + offset(row, p.out.stride_m);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < CoordO::kColumns; j += 2) {
        float2 two = make_float2(o[CoordO::index(i, j)] * factor * rows.value_scale,
                                 o[CoordO::index(i, j + 1)] * factor * rows.value_scale);
        if (inverse[i] == 0.f) two = make_float2(0.f, 0.f);
        if (row < tile.rows && 4 * j + 2 * (lane & 3) < p.value_dim) *reinterpret_cast<float2*>(line + 4 * j) = two;
      }
    }
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) forward_kernel(__grid_constant__ const ForwardArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  if (is_for_another_kernel(args.p)) return;
  ForwardBlock<Traits>(args, *reinterpret_cast<typename Traits::SharedStorage*>(memory)).run();
}

}  // namespace hopper_f32
}  // namespace memeff
