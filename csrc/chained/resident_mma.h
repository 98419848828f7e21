// A product of two operands that lie whole in shared memory.
//
//   operand A: kM x (kK * kStages)      operand B: (kK * kStages) x kN      in the layouts of CUTLASS's DefaultMmaCore
//
// The second GEMM of the chain always (A = P, written by OperandStore; B = the value block), the first one too where
// the query tile and a key block fit. Derives from MmaBase: shared storage and the warp iterators are CUTLASS's.
#pragma once

#include <type_traits>

#include "chained/transposed_operand.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/threadblock/mma_base.h"

namespace memeff {
namespace chained {

// Warp operators of tensor cores convert their fragments (transform), SIMT and Volta ones do not.
template <typename Operator, typename = void>
struct HasTransform : std::false_type {};
template <typename Operator>
struct HasTransform<Operator, std::void_t<typename Operator::TransformedFragmentA>> : std::true_type {};

// Does an operator round fp32 operands to TF32? (SIMT names its fragments transformed too: as they are.)
template <typename Operator, typename = void>
struct RoundsToTf32 : std::false_type {};
template <typename Operator>
struct RoundsToTf32<
    Operator,
    std::enable_if_t<std::is_same<typename Operator::TransformedFragmentA::Element, cutlass::tfloat32_t>::value>>
    : std::true_type {};

// How fp32 operands are multiplied: as they are, or as three TF32 products, 3xTF32:
//   x = high + low, both rounded to TF32's 11 significand bits: about 2^-22 of x
//   a * b = low_a * high_b + high_a * low_b + high_a * high_b
// Tensor cores truncate when they accumulate, so a short sum starts from zero, takes the tiny corrections first and is
// added to the accumulator by FADD: one truncation at full magnitude a sum (measured in docs/performance.md).
//   kExact        a sum a step of kGroupK
//   kTransposed   the same with A and B in each other's place: the bits of kExact for B^T A^T
//   kShort        a sum two steps, fewer instructions; for gradients
enum class Fp32Split { kNone, kExact, kTransposed, kShort };

// kAhead: fragments are loaded this many steps (0 or 1) before their use; 0 needs fewer registers.
// kChunk > 0: so many stages are summed from zero, then added (SIMT: a long running sum rounds at every product).
// kTransposedB > 0 (fp32): B lies as operand B of another ResidentMma, kTransposedB elements a row
// (transposed_operand.h).
template <typename Core, int kStages, int kAhead, Fp32Split kSplit, int kChunk = 0, int kTransposedB = 0>
class ResidentMma
    : public cutlass::gemm::threadblock::MmaBase<typename Core::Shape, typename Core::MmaPolicy, kStages> {
 public:
  using Base = cutlass::gemm::threadblock::MmaBase<typename Core::Shape, typename Core::MmaPolicy, kStages>;
  using Operator = typename Base::Operator;
  using FragmentC = typename Operator::FragmentC;
  using WarpCount = typename Base::WarpCount;
  static constexpr int kGroupK = Operator::Policy::MmaShape::kK;     // columns of A in one step
  static constexpr int kGroupsPerStage = Base::kWarpGemmIterations;  // steps in one stage
  static constexpr int kGroups = kGroupsPerStage * kStages;
  // fp32 operands rounded to TF32.
  static constexpr bool kTf32 = kSplit == Fp32Split::kNone && RoundsToTf32<Operator>::value;

  CUTLASS_DEVICE ResidentMma(typename Base::SharedStorage& storage, int thread, int warp, int lane)
      : Base(storage, thread, warp, lane) {
    this->warp_tile_iterator_A_.add_tile_offset({warp % WarpCount::kM, 0});
    this->warp_tile_iterator_B_.add_tile_offset({0, warp / WarpCount::kM});
  }

  // Operands that do not lie side by side.
  CUTLASS_DEVICE ResidentMma(typename Base::TensorRefA a, typename Base::TensorRefB b, int thread, int warp, int lane)
      : ResidentMma(*reinterpret_cast<typename Base::SharedStorage*>(a.data()), thread, warp, lane) {
    this->warp_tile_iterator_B_ = typename Operator::IteratorB(b, lane);
    this->warp_tile_iterator_B_.add_tile_offset({0, warp / WarpCount::kM});
    b_ = b.data();
    column0_ = warp / WarpCount::kM * Operator::Shape::kN;
    lane_ = lane;
  }

  // acc += A[:, 0:depth] * B[0:depth, :]. Columns of A and rows of B from depth up to the next multiple of 2 kGroupK
  // must be finite (zero-filled); those beyond are not touched.
  CUTLASS_DEVICE void operator()(FragmentC& acc, int depth) const {
    if constexpr (kSplit == Fp32Split::kShort) {
      if (depth <= kFewProducts) {
        multiply_split<true>(acc, depth);
      } else {
        multiply_split<false>(acc, depth);
      }
    } else if constexpr (kSplit != Fp32Split::kNone) {
      multiply_split<false>(acc, depth);
    } else if constexpr (kChunk > 0) {
      multiply_chunks(acc, depth);
    } else if (depth > (kGroups - 1) * kGroupK) {
      multiply<true>(acc, depth);
    } else {
      multiply<false>(acc, depth);
    }
  }
  // TF32. exact_a: what rounding takes from A is multiplied too.
  CUTLASS_DEVICE void operator()(FragmentC& acc, int depth, bool exact_a) const {
    static_assert(kTf32, "rounded operands");
    if (exact_a) {
      multiply<false, true>(acc, depth);
    } else {
      (*this)(acc, depth);
    }
  }

 private:
  using FragmentA = typename Operator::FragmentA;
  using FragmentB = typename Operator::FragmentB;

  static constexpr int kFewProducts = 4;  // kShort: up to so many rows of B, what two parts leave of a number shows

  // For kTransposedB.
  typename Operator::ElementB const* b_ = nullptr;
  int column0_ = 0, lane_ = 0;

  CUTLASS_DEVICE auto operand_b() const {
    if constexpr (kTransposedB > 0) {
      return TransposedOperand<FragmentB, Operator::Shape::kN, kTransposedB>(b_, column0_, lane_);
    } else {
      return this->warp_tile_iterator_B_;
    }
  }

  template <bool kWhole, bool kExactA = false>
  CUTLASS_DEVICE void multiply(FragmentC& acc, int depth) const {
    auto a = this->warp_tile_iterator_A_;
    auto b = operand_b();
    FragmentA frag_a[2];
    FragmentB frag_b[2];
    if (kAhead) load(a, b, frag_a[0], frag_b[0], 0);
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      if (!kWhole && group * kGroupK >= depth) break;
      const int next = group + kAhead;
      if (next < kGroups) load(a, b, frag_a[next & 1], frag_b[next & 1], next);
      if constexpr (kExactA) step(acc, rest_of(frag_a[group & 1]), frag_b[group & 1]);
      step(acc, frag_a[group & 1], frag_b[group & 1]);
    }
  }
  // What rounding to TF32 takes away; 0 of what is not finite.
  CUTLASS_DEVICE static FragmentA rest_of(FragmentA const& a) {
    Operator mma;
    typename Operator::TransformedFragmentA rounded;
    typename Operator::TransformedFragmentB unused;
    mma.transform(rounded, unused, a, FragmentB());
    FragmentA rest;
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < FragmentA::kElements; ++e) {
      const float left = a[e] - __uint_as_float(reinterpret_cast<uint32_t const*>(&rounded)[e]);
      rest[e] = fabsf(left) <= fabsf(a[e]) ? left : 0.f;
    }
    return rest;
  }

  CUTLASS_DEVICE void multiply_chunks(FragmentC& acc, int depth) const {
    auto a = this->warp_tile_iterator_A_;
    auto b = operand_b();
#pragma unroll 1
    for (int chunk = 0; chunk < kStages; chunk += kChunk) {
      if (chunk * kGroupsPerStage * kGroupK >= depth) return;
      FragmentC sum;
      sum.clear();
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kChunk * kGroupsPerStage; ++group) {
        FragmentA frag_a;
        FragmentB frag_b;
        load(a, b, frag_a, frag_b, group);
        step(sum, frag_a, frag_b);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < FragmentC::kElements; ++e) acc[e] += sum[e];
    }
  }

  // Stages are a real loop: unrolled, the splits of all of them would be pulled up until registers spill. kExact: the
  // steps of a stage are added up before they join the accumulator, since a running sum rounds at every addition.
  template <bool kFew>
  CUTLASS_DEVICE void multiply_split(FragmentC& acc, int depth) const {
    constexpr bool kByStage = kSplit != Fp32Split::kShort;
    constexpr int kSteps = !kByStage && kGroupsPerStage % 2 == 0 ? 2 : 1;
    auto a = this->warp_tile_iterator_A_;
    auto b = operand_b();
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      if (stage * kGroupsPerStage * kGroupK >= depth) return;
      FragmentC part;
      if constexpr (kByStage) part.clear();
      FragmentC& to = kByStage ? part : acc;
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < kGroupsPerStage; group += kSteps) {
        if ((stage * kGroupsPerStage + group) * kGroupK >= depth) break;
        FragmentC sum;
        sum.clear();
        CUTLASS_PRAGMA_UNROLL
        for (int step = 0; step < kSteps; ++step) {
          FragmentA frag_a;
          FragmentB frag_b;
          load(a, b, frag_a, frag_b, group + step);
          if constexpr (kFew) rest_step(sum, frag_a, frag_b);
          split_step(sum, frag_a, frag_b);
        }
        add(to, sum);
      }
      if constexpr (kByStage) add(acc, part);
    }
  }
  CUTLASS_DEVICE static void add(FragmentC& to, FragmentC const& sum) {
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < FragmentC::kElements; ++e) to[e] += sum[e];
  }

  template <typename IteratorB>
  CUTLASS_DEVICE static void load(typename Operator::IteratorA& a, IteratorB& b, FragmentA& frag_a, FragmentB& frag_b,
                                  int group) {
    a.set_kgroup_index(group % kGroupsPerStage);
    b.set_kgroup_index(group % kGroupsPerStage);
    a.load(frag_a);
    b.load(frag_b);
    ++a;
    ++b;
  }

  // `high` is rounded to nearest by adding half of the last place that TF32 keeps to the bits, `low` by a factor that
  // adds 1/3 to 2/3 of it (the cut is the hardware's). So NaN stays NaN: the addition wraps that of all ones, which is
  // what GPUs make, to 0, and `low` shows it. Of an infinity the rest is NaN too.
  template <int kCount, typename Tf32>
  CUTLASS_DEVICE static void split(cutlass::Array<float, kCount> const& x, cutlass::Array<Tf32, kCount>& high,
                                   cutlass::Array<Tf32, kCount>& low) {
    constexpr uint32_t kHalfUlp = 0x1000, kKept = 0xffffe000;  // TF32 keeps all but the last 13 bits of fp32
    constexpr float kRound = 1.f + 4.f / 3.f / 4096.f;
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kCount; ++e) {
      const float rounded = __uint_as_float((__float_as_uint(x[e]) + kHalfUlp) & kKept);
      high[e] = Tf32::bitcast(__float_as_uint(rounded));
      low[e] = Tf32::bitcast(__float_as_uint(__fmul_rn(__fsub_rn(x[e], rounded), kRound)));
    }
  }

  // What high and low leave of a number: 2^-22 of it.
  template <int kCount, typename Tf32>
  CUTLASS_DEVICE static void split_rest(cutlass::Array<float, kCount> const& x, cutlass::Array<Tf32, kCount>& high,
                                        cutlass::Array<Tf32, kCount>& low, cutlass::Array<Tf32, kCount>& rest) {
    split(x, high, low);
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kCount; ++e) {
      low[e] = Tf32::bitcast(low[e].raw() & 0xffffe000);  // as the tensor cores cut it
      rest[e] = Tf32::bitcast(__float_as_uint((x[e] - float(high[e])) - float(low[e])));
    }
  }
  // The products that split_step drops.
  CUTLASS_DEVICE static void rest_step(FragmentC& sum, FragmentA const& frag_a, FragmentB const& frag_b) {
    Operator mma;
    typename Operator::TransformedFragmentA high_a, low_a, rest_a;
    typename Operator::TransformedFragmentB high_b, low_b, rest_b;
    split_rest(frag_a, high_a, low_a, rest_a);
    split_rest(frag_b, high_b, low_b, rest_b);
    mma(sum, rest_a, high_b, sum);
    mma(sum, high_a, rest_b, sum);
    mma(sum, low_a, low_b, sum);
  }

  CUTLASS_DEVICE static void split_step(FragmentC& sum, FragmentA const& frag_a, FragmentB const& frag_b) {
    Operator mma;
    typename Operator::TransformedFragmentA high_a, low_a;
    typename Operator::TransformedFragmentB high_b, low_b;
    split(frag_a, high_a, low_a);
    split(frag_b, high_b, low_b);
    if constexpr (kSplit == Fp32Split::kTransposed) {
      mma(sum, high_a, low_b, sum);
      mma(sum, low_a, high_b, sum);
    } else {
      mma(sum, low_a, high_b, sum);
      mma(sum, high_a, low_b, sum);
    }
    mma(sum, high_a, high_b, sum);
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
