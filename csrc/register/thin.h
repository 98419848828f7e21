// Any N, K in steps of 16: a warp owns its queries to the end. Their fragments, the scores of a key block, weights and
// outputs stay in registers; keys and values pass through shared memory, a block ahead:
//
//   copies      [Q][K V (0)] [K V (1)]       [K V (2)]
//   barrier                 =               =               =
//   warp                      S m P O (0)     S m P O (1)     ...
//
// With small K the exponent unit and the issue slots bound, so that the running maximum costs next to nothing
// (RunningSoftmax). Fixed lengths only.
#pragma once

#include "common/tile_map.h"
#include "register/strip.h"

namespace memeff {
namespace registers {

// kMaxK: the largest K and Kv. kKeys: of a block. kPart: keys whose scores a warp holds at once. kStrips: of 16
// queries, of a warp.
template <typename Element_, int kMaxK_, int kKeys_, int kPart_, int kStrips_, int kWarps_, int kBlocksPerSm_>
struct ThinTraits {
  using Element = Element_;
  static constexpr int kMaxK = kMaxK_, kKeys = kKeys_, kPart = kPart_, kStrips = kStrips_, kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kTileM = 16 * kStrips * kWarps, kTileN = kKeys, kValueTile = kMaxK;
  static constexpr int kKeyBytes = kKeys * Rows<kMaxK>::kRowBytes;
  // Two buffers of keys and values; the queries come by the second one.
  static constexpr int kQueryBytes = kTileM * Rows<kMaxK>::kRowBytes;
  static constexpr int kSmemBytes = 2 * kKeyBytes + (2 * kKeyBytes > kQueryBytes ? 2 * kKeyBytes : kQueryBytes);
  // A loop without the LSE's sums beside that with them: where the additions bound. K = 80 has no registers for two.
  static constexpr bool kMaySkipSums = kMaxK <= 32;
  static_assert(sizeof(Element) == 2 && kPart % 16 == 0 && kMaxK % 16 == 0 && kKeys % kPart == 0,
                "whole steps of m16n8k16");
  static_assert(kStrips * (kPart / 2 + kMaxK / 2 + kMaxK / 4) <= 224, "S, O and Q fit a lane's registers");
};

struct ThinArgs {
  ForwardParams p;
  TileMap map;
  float premultiply;  // as in chained::ForwardArgs
  float exponent;
  float slack;  // RunningSoftmax's, in raw scores
};

template <typename Traits>
struct ThinBlock {
  using Element = typename Traits::Element;
  using Exponent = FoldedScale;
  static constexpr int kKeys = Traits::kKeys, kPart = Traits::kPart, kMaxK = Traits::kMaxK, kStrips = Traits::kStrips;
  static constexpr int kRows = 2 * kStrips;  // of a lane
  using Coord = StripCoord<kStrips, kPart>;
  using CoordO = StripCoord<kStrips, kMaxK>;
  using FragmentS = StripFragment<kStrips, kPart>;
  using FragmentO = StripFragment<kStrips, kMaxK>;
  using Copier = RowCopier<Rows<kMaxK>, Traits::kThreads, kKeys, Element>;
  using Query = QueryFragment<Element, kStrips, kMaxK>;

  ThinArgs const& args;
  ForwardParams const& p;
  char* smem;
  int thread, warp, lane;
  TileCoord at;
  int row0, rows;              // of the block
  int keys_begin, keys_end;    // that some query of the block sees, of this part
  int whole_begin, whole_end;  // keys in between are hidden from no query
  RunningSoftmax<kRows> state;

  CUTLASS_DEVICE ThinBlock(ThinArgs const& args_, char* smem_) : args(args_), p(args_.p), smem(smem_) {
    thread = threadIdx.x;
    warp = cutlass::canonical_warp_idx_sync();
    lane = thread & 31;
    at = locate(args.map, blockIdx.x);
    row0 = int(at.tile) * Traits::kTileM;
    rows = p.queries - row0 < Traits::kTileM ? p.queries - row0 : Traits::kTileM;
    const RowVisibility see(p);
    const int last = row0 + rows - 1;
    whole_begin = see.first(last), whole_end = see.limit(row0);
    keys_begin = see.first(row0) / kKeys * kKeys, keys_end = see.limit(last);
    state.start();
  }

  CUTLASS_DEVICE int warp_row() const { return warp * 16 * kStrips; }

  CUTLASS_DEVICE void start_queries() const {
    auto const* query = static_cast<Element const*>(p.query.data) +
                        head_offset(p.query, at.batch, at.group, at.member) + offset(row0, p.query.stride_m);
    copy_rows<Rows<kMaxK>, Traits::kThreads, Traits::kTileM>(smem + 2 * Traits::kKeyBytes, query, p.query.stride_m,
                                                             rows, p.head_dim, thread);
  }
  CUTLASS_DEVICE Copier copier(TensorView const& view, int columns) const {
    auto const* from = static_cast<Element const*>(view.data) + head_offset(view, at.batch, at.group, at.member) +
                       offset(keys_begin, view.stride_m);
    return Copier(from, view.stride_m, columns, thread);
  }
  CUTLASS_DEVICE void start_block(Copier& key, Copier& value, int key0, int buffer) const {
    char* to = smem + buffer * 2 * Traits::kKeyBytes;
    key.start(to, p.key.stride_m, keys_end - key0);
    key.advance(p.key.stride_m);
    value.start(to + Traits::kKeyBytes, p.value.stride_m, keys_end - key0);
    value.advance(p.value.stride_m);
    cutlass::arch::cp_async_fence();
  }

  CUTLASS_DEVICE void finish_scores(FragmentS& s, int key0) const {
    if (args.premultiply != 1.f) {
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < FragmentS::kElements; ++e) s[e] *= args.premultiply;
    }
    if (key0 + kPart > whole_end || key0 + kPart > keys_end || key0 < whole_begin) {
      hide_keys<Coord>(s, RowVisibility(p), row0 + warp_row(), key0, lane);
    }
  }

  // keys, values: of key0, in shared memory. kSums: those of the LSE.
  template <bool kSums>
  CUTLASS_DEVICE void add_part(FragmentO& o, Query const& q, int key0, uint32_t keys, uint32_t values) {
    const KeyReader<Element, kStrips, kMaxK> reader(keys, lane);
    FragmentS s;
    s.clear();
    CUTLASS_PRAGMA_UNROLL
    for (int tile = 0; tile < kPart / 8; ++tile) reader.multiply(&s[Coord::index(0, 2 * tile)], q, tile);
    finish_scores(s, key0);
    state.template raise<Exponent, Coord, CoordO>(o, s, args.exponent, args.slack);
    float reference[kRows];
    state.template references<Exponent>(reference, args.exponent);
    weigh_scores<Element, Exponent, Coord, kSums>(s, state.sum, reference, args.exponent);
    multiply_values<Element, kStrips, kPart, kMaxK>(o, s, values, lane, state.rounded);
  }

  CUTLASS_DEVICE void store(FragmentO const& o) {
    float reference[kRows], (&sum)[kRows] = state.sum;
    state.template references<Exponent>(reference, args.exponent);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) sum[i] = quad_sum(sum[i]);
    const int row = row0 + warp_row(), left = rows - warp_row();
    if (p.lse.data != nullptr) {
      const int64_t first = head_offset(p.lse, at.batch, at.group, at.member) + row;
      store_lse<Exponent>(p.lse.data + first, p.lse.low == nullptr ? nullptr : p.lse.low + first, reference, sum, left,
                          lane);
    }
    auto* out = static_cast<Element*>(p.out.data) + head_offset(p.out, at.batch, at.group, at.member) +
                offset(row, p.out.stride_m);
    state.divisors(sum);
    store_output<Element, kStrips, kMaxK>(out, p.out.stride_m, o, sum, left, p.value_dim, lane);
  }

  template <bool kSums>
  CUTLASS_DEVICE void add_blocks(FragmentO& o, Query const& q, Copier& key, Copier& value) {
    int buffer = 0;
#pragma unroll 1
    for (int key0 = keys_begin; key0 < keys_end; key0 += kKeys) {
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // this block is there; every warp is done with the other buffer
      if (key0 + kKeys < keys_end) start_block(key, value, key0 + kKeys, buffer ^ 1);
      const uint32_t keys = ptx::shared_address(smem) + buffer * 2 * Traits::kKeyBytes;
#pragma unroll 1
      for (int part = 0; part < kKeys && key0 + part < keys_end; part += kPart) {
        const uint32_t at_part = keys + part * Rows<kMaxK>::kRowBytes;
        add_part<kSums>(o, q, key0 + part, at_part, at_part + Traits::kKeyBytes);
      }
      buffer ^= 1;
    }
  }

  CUTLASS_DEVICE void run() {
    FragmentO o;
    o.clear();
    if (keys_begin < keys_end) {
      Copier key = copier(p.key, p.head_dim), value = copier(p.value, p.value_dim);
      start_queries();
      start_block(key, value, keys_begin, 0);
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // Q and the first block are there
      Query q;
      q.load(ptx::shared_address(smem) + 2 * Traits::kKeyBytes + warp_row() * Rows<kMaxK>::kRowBytes, lane);
      if (Traits::kMaySkipSums && p.lse.data == nullptr) {
        add_blocks<!Traits::kMaySkipSums>(o, q, key, value);
      } else {
        add_blocks<true>(o, q, key, value);
      }
    }
    store(o);
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    thin_kernel(__grid_constant__ const ThinArgs args) {
  extern __shared__ __align__(128) char memory[];
  ThinBlock<Traits>(args, memory).run();
}

}  // namespace registers
}  // namespace memeff
