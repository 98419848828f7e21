// What differs between GPU generations, as CUTLASS 2.x names it: instruction, operator, copies, epilogue.
#pragma once

#include "cutlass/arch/arch.h"
#include "cutlass/arch/mma.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/epilogue/threadblock/default_epilogue_simt.h"
#include "cutlass/epilogue/threadblock/default_epilogue_tensor_op.h"
#include "cutlass/epilogue/threadblock/default_epilogue_volta_tensor_op.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/threadblock/default_mma_core_simt.h"
#include "cutlass/gemm/threadblock/default_mma_core_sm70.h"
#include "cutlass/gemm/threadblock/default_mma_core_sm75.h"
#include "cutlass/gemm/threadblock/default_mma_core_sm80.h"
#include "cutlass/numeric_types.h"

namespace memeff {
namespace chained {

template <int kM, int kN, int kK>
using Gemm = cutlass::gemm::GemmShape<kM, kN, kK>;

// Every arch gives:
//   Element          in global memory            MmaElement   in shared memory
//   OpClass, ArchTag, Instruction, Operator      CUTLASS's names for the products
//   kAsync           cp.async fills shared memory; otherwise loads pass through registers
//   kQkStep          columns of K in one pipeline stage of the first product
//   kPvStep          keys in one stage of the second product's operands
//   kStageSums       fp32 sums of one key block start from zero and are added by FADD: tensor cores truncate when they
//                    accumulate, and P >= 0 makes the error systematic (docs/performance.md)
//   kSimt            FFMA; operand A is column-major in shared memory, the epilogue stores single elements

// Ampere and later. 16-bit: m16n8k16. fp32: 3xTF32 (kTf32 = false) or TF32, m16n8k8.
template <typename T>
struct Sm80 {
  using Element = T;
  using MmaElement = T;
  using ArchTag = cutlass::arch::Sm80;
  using OpClass = cutlass::arch::OpClassTensorOp;
  using Instruction = Gemm<16, 8, 16>;
  using Operator = cutlass::arch::OpMultiplyAdd;
  static constexpr bool kAsync = true;
  static constexpr int kQkStep = 64;
  static constexpr int kPvStep = 64;
  static constexpr bool kStageSums = false;
  static constexpr bool kSimt = false;
};

template <typename Operator_, bool kStage>
struct Sm80Float : Sm80<float> {
  using Instruction = Gemm<16, 8, 8>;
  using Operator = Operator_;
  static constexpr int kQkStep = 32;
  static constexpr int kPvStep = 32;
  static constexpr bool kStageSums = kStage;
};
using Sm80Fp32 = Sm80Float<cutlass::arch::OpMultiplyAddFastF32, true>;
using Sm80Tf32 = Sm80Float<cutlass::arch::OpMultiplyAdd, false>;

// 16-bit data that cp.async cannot move (alignment of one element): the same products, loads through registers.
template <typename T>
struct Sm80Unaligned : Sm80<T> {
  static constexpr bool kAsync = false;
};

// Turing: fp16, m16n8k8, ldmatrix, no cp.async.
template <typename T>
struct Sm75 : Sm80<T> {
  using ArchTag = cutlass::arch::Sm75;
  using Instruction = Gemm<16, 8, 8>;
  static constexpr bool kAsync = false;
  static constexpr int kQkStep = 32;
  static constexpr int kPvStep = 32;
};

// Volta: fp16, m8n8k4.
template <typename T>
struct Sm70 : Sm75<T> {
  using ArchTag = cutlass::arch::Sm70;
  using Instruction = Gemm<8, 8, 4>;
};

// FFMA: fp32, and bf16 where no tensor core knows it (sm70, sm75): converted on the way into shared memory.
template <typename T>
struct Simt : Sm75<T> {
  using MmaElement = float;
  using ArchTag = cutlass::arch::Sm70;
  using OpClass = cutlass::arch::OpClassSimt;
  using Instruction = Gemm<1, 1, 1>;
  static constexpr int kQkStep = 8;
  static constexpr int kPvStep = 8;
  static constexpr bool kSimt = true;
};

// The epilogue that CUTLASS pairs with a warp-level operator. kPerAccess: output elements in one store.
template <typename Arch, typename Shape, typename WarpOperator, int kPerAccess>
struct EpilogueOf {
  template <int kCount>
  using Op = cutlass::epilogue::thread::LinearCombination<typename Arch::Element, kCount, float, float>;
  static constexpr bool kSimt = Arch::kSimt;
  static constexpr bool kVolta = std::is_same<typename Arch::ArchTag, cutlass::arch::Sm70>::value && !kSimt;

  template <bool kIsSimt, bool kIsVolta, typename = void>
  struct Select {
    using Type =
        typename cutlass::epilogue::threadblock::DefaultEpilogueTensorOp<Shape, WarpOperator, 1, Op<kPerAccess>, kPerAccess>::Epilogue;
  };
  template <typename Dummy>
  struct Select<true, false, Dummy> {
    using Type = typename cutlass::epilogue::threadblock::DefaultEpilogueSimt<Shape, WarpOperator, Op<1>, 1>::Epilogue;
  };
  template <typename Dummy>
  struct Select<false, true, Dummy> {
    using Type = typename cutlass::epilogue::threadblock::DefaultEpilogueVoltaTensorOp<Shape, WarpOperator, 1, Op<kPerAccess>,
                                                                                       kPerAccess>::Epilogue;
  };
  using Type = typename Select<kSimt, kVolta>::Type;
};

}  // namespace chained
}  // namespace memeff
