// What both kernels share: elements as fp32, the grid, the launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "status.h"

namespace memeff {
namespace reduce {

constexpr int kThreads = 256;
// Blocks loop over what is left, so that any size keeps within the grid limit of 2^31 - 1; more than this fills no GPU.
constexpr int64_t kMaxBlocks = 1 << 20;

inline unsigned blocks_for(int64_t work, int64_t per_block) {
  const int64_t blocks = (work + per_block - 1) / per_block;
  return unsigned(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

inline Status launched(const char* name, unsigned blocks) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return {};
  return {Code::kCuda, std::string(name) + " <<<" + std::to_string(blocks) + " blocks, " + std::to_string(kThreads) +
                           " threads>>>: " + cudaGetErrorString(error)};
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T from_float(float x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (std::is_same<T, __half>::value) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

// kCount elements that one instruction moves.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T at[kCount];
};

}  // namespace reduce
}  // namespace memeff
