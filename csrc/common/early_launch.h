// Kernels whose blocks take their places while the stream's previous kernel still runs (programmatic dependent launch,
// sm_90 and later). Such a kernel calls ptx::wait_for_previous() before it touches what others wrote.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "common/grid_order.h"
#include "status.h"

namespace memeff {

constexpr int kEarlyDriver = 12030;  // the first whose graphs take such launches

// Is it sm_90 code that runs on the current device? Code of an older architecture, compiled by the driver, has no wait.
inline cudaError_t may_launch_early(void const* kernel, bool* may) {
  int driver = 0;
  cudaFuncAttributes attributes;
  if (cudaError_t error = cudaDriverGetVersion(&driver); error != cudaSuccess) return error;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, kernel); error != cudaSuccess) return error;
  *may = driver >= kEarlyDriver && attributes.ptxVersion >= 90;
  return cudaSuccess;
}

// The answer is kept for each kernel and device.
template <auto kKernel, typename Args>
Status launch_early(Args const& args, unsigned blocks, int threads, cudaStream_t stream, const char* where) {
  static std::atomic<uint64_t> asked{0}, early{0};
  int device = 0;
  MEMEFF_CUDA_CHECK(cudaGetDevice(&device), where);
  const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;  // devices beyond wait as usual
  if (!(asked.load(std::memory_order_acquire) & bit)) {
    bool may = false;
    MEMEFF_CUDA_CHECK(may_launch_early(reinterpret_cast<void const*>(kKernel), &may), where);
    if (may) early.fetch_or(bit, std::memory_order_relaxed);
    asked.fetch_or(bit, std::memory_order_release);
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks, config.blockDim = unsigned(threads), config.stream = stream;
  config.attrs = &attribute, config.numAttrs = early.load(std::memory_order_relaxed) & bit ? 1 : 0;
  MEMEFF_CUDA_CHECK(cudaLaunchKernelEx(&config, kKernel, args), where);
  return {};
}

}  // namespace memeff
