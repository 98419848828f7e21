// Every inline PTX of the library, each with its section of the PTX ISA manual.
#pragma once

#include "cutlass/cutlass.h"

namespace memeff {
namespace ptx {

// 2^x to 2 ulp, denormal results flushed to zero. PTX ISA 9.7.3 "ex2".
CUTLASS_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace ptx
}  // namespace memeff
