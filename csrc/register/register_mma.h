// The second product of the chain with the weights in registers: S's accumulators are the product's operand A as they
// lie, so P never passes through shared memory.
//
//   accumulators of S, m16n8, two tiles side by side       operand A of m16n8k16
//     row g      c0 c1 | c0' c1'                              a0 a1 | a4 a5
//     row g + 8  c2 c3 | c2' c3'                              a2 a3 | a6 a7         g = lane / 4
//
// B = the value block, in shared memory as in chained/resident_mma.h. A warp must own whole rows of S.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass/gemm/threadblock/mma_base.h"
#include "cutlass/numeric_conversion.h"

namespace memeff {
namespace registers {

// CoordS: AccCoord of S. kAhead: fragments of B are loaded this many steps (0 or 1) before their use.
template <typename Core, int kStages, int kAhead, typename CoordS>
class RegisterMma
    : public cutlass::gemm::threadblock::MmaBase<typename Core::Shape, typename Core::MmaPolicy, kStages> {
 public:
  using Base = cutlass::gemm::threadblock::MmaBase<typename Core::Shape, typename Core::MmaPolicy, kStages>;
  using Operator = typename Base::Operator;
  using FragmentC = typename Operator::FragmentC;
  using Element = typename Operator::ElementA;
  static constexpr int kGroupK = Operator::Policy::MmaShape::kK;  // keys in one step
  static constexpr int kGroupsPerStage = Base::kWarpGemmIterations;
  static constexpr int kGroups = kGroupsPerStage * kStages;
  static_assert(kGroupK == 16 && CoordS::kQuadCells, "S as m16n8 accumulators, P as operand A of m16n8k16");
  static_assert(Base::WarpCount::kN == 1 && 4 * kGroups == CoordS::kColumns, "a warp owns whole rows of S");

  // Operand B alone.
  struct SharedStorage {
    decltype(Base::SharedStorage::operand_B) operand_B;
    CUTLASS_DEVICE typename Base::TensorRefB operand_B_ref() {
      return {operand_B.data(), Base::SharedStorage::LayoutB()};
    }
  };

  // Base only makes an iterator of operand A from what it is given; nothing reads it.
  CUTLASS_DEVICE RegisterMma(SharedStorage& storage, int thread, int warp, int lane)
      : Base(reinterpret_cast<typename Base::SharedStorage&>(storage), thread, warp, lane) {
    this->warp_tile_iterator_B_ = typename Operator::IteratorB(storage.operand_B_ref(), lane);
  }

  // acc += P * B[0:depth, :], P = s rounded to B's type. Rows of B from depth up to the next multiple of 2 kGroupK must
  // be finite (zero-filled); those beyond are not touched.
  template <typename FragmentS>
  CUTLASS_DEVICE void operator()(FragmentC& acc, FragmentS const& s, int depth) const {
    if (depth > (kGroups - 1) * kGroupK) {
      multiply<true>(acc, s, depth);
    } else {
      multiply<false>(acc, s, depth);
    }
  }

 private:
  using FragmentA = typename Operator::FragmentA;
  using FragmentB = typename Operator::FragmentB;

  template <bool kWhole, typename FragmentS>
  CUTLASS_DEVICE void multiply(FragmentC& acc, FragmentS const& s, int depth) const {
    auto b = this->warp_tile_iterator_B_;
    FragmentB frag_b[2];
    if (kAhead) load(b, frag_b[0], 0);
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      if (!kWhole && group * kGroupK >= depth) break;
      const int next = group + kAhead;
      if (next < kGroups) load(b, frag_b[next & 1], next);
      Operator mma;
      mma(acc, weights(s, group), frag_b[group & 1], acc);
    }
  }

  CUTLASS_DEVICE static void load(typename Operator::IteratorB& b, FragmentB& frag_b, int group) {
    b.set_kgroup_index(group % kGroupsPerStage);
    b.load(frag_b);
    ++b;
  }

  // Columns 16 group .. of P.
  template <typename FragmentS>
  CUTLASS_DEVICE static FragmentA weights(FragmentS const& s, int group) {
    FragmentA a;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int j = 4 * group + 2 * half;
        cutlass::Array<float, 2> pair;
        pair[0] = s[CoordS::index(i, j)];
        pair[1] = s[CoordS::index(i, j + 1)];
        const cutlass::Array<Element, 2> both = cutlass::NumericArrayConverter<Element, float, 2>::convert(pair);
        const int at = i / 2 * 8 + half * 4 + i % 2 * 2;
        a[at] = both[0];
        a[at + 1] = both[1];
      }
    }
    return a;
  }
};

}  // namespace registers
}  // namespace memeff
