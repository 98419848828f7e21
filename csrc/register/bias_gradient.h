// The gradient of a bias that is broadcast over batch entries or heads, K up to 64: a block owns a tile of the bias and
// adds up dS of every head that shares it, in fp32 and in a fixed order.
//
//   warp       16 * kStrips queries x 64 keys: its bias, packed, and its sums stay in registers
//   one item   (batch entry, head): Q, dO, K, V of the tile through two buffers, one barrier
//
//   copies of item j + 1  |  S = Q K^T, dP = dO V^T, kPart keys at a time  ->  sums += P (dP - delta)
//
// Rows and columns beyond M and N hold zeros, and lse = inf: only windows are tested, by bits that never change.
#pragma once

#include "chained/bias_gradient.h"
#include "common/launch.h"
#include "common/softmax.h"
#include "common/tile_map.h"
#include "common/visibility.h"
#include "cutlass/arch/memory_sm80.h"
#include "register/backward_tile.h"
#include "status.h"
#include "tiling.h"

namespace memeff {
namespace registers {

struct BiasGradientArgs {
  BackwardParams p;
  uint32_t tiles_m, tiles_n, splits;
};

template <typename Element_, int kMaxK_, int kStrips_, int kPart_, int kBlocks>
struct BiasGradientTraits {
  using Element = Element_;
  static constexpr int kMaxK = kMaxK_, kStrips = kStrips_, kPart = kPart_, kBlocksPerSm = kBlocks;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kTileM = 16 * kStrips * kWarps, kTileN = 64;
  static_assert(kTileM <= kThreads && kTileN % kPart == 0, "a thread for each query, whole parts");
  using QueryTile = SharedTile<kTileM, kMaxK>;
  using KeyTile = SharedTile<kTileN, kMaxK>;
  using Scores = Sums<kStrips, kPart / 8>;
  using Gradient = Sums<kStrips, kTileN / 8>;
  struct Statistic {
    float lse, low, delta;  // lse natural, +inf for a query that sees nothing or is none; low in units of log 2
  };
  struct SharedStorage {
    alignas(512) char query[2][QueryTile::kBytes];
    char grad_out[2][QueryTile::kBytes];
    char key[2][KeyTile::kBytes];
    char value[2][KeyTile::kBytes];
    Statistic statistics[2][kTileM];
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));

  // For chained/bias_gradient.h.
  struct Coord {
    static constexpr int kRows = 2 * kStrips, kColumns = kTileN / 4;
    CUTLASS_DEVICE static int row(int lane, int i) { return i * 8 + (lane >> 2); }
    CUTLASS_DEVICE static int column(int lane, int j) { return (j >> 1) * 8 + (j & 1) + (lane & 3) * 2; }
    CUTLASS_DEVICE static int index(int i, int j) { return (i / 2 * (kTileN / 8) + j / 2) * 4 + i % 2 * 2 + j % 2; }
  };
  struct Elements {
    Gradient const& sums;
    CUTLASS_DEVICE float operator[](int i) const { return sums.at[i / 4 / (kTileN / 8)][i / 4 % (kTileN / 8)][i % 4]; }
  };
};

template <typename Traits>
struct BiasGradientBlock {
  using Element = typename Traits::Element;
  using QueryTile = typename Traits::QueryTile;
  using KeyTile = typename Traits::KeyTile;
  using Scores = typename Traits::Scores;
  using Gradient = typename Traits::Gradient;
  using Statistic = typename Traits::Statistic;
  static constexpr int kTileM = Traits::kTileM, kTileN = Traits::kTileN, kThreads = Traits::kThreads;
  static constexpr int kStrips = Traits::kStrips, kRows = 2 * kStrips, kPart = Traits::kPart;

  BackwardParams const& p;
  ForwardParams const& f;
  typename Traits::SharedStorage& smem;
  int thread, lane, warp;
  uint32_t split, splits;
  uint32_t own_batch, own_group, own_member;
  int query0, key0;                  // of the tile
  uint32_t bias[kRows][kTileN / 8];  // a pair each
  uint32_t seen[kRows];              // bit 2 j + e: may the query see column e of tile j?

  CUTLASS_DEVICE BiasGradientBlock(BiasGradientArgs const& args, typename Traits::SharedStorage& smem_)
      : p(args.p), f(args.p.forward), smem(smem_), splits(args.splits) {
    thread = threadIdx.x, lane = thread & 31, warp = cutlass::canonical_warp_idx_sync();
    GradBiasView const& g = p.grad_bias;
    uint32_t rest = blockIdx.x;
    const auto digit = [&](bool wanted, uint32_t size) {
      if (!wanted) return 0u;
      const uint32_t value = rest % size;
      rest /= size;
      return value;
    };
    split = digit(true, splits);
    key0 = int(digit(true, args.tiles_n)) * kTileN;
    query0 = int(digit(true, args.tiles_m)) * kTileM;
    own_member = digit(!g.sum_h, f.heads_per_group);
    own_group = digit(!g.sum_g, f.heads / f.heads_per_group);
    own_batch = digit(!g.sum_b, uint32_t(f.batch));
  }
  CUTLASS_DEVICE uint32_t items() const {
    GradBiasView const& g = p.grad_bias;
    return (g.sum_b ? uint32_t(f.batch) : 1) * (g.sum_g ? f.heads / f.heads_per_group : 1) *
           (g.sum_h ? f.heads_per_group : 1);
  }
  CUTLASS_DEVICE int row_of(int i) const { return query0 + warp * 16 * kStrips + i * 8 + (lane >> 2); }

  CUTLASS_DEVICE void load_bias() {
    Element const* head = static_cast<Element const*>(f.bias.data) + offset(own_batch, f.bias.stride_b) +
                          offset(own_group, f.bias.stride_g) + offset(own_member, f.bias.stride_h);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      Element const* line = head + offset(min(row_of(i), f.queries - 1), f.bias.stride_m);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kTileN / 8; ++j) {
        const int column = key0 + j * 8 + (lane & 3) * 2;
        bias[i][j] = 0;
        if (column + 1 < f.keys) {
          bias[i][j] = *reinterpret_cast<uint32_t const*>(line + column);
        } else if (column < f.keys) {
          bias[i][j] = *reinterpret_cast<uint16_t const*>(line + column);
        }
      }
    }
  }
  // The bits of a lane's columns before `column`.
  CUTLASS_DEVICE uint32_t below(int column) const {
    column = min(max(column, 0), kTileN);
    return (1u << (column / 8 * 2 + min(max(column % 8 - (lane & 3) * 2, 0), 2))) - 1;
  }
  CUTLASS_DEVICE void find_seen(Visibility const& see) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      seen[i] = below(see.limit(row_of(i)) - key0) & ~below(see.first(row_of(i)) - key0);
    }
  }

  // Starts the copies of an item; what the thread's query has of it.
  CUTLASS_DEVICE Statistic start(uint32_t index, int buffer) const {
    GradBiasView const& g = p.grad_bias;
    const auto digit = [&](bool wanted, uint32_t size) {
      if (!wanted) return 0u;
      const uint32_t value = index % size;
      index /= size;
      return value;
    };
    const uint32_t member = own_member + digit(g.sum_h, f.heads_per_group);
    const uint32_t group = own_group + digit(g.sum_g, f.heads / f.heads_per_group);
    const uint32_t batch = own_batch + digit(g.sum_b, uint32_t(f.batch));
    const auto from = [&](TensorView const& view, int row) {
      return static_cast<Element const*>(view.data) + head_offset(view, batch, group, member) +
             offset(row, view.stride_m);
    };
    const int queries = f.queries - query0, keys = f.keys - key0;
    copy_tile<QueryTile, kThreads>(ptx::shared_address(smem.query[buffer]), from(f.query, query0), f.query.stride_m,
                                   queries, f.head_dim, thread);
    copy_tile<KeyTile, kThreads>(ptx::shared_address(smem.key[buffer]), from(f.key, key0), f.key.stride_m, keys,
                                 f.head_dim, thread);
    copy_tile<QueryTile, kThreads>(ptx::shared_address(smem.grad_out[buffer]), from(p.grad_out, query0),
                                   p.grad_out.stride_m, queries, f.value_dim, thread);
    copy_tile<KeyTile, kThreads>(ptx::shared_address(smem.value[buffer]), from(f.value, key0), f.value.stride_m, keys,
                                 f.value_dim, thread);
    Statistic x{-negative_infinity(), 0.f, 0.f};
    if (thread >= kTileM || thread >= queries) return x;
    const int64_t at = head_offset(f.lse, batch, group, member) + query0 + thread;
    const float lse = f.lse.data[at];
    if (lse == negative_infinity()) return x;
    x.lse = lse;
    if (f.lse.low != nullptr) x.low = f.lse.low[at] * kLog2e;
    x.delta = p.delta[offset(offset(batch, f.heads) + group * f.heads_per_group + member, f.queries) + query0 + thread];
    return x;
  }
  CUTLASS_DEVICE void store(Statistic const& x, int buffer) const {
    if (thread < kTileM) smem.statistics[buffer][thread] = x;
  }

  template <bool kMasked>
  CUTLASS_DEVICE void add(Gradient& sums, int buffer) const {
    const int row0 = warp * 16 * kStrips;
    Statistic of[kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) of[i] = smem.statistics[buffer][row0 + i * 8 + (lane >> 2)];
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kTileN; part += kPart) {
      Scores s, dp;
      s.clear();
      dp.clear();
      multiply_rows<Element, QueryTile, KeyTile>(
          s, ptx::shared_address(smem.query[buffer]) + QueryTile::down_first(row0, 0, lane),
          ptx::shared_address(smem.key[buffer]) + KeyTile::across_first(part, 0, lane), f.head_dim);
      multiply_rows<Element, QueryTile, KeyTile>(
          dp, ptx::shared_address(smem.grad_out[buffer]) + QueryTile::down_first(row0, 0, lane),
          ptx::shared_address(smem.value[buffer]) + KeyTile::across_first(part, 0, lane), f.value_dim);
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kPart / 8; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kRows; ++i) {
          const int tile = part / 8 + j;
          const float2 two = unpack<Element>(bias[i][tile]);
          CUTLASS_PRAGMA_UNROLL
          for (int e = 0; e < 2; ++e) {
            const int at = i % 2 * 2 + e;
            const float t = __fmaf_rn(s.at[i / 2][j][at], f.scale, e == 0 ? two.x : two.y) - of[i].lse;
            const float w = ptx::exp2_approx(ptx::min_or_nan(__fmaf_rn(t, kLog2e, -of[i].low), 0.f));
            const float ds = dp.at[i / 2][j][at] - of[i].delta;
            float& sum = sums.at[i / 2][tile][at];
            if (!kMasked || (seen[i] >> (2 * tile + e) & 1) != 0) sum = __fmaf_rn(w, ds, sum);
          }
        }
      }
    }
  }

  template <bool kMasked>
  CUTLASS_DEVICE void add_all(Gradient& sums) const {
    const uint64_t count = items();
    const uint32_t first = uint32_t(count * split / splits), last = uint32_t(count * (split + 1) / splits);
    if (first == last) return;
    store(start(first, 0), 0);
    cutlass::arch::cp_async_fence();
    int buffer = 0;
    for (uint32_t index = first; index < last; ++index) {
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // operands and statistics are there; every warp is done with the other buffer
      const bool more = index + 1 < last;
      Statistic next;
      if (more) next = start(index + 1, buffer ^ 1);
      cutlass::arch::cp_async_fence();
      add<kMasked>(sums, buffer);
      if (more) store(next, buffer ^ 1);
      buffer ^= 1;
    }
  }

  CUTLASS_DEVICE void run() {
    const Visibility see(f, f.queries, f.keys);
    const int last_query = min(query0 + kTileM, f.queries) - 1;
    const bool any = key0 < see.limit(last_query) && key0 + kTileN > see.first(query0);
    Gradient sums;
    sums.clear();
    if (any) {
      load_bias();
      if (f.anchor == Anchor::kNone || (key0 + kTileN <= see.limit(query0) && key0 >= see.first(last_query))) {
        add_all<false>(sums);
      } else {
        find_seen(see);
        add_all<true>(sums);
      }
    }
    GradBiasView const& g = p.grad_bias;
    const int64_t head = offset(split, g.stride_split) + chained::bias_gradient_at(g, own_batch, own_group, own_member);
    chained::write_bias_tile<Element, typename Traits::Coord>(
        typename Traits::Elements{sums}, g, head, query0 + warp * 16 * kStrips, key0, f.queries, f.keys, lane);
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    bias_gradient_kernel(__grid_constant__ const BiasGradientArgs args) {
  extern __shared__ __align__(512) unsigned char memory[];
  BiasGradientBlock<Traits>(args, *reinterpret_cast<typename Traits::SharedStorage*>(memory)).run();
}

// Of a bias that has its own M and N, without sequences or dropout.
template <typename Traits>
Status launch_bias_gradient(BackwardParams const& p, cudaStream_t stream, std::string const& where) {
  ForwardParams const& f = p.forward;
  GradBiasView const& g = p.grad_bias;
  BiasGradientArgs args{p, uint32_t(ceil_div(f.queries, Traits::kTileM)), uint32_t(ceil_div(f.keys, Traits::kTileN)),
                        uint32_t(g.splits)};
  const int64_t blocks = (g.sum_b ? 1 : f.batch) * (g.sum_g ? 1 : f.heads / f.heads_per_group) *
                         (g.sum_h ? 1 : f.heads_per_group) * args.tiles_m * args.tiles_n * g.splits;
  if (blocks > INT32_MAX) {
    return {Code::kUnsupported, where + ": the bias has more tiles than a grid may have blocks (2^31 - 1)"};
  }
  auto* kernel = &bias_gradient_kernel<Traits>;
  if (Status s = allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<uint32_t(blocks), Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  return launched(where, blocks, Traits::kThreads, Traits::kSmemBytes);
}

}  // namespace registers
}  // namespace memeff
