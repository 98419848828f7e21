// The parts of a forward pass put together: a warp for each row and 32 columns of it, so that few rows are many warps.
// Deterministic.
#include "reduce/element.h"
#include "reduce/reduce.h"

namespace memeff {
namespace reduce {
namespace {

constexpr int kMaxSplits = 64;  // two a lane

struct MergeKernelArgs {
  ForwardParams p;
  int64_t rows;  // B * H * M
  int chunks;    // of 32 columns
};

__device__ float warp_max(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}
__device__ float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// m + log(sum) in two parts: TwoSum, Knuth.
__device__ void store_lse(const LseView& lse, int64_t at, float max, float sum) {
  const float log_sum = logf(sum), total = __fadd_rn(max, log_sum), part = __fsub_rn(total, max);
  lse.data[at] = total;
  if (lse.low == nullptr) return;
  lse.low[at] = __fadd_rn(__fsub_rn(max, __fsub_rn(total, part)), __fsub_rn(log_sum, part));
}

template <typename T>
__global__ void __launch_bounds__(kThreads) merge_kernel(MergeKernelArgs args) {
  const ForwardParams& p = args.p;
  const int lane = threadIdx.x & 31, splits = p.partial.splits;
  __shared__ float weights[kThreads / 32][kMaxSplits];
  float* weight = weights[threadIdx.x / 32];
  const int64_t warps = int64_t(gridDim.x) * (kThreads / 32);
  for (int64_t work = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; work < args.rows * args.chunks;
       work += warps) {
    const int64_t row = work / args.chunks;
    const int column = int(work - row * args.chunks) * 32 + lane;
    float high[2], low[2], max = -INFINITY;
    for (int k = 0; k < 2; ++k) {
      const int s = lane + 32 * k;
      high[k] = s < splits ? p.partial.lse[s * args.rows + row] : -INFINITY;
      low[k] = s < splits ? p.partial.lse_low[s * args.rows + row] : 0.f;
      max = fmaxf(max, high[k]);
    }
    max = warp_max(max);
    float sum = 0.f;
    for (int k = 0; k < 2; ++k) {
      if (high[k] == -INFINITY) {
        high[k] = 0.f;
      } else {  // NaN stays, beside parts without keys too
        high[k] = expf((high[k] - (max == -INFINITY ? 0.f : max)) + low[k]);
      }
      sum += high[k];
    }
    sum = warp_sum(sum);
    for (int k = 0; k < 2; ++k) {
      if (lane + 32 * k < splits) weight[lane + 32 * k] = sum == 0.f ? 0.f : high[k] / sum;
    }
    __syncwarp();
    const int64_t batch_head = row / p.queries, m = row - batch_head * p.queries, batch = batch_head / p.heads;
    const int head = int(batch_head - batch * p.heads), group = head / p.heads_per_group;
    const int member = head - group * p.heads_per_group;
    T* out = static_cast<T*>(p.out.data) + batch * p.out.stride_b + group * p.out.stride_g + member * p.out.stride_h +
             m * p.out.stride_m;
    if (column < p.value_dim) {
      const float* part = p.partial.out + row * p.value_dim + column;
      const int64_t step = args.rows * p.value_dim;
      float total = 0.f;
#pragma unroll 16
      for (int s = 0; s < splits; ++s) total = fmaf(weight[s], part[s * step], total);  // without keys: 0 and 0
      out[column] = from_float<T>(total);
    }
    if (column == 0 && p.lse.data != nullptr) {
      const int64_t at = batch * p.lse.stride_b + group * p.lse.stride_g + member * p.lse.stride_h + m;
      if (sum == 0.f) {
        p.lse.data[at] = -INFINITY;
        if (p.lse.low != nullptr) p.lse.low[at] = 0.f;
      } else {
        store_lse(p.lse, at, max, sum);
      }
    }
    __syncwarp();  // the weights are used
  }
}

template <typename T>
Status launch(const ForwardParams& p, CUstream_st* stream) {
  const MergeKernelArgs args{p, p.batch * p.heads * p.queries, (p.value_dim + 31) / 32};
  const unsigned blocks = blocks_for(args.rows * args.chunks, kThreads / 32);
  merge_kernel<T><<<blocks, kThreads, 0, stream>>>(args);
  return launched("reduce::merge", blocks);
}

}  // namespace

Status launch_merge(const ForwardParams& args, DType dtype, CUstream_st* stream) {
  if (args.partial.splits > kMaxSplits) return {Code::kInvalid, "reduce::merge takes up to 64 parts"};
  switch (dtype) {
    case DType::kF16:
      return launch<__half>(args, stream);
    case DType::kBF16:
      return launch<__nv_bfloat16>(args, stream);
    default:
      return {Code::kInvalid, "reduce::merge takes float16 and bfloat16"};
  }
}

}  // namespace reduce
}  // namespace memeff
