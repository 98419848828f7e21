// Where fp32 operands lie once each number is split into fp16 parts (reduce/halves.cu), in a workspace that the call
// gives. Plain C++17: no CUDA.
//
//   [ bounds, 6 words ][ Q parts ][ K parts ][ V parts ][ Q scales ][ K scales ][ V scales ]
//   parts of an operand: [batches, groups, members, rows, kParts * width], 16 bits; a row is  hi 0 .. width | lo 0 ..
//   scales:              [batches, groups, members, rows padded to 4], fp32
//
// A row x with 2^a <= max|x| < 2^(a + 1) (a from kLeast to kMost) is split as x 2^(kTop - a) = hi + lo, each rounded to
// nearest: of 24 bits none is lost, or the last one, in elements down to 2^-15 of the row's largest; below that the
// error stays under 2^-38 of the largest. One part: hi alone, 11 bits as TF32 has.
#pragma once

#include "params.h"
#include "tiling.h"

namespace memeff {
namespace hopper_f32 {

constexpr int kTop = 13;  // fp16 holds 2^15
constexpr int kLeast = -110, kMost = 126;
// Of what is stored for a row: Q 2^(a + kQueryShift), K 2^(a + kKeyShift), V 2^a. The product of K parts and Q parts
// times K's scale stays in fp32's range whatever the rows hold; the query's goes into the exponent's factor.
constexpr int kQueryShift = 11, kKeyShift = -2 * kTop - kQueryShift;

// What the split tells of all rows, as bits of numbers >= 0. Small: elements so far below their row's largest that lo
// loses bits.
//   0: largest of max|q| (number of small elements of q), over rows     1: largest |k|     2, 3: the same, K and Q
//   swapped
//   4: largest |v|    5: largest 1 / max|v| over rows that are not 0
constexpr int kBounds = 6, kHeaderElements = 32;
// Errors of small elements move no score by more than 2^-24 while |scale| (b0 b1 + b2 b3) is at most this; with one
// part by 2^-14.
constexpr float limit_of(int parts) { return parts == 2 ? 16384.f : 16777216.f; }

struct SplitOperand {
  int64_t batches = 1, groups = 1, members = 1;  // distinct ones: 1 where broadcast
  int32_t rows = 0;
  int64_t data = 0, scales = 0;  // fp32 elements from the workspace's start
  int64_t heads() const { return batches * groups * members; }
  int64_t scale_rows() const { return (int64_t(rows) + 3) / 4 * 4; }
};

struct Plan {
  int32_t parts = 0, width = 0;  // width: columns of a part, a multiple of 64
  SplitOperand operands[3];      // Q, K, V
  int64_t total = 0;             // fp32 elements
};

inline SplitOperand distinct(ForwardParams const& p, TensorView const& view, int32_t rows) {
  SplitOperand o;
  o.rows = rows;
  if (view.stride_b != 0) o.batches = p.batch;
  if (view.stride_g != 0) o.groups = p.heads / p.heads_per_group;
  if (view.stride_h != 0) o.members = p.heads_per_group;
  return o;
}

inline Plan make_plan(ForwardParams const& p, int32_t parts, int32_t width) {
  Plan plan;
  plan.parts = parts, plan.width = width, plan.total = kHeaderElements;
  plan.operands[0] = distinct(p, p.query, p.queries);
  plan.operands[1] = distinct(p, p.key, p.keys);
  plan.operands[2] = distinct(p, p.value, p.keys);
  for (SplitOperand& o : plan.operands) {
    o.data = plan.total;
    plan.total += o.heads() * o.rows * parts * width / 2;
  }
  for (SplitOperand& o : plan.operands) {
    o.scales = plan.total;
    plan.total += o.heads() * o.scale_rows();
  }
  return plan;
}

// The strides of [batches, groups, members, rows, columns], 0 where there is but one.
inline TensorView view_of(SplitOperand const& o, const void* data, int64_t rows, int64_t columns) {
  const int64_t head = rows * columns;
  return {data, o.batches > 1 ? o.groups * o.members * head : 0, o.groups > 1 ? o.members * head : 0,
          o.members > 1 ? head : 0, columns};
}

}  // namespace hopper_f32
}  // namespace memeff
