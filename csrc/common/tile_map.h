// Which (batch, head, query tile, part of the keys, value slab) a thread block works on.
//
// The grid is one-dimensional: blocks = B * H * query tiles * parts * value slabs, so no dimension meets the 65535
// limit. Blocks are numbered so that those running at the same time share keys and values in L2:
//
//   section 0: heads 0 .. section_heads-1     | section 1: the next heads ...
//   [tile T-1: every head of the section][tile T-2: ...] ... [tile 0: ...]      longest_first (causal)
//   [head 0: every tile][head 1: every tile] ...                                otherwise (section_heads = 1)
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"

namespace memeff {

struct TileMap {
  uint32_t blocks = 0;         // size of the grid
  uint32_t batch_heads = 1;    // B * H
  uint32_t heads = 1;          // H
  uint32_t tiles = 1;          // ceil(M / kTileM); of packed sequences: their tile numbers (sequences.h)
  uint32_t slabs = 1;          // ceil(Kv / kValueTile)
  uint32_t splits = 1;         // parts of the keys
  uint32_t section_heads = 1;  // heads that share a section
  bool longest_first = false;  // causal: the last query tiles see the most keys; packed sequences: sorted so
  // Division by a multiplication: short sequences start many blocks, and each of them divides.
  cutlass::FastDivmod by_tiles, by_heads, by_group;  // tiles, heads, heads_per_group
};

// head = group * heads_per_group + member
struct TileCoord {
  uint32_t batch, head, group, member, tile, slab, split;
};

struct Quotient {
  uint32_t quotient, rest;
};
CUTLASS_DEVICE Quotient divide(uint32_t x, cutlass::FastDivmod const& by) {
  int quotient, rest;
  by(quotient, rest, int(x));
  return {uint32_t(quotient), uint32_t(rest)};
}

// L2 that a section's keys and values may fill: half of the smallest L2 among the data-centre parts (V100: 6 MB is
// less, there a section is one head; A100 40 MB; H200 60 MB).
constexpr int64_t kSectionBytes = 16 << 20;

// Returns blocks = 0 when the grid would exceed the launch limit of 2^31 - 1.
inline TileMap make_tile_map(int64_t batch, int heads, int heads_per_group, int64_t tiles, int64_t slabs, int splits,
                             int64_t bytes_per_head, bool longest_first) {
  TileMap map;
  const int64_t blocks = batch * heads * tiles * slabs * splits;
  if (batch * heads > INT32_MAX || blocks > INT32_MAX) return map;
  map.blocks = uint32_t(blocks);
  map.batch_heads = uint32_t(batch * heads);
  map.heads = uint32_t(heads);
  map.tiles = uint32_t(tiles);
  map.slabs = uint32_t(slabs);
  map.splits = uint32_t(splits);
  map.longest_first = longest_first;
  map.by_tiles = {int(tiles)}, map.by_heads = {heads}, map.by_group = {heads_per_group};
  if (longest_first) {
    const int64_t fit = kSectionBytes / (bytes_per_head > 0 ? bytes_per_head : 1);
    map.section_heads = uint32_t(fit < 1 ? 1 : fit > int64_t(map.batch_heads) ? int64_t(map.batch_heads) : fit);
  }
  return map;
}

CUTLASS_DEVICE TileCoord locate(TileMap const& map, uint32_t block) {
  TileCoord coord;
  uint32_t rest = block, batch_head;
  coord.slab = coord.split = 0;
  if (map.slabs > 1) coord.slab = rest % map.slabs, rest /= map.slabs;
  if (map.splits > 1) coord.split = rest % map.splits, rest /= map.splits;
  if (map.longest_first) {
    const uint32_t per_section = map.section_heads * map.tiles;
    const uint32_t section = rest / per_section;
    rest -= section * per_section;
    const uint32_t first = section * map.section_heads;
    const uint32_t heads_here =
        map.batch_heads - first < map.section_heads ? map.batch_heads - first : map.section_heads;
    coord.tile = map.tiles - 1 - rest / heads_here;
    batch_head = first + rest % heads_here;
  } else {
    const Quotient by_tiles = divide(rest, map.by_tiles);
    coord.tile = by_tiles.rest;
    batch_head = by_tiles.quotient;
  }
  const Quotient by_heads = divide(batch_head, map.by_heads), by_group = divide(by_heads.rest, map.by_group);
  coord.batch = by_heads.quotient, coord.head = by_heads.rest;
  coord.group = by_group.quotient, coord.member = by_group.rest;
  return coord;
}

}  // namespace memeff
