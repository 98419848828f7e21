// Which weights dropout keeps: a pure function of (seed, offset, batch entry, query head, query, key), the same for
// every tile shape, kernel and architecture, and in memeff_attn/dropout.py.
//
// One Philox4x32-10 call (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) serves eight cells:
//
//             key c   c+1         c+8  c+9      c in {0, 2, 4, 6} of a block of 16 keys
//   query 2i   [ word 0: lo, hi ] [ word 1 ]
//   query 2i+1 [ word 2         ] [ word 3 ]
//
// so that a tensor-core fragment (a row's column pairs, 8 apart) and its transpose each use half of every call; the
// lane that holds the other half is the lane 4 away, and the two share their calls.
//   counter = (key / 16 * 4 + key % 8 / 2, query / 2, b * H + h, offset low)
//   key     = (seed low, seed high ^ offset high)
// A weight is kept when its 16 bits are not below the threshold.
#pragma once

#include "cutlass/cutlass.h"
#include "params.h"

namespace memeff {

constexpr int kPhiloxRounds = 10;

// Two 32x32-bit products, two exclusive ors of three words. number: of the round.
CUTLASS_DEVICE uint4 philox_round(uint4 counter, uint2 key, int number) {
  const uint64_t product0 = uint64_t(counter.x) * 0xD2511F53u, product1 = uint64_t(counter.z) * 0xCD9E8D57u;
  const uint32_t key0 = key.x + uint32_t(number) * 0x9E3779B9u, key1 = key.y + uint32_t(number) * 0xBB67AE85u;
  return make_uint4(uint32_t(product1 >> 32) ^ counter.y ^ key0, uint32_t(product1),
                    uint32_t(product0 >> 32) ^ counter.w ^ key1, uint32_t(product0));
}

CUTLASS_DEVICE uint4 philox4x32_10(uint4 counter, uint2 key) {
  CUTLASS_PRAGMA_UNROLL
  for (int round = 0; round < kPhiloxRounds; ++round) counter = philox_round(counter, key, round);
  return counter;
}

// The generator of one (batch entry, query head).
struct DropoutHead {
  uint2 key;
  uint32_t offset_low;
  uint32_t batch_head;
  uint32_t limit;  // threshold << 16; what is kept where p = 1 (one weight of 2^32) is multiplied by 0

  DropoutHead() = default;
  CUTLASS_DEVICE DropoutHead(Dropout const& dropout, uint32_t batch_head_)
      : batch_head(batch_head_), limit(dropout.threshold > 0xffff ? ~0u : uint32_t(dropout.threshold) << 16) {
    const uint64_t seed = uint64_t(dropout.seed[0]), offset = uint64_t(dropout.seed[1]);
    key = make_uint2(uint32_t(seed), uint32_t(seed >> 32) ^ uint32_t(offset >> 32));
    offset_low = uint32_t(offset);
  }

  // The eight cells that hold (query, column).
  CUTLASS_DEVICE uint4 cells(int query, int column) const {
    return philox4x32_10(counter(query, uint32_t(column) / 16 * 4 + uint32_t(column) % 8 / 2), key);
  }
  CUTLASS_DEVICE uint4 counter(int query, uint32_t group) const {
    return make_uint4(group, uint32_t(query) / 2, batch_head, offset_low);
  }
  CUTLASS_DEVICE bool keeps(uint32_t word, int column) const { return (column & 1 ? word : word << 16) >= limit; }
  CUTLASS_DEVICE static uint32_t word(uint4 const& cells, int query, int column) {
    const uint32_t low = column & 8 ? cells.y : cells.x, high = column & 8 ? cells.w : cells.z;
    return query & 1 ? high : low;
  }
};

struct NoDropoutHead {
  NoDropoutHead() = default;
  CUTLASS_DEVICE NoDropoutHead(Dropout const&, uint32_t) {}
};

// What the lane 4 away holds: the neighbouring row of the same columns.
CUTLASS_DEVICE uint2 exchange_rows(uint2 x) {
  return make_uint2(__shfl_xor_sync(0xffffffffu, x.x, 4), __shfl_xor_sync(0xffffffffu, x.y, 4));
}
CUTLASS_DEVICE uint2 choose(bool first, uint2 a, uint2 b) { return make_uint2(first ? a.x : b.x, first ? a.y : b.y); }

// The call of a lane whose two rows are 2i and 2i + 1, the first of them `query`: of 16 keys from column0 on, with
// c = lane % 4 * 2 in the picture above. Nothing is exchanged.
CUTLASS_DEVICE uint4 pair_cells(DropoutHead const& head, int query, int column0, int lane) {
  return philox4x32_10(head.counter(query, uint32_t(column0) / 4 + uint32_t(lane & 3)), head.key);
}

// Rows are queries. Of two rows 8 apart, lanes of even queries call for the first, lanes of odd ones for the second.
template <typename Coord, typename F>
CUTLASS_DEVICE void each_quad(DropoutHead const& head, int row0, int column0, int lane, F f) {
  const bool odd = lane & 4;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coord::kRows; i += 2) {
    const int query = row0 + Coord::row(lane, i) + (odd ? 8 : 0);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coord::kColumns; j += 4) {  // keys c, c+1, c+8, c+9
      const uint4 cells = head.cells(query, column0 + Coord::column(lane, j));
      const uint2 even_query = make_uint2(cells.x, cells.y), odd_query = make_uint2(cells.z, cells.w);
      const uint2 own = choose(odd, odd_query, even_query);
      const uint2 other = exchange_rows(choose(odd, even_query, odd_query));
      const uint2 rows[2] = {choose(odd, other, own), choose(odd, own, other)};
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 2; ++k) {
        f(i + k, j, head.keeps(rows[k].x, 0));
        f(i + k, j + 1, head.keeps(rows[k].x, 1));
        f(i + k, j + 2, head.keeps(rows[k].y, 0));
        f(i + k, j + 3, head.keeps(rows[k].y, 1));
      }
    }
  }
}

// Rows are keys. Of two pairs of columns (queries), lanes of even keys call for the first, lanes of odd ones for the
// second. A key's halves of two words make one word: keys c and c + 8 of one query.
template <typename Coord, typename F>
CUTLASS_DEVICE void each_quad_transposed(DropoutHead const& head, int row0, int column0, int lane, F f) {
  const bool odd = lane & 4;
  const uint32_t low = 0x5410, high = 0x7632;  // of __byte_perm
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coord::kRows; i += 2) {
    const int key = row0 + Coord::row(lane, i);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coord::kColumns; j += 4) {
      const int query = column0 + (odd ? Coord::column(lane, j + 2) : Coord::column(lane, j));
      const uint4 cells = head.cells(query, key);
      const auto halves = [&](bool of_odd) {
        const uint32_t which = of_odd ? high : low;
        return make_uint2(__byte_perm(cells.x, cells.y, which), __byte_perm(cells.z, cells.w, which));
      };
      const uint2 own = halves(odd), other = exchange_rows(halves(!odd));
      const uint2 pairs[2] = {choose(odd, other, own), choose(odd, own, other)};
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 2; ++k) {
        f(i, j + 2 * k, head.keeps(pairs[k].x, 0));
        f(i + 1, j + 2 * k, head.keeps(pairs[k].x, 1));
        f(i, j + 2 * k + 1, head.keeps(pairs[k].y, 0));
        f(i + 1, j + 2 * k + 1, head.keeps(pairs[k].y, 1));
      }
    }
  }
}

// Calls f(i, j, kept) for every accumulator of a lane; all lanes of a warp together. Coord: AccCoord of the scores.
// kTransposed: rows are keys, columns are queries. row0, column0: the warp tile's first row and column within their
// sequences, multiples of 16.
template <typename Coord, bool kTransposed, typename F>
CUTLASS_DEVICE void each_cell(DropoutHead const& head, int row0, int column0, int lane, F f) {
  if constexpr (Coord::kQuadCells && kTransposed) {
    each_quad_transposed<Coord>(head, row0, column0, lane, f);
  } else if constexpr (Coord::kQuadCells) {
    each_quad<Coord>(head, row0, column0, lane, f);
  } else {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Coord::kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Coord::kColumns; j += 2) {  // a pair of columns never crosses cells
        const int row = row0 + Coord::row(lane, i), column = column0 + Coord::column(lane, j);
        const int query = kTransposed ? column : row, key = kTransposed ? row : column;
        const uint4 cells = head.cells(query, key);
        CUTLASS_PRAGMA_UNROLL
        for (int odd = 0; odd < 2; ++odd) {
          const int q = kTransposed ? query + odd : query, k = kTransposed ? key : key + odd;
          f(i, j + odd, head.keeps(DropoutHead::word(cells, q, k), k));
        }
      }
    }
  }
}

}  // namespace memeff
