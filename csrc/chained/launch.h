// Host side of the chained family's forward kernels.
#pragma once

#include <string>

#include "chained/forward.h"
#include "common/launch.h"
#include "tiling.h"

namespace memeff {
namespace chained {

using memeff::allow_shared_memory;
using memeff::launched;

template <typename Element>
constexpr DType dtype_of() {
  return std::is_same<Element, float>::value             ? DType::kF32
         : std::is_same<Element, cutlass::half_t>::value ? DType::kF16
                                                         : DType::kBF16;
}

// Bytes of the copies that bring the bias to shared memory (common/bias.h), 0: none.
template <typename Traits>
int bias_copy_of(ForwardParams const& p) {
  if (!Traits::kStageBias || is_packed_bias(p.sequences)) return 0;
  return bias_copy_width(p.bias, (Traits::kBiasRowBytes - bias_row_bytes(0)) / kBiasKeys);
}

template <typename Traits>
ForwardArgs make_forward_args(ForwardParams const& p) {
  ForwardArgs args;
  args.p = p;
  const ScaleFactors scale = scale_factors(p.scale, Traits::kBias);
  args.premultiply = scale.premultiply, args.exponent = scale.exponent;
  args.bias_pairs = Traits::kBias && bias_in_pairs(p.bias, p.sequences);
  args.bias_copy = bias_copy_of<Traits>(p);
  const int slab = Traits::Output::kInMemory ? p.value_dim : Traits::kValueTile;
  const bool packed = is_packed(p.sequences);
  const int64_t keys = packed ? p.keys / p.sequences.count + 1 : p.keys;  // of the heads that run at the same time
  const int64_t bytes_per_head = keys * (p.head_dim + p.value_dim) * int64_t(sizeof(typename Traits::Element));
  const int64_t tiles = tiles_over(p.queries, Traits::kTileM, p.sequences);
  args.map = make_tile_map(p.batch, p.heads, p.heads_per_group, tiles, ceil_div(p.value_dim, slab), p.partial.splits,
                           bytes_per_head, packed || is_causal(p));
  return args;
}

// Launches on `stream` of the current device. Never synchronises, never allocates.
template <typename Traits>
Status launch_forward(ForwardParams const& p, cudaStream_t stream, const char* name) {
  const ForwardArgs args = make_forward_args<Traits>(p);
  const std::string where = name;
  if (args.map.blocks == 0) {
    return {Code::kUnsupported, where +
                                    ": B * H * query tiles * parts * value slabs exceeds the grid "
                                    "limit of 2^31 - 1 thread blocks"};
  }
  auto* kernel = &forward_kernel<Traits>;
  if (Status s = allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<args.map.blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  return launched(where, args.map.blocks, Traits::kThreads, Traits::kSmemBytes);
}

}  // namespace chained
}  // namespace memeff
