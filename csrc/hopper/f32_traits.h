// One traits type per fp32 kernel of the hopper family, from a row of csrc/kernels_rows.py.
//
// Memory plan of a thread block: tiles in chunks of 64 columns (wgmma.h), hi's before lo's
//   [ Q ][ K stage 0 | 1 .. ][ V stage 0 | 1 .. ][ scales of K and V, stage 0 | 1 .. ][ barriers, tiles ]
#pragma once

#include "common/dropout.h"
#include "common/softmax.h"
#include "cutlass/arch/barrier.h"
#include "hopper/f32_plan.h"
#include "hopper/tile.h"
#include "hopper/wgmma.h"

namespace memeff {
namespace hopper_f32 {

using namespace hopper;

// kM queries, kN keys, K and Kv up to kWidth.
template <int kM_, int kN_, int kWidth_>
struct Tile {
  static constexpr int kM = kM_, kN = kN_, kWidth = kWidth_;
};

template <int kParts_, typename Tile_, int kStages_>
struct ForwardTraits {
  using Element = cutlass::half_t;  // of the parts
  static constexpr int kParts = kParts_;
  static_assert(kParts == 1 || kParts == 2, "hi, or hi and lo");
  static constexpr int kTileM = Tile_::kM, kTileN = Tile_::kN, kWidth = Tile_::kWidth, kValueTile = kWidth;
  static constexpr int kStages = kStages_;
  static constexpr bool kBias = false, kDropout = false, kPairs = false;
  static constexpr int kConsumers = kTileM / 64;  // warpgroups that compute
  static_assert(kTileM % 64 == 0 && (kConsumers == 2 || kConsumers == 3), "two or three warpgroups of 64 queries");
  static constexpr int kThreads = 128 + 128 * kConsumers;  // and one that copies
  // What a warpgroup gives up and what the others take: 65536 registers in all.
  static constexpr int kCopyRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kMathRegisters = kConsumers == 2 ? 232 : 160;
  static constexpr int kStartRegisters = 65536 / kThreads / 8 * 8;  // a thread, before that
  static_assert(128 * (kCopyRegisters + kConsumers * kMathRegisters) <= kStartRegisters * kThreads,
                "no warpgroup waits for registers that nobody gives up");

  static_assert(kWidth % kChunk == 0, "whole chunks of a part");
  static constexpr int kColumns = kParts * kWidth, kChunks = kColumns / kChunk;
  static constexpr int kQueryChunkBytes = kTileM * kRowBytes, kKeyChunkBytes = kTileN * kRowBytes;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes, kKeyBytes = kChunks * kKeyChunkBytes;
  static constexpr int kQueryPartBytes = kQueryBytes / kParts, kKeyPartBytes = kKeyBytes / kParts;
  static constexpr int kQkSteps = kWidth / kStep, kPvSteps = kTileN / kStep;
  // Scores of two parts are two sums, of half the columns each: tensor cores cut a sum at each step, the more the
  // larger it is. The second sum takes kPiece keys at a time. Not at K = 128: registers.
  static constexpr bool kHalves = kParts == 2 && kWidth <= 64;
  static constexpr int kPiece = kTileN < 64 ? kTileN : 64, kPieces = kTileN / kPiece;
  static_assert(kQkSteps % 2 == 0 && kTileN % kPiece == 0, "whole halves and pieces");

  using CoordS = WarpgroupCoord<kTileN>;
  using CoordO = WarpgroupCoord<kWidth>;
  static constexpr int kScores = kTileN / 2, kOutputs = kWidth / 2;  // registers a thread
  // Products of a key block go to accumulators of their own, which O takes: tensor cores cut what they add, and over
  // many keys of weights >= 0 that would show. One part is coarser than that.
  static constexpr bool kStaged = kParts == 2;
  static_assert(kScores + kParts * kScores / 2 + (kStaged ? 2 : 1) * kOutputs <= kMathRegisters - 24,
                "S, P and O live together; the rest needs about 24 registers");

  using Exponent = FoldedScale;
  using DropoutState = NoDropoutHead;

  // The copy engine reads from multiples of 16 bytes on: scales of a block begin up to 3 places behind.
  static constexpr int kScaleBox = kTileN + 4, kScaleStride = kTileN + 32;
  static constexpr int kScaleBytes = kScaleBox * int(sizeof(float));

  struct Barriers {
    cutlass::arch::ClusterTransactionBarrier query_full, key_full[kStages], value_full[kStages];
    cutlass::arch::ClusterBarrier query_empty, key_empty[kStages], value_empty[kStages];
  };
  struct SharedStorage {
    alignas(1024) char query[kQueryBytes];
    alignas(1024) char key[kStages][kKeyBytes];
    alignas(1024) char value[kStages][kKeyBytes];
    alignas(128) float key_scales[kStages][kScaleStride];
    alignas(128) float value_scales[kStages][kScaleStride];  // come with the keys
    Barriers barriers;
    ForwardTile tiles[1 + 4 * kConsumers];  // each warp's own, the one that copies first
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= 227 * 1024, "an SM gives a thread block no more than 227 KiB of shared memory");
};

}  // namespace hopper_f32
}  // namespace memeff
