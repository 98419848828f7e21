// How a forward call is laid out over thread blocks before its row is launched. Plain C++17: no CUDA, no Python.
#pragma once

#include "dispatch.h"

namespace memeff {

// Few queries and several query heads that share a key head: (query, head) become the rows of one tile (params.h:
// row_heads), so that keys and values are read once for all of them. Everything that has a stride over heads or queries
// goes along: query, out, lse, bias; masks ask for a row's query. Where one stride leads from row to row (one query, or
// one key head) nothing is copied; else the query is, and out and lse are written by the merge. Several queries take a
// power of two of rows each, the last of them zeros.
struct HeadPacking {
  bool copy_query = false;         // the query is to be copied to where kernels expect it
  bool through_workspace = false;  // results are parts, be it one
};
HeadPacking pack_heads(ForwardParams* params, Request* request);

// How many heads may be packed: 1 where heads share no key head, or with dropout (its mask counts heads), or a bias of
// which no one stride leads from row to row.
int32_t packable_heads(const ForwardParams& params);

// fp32 elements that the copy of the query takes, a multiple of 16 bytes.
int64_t packed_query_numel(const ForwardParams& params, DType dtype);

// Into how many parts the keys are cut (params.h: Partial): as many as keep all blocks running at once, on a GPU of so
// much shared memory a block and so many SMs.
int32_t forward_splits(const KernelRow& row, const ForwardParams& params, int32_t smem_optin, int32_t sm_count);

// fp32 elements of the parts' results.
int64_t partial_numel(const ForwardParams& params, int32_t splits);

// Puts the parts' results into the workspace.
void use_partial(ForwardParams* params, int32_t splits, float* workspace);

// The parts' results of packed heads as those of the call's own heads and queries.
Partial unpacked(const ForwardParams& params);

// Has the kernel write its one result as fp32 to `out`.
void use_wide_out(ForwardParams* params);

}  // namespace memeff
