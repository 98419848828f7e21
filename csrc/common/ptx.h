// Every inline PTX of the library (but common/grid_order.h's, for files that go without CUTLASS), each with its section
// of the PTX ISA manual.
#pragma once

#include <cstdint>

#include "common/grid_order.h"
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

// The smaller of two, NaN where one is NaN. PTX ISA 9.7.3 "min"; sm_80 and later.
CUTLASS_DEVICE float min_or_nan(float a, float b) {
  float y = a;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
#endif
  return y;
}

// The address within shared memory that the instructions below take.
CUTLASS_DEVICE uint32_t shared_address(void const* in_shared) { return uint32_t(__cvta_generic_to_shared(in_shared)); }

// Hides how a number came about: what is added to it later stays an addition, an immediate offset of the load, where
// the compiler would see disjoint bits and keep an address in a register for each.
CUTLASS_DEVICE uint32_t opaque(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Any function of three bits: kTable is its value for a = 0xf0, b = 0xcc, c = 0xaa. PTX ISA 9.7.8 "lop3".
template <int kTable>
CUTLASS_DEVICE uint32_t logic(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(y) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return y;
}

// 16 bytes as copy_async<16>.
CUTLASS_DEVICE void copy_async(uint32_t to, void const* from, int bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
#endif
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. A lane receives of each
// the elements 2 (lane % 4) and the next of row lane / 4; kTransposed: of column lane / 4. PTX ISA 9.7.14 "ldmatrix";
// sm_75 and later.
template <bool kTransposed>
CUTLASS_DEVICE void load_matrices(uint32_t (&x)[4], uint32_t address) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
  } else {
    asm volatile("ldmatrix.sync.aligned.x4.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
  }
#endif
}

// The inverse of load_matrices<false>. PTX ISA 9.7.14 "stmatrix"; before sm_90 four stores, each to the row whose
// address another lane gave.
CUTLASS_DEVICE void store_matrices(uint32_t address, uint32_t const (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
#else
  const int lane = threadIdx.x & 31;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 4; ++i) {
    const uint32_t to = __shfl_sync(0xffffffffu, address, 8 * i + lane / 4) + lane % 4 * 4;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(x[i]) : "memory");
  }
#endif
}

// A barrier of `threads` threads (whole warps) of the block; id 1 to 15. arrive: without waiting. PTX ISA 9.7.13 "bar".
CUTLASS_DEVICE void sync_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// compute-sanitizer's racecheck loses the order of the block's next barrier behind a bar.arrive and reports races that
// are none; a build with -DMEMEFF_RACECHECK waits here too, and nothing is reported (docs/performance.md).
CUTLASS_DEVICE void arrive_threads(int id, int threads) {
#ifdef MEMEFF_RACECHECK
  sync_threads(id, threads);
#else
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#endif
}

// Adds four numbers to four that lie side by side in global memory, aligned to 16 bytes. PTX ISA 9.7.13 "red"; vectors
// on sm_90 and later.
CUTLASS_DEVICE void add_to_global(float* to, float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
#else
  atomicAdd(to, a);
  atomicAdd(to + 1, b);
  atomicAdd(to + 2, c);
  atomicAdd(to + 3, d);
#endif
}

// Two products of 16-bit numbers, denormal ones too. PTX ISA 9.7.4.3 "mul", half precision; bf16 on sm_90 and later.
CUTLASS_DEVICE uint32_t multiply_f16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
CUTLASS_DEVICE uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

}  // namespace ptx
}  // namespace memeff
