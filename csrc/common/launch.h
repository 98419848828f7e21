// What every family's launchers do around a launch. Host code.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <string>

#include "status.h"

namespace memeff {

// More than 48 KiB of shared memory must be asked for once on each device; bit d remembers device d.
template <typename Traits, typename Kernel>
Status allow_shared_memory(Kernel* kernel, std::string const& where) {
  if (Traits::kSmemBytes <= 48 * 1024) return {};
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

// The answer after a launch.
inline Status launched(std::string const& where, uint32_t blocks, int threads, int smem_bytes) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return {};
  return {Code::kCuda, where + " <<<" + std::to_string(blocks) + " blocks, " + std::to_string(threads) + " threads, " +
                           std::to_string(smem_bytes) + " bytes of shared memory>>>: " + cudaGetErrorString(error)};
}

}  // namespace memeff
