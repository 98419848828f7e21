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
constexpr float kLn2Low = -1.904654323e-9f;  // ln(2) - kLn2

CUTLASS_DEVICE float negative_infinity() { return -__int_as_float(0x7f800000); }

// 2^x for x <= 0 to 0.65 ulp of the power of two below it (exp2_approx: 2 ulp), denormal results 0. For kernels whose
// results are few: the worst weight then decides beside PyTorch's.
CUTLASS_DEVICE float exp2_nearest(float x) {
  constexpr float kShift = 12582912.f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  const float shifted = __fadd_rn(x, kShift);
  const float r = __fsub_rn(x, __fsub_rn(shifted, kShift));  // |r| <= 1/2, exact
  // (2^r - 1) / r to 2e-9, a least-squares fit
  float q = 1.53553599e-4f;
  q = __fmaf_rn(q, r, 1.33988520e-3f);
  q = __fmaf_rn(q, r, 9.61843599e-3f);
  q = __fmaf_rn(q, r, 5.55033237e-2f);
  q = __fmaf_rn(q, r, 2.40226477e-1f);
  q = __fmaf_rn(q, r, 6.93147182e-1f);
  const float power = __int_as_float((__float_as_int(shifted) << 23) + 0x3f800000);
  const float result = __fmaf_rn(q, r, 1.f) * power;  // NaN stays
  return x < -126.f ? 0.f : result;
}

template <bool kNearest>
CUTLASS_DEVICE float exp2_of(float x) {
  return kNearest ? exp2_nearest(x) : ptx::exp2_approx(x);
}

template <bool kNearest>
struct FoldedScaleOf {
  CUTLASS_DEVICE static float reference(float max, float c) {
    return max == negative_infinity() ? 0.f : __fmul_rn(max, c);
  }
  CUTLASS_DEVICE static float weight(float x, float reference, float c) {
    return exp2_of<kNearest>(__fmaf_rn(x, c, -reference));
  }
  // Factor for what was summed under `max_before`; 0 when nothing was.
  CUTLASS_DEVICE static float rescale(float max_before, float reference, float c) {
    return exp2_of<kNearest>(__fmul_rn(max_before, c) - reference);
  }
  // The reference in natural units, in two parts.
  CUTLASS_DEVICE static float2 natural(float reference) {
    const float high = __fmul_rn(reference, kLn2);
    return make_float2(high, __fmaf_rn(reference, kLn2, -high) + reference * kLn2Low);
  }
};
using FoldedScale = FoldedScaleOf<false>;

template <bool kNearest>
struct PlainLogitsOf {
  CUTLASS_DEVICE static float reference(float max, float) { return max == negative_infinity() ? 0.f : max; }
  CUTLASS_DEVICE static float weight(float x, float reference, float c) {
    return exp2_of<kNearest>((x - reference) * c);
  }
  CUTLASS_DEVICE static float rescale(float max_before, float reference, float c) {
    return exp2_of<kNearest>((max_before - reference) * c);
  }
  CUTLASS_DEVICE static float2 natural(float reference) { return make_float2(reference, 0.f); }
};
using PlainLogits = PlainLogitsOf<false>;

// log(sum of 2^(x c - reference)) + the reference, in two parts: their sum is right to about 2^-45 where fp32 alone
// loses log(sum) beside a large reference. The backward pass needs both: exp(x - lse) is a weight.
template <typename Exponent>
CUTLASS_DEVICE float2 log_sum_exp(float reference, float sum) {
  if (sum == 0.f) return make_float2(negative_infinity(), 0.f);
  const float2 natural = Exponent::natural(reference);
  const float log_sum = logf(sum);
  const float total = __fadd_rn(natural.x, log_sum);  // and its rounding error: TwoSum, Knuth
  const float part = __fsub_rn(total, natural.x);
  const float error = __fadd_rn(__fsub_rn(natural.x, __fsub_rn(total, part)), __fsub_rn(log_sum, part));
  return make_float2(total, error + natural.y);
}

// log(sum) - logf(sum) to about 5e-8, sum >= 1. log(sum) of a row is a number of 3 to 10, whose last place is an error
// of every weight that the backward pass computes from the lse.
CUTLASS_DEVICE float log_error(float sum) {
  const float log_sum = logf(sum);
  const float power = __fmul_rn(log_sum, kLog2e);
  const float rest = __fmaf_rn(log_sum, kLog2eLow, __fmaf_rn(log_sum, kLog2e, -power));
  const float inverse = exp2_nearest(-power);
  return __fmaf_rn(sum, __fmaf_rn(inverse, -rest * kLn2, inverse), -1.f);  // sum * e^-log_sum - 1
}

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
