// One traits type per kernel of the hopper family: everything the forward kernel needs, from a row of
// csrc/kernels_rows.py.
//
// Memory plan of a thread block (each tile in chunks of 64 columns, wgmma.h):
//   [ bias stage 0 | 1 .. ][ Q 0 | 1 ][ K stage 0 | 1 .. ][ V stage 0 | 1 .. ][ barriers, tiles ]
#pragma once

#include "chained/traits.h"
#include "common/dropout.h"
#include "common/softmax.h"
#include "cutlass/arch/barrier.h"
#include "hopper/tile.h"
#include "hopper/wgmma.h"

namespace memeff {
namespace hopper {

// kM queries, kN keys, K and Kv up to kWidth.
template <int kM_, int kN_, int kWidth_>
struct Tile {
  static constexpr int kM = kM_, kN = kN_, kWidth = kWidth_;
};

template <typename Element_, typename Tile_, int kStages_, typename Bias_, int kBlocks_ = 1>
struct ForwardTraits {
  using Element = Element_;
  static_assert(sizeof(Element) == 2, "wgmma of 16 bits");
  static constexpr int kTileM = Tile_::kM, kTileN = Tile_::kN, kWidth = Tile_::kWidth, kValueTile = kWidth;
  static constexpr int kStages = kStages_, kBlocks = kBlocks_;  // kBlocks: an SM
  static constexpr bool kBias = Bias_::kBias, kDropout = Bias_::kDropout;
  static constexpr int kConsumers = kTileM / 64;  // warpgroups that compute
  static_assert(kTileM % 64 == 0 && kConsumers >= 1 && kConsumers <= 3, "up to three warpgroups of 64 queries");
  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kThreads = 128 + kConsumerThreads;  // and one that copies
  // What a warpgroup gives up and what the others take: 65536 registers in all.
  static_assert(kBlocks == 1 || (kBlocks == 3 && kConsumers == 1), "the registers of three blocks");
  static constexpr int kCopyRegisters = kBlocks == 3 ? 24 : kConsumers == 3 ? 32 : 40;
  static constexpr int kMathRegisters = kBlocks == 3 ? 136 : kConsumers == 3 ? 160 : 232;
  static constexpr int kStartRegisters = 65536 / kBlocks / kThreads / 8 * 8;  // a thread, before that
  static_assert(128 * (kCopyRegisters + kConsumers * kMathRegisters) <= kStartRegisters * kThreads,
                "no warpgroup waits for registers that nobody gives up");

  static constexpr int kChunks = (kWidth + kChunk - 1) / kChunk;
  static constexpr int kQueryChunkBytes = kTileM * kRowBytes, kKeyChunkBytes = kTileN * kRowBytes;
  static constexpr int kQueryBytes = kChunks * kQueryChunkBytes, kKeyBytes = kChunks * kKeyChunkBytes;
  static constexpr int kBiasChunks = kBias ? kTileN / kChunk : 0, kBiasBytes = kBiasChunks * kQueryChunkBytes;
  static_assert(!kBias || kTileN % kChunk == 0, "whole chunks of the bias");
  static constexpr int kQkSteps = kWidth / kStep, kPvSteps = kTileN / kStep;
  static_assert(kWidth % kStep == 0 && kTileN % kStep == 0, "whole steps");

  static constexpr bool kPairs = kDropout;  // how queries lie in shared memory
  static_assert(!kPairs || !kBias, "rows of a bias lie as queries do without pairs");
  using CoordS = WarpgroupCoord<kTileN, kPairs>;
  using CoordO = WarpgroupCoord<kWidth, kPairs>;
  static constexpr int kScores = kTileN / 2, kOutputs = kWidth / 2;  // registers a thread
  static_assert(kScores + kScores / 2 + kOutputs <= kMathRegisters - 24,
                "S, P and O live together; the rest needs about 24 registers");

  using Exponent = std::conditional_t<kBias, PlainLogits, FoldedScale>;
  using DropoutState = std::conditional_t<kDropout, DropoutHead, NoDropoutHead>;

  // Q of the next tile is there while this one is computed, where there is room.
  static constexpr int kMemory = 228 * 1024 / kBlocks / 1024 * 1024 - 1024;
  static constexpr int kBuffers = kStages * (2 * kKeyBytes + kBiasBytes) + 1024;
  static constexpr int kQueryBuffers = 2 * kQueryBytes + kBuffers <= kMemory ? 2 : 1;
  // Of tiles: a warpgroup writes one while it starts the next, and the copying warp is up to kQueryBuffers ahead.
  static constexpr int kPlaces = 4;

  struct Barriers {
    cutlass::arch::ClusterTransactionBarrier query_full[kQueryBuffers], key_full[kStages], value_full[kStages],
        bias_full[kStages];
    cutlass::arch::ClusterBarrier query_empty[kQueryBuffers], key_empty[kStages], value_empty[kStages],
        bias_empty[kStages];
  };
  template <int kBytes>
  struct BiasTiles {
    alignas(1024) char bias[kStages][kBytes];
  };
  struct NoBiasTiles {};
  struct SharedStorage : std::conditional_t<kBias, BiasTiles<kBias ? kBiasBytes : 1>, NoBiasTiles> {
    alignas(1024) char query[kQueryBuffers][kQueryBytes];
    alignas(1024) char key[kStages][kKeyBytes];
    alignas(1024) char value[kStages][kKeyBytes];
    Barriers barriers;
    ForwardTile tiles[kPlaces];
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= kMemory,
                "an SM has 228 KiB of shared memory, 1 KiB of it is the system's for each block");
};

}  // namespace hopper
}  // namespace memeff
