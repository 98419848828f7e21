// The three layouts seen as one, and the checks that every tensor of a call passes. Plain C++17.
#pragma once

#include <initializer_list>

#include "tensor_desc.h"

namespace memeff {

Status invalid(std::string message);
int64_t element_bytes(int32_t dtype);

// Any of the three layouts seen as [B, L, G, heads per group, D]; strides of size-1 dimensions are 0.
struct Canonical {
  int64_t b, length, groups, heads, depth;
  int64_t stride_b, stride_l, stride_g, stride_h;
};

// groups: into how many groups a 4-D tensor's heads fall (key and value have one head a group).
Canonical canonical(const TensorDesc& t, int64_t groups);

int64_t stride_of(const TensorDesc& t, int dim);  // 0 where the size is 1

template <typename View>
View view_of(const TensorDesc& t, const Canonical& c) {
  return {t.data, c.stride_b, c.stride_g, c.stride_h, c.stride_l};
}

// The rank is the query's, no dimension is empty, the last stride is 1, the address is that of elements.
Status check_layout(const TensorDesc& t, const char* name, const TensorDesc& query);
Status check_dtype(const TensorDesc& t, const char* name, const TensorDesc& query);  // it is the query's
// Both.
Status check_operand(const TensorDesc& t, const char* name, const TensorDesc& query);
Status check_shape(const TensorDesc& t, const char* name, const int64_t* expected, int rank);
Status check_contiguous(const TensorDesc& t, const char* name);

// All on the CUDA device of the first. A host-only build takes every device.
Status check_devices(std::initializer_list<const TensorDesc*> tensors);

// Or of everything rows ask about, in elements: its lowest set bit is the common alignment.
uint64_t alignment_bits(const TensorDesc& t, const Canonical& c);
int32_t lowest_bit(uint64_t bits);

}  // namespace memeff
