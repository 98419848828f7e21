#include "mask_desc.h"

#include <algorithm>
#include <limits>

#include "layout.h"

namespace memeff {
namespace {

using std::to_string;

constexpr int64_t kPageUnit = 128;  // the longest key tile: a tile then lies within one page
constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();

Status check_int32(const TensorDesc& t, const char* name) {
  if (t.dtype != kInt32) return invalid(std::string(name) + " is not int32");
  if (reinterpret_cast<uintptr_t>(t.data) % 4 != 0)
    return invalid(std::string(name) + " is not aligned to its own elements");
  return {};
}

// An int32 tensor [length], contiguous.
Status read_numbers(const TensorDesc& t, const char* name, int64_t length, const int32_t** data) {
  if (!t.has_value()) return {};
  if (Status s = check_int32(t, name); !s.ok()) return s;
  if (Status s = check_shape(t, name, &length, 1); !s.ok()) return s;
  if (Status s = check_contiguous(t, name); !s.ok()) return s;
  *data = static_cast<const int32_t*>(t.data);
  return {};
}

Status read_pages(const MaskCall& mask, int64_t keys, Sequences* sequences) {
  const TensorDesc& tables = mask.block_tables;
  if (Status s = check_int32(tables, "block_tables"); !s.ok()) return s;
  if (tables.rank != 2 || tables.shape[0] != sequences->count || tables.shape[1] < 1)
    return invalid("block_tables is not of shape [" + to_string(sequences->count) + ", pages of each sequence]");
  if (tables.shape[1] != 1 && tables.strides[1] != 1) return invalid("block_tables has a last stride other than 1");
  if (mask.page_size < kPageUnit || mask.page_size % kPageUnit != 0)
    return invalid("page_size is " + to_string(mask.page_size) + ", not a multiple of " + to_string(kPageUnit));
  if (keys % mask.page_size != 0)
    return invalid("key has " + to_string(keys) + " rows, not whole pages of " + to_string(mask.page_size));
  if (tables.shape[1] > kLargest / mask.page_size) return invalid("block_tables name 2^31 keys or more a sequence");
  if (mask.key_starts.has_value()) return invalid("key_starts is given, which pages do not have");
  if (!mask.key_lengths.has_value())
    return invalid("key_lengths is missing: pages do not tell how many keys there are");
  sequences->block_tables = static_cast<const int32_t*>(tables.data);
  sequences->stride_table = stride_of(tables, 0);
  sequences->page_size = int32_t(mask.page_size);
  return {};
}

Status read_sequences(const MaskCall& mask, const ForwardParams& p, Sequences* sequences) {
  const TensorDesc& starts = mask.query_starts;
  if (p.batch != 1) return invalid("with sequences the batch size is 1, here it is " + to_string(p.batch));
  if (starts.rank != 1 || starts.shape[0] < 2 || starts.shape[0] > kLargest)
    return invalid("query_starts is not of one dimension with the starts and the end of at least one sequence");
  const int64_t count = starts.shape[0] - 1;
  sequences->count = int32_t(count);
  sequences->own_bias = mask.bias_per_sequence;
  if (Status s = read_numbers(starts, "query_starts", count + 1, &sequences->query_starts); !s.ok()) return s;
  if (Status s = read_numbers(mask.key_starts, "key_starts", count + 1, &sequences->key_starts); !s.ok()) return s;
  if (Status s = read_numbers(mask.key_lengths, "key_lengths", count, &sequences->key_lengths); !s.ok()) return s;
  if (mask.block_tables.has_value()) return read_pages(mask, p.keys, sequences);
  if (mask.page_size != 0) return invalid("page_size is given, block_tables is missing");
  if (!mask.key_starts.has_value()) return invalid("key_starts is missing");
  return {};
}

// A window of `longest` keys or more hides nothing.
int32_t window_of(int64_t keys, int64_t longest) { return keys < 0 || keys >= longest ? -1 : int32_t(keys); }

}  // namespace

Status make_mask(const MaskCall& mask, int32_t causal, ForwardParams* p) {
  if (causal < 0 || causal > 2) return invalid("causal is " + to_string(causal) + ", not 0, 1 or 2");
  p->anchor = Anchor(causal);
  p->window_left = p->window_right = -1;
  p->sequences = Sequences{};
  if (mask.query_starts.has_value()) {
    if (Status s = read_sequences(mask, *p, &p->sequences); !s.ok()) return s;
  } else if (mask.key_starts.has_value() || mask.key_lengths.has_value() || mask.block_tables.has_value() ||
             mask.page_size != 0 || mask.bias_per_sequence) {
    return invalid("query_starts is missing: without it there are no sequences");
  }
  if (p->anchor == Anchor::kNone) return {};
  if (mask.window_left < -1 || mask.window_right < -1)
    return invalid("window_left is " + to_string(mask.window_left) + ", window_right is " +
                   to_string(mask.window_right) + ": not -1 (no limit), 0 or more keys");
  const int64_t pages = mask.block_tables.has_value() ? mask.block_tables.shape[1] * mask.page_size : 0;
  const int64_t longest = std::max({int64_t(p->queries), int64_t(p->keys), pages});
  p->window_left = window_of(mask.window_left, longest);
  p->window_right = window_of(mask.window_right, longest);
  if (p->window_left < 0 && p->window_right < 0) p->anchor = Anchor::kNone;
  return {};
}

void count_sequences(const MaskCall& mask, const Sequences& sequences, Request* r) {
  if (!is_packed(sequences)) return;
  const bool paged = sequences.block_tables != nullptr;
  r->paged = paged;
  r->keys = paged ? mask.block_tables.shape[1] * mask.page_size : std::max<int64_t>(1, r->keys / sequences.count);
  r->queries = std::max<int64_t>(1, r->queries / sequences.count);
  r->batch = sequences.count;
  r->sequences = true;
}

}  // namespace memeff
