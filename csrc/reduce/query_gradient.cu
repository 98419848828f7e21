// The gradient of the query from the sums that the register family's backward kernels add up (params.h: QuerySums):
// scaled, rounded once. Rows that belong to no sequence are 0.
#include "reduce/element.h"
#include "reduce/reduce.h"

namespace memeff {
namespace reduce {
namespace {

// The sequence of a row of packed sequences, -1 where it has none: the last one that starts at or before it.
__device__ int sequence_of(const Sequences& s, int row) {
  if (row < s.query_starts[0] || row >= s.query_starts[s.count]) return -1;
  int low = 0, high = s.count;  // starts[low] <= row < starts[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (s.query_starts[middle] <= row ? low : high) = middle;
  }
  return low;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) query_gradient_kernel(QueryGradientArgs a, int64_t pieces) {
  using Half = Vector<T, 8>;
  const int per_row = (a.head_dim + 15) / 16;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < pieces; i += int64_t(gridDim.x) * kThreads) {
    const int64_t row = i / per_row, batch_head = row / a.queries, batch = batch_head / a.heads;
    const int piece = int(i - row * per_row), head = int(batch_head - batch * a.heads);
    const int query = int(row - batch_head * a.queries);
    int within = query;  // the row's number among those of its blocks
    bool any = true;
    if (is_packed(a.sequences)) {
      const int sequence = sequence_of(a.sequences, query),
                start = sequence < 0 ? 0 : a.sequences.query_starts[sequence];
      any = sequence >= 0;
      within = any ? int(first_sum_block(start, sequence)) * 8 + query - start : 0;
    }
    const int group = head / a.heads_per_group, member = head - group * a.heads_per_group;
    const int64_t block = batch_head * a.sums.blocks + within / 8;
    const auto* sums = reinterpret_cast<const Vector<float, 4>*>(a.sums.data + block * 8 * a.sums.columns +
                                                                 piece * 128 + within % 8 * 16);
    Half low, high;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const Vector<float, 4> x = any ? sums[t] : Vector<float, 4>{};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        low.at[2 * t + e] = from_float<T>(x.at[e] * a.scale);
        high.at[2 * t + e] = from_float<T>(x.at[2 + e] * a.scale);
      }
    }
    T* out = static_cast<T*>(a.out.data) + batch * a.out.stride_b + group * a.out.stride_g + member * a.out.stride_h +
             int64_t(query) * a.out.stride_m + piece * 16;
    *reinterpret_cast<Half*>(out) = low;
    if (piece * 16 + 8 < a.head_dim) *reinterpret_cast<Half*>(out + 8) = high;
  }
}

template <typename T>
Status launch(const QueryGradientArgs& a, CUstream_st* stream) {
  const int64_t pieces = a.batch * a.heads * a.queries * ((a.head_dim + 15) / 16);
  const unsigned blocks = blocks_for(pieces, kThreads);
  query_gradient_kernel<T><<<blocks, kThreads, 0, stream>>>(a, pieces);
  return launched("reduce::query_gradient", blocks);
}

}  // namespace

Status launch_query_gradient(const QueryGradientArgs& args, CUstream_st* stream) {
  switch (args.dtype) {
    case DType::kF16:
      return launch<__half>(args, stream);
    case DType::kBF16:
      return launch<__nv_bfloat16>(args, stream);
    default:
      return {Code::kInvalid, "reduce::query_gradient takes float16 and bfloat16"};
  }
}

Status launch_zeros(float* data, int64_t numel, CUstream_st* stream) {
  MEMEFF_CUDA_CHECK(cudaMemsetAsync(data, 0, size_t(numel) * sizeof(float), stream), "reduce::zeros");
  return {};
}

}  // namespace reduce
}  // namespace memeff
