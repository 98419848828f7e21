// Host side of the kernels for many short sequences.
#pragma once

#include <algorithm>
#include <string>

#include "common/launch.h"
#include "register/short_args.h"
#include "register/short_ring.h"

namespace memeff {
namespace registers {

// Launches on `stream` of the current device. Never synchronises, never allocates.
template <typename Traits>
Status launch_forward(ForwardParams const& p, cudaStream_t stream, const char* name) {
  const std::string where = name;
  RingArgs args;
  if (Status s = make_short_args<Traits>(p, where, &args); !s.ok()) return s;
  int device = 0, sm_count = 1;
  MEMEFF_CUDA_CHECK(cudaGetDevice(&device), where);
  MEMEFF_CUDA_CHECK(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, device), where);
  args.rows = p.queries;
  args.map = make_tile_map(p.batch, p.heads, p.heads_per_group, 1, 1, 1, 0, false);
  if (args.map.blocks == 0) return {Code::kUnsupported, where + ": B * H is 2^31 or more"};
  args.heads = int(args.map.blocks);
  args.by_strips = {int(ceil_div(p.queries, 16 * Traits::kStrips))};
  const uint32_t blocks = std::min(args.map.blocks, uint32_t(sm_count) * Traits::kBlocksPerSm);
  auto* kernel = &ring_kernel<Traits>;
  if (Status s = allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  return launched(where, blocks, Traits::kThreads, Traits::kSmemBytes);
}

}  // namespace registers
}  // namespace memeff
