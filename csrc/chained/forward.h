// The forward kernel: S = Q K^T and O += P V chained in one thread block per (batch, head, query tile, value slab).
//
// Resident first product (sm80, K <= kMaxK), one key block, time runs down:
//
//   copies (cp.async)          tensor cores                 other units
//   V(j)   in flight     |     S = Q K(j)^T            |
//   K(j+1) in flight     |                             |    mask, row maximum, P = 2^(..), P -> shared memory
//   K(j+1) in flight     |     O = O * alpha + P V(j)  |
//
// with two barriers a key block where each warp owns whole rows (kWarpsN = 1), three otherwise. The streamed first
// product (any K, every architecture) starts its pipeline for block j+1 while P V(j) runs.
#pragma once

#include "chained/forward_tile.h"
#include "common/wide.h"

namespace memeff {
namespace chained {

template <typename Traits>
struct ForwardBlock : ForwardTile<Traits> {
  using Tile = ForwardTile<Traits>;
  using Tile::args;
  using Tile::at;
  using Tile::find_maximum;
  using Tile::finish_scores;
  using Tile::kAsync;
  using Tile::kExchange;
  using Tile::key_at;
  using Tile::keys_begin;
  using Tile::keys_end;
  using Tile::kFlush;
  using Tile::kInMemory;
  using Tile::kResident;
  using Tile::kTileM;
  using Tile::kTileN;
  using Tile::kValueTile;
  using Tile::lane;
  using Tile::n;
  using Tile::p;
  using Tile::query;
  using Tile::row0;
  using Tile::row_leader;
  using Tile::rows;
  using Tile::smem;
  using Tile::start_bias;
  using Tile::state;
  using Tile::store_weights;
  using Tile::thread;
  using Tile::Tile;  // constructors
  using Tile::value0;
  using Tile::value_at;
  using Tile::values;
  using Tile::warp;
  using Tile::warp_column;
  using Tile::warp_n;
  using Tile::warp_row;
  using typename Tile::CoordO;
  using typename Tile::CoordS;
  using typename Tile::Element;
  using typename Tile::Exponent;
  using typename Tile::FragmentO;
  using typename Tile::FragmentS;
  using typename Tile::PvMma;
  using typename Tile::QkMma;
  static constexpr bool kWide = sizeof(Element) == 4;  // what the epilogue writes is fp32 anyway

  // --- second product
  // ---------------------------------------------------------------------------------------------------

  CUTLASS_DEVICE void accumulate(FragmentO& o, FragmentS const& s, PvMma const& pv, float const (&alpha)[CoordS::kRows],
                                 int depth) const {
    bool moved = false;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) moved |= alpha[i] != 1.f;
    // The maximum seldom rises after the first blocks: one vote saves the multiplications.
    if (__any_sync(0xffffffff, moved)) each_row(o, [&](int i, int e) { o[e] *= alpha[i]; });
    if constexpr (Traits::Output::kWeightsInRegisters) {
      pv(o, s, depth);
    } else {
      multiply_weights(o, pv, depth);
    }
  }

  // TF32: where few queries or keys decide over the result, P is not rounded: eager's error is then that of S and V
  // alone, and delta, which the backward pass takes from the output, goes with dS, whose P is not rounded either.
  CUTLASS_DEVICE void multiply_weights(FragmentO& o, PvMma const& pv, int depth) const {
    if constexpr (Traits::kTf32) {
      pv(o, depth, n.queries <= 64 || n.keys <= 64);
    } else {
      pv(o, depth);
    }
  }

  template <typename F>
  CUTLASS_DEVICE static void each_row(FragmentO&, F f) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordO::kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < CoordO::kColumns; ++j) f(i, CoordO::index(i, j));
    }
  }

  // --- output
  // -----------------------------------------------------------------------------------------------------------

  // Adds up the row sums over lanes and warps, leaves 1/sum (0 for a row that sees nothing) in `inverse`, writes the
  // LSE.
  CUTLASS_DEVICE void finish_rows(float (&inverse)[CoordS::kRows]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) {
      state.sum[i] = reduce_row<CoordS>(state.sum[i], [](float a, float b) { return a + b; });
      if (kExchange && row_leader()) smem.scratch.row_part[warp_n][warp_row() + CoordS::row(lane, i)] = state.sum[i];
    }
    __syncthreads();  // sums are published; so are the scratch pointers, where no key block came before
    float* lse = smem.scratch.lse;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) {
      const int row = warp_row() + CoordS::row(lane, i);
      if (kExchange) {
        state.sum[i] = 0.f;
        CUTLASS_PRAGMA_UNROLL
        for (int n = 0; n < Traits::kWarpsN; ++n) state.sum[i] += smem.scratch.row_part[n][row];
      }
      inverse[i] = state.sum[i] == 0.f ? 0.f : 1.f / state.sum[i];
      if constexpr (Traits::kDropout) inverse[i] *= p.dropout.keep_scale;
      if (lse != nullptr && warp_n == 0 && row_leader() && row < rows) store_sum(lse + row, i);
    }
  }

  // The row's log-sum-exp; of a part of the keys, its sum.
  CUTLASS_DEVICE void store_sum(float* to, int i) const {
    const float reference = Exponent::reference(state.max[i], args.exponent);
    Partial const& part = p.partial;
    if (part.sum != nullptr) {
      const float2 natural = Exponent::natural(reference);
      *to = state.sum[i];
      to[part.reference - part.sum] = natural.x;
      to[part.reference_low - part.sum] = natural.y;
      return;
    }
    const float2 both = log_sum_exp<Exponent>(reference, state.sum[i]);
    *to = both.x;
    if (p.lse.low == nullptr) return;
    const bool corrected = kWide && state.sum[i] != 0.f;  // of a row that sees nothing the low part is 0
    to[p.lse.low - p.lse.data] = corrected ? both.y + log_error(state.sum[i]) : both.y;
  }

  // O of 16-bit inputs in fp32 (params.h: Partial).
  CUTLASS_DEVICE void store_wide(FragmentO const& o, float const (&inverse)[CoordS::kRows]) const {
    const int first = warp_n * (kValueTile / Traits::kWarpsN);
    // As in the epilogue: a row that sees nothing is 0, whatever 0 * V gave.
    store_within<CoordO>(static_cast<float*>(smem.scratch.out), p.partial.out.stride_m, warp_row(), first, rows, values,
                         lane, [&](int i, int e) { return inverse[i] == 0.f ? 0.f : o[e] * inverse[i]; });
  }

  // Factors of the epilogue.
  CUTLASS_DEVICE auto& scales() const {
    if constexpr (Traits::kInParts) {
      return smem.flush.scales;
    } else {
      return smem.scratch;
    }
  }
  CUTLASS_DEVICE void publish(float (&to)[kTileM], float const (&factor)[CoordS::kRows]) const {
    if (warp_n != 0 || !row_leader()) return;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) to[warp_row() + CoordS::row(lane, i)] = factor[i];
  }

  // Writes (or adds to) columns [column0, column0 + kValueTile) of the output. Barriers inside order the scratch reads.
  template <typename Storage>
  CUTLASS_DEVICE void store_output(FragmentO const& o, Storage& storage, int column0, bool add) {
    const cutlass::MatrixCoord extent(rows, values - column0);
    const bool wide = kWide && p.partial.out.data != nullptr;
    const cutlass::layout::RowMajor layout(wide ? p.partial.out.stride_m : p.out.stride_m);
    Element* out = static_cast<Element*>(smem.scratch.out);
    typename Traits::OutputIterator::Params to(layout);
    typename Traits::OutputIterator destination(to, out + column0, extent, thread);
    typename Traits::Epilogue epilogue(storage, thread, warp, lane);
    if constexpr (Traits::kHasSource) {
      typename Traits::SourceIterator::Params from(layout);
      typename Traits::SourceIterator source(from, out + column0, extent, thread);
      typename Traits::Visitor visitor(destination, typename Traits::Source(source, scales().source_scale, add),
                                       scales().scale);
      epilogue(visitor, o);
    } else {
      typename Traits::Visitor visitor(destination, typename Traits::Source(), scales().scale);
      epilogue(visitor, o);
    }
  }

  // --- main loops ---

  CUTLASS_DEVICE void start_values(typename Traits::ValueLoader& loader, int key0, int column0) const {
    loader.start(value_at(key0) + column0, p.value.stride_m, keys_end - key0, values - column0);
    if (kAsync) cutlass::arch::cp_async_fence();
  }

  CUTLASS_DEVICE bool is_by_fma() const {
    if (p.head_dim <= Traits::kFmaDepth) return true;
    return p.head_dim <= Traits::kFewFmaDepth && are_few_scores(this->query_of(n.queries - 1) + 1, n.keys);
  }
  CUTLASS_DEVICE void multiply_scores(FragmentS& s, QkMma const& qk) const {
    if constexpr (Traits::kFmaScores) {
      if (is_by_fma()) {
        auto a = smem.qk.operand_A_ref();
        auto b = smem.qk.operand_B_ref();
        Traits::FmaScores::add(s, a.data(), a.layout(), b.data(), b.layout(), warp_row(), warp_column(), lane,
                               p.head_dim);
        return;
      }
    }
    qk(s, p.head_dim);
  }

  // What fills an operand; `place`: where its copies land first, if they are split on the way.
  template <typename Loader, typename Ref>
  CUTLASS_DEVICE Loader loader_of(Ref ref, void* place) const {
    if constexpr (Traits::kInParts) {
      return Loader(ref, place, thread);
    } else {
      return Loader(ref, thread);
    }
  }

  CUTLASS_DEVICE void* staging() const {
    if constexpr (Traits::kInParts) return smem.scratch.staging;
    return nullptr;
  }

  CUTLASS_DEVICE void run_resident(FragmentO& o) {
    auto queries = loader_of<typename Traits::QueryLoader>(smem.qk.operand_A_ref(), smem.qk.operand_B.data());
    auto keys = loader_of<typename Traits::KeyLoader>(smem.qk.operand_B_ref(), staging());
    auto loader = loader_of<typename Traits::ValueLoader>(smem.pv.operand_B_ref(), staging());
    const QkMma qk(smem.qk, thread, warp, lane);
    const PvMma pv(smem.pv, thread, warp, lane);
    if (keys_begin < keys_end) {
      queries.start(query, p.query.stride_m, rows, p.head_dim);
      if constexpr (Traits::kInParts) {
        static_assert(Traits::QueryLoader::kStagingBytes <=
                          sizeof(smem.qk.operand_B) + sizeof(smem.pv) + sizeof(smem.scratch.staging),
                      "the query tile passes through the place of the keys, the values and their staging area");
        cutlass::arch::cp_async_fence();
        cutlass::arch::cp_async_wait<0>();
        queries.finish();
        __syncthreads();  // every thread has read its queries there
      }
      keys.start(key_at(keys_begin), p.key.stride_m, keys_end - keys_begin, p.head_dim);
      cutlass::arch::cp_async_fence();
      start_bias(keys_begin);
    }
    for (int key0 = keys_begin; key0 < keys_end; key0 += kTileN) {
      cutlass::arch::cp_async_wait<0>();
      keys.finish();
      __syncthreads();  // K(j) is there; every warp is done with P and V(j-1)
      start_values(loader, key0, 0);
      FragmentS s;
      s.clear();
      multiply_scores(s, qk);
      finish_scores(s, key0);
      float alpha[CoordS::kRows];
      find_maximum(s, alpha);
      cutlass::arch::cp_async_wait<0>();
      loader.finish();
      __syncthreads();  // V(j) is there, maxima are published; every warp is done with K(j)
      if (key0 + kTileN < keys_end) {
        keys.start(key_at(key0 + kTileN), p.key.stride_m, keys_end - key0 - kTileN, p.head_dim);
        cutlass::arch::cp_async_fence();
        start_bias(key0 + kTileN);
      }
      store_weights(s, alpha, key0);
      if (kExchange) {
        __syncthreads();  // P is there
      } else if (!Traits::Output::kWeightsInRegisters) {
        __syncwarp();  // a warp reads only the rows of P that it wrote
      }
      accumulate(o, s, pv, alpha, keys_end - key0);
      if constexpr (kFlush) flush_now_and_then(o, key0);
    }
  }

  CUTLASS_DEVICE void flush_now_and_then(FragmentO& o, int key0) {
    const int done = key0 + kTileN;
    if (done % Traits::kFlushKeys == 0 && done < keys_end) flush(o);
  }

  // fp32: adds O to the output and starts it anew.
  CUTLASS_DEVICE void flush(FragmentO& o) {
    float one[CoordS::kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) one[i] = 1.f;
    if constexpr (Traits::kInParts) __syncthreads();  // every warp is done with V, whose place the factors take
    publish(scales().scale, one);
    publish(scales().source_scale, state.pending);
    __syncthreads();  // factors are published; every warp is done with P and V, whose place the epilogue takes
    if constexpr (Traits::kInParts) {
      store_output(o, smem.flush.epilogue, 0, state.aside);
    } else {
      store_output(o, smem.flush, 0, state.aside);
    }
    o.clear();
    state.set_aside();
  }

  CUTLASS_DEVICE TileSource<Element> query_source() const { return {query, p.query.stride_m, rows, p.head_dim}; }
  CUTLASS_DEVICE TileSource<Element> key_source(int key0) const {
    return {key_at(key0), p.key.stride_m, keys_end - key0, p.head_dim};
  }

  CUTLASS_DEVICE void run_streamed(FragmentO& o) {
    if (keys_begin >= keys_end) return;
    typename Traits::ValueLoader loader(smem.pv.operand_B_ref(), thread);
    StreamedProduct<Traits> qk(smem.qk, thread, warp, lane, this->few, p.dropout.seed != nullptr);
    const PvMma pv(smem.pv, thread, warp, lane);
    start_bias(keys_begin);
    auto pass = qk.start(query_source(), key_source(keys_begin));
    for (int key0 = keys_begin; key0 < keys_end; key0 += kTileN) {
      if (kAsync && !kInMemory) {
        if (key0 > keys_begin) __syncthreads();  // every warp is done with V(j-1)
        start_values(loader, key0, 0);
      }
      FragmentS s;
      qk.finish(s, pass, query_source(), key_source(key0));
      if (!kAsync && !kInMemory) start_values(loader, key0, 0);
      finish_scores(s, key0);
      float alpha[CoordS::kRows];
      find_maximum(s, alpha);
      if (kExchange) __syncthreads();  // maxima are published
      store_weights(s, alpha, key0);
      if (!kInMemory) loader.finish();
      const bool last = key0 + kTileN >= keys_end;
      if constexpr (kInMemory) publish_factors(alpha, last);
      __syncthreads();  // P (and V where it passed through registers) is there; every warp is done with K(j)
      if (!last) {
        start_bias(key0 + kTileN);
        pass = qk.start(query_source(), key_source(key0 + kTileN));
      }
      if constexpr (kInMemory) {
        add_to_output(loader, pv, key0);
      } else {
        accumulate(o, s, pv, alpha, keys_end - key0);
      }
      if constexpr (kFlush) flush_now_and_then(o, key0);
    }
  }

  // OutputInMemory: factors of this block's epilogues. The last block divides by the sums.
  CUTLASS_DEVICE void publish_factors(float (&alpha)[CoordS::kRows], bool last) {
    float scale[CoordS::kRows];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < CoordS::kRows; ++i) scale[i] = 1.f;
    if (last) {
      if (kExchange)
        __syncthreads();  // every warp has read the maxima: their place takes
                          // the sums
      finish_rows(scale);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < CoordS::kRows; ++i) alpha[i] *= scale[i];
    }
    publish(scales().scale, scale);
    publish(scales().source_scale, alpha);
  }

  // OutputInMemory: P V(j), one value tile after the other, added to the output.
  CUTLASS_DEVICE void add_to_output(typename Traits::ValueLoader& loader, PvMma const& pv, int key0) {
    for (int column0 = 0; column0 < values; column0 += kValueTile) {
      start_values(loader, key0, column0);
      loader.finish();
      if (kAsync) cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // V's tile is there
      FragmentO o;
      o.clear();
      multiply_weights(o, pv, keys_end - key0);
      store_output(o, smem.epilogue, column0, key0 > keys_begin);
      __syncthreads();  // every warp is done with V's tile and the epilogue's storage
    }
  }

  CUTLASS_DEVICE void run() {
    if (rows <= 0) return;
    if (p.partial.splits > 1) ptx::admit_next();
    FragmentO o;
    o.clear();
    if constexpr (kResident) {
      run_resident(o);
    } else {
      run_streamed(o);
    }
    if (kInMemory && keys_begin < keys_end) return;
    float inverse[CoordS::kRows];
    bool add = false;
    if constexpr (kFlush) {
      add = state.aside;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < CoordS::kRows; ++i) state.sum[i] += state.sum_aside[i];
    }
    finish_rows(inverse);
    if constexpr (!kWide) {
      if (p.partial.out.data != nullptr) {
        store_wide(o, inverse);
        return;
      }
    }
    publish(scales().scale, inverse);
    if constexpr (kFlush) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < CoordS::kRows; ++i) state.pending[i] *= inverse[i];
      publish(scales().source_scale, state.pending);
    }
    __syncthreads();  // the epilogue's storage overlaps the first product's operands
    for (int column0 = 0; column0 < (kInMemory ? values : 1); column0 += kValueTile) {
      store_output(o, smem.last_epilogue, column0, add);
    }
  }
};

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocksPerSm)
    forward_kernel(__grid_constant__ const ForwardArgs args) {
  extern __shared__ __align__(128) unsigned char memory[];
  if (std::is_same<typename Traits::Element, float>::value && is_for_another_kernel(args.p)) return;
  ForwardBlock<Traits>(args, *reinterpret_cast<typename Traits::SharedStorage*>(memory)).run();
}

}  // namespace chained
}  // namespace memeff
