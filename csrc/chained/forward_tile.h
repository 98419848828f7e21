// What a forward block knows of its tile, and how the scores of one key block become weights in shared memory.
#pragma once

#include "chained/streamed_product.h"
#include "chained/traits.h"
#include "common/bias.h"
#include "common/dropout.h"
#include "common/sequences.h"
#include "common/tile_map.h"
#include "common/visibility.h"

namespace memeff {
namespace chained {

struct ForwardArgs {
  ForwardParams p;
  TileMap map;
  float premultiply;  // scores are multiplied by this first where the scale cannot be folded (scale <= 0), else 1
  float exponent;     // c of common/softmax.h
  bool bias_pairs;
  int bias_copy;  // bytes of a copy to shared memory, 0: direct (common/bias.h)
};

template <typename Traits>
struct ForwardTile {
  using Element = typename Traits::Element;
  using CoordS = typename Traits::CoordS;
  using CoordO = typename Traits::CoordO;
  using FragmentS = typename Traits::FragmentS;
  using FragmentO = typename Traits::FragmentO;
  using QkMma = typename Traits::QkMma;
  using PvMma = typename Traits::PvMma;
  using Exponent = typename Traits::Exponent;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr bool kFlush = Traits::kFlushKeys > 0;
  using State = SoftmaxState<CoordS::kRows, kFlush>;
  static constexpr int kTileM = Traits::kTileM, kTileN = Traits::kTileN, kValueTile = Traits::kValueTile;
  static constexpr bool kInMemory = Traits::Output::kInMemory;
  static constexpr bool kResident = Traits::Qk::kResident;
  static constexpr bool kAsync = Traits::Arch::kAsync;
  static constexpr bool kExchange = Traits::kWarpsN > 1;
  static constexpr int kSums = sizeof(Element) == 4 ? 4 : 1;  // of a row's weights in a key block

  ForwardArgs const& args;
  ForwardParams const& p;
  SharedStorage& smem;
  Problem const& n;       // in shared memory: seldom read, no registers
  Visibility const& see;  // likewise
  TileCoord at;
  typename Traits::DropoutState dropout;
  int thread, warp, lane;
  int warp_m, warp_n;  // this warp's place in the grid of warps
  int row0;            // first query of the tile
  int rows;            // valid queries of the tile; <= 0: nothing to do
  int value0, values;  // first column and valid columns of this block's values
  int keys_begin;      // the first key block that some row of the tile sees
  int keys_end;        // keys that some row of the tile sees
  int whole_end;       // keys before it are hidden from no row but for a window's left side
  Element const *query, *key, *value;
  BiasTile bias;
  State state;
  bool few;  // StreamedProduct

  CUTLASS_DEVICE ForwardTile(ForwardArgs const& args_, SharedStorage& smem_)
      : ForwardTile(args_, smem_, locate(args_.map, blockIdx.x)) {}
  CUTLASS_DEVICE ForwardTile(ForwardArgs const& args_, SharedStorage& smem_, TileCoord at_)
      : ForwardTile(args_, smem_, at_,
                    locate_problem<false>(args_.p, at_.batch, kTileM, at_.tile, !args_.map.longest_first)) {}
  CUTLASS_DEVICE ForwardTile(ForwardArgs const& args_, SharedStorage& smem_, TileCoord const& at_, Located const& found)
      : args(args_),
        p(args_.p),
        smem(smem_),
        n(smem_.scratch.n),
        see(smem_.scratch.see),
        at(at_),
        dropout(args_.p.dropout, found.problem.number() * args_.p.heads + at_.head) {
    thread = threadIdx.x;
    warp = cutlass::canonical_warp_idx_sync();
    lane = thread & 31;
    warp_m = warp % Traits::kWarpsM;
    warp_n = warp / Traits::kWarpsM;
    row0 = found.tile * kTileM;
    rows = found.problem.queries - row0 < kTileM ? found.problem.queries - row0 : kTileM;
    value0 = kInMemory ? 0 : at.slab * kValueTile;
    values = p.value_dim - value0;
    const Visibility limits(p, query_of(found.problem.queries - 1) + 1, found.problem.keys);
    const int first = query_of(row0), last = query_of(row0 + rows - 1);
    few = query_of(found.problem.queries - 1) < kFewQueries;
    whole_end = limits.limit(first);
    keys_begin = limits.first(first) / kTileN * kTileN;
    keys_end = limits.limit(last);
    take_part();
    if (thread == 0) {
      smem.scratch.n = found.problem;
      smem.scratch.see = limits;
      smem.scratch.whole_begin = limits.first(last);
    }
    // The main loops have barriers of their own before any of it is read, but for copies of pages and of the bias.
    if (is_packed(p.sequences) || Traits::kStageBias) __syncthreads();
    if (rows > 0) find_operands(found.problem);
  }

  // The query of a row.
  CUTLASS_DEVICE int query_of(int row) const { return row >> p.row_shift; }

  // This block's part of the key blocks, if they are cut into parts.
  CUTLASS_DEVICE void take_part() {
    if (args.map.splits == 1) return;
    const int blocks = keys_begin < keys_end ? (keys_end - keys_begin + kTileN - 1) / kTileN : 0;
    const int first = int(int64_t(blocks) * at.split / args.map.splits);
    const int after = int(int64_t(blocks) * (at.split + 1) / args.map.splits);
    const int end = keys_begin + after * kTileN;
    keys_begin += first * kTileN;
    keys_end = end < keys_end ? end : keys_end;
  }

  CUTLASS_DEVICE void find_operands(Problem const& problem) {
    const int group = int(at.group), member = int(at.member);
    const int64_t query_row = int64_t(problem.query_row) + row0;
    query = static_cast<Element const*>(p.query.data) + head_offset(p.query, at.batch, group, member) +
            offset(query_row, p.query.stride_m);
    key = static_cast<Element const*>(p.key.data) + head_offset(p.key, at.batch, group, member) +
          offset(problem.key_row, p.key.stride_m);
    value = static_cast<Element const*>(p.value.data) + head_offset(p.value, at.batch, group, member) +
            offset(problem.key_row, p.value.stride_m) + value0;
    if (thread == 0) find_results(group, member, query_row);
    if (Traits::kBias && p.bias.data != nullptr) {
      const bool own = p.sequences.own_bias;
      bias.data = bias_at(p.bias, own ? problem.number() : at.batch, group, member, own ? row0 : query_row,
                          own ? 0 : problem.key_row);
      bias.stride_m = p.bias.stride_m;
      bias.stride_n = p.bias.stride_n;
      bias.dtype = p.bias.dtype;
      bias.pairs = args.bias_pairs;
    }
  }

  CUTLASS_DEVICE void find_results(int group, int member, int64_t query_row) const {
    Partial const& part = p.partial;
    const bool fp32 = part.out.data != nullptr;
    OutputView const& view = fp32 ? part.out : p.out;
    const int64_t to = head_offset(view, at.batch, group, member) + offset(query_row, view.stride_m) + value0 +
                       offset(at.split, part.stride_split);
    smem.scratch.out = static_cast<char*>(view.data) + to * (fp32 ? 4 : int64_t(sizeof(Element)));
    float* lse = nullptr;
    if (part.sum != nullptr) {
      const int64_t head = offset(offset(at.split, p.batch) + at.batch, p.heads) + at.head;
      lse = part.sum + offset(head, p.queries) + query_row;
    } else if (p.lse.data != nullptr) {
      lse = p.lse.data + head_offset(p.lse, at.batch, group, member) + query_row;
    }
    smem.scratch.lse = at.slab == 0 ? lse : nullptr;
  }

  // The row that holds a key block's first key, counted from the sequence's first. A page holds whole key blocks.
  CUTLASS_DEVICE int64_t key_row(int key0) const {
    const Sequences& s = p.sequences;
    if (s.block_tables == nullptr) return key0;
    const int32_t page = __ldg(s.block_tables + offset(n.sequence, s.stride_table) + key0 / s.page_size);
    return offset(page, s.page_size) + key0 % s.page_size;
  }
  CUTLASS_DEVICE Element const* key_at(int key0) const { return key + offset(key_row(key0), p.key.stride_m); }
  CUTLASS_DEVICE Element const* value_at(int key0) const { return value + offset(key_row(key0), p.value.stride_m); }

  CUTLASS_DEVICE int warp_row() const { return warp_m * (kTileM / Traits::kWarpsM); }
  CUTLASS_DEVICE int warp_column() const { return warp_n * (kTileN / Traits::kWarpsN); }
  // One lane of those that hold parts of the same rows.
  CUTLASS_DEVICE bool row_leader() const {
    int shared = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int mask = 1; mask < 32; mask <<= 1) shared |= CoordS::rows_shared(mask) ? mask : 0;
    return (lane & shared) == 0;
  }

  // --- scores of one key block -> P in shared memory
  // -------------------------------------------------------------------

  // Starts the copy of a tile of the bias, where it passes through shared memory.
  CUTLASS_DEVICE void start_bias(int key0) const {
    if constexpr (Traits::kStageBias) {
      if (args.bias_copy == 0) return;
      const char* from = bias.data + offset(key0, bytes_of(bias.dtype));
      copy_bias<Traits::kThreads, Traits::kBiasRowBytes>(smem.bias, p.bias, from, args.bias_copy, rows, n.keys - key0,
                                                         thread);
      cutlass::arch::cp_async_fence();
    }
  }

  CUTLASS_DEVICE void add_bias_to(FragmentS& s, int key0) const {
    if constexpr (Traits::kStageBias) {
      if (args.bias_copy != 0) {
        add_staged_bias<Element, CoordS, Traits::kBiasRowBytes, false>(s, smem.bias, p.bias, p.scale, warp_row(),
                                                                       warp_column(), lane);
        return;
      }
    }
    add_bias<Element, CoordS>(s, bias, p.scale, warp_row(), key0 + warp_column(), lane, rows, n.keys);
  }

  // s: raw products -> logits (or raw products whose scale is folded), -inf where not visible.
  CUTLASS_DEVICE void finish_scores(FragmentS& s, int key0) const {
    if (Traits::kBias && p.bias.data != nullptr) {
      add_bias_to(s, key0);
    } else if (args.premultiply != 1.f) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < FragmentS::kElements; ++e) s[e] *= args.premultiply;
    }
    if (key0 + kTileN > whole_end || key0 < smem.scratch.whole_begin) {
      if (see.left < 0) {
        hide<false>(s, key0 + warp_column());
      } else {
        hide<true>(s, key0 + warp_column());
      }
    }
  }

  // Columns outside [first, limit) of each row become -inf. kLeft: first is not 0.
  template <bool kLeft>
  CUTLASS_DEVICE void hide(FragmentS& s, int column0) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) {
      const int row = query_of(row0 + warp_row() + CoordS::row(lane, i));
      const int limit = see.limit(row) - column0, first = kLeft ? see.first(row) - column0 : 0;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < CoordS::kColumns; ++j) {
        const int column = CoordS::column(lane, j);
        if (column >= limit || (kLeft && column < first)) s[CoordS::index(i, j)] = negative_infinity();
      }
    }
  }

  // The running maximum of a row takes in `max`; returns the factor for what was accumulated before.
  CUTLASS_DEVICE float raise_maximum(int i, float max) {
    const float before = state.max[i];
    state.max[i] = fmaxf(before, max);
    const float alpha = Exponent::rescale(before, Exponent::reference(state.max[i], args.exponent), args.exponent);
    state.rescale(i, alpha);
    return alpha;
  }

  // Row maxima of this warp's scores. Where other warps hold parts of the rows they are only published here;
  // store_weights, after a barrier, takes them in.
  CUTLASS_DEVICE void find_maximum(FragmentS const& s, float (&alpha)[CoordS::kRows]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) {
      float max = s[CoordS::index(i, 0)];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 1; j < CoordS::kColumns; ++j) max = fmaxf(max, s[CoordS::index(i, j)]);
      max = reduce_row<CoordS>(max, [](float a, float b) { return fmaxf(a, b); });
      if (!kExchange) {
        alpha[i] = raise_maximum(i, max);
      } else if (row_leader()) {
        smem.scratch.row_part[warp_n][warp_row() + CoordS::row(lane, i)] = max;
      }
    }
  }

  // s -> weights, stored as the second product's operand A. alpha: factor for what was accumulated before.
  CUTLASS_DEVICE void store_weights(FragmentS& s, float (&alpha)[CoordS::kRows], int key0) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) {
      if (kExchange) {
        float max = negative_infinity();
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < Traits::kWarpsN; ++n)
          max = fmaxf(max, smem.scratch.row_part[n][warp_row() + CoordS::row(lane, i)]);
        alpha[i] = raise_maximum(i, max);
      }
      const float reference = Exponent::reference(state.max[i], args.exponent);
      float sums[kSums] = {};  // side by side: shorter chains of rounding errors
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < CoordS::kColumns; ++j) {
        float& x = s[CoordS::index(i, j)];
        x = Exponent::weight(x, reference, args.exponent);
        sums[j % kSums] += x;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int n = kSums / 2; n > 0; n /= 2) {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < n; ++j) sums[j] += sums[j + n];
      }
      state.sum[i] += sums[0];
    }
    if constexpr (Traits::kDropout) {
      each_cell<CoordS, false>(dropout, row0 + warp_row(), key0 + warp_column(), lane, [&](int i, int j, bool kept) {
        if (!kept) s[CoordS::index(i, j)] = 0.f;
      });
    }
    if constexpr (!Traits::Output::kWeightsInRegisters) {
      auto operand = smem.pv.operand_A_ref();
      Traits::ProbabilityStore::store(s, operand.data(), operand.layout(), warp_row(), warp_column(), lane);
    }
  }
};

}  // namespace chained
}  // namespace memeff
