#include "backward_desc.h"

#include "layout.h"

namespace memeff {
namespace {

Status check_gradient(const TensorDesc& gradient, const char* name, const TensorDesc& input, const TensorDesc& query) {
  if (Status s = check_operand(gradient, name, query); !s.ok()) return s;
  if (Status s = check_shape(gradient, name, input.shape, input.rank); !s.ok()) return s;
  return check_contiguous(gradient, name);
}

Status check_bias_gradient(const TensorDesc& gradient, const TensorDesc& bias) {
  if (!bias.has_value()) return invalid("grad_bias is given, attn_bias is not");
  if (bias.dtype == int32_t(DType::kBool)) return invalid("a bool attn_bias has no gradient");
  if (gradient.dtype != bias.dtype) return invalid("grad_bias has another dtype than attn_bias");
  if (Status s = check_shape(gradient, "grad_bias", bias.shape, bias.rank); !s.ok()) return s;
  if (reinterpret_cast<uintptr_t>(gradient.data) % uintptr_t(element_bytes(gradient.dtype)) != 0)
    return invalid("grad_bias is not aligned to its own elements");
  return check_contiguous(gradient, "grad_bias");
}

Status read_delta(const TensorDesc& delta, const TensorDesc& lse, int query_rank, BackwardParams* p) {
  if (!delta.has_value()) return {};
  const int rank = query_rank == 5 ? 4 : 3;  // of an lse without a dimension for its parts
  if (delta.dtype != int32_t(DType::kF32)) return invalid("delta is not float32");
  if (Status s = check_shape(delta, "delta", lse.shape + (lse.rank - rank), rank); !s.ok()) return s;
  p->delta = static_cast<const float*>(delta.data);
  return check_contiguous(delta, "delta");
}

// With sequences the gradient is summed over no dimension. The longest sequences, and so the size of a dimension 1 in a
// bias of their own, the host does not know.
Status check_full_bias(const TensorDesc& bias, const ForwardParams& f) {
  const Sequences& sequences = f.sequences;
  if (!is_packed(sequences)) return {};
  const int r = bias.rank;
  // Do more rows than sequences share one row of the bias?
  const auto shared = [&](int64_t size, int64_t rows) { return size == 1 && rows > sequences.count; };
  bool full = sequences.own_bias ? bias.shape[0] == sequences.count && !shared(bias.shape[r - 2], f.queries) &&
                                       !shared(bias.shape[r - 1], f.keys)
                                 : bias.shape[r - 2] == f.queries && bias.shape[r - 1] == f.keys;
  int64_t heads = 1;
  for (int i = 1; i < r - 2; ++i) heads *= bias.shape[i];
  full = full && heads == f.heads;
  if (!full) return invalid("attn_bias is broadcast: with sequences expand it where its gradient is wanted");
  return {};
}

GradView grad_view(const TensorDesc& t, const Canonical& c) {
  GradView view;
  view.data = t.data;
  view.stride_b = c.stride_b, view.stride_g = c.stride_g, view.stride_h = c.stride_h, view.stride_m = c.stride_l;
  return view;
}

// Strides follow the same rule as the bias' own; a dimension is summed where the bias has one element for several.
GradBiasView grad_bias_view(const TensorDesc& t, const ForwardParams& p) {
  GradBiasView view;
  const int r = t.rank;
  const int64_t groups = p.heads / p.heads_per_group, heads = p.heads_per_group;
  view.data = t.data;
  view.dtype = DType(t.dtype);
  view.stride_b = stride_of(t, 0), view.stride_m = stride_of(t, r - 2), view.stride_n = stride_of(t, r - 1);
  const bool sums = !is_packed(p.sequences);
  view.sum_b = sums && t.shape[0] == 1 && p.batch > 1;
  view.sum_m = sums && t.shape[r - 2] == 1 && p.queries > 1;
  view.sum_n = sums && t.shape[r - 1] == 1 && p.keys > 1;
  if (r == 5) {
    view.stride_g = stride_of(t, 1), view.stride_h = stride_of(t, 2);
    view.sum_g = t.shape[1] == 1 && groups > 1;
    view.sum_h = t.shape[2] == 1 && heads > 1;
  } else if (r == 4) {
    view.stride_h = stride_of(t, 1), view.stride_g = view.stride_h * heads;
    view.sum_g = t.shape[1] == 1 && groups > 1;
    view.sum_h = t.shape[1] == 1 && heads > 1;
  }
  return view;
}

}  // namespace

Status make_backward(const BackwardCall& a, BackwardParams* p, Request* r) {
  *p = BackwardParams{};
  const ForwardCall forward{a.query, a.key, a.value,  a.bias, a.out,     a.lse, a.seed,
                            a.scale, a.p,   a.causal, a.tf32, a.variant, a.mask};
  if (Status s = make_operands(forward, &p->forward, r); !s.ok()) return s;
  if (Status s = check_dtype(a.out, "out", a.query); !s.ok()) return s;
  if (p->forward.sequences.block_tables != nullptr)
    return {Code::kUnsupported, "the backward pass takes no pages: a page may serve several sequences"};
  if (!a.lse.has_value()) return invalid("lse is missing: the backward pass needs the forward's");
  if (Status s = read_delta(a.delta, a.lse, a.query.rank, p); !s.ok()) return s;
  if (Status s = check_operand(a.grad_out, "grad_out", a.query); !s.ok()) return s;
  if (Status s = check_shape(a.grad_out, "grad_out", a.out.shape, a.out.rank); !s.ok()) return s;
  const struct {
    const TensorDesc *gradient, *input;
    const char* name;
    GradView* view;
  } gradients[] = {{&a.grad_query, &a.query, "grad_query", &p->grad_query},
                   {&a.grad_key, &a.key, "grad_key", &p->grad_key},
                   {&a.grad_value, &a.value, "grad_value", &p->grad_value}};

  const int64_t groups = p->forward.heads / p->forward.heads_per_group;
  const Canonical o = canonical(a.grad_out, groups);
  uint64_t bits = uint64_t(r->alignment) | alignment_bits(a.grad_out, o);
  for (const auto& one : gradients) {
    if (!one.gradient->has_value()) continue;
    if (Status s = check_gradient(*one.gradient, one.name, *one.input, a.query); !s.ok()) return s;
    const Canonical c = canonical(*one.gradient, groups);
    *one.view = grad_view(*one.gradient, c);
    bits |= alignment_bits(*one.gradient, c);
  }
  if (a.grad_bias.has_value()) {
    if (Status s = check_bias_gradient(a.grad_bias, a.bias); !s.ok()) return s;
    if (Status s = check_full_bias(a.bias, p->forward); !s.ok()) return s;
    p->grad_bias = grad_bias_view(a.grad_bias, p->forward);
  }
  p->grad_out = view_of<TensorView>(a.grad_out, o);
  const bool shared_heads = a.query.rank == 4 && a.key.shape[2] != a.query.shape[2];
  p->heads_per_kv = shared_heads ? p->forward.heads_per_group : 1;

  r->pass = Pass::kBackward;
  r->heads_per_kv = p->heads_per_kv;
  r->alignment = lowest_bit(bits);
  r->bias_grad = a.grad_bias.has_value();
  r->deterministic = a.deterministic;
  return {};
}

}  // namespace memeff
