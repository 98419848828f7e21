// One traits type per backward kernel of this family: five products in one kernel. A block owns kTileM keys of one key
// head and loops over tiles of kTileN queries (of every query head that shares it); each warp owns 32 keys.
//
//   kRoles = 1 (K up to 64)            kRoles = 2 (wider: dK and dV of 32 keys do not fit one warp's registers)
//     every warp                         warps of role 0                    warps of role 1, of the same keys
//     S^T = K Q^T,  dP^T = V dO^T        S^T = K Q^T                        dP^T = V dO^T
//     P, dS                              P  -- shared memory, 16 bits -->   dS = P (dP - delta)
//     dV += P^T dO,  dK += dS^T Q        dV += P^T dO                       dK += dS^T Q
//
// Accumulators of S^T and dP^T are operand A of dV and dK as they lie: the keys are the rows. dS^T goes through shared
// memory once, for dQ = dS K, which is added to an fp32 sum in global memory.
//
// kParts = 2 (K = 256): two warps share 32 keys in each role. Each takes half of the queries in the scores and half of
// the columns in the gradients; halves of P and dS are exchanged through shared memory.
//
// Memory plan:  [ P (kParts = 2) | K | V | Q x 2 | dO x 2 | (dS | lse, delta) x kDsBuffers | bias (kRoles = 2) ]
// Dropout: P carries the mask in its sign, drawn once: a weight that is dropped is handed over as -P.
// Bias: backward_bias.h.
//
// After the loop dK lies where K was and dV where V was, on their way out.
#pragma once

#include "common/dropout.h"
#include "common/sequences.h"
#include "common/softmax.h"
#include "common/visibility.h"
#include "register/backward_tile.h"

namespace memeff {
namespace registers {

// kKeys, kQueries: a block's tile. kMaxK: the largest K and Kv. kScoreQueries: queries of one product of scores.
// kDsBuffers: 2: dQ of a step is computed in the next one, with one barrier a step; 1: at its end, with two.
template <typename Element_, int kKeys, int kQueries, int kMaxK_, int kRoles_, int kParts_, int kScoreQueries,
          int kDsBuffers_, int kBlocks, bool kDropout_ = false, bool kBias_ = false>
struct BackwardRow {
  using Element = Element_;
  static constexpr int kTileM = kKeys, kTileN = kQueries, kValueTile = kMaxK_, kMaxK = kMaxK_;
  static constexpr int kRoles = kRoles_, kParts = kParts_, kDsBuffers = kDsBuffers_;
  static constexpr int kBlocksPerSm = kBlocks;
  static constexpr bool kDropout = kDropout_, kBias = kBias_;
  static constexpr int kWarpKeys = 32;
  static constexpr int kGroups = kTileM / kWarpKeys;  // of keys
  static constexpr int kRoleWarps = kGroups * kParts;
  static constexpr int kWarps = kRoles * kRoleWarps, kThreads = 32 * kWarps;
  static_assert(kTileM % kWarpKeys == 0 && kTileN % 32 == 0, "warps own whole groups of 32 keys, dQ tiles of 32 rows");
  static_assert(kParts == 1 || kRoles == 2, "only roles are cut into parts");
  static_assert(kScoreQueries == (kRoles == 1 ? kScoreQueries : kTileN / kParts) && kTileN % kScoreQueries == 0,
                "in roles a warp's scores are one product");

  using KeyTile = SharedTile<kTileM, kMaxK>;     // K, V
  using QueryTile = SharedTile<kTileN, kMaxK>;   // Q, dO
  using ScoreTile = SharedTile<kTileM, kTileN>;  // dS^T
  static constexpr int kScoreWidth = kScoreQueries;
  using Scores = Sums<2, kScoreQueries / 8>;
  using ScoreWeights = Weights<2, kScoreQueries / 16>;
  static constexpr int kColumns = kMaxK / kParts;  // of a warp's gradients
  using Gradient = Sums<2, kColumns / 8>;

  // dQ of a step: tiles of 32 queries, the columns shared out among the warps, 32 at a time.
  static constexpr int kQueryGroups = kTileN / 32;
  static_assert(kWarps % kQueryGroups == 0, "as many warps for each 32 queries");
  static constexpr int kQueryColumns = kMaxK / (kWarps / kQueryGroups);
  static constexpr int kQueryStep = kQueryColumns < 32 ? kQueryColumns : 32;
  using QueryGradient = Sums<2, kQueryStep / 8>;

  static_assert((kRoles == 1 ? 2 : 1) * kColumns <= 128, "a lane holds at most 128 accumulators of dK and dV");

  // Both as measured (docs/performance.md). kTurned: blocks that run at the same time start with different queries, so
  // that their additions to dQ do not meet. kWholeSums: additions of whole tiles take no branch.
  static constexpr bool kTurned = kRoles == 2 && kParts == 1, kWholeSums = kParts == 1;

  // A warp's bias lies where its dS will, or in a place of its own.
  static constexpr bool kBiasInDs = kBias && kRoles == 1;
  static_assert(!kBiasInDs || kDsBuffers == 2, "the bias of the next step arrives beside dS of this one");

  template <bool kWanted, typename = void>
  struct BiasStart {};
  template <typename Dummy>
  struct BiasStart<true, Dummy> {
    Element const* bias;   // null: none
    float const* lse_low;  // null: 0
  };
  // Dropout's numbers are drawn between the products of S.
  static constexpr bool kDrawsBeside = kDropout && !kBias && kRoles == 1;

  // Where the operands of a head begin, at the first rows of its sequence.
  struct HeadStart : BiasStart<kBias> {
    Element const *query, *grad_out, *key, *value;
    float const *lse, *delta;
    std::conditional_t<kDropout, DropoutHead, NoDropoutHead> dropout;
  };
  template <bool kWanted, typename = void>
  struct WeightStorage {};
  template <typename Dummy>
  struct WeightStorage<true, Dummy> {
    uint4 p[kTileM * kTileN * 2 / 16];  // P by warp and lane
  };
  template <bool kWanted, typename = void>
  struct LowParts {};
  template <typename Dummy>
  struct LowParts<true, Dummy> {
    float lse_low[kDsBuffers][kTileN];  // what rounding took from lse, in units of log 2
  };
  template <bool kWanted, typename = void>
  struct BiasStorage {};
  template <typename Dummy>
  struct BiasStorage<true, Dummy> {
    alignas(512) char bias[ScoreTile::kBytes];
  };
  struct SharedStorage : WeightStorage<(kParts > 1)>, BiasStorage<kBias && !kBiasInDs>, LowParts<kBias> {
    alignas(512) char key[KeyTile::kBytes];
    char value[KeyTile::kBytes];
    char query[2][QueryTile::kBytes];
    char grad_out[2][QueryTile::kBytes];
    char ds[kDsBuffers][ScoreTile::kBytes];
    float lse[kDsBuffers]
             [kTileN];  // kBias: natural, else in units of log 2; +inf for a query that sees nothing or is none
    float delta[kDsBuffers][kTileN];  // 0 for those
    // Kept here, not in registers.
    Problem n;
    Visibility see;
    HeadStart start;
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= 227 * 1024, "no GPU gives a thread block more than 227 KiB of shared memory");
};

}  // namespace registers
}  // namespace memeff
