// Which keys a query may see: bounds and a window around the diagonal, as two limits per row.
//
//            keys 0 .. N-1
//   row i    ....|vvvvvvvvvvvv|..........     first(i) = max(0, i + d - left), limit(i) = min(N, i + d + right + 1)
//
// Bounds and mask are one comparison a side, so neither can be skipped because the other is trivially true (FAULTS B04,
// B42). first >= limit: the row sees nothing.
#pragma once

#include "cutlass/cutlass.h"
#include "params.h"

namespace memeff {

struct Visibility {
  int queries, keys;  // M, N
  int diagonal;       // d: query i sees key j when -left <= j - (i + d) <= right
  int left, right;    // negative: no limit

  Visibility() = default;
  CUTLASS_DEVICE Visibility(ForwardParams const& p, int queries_, int keys_)
      : queries(queries_),
        keys(keys_),
        diagonal(p.anchor == Anchor::kBottomRight ? keys_ - queries_ : 0),
        left(p.anchor == Anchor::kNone ? -1 : p.window_left),
        right(p.anchor == Anchor::kNone ? -1 : p.window_right) {}

  // The first key that `row` may see.
  CUTLASS_DEVICE int first(int row) const { return left < 0 ? 0 : clamp(int64_t(row) + diagonal - left, keys); }
  // One beyond the last.
  CUTLASS_DEVICE int limit(int row) const {
    return right < 0 ? keys : clamp(int64_t(row) + diagonal + right + 1, keys);
  }
  // The same of the queries that see a key.
  CUTLASS_DEVICE int first_query(int key) const {
    return right < 0 ? 0 : clamp(int64_t(key) - diagonal - right, queries);
  }
  CUTLASS_DEVICE int limit_query(int key) const {
    return left < 0 ? queries : clamp(int64_t(key) - diagonal + left + 1, queries);
  }

 private:
  CUTLASS_DEVICE static int clamp(int64_t x, int end) { return x < 0 ? 0 : x > end ? end : int(x); }
};

}  // namespace memeff
