// Short sequences: a block copies K and V of a (batch entry, head) whole to shared memory; its warps take strips of
// queries, each strip in registers from Q to O. The shortest (kPart = kKeys) in a single pass: no running maximum, no
// rescaling of O; others a part of the keys at a time.
//
//   block   [K -> shared memory] [V -> shared memory]
//   warp      Q (registers)       S = Q K^T    m = max S    P = 2^(S c - m)    next Q starts    O = P V -> memory, lse
//                                 |<---- all scores of the strip in registers ---->|<-- P: half of them -->|
//
// Blocks of other heads on the same SM fill the gaps. Fixed lengths only.
#pragma once

#include "common/bias.h"
#include "common/tile_map.h"
#include "register/strip.h"

namespace memeff {
namespace registers {

// kKeys: the longest N. kMaxK: the largest K and Kv. kPart: keys whose scores a warp holds at once. kStrips: of 16
// queries, that a warp takes at once. kRounds: a block takes at most so many a warp.
template <typename Element_, int kKeys_, int kMaxK_, int kPart_, int kStrips_, int kWarps_, int kRounds_, bool kStage_,
          bool kBias_, int kBlocksPerSm_>
struct ShortTraits {
  using Element = Element_;
  static constexpr int kKeys = kKeys_, kMaxK = kMaxK_, kPart = kPart_, kStrips = kStrips_;
  static constexpr int kWarps = kWarps_, kRounds = kRounds_;
  static constexpr int kThreads = 32 * kWarps, kBlocksPerSm = kBlocksPerSm_;
  static constexpr bool kBias = kBias_;
  static constexpr int kTileM = 16 * kStrips * kWarps * kRounds, kTileN = kKeys, kValueTile = kMaxK;
  // Queries pass through shared memory too, each warp's own, where that leaves as many blocks an SM.
  static constexpr bool kStageQuery = kStage_;
  static constexpr int kKeyBytes = kKeys * Rows<kMaxK>::kRowBytes;
  static constexpr int kQueryBytes = kStageQuery ? 16 * kStrips * Rows<kMaxK>::kRowBytes : 0;  // of a warp
  static constexpr int kSmemBytes = 2 * kKeyBytes + kWarps * kQueryBytes;
  using Exponent = std::conditional_t<kBias, PlainLogits, FoldedScale>;
  static_assert(sizeof(Element) == 2 && kKeys % 16 == 0 && kMaxK % 16 == 0, "whole steps of m16n8k16");
  static constexpr bool kOnce = kPart == kKeys;
  static_assert(kOnce ? kStrips * (kKeys / 2 + kMaxK / 4) <= 240 && kStrips * (kKeys / 4 + kMaxK / 2) <= 240
                      : kStrips * (kPart / 2 + kMaxK * 3 / 4) <= 224,
                "S and Q, then P and O, fit a lane's registers; in parts all of them");
  static_assert(kSmemBytes <= 227 * 1024, "no GPU gives a thread block more than 227 KiB of shared memory");
};

struct ShortArgs {
  ForwardParams p;
  TileMap map;
  int rows;           // queries of a block: whole rounds of its warps
  float premultiply;  // as in chained::ForwardArgs
  float exponent;
  float slack;  // RunningSoftmax's, in raw scores
  bool bias_pairs;
};

template <typename Traits>
struct ShortBlock {
  using Element = typename Traits::Element;
  using Exponent = typename Traits::Exponent;
  static constexpr int kKeys = Traits::kKeys, kMaxK = Traits::kMaxK, kStrips = Traits::kStrips;
  static constexpr int kRows = 2 * kStrips;  // of a lane
  using FragmentO = StripFragment<kStrips, kMaxK>;
  using CoordO = StripCoord<kStrips, kMaxK>;
  using Query = QueryFragment<Element, kStrips, kMaxK>;
  static constexpr int kStripRows = 16 * kStrips;
  static constexpr int kTail = 32;  // keys that one test covers

  ShortArgs const& args;
  ForwardParams const& p;
  char* smem;
  int thread, warp, lane;
  int keys;  // N
  int row0;  // first query of the block
  int rows;  // queries of the block
  TileCoord at;
  Element const* query;         // the block's first row
  RunningSoftmax<kRows> state;  // of the strips at hand

  CUTLASS_DEVICE ShortBlock(ShortArgs const& args_, char* smem_) : args(args_), p(args_.p), smem(smem_) {
    thread = threadIdx.x;
    warp = cutlass::canonical_warp_idx_sync();
    lane = thread & 31;
    keys = p.keys;
    at = locate(args.map, blockIdx.x);
    row0 = int(at.tile) * args.rows;
    rows = p.queries - row0 < args.rows ? p.queries - row0 : args.rows;
    query = static_cast<Element const*>(p.query.data) + head_offset(p.query, at.batch, at.group, at.member) +
            offset(row0, p.query.stride_m);
  }

  // Two groups of copies: K, V.
  CUTLASS_DEVICE void start_copies() const {
    auto const* key = static_cast<Element const*>(p.key.data) + head_offset(p.key, at.batch, at.group, at.member);
    copy_rows<Rows<kMaxK>, Traits::kThreads, kKeys>(smem, key, p.key.stride_m, keys, p.head_dim, thread);
    cutlass::arch::cp_async_fence();
    auto const* value = static_cast<Element const*>(p.value.data) + head_offset(p.value, at.batch, at.group, at.member);
    copy_rows<Rows<kMaxK>, Traits::kThreads, kKeys>(smem + Traits::kKeyBytes, value, p.value.stride_m, keys,
                                                    p.value_dim, thread);
    cutlass::arch::cp_async_fence();
  }

  // --- queries: started early, fetched when needed ---

  CUTLASS_DEVICE char* query_rows() const { return smem + 2 * Traits::kKeyBytes + warp * Traits::kQueryBytes; }
  CUTLASS_DEVICE void start_query(Query& q, int row) const {
    Element const* from = query + offset(row, p.query.stride_m);
    if constexpr (Traits::kStageQuery) {
      copy_rows<Rows<kMaxK>, 32, kStripRows>(query_rows(), from, p.query.stride_m, rows - row, p.head_dim, lane);
      cutlass::arch::cp_async_fence();
    } else {
      q.load(from, p.query.stride_m, rows - row, p.head_dim, lane);
    }
  }
  // The copy has arrived.
  CUTLASS_DEVICE void fetch_query(Query& q) const {
    if constexpr (Traits::kStageQuery) {
      __syncwarp();
      q.load(ptx::shared_address(query_rows()), lane);
      __syncwarp();  // the next copy may start
    }
  }

  // --- keys [key0, key0 + kWidth) ---

  template <int kWidth>
  CUTLASS_DEVICE void multiply_scores(StripFragment<kStrips, kWidth>& s, Query const& q, int key0) const {
    const uint32_t from = ptx::shared_address(smem) + key0 * Rows<kMaxK>::kRowBytes;
    const KeyReader<Element, kStrips, kMaxK> reader(from, lane);
    s.clear();
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kWidth / 8; ++tile) reader.multiply(&s[4 * kStrips * tile], q, tile);
  }

  // Raw products -> logits (or raw products whose scale is folded), -inf where not visible. row: the strips' first,
  // counted from the block's.
  template <int kWidth>
  CUTLASS_DEVICE void finish_scores(StripFragment<kStrips, kWidth>& s, int row, int key0) const {
    using Coord = StripCoord<kStrips, kWidth>;
    if constexpr (Traits::kBias) {
      BiasTile bias;
      bias.data = bias_at(p.bias, at.batch, at.group, at.member, row0, 0);
      bias.stride_m = p.bias.stride_m, bias.stride_n = p.bias.stride_n;
      bias.dtype = p.bias.dtype, bias.pairs = args.bias_pairs;
      add_bias<Element, Coord>(s, bias, p.scale, row, key0, lane, rows, keys);
    } else if (args.premultiply != 1.f) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < s.kElements; ++e) s[e] *= args.premultiply;
    }
    if (p.anchor != Anchor::kNone) {
      hide_keys<Coord>(s, RowVisibility(p), row0 + row, key0, lane);
    } else if (key0 + kWidth > keys) {
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kWidth; first += kTail) {
        if (key0 + first + kTail > keys) hide_tail<kWidth>(s, first, keys - key0);
      }
    }
  }

  // Keys from `left` on, of kTail from `first` on.
  template <int kWidth>
  CUTLASS_DEVICE void hide_tail(StripFragment<kStrips, kWidth>& s, int first, int left) const {
    using Coord = StripCoord<kStrips, kWidth>;
    CUTLASS_PRAGMA_UNROLL
    for (int j = first / 4; j < (first + kTail) / 4 && j < Coord::kColumns; ++j) {
      const bool hidden = Coord::column(lane, j) >= left;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kRows; ++i) {
        if (hidden) s[Coord::index(i, j)] = negative_infinity();
      }
    }
  }

  CUTLASS_DEVICE uint32_t values(int key0) const {
    return ptx::shared_address(smem) + Traits::kKeyBytes + key0 * Rows<kMaxK>::kRowBytes;
  }

  // --- a strip ---

  // All keys at once: s -> weights.
  CUTLASS_DEVICE void weigh_all(StripFragment<kStrips, kKeys>& s) {
    using Coord = StripCoord<kStrips, kKeys>;
    float reference[kRows];
    find_maxima<Coord>(s, state.max);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) state.max[i] = quad_max(state.max[i]), state.sum[i] = 0.f;
    state.template references<Exponent>(reference, args.exponent);
    weigh_scores<Element, Exponent, Coord>(s, state.sum, reference, args.exponent);
  }

  // One part of the keys after the other. kSums: those of the LSE.
  template <bool kSums>
  CUTLASS_DEVICE void add_parts(FragmentO& o, Query const& q, int row) {
    state.start();
    const int last = row + kStripRows < rows ? row + kStripRows - 1 : rows - 1;
    const RowVisibility see(p);
    each_part<Traits::kPart, kKeys>(see.first(row0 + row), see.limit(row0 + last), [&](int key0, auto width) {
      using Coord = StripCoord<kStrips, width>;
      StripFragment<kStrips, width> s;
      multiply_scores<width>(s, q, key0);
      finish_scores<width>(s, row, key0);
      state.template raise<Exponent, Coord, CoordO>(o, s, args.exponent, args.slack);
      float reference[kRows];
      state.template references<Exponent>(reference, args.exponent);
      weigh_scores<Element, Exponent, Coord, kSums>(s, state.sum, reference, args.exponent);
      multiply_values<Element, kStrips, width, kMaxK>(o, s, values(key0), lane, state.rounded);
    });
  }

  CUTLASS_DEVICE void store(FragmentO const& o, int row) {
    float reference[kRows], (&sum)[kRows] = state.sum;
    state.template references<Exponent>(reference, args.exponent);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) sum[i] = quad_sum(sum[i]);
    if (p.lse.data != nullptr) {
      const int64_t first = head_offset(p.lse, at.batch, at.group, at.member) + row0 + row;
      store_lse<Exponent>(p.lse.data + first, p.lse.low == nullptr ? nullptr : p.lse.low + first, reference, sum,
                          rows - row, lane);
    }
    auto* out = static_cast<Element*>(p.out.data) + head_offset(p.out, at.batch, at.group, at.member) +
                offset(row0 + row, p.out.stride_m);
    if constexpr (!Traits::kOnce) state.divisors(sum);
    store_output<Element, kStrips, kMaxK>(out, p.out.stride_m, o, sum, rows - row, p.value_dim, lane);
  }

  static constexpr int kStep = Traits::kWarps * kStripRows;  // from one strip of a warp to its next

  CUTLASS_DEVICE void start_next_query(Query& q, int row) const {
    if (row + kStep < rows) start_query(q, row + kStep);
  }

  CUTLASS_DEVICE void run_once(Query& q) {
    int row = warp * kStripRows;
    cutlass::arch::cp_async_wait<1>();
    __syncthreads();  // K and the first queries are there
#pragma unroll 1
    for (bool first = true; first || row < rows; first = false, row += kStep) {
      StripFragment<kStrips, kKeys> s;
      if (row < rows) {
        if (!first) cutlass::arch::cp_async_wait<0>();
        fetch_query(q);
        multiply_scores<kKeys>(s, q, 0);
        finish_scores<kKeys>(s, row, 0);
        weigh_all(s);
      }
      if (first) {
        cutlass::arch::cp_async_wait<0>();
        __syncthreads();  // V is there
      }
      if (row >= rows) return;
      start_next_query(q, row);
      FragmentO o;
      o.clear();
      multiply_values<Element, kStrips, kKeys, kMaxK>(o, s, values(0), lane);
      store(o, row);
    }
  }

  CUTLASS_DEVICE void run_in_parts(Query& q) {
    cutlass::arch::cp_async_wait<0>();
    __syncthreads();  // everything is there
    if (p.lse.data != nullptr) {
      run_strips<true>(q);
    } else {
      run_strips<false>(q);
    }
  }
  template <bool kSums>
  CUTLASS_DEVICE void run_strips(Query& q) {
#pragma unroll 1
    for (int row = warp * kStripRows; row < rows; row += kStep) {
      cutlass::arch::cp_async_wait<0>();
      fetch_query(q);
      FragmentO o;
      o.clear();
      if constexpr (Traits::kStageQuery) start_next_query(q, row);
      add_parts<kSums>(o, q, row);
      if constexpr (!Traits::kStageQuery) start_next_query(q, row);
      store(o, row);
    }
  }

  CUTLASS_DEVICE void run() {
    Query q;
    start_query(q, warp * kStripRows);
    start_copies();
    if constexpr (Traits::kOnce) {
      run_once(q);
    } else {
      run_in_parts(q);
    }
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    short_kernel(__grid_constant__ const ShortArgs args) {
  extern __shared__ __align__(128) char memory[];
  ShortBlock<Traits>(args, memory).run();
}

}  // namespace registers
}  // namespace memeff
