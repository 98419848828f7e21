// Which keys a query may see: bounds and the causal diagonal, as one limit per row.
//
//            keys 0 .. N-1
//   row i    vvvvvvvvvvvv|..........     limit(i) = min(N, i + diagonal + 1), signed: may be <= 0
//
// Bounds and mask are one comparison, so neither can be skipped because the other is trivially true (FAULTS B04, B42).
#pragma once

#include "cutlass/cutlass.h"
#include "params.h"

namespace memeff {

struct Visibility {
  int keys;      // N
  int diagonal;  // causal: key j is visible to query i when j <= i + diagonal
  bool causal;

  CUTLASS_DEVICE Visibility(ForwardParams const& p)
      : keys(p.keys),
        diagonal(p.causal == Causal::kBottomRight ? p.keys - p.queries : 0),
        causal(p.causal != Causal::kNone) {}

  // Number of leading keys that `row` sees; <= 0 when it sees none.
  CUTLASS_DEVICE int limit(int row) const {
    // Saturating: row + diagonal + 1 stays in range because |diagonal| < 2^31 and row < M.
    const int64_t last = int64_t(row) + diagonal + 1;
    return causal && last < keys ? int(last < 0 ? 0 : last) : keys;
  }
};

}  // namespace memeff
