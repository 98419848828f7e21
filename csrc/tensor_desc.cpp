#include "tensor_desc.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "forward_plan.h"
#include "layout.h"
#include "mask_desc.h"

namespace memeff {
namespace {

using std::to_string;

Status check_bias(const TensorDesc& bias, const TensorDesc& query, int64_t keys, const Sequences& sequences) {
  // query [B, M, heads..., K] -> bias [B, heads..., M, N]
  int64_t expected[kMaxRank] = {query.shape[0]};
  for (int i = 2; i < query.rank - 1; ++i) expected[i - 1] = query.shape[i];
  expected[query.rank - 2] = query.shape[1];
  expected[query.rank - 1] = keys;
  if (sequences.own_bias) {
    expected[0] = sequences.count;
    for (int i = query.rank - 2; i < query.rank && i < bias.rank; ++i)
      expected[i] = std::max<int64_t>(bias.shape[i], 1);
  }
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

// As Request::bias_alignment. Of packed sequences none: the keys of one begin anywhere in a row.
int32_t bias_alignment(const ForwardParams& p, DType dtype) {
  const BiasView& b = p.bias;
  if (b.data == nullptr || b.dtype != dtype || is_packed(p.sequences) || (b.stride_n != 1 && p.keys > 1)) return 0;
  const uint64_t address = reinterpret_cast<uintptr_t>(b.data) / uint64_t(bytes_of(dtype));
  return lowest_bit(address | uint64_t(b.stride_b | b.stride_g | b.stride_h | b.stride_m) | 16);
}

// A dimension of 2 before those of the plain shape: the log-sum-exp and what rounding took from it.
Status read_lse(const TensorDesc& lse, const Canonical& q, int query_rank, LseView* view) {
  if (lse.dtype != int32_t(DType::kF32)) return invalid("lse is not float32");
  const int rank = query_rank == 5 ? 4 : 3, parts = lse.rank > rank ? 1 : 0;
  int64_t expected[kMaxRank] = {2};
  int64_t* plain = expected + parts;
  plain[0] = q.b, plain[rank - 1] = q.length;
  if (query_rank == 5)
    plain[1] = q.groups, plain[2] = q.heads;
  else
    plain[1] = q.groups * q.heads;
  if (Status s = check_shape(lse, "lse", expected, rank + parts); !s.ok()) return s;
  const int last = lse.rank - 1;
  if (q.length != 1 && lse.strides[last] != 1) return invalid("lse has a last stride other than 1");
  view->data = static_cast<float*>(lse.data);
  if (parts != 0) view->low = view->data + lse.strides[0];
  view->stride_b = stride_of(lse, parts);
  view->stride_h = stride_of(lse, last - 1);
  view->stride_g = query_rank == 5 ? stride_of(lse, parts + 1) : view->stride_h * q.heads;
  return {};
}

bool fits_int32(int64_t n) { return n <= std::numeric_limits<int32_t>::max(); }

// q, the p that kernels know, is threshold / 65536.
Status make_dropout(const TensorDesc& seed, double p, Dropout* dropout) {
  *dropout = Dropout{};
  if (!(p >= 0 && p <= 1)) return invalid("p is " + to_string(p) + ", not between 0 and 1");
  if (seed.has_value() != (p != 0))
    return invalid(p != 0 ? "p is not 0, but seed is missing" : "seed is given, p is 0");
  if (p == 0) return {};
  if (seed.dtype != kInt64) return invalid("seed is not int64");
  const int64_t two = 2;
  if (Status s = check_shape(seed, "seed", &two, 1); !s.ok()) return s;
  if (Status s = check_contiguous(seed, "seed"); !s.ok()) return s;
  if (reinterpret_cast<uintptr_t>(seed.data) % 8 != 0) return invalid("seed is not aligned to its own elements");
  constexpr int32_t kAll = 65536;
  dropout->seed = static_cast<const int64_t*>(seed.data);
  dropout->threshold = p == 1 ? kAll : std::min(kAll - 1, int32_t(std::floor(p * kAll + 0.5)));
  dropout->keep_scale = p == 1 ? 0.f : float(double(kAll) / (kAll - dropout->threshold));
  return {};
}

// Ranks, dtypes and shapes of query, key, value and out; groups: into how many the heads fall in a 4-D call, 1 where
// key has all heads, else key's heads.
Status check_operands(const ForwardCall& a, int64_t* groups) {
  const TensorDesc &query = a.query, &key = a.key, &value = a.value;
  if (query.rank < 3 || query.rank > kMaxRank)
    return invalid("query has rank " + to_string(query.rank) + ", not 3, 4 or 5");
  if (query.dtype < 0 || query.dtype > int32_t(DType::kF32))
    return invalid("query has a dtype that is not float16, bfloat16 or float32");
  const struct {
    const TensorDesc* tensor;
    const char* name;
  } operands[] = {{&query, "query"}, {&key, "key"}, {&value, "value"}, {&a.out, "out"}};
  for (const auto& operand : operands) {
    if (Status s = check_layout(*operand.tensor, operand.name, query); !s.ok()) return s;
    if (operand.tensor == &a.out) continue;
    if (Status s = check_dtype(*operand.tensor, operand.name, query); !s.ok()) return s;
  }

  const int rank = query.rank, last = rank - 1;
  int64_t expected[kMaxRank];
  for (int i = 0; i < rank; ++i) expected[i] = query.shape[i];
  expected[last] = value.shape[last];
  if (Status s = check_shape(a.out, "out", expected, rank); !s.ok()) return s;
  expected[1] = key.shape[1], expected[last] = query.shape[last];
  if (rank == 4) expected[2] = key.shape[2];
  if (Status s = check_shape(key, "key", expected, rank); !s.ok()) return s;
  expected[last] = value.shape[last];
  if (Status s = check_shape(value, "value", expected, rank); !s.ok()) return s;

  *groups = rank == 4 && key.shape[2] != query.shape[2] ? key.shape[2] : 1;
  if (rank == 4 && query.shape[2] % *groups != 0)
    return invalid("key has " + to_string(*groups) + " heads, which do not divide query's " +
                   to_string(query.shape[2]));
  return {};
}

}  // namespace

Status make_operands(const ForwardCall& a, ForwardParams* p, Request* r) {
  int64_t groups = 1;
  if (Status s = check_operands(a, &groups); !s.ok()) return s;
  const TensorDesc &query = a.query, &key = a.key, &value = a.value;
  const Canonical q = canonical(query, groups), o = canonical(a.out, groups);
  const Canonical k = canonical(key, groups), v = canonical(value, groups);
  const int64_t M = q.length, N = k.length, K = q.depth, Kv = v.depth;
  const int64_t heads = q.groups * q.heads;
  if (!fits_int32(heads) || !fits_int32(K) || !fits_int32(Kv)) return invalid("H, K and Kv must each be below 2^31");
  if (M > kLongest || N > kLongest) return invalid("M and N must each be at most 2^31 - 1024");

  *p = ForwardParams{};
  p->query = view_of<TensorView>(query, q);
  p->key = view_of<TensorView>(key, k);
  p->value = view_of<TensorView>(value, v);
  p->out = view_of<OutputView>(a.out, o);
  if (a.lse.has_value())
    if (Status s = read_lse(a.lse, q, query.rank, &p->lse); !s.ok()) return s;
  if (Status s = make_dropout(a.seed, a.p, &p->dropout); !s.ok()) return s;
  p->batch = q.b;
  p->queries = int32_t(M), p->keys = int32_t(N);
  p->heads = int32_t(heads), p->heads_per_group = int32_t(q.heads);
  p->head_dim = int32_t(K), p->value_dim = int32_t(Kv);
  p->scale = a.scale;
  if (Status s = make_mask(a.mask, a.causal, p); !s.ok()) return s;
  if (a.bias.has_value()) {
    if (Status s = check_bias(a.bias, query, N, p->sequences); !s.ok()) return s;
    p->bias = bias_view(a.bias, q);
  }

  // 16 elements: more than any row asks for.
  r->alignment = lowest_bit(alignment_bits(query, q) | alignment_bits(key, k) | alignment_bits(value, v) | 16);
  r->dtype = DType(query.dtype);
  r->math = a.tf32 ? Math::kTf32 : Math::kIeee;
  r->batch = q.b, r->queries = M, r->keys = N, r->heads = heads;
  count_sequences(a.mask, p->sequences, r);
  r->head_dim = int32_t(K), r->value_dim = int32_t(Kv);
  r->causal = p->anchor != Anchor::kNone && p->window_right >= 0 && p->window_left < 0;
  r->has_bias = a.bias.has_value();
  r->bias_alignment = bias_alignment(*p, r->dtype);
  r->dropout = a.seed.has_value();
  r->variant = a.variant;
  r->heads_per_key = packable_heads(*p);
  return {};
}

Status make_forward(const ForwardCall& args, ForwardParams* params, Request* request) {
  if (Status s = make_operands(args, params, request); !s.ok()) return s;
  if (args.out.dtype < 0 || args.out.dtype > int32_t(DType::kF32))
    return invalid("out has a dtype that is not float16, bfloat16 or float32");
  request->lse = args.lse.has_value();
  if (args.out.dtype != args.query.dtype) return {};  // written an element at a time
  const Canonical out = canonical(args.out, params->heads / params->heads_per_group);
  request->alignment = lowest_bit(uint64_t(request->alignment) | alignment_bits(args.out, out));
  return {};
}

}  // namespace memeff
