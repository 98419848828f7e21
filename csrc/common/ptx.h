// Every inline PTX of the library, each with its section of the PTX ISA manual.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace memeff {
namespace ptx {

// 2^x to 2 ulp, denormal results flushed to zero. PTX ISA 9.7.3 "ex2".
CUTLASS_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Starts a copy of kWidth bytes to shared memory: the first `bytes` (0 <= bytes <= kWidth) of global memory, then
// zeros. Both addresses are multiples of kWidth. PTX ISA 9.7.9 "cp.async"; sm_80 and later.
template <int kWidth>
CUTLASS_DEVICE void copy_async(void* to, void const* from, int bytes) {
  static_assert(kWidth == 4 || kWidth == 16, "16 bytes pass by L1, 4 through it");
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t address = uint32_t(__cvta_generic_to_shared(to));
  if constexpr (kWidth == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
  }
#endif
}

}  // namespace ptx
}  // namespace memeff
