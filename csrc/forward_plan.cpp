#include "forward_plan.h"

#include <algorithm>

#include "tiling.h"

namespace memeff {
namespace {

int64_t rows(const ForwardParams& p) { return p.batch * p.heads * p.queries; }

// Does the only query see every key?
bool sees_all(const ForwardParams& p) {
  if (p.anchor == Anchor::kNone) return true;
  return p.anchor == Anchor::kBottomRight && p.window_left < 0;
}

// Blocks that run at the same time. An SM has 1 KB more shared memory than one block may ask for, and each block
// costs 1.
int64_t places(const KernelRow& row, int32_t smem_optin, int32_t sm_count) {
  const int64_t by_memory = (int64_t(smem_optin) + 1024) / (row.smem_bytes + 1024);
  return sm_count * std::max<int64_t>(1, std::min<int64_t>(row.blocks_per_sm, by_memory));
}

template <typename View>
void heads_to_rows(View* view) {
  view->stride_m = view->stride_h;
  view->stride_h = 0;
}

}  // namespace

void pack_heads(ForwardParams* p, Request* r) {
  const bool shared = p->heads_per_group > 1 && p->key.stride_h == 0 && p->value.stride_h == 0;
  if (p->queries != 1 || !shared || !sees_all(*p) || p->dropout.seed != nullptr) return;
  if (is_packed(p->sequences) || (p->lse.data != nullptr && p->lse.stride_h != 1)) return;
  heads_to_rows(&p->query);
  heads_to_rows(&p->out);
  heads_to_rows(&p->bias);
  p->lse.stride_h = 0;  // rows of the lse lie side by side
  p->queries = p->heads_per_group;
  p->heads /= p->heads_per_group;
  p->heads_per_group = 1;
  p->anchor = Anchor::kNone;
  r->queries = p->queries, r->heads = p->heads;
}

int32_t forward_splits(const KernelRow& row, const ForwardParams& p, int32_t smem_optin, int32_t sm_count) {
  const Sequences& s = p.sequences;
  const int64_t count = is_packed(s) ? s.count : 1;
  const int64_t tiles = tiles_over(p.queries, row.tile_m, s);
  const int64_t blocks = p.batch * p.heads * tiles * row.slabs(p.value_dim);
  const int64_t keys = s.block_tables != nullptr ? s.stride_table * s.page_size : p.keys / count;
  const int64_t by_keys = std::max<int64_t>(1, keys / row.tile_n / kMinKeyBlocks);
  return int32_t(std::max<int64_t>(1, std::min({places(row, smem_optin, sm_count) / blocks, by_keys, kMaxKeyParts})));
}

int64_t partial_numel(const ForwardParams& p, int32_t splits) { return splits * rows(p) * (int64_t(p.value_dim) + 3); }

void use_partial(ForwardParams* p, int32_t splits, float* workspace) {
  const int64_t of_head = int64_t(p->queries) * p->value_dim, all = splits * rows(*p);
  Partial& part = p->partial;
  part.out = {workspace, p->heads * of_head, p->heads_per_group * of_head, of_head, p->value_dim};  // [B, H, M, Kv]
  part.stride_split = rows(*p) * p->value_dim;
  part.sum = workspace + all * p->value_dim;
  part.reference = part.sum + all;
  part.reference_low = part.reference + all;
  part.splits = splits;
}

void use_wide_out(ForwardParams* p) { p->partial.out = p->out; }

}  // namespace memeff
