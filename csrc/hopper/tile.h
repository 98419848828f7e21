// What a launch of the hopper family passes, and a thread block's place in the work.
#pragma once

#include "common/sorted_tiles.h"
#include "common/tile_map.h"
#include "common/visibility.h"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "hopper/tensor_map.h"
#include "hopper/wgmma.h"

namespace memeff {
namespace hopper {

// How the blocks of a grid of G take the tiles, whose numbers are sorted by the loop's length where it varies:
//   kRounds  block i: i, G + i, 2 G + i, ...                              tiles of one length
//   kSnake   block i: i, 2 G - 1 - i, 2 G + i, ...                        the longest first, to and fro
//   kPairs   causal: two heads A and B from opposite ends, so that all pairs are about as long:
//            tiles 0 1 2     pairs (A 2, B 0) (A 1, B 1) (A 0, B 2)       block i: the pairs i, G + i, ...
//   kSnakePairs  packed and causal: pairs of a sequence (sorted_tiles.h) in a snake
enum class Order : int32_t { kRounds, kSnake, kPairs, kSnakePairs };

struct ForwardArgs {
  Operand query, key, value, bias;
  ForwardParams p;
  TileMap map;
  float premultiply;  // as in chained/forward_tile.h
  float exponent;
  uint32_t blocks;  // of the grid
  Order order;      // how they take the tiles
};

// A place in a ring of buffers.
template <int kStages>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  CUTLASS_DEVICE void next() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// A block's first warpgroup copies, by its first warp; the others compute.
template <typename Traits, typename Block>
CUTLASS_DEVICE void run_in_roles(Block& block) {
  if (threadIdx.x == 0) block.start_barriers();
  __syncthreads();
  if (block.consumer < 0) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::kCopyRegisters>();
    if (block.warp == 0) block.copy_tiles();
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::kMathRegisters>();
    block.compute_tiles();
  }
}

// Makes rows first .. rows of a tile 0, by `threads` threads; its chunks of columns lie kChunkBytes apart. wgmma sees
// it.
template <int kChunkBytes>
CUTLASS_DEVICE void clear_rows(char* tile, int first, int rows, int chunks, int thread, int threads) {
  for (int i = thread; i < (rows - first) * 8 * chunks; i += threads) {
    const int piece = i % 8, row = first + i / 8 % (rows - first), chunk = i / 8 / (rows - first);
    *reinterpret_cast<uint4*>(tile + chunk * kChunkBytes + row * kRowBytes + piece * 16) = uint4{0, 0, 0, 0};
  }
  cutlass::arch::fence_view_async_shared();
}

// A tile of queries of one head. In shared memory: seldom read, no registers. Key blocks run from the last that some
// row of the tile sees down to the first.
struct ForwardTile {
  TileCoord at;
  Problem n;
  Visibility see;
  int row0, rows;                // first query of the tile; its valid queries, <= 0: nothing to do
  int first_block, after_block;  // key blocks [first_block, after_block)
};

// The number of a block's turn-th tile; not below map.blocks: it has no more.
CUTLASS_DEVICE uint32_t tile_number(ForwardArgs const& args, uint32_t turn) {
  const uint32_t blocks = gridDim.x, block = blockIdx.x, odd = turn % 2;
  if (args.order == Order::kRounds) return turn * blocks + block;
  const auto snake = [&](uint32_t round) { return round * blocks + (round % 2 ? blocks - 1 - block : block); };
  if (args.order == Order::kSnake) return snake(turn);
  if (args.order == Order::kSnakePairs) return 2 * snake(turn / 2) + odd;
  const uint32_t tiles = args.map.tiles, pair = turn / 2 * blocks + block, j = pair % tiles;
  return (pair / tiles * 2 + odd) * tiles + (odd ? j : tiles - 1 - j);
}

// The tile of this number in the grid's order; all lanes of a warp together.
template <int kTileM, int kTileN>
CUTLASS_DEVICE ForwardTile find_tile(ForwardArgs const& args, uint32_t number) {
  ForwardTile tile;
  if (is_packed(args.p.sequences)) {
    const SortedTile found = sorted_tile<kTileM>(args.p, number, args.order == Order::kSnakePairs);
    const Quotient by_group = divide(found.head, args.map.by_group);
    tile.at = {0, found.head, by_group.quotient, by_group.rest, uint32_t(found.tile), 0, 0};
    tile.n = found.problem;
  } else {
    tile.at = locate(args.map, number);
    tile.n = locate_problem<false>(args.p, tile.at.batch, kTileM, tile.at.tile, false).problem;
  }
  tile.row0 = int(tile.at.tile) * kTileM;
  tile.rows = tile.n.queries - tile.row0 < kTileM ? tile.n.queries - tile.row0 : kTileM;
  tile.see = Visibility(args.p, tile.n.queries, tile.n.keys);
  const int begin = tile.see.first(tile.row0), end = tile.see.limit(tile.row0 + tile.rows - 1);
  tile.first_block = begin / kTileN;
  tile.after_block = begin < end ? (end + kTileN - 1) / kTileN : tile.first_block;
  return tile;
}

}  // namespace hopper
}  // namespace memeff
