// The small kernels around a row: delta before a backward one, sums of partial gradients after it, the parts of a
// forward one put together. Launched on `stream` of the current device; never synchronise, never allocate. A host-only
// build answers with kUnsupported.
#pragma once

#include "params.h"
#include "status.h"

struct CUstream_st;  // what cudaStream_t points to

namespace memeff {
namespace reduce {

struct DeltaArgs {
  TensorView out, grad_out;   // [B, M, G, heads_per_group, Kv]
  DType dtype = DType::kF16;  // of both
  float* delta = nullptr;     // [B, H, M], contiguous
  int64_t batch = 0;
  int32_t queries = 0;
  int32_t heads = 0;
  int32_t heads_per_group = 1;
  int32_t value_dim = 0;
  bool tf32 = false;       // fp32 inputs only
  float* zeros = nullptr;  // 16-byte aligned, set to 0 beside: 16 bits only
  int64_t zero_numel = 0;  // a multiple of 4
};

// delta[b, h, m] = sum over columns of out * grad_out, in fp32. tf32: of grad_out as TF32 products take it, so that
// what dP and delta have in common cancels in dS.
Status launch_delta(const DeltaArgs& args, CUstream_st* stream);

struct SumArgs {
  const float* partial = nullptr;  // [splits, stride_split], 16-byte aligned
  void* out = nullptr;             // [numel], contiguous
  DType dtype = DType::kF16;       // of out
  int64_t numel = 0;
  int64_t stride_split = 0;  // elements, a multiple of 4
  int32_t splits = 1;
};

// out[i] = partial[0][i] + partial[1][i] + ..., in this order, rounded once.
Status launch_sum_splits(const SumArgs& args, CUstream_st* stream);

struct QueryGradientArgs {
  QuerySums sums;
  Sequences sequences;
  OutputView out;             // [B, M, G, heads_per_group, K]; rows are 16-byte aligned
  DType dtype = DType::kF16;  // of out, 16 bits
  int64_t batch = 0;
  int32_t queries = 0;
  int32_t heads = 0;
  int32_t heads_per_group = 1;
  int32_t head_dim = 0;  // a multiple of 8
  float scale = 1.f;
};

// out = scale * sums, rounded once.
Status launch_query_gradient(const QueryGradientArgs& args, CUstream_st* stream);

Status launch_zeros(float* data, int64_t numel, CUstream_st* stream);

// args.query [B, M, G, heads_per_group, K] -> packed.query [B, G, M, row_heads, K], contiguous, aligned to 16 bytes,
// zero beyond heads_per_group: the rows of packed heads (forward_plan.h).
Status launch_pack(const ForwardParams& args, const ForwardParams& packed, DType dtype, CUstream_st* stream);

// out, of `out_dtype`, and lse of the forward of `dtype` inputs whose partial results lie in args.partial. With r the
// largest reference of the parts and w_s = sum_s exp(reference_s - r): lse = r + log(sum of w_s), out = sum of w_s
// out_s / sum of w_s; no part sees a key: out 0, lse -inf.
Status launch_merge(const ForwardParams& args, DType dtype, DType out_dtype, CUstream_st* stream);

}  // namespace reduce
}  // namespace memeff
