#include "layout.h"

namespace memeff {
namespace {

using std::to_string;

std::string shape_text(const TensorDesc& t) {
  std::string text = "[";
  for (int i = 0; i < t.rank && i < kMaxRank; ++i) text += (i ? ", " : "") + to_string(t.shape[i]);
  return text + "]";
}

}  // namespace

Status invalid(std::string message) { return {Code::kInvalid, std::move(message)}; }

int64_t element_bytes(int32_t dtype) {
  if (dtype == kInt64) return 8;
  return dtype == kInt32 ? 4 : bytes_of(DType(dtype));
}

int64_t stride_of(const TensorDesc& t, int dim) { return t.shape[dim] == 1 ? 0 : t.strides[dim]; }

Canonical canonical(const TensorDesc& t, int64_t groups) {
  const int last = t.rank - 1;
  Canonical c{t.shape[0], t.shape[1], 1, 1, t.shape[last], stride_of(t, 0), stride_of(t, 1), 0, 0};
  if (t.rank == 5) {
    c.groups = t.shape[2], c.heads = t.shape[3];
    c.stride_g = stride_of(t, 2), c.stride_h = stride_of(t, 3);
  } else if (t.rank == 4) {
    c.groups = groups, c.heads = t.shape[2] / groups;
    c.stride_h = stride_of(t, 2);
    c.stride_g = groups > 1 ? c.stride_h * c.heads : 0;
    if (c.heads == 1) c.stride_h = 0;
  }
  return c;
}

Status check_dtype(const TensorDesc& t, const char* name, const TensorDesc& query) {
  if (t.dtype != query.dtype) return invalid(std::string(name) + " has another dtype than query");
  return {};
}

Status check_operand(const TensorDesc& t, const char* name, const TensorDesc& query) {
  if (Status s = check_layout(t, name, query); !s.ok()) return s;
  return check_dtype(t, name, query);
}

Status check_layout(const TensorDesc& t, const char* name, const TensorDesc& query) {
  if (t.rank != query.rank)
    return invalid(std::string(name) + " has rank " + to_string(t.rank) + ", query has rank " + to_string(query.rank));
  for (int i = 0; i < t.rank; ++i)
    if (t.shape[i] < 1) return invalid(std::string(name) + " " + shape_text(t) + " is empty");
  const int last = t.rank - 1;
  if (t.shape[last] != 1 && t.strides[last] != 1)
    return invalid(std::string(name) + " has last stride " + to_string(t.strides[last]) + ", expected 1");
  if (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(element_bytes(t.dtype)) != 0)
    return invalid(std::string(name) + " is not aligned to its own elements");
  return {};
}

Status check_shape(const TensorDesc& t, const char* name, const int64_t* expected, int rank) {
  bool same = t.rank == rank;
  for (int i = 0; same && i < rank; ++i) same = t.shape[i] == expected[i];
  if (same) return {};
  std::string text = "[";
  for (int i = 0; i < rank; ++i) text += (i ? ", " : "") + to_string(expected[i]);
  return invalid(std::string(name) + " has shape " + shape_text(t) + ", expected " + text + "]");
}

Status check_contiguous(const TensorDesc& t, const char* name) {
  int64_t expected = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.shape[i] != 1 && t.strides[i] != expected)
      return invalid(std::string(name) + " " + shape_text(t) + " is not contiguous");
    expected *= t.shape[i];
  }
  return {};
}

Status check_devices(std::initializer_list<const TensorDesc*> tensors) {
  if (is_host_only()) return {};
  const TensorDesc& first = **tensors.begin();
  for (const TensorDesc* t : tensors) {
    if (!t->has_value()) continue;
    if (t->device_type != kCudaDevice) return invalid("a tensor is not on a CUDA device");
    if (t->device != first.device) return invalid("the tensors are on different CUDA devices");
  }
  return {};
}

uint64_t alignment_bits(const TensorDesc& t, const Canonical& c) {
  const uint64_t address = reinterpret_cast<uintptr_t>(t.data) / uint64_t(element_bytes(t.dtype));
  return address | uint64_t(c.stride_b) | uint64_t(c.stride_l) | uint64_t(c.stride_g) | uint64_t(c.stride_h) |
         uint64_t(c.depth);
}

int32_t lowest_bit(uint64_t bits) { return int32_t(bits & (~bits + 1)); }

TensorDesc from_dlpack(const dlpack::Tensor& t) {
  TensorDesc desc;
  desc.data = static_cast<char*>(t.data) + t.byte_offset;
  if (t.lanes == 1) {
    if (t.code == 2 && t.bits == 16) desc.dtype = int32_t(DType::kF16);
    if (t.code == 4 && t.bits == 16) desc.dtype = int32_t(DType::kBF16);
    if (t.code == 2 && t.bits == 32) desc.dtype = int32_t(DType::kF32);
    if (t.code == 6 && t.bits == 8) desc.dtype = int32_t(DType::kBool);
    if (t.code == 0 && t.bits == 64) desc.dtype = kInt64;
    if (t.code == 0 && t.bits == 32) desc.dtype = kInt32;
  }
  desc.device_type = t.device_type;
  desc.device = t.device_id;
  desc.rank = t.ndim > 0 ? t.ndim : kMaxRank + 1;  // a 0-D tensor is none of the layouts, and not "left out"
  for (int i = 0; i < t.ndim && i < kMaxRank; ++i) {
    desc.shape[i] = t.shape[i];
    desc.strides[i] = t.strides[i];
  }
  return desc;
}

}  // namespace memeff
