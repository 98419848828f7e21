#include "backward_plan.h"

#include <algorithm>

#include "tiling.h"

namespace memeff {
namespace {

constexpr int64_t kMaxSplits = 64;
constexpr int64_t kMinLoopTiles = 4;      // a split keeps at least so many, or its prologue outweighs it
constexpr int64_t kMaxSplitFactor = 8;    // partial sums of an output: at most so many times its elements, ...
constexpr int64_t kFreeSplits = 1 << 24;  // ... or 64 MiB of fp32, whichever is larger

// Splits that make two waves of blocks.
int32_t splits_for(int64_t blocks, int64_t loop_tiles, int64_t numel, int32_t sm_count) {
  const int64_t wanted = 2 * int64_t(sm_count);
  if (blocks >= wanted) return 1;
  const int64_t by_loop = std::max<int64_t>(1, loop_tiles / kMinLoopTiles);
  const int64_t by_memory = std::max(kMaxSplitFactor, kFreeSplits / split_stride(numel));
  return int32_t(std::min({ceil_div(wanted, blocks), by_loop, by_memory, kMaxSplits}));
}

int64_t slabs(int64_t columns, int32_t limit, int32_t value_tile) {
  return limit == 0 ? ceil_div(columns, value_tile) : 1;
}

int32_t query_splits(const KernelRow& row, const BackwardParams& p, int32_t sm_count) {
  const ForwardParams& f = p.forward;
  const int64_t blocks =
      f.batch * f.heads * ceil_div(f.queries, row.tile_m) * slabs(f.head_dim, row.max_k, row.value_tile);
  return splits_for(blocks, ceil_div(f.keys, row.tile_n), grad_query_numel(p), sm_count);
}

// One number for dK and dV, so that one kernel can make both.
int32_t key_value_splits(const KernelRow& row, const BackwardParams& p, int32_t sm_count) {
  const ForwardParams& f = p.forward;
  int64_t columns = 1, numel = 1;
  if (p.grad_key.data != nullptr) {
    columns = slabs(f.head_dim, row.max_k, row.value_tile);
    numel = grad_key_numel(p);
  }
  if (p.grad_value.data != nullptr) {
    columns = std::max(columns, slabs(f.value_dim, row.max_kv, row.value_tile));
    numel = std::max(numel, grad_value_numel(p));
  }
  const int64_t blocks = f.batch * (f.heads / p.heads_per_kv) * ceil_div(f.keys, row.tile_m) * columns;
  const int64_t loop_tiles = p.heads_per_kv * ceil_div(f.queries, row.tile_n);
  return splits_for(blocks, loop_tiles, numel, sm_count);
}

int32_t bias_splits(const KernelRow& row, const BackwardParams& p, int32_t sm_count) {
  const ForwardParams& f = p.forward;
  const GradBiasView& g = p.grad_bias;
  int64_t blocks = 1, loop_tiles = 1;
  const auto count = [&](bool summed, int64_t tiles) { (summed ? loop_tiles : blocks) *= tiles; };
  count(g.sum_b, f.batch);
  count(g.sum_g, f.heads / f.heads_per_group);
  count(g.sum_h, f.heads_per_group);
  const int32_t tile_m = row.adds_query ? row.tile_n : row.tile_m;  // dBias has tiles of its own: 64 x 64
  count(g.sum_m, ceil_div(f.queries, tile_m));
  count(g.sum_n, ceil_div(f.keys, row.tile_n));
  return splits_for(blocks, loop_tiles, grad_bias_numel(p), sm_count);
}

template <typename View>
void split(View* view, int32_t splits, float* partial, int64_t numel) {
  if (view->data == nullptr || splits == 1) return;
  view->data = partial;
  view->splits = splits;
  view->stride_split = split_stride(numel);
}

}  // namespace

int64_t split_stride(int64_t numel) { return (numel + 3) / 4 * 4; }

int64_t grad_query_numel(const BackwardParams& p) {
  return p.forward.batch * p.forward.heads * p.forward.queries * p.forward.head_dim;
}

int64_t query_sums_numel(const BackwardParams& p) {
  const ForwardParams& f = p.forward;
  return f.batch * f.heads * sum_blocks(f.queries, f.sequences) * 8 * ((f.head_dim + 15) / 16 * 16);
}

int64_t grad_key_numel(const BackwardParams& p) {
  return p.forward.batch * (p.forward.heads / p.heads_per_kv) * p.forward.keys * p.forward.head_dim;
}

int64_t grad_value_numel(const BackwardParams& p) {
  return p.forward.batch * (p.forward.heads / p.heads_per_kv) * p.forward.keys * p.forward.value_dim;
}

int64_t grad_bias_numel(const BackwardParams& p) {
  const ForwardParams& f = p.forward;
  const GradBiasView& g = p.grad_bias;
  return (g.sum_b ? 1 : f.batch) * (g.sum_g ? 1 : f.heads / f.heads_per_group) * (g.sum_h ? 1 : f.heads_per_group) *
         (g.sum_m ? 1 : int64_t(f.queries)) * (g.sum_n ? 1 : int64_t(f.keys));
}

BackwardPlan plan_backward(const KernelRow& row, const BackwardParams& p, int32_t sm_count) {
  BackwardPlan plan;
  const bool query = p.grad_query.data != nullptr, key = p.grad_key.data != nullptr;
  const bool value = p.grad_value.data != nullptr, bias = p.grad_bias.data != nullptr;
  if (!query && !key && !value && !bias) return plan;
  Splits& s = plan.splits;  // with sequences no loop is split: their lengths are on the device
  const bool fixed = !is_packed(p.forward.sequences);
  if (query && fixed && !row.adds_query) s.query = query_splits(row, p, sm_count);
  if ((key || value) && fixed) s.key_value = key_value_splits(row, p, sm_count);
  if (bias && fixed) s.bias = bias_splits(row, p, sm_count);

  plan.total = split_stride(p.forward.batch * p.forward.heads * p.forward.queries);
  const auto place = [&](bool wanted, int32_t splits, int64_t numel) {
    const int64_t start = plan.total;
    if (wanted && splits > 1) plan.total += splits * split_stride(numel);
    return start;
  };
  plan.query = place(query, s.query, grad_query_numel(p));
  if (query && row.adds_query) {
    plan.query_sums = plan.total;
    plan.total += query_sums_numel(p);
  }
  plan.key = place(key, s.key_value, grad_key_numel(p));
  plan.value = place(value, s.key_value, grad_value_numel(p));
  plan.bias = place(bias, s.bias, grad_bias_numel(p));
  return plan;
}

void use_workspace(const BackwardPlan& plan, float* workspace, BackwardParams* p) {
  if (p->delta == nullptr) p->delta = workspace;
  if (plan.query_sums >= 0) {
    const ForwardParams& f = p->forward;
    p->query_sums = {workspace + plan.query_sums, sum_blocks(f.queries, f.sequences), (f.head_dim + 15) / 16 * 16};
  }
  split(&p->grad_query, plan.splits.query, workspace + plan.query, grad_query_numel(*p));
  split(&p->grad_key, plan.splits.key_value, workspace + plan.key, grad_key_numel(*p));
  split(&p->grad_value, plan.splits.key_value, workspace + plan.value, grad_value_numel(*p));
  split(&p->grad_bias, plan.splits.bias, workspace + plan.bias, grad_bias_numel(*p));
  if (p->grad_bias.splits > 1) p->grad_bias.dtype = DType::kF32;
}

}  // namespace memeff
