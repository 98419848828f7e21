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

// The address of something in shared memory as loads of matrices take it.
CUTLASS_DEVICE uint32_t shared_address(void const* p) { return uint32_t(__cvta_generic_to_shared(p)); }

// Hides how a number came about: what is added to it later stays an addition, an immediate offset of the load, where
// the compiler would see disjoint bits and keep an address in a register for each.
CUTLASS_DEVICE uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Four 8 x 8 matrices of 16-bit elements, a row at the address of each lane (lanes 0 .. 7: the first). A lane gets the
// pair 2t, 2t + 1 of row g of each (g = lane / 4, t = lane % 4). PTX ISA 9.7.14.5.15 "ldmatrix"; sm_75 and later.
template <bool kTranspose>
CUTLASS_DEVICE void load_matrices(uint32_t (&to)[4], uint32_t address) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  if constexpr (kTranspose) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
  }
#endif
}

// A barrier in shared memory, 8 bytes, that a phase of `count` arrivals passes. Before its first use: a barrier of the
// block. PTX ISA 9.7.13.15 "mbarrier"; sm_80 and later.
CUTLASS_DEVICE void start_barrier(uint32_t barrier, int count) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
#endif
}
// This thread arrives when all copies that it has started have landed; every thread that counts calls it once a phase.
CUTLASS_DEVICE void arrive_after_copies(uint32_t barrier) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}
// Waits until the phase of this parity (0, 1, 0, ...) has passed.
CUTLASS_DEVICE void wait_for_phase(uint32_t barrier, int parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t passed = 0;
  while (true) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(barrier), "r"(parity)
        : "memory");
    if (passed != 0) return;
    __nanosleep(32);
  }
#endif
}

}  // namespace ptx
}  // namespace memeff
