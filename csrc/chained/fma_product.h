// fp32 products by FFMA, from the same shared-memory operands as the tensor cores', where there are so few products or
// queries that single rounding errors show. Tensor cores truncate every addend of a step: about one unit in the last
// place of the sum.
#pragma once

#include "chained/acc_coord.h"
#include "chained/split_parts.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/threadblock/mma_base.h"

namespace memeff {
namespace chained {

// So few scores that the closest two of a row decide over the largest error of a call: up to kFewFmaDepth products are
// then added as eager adds them.
CUTLASS_DEVICE bool are_few_scores(int queries, int keys) { return int64_t(queries) * keys <= 1 << 15; }

// What rounding took from total = a + b (Knuth, TwoSum).
CUTLASS_DEVICE float sum_error(float a, float b, float total) {
  const float part = __fsub_rn(total, a);
  return __fadd_rn(__fsub_rn(a, __fsub_rn(total, part)), __fsub_rn(b, part));
}
// A sum and the errors of its additions; of a sum that is not finite they are NaN.
CUTLASS_DEVICE float corrected(float sum, float error) { return isfinite(sum) ? __fadd_rn(sum, error) : sum; }

// A sum of products, rounded at every addition.
struct PlainSum {
  float sum = 0.f;
  CUTLASS_DEVICE void add(float a, float b) { sum = __fmaf_rn(a, b, sum); }
  CUTLASS_DEVICE float value() const { return sum; }
};

// A sum of products kept with the rounding errors of its products and additions (Ogita, Rump, Oishi, "Accurate sum and
// dot product", 2005, algorithm Dot2): as if computed in twice fp32's precision, then rounded.
struct CompensatedSum {
  float sum = 0.f, error = 0.f;
  CUTLASS_DEVICE void add(float a, float b) {
    const float product = __fmul_rn(a, b);
    const float product_error = __fmaf_rn(a, b, -product);
    const float total = __fadd_rn(sum, product);
    error = __fadd_rn(error, __fadd_rn(product_error, sum_error(sum, product, total)));
    sum = total;
  }
  CUTLASS_DEVICE float value() const { return corrected(sum, error); }
};

// Four consecutive k of a row (query or key), as an operand's layout keeps them side by side.
struct PlainFour {
  CUTLASS_DEVICE static float4 load(float const* from) { return *reinterpret_cast<float4 const*>(from); }
};
template <int kPart>
struct PartsFour {
  CUTLASS_DEVICE static float4 load(cutlass::bfloat16_t const* from) { return join_four<kPart>(from); }
};

// Coord: AccCoord of S. The operands' tail in K is zero-filled.
template <typename Coord, typename LayoutA, typename LayoutB, typename FourA = PlainFour, typename FourB = PlainFour>
struct FmaProduct {
  static constexpr int kChunk = 16;                                         // products in one PlainSum
  static constexpr int kBlock = Coord::kColumns < 8 ? Coord::kColumns : 8;  // columns at a time: fewer sums live

  // sums[i][j] takes in columns [k, k + 4) of row i's query and the key in column j0 + j.
  template <typename Sum, typename Element>
  CUTLASS_DEVICE static void add_four(Sum (&sums)[Coord::kRows][kBlock], Element const* a, LayoutA const& layout_a,
                                      Element const* b, LayoutB const& layout_b, int row0, int column0, int lane,
                                      int j0, int k) {
    float4 rows[Coord::kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Coord::kRows; ++i) {
      rows[i] = FourA::load(a + layout_a({row0 + Coord::row(lane, i), k}));
    }
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < kBlock; ++j) {
      const int column = column0 + Coord::column(lane, j0 + j);
      const float4 key = FourB::load(b + layout_b({k, column}));
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Coord::kRows; ++i) {
        sums[i][j].add(rows[i].x, key.x);
        sums[i][j].add(rows[i].y, key.y);
        sums[i][j].add(rows[i].z, key.z);
        sums[i][j].add(rows[i].w, key.w);
      }
    }
  }

  // acc += A B over `depth` columns of K, in sums of kChunk products.
  template <typename Fragment, typename Element>
  CUTLASS_DEVICE static void add(Fragment& acc, Element const* a, LayoutA const& layout_a, Element const* b,
                                 LayoutB const& layout_b, int row0, int column0, int lane, int depth) {
    CUTLASS_PRAGMA_UNROLL
    for (int j0 = 0; j0 < Coord::kColumns; j0 += kBlock) {
#pragma unroll 1
      for (int k0 = 0; k0 < depth; k0 += kChunk) {
        PlainSum sums[Coord::kRows][kBlock];
#pragma unroll 1
        for (int k = k0; k < k0 + kChunk && k < depth; k += 4) {
          add_four(sums, a, layout_a, b, layout_b, row0, column0, lane, j0, k);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Coord::kRows; ++i) {
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kBlock; ++j) acc[Coord::index(i, j0 + j)] += sums[i][j].value();
        }
      }
    }
  }
};

// Sums of four products, added up with their rounding errors: what is equal from one to the next (values that repeat)
// errs alike, and a plain sum of 64 would be off by several ulp.
struct SumOfFours {
  float sum = 0.f, error = 0.f;
  CUTLASS_DEVICE void add(float four) {
    const float total = __fadd_rn(sum, four);
    error = __fadd_rn(error, sum_error(sum, four, total));
    sum = total;
  }
  CUTLASS_DEVICE float value() const { return corrected(sum, error); }
};

// acc += A[row0.., 0:depth] * B[0:depth, column0..] for the accumulators of one lane. Layouts: functions of (row,
// column) to elements; A's keeps four columns side by side. Columns of A and rows of B from depth up to the next
// multiple of 4 must be zero.
template <typename Coord, typename Fragment, typename LayoutA, typename LayoutB>
CUTLASS_DEVICE void multiply_by_fma(Fragment& acc, float const* a, LayoutA const& layout_a, float const* b,
                                    LayoutB const& layout_b, int row0, int column0, int lane, int depth) {
  constexpr int kBlock = Coord::kColumns < 4 ? Coord::kColumns : 4;  // columns at a time: fewer sums live
  CUTLASS_PRAGMA_UNROLL
  for (int j0 = 0; j0 < Coord::kColumns; j0 += kBlock) {
    SumOfFours sums[Coord::kRows][kBlock];
#pragma unroll 1
    for (int k = 0; k < depth; k += 4) {
      float rows[Coord::kRows][4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Coord::kRows; ++i) {
        *reinterpret_cast<float4*>(rows[i]) = PlainFour::load(a + layout_a({row0 + Coord::row(lane, i), k}));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kBlock; ++j) {
        const int column = column0 + Coord::column(lane, j0 + j);
        PlainSum four[Coord::kRows];
        CUTLASS_PRAGMA_UNROLL
        for (int d = 0; d < 4; ++d) {
          const float value = b[layout_b({k + d, column})];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < Coord::kRows; ++i) four[i].add(rows[i][d], value);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Coord::kRows; ++i) sums[i][j].add(four[i].value());
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Coord::kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < kBlock; ++j) acc[Coord::index(i, j0 + j)] += sums[i][j].value();
    }
  }
}

// The second product by FFMA: same use as ResidentMma, A and B in its layouts (fp32).
template <typename Core, int kStages>
class FmaMma : public cutlass::gemm::threadblock::MmaBase<typename Core::Shape, typename Core::MmaPolicy, kStages> {
 public:
  using Base = cutlass::gemm::threadblock::MmaBase<typename Core::Shape, typename Core::MmaPolicy, kStages>;
  using Operator = typename Base::Operator;
  using FragmentC = typename Operator::FragmentC;
  using WarpCount = typename Base::WarpCount;

  CUTLASS_DEVICE FmaMma(typename Base::SharedStorage& storage, int thread, int warp, int lane)
      : Base(storage, thread, warp, lane), a_(storage.operand_A.data()), b_(storage.operand_B.data()), lane_(lane) {
    row0_ = warp % WarpCount::kM * Operator::Shape::kM;
    column0_ = warp / WarpCount::kM * Operator::Shape::kN;
  }

  CUTLASS_DEVICE void operator()(FragmentC& acc, int depth) const {
    constexpr int kAll = Core::Shape::kK * kStages;
    multiply_by_fma<AccCoord<typename Operator::IteratorC>>(acc, a_, Base::SharedStorage::LayoutA(), b_,
                                                            Base::SharedStorage::LayoutB(), row0_, column0_, lane_,
                                                            depth < kAll ? depth : kAll);
  }

 private:
  float const *a_, *b_;
  int row0_, column0_, lane_;
};

}  // namespace chained
}  // namespace memeff
