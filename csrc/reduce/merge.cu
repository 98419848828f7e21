// The parts of a forward pass put together: a warp for each row and 32 columns of it, so that few rows are many warps.
// Deterministic.
#include "common/early_launch.h"
#include "reduce/element.h"
#include "reduce/reduce.h"

namespace memeff {
namespace reduce {
namespace {

constexpr int kMaxSplits = 64;  // two a lane

struct MergeKernelArgs {
  ForwardParams p;
  int64_t rows;       // B * H * M
  OutputView row;     // of the parts' sums and references: strides in rows, data unused
  int64_t part_rows;  // from one part to the next
  int chunks;         // of 32 columns
};

__device__ float warp_max(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}
template <typename Real>
__device__ Real warp_sum(Real x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// reference + log(sum) in two parts: TwoSum, Knuth.
__device__ float2 log_sum_exp(float reference, float sum) {
  const float log_sum = logf(sum), total = __fadd_rn(reference, log_sum), part = __fsub_rn(total, reference);
  return make_float2(total, __fadd_rn(__fsub_rn(reference, __fsub_rn(total, part)), __fsub_rn(log_sum, part)));
}
__device__ float2 log_sum_exp(float reference, double sum) {
  const double both = double(reference) + log(sum);
  const float total = float(both);
  return make_float2(total, isinf(total) ? 0.f : float(both - double(total)));
}

// What a row's parts count, two parts a lane.
template <typename Real>
struct Weights {
  Real at[2];
  Real total;
  float reference;  // the largest; total is relative to it
  float sum, low;   // of the lane's first part

  // row: of its sum in each part of `rows`
  __device__ Weights(Partial const& p, int64_t rows, int64_t row, int lane) : reference(-INFINITY) {
    float sums[2], high[2], lows[2];
    for (int k = 0; k < 2; ++k) {
      const int s = lane + 32 * k;
      const bool valid = s < p.splits;
      const int64_t from = s * rows + row;
      sums[k] = valid ? p.sum[from] : 0.f;
      high[k] = valid ? p.reference[from] : 0.f;
      lows[k] = valid ? p.reference_low[from] : 0.f;
      if (sums[k] != 0.f) reference = fmaxf(reference, high[k]);
    }
    reference = warp_max(reference);
    for (int k = 0; k < 2; ++k) {
      // A part without keys counts nothing; NaN stays, beside such parts too.
      at[k] = sums[k] == 0.f ? Real(0) : Real(sums[k]) * exp(Real(high[k]) - Real(reference) + Real(lows[k]));
    }
    total = warp_sum(at[0] + at[1]);
    sum = sums[0], low = lows[0];
  }
};

// Real: of the weights; fp32 inputs see what their rounding to fp32 leaves.
template <typename T, typename Real>
__global__ void __launch_bounds__(kThreads) merge_kernel(MergeKernelArgs args) {
  const ForwardParams& p = args.p;
  const int lane = threadIdx.x & 31, splits = p.partial.splits;
  __shared__ float weights[kThreads / 32][kMaxSplits];
  float* weight = weights[threadIdx.x / 32];
  const int64_t warps = int64_t(gridDim.x) * (kThreads / 32);
  ptx::wait_for_previous();
  for (int64_t work = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; work < args.rows * args.chunks;
       work += warps) {
    const int64_t row = work / args.chunks;
    const int column = int(work - row * args.chunks) * 32 + lane;
    const int64_t batch_head = row / p.queries, m = row - batch_head * p.queries, batch = batch_head / p.heads;
    const int head = int(batch_head - batch * p.heads), group = head / p.heads_per_group;
    const int member = head - group * p.heads_per_group;
    const auto at = [&](OutputView const& view) {
      return batch * view.stride_b + group * view.stride_g + member * view.stride_h + m * view.stride_m;
    };
    const Weights<Real> found(p.partial, args.part_rows, at(args.row), lane);
    for (int k = 0; k < 2; ++k) {
      if (lane + 32 * k < splits)
        weight[lane + 32 * k] = found.total == Real(0) ? 0.f : float(found.at[k] / found.total);
    }
    __syncwarp();
    if (column < p.value_dim) {
      const float* part = static_cast<const float*>(p.partial.out.data) + at(p.partial.out) + column;
      float total = 0.f;
#pragma unroll 16
      for (int s = 0; s < splits; ++s) {
        total = fmaf(weight[s], part[s * p.partial.stride_split], total);  // without keys: 0 and 0
      }
      static_cast<T*>(p.out.data)[at(p.out) + column] = from_float<T>(total);
    }
    if (column == 0 && p.lse.data != nullptr) {
      const int64_t to = batch * p.lse.stride_b + group * p.lse.stride_g + member * p.lse.stride_h + m;
      float2 both = make_float2(-INFINITY, 0.f);
      if (found.total != Real(0)) {
        both = splits > 1 ? log_sum_exp(found.reference, found.total) : log_sum_exp(found.reference, found.sum);
        if (splits == 1) both.y += found.low;  // the bits that the forward kernel writes
      }
      p.lse.data[to] = both.x;
      if (p.lse.low != nullptr) p.lse.low[to] = both.y;
    }
    __syncwarp();  // the weights are used
  }
}

template <typename T, typename Real>
Status launch(const ForwardParams& p, CUstream_st* stream) {
  const OutputView& out = p.partial.out;  // contiguous rows
  const int32_t width = p.value_dim;
  const OutputView row{nullptr, out.stride_b / width, out.stride_g / width, out.stride_h / width, out.stride_m / width};
  const MergeKernelArgs args{p, p.batch * p.heads * p.queries, row, p.partial.stride_split / width, (width + 31) / 32};
  const unsigned blocks = blocks_for(args.rows * args.chunks, kThreads / 32);
  return launch_early<&merge_kernel<T, Real>>(args, blocks, kThreads, stream, "reduce::merge");
}

template <typename Real>
Status launch_of(const ForwardParams& p, DType out_dtype, CUstream_st* stream) {
  switch (out_dtype) {
    case DType::kF16:
      return launch<__half, Real>(p, stream);
    case DType::kBF16:
      return launch<__nv_bfloat16, Real>(p, stream);
    case DType::kF32:
      return launch<float, Real>(p, stream);
    default:
      return {Code::kInvalid, "reduce::merge takes float16, bfloat16 and float32"};
  }
}

}  // namespace

Status launch_merge(const ForwardParams& args, DType dtype, DType out_dtype, CUstream_st* stream) {
  if (args.partial.splits > kMaxSplits) return {Code::kInvalid, "reduce::merge takes up to 64 parts"};
  return dtype == DType::kF32 ? launch_of<double>(args, out_dtype, stream) : launch_of<float>(args, out_dtype, stream);
}

}  // namespace reduce
}  // namespace memeff
