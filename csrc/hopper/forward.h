// The forward kernel on wgmma and TMA: one warpgroup copies, two or three compute 64 queries each.
//
//   copies      Q K(n) | K(n-1) V(n) | K(n-2) V(n-1) | ...                     rings of kStages in shared memory
//   warpgroup 0        | S(n-1), O += P(n) V(n) | softmax(n-1) | S(n-2), ...
//   warpgroup 1                                 | S(n-1), O += P(n) V(n) | softmax(n-1) | ...
//
// Within a warpgroup the tensor cores run S of the next key block and P V of this one while it turns the former into
// weights; between warpgroups named barriers let one issue its products while another computes exponentials. P stays in
// registers as operand A. Key blocks run from the last to the first, so the masked ones come first.
#pragma once

#include "cute/arch/copy_sm90.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "hopper/warpgroup_rows.h"

namespace memeff {
namespace hopper {

template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  CUTLASS_DEVICE void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

template <typename Traits>
struct ForwardBlock {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using CoordS = typename Traits::CoordS;
  using Exponent = typename Traits::Exponent;
  using NamedBarrier = cutlass::arch::NamedBarrier;
  using RingOf = Ring<Traits::kStages>;
  static constexpr int kTileM = Traits::kTileM, kTileN = Traits::kTileN, kConsumers = Traits::kConsumers;
  using Scores = Accumulators<kTileN>;
  using Outputs = Accumulators<Traits::kWidth>;
  using Weights = uint32_t[Traits::kScores / 2];

  ForwardArgs const& args;
  ForwardParams const& p;
  SharedStorage& smem;
  ForwardTile const& tile;
  int thread, warp, lane, consumer;  // consumer: -1 in the warpgroup that copies; warp: within the warpgroup

  CUTLASS_DEVICE ForwardBlock(ForwardArgs const& args_, SharedStorage& smem_)
      : args(args_), p(args_.p), smem(smem_), tile(smem_.tile) {
    const int all = cutlass::canonical_warp_idx_sync();
    thread = threadIdx.x % 128, warp = all % 4, lane = threadIdx.x % 32, consumer = all / 4 - 1;
  }

  CUTLASS_DEVICE void run() {
    const ForwardTile found = find_tile<kTileM, kTileN>(args);
    if (found.rows <= 0) return;
    if (threadIdx.x == 0) {
      smem.tile = found;
      start_barriers();
    }
    __syncthreads();
    if (consumer < 0) {
      cutlass::arch::warpgroup_reg_dealloc<Traits::kCopyRegisters>();
      if (warp == 0 && cute::elect_one_sync()) copy_all();
    } else {
      cutlass::arch::warpgroup_reg_alloc<Traits::kMathRegisters>();
      compute();
    }
  }

  CUTLASS_DEVICE void start_barriers() {
    smem.barriers.query.init(1);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kStages; ++i) {
      smem.barriers.key_full[i].init(1);
      smem.barriers.value_full[i].init(1);
      smem.barriers.key_empty[i].init(4 * kConsumers);  // a lane of each warp arrives
      smem.barriers.value_empty[i].init(4 * kConsumers);
    }
    cutlass::arch::fence_barrier_init();
  }

  // --- the warpgroup that copies: one thread ---

  // A tile of all columns: kBytes of each chunk.
  template <int kBytes>
  CUTLASS_DEVICE void copy(Operand const& from, char* to, cutlass::arch::ClusterTransactionBarrier& full, int row,
                           cute::TMA::CacheHintSm90 hint) const {
    full.arrive_and_expect_tx(Traits::kChunks * kBytes);
    CUTLASS_PRAGMA_UNROLL
    for (int c = 0; c < Traits::kChunks; ++c) {
      cute::SM90_TMA_LOAD_5D::copy(&from.map, reinterpret_cast<uint64_t*>(&full), uint64_t(hint), to + c * kBytes,
                                   c * kChunk, row, int(tile.at.member) * from.step_h, int(tile.at.group) * from.step_g,
                                   int(tile.at.batch) * from.step_b);
    }
  }

  CUTLASS_DEVICE void copy_keys(int block, RingOf& ring) const {
    smem.barriers.key_empty[ring.stage].wait(ring.phase ^ 1);
    copy<Traits::kKeyChunkBytes>(args.key, smem.key[ring.stage], smem.barriers.key_full[ring.stage],
                                 tile.n.key_row + block * kTileN, cute::TMA::CacheHintSm90::EVICT_LAST);
    ring.next();
  }
  CUTLASS_DEVICE void copy_values(int block, RingOf& ring) const {
    smem.barriers.value_empty[ring.stage].wait(ring.phase ^ 1);
    copy<Traits::kKeyChunkBytes>(args.value, smem.value[ring.stage], smem.barriers.value_full[ring.stage],
                                 tile.n.key_row + block * kTileN, cute::TMA::CacheHintSm90::EVICT_LAST);
    ring.next();
  }

  CUTLASS_DEVICE void copy_all() const {
    const int first_block = tile.first_block, after_block = tile.after_block;
    if (first_block >= after_block) return;
    RingOf keys, values;
    copy<Traits::kQueryChunkBytes>(args.query, smem.query, smem.barriers.query, tile.n.query_row + tile.row0,
                                   cute::TMA::CacheHintSm90::EVICT_FIRST);
    copy_keys(after_block - 1, keys);
    for (int block = after_block - 2; block >= first_block; --block) {
      copy_keys(block, keys);
      copy_values(block + 1, values);
    }
    copy_values(first_block, values);
  }

  // --- a warpgroup that computes ---

  // Products are issued by one warpgroup after the other: barrier i is warpgroup i's turn.
  static constexpr uint32_t kTurnThreads = 256;  // the warpgroup that waits and the one that passes the turn on
  CUTLASS_DEVICE void take_turn() const { NamedBarrier::sync(kTurnThreads, uint32_t(consumer)); }
  CUTLASS_DEVICE void pass_turn() const {
    NamedBarrier::arrive(kTurnThreads, uint32_t(consumer + 1 == kConsumers ? 0 : consumer + 1));
  }
  CUTLASS_DEVICE void sync_warpgroup() const { NamedBarrier::sync(128, uint32_t(kConsumers + consumer)); }
  CUTLASS_DEVICE void sync_consumers() const { NamedBarrier::sync(Traits::kConsumerThreads, uint32_t(2 * kConsumers)); }

  CUTLASS_DEVICE void release(cutlass::arch::ClusterBarrier& empty) const {
    if (lane == 0) empty.arrive();
  }

  CUTLASS_DEVICE static uint32_t address(void const* in_shared) { return cute::cast_smem_ptr_to_uint(in_shared); }

  CUTLASS_DEVICE void start_scores_of(Scores& s, int stage) const {
    const uint64_t a = make_descriptor(address(smem.query) + consumer * 64 * kRowBytes, Traits::kQueryChunkBytes);
    const uint64_t b = make_descriptor(address(smem.key[stage]), Traits::kKeyChunkBytes);
    fence(s);
    cute::warpgroup_arrive();
    start_scores<Element, kTileN, Traits::kQkSteps>(s, a, Traits::kQueryChunkBytes, b, Traits::kKeyChunkBytes);
    cute::warpgroup_commit_batch();
  }
  CUTLASS_DEVICE void start_values_of(Outputs& o, Weights const& weights, int stage) const {
    const uint64_t v = make_descriptor(address(smem.value[stage]), Traits::kKeyChunkBytes);
    fence(o);
    cute::warpgroup_arrive();
    start_values<Element, Traits::kWidth, Traits::kPvSteps>(o, weights, v);
    cute::warpgroup_commit_batch();
  }

  // Rows of V behind a packed sequence's last key are those of another: zeros, lest 0 * NaN counts. All consumers.
  CUTLASS_DEVICE void clear_tail(int block, RingOf const& values) const {
    const int keys = tile.n.keys - block * kTileN;
    if (!is_packed(p.sequences) || keys >= kTileN) return;
    smem.barriers.value_full[values.stage].wait(values.phase);
    __syncwarp();
    char* v = smem.value[values.stage];
    const int all = consumer * 128 + thread;
    for (int i = all; i < (kTileN - keys) * (kRowBytes / 16) * Traits::kChunks; i += Traits::kConsumerThreads) {
      const int piece = i % 8, rest = i / 8, row = keys + rest % (kTileN - keys), chunk = rest / (kTileN - keys);
      *reinterpret_cast<uint4*>(v + chunk * Traits::kKeyChunkBytes + row * kRowBytes + piece * 16) = uint4{0, 0, 0, 0};
    }
    cutlass::arch::fence_view_async_shared();
    sync_consumers();
  }

  CUTLASS_DEVICE void drop(Scores& s, typename Traits::DropoutState const& dropout, int block) const {
    if constexpr (Traits::kDropout) {
      each_cell<CoordS, false>(dropout, tile.row0 + consumer * 64 + warp * 16, block * kTileN, lane,
                               [&](int i, int j, bool kept) {
                                 if (!kept) s[CoordS::index(i, j)] = 0.f;
                               });
    }
  }

  struct Math {
    WarpgroupRows<Traits> rows;
    Outputs o;
    Weights weights;
    RingOf keys, values;
    typename Traits::DropoutState dropout;
  };

  CUTLASS_DEVICE static void rescale(Outputs& o, float const (&alpha)[CoordS::kRows]) {
    using CoordO = typename Traits::CoordO;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordO::kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < CoordO::kColumns; ++j) o[CoordO::index(i, j)] *= alpha[i];
    }
  }

  // S(block) and O += P(block + 1) V(block + 1), then P(block).
  template <bool kMasked>
  CUTLASS_DEVICE void step(Math& m, int block) const {
    Scores s;
    float alpha[CoordS::kRows];
    smem.barriers.key_full[m.keys.stage].wait(m.keys.phase);
    take_turn();
    start_scores_of(s, m.keys.stage);
    smem.barriers.value_full[m.values.stage].wait(m.values.phase);
    start_values_of(m.o, m.weights, m.values.stage);
    pass_turn();
    cute::warpgroup_wait<1>();
    fence(s);
    release(smem.barriers.key_empty[m.keys.stage]);
    m.keys.next();
    m.rows.template finish<kMasked>(s, block);
    m.rows.weigh(s, alpha);
    drop(s, m.dropout, block);
    cute::warpgroup_wait<0>();
    fence(m.o);
    release(smem.barriers.value_empty[m.values.stage]);
    m.values.next();
    rescale(m.o, alpha);
    pack_weights<Element>(m.weights, s);
  }

  CUTLASS_DEVICE void first_step(Math& m, int block) const {
    Scores s;
    float alpha[CoordS::kRows];
    smem.barriers.query.wait(0);
    smem.barriers.key_full[0].wait(0);
    start_scores_of(s, 0);
    cute::warpgroup_wait<0>();
    fence(s);
    release(smem.barriers.key_empty[0]);
    m.keys.next();
    m.rows.template finish<true>(s, block);
    m.rows.weigh(s, alpha);
    drop(s, m.dropout, block);
    pack_weights<Element>(m.weights, s);
    clear_tail(block, m.values);
  }

  CUTLASS_DEVICE void compute() const {
    const int row = tile.row0 + 64 * consumer, first_block = tile.first_block, after_block = tile.after_block;
    Math m{WarpgroupRows<Traits>(args, tile.see, row + 16 * warp, lane)};
    m.dropout = typename Traits::DropoutState(p.dropout, tile.n.number() * p.heads + tile.at.head);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Traits::kOutputs; ++i) m.o[i] = 0.f;
    if (first_block < after_block) {
      if (consumer == kConsumers - 1) pass_turn();  // the first turn is warpgroup 0's
      // Blocks [whole_begin, whole_end) are hidden from no row of the warpgroup.
      const int whole_end = max(tile.see.limit(row) / kTileN, first_block);
      const int whole_begin = max((tile.see.first(row + 63) + kTileN - 1) / kTileN, first_block);
      int block = after_block - 1;
      first_step(m, block--);
      for (; block >= whole_end; --block) step<true>(m, block);
      for (; block >= whole_begin; --block) step<false>(m, block);
      for (; block >= first_block; --block) step<true>(m, block);
      smem.barriers.value_full[m.values.stage].wait(m.values.phase);
      start_values_of(m.o, m.weights, m.values.stage);
      cute::warpgroup_wait<0>();
      fence(m.o);
      if (consumer == 0) take_turn();  // leaves no barrier half full
    }
    store(m);
  }

  // --- output ---

  CUTLASS_DEVICE void store(Math& m) const {
    m.rows.finish_sums();
    float inverse[CoordS::kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) {
      inverse[i] = m.rows.state.sum[i] == 0.f ? 0.f : 1.f / m.rows.state.sum[i];
      if constexpr (Traits::kDropout) inverse[i] *= p.dropout.keep_scale;
    }
    store_lse(m.rows);
    using CoordO = typename Traits::CoordO;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordO::kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < CoordO::kColumns; ++j) {
        float& x = m.o[CoordO::index(i, j)];
        x = inverse[i] == 0.f ? 0.f : x * inverse[i];  // 0, whatever 0 * V gave
      }
    }
    stage_output(m.o);
    sync_warpgroup();
    write_output();
  }

  CUTLASS_DEVICE void store_lse(WarpgroupRows<Traits> const& r) const {
    if (p.lse.data == nullptr || lane % 4 != 0) return;
    float* lse = p.lse.data + head_offset(p.lse, tile.at.batch, int(tile.at.group), int(tile.at.member)) +
                 tile.n.query_row + tile.row0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) {
      const int row = 64 * consumer + 16 * warp + CoordS::row(lane, i);
      if (row >= tile.rows) continue;
      const float2 both = log_sum_exp<Exponent>(Exponent::reference(r.state.max[i], args.exponent), r.state.sum[i]);
      lse[row] = both.x;
      if (p.lse.low != nullptr) lse[row + (p.lse.low - p.lse.data)] = both.y;
    }
  }

  // Where 16 bytes of O lie: in the place of the same queries of Q, in chunks and swizzled as there.
  CUTLASS_DEVICE char* output_piece(int row, int piece) const {
    const int chunk = piece / 8, x = piece % 8;
    return smem.query + chunk * Traits::kQueryChunkBytes + (consumer * 64 + row) * kRowBytes + ((x ^ (row & 7)) << 4);
  }

  CUTLASS_DEVICE void stage_output(Outputs const& o) const {
    uint32_t packed[Traits::kOutputs / 2];
    pack_weights<Element>(packed, o);
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < Traits::kWidth / 16; ++k) {
      // Four 8x8 tiles: rows 0-7 and 8-15 of columns 16 k .. + 7, then of the next 8.
      char* to = output_piece(warp * 16 + lane % 16, 2 * k + lane / 16);
      cute::SM90_U32x4_STSM_N::copy(packed[4 * k], packed[4 * k + 1], packed[4 * k + 2], packed[4 * k + 3],
                                    *reinterpret_cast<cute::uint128_t*>(to));
    }
  }

  CUTLASS_DEVICE void write_output() const {
    Element* out = static_cast<Element*>(p.out.data) +
                   head_offset(p.out, tile.at.batch, int(tile.at.group), int(tile.at.member)) +
                   offset(tile.n.query_row + tile.row0 + 64 * consumer, p.out.stride_m);
    constexpr int kPieces = Traits::kWidth / 8;  // 16 bytes each
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 64 * kPieces / 128; ++i) {
      const int at_piece = i * 128 + thread, row = at_piece / kPieces, piece = at_piece % kPieces;
      if (64 * consumer + row < tile.rows && piece * 8 < p.value_dim) {
        *reinterpret_cast<uint4*>(out + offset(row, p.out.stride_m) + piece * 8) =
            *reinterpret_cast<uint4 const*>(output_piece(row, piece));
      }
    }
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, 1) forward_kernel(__grid_constant__ const ForwardArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  ForwardBlock<Traits>(args, *reinterpret_cast<typename Traits::SharedStorage*>(memory)).run();
}

}  // namespace hopper
}  // namespace memeff
