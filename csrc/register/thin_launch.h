// Host side of the kernels for small K.
#pragma once

#include <string>

#include "common/launch.h"
#include "register/thin.h"
#include "tiling.h"

namespace memeff {
namespace registers {

template <typename Traits>
ThinArgs make_thin_args(ForwardParams const& p) {
  ThinArgs args;
  args.p = p;
  const ScaleFactors scale = scale_factors(p.scale, false);
  args.premultiply = scale.premultiply, args.exponent = scale.exponent;
  args.slack = float(RunningSoftmax<1>::kSlack) / args.exponent;
  const int64_t bytes_per_head =
      int64_t(p.keys) * (p.head_dim + p.value_dim) * int64_t(sizeof(typename Traits::Element));
  args.map = make_tile_map(p.batch, p.heads, p.heads_per_group, ceil_div(p.queries, Traits::kTileM), 1, 1,
                           bytes_per_head, is_causal(p));
  return args;
}

// Launches on `stream` of the current device. Never synchronises, never allocates.
template <typename Traits>
Status launch_forward(ForwardParams const& p, cudaStream_t stream, const char* name) {
  const std::string where = name;
  if (is_packed(p.sequences)) return {Code::kUnsupported, where + " takes no packed sequences"};
  if (p.partial.out.data != nullptr) return {Code::kUnsupported, where + " writes no results in fp32"};
  const ThinArgs args = make_thin_args<Traits>(p);
  if (args.map.blocks == 0) {
    return {Code::kUnsupported, where + ": B * H * query tiles exceeds the grid limit of 2^31 - 1 thread blocks"};
  }
  auto* kernel = &thin_kernel<Traits>;
  if (Status s = allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<args.map.blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  return launched(where, args.map.blocks, Traits::kThreads, Traits::kSmemBytes);
}

}  // namespace registers
}  // namespace memeff
