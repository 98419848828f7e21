// Products of fp32 operands in three bf16 parts (split_parts.h), split once on their way into shared memory:
//
//   SplitMma            both operands in shared memory, one part after the other in the layouts of CUTLASS's bf16 core
//   SplitRegisterMma    A = P, the accumulators of S as they lie, split in registers (register/register_mma.h)
//
// Tensor cores cut what they add, so every step of 16 starts from zero, takes the small products first, and is added to
// the accumulator by FADD: one cut at full magnitude a step.
#pragma once

#include "chained/split_parts.h"
#include "cutlass/arch/mma.h"
#include "cutlass/cutlass.h"
#include "cutlass/gemm/threadblock/mma_base.h"
#include "cutlass/gemm/warp/default_mma_tensor_op.h"

namespace memeff {
namespace chained {

// One warp's steps. Operator: CUTLASS's operator for the whole warp tile; the tile is worked off in chunks of its
// columns, so that the step's own sums need few registers: eight instructions wide, enough to hide their latency.
// kTransposed: parts of A and B exchange their places in the order of sums, which gives the bits of kTransposed = false
// for B^T A^T.
// kApart: p0 q0 gets a sum of its own, exact where no product is 2^8 times smaller than the largest, and is added
// first: the accumulator is rounded to nearest twice a step and never cut, once if it was 0. kAsked: columns of a
// chunk, 0: as many as pay.
template <typename Operator_, bool kTransposed, bool kApart = false, int kAsked = 0>
struct SplitStep {
  using Operator = Operator_;
  using Shape = typename Operator::Shape;
  static constexpr int kWanted = kAsked > 0 ? kAsked : Shape::kM >= 32 || Shape::kN >= 256 ? 32 : 64;
  static constexpr int kColumns = Shape::kN < kWanted ? Shape::kN : kWanted;
  static constexpr int kChunks = Shape::kN / kColumns;
  static_assert(Shape::kN % kColumns == 0, "chunks must fill the warp tile");
  static constexpr int kGroupK = Operator::Policy::MmaShape::kK;
  static_assert(kGroupK == 16, "bf16, m16n8k16");
  using Chunk = typename cutlass::gemm::warp::DefaultMmaTensorOp<
      cutlass::gemm::GemmShape<Shape::kM, kColumns, Shape::kK>, typename Operator::Policy::MmaShape,
      cutlass::bfloat16_t, typename Operator::LayoutA, cutlass::bfloat16_t, typename Operator::LayoutB, float,
      cutlass::layout::RowMajor>::Type;
  using FragmentA = typename Chunk::FragmentA;
  using FragmentB = typename Chunk::FragmentB;
  using FragmentC = typename Operator::FragmentC;
  using IteratorA = typename Chunk::IteratorA;
  using IteratorB = typename Chunk::IteratorB;

  template <int kPart, typename Iterator, typename Fragment>
  CUTLASS_DEVICE static void load(Iterator const& from, Fragment& fragment, int part) {
    from.load_with_byte_offset(fragment, part * kPart * int(sizeof(cutlass::bfloat16_t)));
  }
  template <int kPart, typename Iterator, typename Fragment>
  CUTLASS_DEVICE static void load_all(Iterator const& from, Fragment (&parts)[kParts]) {
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kParts; ++part) load<kPart>(from, parts[part], part);
  }

  // Columns [chunk * kColumns, + kColumns) of acc += A B, one part of B after the other, the largest products last:
  //   p0 q2 | p1 q1, p0 q1 | p2 q0, p1 q0, p0 q0
  template <int kPartB, typename Accumulators>
  CUTLASS_DEVICE static void add(Accumulators& acc, FragmentA const (&a)[kParts], IteratorB const& from, int chunk) {
    typename Chunk::FragmentC sum;
    Chunk mma;
    constexpr int kLast = kApart ? 1 : 0;  // of the products of p0 and q0
    if constexpr (kApart) {
      FragmentB b;
      load<kPartB>(from, b, 0);
      sum.clear();
      mma(sum, a[0], b, sum);
      add_up(acc, sum, chunk);
    }
    sum.clear();
    if constexpr (kTransposed) {  // the same with p and q exchanged
      FragmentB b[kParts];
      load_all<kPartB>(from, b);
      CUTLASS_PRAGMA_UNROLL
      for (int of_a = kParts - 1; of_a >= 0; --of_a) {
        CUTLASS_PRAGMA_UNROLL
        for (int of_b = kParts - 1 - of_a; of_b >= (of_a == 0 ? kLast : 0); --of_b) mma(sum, a[of_a], b[of_b], sum);
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int of_b = kParts - 1; of_b >= 0; --of_b) {
        FragmentB b;
        load<kPartB>(from, b, of_b);
        CUTLASS_PRAGMA_UNROLL
        for (int of_a = kParts - 1 - of_b; of_a >= (of_b == 0 ? kLast : 0); --of_a) mma(sum, a[of_a], b, sum);
      }
    }
    add_up(acc, sum, chunk);
  }
  template <typename Accumulators>
  CUTLASS_DEVICE static void add_up(Accumulators& acc, typename Chunk::FragmentC const& sum, int chunk) {
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < Chunk::FragmentC::kElements; ++e) acc[chunk * Chunk::FragmentC::kElements + e] += sum[e];
  }
};

// Operand buffers: three parts each.
template <typename Storage, typename RefA, typename RefB>
struct SplitStorage {
  static constexpr int kPartA = Storage::ShapeA::kCount, kPartB = Storage::ShapeB::kCount;  // elements
  cutlass::AlignedBuffer<cutlass::bfloat16_t, kParts * kPartA> operand_A;
  cutlass::AlignedBuffer<cutlass::bfloat16_t, kParts * kPartB> operand_B;

  CUTLASS_DEVICE static auto LayoutA() { return Storage::LayoutA(); }
  CUTLASS_DEVICE static auto LayoutB() { return Storage::LayoutB(); }
  CUTLASS_DEVICE RefA operand_A_ref() { return {operand_A.data(), LayoutA()}; }
  CUTLASS_DEVICE RefB operand_B_ref() { return {operand_B.data(), LayoutB()}; }
};

// Same use as ResidentMma.
template <typename Core, int kStages, bool kTransposed, bool kApart>
class SplitMma {
  using Stock = cutlass::gemm::threadblock::MmaBase<typename Core::Shape, typename Core::MmaPolicy, kStages>;

 public:
  using Operator = typename Stock::Operator;
  using FragmentC = typename Operator::FragmentC;
  using WarpCount = typename Stock::WarpCount;
  struct Base {
    using TensorRefA = typename Stock::TensorRefA;
    using TensorRefB = typename Stock::TensorRefB;
    using SharedStorage = SplitStorage<typename Stock::SharedStorage, TensorRefA, TensorRefB>;
  };
  using Storage = typename Base::SharedStorage;
  using Step = SplitStep<Operator, kTransposed, kApart>;

  CUTLASS_DEVICE SplitMma(Storage& storage, int, int warp, int lane)
      : SplitMma(storage.operand_A_ref(), storage.operand_B_ref(), 0, warp, lane) {}
  CUTLASS_DEVICE SplitMma(typename Base::TensorRefA a, typename Base::TensorRefB b, int, int warp, int lane)
      : a_(a, lane), b_(b, lane) {
    a_.add_tile_offset({warp % WarpCount::kM, 0});
    b_.add_tile_offset({0, warp / WarpCount::kM * Step::kChunks});
  }

  // acc += A[:, 0:depth] * B[0:depth, :]. Columns of A and rows of B from depth up to the next multiple of 16 must be
  // zero; those beyond are not touched. (A branch a step keeps the loads of one step from being pulled before another,
  // where no registers are left for them; two warps a scheduler hide them.)
  CUTLASS_DEVICE void operator()(FragmentC& acc, int depth) const {
    auto a = a_;
    typename Step::IteratorB b[Step::kChunks];
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < Step::kChunks; ++chunk) {
      b[chunk] = b_;
      b[chunk].add_tile_offset({0, chunk});
    }
#pragma unroll 1
    for (int stage = 0; stage < kStages; ++stage) {
      CUTLASS_PRAGMA_UNROLL
      for (int group = 0; group < Stock::kWarpGemmIterations; ++group) {
        if ((stage * Stock::kWarpGemmIterations + group) * Step::kGroupK >= depth) return;
        typename Step::FragmentA parts_a[kParts];
        a.set_kgroup_index(group);
        Step::template load_all<Storage::kPartA>(a, parts_a);
        ++a;
        CUTLASS_PRAGMA_UNROLL
        for (int chunk = 0; chunk < Step::kChunks; ++chunk) {
          b[chunk].set_kgroup_index(group);
          Step::template add<Storage::kPartB>(acc, parts_a, b[chunk], chunk);
          ++b[chunk];
        }
      }
    }
  }

 private:
  typename Step::IteratorA a_;
  typename Step::IteratorB b_;
};

// acc += P B, P = the accumulators of a product whose warps lie in a grid of WarpCount. CoordS: their AccCoord. Where
// kShares = WarpCount::kN > 1 warps share rows of P, each contracts its own columns of P over all columns of B: `Wide`
// holds the sums of the warp's rows and all columns, and the warps of a row add theirs up once, at the end (share).
template <typename Core, int kStages, typename CoordS>
class SplitRegisterMma {
 public:
  using Base = cutlass::gemm::threadblock::MmaBase<typename Core::Shape, typename Core::MmaPolicy, kStages>;
  using Operator = typename Base::Operator;
  using FragmentC = typename Operator::FragmentC;
  using WarpCount = typename Base::WarpCount;
  static constexpr int kShares = WarpCount::kN;
  using Wide = cutlass::Array<float, kShares * FragmentC::kElements>;
  using Step = SplitStep<Operator, false>;
  static constexpr int kChunks = kShares * Step::kChunks;
  static constexpr int kPartB = Base::SharedStorage::ShapeB::kCount;
  static constexpr int kGroupsPerStage = Base::kWarpGemmIterations;
  static constexpr int kGroups = CoordS::kColumns / 4;  // of 16 rows of B, those of one warp
  static_assert(CoordS::kQuadCells && kGroups * kShares == kGroupsPerStage * kStages, "S as m16n8 accumulators");
  static_assert(kShares == 1 || kGroupsPerStage % kGroups == 0, "a warp's rows of B lie within one stage");

  // Operand B alone.
  struct SharedStorage {
    cutlass::AlignedBuffer<cutlass::bfloat16_t, kParts * kPartB> operand_B;
    CUTLASS_DEVICE typename Base::TensorRefB operand_B_ref() {
      return {operand_B.data(), Base::SharedStorage::LayoutB()};
    }
  };

  CUTLASS_DEVICE SplitRegisterMma(SharedStorage& storage, int thread, int warp, int lane)
      : SplitRegisterMma(storage.operand_B_ref(), thread, warp, lane) {}
  CUTLASS_DEVICE SplitRegisterMma(typename Base::TensorRefB b, int, int warp, int lane)
      : b_(b, lane), group0_(warp / WarpCount::kM * kGroups) {
    b_.add_tile_offset({group0_, 0});
  }

  // Rows of B from depth up to the next multiple of 16 must be zero; those beyond are not touched.
  template <typename FragmentS>
  CUTLASS_DEVICE void operator()(Wide& acc, FragmentS const& s, int depth) const {
    typename Step::IteratorB b[kChunks];
    CUTLASS_PRAGMA_UNROLL
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      b[chunk] = b_;
      b[chunk].add_tile_offset({0, chunk});
    }
    CUTLASS_PRAGMA_UNROLL
    for (int group = 0; group < kGroups; ++group) {
      if ((group0_ + group) * Step::kGroupK >= depth) return;
      typename Step::FragmentA parts_a[kParts];
      split_weights(parts_a, s, group);
      CUTLASS_PRAGMA_UNROLL
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        Step::template add<kPartB>(acc, parts_a, b[chunk], chunk);
        ++b[chunk];
      }
    }
  }

  // Elements of shared memory that share() needs.
  static constexpr int kShareElements = WarpCount::kCount * (kShares - 1) * FragmentC::kElements * 32;

  // The sum over the warps of a row, each of which takes its part of the columns, in the order of the warps. Barriers
  // before and after are the caller's.
  CUTLASS_DEVICE static void share(FragmentC& mine, Wide const& all, float* memory, int warp, int lane) {
    const int row = warp % WarpCount::kM, own = warp / WarpCount::kM;
    // [row][of whom][for whom, without itself][element][lane]
    const auto place = [&](int from, int to) {
      const int number = (row * kShares + from) * (kShares - 1) + (to > from ? to - 1 : to);
      return memory + number * FragmentC::kElements * 32 + lane;
    };
    CUTLASS_PRAGMA_UNROLL
    for (int to = 0; to < kShares; ++to) {
      if (to == own) continue;
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < FragmentC::kElements; ++e) place(own, to)[e * 32] = all[to * FragmentC::kElements + e];
    }
    if (kShares > 1) __syncthreads();
    mine.clear();
    CUTLASS_PRAGMA_UNROLL
    for (int from = 0; from < kShares; ++from) {
      if (from == own) {
        CUTLASS_PRAGMA_UNROLL
        for (int part = 0; part < kShares; ++part) {  // not indexed by `own`: registers
          if (part != own) continue;
          CUTLASS_PRAGMA_UNROLL
          for (int e = 0; e < FragmentC::kElements; ++e) mine[e] += all[part * FragmentC::kElements + e];
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < FragmentC::kElements; ++e) mine[e] += place(from, own)[e * 32];
      }
    }
  }

 private:
  typename Step::IteratorB b_;
  int group0_;

  // Columns 16 group .. of P as operand A of m16n8k16 (register/register_mma.h has the picture).
  template <typename FragmentS>
  CUTLASS_DEVICE static void split_weights(typename Step::FragmentA (&parts)[kParts], FragmentS const& s, int group) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int j = 4 * group + 2 * half;
        uint32_t pair[kParts];
        split_pair(s[CoordS::index(i, j)], s[CoordS::index(i, j + 1)], pair);
        CUTLASS_PRAGMA_UNROLL
        for (int part = 0; part < kParts; ++part) {
          reinterpret_cast<uint32_t*>(&parts[part])[i / 2 * 4 + half * 2 + i % 2] = pair[part];
        }
      }
    }
  }
};

}  // namespace chained
}  // namespace memeff
