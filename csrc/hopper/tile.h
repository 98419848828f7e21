// What a launch of the hopper family passes, and a thread block's place in the work.
#pragma once

#include "common/sequences.h"
#include "common/tile_map.h"
#include "common/visibility.h"
#include "hopper/tensor_map.h"

namespace memeff {
namespace hopper {

struct ForwardArgs {
  Operand query, key, value;
  ForwardParams p;
  TileMap map;
  float premultiply;  // as in chained/forward_tile.h
  float exponent;
};

// A block's place in the work. In shared memory: seldom read, no registers. Key blocks run from the last that some row
// of the tile sees down to the first.
struct ForwardTile {
  TileCoord at;
  Problem n;
  Visibility see;
  int row0, rows;                // first query of the tile; its valid queries, <= 0: nothing to do
  int first_block, after_block;  // key blocks [first_block, after_block)
};

template <int kTileM, int kTileN>
CUTLASS_DEVICE ForwardTile find_tile(ForwardArgs const& args) {
  ForwardTile tile;
  tile.at = locate(args.map, blockIdx.x);
  const Located found = locate_problem<false>(args.p, tile.at.batch, kTileM, tile.at.tile, !args.map.longest_first);
  tile.n = found.problem;
  tile.row0 = found.tile * kTileM;
  tile.rows = tile.n.queries - tile.row0 < kTileM ? tile.n.queries - tile.row0 : kTileM;
  tile.see = Visibility(args.p, tile.n.queries, tile.n.keys);
  const int begin = tile.see.first(tile.row0), end = tile.see.limit(tile.row0 + tile.rows - 1);
  tile.first_block = begin / kTileN;
  tile.after_block = begin < end ? (end + kTileN - 1) / kTileN : tile.first_block;
  return tile;
}

}  // namespace hopper
}  // namespace memeff
