// Request -> the first row of the variant list that fits it, and why the others do not. Plain C++17: no CUDA, no
// Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "params.h"
#include "status.h"

struct CUstream_st;  // what cudaStream_t points to

namespace memeff {

enum class Pass : int32_t { kForward = 0, kBackward = 1 };

using LaunchForward = Status (*)(const ForwardParams&, CUstream_st*);
using LaunchBackward = Status (*)(const BackwardParams&, CUstream_st*);

// One row of the list in kernels_rows.py (fields are explained there) and the code this build has for it.
struct KernelRow {
  const char* name;
  const char* family;
  const char* arch;
  Pass kind;
  DType dtype;
  Math math;
  int32_t max_k, max_kv;  // 0: any
  int32_t alignment;      // elements
  bool bias, dropout;
  int32_t tile_m, tile_n, value_tile, threads, smem_bytes;
  int32_t max_n;             // the longest N, 0: any; a backward row's longest M too
  bool sequences;            // takes packed sequences
  int32_t max_m;             // 0: any; automatic choice only
  double max_blocks_per_sm;  // 0: any; automatic choice only
  int32_t min_m;             // automatic choice only
  double min_blocks_per_sm;  // automatic choice only
  bool partial;              // writes results in fp32 too: of a part of the keys, or for an out of another dtype, and
                             // takes packed heads
  bool pages;                // reads keys through a block table
  int32_t bias_alignment;    // elements, of a bias of the query's dtype; 0: takes any bias
  int32_t min_sm, max_sm;    // automatic choice only
  bool allow_spill;          // the build accepts register spills
  int32_t blocks_per_sm;     // that the registers allow
  bool in_memory;            // a block writes all value columns
  bool adds_query;           // adds dQ up by atomics: sums in no fixed order
  int32_t min_length;        // automatic choice only where M or N is longer
  int32_t causal_length;     // not 0: automatic choice only for causal calls with M and N up to it
  int32_t min_k;             // automatic choice only where K or Kv is larger
  bool arch_specific;        // its code runs on exactly the archs in sass
  int32_t sass[16];          // compute capabilities with machine code, ascending, 0 after the last
  int32_t ptx;               // compute capability of the embedded PTX, 0: none
  LaunchForward forward;     // that of the row's kind; both null: not built
  LaunchBackward backward;

  bool is_built() const { return forward != nullptr || backward != nullptr; }
  // Thread blocks that share the value columns.
  int64_t slabs(int64_t value_dim) const {
    return max_kv == 0 && !in_memory ? (value_dim + value_tile - 1) / value_tile : 1;
  }
  // Into how many fp16 parts operands are split first (hopper/f32_plan.h); 0: they are taken as they are.
  int32_t parts() const { return arch_specific && dtype == DType::kF32 ? (math == Math::kTf32 ? 1 : 2) : 0; }
  bool is_full() const { return bias && dropout; }  // a tensor bias is then allowed, not needed
};

// A forward call's keys are cut into at most so many parts, of at least so many key blocks each (a part's prologue
// would outweigh it).
constexpr int64_t kMaxKeyParts = 64;  // what reduce::launch_merge takes
constexpr int64_t kMinKeyBlocks = 4;

// Heads that share a key head are packed (forward_plan.h) for up to so many queries; with more than one, only where the
// keys, of all key heads and batch entries, outweigh the two small kernels that this may take.
constexpr int64_t kMaxPackedQueries = 16;
constexpr int64_t kMinPackedKeys = 16384;

struct BuildInfo {
  const char* source_hash;
  const char* cuda_version;  // "none": host-only
  const char* archs;         // such as "sm_80 sm_90 compute_90"
};

// Generated (kernel_table.cpp).
extern const KernelRow kKernelTable[];
extern const int kKernelCount;
extern const BuildInfo kBuildInfo;

struct Request {
  int32_t sm = 0;          // compute capability as a number: 80, 90
  int32_t smem_optin = 0;  // bytes of shared memory a block may ask for; 0: that of the sm
  int32_t sm_count = 0;    // 0: that of the sm's usual chip
  DType dtype = DType::kF16;
  Math math = Math::kIeee;
  int64_t batch = 1;
  int64_t queries = 1;
  int64_t keys = 1;
  int64_t heads = 1;
  int32_t heads_per_key = 1;  // so many heads of a key head may be packed, see packs()
  int32_t head_dim = 1;
  int32_t value_dim = 1;
  int32_t alignment = 1;  // elements: the largest power of two that divides what rows ask about (see kernels_rows.py)
  Pass pass = Pass::kForward;
  bool has_bias = false;
  bool dropout = false;
  bool sequences = false;  // packed along the length: queries and keys are then means
  bool causal = false;     // later queries see more keys, all earlier ones
  bool paged = false;      // keys are read through a block table
  bool partial = false;    // results in fp32 are wanted, for another kernel to put together or to convert
  // Elements: the largest power of two that divides the bias' address and strides, at most 16; 0 where its dtype is not
  // the query's, its last stride not 1, or each sequence starts it anew.
  int32_t bias_alignment = 0;
  int32_t heads_per_kv = 1;    // backward: query heads whose gradients one key head sums
  bool lse = false;            // forward: the log-sum-exp is wanted
  bool bias_grad = false;      // backward: the bias' gradient is wanted
  bool deterministic = false;  // backward: equal inputs must give equal bits
  bool any_build = false;      // answer for a build that has every row (a host-only build always does)
  std::string variant;         // a forced row; "family:" and a name: the choice among its rows; empty: among all
};

const char* dtype_name(DType dtype);
const char* pass_name(Pass pass);  // "fwd", "bwd"
bool is_host_only();

// Machine code runs on its own major capability from its minor one up, that of an arch's specific features on it
// alone; PTX on anything at least as new.
constexpr bool code_runs(int32_t code, bool specific, bool ptx, int32_t sm) {
  if (specific) return code == sm;
  return code <= sm && (ptx || code / 10 == sm / 10);
}

// The same with what the sm's usual chip has where smem_optin or sm_count is 0.
Request with_chip_facts(Request request);

// Do the heads of a key head become rows of one tile? And the request that rows are then asked with.
bool packs(const Request& request);
bool forward_packs(const Request& request);  // the same of a backward request: does its forward pass?
Request packed(Request request);

// The row, or why there is none: kInvalid for an unknown forced name, kUnsupported with explain()'s text otherwise.
Status select(const Request& request, const KernelRow** row);

// The first row that takes operands as they are, whatever row is named.
Status select_whole(Request request, const KernelRow** row);

// Which row runs and why; every other row under its first reasons.
std::string explain(const Request& request);

// First reasons against a row, at most `limit`; empty where it fits.
std::vector<std::string> reasons(const KernelRow& row, const Request& request, bool forced, int limit = 2);

}  // namespace memeff
