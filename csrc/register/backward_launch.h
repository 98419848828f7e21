// Host side of the register family's backward kernel: one row, one kernel.
#pragma once

#include <atomic>
#include <string>

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

// More than 48 KiB of shared memory must be asked for once on each device; bit d remembers device d.
template <typename Traits, typename Kernel>
Status allow_shared_memory(Kernel* kernel, std::string const& where) {
  static std::atomic<uint64_t> asked{0};
  int device = 0;
  MEMEFF_CUDA_CHECK(cudaGetDevice(&device), where);
  const uint64_t bit = uint64_t(1) << (device & 63);
  if (!(asked.load(std::memory_order_relaxed) & bit) || device > 63) {
    MEMEFF_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Traits::kSmemBytes),
                      where);
    asked.fetch_or(bit, std::memory_order_relaxed);
  }
  return {};
}

// Launches on `stream` of the current device. Never synchronises, never allocates.
template <typename Traits>
Status launch_backward(BackwardParams const& p, cudaStream_t stream, const char* name) {
  ForwardParams const& f = p.forward;
  const std::string where = name;
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
  args.exponent = float(double(f.scale) * 1.4426950408889634);
  auto* kernel = &backward_kernel<Traits>;
  if (Status s = allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<args.blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return {};
  return {Code::kCuda, where + " <<<" + std::to_string(args.blocks) + " blocks, " + std::to_string(Traits::kThreads) +
                           " threads, " + std::to_string(Traits::kSmemBytes) +
                           " bytes of shared memory>>>: " + cudaGetErrorString(error)};
}

}  // namespace registers
}  // namespace memeff
