// Pieces of the thin kernels of this family: a warp owns strips of 16 queries, its scores, weights and outputs stay in
// registers; keys and values lie in shared memory, rows of 16-byte chunks (8 elements) that ldmatrix reads, keys as
// they are, values transposed. 16 bits, m16n8k16. A lane has rows g and g + 8 of a strip, columns 2t and 2t + 1 of each
// tile of 8 (g = lane / 4, t = lane % 4; chained/acc_coord.h).
#pragma once

#include "chained/acc_coord.h"
#include "common/offset.h"
#include "common/pack.h"
#include "common/ptx.h"
#include "common/softmax.h"
#include "common/visibility.h"
#include "cutlass/arch/memory.h"
#include "cutlass/arch/mma.h"
#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

namespace memeff {
namespace registers {

using Words = uint32_t[4];  // operand A of a step: rows g, g + 8, then the same 8 columns on; operand B of two steps

// kStrips strips of 16 rows by kColumns columns: AccCoord's index, row and column serve them.
template <int kStrips, int kColumns>
using StripCoord = chained::AccCoord<cutlass::gemm::warp::MmaTensorOpAccumulatorTileIterator<
    cutlass::MatrixShape<16 * kStrips, kColumns>, float, cutlass::layout::RowMajor, cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::MatrixShape<1, 1>>>;
template <int kStrips, int kColumns>
using StripFragment = cutlass::Array<float, kStrips * kColumns / 2>;

// c += a b, c: accumulators of one 16 x 8 tile.
template <typename Element>
CUTLASS_DEVICE void multiply_add(float* c, Words const& a, uint32_t b0, uint32_t b1) {
  using Mma =
      cutlass::arch::Mma<cutlass::gemm::GemmShape<16, 8, 16>, 32, Element, cutlass::layout::RowMajor, Element,
                         cutlass::layout::ColumnMajor, float, cutlass::layout::RowMajor, cutlass::arch::OpMultiplyAdd>;
  const uint32_t b[2] = {b0, b1};
  auto& tile = *reinterpret_cast<typename Mma::FragmentC*>(c);
  Mma()(tile, reinterpret_cast<typename Mma::FragmentA const&>(a), reinterpret_cast<typename Mma::FragmentB const&>(b),
        tile);
}

// --- rows in shared memory ---

// kColumns: a multiple of 16. Chunk c of row r lies at chunk c ^ swizzle(r) of its row: ldmatrix reads the same chunk
// of eight rows, no bank twice.
template <int kColumns_>
struct Rows {
  static constexpr int kColumns = kColumns_;
  static constexpr int kChunks = kColumns / 8;
  static constexpr int kRowBytes = 16 * kChunks;
  static constexpr int kPeriod = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : 2;  // chunks that swizzles permute
  static_assert(kColumns % 16 == 0, "whole steps of the contraction");

  CUTLASS_DEVICE static int swizzle(int row) { return row / (8 / kPeriod) % kPeriod; }
};

// How many lanes copy one row: as many as leave whole groups of 8 rows to a pass, over which swizzles repeat.
template <int kChunks, int kThreads>
constexpr int lanes_per_row() {
  for (int lanes = 8; lanes > 1; lanes /= 2)
    if (kChunks % lanes == 0 && kThreads / lanes % 8 == 0) return lanes;
  return 1;
}

// Copies tiles of kFill rows to shared memory, one after the other: what lies beyond the rows and columns that are
// there is 0. The caller commits and waits.
template <typename Rows, int kThreads, int kFill, typename Element>
struct RowCopier {
  static constexpr int kLanes = lanes_per_row<Rows::kChunks, kThreads>(), kPerPass = kThreads / kLanes;
  static_assert(kPerPass % 8 == 0, "swizzles repeat from pass to pass");
  Element const* line;  // this thread's first chunk of the next tile
  int row0, first;      // its row, and the byte of its chunk 0 in a tile
  int columns;          // that are there, from its chunk on

  CUTLASS_DEVICE RowCopier(Element const* from, int64_t stride, int columns_, int thread) {
    row0 = thread / kLanes;
    const int chunk0 = thread % kLanes;
    line = from + offset(row0, stride) + 8 * chunk0;
    first = row0 * Rows::kRowBytes + 16 * (chunk0 ^ Rows::swizzle(row0));
    columns = columns_ - 8 * chunk0;
  }
  // Starts the copies of one tile; rows: valid ones.
  CUTLASS_DEVICE void start(char* to, int64_t stride, int rows) const {
    Element const* from = line;
    CUTLASS_PRAGMA_UNROLL
    for (int pass = 0; pass * kPerPass < kFill; ++pass) {
      const int row = row0 + pass * kPerPass;
      if (kFill % kPerPass == 0 || row < kFill) {
        CUTLASS_PRAGMA_UNROLL
        for (int chunk = 0; chunk < Rows::kChunks; chunk += kLanes) {
          // Lanes start at chunks 0 .. kLanes - 1: adding a multiple of kLanes commutes with the swizzle but for the
          // bits that both have.
          ptx::copy_async<16>(
              to + pass * kPerPass * Rows::kRowBytes + (first ^ flip(chunk)) + (16 * chunk - flip(chunk)),
              from + 8 * chunk, row < rows && 8 * chunk < columns ? 16 : 0);
        }
      }
      from += offset(kPerPass, stride);
    }
  }
  CUTLASS_DEVICE void advance(int64_t stride) { line += offset(kFill, stride); }

 private:
  // The part of a chunk's offset that the swizzle permutes.
  CUTLASS_DEVICE static constexpr int flip(int chunk) { return 16 * (chunk % Rows::kPeriod); }
};

template <typename Rows, int kThreads, int kFill, typename Element>
CUTLASS_DEVICE void copy_rows(char* to, Element const* from, int64_t stride, int rows, int columns, int thread) {
  RowCopier<Rows, kThreads, kFill, Element>(from, stride, columns, thread).start(to, stride, rows);
}

// --- operands ---

// Addresses for ldmatrix of kWide chunks (2 or 4) of 16 or 8 rows. A lane's chunk of column block j lies at
// at[j % kCount], 16 kPeriod bytes further for each kCount blocks.
template <int kColumns, int kWide>
struct BlockReader {
  static constexpr int kRowBytes = Rows<kColumns>::kRowBytes, kPeriod = Rows<kColumns>::kPeriod;
  static constexpr int kCount = kPeriod > kWide ? kPeriod / kWide : 1;
  static constexpr int kStride = kCount * kWide * 16;  // bytes
  uint32_t at[kCount];

  CUTLASS_DEVICE BlockReader(uint32_t rows, int lane) {
    constexpr int kRows = 32 / kWide;
    const int row = lane % kRows, chunk = lane / kRows ^ Rows<kColumns>::swizzle(row);
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kCount; ++j) at[j] = ptx::opaque(rows + row * kRowBytes + 16 * (chunk ^ (j * kWide)));
  }
  CUTLASS_DEVICE uint32_t address(int row0, int block) const {
    return at[block % kCount] + uint32_t(row0 * kRowBytes + block / kCount * kStride);
  }
};

// Queries of a warp, as operand A.
template <typename Element, int kStrips, int kColumns>
struct QueryFragment {
  static constexpr int kSteps = kColumns / 16;
  Words words[kStrips][kSteps];

  // From rows in shared memory.
  CUTLASS_DEVICE void load(uint32_t rows, int lane) {
    const BlockReader<kColumns, 2> reader(rows, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < kSteps; ++step)
        ptx::load_matrices<false>(words[strip][step], reader.address(16 * strip, step));
    }
  }

  // From global memory, where shared memory has no room for them. Rows from `rows` and columns from `columns` on are 0.
  CUTLASS_DEVICE void load(Element const* from, int64_t stride, int rows, int columns, int lane) {
    const int g = lane >> 2, t = lane & 3;
    Element const* line = from + offset(g, stride) + 2 * t;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kStrips; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2 * kSteps; ++half) {
        uint32_t& word = words[i / 2][half / 2][i % 2 + half % 2 * 2];
        word = 0;
        cutlass::arch::global_load<uint32_t, 4>(word, line + 8 * half, 8 * i + g < rows && 8 * half < columns);
      }
      line += offset(8, stride);
    }
  }
};

// Keys as operand B: tiles of 8 keys, all of K.
template <typename Element, int kStrips, int kColumns>
struct KeyReader : BlockReader<kColumns, 4> {
  using Query = QueryFragment<Element, kStrips, kColumns>;
  using BlockReader<kColumns, 4>::BlockReader;

  // c += Q K^T for one tile of keys; c: this tile's accumulators of each strip, side by side. Where K ends with half a
  // block, ldmatrix reads the next row's first chunks (or what lies behind the keys) along with it.
  CUTLASS_DEVICE void multiply(float* c, Query const& q, int tile) const {
    CUTLASS_PRAGMA_UNROLL
    for (int step = 0; step < Query::kSteps; step += 2) {
      Words b;
      ptx::load_matrices<false>(b, this->address(8 * tile, step / 2));
      multiply_step(c, q, step, b[0], b[1]);
      if (step + 1 < Query::kSteps) multiply_step(c, q, step + 1, b[2], b[3]);
    }
  }

 private:
  CUTLASS_DEVICE static void multiply_step(float* c, Query const& q, int step, uint32_t b0, uint32_t b1) {
    CUTLASS_PRAGMA_UNROLL
    for (int strip = 0; strip < kStrips; ++strip) multiply_add<Element>(c + 4 * strip, q.words[strip][step], b0, b1);
  }
};

// Values as operand B: 16 keys by two tiles of 8 columns.
template <int kColumns>
struct ValueReader : BlockReader<kColumns, 2> {
  using BlockReader<kColumns, 2>::BlockReader;
  CUTLASS_DEVICE void load(Words& b, int key0, int column0) const {
    ptx::load_matrices<true>(b, this->address(key0, column0 / 16));
  }
};

// --- from scores to outputs; Coord: StripCoord of the scores ---

// Which keys the rows of a forward call see; several of them may be one query (params.h: row_shift).
struct RowVisibility {
  Visibility see;
  int shift;

  CUTLASS_DEVICE explicit RowVisibility(ForwardParams const& p)
      : see(p, ((p.queries - 1) >> p.row_shift) + 1, p.keys), shift(p.row_shift) {}
  CUTLASS_DEVICE int first(int row) const { return see.first(row >> shift); }
  CUTLASS_DEVICE int limit(int row) const { return see.limit(row >> shift); }
};

// Keys outside [first, limit) of each row become -inf. row0, key0: the query and the key of the fragment's first
// element.
template <typename Coord, typename Fragment>
CUTLASS_DEVICE void hide_keys(Fragment& s, RowVisibility const& see, int row0, int key0, int lane) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coord::kRows; ++i) {
    const int row = row0 + Coord::row(lane, i), limit = see.limit(row) - key0, first = see.first(row) - key0;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coord::kColumns; ++j) {
      const int column = Coord::column(lane, j);
      if (column >= limit || column < first) s[Coord::index(i, j)] = negative_infinity();
    }
  }
}

// This lane's part of the row maxima.
template <typename Coord, typename Fragment>
CUTLASS_DEVICE void find_maxima(Fragment const& s, float (&max)[Coord::kRows]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < Coord::kRows; ++i) max[i] = s[Coord::index(i, 0)];
  CUTLASS_PRAGMA_UNROLL
  for (int j = 1; j < Coord::kColumns; ++j) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Coord::kRows; ++i) max[i] = fmaxf(max[i], s[Coord::index(i, j)]);
  }
}
// Over the four lanes that share a row.
CUTLASS_DEVICE float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
CUTLASS_DEVICE float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// s -> weights in place, rounded: element (i, 2j) of a row holds the pair 2j, 2j + 1. sum (kSums): of what this lane
// holds, before it is rounded.
template <typename Element, typename Exponent, typename Coord, bool kSums = true, typename Fragment>
CUTLASS_DEVICE void weigh_scores(Fragment& s, float (&sum)[Coord::kRows], float const (&reference)[Coord::kRows],
                                 float exponent) {
  CUTLASS_PRAGMA_UNROLL
  for (int j = 0; j < Coord::kColumns; j += 2) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Coord::kRows; ++i) {
      float& low = s[Coord::index(i, j)];
      const float a = Exponent::weight(low, reference[i], exponent);
      const float b = Exponent::weight(s[Coord::index(i, j + 1)], reference[i], exponent);
      if (kSums) {
        sum[i] += a;
        sum[i] += b;
      }
      low = __uint_as_float(pack<Element>(a, b));
    }
  }
}

// Running softmax of the rows that a lane holds. The reference of the exponent moves only when a row's maximum has
// risen by more than kSlack (in powers of 2) above it: until then weights are at most 2^kSlack, exact to the same
// relative error, and nothing is rescaled or exchanged.
//
// A maximum's weight is then no power of 2 and rounded like any other: in a row that one key dominates that is all of
// the error. So outputs are divided by the sum of the rounded weights, which multiply_values collects; the LSE, where
// one is asked for, keeps the sum of what was rounded.
template <int kRows>
struct RunningSoftmax {
  static constexpr int kSlack = 8;
  float max[kRows], sum[kRows];  // max: what weights refer to; sum: this lane's part
  float ceiling[kRows];          // a score above it moves the reference
  float rounded[2 * kRows];      // sums of rounded weights, whole rows; accumulators of m16n8: row i at 2i and 2i + 1

  CUTLASS_DEVICE void start() {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) max[i] = ceiling[i] = negative_infinity(), sum[i] = 0.f;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * kRows; ++i) rounded[i] = 0.f;
  }

  // Takes the maxima of s in where a row's has risen too far. slack: kSlack in raw scores.
  template <typename Exponent, typename Coord, typename CoordO, typename FragmentS, typename FragmentO>
  CUTLASS_DEVICE void raise(FragmentO& o, FragmentS const& s, float exponent, float slack) {
    float found[kRows];
    find_maxima<Coord>(s, found);
    bool above = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) above |= found[i] > ceiling[i];
    if (!__any_sync(0xffffffffu, above)) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const float before = max[i];
      max[i] = fmaxf(before, quad_max(found[i]));
      ceiling[i] = max[i] + slack;
      const float alpha = Exponent::rescale(before, Exponent::reference(max[i], exponent), exponent);
      sum[i] *= alpha;
      rounded[2 * i] *= alpha, rounded[2 * i + 1] *= alpha;
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < CoordO::kColumns; ++j) o[CoordO::index(i, j)] *= alpha;
    }
  }
  CUTLASS_DEVICE void divisors(float (&of)[kRows]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) of[i] = rounded[2 * i];
  }
  template <typename Exponent>
  CUTLASS_DEVICE void references(float (&reference)[kRows], float exponent) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kRows; ++i) reference[i] = Exponent::reference(max[i], exponent);
  }
};

// Calls f(row, its width as a type) for the parts of kPart rows, of kLength in all, that lie in [first, limit); what is
// left of kLength is a narrower part.
template <int kPart, int kLength, typename F>
CUTLASS_DEVICE void each_part(int first, int limit, F f) {
#pragma unroll 1
  for (int row = first / kPart * kPart; row < limit && row + kPart <= kLength; row += kPart)
    f(row, std::integral_constant<int, kPart>());
  constexpr int kWhole = kLength / kPart * kPart;
  if constexpr (kWhole < kLength) {
    if (kWhole < limit) f(kWhole, std::integral_constant<int, kLength - kWhole>());
  }
}

// o += P V. s: weights as weigh_scores leaves them. rounded: RunningSoftmax's, += P 1.
template <typename Element, int kStrips, int kKeys, int kColumns, typename Rounded = std::nullptr_t>
CUTLASS_DEVICE void multiply_values(StripFragment<kStrips, kColumns>& o, StripFragment<kStrips, kKeys> const& s,
                                    uint32_t values, int lane, Rounded rounded = nullptr) {
  using Coord = StripCoord<kStrips, kKeys>;
  using CoordO = StripCoord<kStrips, kColumns>;
  const ValueReader<kColumns> reader(values, lane);
  const auto weights = [&](Words& a, int strip, int tile) {
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < 4; ++w) a[w] = __float_as_uint(s[Coord::index(2 * strip + w % 2, 2 * (tile + w / 2))]);
  };
  CUTLASS_PRAGMA_UNROLL
  for (int tile = 0; tile < kKeys / 8; tile += 2) {
    if constexpr (!std::is_same<Rounded, std::nullptr_t>::value) {
      const uint32_t ones = pack<Element>(1.f, 1.f);
      CUTLASS_PRAGMA_UNROLL
      for (int strip = 0; strip < kStrips; ++strip) {
        Words a;
        weights(a, strip, tile);
        multiply_add<Element>(&rounded[4 * strip], a, ones, ones);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int column = 0; column < kColumns; column += 16) {
      Words b;
      reader.load(b, 8 * tile, column);
      CUTLASS_PRAGMA_UNROLL
      for (int strip = 0; strip < kStrips; ++strip) {
        Words a;
        weights(a, strip, tile);
        multiply_add<Element>(&o[CoordO::index(2 * strip, column / 4)], a, b[0], b[1]);
        multiply_add<Element>(&o[CoordO::index(2 * strip, column / 4 + 2)], a, b[2], b[3]);
      }
    }
  }
}

// Of the four lanes that share a row one writes. lse, low: of the strips' first row; rows: valid ones.
template <typename Exponent, int kRows>
CUTLASS_DEVICE void store_lse(float* lse, float* low, float const (&reference)[kRows], float const (&sum)[kRows],
                              int rows, int lane) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const int row = 8 * i + (lane >> 2);
    if ((lane & 3) != 0 || row >= rows) continue;
    const float2 both = log_sum_exp<Exponent>(reference[i], sum[i]);
    lse[row] = both.x;
    if (low != nullptr) low[row] = both.y;
  }
}

// Writes rows, whole sectors at a time: neighbouring lanes exchange halves, so that a lane has 8 bytes of one tile.
// factor: of each row; dead: rows that are 0 whatever the accumulators hold.
template <typename Element, int kStrips, int kColumns>
CUTLASS_DEVICE void store_rows(Element* to, int64_t stride, StripFragment<kStrips, kColumns> const& x,
                               float const (&factor)[2 * kStrips], bool const (&dead)[2 * kStrips], int rows,
                               int columns, int lane) {
  using Coord = StripCoord<kStrips, kColumns>;
  const int g = lane >> 2, t = lane & 3, odd = t & 1;
  const uint32_t second =
      0x3210 + 0x4444 * odd;               // of __byte_perm: the first word in even lanes, the second in odd ones
  const int own = 8 * odd + 4 * (t >> 1);  // this lane's first column of 16
  Element* line = to + offset(g, stride) + own;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2 * kStrips; ++i) {
    CUTLASS_PRAGMA_UNROLL
    for (int column0 = 0; column0 < kColumns; column0 += 16) {
      uint32_t word[2];
      CUTLASS_PRAGMA_UNROLL
      for (int k = 0; k < 2; ++k) {
        const int at = Coord::index(i, column0 / 4 + 2 * k);
        word[k] = pack<Element>(x[at] * factor[i], x[at + 1] * factor[i]);
      }
      const uint32_t other = __shfl_xor_sync(0xffffffffu, __byte_perm(word[0], word[1], second ^ 0x4444), 1);
      uint2 both = make_uint2(__byte_perm(word[0], other, second), __byte_perm(other, word[1], second));
      both.x = dead[i] ? 0u : both.x;
      both.y = dead[i] ? 0u : both.y;
      cutlass::arch::global_store<uint2, 8>(both, line + column0, 8 * i + g < rows && column0 < columns - own);
    }
    line += offset(8, stride);
  }
}

// Rows of O, each divided by its sum; one that sees nothing is 0, whatever 0 * V gave.
template <typename Element, int kStrips, int kColumns>
CUTLASS_DEVICE void store_output(Element* to, int64_t stride, StripFragment<kStrips, kColumns> const& o,
                                 float const (&sum)[2 * kStrips], int rows, int columns, int lane) {
  float inverse[2 * kStrips];
  bool dead[2 * kStrips];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < 2 * kStrips; ++i) {
    dead[i] = sum[i] == 0.f;
    inverse[i] = 1.f / (dead[i] ? 1.f : sum[i]);
  }
  store_rows<Element, kStrips, kColumns>(to, stride, o, inverse, dead, rows, columns, lane);
}

}  // namespace registers
}  // namespace memeff
