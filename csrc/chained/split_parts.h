// fp32 on bf16 tensor cores: a number as the sum of three bf16 numbers, exactly.
//
//   x = p0 + p1 + p2      p0 = x rounded to nearest, p1 = the rest cut to bf16, p2 = what is left (8 bits: no rounding)
//   x y = p0 q0 + (p0 q1 + p1 q0) + (p1 q1 + p0 q2 + p2 q0) + terms below 2^-25 of it
//
// Six products at the 16-bit rate cost what three TF32 products cost; three parts take 6 bytes where a high and a low
// TF32 part take 8; bf16 has fp32's range. p0 q0 has 16 bits, so that of a step's 16 products only those 2^8 times
// smaller than the largest lose anything when tensor cores align and cut them: half of 3xTF32's error, less than that
// of an FFMA chain (docs/performance.md, "fp32"). NaN stays NaN in p0; of an infinity the rest is NaN.
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

namespace memeff {
namespace chained {

constexpr int kParts = 3;

// Two numbers; x in the low halves.
CUTLASS_DEVICE void split_pair(float x, float y, uint32_t (&parts)[kParts]) {
  constexpr uint32_t kHigh = 0xffff0000;
  cutlass::Array<float, 2> pair;
  pair[0] = x;
  pair[1] = y;
  const auto rounded = cutlass::NumericArrayConverter<cutlass::bfloat16_t, float, 2>::convert(pair);
  parts[0] = reinterpret_cast<uint32_t const&>(rounded);
  x = __fsub_rn(x, __uint_as_float(parts[0] << 16));
  y = __fsub_rn(y, __uint_as_float(parts[0] & kHigh));
  parts[1] = __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
  x = __fsub_rn(x, __uint_as_float(__float_as_uint(x) & kHigh));
  y = __fsub_rn(y, __uint_as_float(__float_as_uint(y) & kHigh));
  parts[2] = __byte_perm(__float_as_uint(x), __float_as_uint(y), 0x7632);
}

// Four numbers that lie side by side in each part, kPart elements from one part to the next.
template <int kPart>
CUTLASS_DEVICE float4 join_four(cutlass::bfloat16_t const* from) {
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  CUTLASS_PRAGMA_UNROLL
  for (int part = kParts - 1; part >= 0; --part) {  // p2 + p1 is exact, and so is p1 + p2 + p0
    const uint2 four = *reinterpret_cast<uint2 const*>(from + part * kPart);
    sum.x = __fadd_rn(sum.x, __uint_as_float(four.x << 16));
    sum.y = __fadd_rn(sum.y, __uint_as_float(four.x & 0xffff0000));
    sum.z = __fadd_rn(sum.z, __uint_as_float(four.y << 16));
    sum.w = __fadd_rn(sum.w, __uint_as_float(four.y & 0xffff0000));
  }
  return sum;
}

}  // namespace chained
}  // namespace memeff
