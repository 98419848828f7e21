// Host side of the kernels for short sequences.
#pragma once

#include <string>

#include "common/launch.h"
#include "register/short_args.h"

namespace memeff {
namespace registers {

// Launches on `stream` of the current device. Never synchronises, never allocates.
template <typename Traits>
Status launch_forward(ForwardParams const& p, cudaStream_t stream, const char* name) {
  const std::string where = name;
  ShortArgs args;
  if (Status s = make_short_args<Traits>(p, where, &args); !s.ok()) return s;
  auto* kernel = &short_kernel<Traits>;
  if (Status s = allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<args.map.blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  return launched(where, args.map.blocks, Traits::kThreads, Traits::kSmemBytes);
}

}  // namespace registers
}  // namespace memeff
