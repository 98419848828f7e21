// One mma.sync of a warp and the conversions around it, on plain registers, 16-bit elements, sm_80 and newer.
//
//   C, m16n8   c0 c1 at row g, columns 2t, 2t + 1; c2 c3 at row g + 8          g = lane / 4, t = lane % 4
//   A, m16k16  a0 row g, k 2t, 2t + 1; a1 row g + 8; a2 row g, k + 8; a3 row g + 8, k + 8     (two elements each)
//   B, k16n8   b0 k 2t, 2t + 1 of column g; b1 k + 8
#pragma once

#include <cstdint>

#include "common/pack.h"
#include "cutlass/arch/mma.h"
#include "cutlass/arch/mma_sm80.h"
#include "cutlass/numeric_conversion.h"

namespace memeff {
namespace registers {

// c += a b
template <typename Element>
CUTLASS_DEVICE void multiply_add(float (&c)[4], uint32_t const (&a)[4], uint32_t b0, uint32_t b1) {
  using Mma =
      cutlass::arch::Mma<cutlass::gemm::GemmShape<16, 8, 16>, 32, Element, cutlass::layout::RowMajor, Element,
                         cutlass::layout::ColumnMajor, float, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>;
  auto& sum = reinterpret_cast<typename Mma::FragmentC&>(c);
  const uint32_t b[2] = {b0, b1};
  Mma()(sum, reinterpret_cast<typename Mma::FragmentA const&>(a), reinterpret_cast<typename Mma::FragmentB const&>(b),
        sum);
}

template <typename Element>
CUTLASS_DEVICE float2 unpack(uint32_t both) {
  if constexpr (std::is_same<Element, cutlass::bfloat16_t>::value) {
    return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
  } else {
    return __half22float2(reinterpret_cast<__half2 const&>(both));
  }
}

// Of two numbers those that are not below 0; 0 for the others; NaN stays.
template <typename Element>
CUTLASS_DEVICE uint32_t positive_part(uint32_t both) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same<Element, cutlass::bfloat16_t>::value) {
    const auto x = __hmax2_nan(reinterpret_cast<__nv_bfloat162 const&>(both), __float2bfloat162_rn(0.f));
    return reinterpret_cast<uint32_t const&>(x);
  } else {
    const auto x = __hmax2_nan(reinterpret_cast<__half2 const&>(both), __float2half2_rn(0.f));
    return reinterpret_cast<uint32_t const&>(x);
  }
#else
  return both;
#endif
}

}  // namespace registers
}  // namespace memeff
