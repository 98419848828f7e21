// The search for a block's sequence (csrc/common/sequences.h, sorted_tiles.h), with a warp of 32 fibers on the host:
// every row of the tensors (of each head) is in exactly one tile, of the sequence it belongs to, and neighbours come in
// the order of their loops' lengths. tests/test_sequence_order.py compiles and runs it.
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

// --- a warp ---

struct Index {
  int x;
};
static Index threadIdx;

namespace warp {

constexpr int kLanes = 32;
ucontext_t scheduler, lanes[kLanes];
std::vector<char> stacks(kLanes*(64 << 10));
std::function<void()> body;
int current;
int slots[2][kLanes], turn[kLanes];

void enter() {
  body();
  swapcontext(&lanes[current], &scheduler);
}

// Every lane's x; all lanes arrive before any goes on.
const int* exchange(int x) {
  const int lane = current, at = turn[lane] ^= 1;
  slots[at][lane] = x;
  swapcontext(&lanes[lane], &scheduler);
  return slots[at];
}

// Runs f once a lane; collectives are all lanes' or none's.
void run(const std::function<void(int)>& f) {
  bool done[kLanes] = {};
  body = [&] {
    f(current);
    done[current] = true;
  };
  for (int lane = 0; lane < kLanes; ++lane) {
    getcontext(&lanes[lane]);
    lanes[lane].uc_stack.ss_sp = &stacks[lane * (64 << 10)];
    lanes[lane].uc_stack.ss_size = 64 << 10;
    lanes[lane].uc_link = nullptr;
    makecontext(&lanes[lane], enter, 0);
    turn[lane] = 0;
  }
  while (!std::all_of(done, done + kLanes, [](bool x) { return x; })) {
    for (int lane = 0; lane < kLanes; ++lane) {
      current = threadIdx.x = lane;
      if (!done[lane]) swapcontext(&scheduler, &lanes[lane]);
    }
  }
}

}  // namespace warp

inline int __shfl_sync(unsigned, int x, int lane) { return warp::exchange(x)[lane]; }
inline unsigned __ballot_sync(unsigned, bool x) {
  const int* all = warp::exchange(x);
  unsigned found = 0;
  for (int lane = 0; lane < warp::kLanes; ++lane) found |= unsigned(all[lane]) << lane;
  return found;
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

#include "common/sorted_tiles.h"
#include "tiling.h"

// --- the checks ---

using namespace memeff;

struct Call {
  std::vector<int> query_starts, key_starts;
  int tile, row_heads;
};

[[noreturn]] void fail(const char* what, const Call& call, bool keys, int number) {
  std::printf("%s: %zu sequences, tile %d, row_heads %d, %s, number %d\n", what, call.query_starts.size() - 1,
              call.tile, call.row_heads, keys ? "keys" : "queries", number);
  std::exit(1);
}

template <bool kKeys>
void check(const Call& call, int spare, bool longest_first) {
  ForwardParams p;
  p.batch = 1;
  p.row_heads = call.row_heads;
  p.sequences.query_starts = call.query_starts.data(), p.sequences.key_starts = call.key_starts.data();
  p.sequences.count = int(call.query_starts.size()) - 1;
  p.queries = (call.query_starts.back() + spare) * call.row_heads, p.keys = call.key_starts.back() + spare;
  const std::vector<int>& starts = kKeys ? call.key_starts : call.query_starts;
  const int each = kKeys ? 1 : call.row_heads, rows = kKeys ? p.keys : p.queries;
  std::vector<int> seen(rows, 0);
  std::vector<std::pair<int, int>> order;  // (block of 32 neighbours, loop's length) of each tile that has rows
  const int64_t tiles = tiles_over(rows, call.tile, p.sequences);
  for (int number = 0; number < tiles; ++number) {
    Located found;
    warp::run([&](int lane) {
      const Located mine = locate_problem<kKeys>(p, 0, call.tile, uint32_t(number), longest_first);
      if (lane == 0) found = mine;
      const Problem &a = mine.problem, &b = found.problem;
      const bool same = mine.tile == found.tile && a.queries == b.queries && a.keys == b.keys &&
                        a.query_row == b.query_row && a.key_row == b.key_row && a.sequence == b.sequence;
      if (!same) fail("lanes disagree", call, kKeys, number);
    });
    const Problem& x = found.problem;
    const int all = kKeys ? x.key_rows : x.queries, row0 = kKeys ? x.key_row : x.query_row;
    const int first = found.tile * call.tile, last = std::min(first + call.tile, all);
    if (first >= last) continue;
    if (first < 0) fail("a tile before the first", call, kKeys, number);
    for (int row = row0 + first; row < row0 + last; ++row) {
      ++seen[row];
      const bool inside = row >= starts.front() * each && row < starts.back() * each;
      if (!inside && (kKeys ? x.queries : x.keys) != 0) fail("a row of nobody has a loop", call, kKeys, number);
      const int s = int(x.sequence);
      if (inside && !(starts[s] * each <= row && row < starts[s + 1] * each))
        fail("a row of another sequence", call, kKeys, number);
    }
    const bool inside = row0 + first >= starts.front() * each && row0 + first < starts.back() * each;
    const int member = inside ? int(x.sequence) + 1 : row0 + first < starts.front() * each ? 0 : p.sequences.count + 1;
    order.push_back({member / 32, kKeys ? x.queries : x.keys});
  }
  for (int row = 0; row < rows; ++row)
    if (seen[row] != 1) fail(seen[row] ? "a row in two tiles" : "a row in no tile", call, kKeys, row);
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i].first < order[i - 1].first) fail("neighbours are apart", call, kKeys, int(i));
    const int rise = order[i].second - order[i - 1].second;
    if (order[i].first == order[i - 1].first && (longest_first ? rise > 0 : rise < 0))
      fail("neighbours are not in order", call, kKeys, int(i));
  }
}

// Of all heads, in the order of csrc/hopper.
template <int kTileM>
void check_sorted(const Call& call, int spare, int heads, bool pairs) {
  ForwardParams p;
  p.batch = 1, p.heads = heads, p.row_heads = 1;
  p.sequences.query_starts = call.query_starts.data(), p.sequences.key_starts = call.key_starts.data();
  p.sequences.count = int(call.query_starts.size()) - 1;
  p.queries = call.query_starts.back() + spare, p.keys = call.key_starts.back() + spare;
  std::vector<int> seen(size_t(p.queries) * heads, 0);
  const int64_t tiles =
      pairs ? 2 * tiles_over(p.queries, 2 * kTileM, p.sequences) : tiles_over(p.queries, kTileM, p.sequences);
  std::vector<std::array<int, 2>> order;  // block of 32 neighbours, keys
  int previous = -1;                      // tile of the number before, where it has one
  int empty = 0;
  for (int number = 0; number < tiles * heads; ++number) {
    SortedTile found{};
    warp::run([&](int lane) {
      const SortedTile mine = sorted_tile<kTileM>(p, uint32_t(number), pairs);
      if (lane == 0) found = mine;
      const Problem &a = mine.problem, &b = found.problem;
      const bool same = mine.tile == found.tile && mine.head == found.head && a.queries == b.queries &&
                        a.keys == b.keys && a.query_row == b.query_row && a.key_row == b.key_row &&
                        a.sequence == b.sequence;
      if (!same) fail("lanes disagree", call, false, number);
    });
    const Problem& x = found.problem;
    const int first = found.tile * kTileM, last = std::min(first + kTileM, x.queries);
    const int before = previous;
    previous = first < last ? found.tile : -1;
    if (first >= last) {
      if (!pairs || number % 2 == 0) ++empty;
      continue;
    }
    if (empty > 0 && p.sequences.count + 2 <= 32) fail("a tile behind an empty number", call, false, number);
    if (first < 0 || found.head >= uint32_t(heads)) fail("no such tile", call, false, number);
    if (pairs && number % 2 == 1 && before + found.tile != (x.queries + kTileM - 1) / kTileM - 1)
      fail("a pair is not from opposite ends", call, false, number);
    const std::vector<int>& starts = call.query_starts;
    bool inside = true;
    for (int row = x.query_row + first; row < x.query_row + last; ++row) {
      ++seen[size_t(row) * heads + found.head];
      inside = row >= starts.front() && row < starts.back();
      if (!inside && x.keys != 0) fail("a row of nobody has a loop", call, false, number);
      const int s = int(x.sequence);
      if (inside && !(starts[s] <= row && row < starts[s + 1])) fail("a row of another sequence", call, false, number);
    }
    const int member = inside ? int(x.sequence) + 1 : x.query_row + first < starts.front() ? 0 : p.sequences.count + 1;
    order.push_back({member / 32, x.keys});
  }
  for (size_t i = 0; i < seen.size(); ++i)
    if (seen[i] != 1) fail(seen[i] ? "a row in two tiles" : "a row in no tile", call, false, int(i) / heads);
  for (size_t i = 1; i < order.size(); ++i) {
    if (order[i][0] < order[i - 1][0]) fail("neighbours are apart", call, false, int(i));
    if (order[i][0] == order[i - 1][0] && order[i][1] > order[i - 1][1])
      fail("neighbours are not in order", call, false, int(i));
  }
}

int main() {
  std::mt19937 random(7);
  const auto number = [&](int below) { return int(random() % unsigned(below)); };
  const int counts[] = {1, 2, 30, 31, 32, 33, 62, 63, 64, 100};
  int calls = 0, sorted = 0;
  for (int count : counts) {
    for (int kind = 0; kind < 3; ++kind) {
      Call call;
      const int tiles[] = {16, 64, 128};
      call.tile = tiles[number(3)];
      call.row_heads = kind == 2 ? 1 << number(3) : 1;
      call.query_starts = {number(2) * number(40)}, call.key_starts = {number(2) * number(40)};
      for (int s = 0; s < count; ++s) {
        const int queries = kind == 2 ? number(3) : number(3) == 0 ? 0 : number(number(2) ? 9 : 200);
        const int keys = number(5) == 0 ? 0 : number(number(2) ? 9 : 300);
        call.query_starts.push_back(call.query_starts.back() + queries);
        call.key_starts.push_back(call.key_starts.back() + keys);
      }
      const int spare = number(2) * number(300);
      for (bool longest_first : {false, true}) {
        check<false>(call, spare, longest_first);
        check<true>(call, spare, longest_first);
        ++calls;
      }
      if (kind == 2) continue;  // heads as rows: not these kernels
      const int stretch = 1 + number(3);
      for (int& start : call.query_starts) start *= stretch;
      check_sorted<64>(call, spare, 1 + number(3), false);
      check_sorted<64>(call, spare, 1 + number(3), true);
      ++sorted;
    }
  }
  std::printf("%d calls, %d sorted\n", calls, sorted);
  return 0;
}
