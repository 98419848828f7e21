// Host side of the register family's backward kernel: one row, one kernel.
#pragma once

#include <string>

#include "common/launch.h"
#include "register/backward.h"
#include "status.h"
#include "tiling.h"

namespace memeff {
namespace registers {

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    backward_kernel(__grid_constant__ const BackwardArgs args) {
  extern __shared__ __align__(512) unsigned char memory[];
  BackwardBlock<Traits>(args, *reinterpret_cast<typename Traits::SharedStorage*>(memory)).run();
}

// dQ, dK and dV; dBias with bias_store elements at a time (BackwardArgs).
template <typename Traits>
Status launch_sums(BackwardParams const& p, int bias_store, cudaStream_t stream, std::string const& where) {
  ForwardParams const& f = p.forward;
  const int64_t tiles = tiles_over(f.keys, Traits::kTileM, f.sequences), heads = f.heads / p.heads_per_kv;
  const int64_t splits = p.grad_key.data != nullptr ? p.grad_key.splits : p.grad_value.splits;
  const int64_t blocks = f.batch * heads * tiles * splits;
  if (blocks > INT32_MAX) {
    return {Code::kUnsupported, where + ": the keys have more tiles than a grid may have blocks (2^31 - 1)"};
  }
  BackwardArgs args{};
  args.p = p;
  args.blocks = uint32_t(blocks), args.splits = uint32_t(splits);
  args.by_tiles = {int(tiles)}, args.by_heads = {int(heads)}, args.by_group = {f.heads_per_group};
  args.exponent = log2_factor(f.scale);
  args.bias_store = bias_store;
  auto* kernel = &backward_kernel<Traits>;
  if (Status s = allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<args.blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  return launched(where, args.blocks, Traits::kThreads, Traits::kSmemBytes);
}

// Launches on `stream` of the current device. Never synchronises, never allocates.
template <typename Traits, std::enable_if_t<!Traits::kBias, int> = 0>
Status launch_backward(BackwardParams const& p, cudaStream_t stream, const char* name) {
  return launch_sums<Traits>(p, 0, stream, name);
}

}  // namespace registers
}  // namespace memeff
