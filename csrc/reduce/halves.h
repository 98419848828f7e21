// Host side of reduce/halves.cu.
#pragma once

#include "hopper/f32_plan.h"
#include "status.h"

struct CUstream_st;  // what cudaStream_t points to

namespace memeff {
namespace reduce {

// query, key, value (rows aligned to 16 bytes, K and Kv multiples of 4) -> their parts, scales and bounds in the
// workspace. plan.width: 64 or 128.
Status launch_halves(ForwardParams const& params, hopper_f32::Plan const& plan, float* workspace, CUstream_st* stream);

}  // namespace reduce
}  // namespace memeff
