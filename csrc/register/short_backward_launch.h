// Host side of the backward kernel for short sequences.
#pragma once

#include <string>

#include "common/launch.h"
#include "register/short_backward.h"

namespace memeff {
namespace registers {

// Launches on `stream` of the current device. Never synchronises, never allocates.
template <typename Traits>
Status launch_backward(BackwardParams const& p, cudaStream_t stream, const char* name) {
  const std::string where = name;
  ForwardParams const& f = p.forward;
  if (is_packed(f.sequences)) return {Code::kUnsupported, where + " takes no packed sequences"};
  if (f.keys > Traits::kLength || f.queries > Traits::kLength)
    return {Code::kUnsupported, where + " takes M and N up to " + std::to_string(Traits::kLength)};
  if (p.heads_per_kv != 1) return {Code::kUnsupported, where + " takes no shared key heads"};
  if (p.grad_query.splits != 1 || p.grad_key.splits != 1 || p.grad_value.splits != 1)
    return {Code::kUnsupported, where + " does not split its loops"};
  ShortBackwardArgs args;
  args.p = p;
  args.exponent = log2_factor(f.scale);
  args.map = make_tile_map(f.batch, f.heads, f.heads_per_group, 1, 1, 1, 0, false);
  if (args.map.blocks == 0)
    return {Code::kUnsupported, where + ": B * H exceeds the grid limit of 2^31 - 1 thread blocks"};
  auto* kernel = &short_backward_kernel<Traits>;
  if (Status s = allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<args.map.blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  return launched(where, args.map.blocks, Traits::kThreads, Traits::kSmemBytes);
}

}  // namespace registers
}  // namespace memeff
