// Host side of the kernels of K and Kv beyond 256 (hopper/slab.h).
#pragma once

#include <algorithm>

#include "chained/launch.h"
#include "hopper/slab.h"

namespace memeff {
namespace hopper {

template <typename Traits>
Status make_slab_args(ForwardArgs* args, ForwardParams const& p, int multiprocessors, std::string const& where) {
  args->p = p;
  const ScaleFactors scale = scale_factors(p.scale, false);
  args->premultiply = scale.premultiply, args->exponent = scale.exponent;
  const int64_t tiles = tiles_over(p.queries, Traits::kTileM, p.sequences);
  const int64_t slabs = ceil_div(p.value_dim, Traits::kValueTile);
  // Pairs where their last round is nearly full.
  const int64_t pairs = ceil_div(p.batch * p.heads, 2) * tiles * slabs, rounds = ceil_div(pairs, multiprocessors);
  const bool in_pairs = p.batch * p.heads > 1 && 10 * pairs >= 9 * rounds * multiprocessors;
  args->order = is_packed(p.sequences) ? Order::kSnake
                : !is_causal(p)        ? Order::kRounds
                : in_pairs             ? Order::kPairs
                                       : Order::kSnake;
  constexpr int64_t kBytesPerHead = 0;  // of any size: in a snake all heads are one section
  args->map =
      make_tile_map(p.batch, p.heads, p.heads_per_group, tiles, 1, 1, kBytesPerHead, args->order == Order::kSnake);
  const int64_t all = args->map.blocks * slabs;
  if (all == 0 || all > INT32_MAX) {
    return {Code::kUnsupported,
            where + ": B * H * query tiles * value slabs exceeds the grid limit of 2^31 - 1 thread blocks"};
  }
  args->blocks = uint32_t(std::min<int64_t>(all, multiprocessors));
  // Of a head: what pairs are counted by. Heads and tiles are found by map.by_tiles.
  if (args->order == Order::kPairs) args->map.tiles = uint32_t(tiles * slabs);
  const DType dtype = chained::dtype_of<typename Traits::Element>();
  if (Status s = make_operand(&args->query, p.query, dtype, p, p.head_dim, p.queries, Traits::kTileM, where); !s.ok())
    return s;
  if (Status s = make_operand(&args->key, p.key, dtype, p, p.head_dim, p.keys, Traits::kTileN, where); !s.ok())
    return s;
  return make_operand(&args->value, p.value, dtype, p, p.value_dim, p.keys, Traits::kTileN, where);
}

// Launches on `stream` of the current device. Never synchronises, never allocates.
template <typename Traits>
Status launch_forward(ForwardParams const& p, cudaStream_t stream, const char* name) {
  const std::string where = name;
  if (p.partial.out.data != nullptr) return {Code::kUnsupported, where + " writes no results in fp32"};
  if (p.sequences.block_tables != nullptr) return {Code::kUnsupported, where + " reads no pages"};
  int32_t multiprocessors = 0;
  if (Status s = count_multiprocessors(&multiprocessors, where); !s.ok()) return s;
  ForwardArgs args;
  if (Status s = make_slab_args<Traits>(&args, p, multiprocessors, where); !s.ok()) return s;
  auto* kernel = &slab_kernel<Traits>;
  if (Status s = chained::allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<args.blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  return chained::launched(where, args.blocks, Traits::kThreads, Traits::kSmemBytes);
}

}  // namespace hopper
}  // namespace memeff
