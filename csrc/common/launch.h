// What every family's launchers do around a launch. Host code.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <string>

#include "common/softmax.h"
#include "device.h"
#include "params.h"
#include "status.h"

namespace memeff {

// exp(scale x) = 2^(log2_factor(scale) x), rounded once.
inline float log2_factor(float scale) { return float(double(scale) * 1.4426950408889634); }

// How a forward kernel applies the scale: folded into the exponent where it may (common/softmax.h: FoldedScale), else
// scores are multiplied by it first.
struct ScaleFactors {
  float premultiply, exponent;
};
inline ScaleFactors scale_factors(float scale, bool with_bias) {
  if (!with_bias && scale > 0.f) return {1.f, log2_factor(scale)};
  return {scale, kLog2e};
}

// Do later queries see more keys? Then their tiles run first.
inline bool is_causal(ForwardParams const& p) {
  return p.anchor != Anchor::kNone && p.window_right >= 0 && p.window_left < 0;
}

// Of the current device.
inline Status count_multiprocessors(int32_t* count, std::string const& where) {
  int device = 0;
  MEMEFF_CUDA_CHECK(cudaGetDevice(&device), where);
  DeviceFacts facts;
  if (Status s = device_facts(device, &facts); !s.ok()) return s;
  *count = facts.sm_count;
  return {};
}

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
