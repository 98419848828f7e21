// Two numbers in one register.
#pragma once

#include <cstdint>

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

namespace memeff {

// Rounded to 16 bits; the first is the lower half.
template <typename Element>
CUTLASS_DEVICE uint32_t pack(float low, float high) {
  cutlass::Array<float, 2> pair;
  pair[0] = low, pair[1] = high;
  const cutlass::Array<Element, 2> both = cutlass::NumericArrayConverter<Element, float, 2>::convert(pair);
  return reinterpret_cast<uint32_t const&>(both);
}

}  // namespace memeff
