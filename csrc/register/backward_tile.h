// What the backward kernel of this family is made of: tiles in shared memory and a warp's three kinds of products.
//
// A tile is row-major, its pieces of 16 bytes permuted within a row so that eight rows' pieces of one column lie in all
// banks (ldmatrix reads and stmatrix writes so) and copies of whole rows do too:
//
//   piece p of row r lies at  r * kRowBytes + (p ^ r % 8) * 16          rows of 128 bytes and more
//                             r * kRowBytes + (p ^ r / 2 % 4) * 16      rows of 64 bytes
//
// A lane's address in a tile is made once; 16 rows further is a constant to add, 16 columns further a constant to XOR.
#pragma once

#include "common/offset.h"
#include "common/ptx.h"
#include "register/warp_mma.h"

namespace memeff {
namespace registers {

template <int kRows_, int kColumns_>
struct SharedTile {
  static constexpr int kRows = kRows_, kColumns = kColumns_;
  static constexpr int kRowBytes = 2 * kColumns, kBytes = kRows * kRowBytes;
  static constexpr int kSixteenRows = 16 * kRowBytes;
  static_assert(kRowBytes == 64 || (kRowBytes % 128 == 0 && (kRowBytes & (kRowBytes - 1)) == 0), "a power of two");

  CUTLASS_DEVICE static uint32_t at(int row, int piece) {
    const int swizzled = kRowBytes == 64 ? piece ^ (row >> 1 & 3) : piece ^ (row & 7);
    return uint32_t(row * kRowBytes + swizzled * 16);
  }
  // The row of a matrix that lane l addresses, for matrices ordered down first: (rows 0-7, columns 0-7), (rows 8-15,
  // columns 0-7), (rows 0-7, columns 8-15), (rows 8-15, columns 8-15).
  CUTLASS_DEVICE static uint32_t down_first(int row, int column, int lane) {
    return at(row + (lane & 15), column / 8 + (lane >> 4));
  }
  // Columns 8-15 before rows 8-15.
  CUTLASS_DEVICE static uint32_t across_first(int row, int column, int lane) {
    return at(row + (lane & 7) + (lane >> 4) * 8, column / 8 + (lane >> 3 & 1));
  }
};
CUTLASS_DEVICE constexpr uint32_t sixteen_columns(int n) { return uint32_t(n) * 32; }  // to XOR

// Accumulators of a warp: kTilesM x kTilesN of m16n8.
template <int kTilesM_, int kTilesN_>
struct Sums {
  static constexpr int kTilesM = kTilesM_, kTilesN = kTilesN_;
  float at[kTilesM][kTilesN][4];

  CUTLASS_DEVICE void clear() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTilesM; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kTilesN; ++j) {
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < 4; ++e) at[i][j][e] = 0.f;
      }
    }
  }
};

// The same numbers rounded, as operand A of the next product: kSteps steps of 16 of its columns. Tiles 2s and 2s + 1 of
// the accumulators are step s.
template <int kTilesM_, int kSteps_>
struct Weights {
  static constexpr int kTilesM = kTilesM_, kSteps = kSteps_;
  uint32_t at[kTilesM][kSteps][4];

  // The two numbers that accumulators 2 * half, 2 * half + 1 of tile (i, j) become.
  CUTLASS_DEVICE uint32_t& pair(int i, int j, int half) { return at[i][j / 2][j % 2 * 2 + half]; }
};

// Nothing beside the steps of a product.
struct Alone {
  CUTLASS_DEVICE void operator()(int) const {}
};

// kWhole: over all columns, so that no branch keeps the loads of a step behind the products of the last one.
template <bool kWhole, typename Element, typename TileA, typename TileB, int kTilesM, int kTilesN, typename F>
CUTLASS_DEVICE void multiply_rows_of(Sums<kTilesM, kTilesN>& sums, uint32_t a, uint32_t b, int depth, F beside) {
  CUTLASS_PRAGMA_UNROLL
  for (int step = 0; step < TileA::kColumns / 16; ++step) {
    beside(step);
    if (!kWhole && step * 16 >= depth) {
      if constexpr (std::is_same<F, Alone>::value) break;
      continue;
    }
    uint32_t frag_a[kTilesM][4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTilesM; ++i) {
      ptx::load_matrices<false>(frag_a[i], (a ^ sixteen_columns(step)) + i * TileA::kSixteenRows);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kTilesN; j += 2) {
      uint32_t frag_b[4];
      ptx::load_matrices<false>(frag_b, (b ^ sixteen_columns(step)) + j / 2 * TileB::kSixteenRows);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTilesM; ++i) {
        multiply_add<Element>(sums.at[i][j], frag_a[i], frag_b[0], frag_b[1]);
        multiply_add<Element>(sums.at[i][j + 1], frag_a[i], frag_b[2], frag_b[3]);
      }
    }
  }
}
// sums += A B^T over `depth` columns of both, which are zero up to the next multiple of 16. a, b: the lane's addresses,
// A down first, B across first. beside(step): work that lies between the products of a step of 16 columns.
template <typename Element, typename TileA, typename TileB, int kTilesM, int kTilesN, typename F = Alone>
CUTLASS_DEVICE void multiply_rows(Sums<kTilesM, kTilesN>& sums, uint32_t a, uint32_t b, int depth, F beside = F()) {
  if (depth > TileA::kColumns - 16) {
    multiply_rows_of<true, Element, TileA, TileB>(sums, a, b, depth, beside);
  } else {
    multiply_rows_of<false, Element, TileA, TileB>(sums, a, b, depth, beside);
  }
}

template <bool kWhole, typename Element, typename TileB, int kTilesM, int kTilesN, int kSteps>
CUTLASS_DEVICE void multiply_weights_of(Sums<kTilesM, kTilesN>& sums, Weights<kTilesM, kSteps> const& w, uint32_t b,
                                        int columns) {
  CUTLASS_PRAGMA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kTilesN; j += 2) {
      if (!kWhole && j * 8 >= columns) break;
      uint32_t frag_b[4];
      ptx::load_matrices<true>(frag_b, (b ^ sixteen_columns(j / 2)) + step * TileB::kSixteenRows);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTilesM; ++i) {
        multiply_add<Element>(sums.at[i][j], w.at[i][step], frag_b[0], frag_b[1]);
        multiply_add<Element>(sums.at[i][j + 1], w.at[i][step], frag_b[2], frag_b[3]);
      }
    }
  }
}
// sums += W B, the first `columns` of them; more may be done. b: the lane's address, down first, at the row of W's
// first column.
template <typename Element, typename TileB, int kTilesM, int kTilesN, int kSteps>
CUTLASS_DEVICE void multiply_weights(Sums<kTilesM, kTilesN>& sums, Weights<kTilesM, kSteps> const& w, uint32_t b,
                                     int columns) {
  if (columns > kTilesN * 8 - 16) {
    multiply_weights_of<true, Element, TileB>(sums, w, b, columns);
  } else {
    multiply_weights_of<false, Element, TileB>(sums, w, b, columns);
  }
}

// sums += A^T B over the tiles' rows. a: across first, b: down first.
template <typename Element, typename TileA, typename TileB, int kTilesM, int kTilesN>
CUTLASS_DEVICE void multiply_columns(Sums<kTilesM, kTilesN>& sums, uint32_t a, uint32_t b) {
  static_assert(TileA::kRows == TileB::kRows, "both have the rows that are summed over");
  CUTLASS_PRAGMA_UNROLL
  for (int step = 0; step < TileA::kRows / 16; ++step) {
    uint32_t frag_a[kTilesM][4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kTilesM; ++i) {
      ptx::load_matrices<true>(frag_a[i], (a ^ sixteen_columns(i)) + step * TileA::kSixteenRows);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kTilesN; j += 2) {
      uint32_t frag_b[4];
      ptx::load_matrices<true>(frag_b, (b ^ sixteen_columns(j / 2)) + step * TileB::kSixteenRows);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kTilesM; ++i) {
        multiply_add<Element>(sums.at[i][j], frag_a[i], frag_b[0], frag_b[1]);
        multiply_add<Element>(sums.at[i][j + 1], frag_a[i], frag_b[2], frag_b[3]);
      }
    }
  }
}

// Starts the copy of a tile by all threads of a block; zeros beyond `rows` and `columns`.
template <typename Tile, int kThreads, typename Element>
CUTLASS_DEVICE void copy_tile(uint32_t tile, Element const* from, int64_t stride, int rows, int columns, int thread) {
  constexpr int kPieces = Tile::kColumns / 8;      // of a row
  constexpr int kRowsAtOnce = kThreads / kPieces;  // a multiple of 8: the swizzle stays
  static_assert(kThreads % kPieces == 0 && kRowsAtOnce % 8 == 0, "threads make whole rows");
  const int row = thread / kPieces, piece = thread % kPieces;
  const int bytes = piece * 8 < columns ? 16 : 0;
  uint32_t to = tile + Tile::at(row, piece);
  from += offset(row, stride) + piece * 8;
  CUTLASS_PRAGMA_UNROLL
  for (int first = 0; first < Tile::kRows; first += kRowsAtOnce) {
    if (Tile::kRows % kRowsAtOnce != 0 && row + first >= Tile::kRows) break;
    ptx::copy_async(to, from, row + first < rows ? bytes : 0);
    to += kRowsAtOnce * Tile::kRowBytes;
    from += offset(kRowsAtOnce, stride);
  }
}

}  // namespace registers
}  // namespace memeff
