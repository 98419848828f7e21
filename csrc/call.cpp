#include "call.h"

#include "device.h"
#include "forward_plan.h"
#include "hopper/f32_plan.h"
#include "layout.h"
#include "reduce/reduce.h"

namespace memeff {
namespace {

using std::to_string;

Status select_on_device(int device, Request request, const KernelRow** row, DeviceFacts* facts) {
  if (Status s = device_facts(device, facts); !s.ok()) return s;
  request.sm = facts->sm, request.smem_optin = facts->smem_optin, request.sm_count = facts->sm_count;
  return select(request, row);
}

// A row of parts and the one that follows it where parts do not hold what the operands say.
struct InParts {
  const KernelRow* whole = nullptr;
  int64_t numel = 0;  // fp32 elements of the parts, 0: the row takes operands as they are
};

Status plan_parts(const KernelRow& row, const ForwardParams& p, int device, Request request, InParts* parts) {
  if (row.parts() == 0) return {};
  parts->numel = hopper_f32::make_plan(p, row.parts(), row.value_tile).total;
  DeviceFacts facts;
  if (Status s = device_facts(device, &facts); !s.ok()) return s;
  request.sm = facts.sm, request.smem_optin = facts.smem_optin, request.sm_count = facts.sm_count;
  return select_whole(std::move(request), &parts->whole);
}

// The bounds on the device decide which of the two does the work.
Status launch_parts(const KernelRow& row, const InParts& parts, ForwardParams p, float* workspace,
                    CUstream_st* stream) {
  p.parts = {workspace, hopper_f32::limit_of(row.parts()), false};
  if (Status s = row.forward(p, stream); !s.ok()) return s;
  p.parts.wide = true;
  return parts.whole->forward(p, stream);
}

struct Backward {
  BackwardParams params;
  Request request;
  BackwardPlan plan;
  const KernelRow* row = nullptr;  // null where no gradient is wanted
};

Status prepare(const BackwardCall& a, Backward* b) {
  if (Status s = make_backward(a, &b->params, &b->request); !s.ok()) return s;
  if (Status s = check_devices({&a.query, &a.key, &a.value, &a.bias, &a.out, &a.lse, &a.seed, &a.grad_out,
                                &a.grad_query, &a.grad_key, &a.grad_value, &a.grad_bias, &a.mask.query_starts,
                                &a.mask.key_starts, &a.mask.key_lengths, &a.mask.block_tables, &a.delta});
      !s.ok())
    return s;
  if (!a.wants_any()) return {};
  DeviceFacts facts;
  if (Status s = select_on_device(a.query.device, b->request, &b->row, &facts); !s.ok()) return s;
  b->plan = plan_backward(*b->row, b->params, facts.sm_count);
  return {};
}

Status check_workspace(const TensorDesc& workspace, const TensorDesc& query, int64_t needed) {
  if (!workspace.has_value()) return invalid("workspace is missing: " + to_string(needed) + " elements are needed");
  if (workspace.dtype != int32_t(DType::kF32)) return invalid("workspace is not float32");
  if (workspace.rank != 1 || workspace.shape[0] < needed)
    return invalid("workspace is not of one dimension with at least " + to_string(needed) + " elements");
  if (Status s = check_contiguous(workspace, "workspace"); !s.ok()) return s;
  if (reinterpret_cast<uintptr_t>(workspace.data) % 16 != 0) return invalid("workspace is not aligned to 16 bytes");
  return check_devices({&query, &workspace});
}

reduce::DeltaArgs delta_args(const BackwardParams& p, float* delta, DType dtype, Math math) {
  const ForwardParams& f = p.forward;
  const TensorView out{f.out.data, f.out.stride_b, f.out.stride_g, f.out.stride_h, f.out.stride_m};
  return {out,
          p.grad_out,
          dtype,
          delta,
          f.batch,
          f.queries,
          f.heads,
          f.heads_per_group,
          f.value_dim,
          math == Math::kTf32,
          p.query_sums.data,
          query_sums_numel(p)};
}

Status launch_delta(const BackwardParams& p, float* workspace, DType dtype, Math math, CUstream_st* stream) {
  if (p.delta == workspace) return reduce::launch_delta(delta_args(p, workspace, dtype, math), stream);
  if (p.query_sums.data == nullptr) return {};
  return reduce::launch_zeros(p.query_sums.data, query_sums_numel(p), stream);
}

Status finish_query(const BackwardParams& p, DType dtype, CUstream_st* stream) {
  if (p.query_sums.data == nullptr) return {};
  const ForwardParams& f = p.forward;
  const GradView& g = p.grad_query;
  const OutputView out{g.data, g.stride_b, g.stride_g, g.stride_h, g.stride_m};
  return reduce::launch_query_gradient(
      {p.query_sums, f.sequences, out, dtype, f.batch, f.queries, f.heads, f.heads_per_group, f.head_dim, f.scale},
      stream);
}

// Adds up the partial sums of one gradient: `partial` is its view in the workspace, `gradient` the tensor.
template <typename View>
Status sum_splits(const View& partial, void* gradient, DType dtype, int64_t numel, CUstream_st* stream) {
  if (partial.splits == 1) return {};
  return reduce::launch_sum_splits(
      {static_cast<const float*>(partial.data), gradient, dtype, numel, partial.stride_split, partial.splits}, stream);
}

// p: with its parts in the workspace; the workspace starts with delta, which is computed unless it was given. Sums of
// dQ are zeroed beside delta.
Status launch_all(const KernelRow& row, const BackwardParams& p, float* workspace, const BackwardCall& args,
                  CUstream_st* stream) {
  const DType dtype = DType(args.query.dtype);
  if (Status s = launch_delta(p, workspace, dtype, row.math, stream); !s.ok()) return s;
  if (Status s = row.backward(p, stream); !s.ok()) return s;
  if (Status s = finish_query(p, dtype, stream); !s.ok()) return s;
  const auto sum = [&](const auto& partial, const TensorDesc& gradient, int64_t numel) {
    return sum_splits(partial, gradient.data, DType(gradient.dtype), numel, stream);
  };
  if (Status s = sum(p.grad_query, args.grad_query, grad_query_numel(p)); !s.ok()) return s;
  if (Status s = sum(p.grad_key, args.grad_key, grad_key_numel(p)); !s.ok()) return s;
  if (Status s = sum(p.grad_value, args.grad_value, grad_value_numel(p)); !s.ok()) return s;
  return sum(p.grad_bias, args.grad_bias, grad_bias_numel(p));
}

}  // namespace

Status run_forward(const ForwardCall& args, const Allocate& allocate, CUstream_st* stream) {
  ForwardParams params;
  Request request;
  if (Status s = make_forward(args, &params, &request); !s.ok()) return s;
  const MaskCall& mask = args.mask;
  if (Status s = check_devices({&args.query, &args.key, &args.value, &args.bias, &args.out, &args.lse, &args.seed,
                                &mask.query_starts, &mask.key_starts, &mask.key_lengths, &mask.block_tables});
      !s.ok())
    return s;
  ForwardParams kernel = params;  // as the row's kernel sees it
  const HeadPacking packing = pack_heads(&kernel, &request);
  const DType dtype = DType(args.query.dtype), out_dtype = DType(args.out.dtype);
  request.partial |= out_dtype != dtype;
  DeviceFacts facts;
  const KernelRow* row = nullptr;
  if (Status s = select_on_device(args.query.device, request, &row, &facts); !s.ok()) return s;
  InParts parts;
  if (Status s = plan_parts(*row, kernel, args.query.device, std::move(request), &parts); !s.ok()) return s;
  const int32_t splits = forward_splits(*row, kernel, facts.smem_optin, facts.sm_count);
  const bool writes_it = out_dtype == dtype || out_dtype == DType::kF32;
  const bool direct = splits == 1 && writes_it && !packing.through_workspace;
  if (direct && out_dtype != dtype) use_wide_out(&kernel);
  const int64_t copied = packing.copy_query ? packed_query_numel(kernel, dtype) : 0;
  float* data = nullptr;
  if (const int64_t needed = parts.numel + copied + (direct ? 0 : partial_numel(kernel, splits)); needed > 0) {
    const TensorDesc workspace = allocate(needed);
    if (Status s = check_workspace(workspace, args.query, needed); !s.ok()) return s;
    data = static_cast<float*>(workspace.data);  // [parts of the operands][copied query][partial results]
    if (copied > 0) kernel.query.data = data + parts.numel;
    if (!direct) use_partial(&kernel, splits, data + parts.numel + copied);
  }
  const DeviceGuard guard(args.query.device);
  if (!guard.status().ok()) return guard.status();
  if (copied > 0)
    if (Status s = reduce::launch_pack(params, kernel, dtype, stream); !s.ok()) return s;
  if (parts.numel > 0) return launch_parts(*row, parts, kernel, data, stream);
  if (Status s = row->forward(kernel, stream); !s.ok() || direct) return s;
  params.partial = unpacked(kernel);
  return reduce::launch_merge(params, dtype, out_dtype, stream);
}

Status run_backward(const BackwardCall& args, const Allocate& allocate, CUstream_st* stream) {
  Backward b;
  if (Status s = prepare(args, &b); !s.ok() || b.row == nullptr) return s;
  const TensorDesc workspace = allocate(b.plan.total);
  if (Status s = check_workspace(workspace, args.query, b.plan.total); !s.ok()) return s;
  auto* data = static_cast<float*>(workspace.data);
  use_workspace(b.plan, data, &b.params);
  const DeviceGuard guard(args.query.device);
  if (!guard.status().ok()) return guard.status();
  return launch_all(*b.row, b.params, data, args, stream);
}

Status plan_forward_request(const Request& asked, const KernelRow** row, int32_t* splits) {
  const Request r = packed(with_chip_facts(asked));
  if (Status s = select(r, row); !s.ok()) return s;
  ForwardParams p;
  p.batch = r.batch, p.queries = int32_t(r.queries), p.keys = int32_t(r.keys), p.heads = int32_t(r.heads);
  p.head_dim = r.head_dim, p.value_dim = r.value_dim;
  *splits = forward_splits(**row, p, r.smem_optin, r.sm_count);
  return {};
}

Status plan_request(const Request& asked, int32_t heads_per_kv, const int64_t (&bias)[4], const KernelRow** row,
                    BackwardPlan* plan) {
  const Request r = with_chip_facts(asked);
  if (Status s = select(r, row); !s.ok()) return s;
  BackwardParams p;
  ForwardParams& f = p.forward;
  f.batch = r.batch, f.queries = int32_t(r.queries), f.keys = int32_t(r.keys);
  f.heads = f.heads_per_group = int32_t(r.heads);
  f.head_dim = r.head_dim, f.value_dim = r.value_dim;
  p.heads_per_kv = heads_per_kv;
  float wanted = 0;  // any address
  p.grad_query.data = p.grad_key.data = p.grad_value.data = &wanted;
  if (bias[0] != 0) {
    p.grad_bias.data = &wanted;
    p.grad_bias.sum_b = bias[0] < f.batch, p.grad_bias.sum_h = bias[1] < f.heads;
    p.grad_bias.sum_m = bias[2] < f.queries, p.grad_bias.sum_n = bias[3] < f.keys;
  }
  *plan = plan_backward(**row, p, r.sm_count);
  return {};
}

}  // namespace memeff
