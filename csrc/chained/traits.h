// One traits type per kernel: everything the forward kernel needs is derived here from a row of csrc/kernels_rows.py.
//
// Memory plan of a thread block (bytes grow to the right; see docs/design.md):
//   [ Q | K block ]          first product's operands, or a stock pipeline's stages; the epilogue reuses them
//   [ P | V block ]          second product's operands
//   [ row scratch ]          maxima exchanged between warps, row scales of the epilogue
#pragma once

#include "chained/acc_coord.h"
#include "chained/arch.h"
#include "chained/early_start.h"
#include "chained/fma_product.h"
#include "chained/operand_store.h"
#include "chained/output_visitor.h"
#include "chained/resident_mma.h"
#include "chained/split_loader.h"
#include "chained/split_mma.h"
#include "chained/streamed_mma.h"
#include "chained/tile_loader.h"
#include "common/bias.h"
#include "common/dropout.h"
#include "common/softmax.h"
#include "common/visibility.h"
#include "cutlass/epilogue/threadblock/epilogue_with_visitor.h"
#include "cutlass/gemm/threadblock/default_mma.h"
#include "cutlass/gemm/threadblock/mma_pipelined.h"
#include "register/register_mma.h"

namespace memeff {
namespace chained {

// kM queries, kN keys, kValue columns of the output per thread block.
template <int kM_, int kN_, int kValue_>
struct Tile {
  static constexpr int kM = kM_, kN = kN_, kValue = kValue_;
};

// One warp's share of S (kM x kQkN) and of O (kM x kPvN). Both products give a warp the same rows, so the softmax state
// of a row stays in the registers of the lanes that hold its scores and its outputs.
template <int kM_, int kQkN_, int kPvN_>
struct Warp {
  static constexpr int kM = kM_, kQkN = kQkN_, kPvN = kPvN_;
};

// First product: the query tile stays in shared memory for K <= kMaxK, or both operands stream through a stock
// pipeline.
template <int kMaxK_>
struct ResidentQk {
  static constexpr bool kResident = true;
  static constexpr bool kCompensated = false;
  static constexpr int kMaxK = kMaxK_;
  static constexpr int kStages = 0;
};
template <int kStages_>
struct StreamedQk {
  static constexpr bool kResident = false;
  static constexpr bool kCompensated = false;
  static constexpr int kMaxK = 0;
  static constexpr int kStages = kStages_;
};
// fp32, few queries: streamed too, scores by FFMA in compensated sums (streamed_mma.h).
struct CompensatedQk : StreamedQk<2> {
  static constexpr bool kCompensated = true;
};

// Where O lives between key blocks: registers (Kv <= kValue, or one slab of it per thread block), or the fp32 output
// itself, a value tile at a time, read back by the epilogue's fp32 source (any Kv without recomputing S).
struct OutputInRegisters {
  static constexpr bool kInMemory = false, kForward = true, kTransposed = false, kWeightsInRegisters = false;
  static constexpr int kScores = 1,
                       kOutputs = 1;  // accumulators that live together during the first product
};
struct OutputInMemory : OutputInRegisters {
  static constexpr bool kInMemory = true;
};
// P as well (csrc/register).
struct WeightsInRegisters : OutputInRegisters {
  static constexpr bool kWeightsInRegisters = true;
};
// Backward pass (backward_traits.h): so many score tiles (S, dP) and output tiles at once. kTransposed: S^T = K Q^T.
template <int kScores_, int kOutputs_, bool kTransposed_>
struct GradientOutput {
  static constexpr bool kInMemory = false, kForward = false, kTransposed = kTransposed_, kWeightsInRegisters = false;
  static constexpr int kScores = kScores_, kOutputs = kOutputs_;
};

struct NoBias {
  static constexpr bool kBias = false, kDropout = false;
};
struct TensorBias {
  static constexpr bool kBias = true, kDropout = false;
};
struct DropoutOnly {
  static constexpr bool kBias = false, kDropout = true;
};
// Dropout, with or without a bias (decided at run time).
struct FullBias {
  static constexpr bool kBias = true, kDropout = true;
};

// The stock main loop of the streamed first product. DefaultMma composes it from the arch; SIMT with a 16-bit input
// needs iterators of the input's type before fp32 shared memory, which MmaPipelined converts between.
template <typename Arch, typename Shape, typename WarpShape, int kStages, int kAlignment>
struct StreamedMmaOf {
  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  using Type = typename cutlass::gemm::threadblock::DefaultMma<
      typename Arch::Element, Row, kAlignment, typename Arch::Element, Column, kAlignment, float, Row,
      typename Arch::OpClass, typename Arch::ArchTag, Shape, WarpShape, typename Arch::Instruction, kStages,
      typename Arch::Operator>::ThreadblockMma;
};
template <typename T, typename Shape, typename WarpShape, int kStages, int kAlignment>
struct StreamedMmaOf<Simt<T>, Shape, WarpShape, kStages, kAlignment> {
  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  using Core =
      cutlass::gemm::threadblock::DefaultMmaCore<Shape, WarpShape, Gemm<1, 1, 1>, float, Row, float, Column, float, Row,
                                                 cutlass::arch::OpClassSimt, 2, cutlass::arch::OpMultiplyAdd>;
  using IteratorA =
      cutlass::transform::threadblock::PredicatedTileIterator<cutlass::MatrixShape<Shape::kM, Shape::kK>, T, Row, 1,
                                                              typename Core::IteratorThreadMapA, kAlignment>;
  using IteratorB =
      cutlass::transform::threadblock::PredicatedTileIterator<cutlass::MatrixShape<Shape::kK, Shape::kN>, T, Column, 0,
                                                              typename Core::IteratorThreadMapB, kAlignment>;
  using Type =
      cutlass::gemm::threadblock::MmaPipelined<Shape, IteratorA, typename Core::SmemIteratorA, IteratorB,
                                               typename Core::SmemIteratorB, float, Row, typename Core::MmaPolicy>;
};

template <typename Arch_, typename Tile_, typename Warp_, typename Qk_, typename Output_, int kAlignment_,
          typename Bias_, int kBlocksPerSm_ = 1>
struct ForwardTraits {
  using Arch = Arch_;
  using Element = typename Arch::Element;
  using MmaElement = typename Arch::MmaElement;
  using Qk = Qk_;
  using Output = Output_;
  static constexpr int kTileM = Tile_::kM, kTileN = Tile_::kN, kValueTile = Tile_::kValue;
  static constexpr int kAlignment = kAlignment_;
  static constexpr bool kBias = Bias_::kBias, kDropout = Bias_::kDropout;
  using DropoutState = std::conditional_t<kDropout, DropoutHead, NoDropoutHead>;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;  // caps the registers so that this many fit
  static constexpr int kWarpsM = kTileM / Warp_::kM;
  static constexpr int kWarpsN = kTileN / Warp_::kQkN;  // > 1: a row's scores are spread over several warps
  static constexpr int kWarps = kWarpsM * kWarpsN;
  static constexpr int kThreads = 32 * kWarps;
  static_assert(kWarps == kWarpsM * (kValueTile / Warp_::kPvN), "both products must use the same warps");
  static_assert(kTileM % Warp_::kM == 0 && kTileN % Warp_::kQkN == 0 && kValueTile % Warp_::kPvN == 0,
                "warp tiles must fill the block's tile");

  using Row = cutlass::layout::RowMajor;
  using Column = cutlass::layout::ColumnMajor;
  template <typename Shape, typename WarpShape, typename LayoutB>
  using Core = cutlass::gemm::threadblock::DefaultMmaCore<Shape, WarpShape, typename Arch::Instruction, MmaElement, Row,
                                                          MmaElement, LayoutB, float, Row, typename Arch::OpClass,
                                                          Arch::kAsync ? 3 : 2, typename Arch::Operator>;

  // Accumulators of S and O live together during the first product; what is left of 255 registers decides whether its
  // fragments can be loaded a step ahead.
  static constexpr int kAccumulators =
      (Warp_::kM * (Output::kScores * Warp_::kQkN + Output::kOutputs * Warp_::kPvN)) / 32;
  static constexpr int kQkAhead = kAccumulators < 160 && !Arch::kSplitFp32 ? 1 : 0;
  static constexpr int kPvAhead = Warp_::kPvN < 320 && !Arch::kSplitFp32 ? 1 : 0;  // S is dead by then

  // S has the same bits in both passes, or P would not sum to 1.
  static constexpr Fp32Split kScoreSplit = !Arch::kSplitFp32     ? Fp32Split::kNone
                                           : Output::kTransposed ? Fp32Split::kTransposed
                                                                 : Fp32Split::kExact;
  static constexpr Fp32Split kPvSplit = !Arch::kSplitFp32  ? Fp32Split::kNone
                                        : Output::kForward ? Fp32Split::kExact
                                                           : Fp32Split::kShort;

  static constexpr bool kInParts = Arch::kParts > 1;  // operands in shared memory are bf16 parts of fp32 numbers

  // S = Q K^T
  static constexpr int kQkStep = Qk::kResident && Qk::kMaxK < Arch::kQkStep ? Qk::kMaxK : Arch::kQkStep;
  using QkShape = Gemm<kTileM, kTileN, kQkStep>;
  using QkWarpShape = Gemm<Warp_::kM, Warp_::kQkN, kQkStep>;

  template <typename Q, typename = void>
  struct QkOf {  // streamed
    using Mma = EarlyStart<typename StreamedMmaOf<Arch, QkShape, QkWarpShape, Q::kStages, kAlignment>::Type>;
    using Operator = typename Mma::Operator;
    struct NoLoader {};
    using QueryLoader = NoLoader;
    using KeyLoader = NoLoader;
  };
  // kElements: of the operand.
  template <typename Base, typename SmemIterator, bool kOperandA, int kElements>
  using LoaderOf = std::conditional_t<kInParts, SplitTileLoader<Base, SmemIterator, kOperandA, kElements>,
                                      AsyncTileLoader<Base, SmemIterator, kOperandA>>;
  // Both operands by our loaders: resident, or (kTile columns at a time) streamed.
  template <int kTile>
  struct LoadedQk {
    static_assert(Arch::kAsync, "the loaders of the first product use cp.async");
    static constexpr int kStages = kTile / kQkStep;
    using C = Core<QkShape, QkWarpShape, Column>;
    using Product = std::conditional_t<kInParts, SplitMma<C, kStages, Output::kTransposed, (kTile <= 64)>,
                                       ResidentMma<C, kStages, kQkAhead, kScoreSplit>>;
    using Operator = typename Product::Operator;
    template <typename ThreadMap>
    using Base = TileLoaderBase<Element, ThreadMap, kStages, StageAlong::kColumns, kQkStep, kAlignment>;
    using QueryLoader = LoaderOf<Base<typename C::IteratorThreadMapA>, typename C::SmemIteratorA, true, kTileM * kTile>;
    using KeyLoader = LoaderOf<Base<typename C::IteratorThreadMapB>, typename C::SmemIteratorB, false, kTileN * kTile>;
  };
  template <typename Q>
  struct QkOf<Q, std::enable_if_t<Q::kResident>> : LoadedQk<Q::kMaxK> {
    using Mma = typename LoadedQk<Q::kMaxK>::Product;
  };
  template <typename Q>
  struct QkOf<Q, std::enable_if_t<!Q::kResident && Arch::kOwnStream>> : LoadedQk<kQkStep> {
    using Loaded = LoadedQk<kQkStep>;
    using Plain = StreamedMma<typename Loaded::Product, typename Loaded::QueryLoader, typename Loaded::KeyLoader,
                              kQkStep, kDropout && Arch::kSplitFp32>;
    using Compensated = CompensatedMma<AccCoord<typename Loaded::Operator::IteratorC>, typename Loaded::Product,
                                       typename Loaded::QueryLoader, typename Loaded::KeyLoader, kQkStep>;
    using Mma = std::conditional_t<Q::kCompensated, Compensated, Plain>;
  };
  static constexpr bool kLoadedStream = !Qk::kResident && Arch::kOwnStream;
  using QkMma = typename QkOf<Qk>::Mma;
  using QueryLoader = typename QkOf<Qk>::QueryLoader;
  using KeyLoader = typename QkOf<Qk>::KeyLoader;
  using FragmentS = typename QkMma::FragmentC;
  // fma_product.h. In parts: where there are so few products that fp32 rounds less.
  static constexpr bool kFmaScores = (Arch::kSplitFp32 || kInParts) && Qk::kResident && Qk::kMaxK <= 32;
  static constexpr int kFmaDepth = kInParts ? 4 : 32, kFewFmaDepth = kInParts ? 16 : 32;
  using CoordS = AccCoord<typename QkOf<Qk>::Operator::IteratorC>;
  template <int kElements>
  using Four = std::conditional_t<kInParts, PartsFour<kElements>, PlainFour>;
  using FmaScores = FmaProduct<CoordS, typename QkOf<Qk>::Operator::LayoutA, typename QkOf<Qk>::Operator::LayoutB,
                               Four<kTileM * Qk::kMaxK>, Four<kTileN * Qk::kMaxK>>;

  // O += P V
  static constexpr int kPvStep = kTileN < Arch::kPvStep ? kTileN : Arch::kPvStep;
  static constexpr int kPvStages = kTileN / kPvStep;
  static_assert(kTileN % kPvStep == 0, "stages of P and V must fill the key block");
  using PvCore = Core<Gemm<kTileM, kValueTile, kPvStep>, Gemm<Warp_::kM, Warp_::kPvN, kPvStep>, Row>;
  // Backward, fp32: B of the output products is the resident tile that was B of the scores.
  static constexpr int kTransposedB =
      !Output::kForward && Qk::kResident && std::is_same<MmaElement, float>::value ? Qk::kMaxK : 0;
  template <bool kInRegisters, typename = void>
  struct PvOf {
    using Mma = std::conditional_t<Qk::kCompensated, FmaMma<PvCore, kPvStages>,
                                   ResidentMma<PvCore, kPvStages, kPvAhead, kPvSplit, Arch::kPvChunk, kTransposedB>>;
    using Storage = typename Mma::Base::SharedStorage;
  };
  template <typename Dummy>
  struct PvOf<true, Dummy> {
    template <bool kSplit, typename = void>
    struct Of {
      using Type = registers::RegisterMma<PvCore, kPvStages, kPvAhead, CoordS>;
    };
    template <typename Never>
    struct Of<true, Never> {
      using Type = SplitRegisterMma<PvCore, kPvStages, CoordS>;
    };
    using Mma = typename Of<kInParts>::Type;
    using Storage = typename Mma::SharedStorage;
  };
  // In parts the backward pass keeps P and dS in registers too.
  static constexpr bool kWeightsInRegisters = Output::kWeightsInRegisters || (kInParts && !Output::kForward);
  using PvMma = typename PvOf<kWeightsInRegisters>::Mma;
  template <typename Mma, typename = void>
  struct IsTf32 : std::false_type {};
  template <typename Mma>
  struct IsTf32<Mma, std::enable_if_t<Mma::kTf32>> : std::true_type {};
  static constexpr bool kTf32 = IsTf32<PvMma>::value;
  using FragmentO = typename PvMma::FragmentC;
  using CoordO = AccCoord<typename PvMma::Operator::IteratorC>;
  static_assert(CoordO::kRows == CoordS::kRows && CoordO::kRowMap == CoordS::kRowMap,
                "both products must give a lane the same rows");
  using ValueLoaderBase =
      TileLoaderBase<Element, typename PvCore::IteratorThreadMapB, kPvStages, StageAlong::kRows, kPvStep, kAlignment>;
  using ValueLoader =
      std::conditional_t<Arch::kAsync,
                         LoaderOf<ValueLoaderBase, typename PvCore::SmemIteratorB, false, kTileN * kValueTile>,
                         RegisterTileLoader<ValueLoaderBase, typename PvCore::SmemIteratorB, false>>;
  using ProbabilityStore = OperandStore<CoordS, MmaElement, typename PvMma::Operator::LayoutA, !Arch::kSimt>;

  // Output
  // Elements in one store. CUTLASS's thread map spreads a row over accesses of 256 bytes: 16-byte accesses need a tile
  // that is a multiple of that wide, others (320 columns of 16 bits) take 4-byte ones.
  static constexpr bool kWholeRows =
      kValueTile * int(sizeof(Element)) % 256 == 0 || kValueTile * int(sizeof(Element)) < 256;
  static constexpr int kPerStore = kAlignment == 1 || Arch::kSimt ? 1 : (kWholeRows ? 16 : 4) / int(sizeof(Element));
  using OutputShape = Gemm<kTileM, kValueTile, kPvStep>;
  using Parts = EpilogueOf<Arch, OutputShape, typename PvMma::Operator, kPerStore>;
  using OutputIterator = typename Parts::OutputTileIterator;
  using SourceIterator =
      cutlass::epilogue::threadblock::PredicatedTileIterator<typename OutputIterator::ThreadMap, float>;
  // fp32: O moves to the (fp32) output every so many keys. Rounding errors of a running sum grow with the root of the
  // number of additions; two levels keep them at torch's level for 65537 keys (docs/performance.md).
  static constexpr int kFlushKeys =
      std::is_same<Element, float>::value && (Qk::kResident || Qk::kCompensated) && Output::kForward ? 1024 : 0;
  static constexpr bool kHasSource = Output::kInMemory || kFlushKeys > 0;
  using Source = std::conditional_t<kHasSource, FloatSource<SourceIterator>, NoSource>;
  using Visitor = OutputVisitor<OutputIterator, Source>;
  using Epilogue = cutlass::epilogue::threadblock::EpilogueWithVisitor<
      Visitor, OutputShape, typename PvMma::Operator, 1, typename Parts::AccumulatorFragmentIterator,
      typename Parts::WarpTileIterator, typename Parts::SharedLoadIterator, typename Parts::Padding>;
  static_assert(!Output::kInMemory || std::is_same<Element, float>::value,
                "the output is the accumulator: it must be fp32");

  // Few queries, and K so small that nothing is aligned (K = 1): softmax.h, exp2_nearest.
  static constexpr bool kNearestExp =
      Qk::kCompensated || (kInParts && Qk::kResident && Qk::kMaxK <= 32 && kAlignment == 1);
  using Exponent = std::conditional_t<kBias, PlainLogitsOf<kNearestExp>, FoldedScaleOf<kNearestExp>>;

  struct Empty {};
  // The bias passes through shared memory: tiles of 64 keys of 16 bits, where that leaves as many blocks an SM. fp32
  // loads it in whole sectors anyway.
  static constexpr bool kStageBias =
      kBias && Arch::kAsync && sizeof(Element) == 2 && kTileN == kBiasKeys && (!Qk::kResident || Qk::kMaxK <= 128);
  // 16 bits an element: an fp32 bias is loaded directly, for want of room beside 128 queries.
  static constexpr int kBiasRowBytes = bias_row_bytes(2);
  template <int kQueries, int kRowBytes = kBiasRowBytes>
  using BiasStageOf = std::conditional_t<kStageBias, BiasStage<kQueries, kRowBytes>, Empty>;
  // In parts: where the copies of the next key or value block land.
  template <bool kWanted, typename = void>
  struct StagingOf {};
  template <typename Never>
  struct StagingOf<true, Never> {
    alignas(16) char staging[4 * kTileN * (Qk::kMaxK > kValueTile ? Qk::kMaxK : kValueTile)];
  };
  struct SourceScale {
    float source_scale[kTileM];  // epilogue: factor of what the output already holds
  };
  struct RowScales : std::conditional_t<kHasSource, SourceScale, Empty> {
    float scale[kTileM];  // epilogue: factor of the accumulators
  };
  struct RowParts {
    float row_part[kWarpsN][kTileM];  // maxima, at the end sums, exchanged between the warps of a row
  };
  struct NoParts {
    float row_part[1][1];
  };
  // In parts every byte counts: the factors lie where the values were, behind the epilogue's storage.
  struct FlushSpace {
    typename Epilogue::SharedStorage epilogue;
    RowScales scales;
  };
  struct Scratch : StagingOf<kInParts>,
                   std::conditional_t<kInParts, Empty, RowScales>,
                   std::conditional_t<kInParts && kWarpsN == 1, NoParts, RowParts> {
    // Kept here, not in registers.
    Problem n;
    Visibility see;
    int whole_begin;  // keys from it on are hidden from no row by a window's left side
    void* out;        // Element, or fp32 (params.h: Partial)
    float* lse;       // or, of a part of the keys, the sums; null: not wanted
  };
  struct SharedStorage : BiasStageOf<kTileM> {
    union {
      typename QkMma::Base::SharedStorage qk;
      typename Epilogue::SharedStorage last_epilogue;  // after the last key block
    };
    union {
      typename PvOf<kWeightsInRegisters>::Storage pv;
      std::conditional_t<kInParts, FlushSpace,
                         std::conditional_t<(kFlushKeys > 0), typename Epilogue::SharedStorage, Empty>>
          flush;  // P and V are used
    };
    std::conditional_t<Output::kInMemory, typename Epilogue::SharedStorage,
                       Empty> epilogue;  // P is still needed
    // In parts, directly behind: the query tile passes through the keys' place, pv and the staging area.
    Scratch scratch;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= 227 * 1024, "no GPU gives a thread block more than 227 KiB of shared memory");
  static_assert(kThreads <= 512,
                "255 registers a thread do not allow more "
                "than 256 threads, 128 not more than 512");
};

}  // namespace chained
}  // namespace memeff
