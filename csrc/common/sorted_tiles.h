// The tiles of packed sequences, of all heads, dealt out by the length of their loops: sequences with more keys first
// (of up to 32 neighbours as in sequences.h), a sequence's heads one after the other, so that tiles at work at the same
// time share keys. Where the tiles of a sequence differ (causal) they go in pairs from opposite ends, all about as
// long:
//
//   tiles 0 1 2 3 4      pairs (4 0) (3 1) (2 -)
//
// Numbers that hold no tile come behind those that do.
#pragma once

#include "common/sequences.h"

namespace memeff {

struct SortedTile {
  Problem problem;  // no queries: the number holds no tile
  int tile;         // within the sequence
  uint32_t head;
};

// number: below heads * tiles_over(queries, kTileM); of pairs: below 2 heads * tiles_over(queries, 2 kTileM), a pair's
// two follow one another. All lanes of a warp together, each knows one sequence.
template <int kTileM>
CUTLASS_DEVICE SortedTile sorted_tile(ForwardParams const& p, uint32_t number, bool pairs) {
  using namespace sequences;
  const int lane = threadIdx.x & 31, heads = p.heads, rows = pairs ? 2 * kTileM : kTileM;
  const bool second = pairs && number % 2 == 1;
  const Starts starts = query_starts(p);
  int first = -1, place = int(pairs ? number / 2 : number);
  if (starts.count + 2 > kSorted) {
    const int s = find(starts, rows, place / heads);
    first = (s + 1) / kSorted * kSorted - 1;
    place -= number_of(starts, rows, first) * heads;
  }
  const int left = starts.count + 1 - first, neighbours = left < kSorted ? left : kSorted;
  Problem x{};
  if (lane < neighbours) x = any_problem<false>(p, starts, first + lane);
  const int units = (x.queries + rows - 1) / rows;
  int before = 0;
  for (int other = 0; other < neighbours; ++other) {
    const int their_keys = from_lane(x.keys, other), theirs = from_lane(units, other);
    if (their_keys > x.keys || (their_keys == x.keys && other < lane)) before += theirs;
  }
  const bool is_owner = before * heads <= place && place < (before + units) * heads;
  const unsigned owners = __ballot_sync(0xffffffffu, is_owner);
  const int owner = owners == 0 ? 31 : __ffs(int(owners)) - 1;
  const int own_units = from_lane(units, owner), within = place - from_lane(before, owner) * heads;
  SortedTile found{};
  Problem& n = found.problem;
  n.queries = from_lane(x.queries, owner), n.keys = from_lane(x.keys, owner);
  n.key_rows = from_lane(x.key_rows, owner), n.sequence = uint32_t(from_lane(int(x.sequence), owner));
  n.query_row = from_lane(x.query_row, owner), n.key_row = from_lane(x.key_row, owner);
  if (owners == 0) {
    n.queries = 0;
    return found;
  }
  found.head = uint32_t(within / own_units);
  found.tile = within % own_units;
  if (pairs && !second) {
    found.tile = (n.queries + kTileM - 1) / kTileM - 1 - found.tile;
  } else if (second && 2 * found.tile + 1 == (n.queries + kTileM - 1) / kTileM) {
    n.queries = 0;  // the middle has no partner
  }
  return found;
}

}  // namespace memeff
