// One call of the binding, from tensors to launches. Plain C++17: no Python.
#pragma once

#include "backward_desc.h"
#include "backward_plan.h"

namespace memeff {

Status run_forward(const ForwardCall& args, CUstream_st* stream);

// delta, the row's kernels, then the sums of partial gradients. Does nothing where no gradient is wanted.
Status run_backward(const BackwardCall& args, CUstream_st* stream);

// fp32 elements that run_backward needs as workspace; args.workspace is not looked at.
Status backward_workspace(const BackwardCall& args, int64_t* elements);

// For tests: the plan of a request alone. bias: sizes [B, H, M, N] of the bias whose gradient is wanted, all 0: none.
Status plan_request(const Request& request, int32_t heads_per_kv, const int64_t (&bias)[4], const KernelRow** row,
                    BackwardPlan* plan);

}  // namespace memeff
