// The kernel that writes dBias: a thread block owns one tile of the bias, recomputes dS for every batch entry, head and
// tile that the bias is broadcast to, and adds them up in registers: fp32, a fixed order, no dense [B, H, M, N].
//
//   items of a block = every combination of the summed dimensions (b, g, h, query tiles, key tiles)
#pragma once

#include "chained/backward_tile.h"
#include "chained/bias_gradient.h"

namespace memeff {
namespace chained {

// Which tile of which head: the mixed-radix number `index` over the dimensions that are summed (or those that are not).
struct BiasItem {
  uint32_t batch, group, member, query_tile, key_tile;

  CUTLASS_DEVICE BiasItem(uint32_t index, GradBiasView const& bias, bool summed, BackwardArgs const& args,
                          ForwardParams const& f) {
    const auto digit = [&](bool is_summed, uint32_t size) {
      if (is_summed != summed) return 0u;
      const uint32_t value = index % size;
      index /= size;
      return value;
    };
    key_tile = digit(bias.sum_n, args.loop_tiles);
    query_tile = digit(bias.sum_m, args.owner_tiles);
    member = digit(bias.sum_h, f.heads_per_group);
    group = digit(bias.sum_g, f.heads / f.heads_per_group);
    batch = digit(bias.sum_b, uint32_t(f.batch));
  }
};

template <typename Traits>
struct BackwardBiasBlock : BackwardTile<Traits> {
  using Tile = BackwardTile<Traits>;
  using Tile::args;
  using Tile::f;
  using Tile::kTileM;
  using Tile::kTileN;
  using Tile::lane;
  using Tile::p;
  using Tile::smem;
  using Tile::thread;
  using typename Tile::Coord;
  using typename Tile::FragmentS;
  using typename Tile::Side;

  uint32_t split;
  BiasItem own;

  CUTLASS_DEVICE BackwardBiasBlock(BackwardArgs const& args_, typename Traits::SharedStorage& smem_)
      : Tile(args_, smem_),
        split(blockIdx.x % args_.splits),
        own(blockIdx.x / args_.splits, args_.p.grad_bias, false, args_, args_.p.forward) {}

  CUTLASS_DEVICE uint32_t items() const {
    GradBiasView const& bias = p.grad_bias;
    return (bias.sum_b ? uint32_t(f.batch) : 1) * (bias.sum_g ? f.heads / f.heads_per_group : 1) *
           (bias.sum_h ? f.heads_per_group : 1) * (bias.sum_m ? args.owner_tiles : 1) *
           (bias.sum_n ? args.loop_tiles : 1);
  }

  // sum += dS of one item.
  template <typename Product>
  CUTLASS_DEVICE void add_item(FragmentS& sum, uint32_t index, Product& product) {
    BiasItem item(index, p.grad_bias, true, args, f);
    item.batch += own.batch, item.group += own.group, item.member += own.member;
    item.query_tile += own.query_tile, item.key_tile += own.key_tile;
    const Head head{item.batch, item.group * f.heads_per_group + item.member, item.group, item.member};
    const Side owner = this->query_side(head, item.query_tile * kTileM, kTileM);
    const Side loop = this->key_side(head, item.key_tile * kTileN, kTileN);
    if (loop.row0 >= this->see.limit(owner.row0 + owner.rows - 1)) return;  // no query of the tile sees these keys
    __syncthreads();  // every warp is done with the operands and statistics
    this->load_statistics(head, owner.row0);
    this->start_bias(head, owner, loop);
    FragmentS s, ds;
    if constexpr (Traits::kResident) {
      this->load_owner(owner);
      this->load_loop(loop, 0);
      cutlass::arch::cp_async_fence();
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // operands and statistics are there
      this->multiply_resident(s, ds, 0);
    } else {
      auto pass = product.start(owner.first, loop.first);
      this->multiply_streamed(s, ds, product, pass, owner, loop);
    }
    this->weigh(s, ds, head, owner, loop);
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < FragmentS::kElements; ++e) sum[e] += ds[e];
  }

  CUTLASS_DEVICE int64_t own_at() const {
    return offset(split, p.grad_bias.stride_split) + bias_gradient_at(p.grad_bias, own.batch, own.group, own.member);
  }
  CUTLASS_DEVICE void write(int row, int column, float value) const {
    write_bias_element(p.grad_bias, own_at(), row, column, value);
  }

  // Sums over the tile's rows, its columns or both; every row and column outside M x N has contributed 0. Softmax does
  // not change when a row's scores all move by the same amount, so a sum over all keys is 0 exactly, whatever rounding
  // left of it; only NaN stays.
  CUTLASS_DEVICE void write_sums(FragmentS const& sum) const {
    GradBiasView const& bias = p.grad_bias;
    auto& tile = smem.last.tile;
    __syncthreads();  // the tile takes the operands' place
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Coord::kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Coord::kColumns; ++j) {
        tile[this->warp_row + Coord::row(lane, i)][this->warp_column + Coord::column(lane, j)] =
            sum[Coord::index(i, j)];
      }
    }
    __syncthreads();
    if (bias.sum_m) {
      for (int column = thread; column < kTileN; column += Traits::kThreads) {
        float total = 0.f;
        for (int row = 0; row < kTileM; ++row) total += tile[row][column];
        const int at = own.key_tile * kTileN + column;
        if (bias.sum_n) {
          tile[0][column] = total;
        } else if (at < f.keys) {
          write(0, at, total);
        }
      }
      if (!bias.sum_n) return;
      __syncthreads();
      if (thread != 0) return;
      float total = 0.f;
      for (int column = 0; column < kTileN; ++column) total += tile[0][column];
      write(0, 0, total - total);
    } else {
      for (int row = thread; row < kTileM; row += Traits::kThreads) {
        float total = 0.f;
        for (int column = 0; column < kTileN; ++column) total += tile[row][column];
        const int at = own.query_tile * kTileM + row;
        if (at < f.queries) write(at, 0, total - total);
      }
    }
  }

  template <typename Product>
  CUTLASS_DEVICE void run_with(Product& product) {
    const uint64_t count = items();
    const uint32_t first = uint32_t(count * split / args.splits), last = uint32_t(count * (split + 1) / args.splits);
    FragmentS sum;
    sum.clear();
    for (uint32_t item = first; item < last; ++item) add_item(sum, item, product);
    if (p.grad_bias.sum_m || p.grad_bias.sum_n) {
      write_sums(sum);
    } else {
      write_bias_tile<typename Traits::Element, Coord>(
          sum, p.grad_bias, own_at(), own.query_tile * kTileM + this->warp_row,
          own.key_tile * kTileN + this->warp_column, f.queries, f.keys, lane);
    }
  }

  CUTLASS_DEVICE void run() {
    if constexpr (Traits::kResident) {
      int nothing = 0;
      run_with(nothing);
    } else {
      StreamedProduct<Traits> product(smem.operands.qk, thread, this->warp, lane);
      run_with(product);
    }
  }
};

}  // namespace chained
}  // namespace memeff
