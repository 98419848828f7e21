// How a forward call is laid out over thread blocks before its row is launched. Plain C++17: no CUDA, no Python.
#pragma once

#include "dispatch.h"

namespace memeff {

// One query and several query heads that share a key head: those heads become the queries of one tile, so that keys and
// values are read once for all of them. Everything that has a stride over heads or queries goes along: query, out, lse,
// bias. Left alone: dropout (its mask counts heads), windows that do not end at the last key, an lse whose heads do not
// lie side by side.
void pack_heads(ForwardParams* params, Request* request);

// Into how many parts the keys are cut (params.h: Partial): as many as keep all blocks running at once, on a GPU of so
// much shared memory a block and so many SMs.
int32_t forward_splits(const KernelRow& row, const ForwardParams& params, int32_t smem_optin, int32_t sm_count);

// fp32 elements of the parts' results.
int64_t partial_numel(const ForwardParams& params, int32_t splits);

// Puts the parts' results into the workspace.
void use_partial(ForwardParams* params, int32_t splits, float* workspace);

// Has the kernel write its one result as fp32 to `out`.
void use_wide_out(ForwardParams* params);

}  // namespace memeff
