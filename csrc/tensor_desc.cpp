#include "tensor_desc.h"

#include <cstdlib>
#include <limits>

namespace memeff {
namespace {

using std::to_string;

Status invalid(std::string message) { return {Code::kInvalid, std::move(message)}; }

int64_t element_bytes(int32_t dtype) {
  return dtype == int32_t(DType::kF32) ? 4 : dtype == int32_t(DType::kBool) ? 1 : 2;
}

std::string shape_text(const TensorDesc& t) {
  std::string text = "[";
  for (int i = 0; i < t.rank && i < kMaxRank; ++i) text += (i ? ", " : "") + to_string(t.shape[i]);
  return text + "]";
}

// Any of the three layouts seen as [B, L, G, heads per group, D]; strides of size-1 dimensions are 0.
struct Canonical {
  int64_t b, length, groups, heads, depth;
  int64_t stride_b, stride_l, stride_g, stride_h;
};

int64_t stride_of(const TensorDesc& t, int dim) { return t.shape[dim] == 1 ? 0 : t.strides[dim]; }

// groups: into how many groups a 4-D tensor's heads fall (key and value have one head a group).
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

Status check_operand(const TensorDesc& t, const char* name, const TensorDesc& query) {
  if (t.rank != query.rank)
    return invalid(std::string(name) + " has rank " + to_string(t.rank) + ", query has rank " + to_string(query.rank));
  if (t.dtype != query.dtype) return invalid(std::string(name) + " has another dtype than query");
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

Status check_bias(const TensorDesc& bias, const TensorDesc& query, int64_t keys) {
  // query [B, M, heads..., K] -> bias [B, heads..., M, N]
  int64_t expected[kMaxRank] = {query.shape[0]};
  for (int i = 2; i < query.rank - 1; ++i) expected[i - 1] = query.shape[i];
  expected[query.rank - 2] = query.shape[1];
  expected[query.rank - 1] = keys;
  for (int i = 0; i < query.rank && i < bias.rank; ++i)
    if (bias.shape[i] == 1) expected[i] = 1;
  if (Status s = check_shape(bias, "attn_bias", expected, query.rank); !s.ok()) return s;
  const bool known =
      bias.dtype == query.dtype || bias.dtype == int32_t(DType::kF32) || bias.dtype == int32_t(DType::kBool);
  if (!known) return invalid("attn_bias has a dtype that is not query's, float32 or bool");
  return {};
}

BiasView bias_view(const TensorDesc& bias, const Canonical& q) {
  BiasView view;
  const int r = bias.rank;
  view.data = bias.data;
  view.dtype = DType(bias.dtype);
  view.stride_b = stride_of(bias, 0);
  view.stride_m = stride_of(bias, r - 2);
  view.stride_n = stride_of(bias, r - 1);
  if (r == 5) view.stride_g = stride_of(bias, 1), view.stride_h = stride_of(bias, 2);
  if (r == 4) view.stride_h = stride_of(bias, 1), view.stride_g = view.stride_h * q.heads;
  return view;
}

LseView lse_view(const TensorDesc& lse, const Canonical& q) {
  LseView view;
  view.data = static_cast<float*>(lse.data);
  view.stride_b = stride_of(lse, 0);
  if (lse.rank == 4) view.stride_g = stride_of(lse, 1), view.stride_h = stride_of(lse, 2);
  if (lse.rank == 3) view.stride_h = stride_of(lse, 1), view.stride_g = view.stride_h * q.heads;
  return view;
}

template <typename View>
View view_of(const TensorDesc& t, const Canonical& c) {
  return {t.data, c.stride_b, c.stride_g, c.stride_h, c.stride_l};
}

// Or of everything rows ask about, in elements: its lowest set bit is the common alignment.
uint64_t alignment_bits(const TensorDesc& t, const Canonical& c) {
  const uint64_t address = reinterpret_cast<uintptr_t>(t.data) / uint64_t(element_bytes(t.dtype));
  return address | uint64_t(c.stride_b) | uint64_t(c.stride_l) | uint64_t(c.stride_g) | uint64_t(c.stride_h) |
         uint64_t(c.depth);
}

bool fits_int32(int64_t n) { return n <= std::numeric_limits<int32_t>::max(); }

Status check_devices(const ForwardCall& a) {
  for (const TensorDesc* t : {&a.query, &a.key, &a.value, &a.bias, &a.out, &a.lse}) {
    if (!t->has_value()) continue;
    if (t->device_type != kCudaDevice) return invalid("a tensor is not on a CUDA device");
    if (t->device != a.query.device) return invalid("the tensors are on different CUDA devices");
  }
  return {};
}

}  // namespace

TensorDesc from_dlpack(const dlpack::Tensor& t) {
  TensorDesc desc;
  desc.data = static_cast<char*>(t.data) + t.byte_offset;
  if (t.lanes == 1) {
    if (t.code == 2 && t.bits == 16) desc.dtype = int32_t(DType::kF16);
    if (t.code == 4 && t.bits == 16) desc.dtype = int32_t(DType::kBF16);
    if (t.code == 2 && t.bits == 32) desc.dtype = int32_t(DType::kF32);
    if (t.code == 6 && t.bits == 8) desc.dtype = int32_t(DType::kBool);
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

Status make_forward(const ForwardCall& a, ForwardParams* p, Request* r) {
  const TensorDesc &query = a.query, &key = a.key, &value = a.value;
  if (query.rank < 3 || query.rank > kMaxRank)
    return invalid("query has rank " + to_string(query.rank) + ", not 3, 4 or 5");
  if (query.dtype < 0 || query.dtype == int32_t(DType::kBool))
    return invalid("query has a dtype that is not float16, bfloat16 or float32");
  const struct {
    const TensorDesc* tensor;
    const char* name;
  } operands[] = {{&query, "query"}, {&key, "key"}, {&value, "value"}, {&a.out, "out"}};
  for (const auto& operand : operands)
    if (Status s = check_operand(*operand.tensor, operand.name, query); !s.ok()) return s;

  const int rank = query.rank, last = rank - 1;
  const int64_t M = query.shape[1], N = key.shape[1], K = query.shape[last], Kv = value.shape[last];
  int64_t expected[kMaxRank];
  for (int i = 0; i < rank; ++i) expected[i] = query.shape[i];
  expected[last] = Kv;
  if (Status s = check_shape(a.out, "out", expected, rank); !s.ok()) return s;
  expected[1] = N, expected[last] = K;
  if (rank == 4) expected[2] = key.shape[2];
  if (Status s = check_shape(key, "key", expected, rank); !s.ok()) return s;
  expected[last] = Kv;
  if (Status s = check_shape(value, "value", expected, rank); !s.ok()) return s;

  int64_t groups = 1;  // 4-D: 1 where key has all heads, else key's heads
  if (rank == 4 && key.shape[2] != query.shape[2]) {
    groups = key.shape[2];
    if (query.shape[2] % groups != 0)
      return invalid("key has " + to_string(groups) + " heads, which do not divide query's " +
                     to_string(query.shape[2]));
  }
  const Canonical q = canonical(query, groups), o = canonical(a.out, groups);
  const Canonical k = canonical(key, groups), v = canonical(value, groups);
  const int64_t heads = q.groups * q.heads;
  if (!fits_int32(M) || !fits_int32(N) || !fits_int32(heads) || !fits_int32(K) || !fits_int32(Kv))
    return invalid("M, N, H, K and Kv must each be below 2^31");

  *p = ForwardParams{};
  p->query = view_of<TensorView>(query, q);
  p->key = view_of<TensorView>(key, k);
  p->value = view_of<TensorView>(value, v);
  p->out = view_of<OutputView>(a.out, o);
  if (a.bias.has_value()) {
    if (Status s = check_bias(a.bias, query, N); !s.ok()) return s;
    p->bias = bias_view(a.bias, q);
  }
  if (a.lse.has_value()) {
    if (a.lse.dtype != int32_t(DType::kF32)) return invalid("lse is not float32");
    const int64_t shapes[3][4] = {{q.b, 1, M}, {q.b, heads, M}, {q.b, q.groups, q.heads, M}};
    if (Status s = check_shape(a.lse, "lse", shapes[rank - 3], rank == 5 ? 4 : 3); !s.ok()) return s;
    const int lse_last = a.lse.rank - 1;
    if (M != 1 && a.lse.strides[lse_last] != 1) return invalid("lse has a last stride other than 1");
    p->lse = lse_view(a.lse, q);
  }
  if (a.causal < 0 || a.causal > 2) return invalid("causal is " + to_string(a.causal) + ", not 0, 1 or 2");
  p->batch = q.b;
  p->queries = int32_t(M), p->keys = int32_t(N);
  p->heads = int32_t(heads), p->heads_per_group = int32_t(q.heads);
  p->head_dim = int32_t(K), p->value_dim = int32_t(Kv);
  p->scale = a.scale;
  p->causal = Causal(a.causal);

  const uint64_t bits = alignment_bits(query, q) | alignment_bits(key, k) | alignment_bits(value, v) |
                        alignment_bits(a.out, o) | 16;  // 16 elements: more than any row asks for
  r->alignment = int32_t(bits & (~bits + 1));
  r->dtype = DType(query.dtype);
  r->math = a.tf32 ? Math::kTf32 : Math::kIeee;
  r->batch = q.b, r->queries = M, r->keys = N, r->heads = heads;
  r->head_dim = int32_t(K), r->value_dim = int32_t(Kv);
  r->has_bias = a.bias.has_value();
  r->variant = a.variant;
  if (is_host_only()) return {};
  return check_devices(a);
}

}  // namespace memeff
