// Host side of the hopper family's forward kernels.
#pragma once

#include <algorithm>

#include "chained/launch.h"
#include "hopper/forward.h"

namespace memeff {
namespace hopper {

using chained::DropoutOnly;
using chained::NoBias;
using chained::TensorBias;

// Whether equal pieces of work keep all multiprocessors busy, the last round of them too.
inline bool fills(int64_t pieces, int multiprocessors) {
  const int64_t rounds = ceil_div(pieces, multiprocessors);
  return 10 * pieces >= 9 * rounds * multiprocessors;
}

template <typename Traits>
Status make_forward_args(ForwardArgs* args, ForwardParams const& p, int multiprocessors, std::string const& where) {
  args->p = p;
  const ScaleFactors scale = scale_factors(p.scale, Traits::kBias);
  args->premultiply = scale.premultiply, args->exponent = scale.exponent;
  const bool packed = is_packed(p.sequences);
  const bool packed_pairs = packed && is_causal(p);
  const int64_t tiles = packed_pairs ? 2 * tiles_over(p.queries, 2 * Traits::kTileM, p.sequences)
                                     : tiles_over(p.queries, Traits::kTileM, p.sequences);
  const int64_t pairs = ceil_div(p.batch * p.heads, 2) * tiles;
  args->order = packed_pairs                                             ? Order::kSnakePairs
                : packed                                                 ? Order::kSnake
                : !is_causal(p)                                          ? Order::kRounds
                : p.batch * p.heads > 1 && fills(pairs, multiprocessors) ? Order::kPairs
                                                                         : Order::kSnake;
  constexpr int64_t kBytesPerHead = 0;  // of any size: in a snake all heads are one section
  args->map =
      make_tile_map(p.batch, p.heads, p.heads_per_group, tiles, 1, 1, kBytesPerHead, args->order == Order::kSnake);
  args->blocks = std::min(args->map.blocks, uint32_t(multiprocessors));
  const DType dtype = chained::dtype_of<typename Traits::Element>();
  const int query_rows = Traits::kPairs ? 8 : Traits::kTileM, query_step = Traits::kPairs ? 2 : 1;
  if (Status s = make_operand(&args->query, p.query, dtype, p, p.head_dim, p.queries, query_rows, where, query_step);
      !s.ok())
    return s;
  if (Status s = make_operand(&args->key, p.key, dtype, p, p.head_dim, p.keys, Traits::kTileN, where); !s.ok())
    return s;
  if (Status s = make_operand(&args->value, p.value, dtype, p, p.value_dim, p.keys, Traits::kTileN, where); !s.ok())
    return s;
  if (!Traits::kBias) return {};
  const TensorView bias{p.bias.data, p.bias.stride_b, p.bias.stride_g, p.bias.stride_h, p.bias.stride_m};
  return make_operand(&args->bias, bias, dtype, p, p.keys, p.queries, Traits::kTileM, where);
}

// Launches on `stream` of the current device. Never synchronises, never allocates.
template <typename Traits>
Status launch_forward(ForwardParams const& p, cudaStream_t stream, const char* name) {
  const std::string where = name;
  if (p.partial.out.data != nullptr) return {Code::kUnsupported, where + " writes no results in fp32"};
  if (p.sequences.block_tables != nullptr) return {Code::kUnsupported, where + " reads no pages"};
  int32_t multiprocessors = 0;
  if (Status s = count_multiprocessors(&multiprocessors, where); !s.ok()) return s;
  multiprocessors *= Traits::kBlocks;  // that run blocks
  ForwardArgs args;
  if (Status s = make_forward_args<Traits>(&args, p, multiprocessors, where); !s.ok()) return s;
  if (args.map.blocks == 0) {
    return {Code::kUnsupported, where + ": B * H * query tiles exceeds the grid limit of 2^31 - 1 thread blocks"};
  }
  auto* kernel = &forward_kernel<Traits>;
  if (Status s = chained::allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<args.blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  return chained::launched(where, args.blocks, Traits::kThreads, Traits::kSmemBytes);
}

}  // namespace hopper
}  // namespace memeff
