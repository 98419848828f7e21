// Do fp16 parts hold what fp32 operands say? Of a call in parts two kernels start; one of them returns at once.
#pragma once

#include "cutlass/cutlass.h"
#include "params.h"

namespace memeff {

// Some rows of query or key hold numbers so far apart that the small ones, of weight where they meet the other
// operand's large ones, lack bits; or the query is near the end of fp32's range; or rows of value differ so much in
// size that weights, which are kept in units of the largest, hidden ones too, lack bits where small rows alone are
// seen.
CUTLASS_DEVICE bool is_wide(ForwardParams const& p) {
  const float* b = p.parts.workspace;  // hopper/f32_plan.h: bounds
  const float scale = fabsf(p.scale);
  const float error = scale * __ldg(b) * __ldg(b + 1) + scale * __ldg(b + 2) * __ldg(b + 3);
  return !(error <= p.parts.limit && __ldg(b + 3) * fmaxf(scale, 1.f) <= 2.0769187e34f &&  // 2^114
           __ldg(b + 4) * __ldg(b + 5) <= 4096.f);
}

CUTLASS_DEVICE bool is_for_another_kernel(ForwardParams const& p) {
  return p.parts.workspace != nullptr && is_wide(p) != p.parts.wide;
}

}  // namespace memeff
