// Which rows of the tensors a thread block works on: a tile of one batch entry, or of one of the sequences that are
// packed along the length.
//
// Tiles of packed sequences are found without any table, so that lengths may change on the device. The rows before the
// first sequence are sequence -1, those behind the last one sequence `count`; both have no keys. T: rows a tile.
// Sequence s owns as many tile numbers as there are from start(s) / T + s + 1 up to the next one's, at least as many as
// it has tiles:
//
//   start    0          37               100 (count = 2; T = 64, 200 rows)
//   tiles    [1]        [2 . 3]          [4 . 5 ...]        "." has no rows, its block ends at once
//
// 32 neighbours share what they own: a warp finds a number's neighbours by testing 32 candidates at a time, and sorts
// them by the length of their loops, the longest first (or last).
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "params.h"

namespace memeff {

// One sequence: where its rows lie and how many there are.
struct Problem {
  int queries, keys;       // M, N
  int key_rows;            // keys and the unused rows behind them
  int query_row, key_row;  // of the first ones in the tensors
  uint32_t batch;          // of the tensors; 0 with packed sequences
  uint32_t sequence;       // of the packed sequences; 0 without

  CUTLASS_DEVICE uint32_t number() const { return batch + sequence; }  // what dropout and a bias of its own count
};

namespace sequences {

// The starts of one side's sequences, in rows; `count` for the end. each: rows of what the starts count.
struct Starts {
  const int32_t* data;
  int count, end, each;
  CUTLASS_DEVICE int at(int s) const { return s < count ? __ldg(data + s) * each : end; }
};

// starts and the end of what they cut: the last start, or all rows where lengths say what is used.
CUTLASS_DEVICE Starts query_starts(ForwardParams const& p) {
  const int32_t* starts = p.sequences.query_starts;
  return {starts, p.sequences.count, __ldg(starts + p.sequences.count) * p.row_heads, p.row_heads};
}
CUTLASS_DEVICE Starts key_starts(ForwardParams const& p) {
  const Sequences& s = p.sequences;
  return {s.key_starts, s.count, s.key_lengths != nullptr ? p.keys : __ldg(s.key_starts + s.count), 1};
}

// The last s in [-1, count] with start(s) / tile + s + 1 <= number. A warp tests 32 candidates at once.
CUTLASS_DEVICE int find(Starts const& starts, int tile, int number) {
  int low = -1, high = starts.count;  // the answer is in [low, high]
  const int lane = threadIdx.x & 31;
  while (low < high) {
    const int step = (high - low + 31) / 32, s = low + (lane + 1) * step;
    const bool reached = s <= high && starts.at(s) / tile + s + 1 <= number;
    const int passed = __popc(__ballot_sync(0xffffffffu, reached));  // candidates rise, so do their tile numbers
    const int next = low + passed * step;
    high = next + step - 1 < high ? next + step - 1 : high;
    low = next;
  }
  return low;
}

CUTLASS_DEVICE int number_of(Starts const& starts, int tile, int s) { return s < 0 ? 0 : starts.at(s) / tile + s + 1; }

// The sequence s; `rows`: of queries, all of them where s is none.
CUTLASS_DEVICE Problem problem_of(ForwardParams const& p, int s) {
  Problem x{};
  const Sequences& q = p.sequences;
  if (s < 0 || s >= q.count) return x;
  x.sequence = uint32_t(s);
  const Starts rows = query_starts(p);
  x.query_row = rows.at(s);
  x.queries = rows.at(s + 1) - x.query_row;
  if (q.block_tables != nullptr) {
    x.keys = x.key_rows = __ldg(q.key_lengths + s);
    return x;
  }
  const Starts keys = key_starts(p);
  x.key_row = keys.at(s);
  x.key_rows = keys.at(s + 1) - x.key_row;
  x.keys = q.key_lengths != nullptr ? __ldg(q.key_lengths + s) : x.key_rows;
  return x;
}

// Rows of a side: of queries, or of keys and what is unused behind them. Sequences -1 and `count` have what is left.
template <bool kKeys>
CUTLASS_DEVICE Problem any_problem(ForwardParams const& p, Starts const& starts, int s) {
  Problem x = problem_of(p, s);
  if (s < 0 || s == starts.count) {
    const int first = s < 0 ? 0 : starts.end, all = kKeys ? p.keys : p.queries;
    (kKeys ? x.key_row : x.query_row) = first;
    (kKeys ? x.key_rows : x.queries) = (s < 0 ? starts.at(0) : all) - first;
  }
  return x;
}

constexpr int kSorted = 32;  // neighbours: a lane each

CUTLASS_DEVICE int from_lane(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

// Of sequence `first` and its neighbours, that which holds tile `number` (of theirs) in the order of the loops'
// lengths, all zero where none does. `number` becomes the tile's number within it. Each lane knows one sequence.
template <bool kKeys>
CUTLASS_DEVICE Problem find_sorted(ForwardParams const& p, Starts const& starts, int first, int tile,
                                   bool longest_first, int& number) {
  const int lane = threadIdx.x & 31, left = starts.count + 1 - first;
  const int neighbours = left < kSorted ? left : kSorted;
  Problem x{};
  if (lane < neighbours) x = any_problem<kKeys>(p, starts, first + lane);
  const int tiles = ((kKeys ? x.key_rows : x.queries) + tile - 1) / tile;
  const int length = longest_first ? -(kKeys ? x.queries : x.keys) : kKeys ? x.queries : x.keys;
  int before = 0;
  for (int other = 0; other < neighbours; ++other) {
    const int their_length = from_lane(length, other), theirs = from_lane(tiles, other);
    if (their_length < length || (their_length == length && other < lane)) before += theirs;
  }
  const unsigned holds = __ballot_sync(0xffffffffu, before <= number && number < before + tiles);
  const int owner = holds == 0 ? 31 : __ffs(int(holds)) - 1;
  number -= from_lane(before, owner);
  x.queries = from_lane(x.queries, owner), x.keys = from_lane(x.keys, owner);
  x.key_rows = holds == 0 ? 0 : from_lane(x.key_rows, owner);
  x.query_row = from_lane(x.query_row, owner), x.key_row = from_lane(x.key_row, owner);
  x.sequence = uint32_t(from_lane(int(x.sequence), owner));
  if (holds == 0) x.queries = 0;
  return x;
}

}  // namespace sequences

struct Located {
  Problem problem;
  int tile;  // within the sequence
};

// A tile of queries (kKeys: of keys) by its number within a batch entry. longest_first: of neighbouring sequences.
template <bool kKeys>
CUTLASS_DEVICE Located locate_problem(ForwardParams const& p, uint32_t batch, int rows_per_tile, uint32_t number,
                                      bool longest_first) {
  Located found{{}, int(number)};
  Problem& x = found.problem;
  if (!is_packed(p.sequences)) {
    x.queries = p.queries;
    x.keys = x.key_rows = p.keys;
    x.batch = batch;
    return found;
  }
  const sequences::Starts starts = kKeys ? sequences::key_starts(p) : sequences::query_starts(p);
  int first = -1;
  if (starts.count + 2 > sequences::kSorted) {
    const int s = sequences::find(starts, rows_per_tile, int(number));
    first = (s + 1) / sequences::kSorted * sequences::kSorted - 1;
    found.tile -= sequences::number_of(starts, rows_per_tile, first);
  }
  x = sequences::find_sorted<kKeys>(p, starts, first, rows_per_tile, longest_first, found.tile);
  return found;
}

}  // namespace memeff
