// The one place where an index becomes an address: widened to 64 bits before the multiply.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "params.h"

namespace memeff {

CUTLASS_HOST_DEVICE int64_t offset(int64_t index, int64_t stride) { return index * stride; }

// Elements from a view's start to one head's first row; the rule at the top of params.h.
template <typename View>
CUTLASS_DEVICE int64_t head_offset(View const& view, int64_t batch, int group, int head_in_group) {
  return offset(batch, view.stride_b) + offset(group, view.stride_g) + offset(head_in_group, view.stride_h);
}

}  // namespace memeff
