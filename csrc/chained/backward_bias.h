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
        own(blockIdx.x / args_.splits, args_.p.grad_bias, false, args_, args_.p.forward) {
    // Of batch entry 0: sizes are the same. Where a head starts is each item's.
    this->set_problem(locate_problem<false>(f, 0, kTileM, 0, false).problem);
  }

  CUTLASS_DEVICE uint32_t items() const {
    GradBiasView const& bias = p.grad_bias;
    return (bias.sum_b ? uint32_t(f.batch) : 1) * (bias.sum_g ? f.heads / f.heads_per_group : 1) *
           (bias.sum_h ? f.heads_per_group : 1) * (bias.sum_m ? args.owner_tiles : 1) *
           (bias.sum_n ? args.loop_tiles : 1);
  }

  // One recomputed tile of dS.
  struct Item {
    typename Traits::HeadStart start;
    Side owner, loop;
  };
  CUTLASS_DEVICE Item item_of(uint32_t index) const {
    BiasItem item(index, p.grad_bias, true, args, f);
    item.batch += own.batch, item.group += own.group, item.member += own.member;
    item.query_tile += own.query_tile, item.key_tile += own.key_tile;
    const Head head{item.batch, item.group * f.heads_per_group + item.member, item.group, item.member};
    Problem problem{};  // never of packed sequences
    problem.batch = item.batch;
    const auto start = this->start_of(problem, head);
    return {start, this->query_side(start, item.query_tile * kTileM, kTileM),
            this->key_side(start, item.key_tile * kTileN, kTileN)};
  }
  CUTLASS_DEVICE void add(FragmentS& sum, FragmentS& s, FragmentS& ds, Item const& item) const {
    this->weigh(s, ds, item.start, item.owner, item.loop);
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < FragmentS::kElements; ++e) sum[e] += ds[e];
  }
  CUTLASS_DEVICE void load_item(Item const& item, int buffer) const {
    if constexpr (Traits::kInParts) {
      load_parts(item);
    } else {
      load_pairs(item, buffer);
    }
  }
  // One operand after the other through one staging area, in which every thread has words of its own.
  CUTLASS_DEVICE void load_parts(Item const& item) const {
    auto& owner = smem.operands.owner[0];
    auto& loop = smem.operands.loop[0];
    load_operand<typename Traits::QueryLoader>(item.owner.first, Tile::score_a(owner.first));
    load_operand<typename Traits::QueryLoader>(item.owner.second, Tile::score_a(owner.second));
    load_operand<typename Traits::KeyLoader>(item.loop.first, Tile::score_b(loop.first));
    load_operand<typename Traits::KeyLoader>(item.loop.second, Tile::score_b(loop.second));
  }
  template <typename Loader, typename Ref>
  CUTLASS_DEVICE void load_operand(TileSource<typename Traits::Element> const& from, Ref to) const {
    this->template start_parts<Loader>(from, to, smem.operands.staging);
    this->template finish_parts<Loader>(to, smem.operands.staging);
  }
  CUTLASS_DEVICE void load_pairs(Item const& item, int buffer) const {
    this->load_owner(item.owner, buffer);
    this->load_loop(item.loop, buffer);
    cutlass::arch::cp_async_fence();
  }

  // sum += dS of items first .. last.
  CUTLASS_DEVICE void run_resident(FragmentS& sum, uint32_t first, uint32_t last) const {
    if (first == last) return;
    Item item = item_of(first);
    load_item(item, 0);
    this->start_bias(item.start, item.owner, item.loop);
    this->load_statistics(item.start, item.owner.row0);
    int buffer = 0;
    for (uint32_t index = first; index < last; ++index) {
      const bool more = index + 1 < last;
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // operands, bias and statistics are there; every warp is done with the other buffer
      const Item next = item_of(more ? index + 1 : index);
      if (Traits::kBuffers == 2 && more) load_item(next, buffer ^ 1);
      if (this->any_visible(item.owner, item.loop)) {
        FragmentS s, ds;
        this->multiply_resident(s, ds, buffer, buffer);
        add(sum, s, ds, item);
      }
      __syncthreads();  // every warp is done with the bias, the statistics and this buffer
      if (more) {
        this->load_statistics(next.start, next.owner.row0);
        if (p.grad_bias.sum_m || p.grad_bias.sum_n) this->start_bias(next.start, next.owner, next.loop);
        if (Traits::kBuffers == 1) load_item(next, 0);
      }
      if (Traits::kBuffers == 2) buffer ^= 1;
      item = next;
    }
  }

  CUTLASS_DEVICE void run_streamed(FragmentS& sum, uint32_t first, uint32_t last) const {
    StreamedProduct<Traits> product(smem.operands.qk, thread, this->warp, lane, f.queries <= kFewQueries,
                                    f.dropout.seed != nullptr);
    for (uint32_t index = first; index < last; ++index) {
      const Item item = item_of(index);
      if (!this->any_visible(item.owner, item.loop)) continue;
      __syncthreads();  // every warp is done with the bias, the statistics and the operands
      this->load_statistics(item.start, item.owner.row0);
      this->start_bias(item.start, item.owner, item.loop);
      FragmentS s, ds;
      auto pass = product.start(item.owner.first, item.loop.first);
      this->multiply_streamed(s, ds, product, pass, item.owner, item.loop);
      add(sum, s, ds, item);
    }
  }

  CUTLASS_DEVICE int64_t own_at() const {
    return offset(split, p.grad_bias.stride_split) + bias_gradient_at(p.grad_bias, own.batch, own.group, own.member);
  }
  CUTLASS_DEVICE void write(int row, int column, float value) const {
    write_bias_element(p.grad_bias, own_at(), row, column, value);
  }

  // In eight sums, added up in pairs: a single one of 64 numbers that cancel has ten times the rounding errors.
  template <int kCount, typename At>
  CUTLASS_DEVICE static float sum_of(At at) {
    static_assert(kCount % 8 == 0, "eight sums");
    float part[8] = {};
    for (int first = 0; first < kCount; first += 8) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < 8; ++e) part[e] += at(first + e);
    }
    return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
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
        const float total = sum_of<kTileM>([&](int row) { return tile[row][column]; });
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
      const float total = sum_of<kTileN>([&](int column) { return tile[0][column]; });
      write(0, 0, total - total);
    } else {
      for (int row = thread; row < kTileM; row += Traits::kThreads) {
        const float total = sum_of<kTileN>([&](int column) { return tile[row][column]; });
        const int at = own.query_tile * kTileM + row;
        if (at < f.queries) write(at, 0, total - total);
      }
    }
  }

  CUTLASS_DEVICE void run() {
    const uint64_t count = items();
    const uint32_t first = uint32_t(count * split / args.splits), last = uint32_t(count * (split + 1) / args.splits);
    FragmentS sum;
    sum.clear();
    if constexpr (Traits::kResident) {
      run_resident(sum, first, last);
    } else {
      run_streamed(sum, first, last);
    }
    if (p.grad_bias.sum_m || p.grad_bias.sum_n) {
      write_sums(sum);
    } else {
      write_bias_tile<typename Traits::Element, Coord>(
          sum, p.grad_bias, own_at(), own.query_tile * kTileM + this->warp_row,
          own.key_tile * kTileN + this->warp_column, f.queries, f.keys, lane);
    }
  }
};

}  // namespace chained
}  // namespace memeff
