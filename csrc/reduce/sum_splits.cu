// Sum of partial gradients, in the order of the splits: deterministic, rounded once.
#include "reduce/element.h"
#include "reduce/reduce.h"

namespace memeff {
namespace reduce {
namespace {

constexpr int kVector = 4;  // 16 bytes of fp32

// whole: out is aligned to kVector of its elements.
template <typename T>
__global__ void __launch_bounds__(kThreads) sum_splits_kernel(SumArgs a, bool whole) {
  using Vec = Vector<float, kVector>;
  const int64_t step = int64_t(gridDim.x) * kThreads * kVector;
  for (int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kVector; i < a.numel; i += step) {
    // Beyond numel lies what rounds the split up to kVector: read, never stored.
    Vec sum = *reinterpret_cast<const Vec*>(a.partial + i);
    for (int s = 1; s < a.splits; ++s) {
      const Vec x = *reinterpret_cast<const Vec*>(a.partial + s * a.stride_split + i);
#pragma unroll
      for (int e = 0; e < kVector; ++e) sum.at[e] += x.at[e];
    }
    Vector<T, kVector> rounded;
#pragma unroll
    for (int e = 0; e < kVector; ++e) rounded.at[e] = from_float<T>(sum.at[e]);
    T* out = static_cast<T*>(a.out) + i;
    if (whole && i + kVector <= a.numel) {
      *reinterpret_cast<Vector<T, kVector>*>(out) = rounded;
    } else {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if (i + e < a.numel) out[e] = rounded.at[e];
      }
    }
  }
}

template <typename T>
Status launch(const SumArgs& a, CUstream_st* stream) {
  const bool whole = reinterpret_cast<uintptr_t>(a.out) % (kVector * sizeof(T)) == 0;
  const unsigned blocks = blocks_for(a.numel, kThreads * kVector);
  sum_splits_kernel<T><<<blocks, kThreads, 0, stream>>>(a, whole);
  return launched("reduce::sum_splits", blocks);
}

}  // namespace

Status launch_sum_splits(const SumArgs& args, CUstream_st* stream) {
  switch (args.dtype) {
    case DType::kF16:
      return launch<__half>(args, stream);
    case DType::kBF16:
      return launch<__nv_bfloat16>(args, stream);
    case DType::kF32:
      return launch<float>(args, stream);
    default:
      return {Code::kInvalid, "reduce::sum_splits takes float16, bfloat16 and float32"};
  }
}

}  // namespace reduce
}  // namespace memeff
