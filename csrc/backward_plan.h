// How a backward call is split over blocks, and where its temporaries lie. A pure function of shapes, row and GPU, so
// that the order of sums is the same in every run. Plain C++17.
#pragma once

#include "dispatch.h"

namespace memeff {

// Into how many parts a loop is split where its outputs alone would not fill the GPU.
struct Splits {
  int32_t query = 1;      // of the keys
  int32_t key_value = 1;  // of the queries (times the heads that share a key head); dK and dV share a kernel
  int32_t bias = 1;       // of what the bias' gradient is summed over
};

// Workspace in fp32 elements: delta [B, H, M], then for each split output its partial sums [splits, numel]; every
// section starts at a multiple of 16 bytes. Rows that add dQ up: its sums in place of partial sums.
struct BackwardPlan {
  Splits splits;
  int64_t query = 0, key = 0, value = 0, bias = 0;  // where each output's partial sums start; unsplit: unused
  int64_t query_sums = -1;                          // the same of BackwardParams::query_sums; < 0: none
  int64_t total = 0;                                // 0: no gradient is wanted
};

// params as make_backward fills it. With sequences nothing is split.
BackwardPlan plan_backward(const KernelRow& row, const BackwardParams& params, int32_t sm_count);

// Points delta, where it is null, query_sums and the split gradients of params into the workspace.
void use_workspace(const BackwardPlan& plan, float* workspace, BackwardParams* params);

// Elements of each gradient.
int64_t grad_query_numel(const BackwardParams& p);
int64_t query_sums_numel(const BackwardParams& p);
int64_t grad_key_numel(const BackwardParams& p);
int64_t grad_value_numel(const BackwardParams& p);
int64_t grad_bias_numel(const BackwardParams& p);

// From one partial sum to the next: numel rounded up to 16 bytes.
int64_t split_stride(int64_t numel);

}  // namespace memeff
