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
//   kQkStep          columns of K in one stage of the first product
//   kPvStep          keys in one stage of the second product's operands
//   kSplitFp32       fp32 products as three TF32 ones (resident_mma.h)
//   kPvChunk         0, or stages of the second product summed from zero and then added
//   kQkChunk         0, or columns of K summed from zero and then added: a stock loop's one long sum rounds K times
//   kOwnStream       K beyond the resident tiles: StreamedMma in place of EarlyStart over a stock main loop
//   kParts           of an operand in shared memory: 1, or fp32 as three bf16 numbers (split_parts.h)
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
  static constexpr bool kSplitFp32 = false;
  static constexpr bool kOwnStream = false;
  static constexpr int kQkChunk = 0;
  static constexpr int kPvChunk = 0;
  static constexpr int kParts = 1;
  static constexpr bool kSimt = false;
};

template <bool kSplit>
struct Sm80Float : Sm80<float> {
  using Instruction = Gemm<16, 8, 8>;
  static constexpr int kQkStep = 32;
  static constexpr int kPvStep = 32;
  static constexpr bool kSplitFp32 = kSplit;
  static constexpr bool kOwnStream = true;
};
using Sm80Fp32 = Sm80Float<true>;
using Sm80Tf32 = Sm80Float<false>;

// fp32 on bf16 tensor cores: K of the resident tiles only.
struct Sm80Split : Sm80<cutlass::bfloat16_t> {
  using Element = float;
  static constexpr int kParts = 3;
};

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
  static constexpr int kQkChunk = 64;
  static constexpr int kPvChunk = 2;  // 16 keys
};

// The pieces of the epilogue that CUTLASS pairs with a warp-level operator. kPerAccess: output elements in one store.
//
// Tensor cores take the plain fp32 iterators for every output type: the ones DefaultEpilogueTensorOp picks for half
// with eight elements a store are written for warp tiles up to 64 columns, and ours reach 320.
template <typename Arch, typename Shape, typename WarpOperator, int kPerAccess,
          typename = void>
struct EpilogueOf {  // tensor cores since Turing
  using Op = cutlass::epilogue::thread::LinearCombination<typename Arch::Element, kPerAccess, float, float>;
  using Stock = cutlass::epilogue::threadblock::DefaultEpilogueTensorOp<Shape, WarpOperator, 1, Op, kPerAccess>;
  using OutputTileIterator = typename Stock::OutputTileIterator;
  using AccumulatorFragmentIterator = typename Stock::AccumulatorFragmentIterator;
  using WarpTileIterator = cutlass::epilogue::warp::TileIteratorTensorOp<
      typename WarpOperator::Shape, typename WarpOperator::Policy::Operator::Shape, float, cutlass::layout::RowMajor>;
  using SharedLoadIterator =
      cutlass::epilogue::threadblock::SharedLoadIterator<typename Stock::OutputTileThreadMap::CompactedThreadMap,
                                                         float>;
  using Padding = typename Stock::Padding;
};

template <typename Arch, typename Shape, typename WarpOperator, int kPerAccess>
struct EpilogueOf<Arch, Shape, WarpOperator, kPerAccess,
                  std::enable_if_t<Arch::kSimt || std::is_same<typename Arch::ArchTag, cutlass::arch::Sm70>::value>> {
  template <int kCount>
  using Op = cutlass::epilogue::thread::LinearCombination<typename Arch::Element, kCount, float, float>;
  template <bool kSimt, typename = void>
  struct Select {
    using Type = typename cutlass::epilogue::threadblock::DefaultEpilogueSimt<Shape, WarpOperator, Op<1>, 1>::Epilogue;
  };
  template <typename Dummy>
  struct Select<false, Dummy> {
    using Type =
        typename cutlass::epilogue::threadblock::DefaultEpilogueVoltaTensorOp<Shape, WarpOperator, 1, Op<kPerAccess>,
                                                                              kPerAccess>::Epilogue;
  };
  using Stock = typename Select<Arch::kSimt>::Type;
  using OutputTileIterator = typename Stock::OutputTileIterator;
  using AccumulatorFragmentIterator = typename Stock::AccumulatorFragmentIterator;
  using WarpTileIterator = typename Stock::WarpTileIterator;
  using SharedLoadIterator = typename Stock::SharedLoadIterator;
  using Padding = typename Stock::Padding;
};

}  // namespace chained
}  // namespace memeff
