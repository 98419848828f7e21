// One traits type per kernel of K and Kv beyond 256: everything hopper/slab.h needs, from a row of
// csrc/kernels_rows.py.
//
// O of a block is kColumnGroups warpgroups wide and kRowGroups tall, each 64 queries x kWidth columns in registers:
//
//   2 x 1   128 queries, a slab of kWidth columns           1 x 2   64 queries, a slab of 2 kWidth columns
//           +--------+                                              +--------+--------+
//     Q 0   |  WG 0  |                                        Q     |  WG 0  |  WG 1  |
//           +--------+                                              +--------+--------+
//     Q 1   |  WG 1  |                                        each warpgroup has S and P of all 64 queries: twice
//           +--------+                                        computed, never exchanged; its own columns of V
//
// Memory plan of a thread block: Q stays, keys and values pass through one ring. A chunk is 64 columns (wgmma.h), a
// stage kStageChunks of them.
//   [ Q: chunk 0 | 1 | .. of kTileM rows ][ stage 0 | 1 | .. of kTileN rows ][ barriers, tiles ]
#pragma once

#include "chained/traits.h"
#include "common/dropout.h"
#include "common/softmax.h"
#include "cutlass/arch/barrier.h"
#include "hopper/tile.h"
#include "hopper/wgmma.h"

namespace memeff {
namespace hopper {

// Warpgroups side by side along the queries and along the value columns; keys; value columns of a warpgroup; largest K.
template <int kRowGroups_, int kColumnGroups_, int kN_, int kWidth_, int kMaxK_>
struct SlabTile {
  static constexpr int kRowGroups = kRowGroups_, kColumnGroups = kColumnGroups_, kN = kN_, kWidth = kWidth_;
  static constexpr int kMaxK = kMaxK_;
};

template <typename Element_, typename Tile_, int kStageChunks_, int kStages_, bool kTurns_>
struct SlabTraits {
  using Element = Element_;
  static_assert(sizeof(Element) == 2, "wgmma of 16 bits");
  static constexpr int kRowGroups = Tile_::kRowGroups, kColumnGroups = Tile_::kColumnGroups;
  static constexpr int kTileM = 64 * kRowGroups, kTileN = Tile_::kN, kWidth = Tile_::kWidth;
  static constexpr int kValueTile = kColumnGroups * kWidth;
  static constexpr int kStageChunks = kStageChunks_, kStages = kStages_;
  static constexpr bool kBias = false, kDropout = false;
  static constexpr bool kTurns = kTurns_;                        // slab.h
  static constexpr int kConsumers = kRowGroups * kColumnGroups;  // warpgroups that compute
  static_assert(kConsumers == 2, "65536 registers: two warpgroups of 240");
  static constexpr int kThreads = 128 + 128 * kConsumers;  // and one that copies
  // What the copying warpgroup gives up and what the others take.
  static constexpr int kCopyRegisters = 24, kMathRegisters = 240;
  static constexpr int kStartRegisters = 65536 / kThreads / 8 * 8;  // a thread, before that
  static_assert(128 * (kCopyRegisters + kConsumers * kMathRegisters) <= kStartRegisters * kThreads,
                "no warpgroup waits for registers that nobody gives up");

  static_assert(kWidth % kChunk == 0 && kTileN % kStep == 0, "whole chunks and steps");
  static constexpr int kQueryChunks = (Tile_::kMaxK + kChunk - 1) / kChunk;
  static constexpr int kQueryChunkBytes = kTileM * kRowBytes, kKeyChunkBytes = kTileN * kRowBytes;
  static_assert(kKeyChunkBytes % kPeriodBytes == 0, "chunks start where the swizzle does");
  static constexpr int kStageBytes = kStageChunks * kKeyChunkBytes;
  static constexpr int kPvSteps = kTileN / kStep;
  // Stages that hold a warpgroup's columns of V; the last one may hold fewer chunks.
  static constexpr int kValueChunks = kWidth / kChunk;
  static constexpr int kParts = (kValueChunks + kStageChunks - 1) / kStageChunks;
  static_assert(kColumnGroups == 1 || kValueChunks % kStageChunks == 0, "a stage belongs to one warpgroup");
  // A warpgroup holds its stages of V and the last one of S while it waits for more.
  static_assert(kStages >= kParts + 2, "or all wait for each other");
  // Where they take turns (slab.h) one holds nothing but all of K, from the ring's first stage to its last.
  static_assert(!kTurns || kStages * kStageChunks >= kQueryChunks, "the ring holds K where there are turns");

  using CoordS = WarpgroupCoord<kTileN>;
  using CoordO = WarpgroupCoord<kWidth>;
  static constexpr int kScores = kTileN / 2, kOutputs = kWidth / 2;  // registers a thread
  static_assert(kScores + kScores / 2 + kOutputs <= kMathRegisters - 28,
                "S, P and O live together; the rest needs about 28 registers");

  using Exponent = FoldedScale;
  using DropoutState = NoDropoutHead;

  struct Barriers {
    cutlass::arch::ClusterTransactionBarrier query_full, full[kStages];
    cutlass::arch::ClusterBarrier query_empty, empty[kStages];
  };
  // Of tiles: the copying warp finds the next one while this one begins and the one before is being written.
  static constexpr int kPlaces = 4;
  struct SharedStorage {
    alignas(1024) char query[kQueryChunks * kQueryChunkBytes];
    alignas(1024) char ring[kStages][kStageBytes];
    Barriers barriers;
    ForwardTile tiles[kPlaces];
  };
  static constexpr int kSmemBytes = int(sizeof(SharedStorage));
  static_assert(kSmemBytes <= 227 * 1024, "an SM gives a thread block no more than 227 KiB of shared memory");
};

}  // namespace hopper
}  // namespace memeff
