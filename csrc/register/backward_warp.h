// What one warp does with a pair of tiles: scores, weights, what it hands over to others, its part of the gradients.
#pragma once

#include "common/tile_map.h"
#include "register/backward_traits.h"

namespace memeff {
namespace registers {

struct BackwardArgs {
  BackwardParams p;
  uint32_t blocks;                                   // size of the grid
  uint32_t splits;                                   // parts of the loop
  cutlass::FastDivmod by_tiles, by_heads, by_group;  // tiles of keys, key heads, heads_per_group (tile_map.h)
  float exponent;                                    // scale * log2(e), the very number that the forward kernels use
  int bias_store;  // elements of dBias, each an element of dS, that are written at once: 1 or 8; 0: none
};

template <typename Traits>
struct BackwardWarp {
  using Element = typename Traits::Element;
  using KeyTile = typename Traits::KeyTile;
  using QueryTile = typename Traits::QueryTile;
  using ScoreTile = typename Traits::ScoreTile;
  using Scores = typename Traits::Scores;
  using ScoreWeights = typename Traits::ScoreWeights;
  using Gradient = typename Traits::Gradient;
  static constexpr int kTileM = Traits::kTileM, kTileN = Traits::kTileN;
  static constexpr int kParts = Traits::kParts;

  // One step of the loop: a tile of the queries of one of the heads that share the keys.
  struct Step {
    int head, tile;
  };
  // Of a lane's four rows of scores the columns that are visible: bit 2 j + e is that of element e of tile j.
  struct Seen {
    uint32_t rows[4];
  };

  BackwardArgs const& args;
  BackwardParams const& p;
  ForwardParams const& f;
  typename Traits::SharedStorage& smem;
  Problem const& n;       // in shared memory: seldom read, no registers
  Visibility const& see;  // likewise
  int thread, lane, warp;
  int role, group, part;  // of this warp
  uint32_t batch, head;   // head: the first of the query heads that share the keys
  int key0;               // first key of the tile

  CUTLASS_DEVICE BackwardWarp(BackwardArgs const& args_, typename Traits::SharedStorage& smem_)
      : args(args_), p(args_.p), f(args_.p.forward), smem(smem_), n(smem_.n), see(smem_.see) {
    thread = threadIdx.x;
    lane = thread & 31;
    warp = cutlass::canonical_warp_idx_sync();
    role = Traits::kRoles == 1 ? 0 : warp / Traits::kRoleWarps;
    const int of_role = Traits::kRoles == 1 ? warp : warp % Traits::kRoleWarps;
    group = of_role / kParts, part = of_role % kParts;
  }

  // The first row of one of the sharing heads among all [B, H, M].
  CUTLASS_DEVICE int64_t row_of(Problem const& problem, int member) const {
    return offset(offset(batch, f.heads) + head + member, f.queries) + problem.query_row;
  }

  // --- scores ---

  CUTLASS_DEVICE int warp_key() const { return group * Traits::kWarpKeys; }

  // S^T of queries query0 .. of the tile (is_dp: dP^T).
  template <typename F = Alone>
  CUTLASS_DEVICE void multiply_scores(Scores& s, int buffer, int query0, bool is_dp, F beside = F()) const {
    const uint32_t a = ptx::shared_address(is_dp ? smem.value : smem.key) + KeyTile::down_first(warp_key(), 0, lane);
    const uint32_t b = ptx::shared_address(is_dp ? smem.grad_out[buffer] : smem.query[buffer]) +
                       QueryTile::across_first(query0, 0, lane);
    s.clear();
    multiply_rows<Element, KeyTile, QueryTile>(s, a, b, is_dp ? f.value_dim : f.head_dim, beside);
  }
  // dV += W dO (of_key: dK += W Q), W of queries query0 ..
  CUTLASS_DEVICE void add_gradient(Gradient& sums, ScoreWeights const& w, int buffer, int query0, bool of_key) const {
    const uint32_t b = ptx::shared_address(of_key ? smem.query[buffer] : smem.grad_out[buffer]) +
                       QueryTile::down_first(query0, part * Traits::kColumns, lane);
    multiply_weights<Element, QueryTile>(sums, w, b, (of_key ? f.head_dim : f.value_dim) - part * Traits::kColumns);
  }

  // Are all of both tiles' rows there, and does every query see every key?
  CUTLASS_DEVICE bool all_visible(int query0) const {
    return query0 + kTileN <= n.queries && key0 + kTileM <= see.limit(query0) && key0 >= see.first(query0 + kTileN - 1);
  }
  // query0: the first query of the scores.
  CUTLASS_DEVICE Seen find_seen(int query0) const {
    constexpr int kFar = 1 << 20;
    const auto near = [](int64_t x) { return int(x < -kFar ? -kFar : x > kFar ? kFar : x); };
    const int key = key0 + warp_key() + (lane >> 2), queries = n.queries - query0;
    const int64_t diagonal = int64_t(key) - see.diagonal - query0;
    const int first = see.right < 0 ? -kFar : near(diagonal - see.right);
    const int limit = see.left < 0 ? kFar : near(diagonal + see.left + 1);
    Seen seen;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint32_t columns = below(min(limit + 8 * i, queries)) & ~below(first + 8 * i);
      seen.rows[i] = key + 8 * i < n.keys ? columns : 0;
    }
    return seen;
  }
  // The bits of a lane's columns before `column`.
  CUTLASS_DEVICE uint32_t below(int column) const {
    column = min(max(column, 0), 8 * Scores::kTilesN);
    return (1u << (column / 8 * 2 + min(max(column % 8 - (lane & 3) * 2, 0), 2))) - 1;
  }

  CUTLASS_DEVICE float weight(float s, float lse) const {
    // P <= 1 whatever S rounds to (docs/decisions.md); NaN stays
    return ptx::exp2_approx(ptx::min_or_nan(__fmaf_rn(s, args.exponent, -lse), 0.f));
  }

  // Calls each(x, i, j, half, column, visible) for each pair of a lane's scores x[0], x[1]: row slot (i, half), columns
  // `column` and the next. visible(e): is x[e]?
  template <bool kMasked, typename F>
  CUTLASS_DEVICE void each_pair(Scores& s, Seen const& seen, F each) const {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Scores::kTilesN; ++j) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Scores::kTilesM; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          const uint32_t row = seen.rows[2 * i + half];
          each(&s.at[i][j][2 * half], i, j, half, j * 8 + (lane & 3) * 2,
               [&](int e) { return !kMasked || (row >> (2 * j + e) & 1) != 0; });
        }
      }
    }
  }
  CUTLASS_DEVICE float2 statistic(float const* of_scores, int column) const {
    return *reinterpret_cast<float2 const*>(of_scores + column);
  }

  // S -> P. lse: of these scores.
  template <bool kMasked>
  CUTLASS_DEVICE void weigh(Scores& s, float const* lse, Seen const& seen) const {
    each_pair<kMasked>(s, seen, [&](float* x, int, int, int, int column, auto visible) {
      const float2 of = statistic(lse, column);
      const float first = weight(x[0], of.x), second = weight(x[1], of.y);
      x[0] = visible(0) ? first : 0.f;
      x[1] = visible(1) ? second : 0.f;
    });
  }
  CUTLASS_DEVICE void round(Scores& s, ScoreWeights& w) const {
    each_pair<false>(s, Seen{}, [&](float* x, int i, int j, int half, int, auto) {
      w.pair(i, j, half) = pack<Element>(x[0], x[1]);
    });
  }
  // P -> -P where it is dropped, two queries of a key at once. Of each call of the generator the marks of its two tiles
  // of 8 queries, of keys c and c + 8: upper bits of halves. Lanes of even keys call for the first tile, those of odd
  // keys for the second, and each gives the other its half (common/dropout.h).
  static constexpr int kCalls = Scores::kTilesM * Scores::kTilesN / 2;
  struct Marks {
    uint32_t of_tile[kCalls][2][2];
  };
  // query0: the first query of the scores.
  CUTLASS_DEVICE void draw_marks(Marks& marks, int call, DropoutHead const& draw, int query0) const {
    const Below below(uint32_t(f.dropout.threshold));
    const bool odd = lane & 4;
    const uint32_t mine = odd ? 0x7632 : 0x5410, theirs = odd ? 0x5410 : 0x7632;  // of __byte_perm
    const int key = key0 + warp_key() + call / (Scores::kTilesN / 2) * 16 + (lane >> 2);
    const int tile = call % (Scores::kTilesN / 2) * 2 + (odd ? 1 : 0);
    const uint4 cells = draw.cells(query0 + tile * 8 + (lane & 3) * 2, key);
    const auto halves = [&](uint32_t which) {  // of keys c and c + 8: an even query's and an odd one's
      return make_uint2(__byte_perm(cells.x, cells.z, which), __byte_perm(cells.y, cells.w, which));
    };
    const uint2 own = halves(mine), other = exchange_rows(halves(theirs));
    const uint2 tiles[2] = {choose(odd, other, own), choose(odd, own, other)};
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 2; ++k) {
      marks.of_tile[call][k][0] = below.test(tiles[k].x);
      marks.of_tile[call][k][1] = below.test(tiles[k].y);
    }
  }
  CUTLASS_DEVICE void apply_marks(ScoreWeights& w, Marks const& marks, int call) const {
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < 4; ++k) {
      const int i = call / (Scores::kTilesN / 2), j = call % (Scores::kTilesN / 2) * 2 + k / 2;
      w.pair(i, j, k % 2) ^= marks.of_tile[call][k / 2][k % 2] & Below::kSigns;
    }
  }
  CUTLASS_DEVICE DropoutHead draw_of(int head_member) const {
    DropoutHead draw = smem.start.dropout;
    draw.batch_head += head_member;
    return draw;
  }
  CUTLASS_DEVICE void mark_dropped(ScoreWeights& w, int head_member, int query0) const {
    if constexpr (Traits::kDropout) {
      if (Traits::kBias && f.dropout.seed == nullptr) return;  // full rows serve calls without, too
      const DropoutHead draw = draw_of(head_member);
      Marks marks;
      CUTLASS_PRAGMA_UNROLL
      for (int call = 0; call < kCalls; ++call) {
        draw_marks(marks, call, draw, query0);
        apply_marks(w, marks, call);
      }
    }
  }
  // Which of two 16-bit numbers are below a threshold of up to 65536: their upper bits.
  struct Below {
    static constexpr uint32_t kSigns = 0x80008000u;
    uint32_t rest, upper;
    CUTLASS_DEVICE explicit Below(uint32_t threshold)
        : rest((threshold > 0xffff ? 0x8000 : threshold & 0x7fff) * 0x10001), upper(threshold > 0x7fff ? kSigns : 0) {}
    CUTLASS_DEVICE uint32_t test(uint32_t two) const {
      const uint32_t reached = (two | kSigns) - rest;  // upper bits: 15 bits are not below. No borrow leaves a half
      return ptx::logic<0x4d>(two, upper, reached);    // (~two & upper) | (~(two ^ upper) & ~reached)
    }
  };
  // Dropped weights become 0.
  CUTLASS_DEVICE void drop(ScoreWeights& w) const {
    if constexpr (Traits::kDropout) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < ScoreWeights::kTilesM * ScoreWeights::kSteps * 4; ++i) {
        uint32_t& x = w.at[i / 4 / ScoreWeights::kSteps][i / 4 % ScoreWeights::kSteps][i % 4];
        x = positive_part<Element>(x);
      }
    }
  }

  // dP -> dS, rounded. weights(i, j, half): a pair of P.
  template <bool kMasked, typename F>
  CUTLASS_DEVICE void differentiate(Scores& dp, ScoreWeights& w, float const* delta, Seen const& seen,
                                    F weights) const {
    each_pair<kMasked>(dp, seen, [&](float* x, int i, int j, int half, int column, auto visible) {
      const float2 of = statistic(delta, column), two = weights(i, j, half);
      const float first = two.x * (x[0] - of.x), second = two.y * (x[1] - of.y);
      w.pair(i, j, half) = pack<Element>(visible(0) ? first : 0.f, visible(1) ? second : 0.f);
    });
  }
  // The same with dropout, P D dP - P delta. weights(i, j, half): a pair of P, its sign set where it is dropped.
  template <bool kMasked, typename F>
  CUTLASS_DEVICE void differentiate_dropped(Scores& dp, ScoreWeights& w, float const* delta, Seen const& seen,
                                            F weights) const {
    const float half_scale = 0.5f * f.dropout.keep_scale;
    each_pair<kMasked>(dp, seen, [&](float* x, int i, int j, int half, int column, auto visible) {
      const float2 of = statistic(delta, column), two = unpack<Element>(weights(i, j, half));
      // With p < 0 where it is dropped p + |p| is 2 P D / scale: no absolute value but in an addition, which has it
      // free.
      const auto ds = [&](float p, float dp, float delta) {
        return __fmaf_rn(p + fabsf(p), __fmaf_rn(dp, half_scale, -delta), p * delta);
      };
      const float first = ds(two.x, x[0], of.x), second = ds(two.y, x[1], of.y);
      w.pair(i, j, half) = pack<Element>(visible(0) ? first : 0.f, visible(1) ? second : 0.f);
    });
  }

  // dS^T of this warp's keys and queries query0 .., to shared memory.
  CUTLASS_DEVICE void store_ds(ScoreWeights const& w, int ds_buffer, int query0) const {
    const uint32_t to = ptx::shared_address(smem.ds[ds_buffer]) + ScoreTile::down_first(warp_key(), query0, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < ScoreWeights::kTilesM; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < ScoreWeights::kSteps; ++step) {
        ptx::store_matrices((to ^ sixteen_columns(step)) + i * ScoreTile::kSixteenRows, w.at[i][step]);
      }
    }
  }
  // The same the other way.
  CUTLASS_DEVICE void load_ds(ScoreWeights& w, int ds_buffer, int query0) const {
    const uint32_t from = ptx::shared_address(smem.ds[ds_buffer]) + ScoreTile::down_first(warp_key(), query0, lane);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < ScoreWeights::kTilesM; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int step = 0; step < ScoreWeights::kSteps; ++step) {
        ptx::load_matrices<false>(w.at[i][step], (from ^ sixteen_columns(step)) + i * ScoreTile::kSixteenRows);
      }
    }
  }

  // Where a warp of role 0 leaves P for others: registers by lane. One part: dS of the same keys lies there afterwards.
  CUTLASS_DEVICE uint4* weights_place(int ds_buffer, int of_part) const {
    constexpr int kPieces = Traits::kWarpKeys * Traits::kScoreWidth / 8;  // of 16 bytes, of one warp
    uint4* place = reinterpret_cast<uint4*>(smem.ds[ds_buffer]);
    if constexpr (kParts > 1) place = smem.p;
    return place + (group * kParts + of_part) * kPieces + lane;
  }
  CUTLASS_DEVICE void hand_over(ScoreWeights const& w, int ds_buffer) const {
    uint4* to = weights_place(ds_buffer, part);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * ScoreWeights::kSteps; ++i) {
      to[i * 32] = reinterpret_cast<uint4 const&>(w.at[i / ScoreWeights::kSteps][i % ScoreWeights::kSteps]);
    }
  }
  CUTLASS_DEVICE void take_over(ScoreWeights& w, int ds_buffer, int of_part) const {
    uint4 const* from = weights_place(ds_buffer, of_part);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2 * ScoreWeights::kSteps; ++i) {
      reinterpret_cast<uint4&>(w.at[i / ScoreWeights::kSteps][i % ScoreWeights::kSteps]) = from[i * 32];
    }
  }

  // --- dQ ---

  // This warp's part of dQ = dS K of a step: added to the sums, which lie in blocks of 8 rows and 16 columns in the
  // order of the lanes that hold them (params.h).
  CUTLASS_DEVICE void add_query_gradient(Step const& step, int ds_buffer) const {
    if (p.query_sums.data == nullptr) return;  // not wanted
    const int row0 = warp % Traits::kQueryGroups * 32;
    const int column0 = warp / Traits::kQueryGroups * Traits::kQueryColumns;
    const uint32_t a = ptx::shared_address(smem.ds[ds_buffer]) + ScoreTile::across_first(0, row0, lane);
    const int row = step.tile * kTileN + row0, columns = p.query_sums.columns;
    const int64_t block = offset(offset(batch, f.heads) + head + step.head, p.query_sums.blocks) + row / 8;
    float* to = p.query_sums.data + offset(block + first_sum_block(n.query_row, n.sequence), 8 * columns) + lane * 4;
    CUTLASS_PRAGMA_UNROLL
    for (int column = column0; column < column0 + Traits::kQueryColumns; column += Traits::kQueryStep) {
      if (column >= columns) break;
      const uint32_t b = ptx::shared_address(smem.key) + KeyTile::down_first(0, column, lane);
      typename Traits::QueryGradient sums;
      sums.clear();
      multiply_columns<Element, ScoreTile, KeyTile>(sums, a, b);
      add_to_sums(sums, to + column * 8, 8 * columns, n.queries - row, columns - column);
    }
  }
  // stride: from one 8 rows to the next. rows, columns: what is left from the warp's first ones on.
  CUTLASS_DEVICE void add_to_sums(typename Traits::QueryGradient const& sums, float* to, int stride, int rows,
                                  int columns) const {
    if (Traits::kWholeSums && rows >= 32 && columns >= Traits::kQueryStep) {
      each_of_sums(sums, to, stride, [](int, int) { return true; });
    } else {
      each_of_sums(sums, to, stride, [&](int row, int column) { return row + (lane >> 2) < rows && column < columns; });
    }
  }
  template <typename F>
  CUTLASS_DEVICE void each_of_sums(typename Traits::QueryGradient const& sums, float* to, int stride, F wanted) const {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Traits::QueryGradient::kTilesN; j += 2) {
        float const* low = &sums.at[i / 2][j][i % 2 * 2];
        float const* high = &sums.at[i / 2][j + 1][i % 2 * 2];
        if (!wanted(i * 8, j * 8)) continue;
        ptx::add_to_global(to + i * stride + j * 64, low[0], low[1], high[0], high[1]);
      }
    }
  }
};

}  // namespace registers
}  // namespace memeff
