// Stands for the kernels in a host-only build.
#include "reduce/reduce.h"

namespace memeff {
namespace reduce {

static Status host_only() { return {Code::kUnsupported, "this build is host-only: it was made without nvcc"}; }

Status launch_delta(const DeltaArgs&, CUstream_st*) { return host_only(); }
Status launch_sum_splits(const SumArgs&, CUstream_st*) { return host_only(); }
Status launch_query_gradient(const QueryGradientArgs&, CUstream_st*) { return host_only(); }
Status launch_zeros(float*, int64_t, CUstream_st*) { return host_only(); }
Status launch_pack(const ForwardParams&, const ForwardParams&, DType, CUstream_st*) { return host_only(); }
Status launch_merge(const ForwardParams&, DType, DType, CUstream_st*) { return host_only(); }

}  // namespace reduce
}  // namespace memeff
