// Arguments of the kernels for short sequences. Host code.
#pragma once

#include <algorithm>
#include <string>

#include "common/launch.h"
#include "register/short.h"
#include "tiling.h"

namespace memeff {
namespace registers {

// Rounds of a block's warps over its strips. More of them use a copy of keys and values longer, fewer fill the GPU
// better: the waves of blocks times what a block costs, its copies counted as one round (docs/performance.md).
inline int rounds_of(int64_t heads, int64_t strips, int warps, int most, int64_t places) {
  int best = 1;
  int64_t best_cost = INT64_MAX;
  for (int rounds = 1; rounds <= most; ++rounds) {
    const int64_t waves = ceil_div(heads * ceil_div(strips, int64_t(rounds) * warps), places);
    const int64_t cost = waves * (1 + std::min<int64_t>(rounds, ceil_div(strips, warps)));
    if (cost <= best_cost) best = rounds, best_cost = cost;
  }
  return best;
}

template <typename Traits>
Status make_short_args(ForwardParams const& p, std::string const& where, ShortArgs* args) {
  if (is_packed(p.sequences)) return {Code::kUnsupported, where + " takes no packed sequences"};
  if (p.partial.out.data != nullptr) return {Code::kUnsupported, where + " writes no results in fp32"};
  if (p.keys > Traits::kKeys) return {Code::kUnsupported, where + " takes N up to " + std::to_string(Traits::kKeys)};
  int32_t sm_count = 1;
  if (Status s = count_multiprocessors(&sm_count, where); !s.ok()) return s;
  constexpr int kStripRows = 16 * Traits::kStrips;
  const int rounds = rounds_of(p.batch * p.heads, ceil_div(p.queries, kStripRows), Traits::kWarps, Traits::kRounds,
                               int64_t(sm_count) * Traits::kBlocksPerSm);
  args->p = p;
  args->rows = kStripRows * Traits::kWarps * rounds;
  const ScaleFactors scale = scale_factors(p.scale, Traits::kBias);
  args->premultiply = scale.premultiply, args->exponent = scale.exponent;
  args->slack = float(RunningSoftmax<1>::kSlack) / args->exponent;
  args->bias_pairs = Traits::kBias && bias_in_pairs(p.bias, p.sequences);
  args->map = make_tile_map(p.batch, p.heads, p.heads_per_group, ceil_div(p.queries, args->rows), 1, 1, 0, false);
  if (args->map.blocks == 0) {
    return {Code::kUnsupported, where + ": B * H * query tiles exceeds the grid limit of 2^31 - 1 thread blocks"};
  }
  return {};
}

}  // namespace registers
}  // namespace memeff
