// The kernels that write dQ (queries own the block's rows) and dK, dV (keys own them). Resident, one step, time down:
//
//   copies (cp.async)              tensor cores                      other units
//   B1, B2 of step j+1 in flight | S = A1 B1^T, dP = A2 B2^T       |
//   (kBuffers = 2)               |                                 |  P = exp(S - lse), dS = P (dP - delta) -> smem
//   bias of step j+1             | second += P B2, first += dS B1  |  lse, delta of step j+1
//
// with two barriers a step (three with one buffer: the copies of j+1 then start after the last product of j, and other
// blocks of the SM cover them). Streamed kernels run S and dP through the pipeline one after the other and start S of
// step j+1 before the last output product of step j.
#pragma once

#include "chained/backward_tile.h"
#include "chained/bias_gradient.h"

namespace memeff {
namespace chained {

template <typename Traits>
struct BackwardBlock : BackwardTile<Traits> {
  using Tile = BackwardTile<Traits>;
  using typename Tile::Coord;
  using typename Tile::Element;
  using typename Tile::FragmentS;
  using typename Tile::OutMma;
  using typename Tile::Side;
  using FragmentO = typename OutMma::FragmentC;
  using Tile::args;
  using Tile::f;
  using Tile::kOwnerKeys;
  using Tile::kTileM;
  using Tile::kTileN;
  using Tile::lane;
  using Tile::n;
  using Tile::p;
  using Tile::see;
  using Tile::smem;
  using Tile::thread;
  using Tile::warp;
  static constexpr bool kAsync = Traits::Arch::kAsync;

  // One step of the loop: a tile of the other side, of one of the query heads that share the owner's rows.
  struct Step {
    int head, tile;
  };

  Head owner_head;  // of the owner rows; where keys own, the first of the query heads that share them
  Side owner;
  int stored;           // rows of the owner's tile that the gradient has; <= 0: nothing to do
  int split, column0;   // part of the loop, first output column
  int first_tile, end;  // loop tiles that see something of the owner
  int steps = 0;        // this block's part of the loop
  Step now, next;

  CUTLASS_DEVICE BackwardBlock(BackwardArgs const& args_, typename Traits::SharedStorage& smem_) : Tile(args_, smem_) {
    uint32_t rest = blockIdx.x;
    split = column0 = 0;
    if (args.splits > 1) split = rest % args.splits, rest /= args.splits;
    if (args.slabs > 1) column0 = rest % args.slabs * Traits::kValueTile, rest /= args.slabs;
    const Quotient by_tiles = divide(rest, args.by_tiles), by_heads = divide(by_tiles.quotient, args.by_heads);
    int tile = int(by_tiles.rest);
    if (!kOwnerKeys) tile = int(args.owner_tiles) - 1 - tile;  // causal: the longest rows first
    const uint32_t heads_per_owner = kOwnerKeys ? p.heads_per_kv : 1;
    owner_head = Head::of(by_heads.quotient, by_heads.rest * heads_per_owner, args);
    const Located found = locate_problem<kOwnerKeys>(f, owner_head.batch, kTileM, uint32_t(tile), kOwnerKeys);
    this->set_problem(found.problem, owner_head);
    const int row0 = found.tile * kTileM;
    stored = (kOwnerKeys ? n.key_rows : n.queries) - row0;
    if (stored <= 0) return;
    stored = stored < kTileM ? stored : kTileM;
    owner = kOwnerKeys ? this->key_side(smem.start, row0, kTileM) : this->query_side(smem.start, row0, kTileM);
    const int last = row0 + owner.rows - 1;
    first_tile = (kOwnerKeys ? see.first_query(row0) : see.first(row0)) / kTileN;
    end = ((kOwnerKeys ? see.limit_query(last) : see.limit(last)) + kTileN - 1) / kTileN;
    if (owner.rows == 0 || end < first_tile) end = first_tile;
    const int per_head = end - first_tile;
    const int64_t all = int64_t(per_head) * heads_per_owner;
    int first = 0;
    steps = int(all);
    if (args.splits > 1) {
      first = int(all * split / args.splits);
      steps = int(all * (split + 1) / args.splits) - first;
    }
    if (steps == 0) return;
    const int head = kOwnerKeys && first > 0 ? first / per_head : 0;
    now = {head, first_tile + first - head * per_head};
    next = after(now);
  }

  CUTLASS_DEVICE Step after(Step step) const {
    if (++step.tile == end && kOwnerKeys) {
      step.tile = first_tile;
      ++step.head;
    }
    return step;
  }
  // The query heads that share a key head are neighbours in its group.
  CUTLASS_DEVICE typename Traits::HeadStart start_of(Step const& step) const {
    typename Traits::HeadStart at = smem.start;
    if constexpr (kOwnerKeys) {
      at.query += offset(step.head, f.query.stride_h);
      at.grad_out += offset(step.head, p.grad_out.stride_h);
      at.lse += offset(step.head, f.lse.stride_h);
      if (at.lse_low != nullptr) at.lse_low += offset(step.head, f.lse.stride_h);
      at.delta += offset(step.head, f.queries);
      if (at.bias != nullptr) at.bias += offset(step.head, f.bias.stride_h) * bytes_of(f.bias.dtype);
      if constexpr (Traits::kDropout) at.dropout.batch_head += step.head;
    }
    return at;
  }
  CUTLASS_DEVICE void advance() {
    now = next;
    next = after(next);
  }
  CUTLASS_DEVICE Side loop_side(Step const& step) const {
    const int row0 = step.tile * kTileN;
    return kOwnerKeys ? this->query_side(start_of(step), row0, kTileN) : this->key_side(start_of(step), row0, kTileN);
  }
  // Where keys own, the statistics follow the loop.
  CUTLASS_DEVICE void load_statistics_of(Step const& step) const {
    if (kOwnerKeys) this->load_statistics(start_of(step), step.tile * kTileN);
  }
  CUTLASS_DEVICE void start_bias_of(Step const& step) const {
    if constexpr (Traits::kStageBias) this->start_bias(start_of(step), owner, loop_side(step));
  }
  CUTLASS_DEVICE void write_bias(FragmentS const& ds, int tile) const {
    if constexpr (Traits::kBias && Traits::kWhat == Gradient::kQuery) {
      if (!args.write_bias || column0 != 0) return;
      const bool own = f.sequences.own_bias;
      const int64_t row = own ? 0 : n.query_row, column = own ? 0 : n.key_row;
      const int64_t at =
          bias_gradient_at(p.grad_bias, own ? n.number() : n.batch, owner_head.group, owner_head.member) +
          offset(row, p.grad_bias.stride_m) + offset(column, p.grad_bias.stride_n);
      write_bias_tile<Element, Coord>(ds, p.grad_bias, at, owner.row0 + this->warp_row,
                                      tile * kTileN + this->warp_column, n.queries, n.keys, lane);
    }
  }
  // Tiles that no query of this block sees. With packed sequences they are zero already.
  CUTLASS_DEVICE void clear_bias() const {
    if constexpr (Traits::kBias && Traits::kWhat == Gradient::kQuery) {
      if (!args.write_bias || split + 1 != int(args.splits) || is_packed(f.sequences)) return;
      FragmentS zero;
      zero.clear();
#pragma unroll 1
      for (int tile = 0; tile < int(args.loop_tiles); ++tile) {
        if (tile < first_tile || tile >= end) write_bias(zero, tile);
      }
    }
  }

  CUTLASS_DEVICE void run_resident(FragmentO& first, FragmentO& second) {
    static_assert(kAsync, "resident operands are copied by cp.async");
    if (steps == 0) return;
    this->load_owner(owner);
    this->load_loop(loop_side(now), 0);
    cutlass::arch::cp_async_fence();
    start_bias_of(now);
    if (!kOwnerKeys) this->load_statistics(smem.start, owner.row0);
    load_statistics_of(now);
    int buffer = 0;
    for (; steps > 0; --steps, advance()) {
      const bool more = steps > 1;
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // operands and statistics are there; every warp is done with the other buffer, P and dS
      if (Traits::kBuffers == 2 && more) load_next(buffer ^ 1);
      const Side loop = loop_side(now);
      FragmentS s, dp;
      this->multiply_resident(s, dp, buffer);
      this->weigh(s, dp, start_of(now), owner, loop);
      if constexpr (Traits::kSecond) this->store(s, Tile::out_a(smem.operands.p));
      if constexpr (Traits::kFirst) this->store(dp, Tile::out_a(smem.operands.ds));
      write_bias(dp, now.tile);
      __syncthreads();  // P and dS are there; statistics and bias are used
      if (more) load_statistics_of(next);
      if (more) start_bias_of(next);
      auto& pair = smem.operands.loop[buffer];
      if constexpr (Traits::kSecond) {
        const OutMma product(Tile::out_a(smem.operands.p), Tile::out_b(pair.second), thread, warp, lane);
        product(second, loop.rows);
      }
      if constexpr (Traits::kFirst) {
        const OutMma product(Tile::out_a(smem.operands.ds), Tile::out_b(pair.first), thread, warp, lane);
        product(first, loop.rows);
      }
      if (Traits::kBuffers == 1) {
        __syncthreads();  // every warp is done with the operands
        if (more) load_next(0);
      } else {
        buffer ^= 1;
      }
    }
  }
  CUTLASS_DEVICE void load_next(int buffer) const {
    this->load_loop(loop_side(next), buffer);
    cutlass::arch::cp_async_fence();
  }

  // The output product of one slab: P or dS to shared memory, the slab beside it.
  template <typename Loader>
  CUTLASS_DEVICE void start_slab(Loader& loader, TileSource<Element> const& slab) const {
    loader.start(slab.data + column0, slab.row_stride, slab.rows, slab.columns - column0);
    if (kAsync) cutlass::arch::cp_async_fence();
  }
  template <typename Loader>
  CUTLASS_DEVICE void finish_slab(Loader& loader, FragmentS const& a) const {
    this->store(a, smem.operands.out.operand_A_ref());
    loader.finish();
    if (kAsync) cutlass::arch::cp_async_wait<0>();
    __syncthreads();  // both operands are there
  }

  CUTLASS_DEVICE void run_streamed(FragmentO& first, FragmentO& second) {
    if (steps == 0) return;
    StreamedProduct<Traits> product(smem.operands.qk, thread, warp, lane, n.queries <= kFewQueries,
                                    f.dropout.seed != nullptr);
    typename Traits::ValueLoader loader(smem.operands.out.operand_B_ref(), thread);
    const OutMma multiply(smem.operands.out, thread, warp, lane);
    if (!kOwnerKeys) this->load_statistics(smem.start, owner.row0);
    load_statistics_of(now);
    start_bias_of(now);
    auto pass = product.start(owner.first, loop_side(now).first);
    for (; steps > 0; --steps, advance()) {
      const Side loop = loop_side(now);
      FragmentS s, dp;
      dp.clear();
      this->multiply_streamed(s, dp, product, pass, owner, loop);
      start_slab(loader, Traits::kSecond ? loop.second : loop.first);
      this->weigh(s, dp, start_of(now), owner, loop);
      write_bias(dp, now.tile);
      if constexpr (Traits::kBoth) {
        finish_slab(loader, s);
        multiply(second, loop.rows);
        __syncthreads();  // every warp is done with P and the slab
        start_slab(loader, loop.first);
      }
      finish_slab(loader, Traits::kFirst ? dp : s);  // its barrier: statistics and bias are used
      if (steps > 1) {
        load_statistics_of(next);
        start_bias_of(next);
        pass = product.start(owner.first, loop_side(next).first);
      }
      multiply(Traits::kFirst ? first : second, loop.rows);
    }
  }

  // Rows of `view` for the owner's tile, columns from column0 on; splits write fp32 partial sums.
  CUTLASS_DEVICE void store_gradient(FragmentO const& out, GradView const& view, int width) {
    if (view.data == nullptr) return;  // not wanted
    const int64_t row = int64_t(kOwnerKeys ? n.key_row : n.query_row) + owner.row0;
    const int64_t at =
        head_offset(view, owner_head.batch, owner_head.group, owner_head.member) + offset(row, view.stride_m) + column0;
    if (view.splits > 1) {
      store_partial(out, static_cast<float*>(view.data) + offset(split, view.stride_split) + at, view.stride_m,
                    width - column0, smem.scale[0]);
      return;
    }
    const cutlass::layout::RowMajor layout(view.stride_m);
    typename Traits::OutputIterator::Params to(layout);
    typename Traits::OutputIterator destination(to, static_cast<Element*>(view.data) + at,
                                                cutlass::MatrixCoord(stored, width - column0), thread);
    typename Traits::Visitor visitor(destination, typename Traits::Source(), smem.scale);
    typename Traits::Epilogue epilogue(smem.last, thread, warp, lane);
    epilogue(visitor, out);
  }

  CUTLASS_DEVICE void store_partial(FragmentO const& out, float* data, int64_t stride, int columns, float scale) const {
    const int first = warp / Traits::kWarpsM * OutMma::Operator::Shape::kN;
    store_within<typename Traits::CoordO>(data, stride, this->warp_row, first, stored, columns, lane,
                                          [&](int, int e) { return out[e] * scale; });
  }

  CUTLASS_DEVICE void run() {
    if (stored <= 0) return;
    FragmentO first, second;
    first.clear();
    second.clear();
    set_scale(Traits::kFirst ? f.scale : f.dropout.keep_scale);
    if constexpr (Traits::kResident) {
      run_resident(first, second);
    } else {
      run_streamed(first, second);
    }
    clear_bias();
    __syncthreads();  // scales are there; the epilogues' storage overlaps the operands
    if constexpr (Traits::kFirst) store_gradient(first, kOwnerKeys ? p.grad_key : p.grad_query, f.head_dim);
    if constexpr (Traits::kBoth) {
      __syncthreads();  // one epilogue's storage and scales serve both
      set_scale(f.dropout.keep_scale);
      __syncthreads();
    }
    if constexpr (Traits::kSecond) store_gradient(second, p.grad_value, f.value_dim);
  }

  CUTLASS_DEVICE void set_scale(float scale) const {
    for (int i = thread; i < kTileM; i += Traits::kThreads) smem.scale[i] = scale;
  }
};

}  // namespace chained
}  // namespace memeff
