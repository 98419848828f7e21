// One traits type per backward kernel. A thread block owns a tile of rows of one side and loops over tiles of the
// other:
//
//                  owner rows   loop rows   A1  A2   B1  B2   first output   second output
//   kQuery         queries      keys        Q   dO   K   V    dQ = dS K
//   kKeyValue      keys         queries     K   V    Q   dO   dK = dS^T Q    dV = P^T dO
//   kKey, kValue   the same, one output each
//   kBias          a tile of the bias       Q   dO   K   V    dBias = dS, summed over broadcast dimensions
//   kAll           keys         queries     K   V    Q   dO   dK             dV, and dQ = dS K from the same dS
//                  (backward_short.h: whole short sequences, every tile of both sides in one block)
//
//   S = A1 B1^T (transposed where keys own), dP = A2 B2^T, P = exp(S - lse), dS = P * (dP - delta),
//   first += dS B1, second += P B2
//
// So one kernel serves all: P and dS always leave the accumulators as operand A of the next product (OperandStore), on
// Volta, tensor cores and SIMT alike, and every gradient is summed in registers by the one block that owns it: no
// atomics, no locks, no workspace, the same bits on every run.
//
// Memory plan, resident (K, Kv <= kMaxK):  [ A1 | A2 ] [ B1 | B2 ] x kBuffers (kBias: both) [ dS ][ P ]  [ lse, delta ]
// [ bias ]
//              streamed (any K, Kv):       [ pipeline of S and dP ]  [ P, then dS | slab of B2, then B1 ]  [ lse, delta
//              ]
#pragma once

#include "chained/traits.h"

namespace memeff {
namespace chained {

enum class Gradient { kQuery, kKeyValue, kKey, kValue, kBias, kAll };

constexpr bool keys_own(Gradient what) { return what != Gradient::kQuery && what != Gradient::kBias; }

// Score and output tiles that live together: S, dP; one or two outputs, kAll one more a tile of queries.
template <Gradient kWhat, int kBuffers>
using OutputOf = GradientOutput<kWhat == Gradient::kValue ? 1 : 2,
                                kWhat == Gradient::kAll                                    ? 2 + kBuffers
                                : kWhat == Gradient::kKeyValue || kWhat == Gradient::kBias ? 2
                                                                                           : 1,
                                keys_own(kWhat)>;

// kBuffers: of the loop's operands, kBias: of both sides'; kAll: tiles of either side, all of the loop's there at once.
template <typename Arch_, typename Tile_, typename Warp_, typename Qk_, int kAlignment_, typename Bias_, int kBlocks_,
          int kBuffers_, Gradient kWhat_>
struct BackwardTraits
    : ForwardTraits<Arch_, Tile_, Warp_, Qk_, OutputOf<kWhat_, kBuffers_>, kAlignment_, Bias_, kBlocks_> {
  using Chain = ForwardTraits<Arch_, Tile_, Warp_, Qk_, OutputOf<kWhat_, kBuffers_>, kAlignment_, Bias_, kBlocks_>;
  using Element = typename Chain::Element;
  using QkMma = typename Chain::QkMma;
  using OutMma = typename Chain::PvMma;

  static constexpr Gradient kWhat = kWhat_;
  static constexpr bool kOwnerKeys = keys_own(kWhat);
  static constexpr bool kFirst = kWhat != Gradient::kValue && kWhat != Gradient::kBias;
  static constexpr bool kSecond = kWhat == Gradient::kKeyValue || kWhat == Gradient::kValue || kWhat == Gradient::kAll;
  static constexpr bool kNeedsDp = kWhat != Gradient::kValue;
  static constexpr bool kResident = Qk_::kResident;
  static constexpr int kBuffers = kResident ? kBuffers_ : 1;
  static constexpr bool kBoth = kFirst && kSecond;
  static_assert(!kResident || Chain::kValueTile == Qk_::kMaxK, "resident operands serve both kinds of products");

  // One copy of a resident tile serves both products: the 16-bit layouts of a tile as B of the scores and as B of an
  // output product are the same function (backward_tile.h checks it), fp32 reads it by TransposedOperand.

  // kAll: dQ += dS K with dS as it lies, dS^T, read as a column-major operand A: the same function again. CUTLASS reads
  // that layout in warp tiles of 32 and 64 only, so a narrow output has warps to spare: they share the keys.
  using TransposedMma =
      ResidentMma<cutlass::gemm::threadblock::DefaultMmaCore<
                      Gemm<Chain::kTileN, Chain::kValueTile, Chain::kPvStep>, Gemm<32, 32, Chain::kPvStep>,
                      typename Arch_::Instruction, typename Chain::MmaElement, cutlass::layout::ColumnMajor,
                      typename Chain::MmaElement, cutlass::layout::RowMajor, float, cutlass::layout::RowMajor,
                      typename Arch_::OpClass, Arch_::kAsync ? 3 : 2, typename Arch_::Operator>,
                  Chain::kPvStages, 0, Fp32Split::kNone>;

  // Resident rows stage a bias of any dtype and any strides, so that no load of it hangs on their registers; beside a
  // pipeline (sm_86) and beside two buffers (kBias, three blocks an SM) there is room for 16 bits an element.
  static constexpr bool kStageAnyBias = Chain::kStageBias && Qk_::kResident && kWhat != Gradient::kBias;
  static constexpr int kBiasRowBytes = bias_row_bytes(kStageAnyBias ? 4 : 2);

  // The exponent, as in the forward kernels, or P would not sum to 1: with a bias x - lse in natural units; without,
  // scale * log2(e) folded into one FFMA. Both take the low part of the lse where it matters: fp32, and biases of any
  // size. kExact: the rounding error of lse * log2(e) is part of it.
  static constexpr bool kLow = std::is_same<Element, float>::value || Chain::kBias;
  static constexpr bool kExact = std::is_same<Element, float>::value && !Chain::kBias;

  // fp32: weights of few queries are computed without rounding their exponents (backward_tile.h, fine_weight).
  static constexpr bool kFine = std::is_same<Element, float>::value && !Chain::kTf32;

  // Where the operands of a head begin, at the first rows of its sequence.
  struct HeadStart {
    Element const *query, *grad_out, *key, *value;
    float const *lse, *lse_low, *delta;  // lse_low null: 0
    const char* bias;                    // null: none
    typename Chain::DropoutState dropout;
  };

  using QkStorage = typename QkMma::Base::SharedStorage;
  using OutStorage = typename OutMma::Base::SharedStorage;

  template <typename Mma, typename = void>
  struct ResidentOperands {};
  template <typename Mma>
  struct ResidentOperands<Mma, std::enable_if_t<kResident && sizeof(Mma) != 0>> {
    using Storage = typename Mma::Base::SharedStorage;
    struct Owner {
      decltype(Storage::operand_A) first, second;
    };
    struct Loop {
      decltype(Storage::operand_B) first, second;
    };
    Owner owner[kWhat == Gradient::kBias ? kBuffers : 1];
    Loop loop[kBuffers];
  };
  struct Empty {};
  template <bool kWanted, typename = void>
  struct FirstOperand {};
  template <typename Dummy>
  struct FirstOperand<true, Dummy> {
    decltype(OutStorage::operand_A) ds;
  };
  template <bool kWanted, typename = void>
  struct SecondOperand {};
  template <typename Dummy>
  struct SecondOperand<true, Dummy> {
    decltype(OutStorage::operand_A) p;
  };
  // In parts: the copies of one operand land here, directly behind the loop's operands.
  static constexpr int kOwnerBytes = 4 * Chain::kTileM * Chain::kValueTile;  // of one operand in global memory
  static constexpr int kLoopBytes = 4 * Chain::kTileN * Chain::kValueTile;
  static_assert(!Chain::kInParts || 2 * kOwnerBytes <= 4 * kLoopBytes,
                "the owner's copies pass through the loop's operands and the staging area");
  template <bool kWanted, typename = void>
  struct StagingPart {};
  template <typename Dummy>
  struct StagingPart<true, Dummy> {
    alignas(16) char staging[kWhat == Gradient::kBias && kOwnerBytes > kLoopBytes ? kOwnerBytes : kLoopBytes];
  };
  struct ResidentStorage : ResidentOperands<QkMma>,
                           StagingPart<Chain::kInParts>,
                           FirstOperand<kFirst && !Chain::kInParts>,
                           SecondOperand<kSecond && !Chain::kInParts> {};
  struct StreamedStorage {
    QkStorage qk;
    std::conditional_t<kWhat == Gradient::kBias, Empty, OutStorage> out;
  };
  using Operands = std::conditional_t<kResident, ResidentStorage, StreamedStorage>;
  struct BiasSum {  // kBias: the tile on its way to sums over rows or columns
    float tile[Chain::kTileM][Chain::kTileN + 1];
  };
  struct PartSums {  // kAll: dQ of the warps that share keys, by element and thread
    float dq[kBuffers][32][64];
  };
  using Last = std::conditional_t<
      kWhat == Gradient::kBias, BiasSum,
      std::conditional_t<kWhat == Gradient::kAll, PartSums, typename Chain::Epilogue::SharedStorage>>;
  static constexpr int kStatRows = kWhat == Gradient::kAll ? Chain::kTileN * kBuffers
                                   : kOwnerKeys            ? Chain::kTileN
                                                           : Chain::kTileM;
  template <bool kWanted, typename = void>
  struct LowParts {};
  template <typename Dummy>
  struct LowParts<true, Dummy> {
    float lse_low[kStatRows];  // to be subtracted as well
  };
  struct SharedStorage : Chain::template BiasStageOf<kOwnerKeys ? Chain::kTileN : Chain::kTileM, kBiasRowBytes>,
                         LowParts<kLow> {
    union {
      Operands operands;
      Last last;
    };
    // Kept here, not in registers.
    Problem n;
    Visibility see;
    HeadStart start;             // kBias: not used
    float lse[kStatRows];        // +inf for a query that sees nothing or is none
    float delta[kStatRows];      // 0 for those
    float scale[Chain::kTileM];  // of the output, for its epilogue
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= 227 * 1024, "no GPU gives a thread block more than 227 KiB of shared memory");
};

}  // namespace chained
}  // namespace memeff
