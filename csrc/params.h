// The kernel ABI: what a launcher of this library takes. Plain C++17, no CUDA and no torch types.
//
// Names (as in docs/design.md): B batch, M queries, N keys, G head groups, H heads in all (H = G * heads_per_group),
// K head dimension of query and key, Kv head dimension of value. Strides count elements, never bytes, and are 64-bit.
// Head h belongs to group h / heads_per_group; its data starts at
//   pointer + b * stride_b + (h / heads_per_group) * stride_g + (h % heads_per_group) * stride_h.
// That one rule covers BMHK (G = 1), 5-D BMGHK of any strides, and grouped heads (key, value: stride_h = 0).
#pragma once

#include <cstdint>

namespace memeff {

enum class DType : int32_t { kF16 = 0, kBF16 = 1, kF32 = 2, kBool = 3 };

constexpr int bytes_of(DType dtype) { return dtype == DType::kBool ? 1 : dtype == DType::kF32 ? 4 : 2; }

// What fp32 products may do. 16-bit inputs ignore it.
enum class Math : int32_t { kIeee = 0, kTf32 = 1 };

// Which corner the diagonal is anchored to; with window_left and window_right: query i sees key j when
//   -window_left <= j - (i + d) <= window_right      (a negative number: no limit on that side)
//   kTopLeft: d = 0      kBottomRight: d = N - M, which may be negative      kNone: no limit at all
enum class Anchor : int32_t { kNone = 0, kTopLeft = 1, kBottomRight = 2 };

// Sequences packed along the length of one batch entry (B = 1); M, N and the numbers of queries and keys count within
// one. query_starts null: none, every batch entry is a sequence. All addresses are on the device; kernels read them
// when they run, so lengths may change between replays of a CUDA graph. Starts do not fall.
struct Sequences {
  const int32_t* query_starts = nullptr;  // [count + 1], the last one is the end
  const int32_t* key_starts = nullptr;    // [count + 1]; not read with pages
  const int32_t* key_lengths = nullptr;   // [count]; null: up to the next start
  const int32_t* block_tables =
      nullptr;               // [count, pages]; null: no pages. Key t is row table[t / size] * size + t % size
  int64_t stride_table = 0;  // elements from one sequence's table to the next
  int32_t page_size = 0;     // keys, a multiple of 128 (the longest key tile)
  int32_t count = 0;
  bool own_bias = false;  // the bias' B, M and N are those of the sequences: it starts anew in each
};
constexpr bool is_packed(Sequences const& s) { return s.query_starts != nullptr; }

// A read-only operand [B, M or N, G, heads_per_group, K or Kv]; the last stride is 1.
struct TensorView {
  const void* data = nullptr;  // device address; never null for a launch
  int64_t stride_b = 0;        // elements; 0 for a broadcast dimension
  int64_t stride_g = 0;
  int64_t stride_h = 0;
  int64_t stride_m = 0;  // from one query (or key) to the next
};

struct OutputView {
  void* data = nullptr;
  int64_t stride_b = 0;
  int64_t stride_g = 0;
  int64_t stride_h = 0;
  int64_t stride_m = 0;
};

// Additive bias, broadcastable to [B, G, heads_per_group, M, N]; every stride may be 0. kBool: true = visible.
struct BiasView {
  const void* data = nullptr;  // null: no bias
  DType dtype = DType::kF16;   // the query's dtype, kF32 or kBool
  int64_t stride_b = 0;
  int64_t stride_g = 0;
  int64_t stride_h = 0;
  int64_t stride_m = 0;
  int64_t stride_n = 0;
};

// Log-sum-exp, natural logarithm, fp32, [B, G, heads_per_group, M]; the last stride is 1. -inf where no key is visible.
struct LseView {
  float* data = nullptr;  // null: not wanted
  float* low = nullptr;   // what rounding took from it, laid out the same; null: not wanted, or 0
  int64_t stride_b = 0;
  int64_t stride_g = 0;
  int64_t stride_h = 0;
};

// Which weights are dropped: a pure function of seed, offset, batch entry, query head, query and key
// (common/dropout.h).
struct Dropout {
  const int64_t* seed = nullptr;  // device address of {seed, offset}; null: no dropout
  int32_t threshold = 0;          // of 65536: a weight is kept when its 16-bit number is not below
  float keep_scale = 1.f;         // 1 / (1 - threshold / 65536); 0 where everything is dropped
};

// fp32 results in place of ForwardParams::out. Of parts of the keys, one thread block each (few queries: else there are
// too few blocks): part s writes its out, divided by its own sum, and what that sum is relative to;
// reduce::launch_merge puts them together. Or of all keys as one part, where out is not to have the inputs' dtype.
struct Partial {
  OutputView out;            // fp32, [splits, B, M, G, heads_per_group, Kv]; data null: none of all this
  int64_t stride_split = 0;  // elements, from one part of out to the next
  // Of each row, [splits, B, H, M], contiguous: sum over the part's keys of exp(score - reference - reference_low); 0
  // where it sees none of them. All null: one part, the lse is written as it is.
  float* sum = nullptr;
  float* reference = nullptr;
  float* reference_low = nullptr;
  int32_t splits = 1;
};

// fp32 operands as fp16 parts (hopper/f32_plan.h) for a row that multiplies those. They hold what the operands say
// unless a row's numbers lie far apart; so a row that takes the operands themselves follows, and the bounds that the
// split finds decide on the device which of the two kernels does the work.
struct Parts {
  float* workspace = nullptr;  // 16-byte aligned, starts with the bounds; null: one kernel, no parts
  float limit = 0.f;           // of the bounds
  bool wide = false;           // this is the kernel for numbers far apart
};

// out = softmax(scale * query keyT + bias, over visible keys) value
struct ForwardParams {
  TensorView query, key, value;
  OutputView out;
  BiasView bias;
  LseView lse;
  int64_t batch = 0;            // B >= 1
  int32_t queries = 0;          // M >= 1
  int32_t keys = 0;             // N >= 1
  int32_t heads = 0;            // H >= 1, query heads in all
  int32_t heads_per_group = 1;  // divides heads
  int32_t head_dim = 0;         // K >= 1
  int32_t value_dim = 0;        // Kv >= 1
  float scale = 1.f;            // any finite number, 0 and negative included
  Anchor anchor = Anchor::kNone;
  int32_t window_left = -1;
  int32_t window_right = -1;  // 0: causal
  // Packed heads (forward_plan.h): so many consecutive rows are one query, of the heads that share a key head; row r of
  // a sequence is its query r >> row_shift. Then queries and all strides and rows of query, out, bias and lse count
  // such rows, query_starts count queries.
  int32_t row_heads = 1;
  int32_t row_shift = 0;
  Sequences sequences;  // then batch = 1; queries and keys are the rows of the tensors, over all sequences
  Dropout dropout;
  Partial partial;
  Parts parts;
};

// A gradient to write. splits > 1: block s of the loop writes its fp32 partial sum at data + s * stride_split, to be
// added up afterwards; splits = 1: the gradient itself, in the inputs' dtype.
struct GradView {
  void* data = nullptr;  // null: not wanted
  int64_t stride_b = 0;
  int64_t stride_g = 0;
  int64_t stride_h = 0;
  int64_t stride_m = 0;
  int64_t stride_split = 0;  // elements
  int32_t splits = 1;
};

// Gradient of the bias, summed over the dimensions along which the bias is broadcast. With sequences no dimension may
// be (every sum_* is false), and only elements that some query and key of one sequence share are written.
struct GradBiasView {
  void* data = nullptr;       // null: not wanted
  DType dtype = DType::kF32;  // of what is written: kF32 for partial sums
  int64_t stride_b = 0;       // 0 where summed
  int64_t stride_g = 0;
  int64_t stride_h = 0;
  int64_t stride_m = 0;
  int64_t stride_n = 0;
  bool sum_b = false, sum_g = false, sum_h = false, sum_m = false, sum_n = false;
  int64_t stride_split = 0;
  int32_t splits = 1;
};

// fp32 sums of dQ without the scale, zero before the launch: [B, H, blocks, columns / 16, 8 rows, 16]. A block is 8
// rows of one head; those of a packed sequence begin with block first_sum_block. 16 columns lie in the order in which
// the lanes of an m16n8 accumulator hold them, lane t of four columns 2t, 2t + 1, 8 + 2t, 9 + 2t:
//   place    0 1 2 3   4 5 6 7   8  9 10 11   12 13 14 15
//   column   0 1 8 9   2 3 10 11 4  5 12 13    6  7 14 15
struct QuerySums {
  float* data = nullptr;  // null: not wanted
  int32_t blocks = 0;     // of a head
  int32_t columns = 0;    // K rounded up to 16
};
constexpr int32_t sum_blocks(int32_t queries, Sequences const& s) {
  return is_packed(s) ? queries / 8 + s.count + 1 : (queries + 7) / 8;
}
// first_row: of sequence number `sequence`; 0 and 0 without sequences. Sequences do not share a block.
constexpr int64_t first_sum_block(int64_t first_row, int64_t sequence) { return first_row / 8 + sequence; }

// Gradients of sum(out * grad_out). With sequences: no pages, key_starts that do not overlap. forward.lse holds the
// forward's log-sum-exp (not null); forward.out is not used.
struct BackwardParams {
  ForwardParams forward;
  TensorView grad_out;           // [B, M, G, heads_per_group, Kv]
  const float* delta = nullptr;  // rowsum(grad_out * out), fp32, contiguous [B, H, M]
  QuerySums query_sums;          // of rows that add dQ up in memory (KernelRow::adds_query), else empty
  GradView grad_query, grad_key, grad_value;
  GradBiasView grad_bias;
  int32_t heads_per_kv = 1;  // consecutive query heads whose gradients one key head sums: 1, or heads_per_group
};

}  // namespace memeff
