#include "forward_plan.h"

#include <algorithm>

#include "tensor_desc.h"
#include "tiling.h"

namespace memeff {
namespace {

int64_t rows(const ForwardParams& p) { return p.batch * p.heads * p.queries; }

// Blocks that run at the same time. An SM has 1 KB more shared memory than one block may ask for, and each block
// costs 1.
int64_t places(const KernelRow& row, int32_t smem_optin, int32_t sm_count) {
  const int64_t by_memory = (int64_t(smem_optin) + 1024) / (row.smem_bytes + 1024);
  return sm_count * std::max<int64_t>(1, std::min<int64_t>(row.blocks_per_sm, by_memory));
}

constexpr int32_t kOneQuery = 31;  // a row_shift: every row is query 0

bool is_one_query(const ForwardParams& p) { return p.queries == 1 && !is_packed(p.sequences); }

// Rows that a query takes: masks find a row's query by a shift, if there are several.
int32_t row_heads_of(const ForwardParams& p) {
  if (is_one_query(p)) return p.heads_per_group;
  int32_t rows = 1;
  while (rows < p.heads_per_group) rows *= 2;
  return rows;
}

// Does one stride lead from row to row?
template <typename View>
bool is_one_row(const View& view, const ForwardParams& p) {
  if (is_one_query(p)) return true;
  const bool filled = row_heads_of(p) == p.heads_per_group || view.stride_h == 0;
  return filled && view.stride_m == p.heads_per_group * view.stride_h;
}
template <typename View>
void heads_to_rows(View* view) {
  view->stride_m = view->stride_h;
  view->stride_h = 0;
}

}  // namespace

int32_t packable_heads(const ForwardParams& p) {
  const bool shared = p.key.stride_h == 0 && p.value.stride_h == 0 && p.dropout.seed == nullptr;
  if (!shared || p.heads_per_group == 1 || p.heads_per_group > kLongest / 2 / p.queries) return 1;
  return p.bias.data == nullptr || is_one_row(p.bias, p) ? p.heads_per_group : 1;
}

HeadPacking pack_heads(ForwardParams* p, Request* r) {
  if (!packs(*r)) return {};
  *r = packed(*r);
  HeadPacking packing;
  packing.copy_query = !is_one_row(p->query, *p);
  const bool lse_in_place = p->lse.data == nullptr || (is_one_query(*p) && p->lse.stride_h == 1);
  packing.through_workspace = packing.copy_query || !is_one_row(p->out, *p) || !lse_in_place;
  p->row_shift = is_one_query(*p) ? kOneQuery : 0;
  p->row_heads = row_heads_of(*p);
  if (p->row_shift == 0)
    while (1 << p->row_shift < p->row_heads) ++p->row_shift;
  p->queries *= p->row_heads;
  p->heads /= p->heads_per_group;
  p->heads_per_group = 1;
  heads_to_rows(&p->query);
  heads_to_rows(&p->out);
  heads_to_rows(&p->bias);
  p->lse.stride_h = 0;  // rows of the lse lie side by side
  if (packing.copy_query) {
    const int64_t of_group = int64_t(p->queries) * p->head_dim;
    p->query = {nullptr, p->heads * of_group, of_group, 0, p->head_dim};
  }
  if (packing.through_workspace) p->out = {}, p->lse = {};
  return packing;
}

int64_t packed_query_numel(const ForwardParams& p, DType dtype) {
  const int64_t bytes = rows(p) * p.head_dim * bytes_of(dtype);
  return ceil_div(bytes, 16) * 4;
}

int32_t forward_splits(const KernelRow& row, const ForwardParams& p, int32_t smem_optin, int32_t sm_count) {
  if (!row.partial) return 1;
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

Partial unpacked(const ForwardParams& p) {
  Partial part = p.partial;
  if (p.row_heads == 1) return part;
  part.out.stride_h = part.out.stride_m;
  part.out.stride_m *= p.row_heads;
  return part;
}

void use_wide_out(ForwardParams* p) { p->partial.out = p->out; }

}  // namespace memeff
