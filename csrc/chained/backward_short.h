// The kernel for whole short sequences: one thread block a (batch entry, head) computes S and dP once and takes dK, dV
// and dQ from them, five products instead of the seven of two kernels, with every tile loaded once.
//
//   all tiles of Q and dO in shared memory; for each tile of keys:  K, V
//     for each tile of queries:  S^T, dP^T -> P^T, dS^T -> shared memory;  dV += P^T dO,  dK += dS^T Q,  dQ[tile] += dS
//     K
//   dQ of every tile of queries stays in registers to the end
#pragma once

#include "chained/backward_tile.h"

namespace memeff {
namespace chained {

template <typename Traits>
struct BackwardShortBlock : BackwardTile<Traits> {
  using Tile = BackwardTile<Traits>;
  using Tile::args;
  using Tile::f;
  using Tile::kTileM;
  using Tile::kTileN;
  using Tile::lane;
  using Tile::p;
  using Tile::smem;
  using Tile::thread;
  using Tile::warp;
  using typename Tile::Element;
  using typename Tile::FragmentS;
  using typename Tile::OutMma;
  using typename Tile::Side;
  using TransposedMma = typename Traits::TransposedMma;
  using FragmentO = typename OutMma::FragmentC;
  using FragmentQ = typename TransposedMma::FragmentC;
  using Coord = typename Traits::CoordO;
  using CoordQ = AccCoord<typename TransposedMma::Operator::IteratorC>;
  static_assert(kTileM == kTileN, "one tile serves as operand of every product");
  static constexpr int kTiles = Traits::kBuffers;  // of either side
  static constexpr int kWarpsQ = TransposedMma::WarpCount::kM * TransposedMma::WarpCount::kN;
  static constexpr int kParts = Traits::kWarps / kWarpsQ;  // of the keys, in the product that gives dQ
  static constexpr int kPartKeys = kTileM / kParts;
  static_assert(kParts <= 2 && kWarpsQ * 32 <= 128 / kParts, "PartSums has room for one part of 64 threads");

  Head head;

  CUTLASS_DEVICE BackwardShortBlock(BackwardArgs const& args_, typename Traits::SharedStorage& smem_)
      : Tile(args_, smem_), head(first_head(args_)) {
    this->set_problem(locate_problem<false>(f, head.batch, kTileM, 0, false).problem, head);
  }

  CUTLASS_DEVICE static Head first_head(BackwardArgs const& args) {
    const Quotient by_heads = divide(blockIdx.x, args.by_heads);
    return Head::of(by_heads.quotient, by_heads.rest, args);
  }

  // One pair of tiles; ends when P and dS may be overwritten.
  CUTLASS_DEVICE void add_pair(FragmentO& dk, FragmentO& dv, FragmentQ& dq, Side const& keys, int tile) {
    const Side queries = this->query_side(smem.start, tile * kTileN, kTileN);
    if (!this->any_visible(queries, keys)) return;
    FragmentS s, dp;
    this->multiply_resident(s, dp, tile);
    this->statistics0 = tile * kTileN;
    this->weigh(s, dp, smem.start, keys, queries);
    this->store(s, Tile::out_a(smem.operands.p));
    this->store(dp, Tile::out_a(smem.operands.ds));
    __syncthreads();  // P and dS are there
    auto& pair = smem.operands.loop[tile];
    const OutMma by_p(Tile::out_a(smem.operands.p), Tile::out_b(pair.second), thread, warp, lane);
    by_p(dv, queries.rows);
    const OutMma by_ds(Tile::out_a(smem.operands.ds), Tile::out_b(pair.first), thread, warp, lane);
    by_ds(dk, queries.rows);
    using RefA = typename TransposedMma::Base::TensorRefA;
    using RefB = typename TransposedMma::Base::TensorRefB;
    const int part = warp / kWarpsQ, left = keys.rows - part * kPartKeys;
    const RefA ds(smem.operands.ds.data() + part * kPartKeys * kTileN, TransposedMma::Base::SharedStorage::LayoutA());
    const RefB k(smem.operands.owner[0].first.data() + part * kPartKeys * Traits::kValueTile,
                 Traits::OutStorage::LayoutB());
    const TransposedMma by_transposed(ds, k, thread, warp % kWarpsQ, lane);
    by_transposed(dq, left < kPartKeys ? left : kPartKeys);
    __syncthreads();  // every warp is done with P and dS
  }

  // A warp's accumulators, C their AccCoord. Rows are 16-byte aligned, widths multiples of 16 bytes: pairs are never
  // cut.
  template <typename C, typename Fragment>
  CUTLASS_DEVICE void store_tile(Fragment const& out, GradView const& view, int row0, int column0, int rows, int width,
                                 float scale) const {
    Element* data = static_cast<Element*>(view.data) + head_offset(view, head.batch, head.group, head.member);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < C::kRows; ++i) {
      const int row = row0 + C::row(lane, i);
      Element* line = data + offset(row, view.stride_m);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < C::kColumns; j += 2) {
        const int column = column0 + C::column(lane, j);
        if (row >= rows || column >= width) continue;
        cutlass::AlignedArray<Element, 2> two;
        two[0] = Element(out[C::index(i, j)] * scale);
        two[1] = Element(out[C::index(i, j + 1)] * scale);
        *reinterpret_cast<cutlass::AlignedArray<Element, 2>*>(line + column) = two;
      }
    }
  }

  CUTLASS_DEVICE void run() {
    Side keys = this->key_side(smem.start, 0, kTileM);
    this->load_owner(keys);
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile * kTileN < f.queries) this->load_loop(this->query_side(smem.start, tile * kTileN, kTileN), tile);
    }
    cutlass::arch::cp_async_fence();
    this->load_statistics(smem.start, 0);
    FragmentQ dq[kTiles];
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) dq[tile].clear();
#pragma unroll 1
    for (int key0 = 0; key0 < f.keys; key0 += kTileM) {
      if (key0 > 0) {  // the last pair's barrier freed the operands
        keys = this->key_side(smem.start, key0, kTileM);
        this->load_owner(keys);
        cutlass::arch::cp_async_fence();
      }
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // operands and statistics are there
      FragmentO dk, dv;
      dk.clear();
      dv.clear();
      CUTLASS_PRAGMA_UNROLL
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile * kTileN < f.queries) add_pair(dk, dv, dq[tile], keys, tile);
      }
      const int row0 = key0 + this->warp_row, column0 = warp / Traits::kWarpsM * OutMma::Operator::Shape::kN;
      store_tile<Coord>(dk, p.grad_key, row0, column0, f.keys, f.head_dim, f.scale);
      store_tile<Coord>(dv, p.grad_value, row0, column0, f.keys, f.value_dim, 1.f);
    }
    if constexpr (kParts > 1) add_parts(dq);
    if (warp >= kWarpsQ) return;
    const int row0 = warp % TransposedMma::WarpCount::kM * 32, column0 = warp / TransposedMma::WarpCount::kM * 32;
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      store_tile<CoordQ>(dq[tile], p.grad_query, tile * kTileN + row0, column0, f.queries, f.head_dim, f.scale);
    }
  }

  // The warps of the second part of the keys hand their dQ to those of the first.
  CUTLASS_DEVICE void add_parts(FragmentQ (&dq)[kTiles]) const {
    auto& sums = smem.last.dq;  // in the operands' place, which the last pair's barrier freed
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < FragmentQ::kElements; ++e) {
        if (warp >= kWarpsQ) sums[tile][e][thread - kWarpsQ * 32] = dq[tile][e];
      }
    }
    __syncthreads();
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kTiles; ++tile) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < FragmentQ::kElements; ++e) {
        if (warp < kWarpsQ) dq[tile][e] += sums[tile][e][thread];
      }
    }
  }
};

}  // namespace chained
}  // namespace memeff
