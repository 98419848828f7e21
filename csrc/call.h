// One call of the binding, from tensors to launches. Plain C++17: no Python.
#pragma once

#include <functional>

#include "backward_desc.h"
#include "backward_plan.h"

namespace memeff {

// Gives an fp32 tensor of one dimension with that many elements, aligned to 16 bytes, on the device of the others; it
// lives until the launches are made. May throw.
using Allocate = std::function<TensorDesc(int64_t elements)>;

// The row's kernel, of packed heads behind a copy of the query (forward_plan.h); where few blocks would run, parts of
// the keys in more of them, then their merge, which also writes an out of a dtype that no kernel does (not the inputs',
// not fp32). Asks for a workspace only then, when all else is known to be right.
Status run_forward(const ForwardCall& args, const Allocate& allocate, CUstream_st* stream);

// delta, the row's kernels, then the sums of partial gradients. Asks once for the workspace, when all else is known to
// be right. Does nothing where no gradient is wanted.
Status run_backward(const BackwardCall& args, const Allocate& allocate, CUstream_st* stream);

// For tests: the parts of the keys in a request without sequences.
Status plan_forward_request(const Request& request, const KernelRow** row, int32_t* splits);

// For tests: the plan of a request alone. bias: sizes [B, H, M, N] of the bias whose gradient is wanted, all 0: none.
Status plan_request(const Request& request, int32_t heads_per_kv, const int64_t (&bias)[4], const KernelRow** row,
                    BackwardPlan* plan);

}  // namespace memeff
