// Online softmax in base 2: running row maximum and sum, fp32.
//
// A score x contributes 2^(x * c - reference), c = log2(e) times what is left of the scale, reference = max * c (0
// while no key is visible). Two forms, chosen by the exponent policy:
//   FoldedScale   x is the raw product q.k; one FFMA x * c - reference. Only for scale > 0 and no bias.
//   PlainLogits   x is scale * q.k + bias in natural units; (x - max) * c, so that a finite bias near the end of the
//   fp32
//                 range cannot overflow to -inf through the factor log2(e) (FAULTS B03).
#pragma once

#include "common/ptx.h"
#include "cutlass/cutlass.h"

namespace memeff {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLog2eLow = 1.925963033e-8f;  // log2(e) - kLog2e
constexpr float kLn2 = 0.6931471805599453f;

CUTLASS_DEVICE float negative_infinity() { return -__int_as_float(0x7f800000); }

struct FoldedScale {
  CUTLASS_DEVICE static float reference(float max, float c) {
    return max == negative_infinity() ? 0.f : __fmul_rn(max, c);
  }
  CUTLASS_DEVICE static float weight(float x, float reference, float c) {
    return ptx::exp2_approx(__fmaf_rn(x, c, -reference));
  }
  // Factor for what was summed under `max_before`; 0 when nothing was.
  CUTLASS_DEVICE static float rescale(float max_before, float reference, float c) {
    return ptx::exp2_approx(__fmul_rn(max_before, c) - reference);
  }
  CUTLASS_DEVICE static float natural(float reference, float) { return reference * kLn2; }
};

struct PlainLogits {
  CUTLASS_DEVICE static float reference(float max, float) { return max == negative_infinity() ? 0.f : max; }
  CUTLASS_DEVICE static float weight(float x, float reference, float c) {
    return ptx::exp2_approx((x - reference) * c);
  }
  CUTLASS_DEVICE static float rescale(float max_before, float reference, float c) {
    return ptx::exp2_approx((max_before - reference) * c);
  }
  CUTLASS_DEVICE static float natural(float reference, float) { return reference; }
};

// State of the rows that one thread holds accumulators of. `sum` is this thread's part only: the parts are added up
// once, at the end, because every thread of a row uses the same maximum. kTwoLevels: sums are set aside now and then,
// with O.
template <int kRows, bool kTwoLevels>
struct SoftmaxState {
  float max[kRows];
  float sum[kRows];

  CUTLASS_DEVICE SoftmaxState() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      max[i] = negative_infinity();
      sum[i] = 0.f;
    }
  }
  CUTLASS_DEVICE void rescale(int i, float alpha) { sum[i] *= alpha; }
};

template <int kRows>
struct SoftmaxState<kRows, true> : SoftmaxState<kRows, false> {
  float sum_aside[kRows];
  float pending[kRows];  // factor that O set aside has yet to take
  bool aside = false;    // something was set aside

  CUTLASS_DEVICE SoftmaxState() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      sum_aside[i] = 0.f;
      pending[i] = 1.f;
    }
  }
  CUTLASS_DEVICE void rescale(int i, float alpha) {
    this->sum[i] *= alpha;
    sum_aside[i] *= alpha;
    pending[i] *= alpha;
  }
  CUTLASS_DEVICE void set_aside() {
    aside = true;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      sum_aside[i] += this->sum[i];
      this->sum[i] = 0.f;
      pending[i] = 1.f;
    }
  }
};

}  // namespace memeff
