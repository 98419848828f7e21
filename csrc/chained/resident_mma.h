// A product of two operands that lie whole in shared memory.
//
//   operand A: kM x (kK * kStages)      operand B: (kK * kStages) x kN      in the layouts of CUTLASS's DefaultMmaCore
//
// The second GEMM of the chain always (A = P, written by OperandStore; B = the value block), the first one too where the
// query tile and a key block fit. Derives from MmaBase: shared storage and the warp iterators are CUTLASS's.
#pragma once

#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/gemm/threadblock/mma_base.h"

namespace memeff {
namespace chained {

// Warp operators of tensor cores convert their fragments (transform), SIMT and Volta ones do not.
template <typename Operator, typename = void>
struct HasTransform : std::false_type {};
template <typename Operator>
struct HasTransform<Operator, std::void_t<typename Operator::TransformedFragmentA>> : std::true_type {};

template <typename Core, int kStages>
class ResidentMma : public cutlass::gemm::threadblock::MmaBase<typename Core::Shape, typename Core::MmaPolicy, kStages> {
 public:
  using Base = cutlass::gemm::threadblock::MmaBase<typename Core::Shape, typename Core::MmaPolicy, kStages>;
  using Operator = typename Base::Operator;
  using FragmentC = typename Operator::FragmentC;
  using WarpCount = typename Base::WarpCount;
  static constexpr int kGroupK = Operator::Policy::MmaShape::kK;                // columns of A in one step
  static constexpr int kGroupsPerStage = Base::kWarpGemmIterations;             // steps in one stage
  static constexpr int kGroups = kGroupsPerStage * kStages;

  CUTLASS_DEVICE ResidentMma(typename Base::SharedStorage& storage, int thread, int warp, int lane)
      : Base(storage, thread, warp, lane) {
    this->warp_tile_iterator_A_.add_tile_offset({warp % WarpCount::kM, 0});
    this->warp_tile_iterator_B_.add_tile_offset({0, warp / WarpCount::kM});
  }

  // acc += A[:, 0:depth] * B[0:depth, :]. Columns of A and rows of B from depth up to the next multiple of kGroupK must
  // be finite (zero-filled); those beyond are not touched.
  CUTLASS_DEVICE void operator()(FragmentC& acc, int depth) const {
    if (depth > (kGroups - 1) * kGroupK) {
      multiply<true>(acc, depth);
    } else {
      multiply<false>(acc, depth);
    }
  }

 private:
  using FragmentA = typename Operator::FragmentA;
  using FragmentB = typename Operator::FragmentB;

  template <bool kWhole>
  CUTLASS_DEVICE void multiply(FragmentC& acc, int depth) const {
    auto a = this->warp_tile_iterator_A_;
    auto b = this->warp_tile_iterator_B_;
    FragmentA frag_a[2];
    FragmentB frag_b[2];
    load(a, b, frag_a[0], frag_b[0], 0);
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      if (!kWhole && group * kGroupK >= depth) break;
      if (group + 1 < kGroups) load(a, b, frag_a[(group + 1) & 1], frag_b[(group + 1) & 1], group + 1);
      step(acc, frag_a[group & 1], frag_b[group & 1]);
    }
  }

  CUTLASS_DEVICE static void load(typename Operator::IteratorA& a, typename Operator::IteratorB& b, FragmentA& frag_a,
                                  FragmentB& frag_b, int group) {
    a.set_kgroup_index(group % kGroupsPerStage);
    b.set_kgroup_index(group % kGroupsPerStage);
    a.load(frag_a);
    b.load(frag_b);
    ++a;
    ++b;
  }

  CUTLASS_DEVICE static void step(FragmentC& acc, FragmentA const& frag_a, FragmentB const& frag_b) {
    Operator mma;
    if constexpr (HasTransform<Operator>::value) {
      typename Operator::TransformedFragmentA a;
      typename Operator::TransformedFragmentB b;
      mma.transform(a, b, frag_a, frag_b);
      mma(acc, a, b, acc);
    } else {
      mma(acc, frag_a, frag_b, acc);
    }
  }
};

}  // namespace chained
}  // namespace memeff
