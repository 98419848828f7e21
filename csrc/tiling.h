// How many tiles cover what.
#pragma once

#include <cstdint>

#include "params.h"

namespace memeff {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tile numbers over `rows` rows of one side; of packed sequences an upper bound, whatever their lengths
// (common/sequences.h).
constexpr int64_t tiles_over(int64_t rows, int tile, Sequences const& s) {
  return is_packed(s) ? rows / tile + s.count + 2 : ceil_div(rows, tile);
}

}  // namespace memeff
