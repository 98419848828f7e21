// S = A B^T with both operands streaming from global memory through a pipeline in shared memory: any contraction
// length.
#pragma once

#include "chained/streamed_mma.h"
#include "cutlass/cutlass.h"

namespace memeff {
namespace chained {

constexpr int kFewQueries = 16;

// Traits: QkMma (EarlyStart or StreamedMma), kLoadedStream, kTileN, kQkStep, Arch::kQkChunk.
//
//   auto pass = product.start(a, b);      the first tiles are on their way
//   product.finish(acc, pass, a, b);      acc = A B^T, for A of kTileM and B of kTileN rows
//
// Ends with all cp.async landed and a barrier where copies are asynchronous. Between finish() and the next start()
// there must be a barrier.
template <typename Traits>
class StreamedProduct {
 public:
  using Mma = typename Traits::QkMma;
  using Element = typename Traits::Element;
  using FragmentS = typename Traits::FragmentS;
  using Source = TileSource<Element>;  // columns: the whole contraction
  static constexpr bool kLoaded = Traits::kLoadedStream;
  static constexpr int kChunk = Traits::Arch::kQkChunk;
  static constexpr int kFewChunk = 16;

  // few: so few queries that the rounding of the sums shows beside eager's (docs/performance.md). With kChunk > 0
  // fp32's sums are then shorter and added up with their rounding errors. dropped: dropout takes weights away.
  CUTLASS_DEVICE StreamedProduct(typename Mma::Base::SharedStorage& storage, int thread, int warp, int lane, bool few,
                                 bool dropped)
      : mma_(storage, thread, warp, lane), thread_(thread), few_(few && sizeof(Element) == 4), dropped_(dropped) {}

  CUTLASS_DEVICE auto start(Source const& a, Source const& b) { return start_at(a, b, 0); }

  template <typename Pass>
  CUTLASS_DEVICE void finish(FragmentS& acc, Pass& pass, Source const& a, Source const& b) {
    acc.clear();
    if constexpr (kLoaded) {
      if constexpr (Mma::kSums) {
        mma_.finish(acc, pass.a, pass.b, dropped_);
        return;
      }
    }
    mma_.finish(acc, pass.a, pass.b);
    if constexpr (kChunk > 0) {
      FragmentS error;
      error.clear();
#pragma unroll 1
      for (int k0 = chunk(); k0 < a.columns; k0 += chunk()) {
        __syncthreads();  // the pass before has read its operands
        pass = start_at(a, b, k0);
        FragmentS part;
        part.clear();
        mma_.finish(part, pass.a, pass.b);
        CUTLASS_PRAGMA_UNROLL
        for (int e = 0; e < FragmentS::kElements; ++e) {
          const float total = __fadd_rn(acc[e], part[e]);
          if (few_) error[e] += sum_error(acc[e], part[e], total);
          acc[e] = total;
        }
      }
      if (!few_) return;
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < FragmentS::kElements; ++e) acc[e] = corrected(acc[e], error[e]);
    }
  }

 private:
  Mma mma_;
  int thread_;
  bool few_, dropped_;

  CUTLASS_DEVICE int chunk() const { return few_ ? kFewChunk : kChunk; }

  template <typename SourceA, typename SourceB>
  struct Pass {
    SourceA a;
    SourceB b;
  };

  // Columns from k0 on that one pass covers.
  CUTLASS_DEVICE int pass_columns(Source const& a, int k0) {
    const int left = a.columns - k0;
    return kChunk > 0 && left > chunk() ? chunk() : left;
  }

  CUTLASS_DEVICE auto start_at(Source const& a, Source const& b, int k0) {
    const int columns = pass_columns(a, k0);
    if constexpr (kLoaded) {
      Pass<Source, Source> pass{{a.data + k0, a.row_stride, a.rows, columns},
                                {b.data + k0, b.row_stride, b.rows, columns}};
      mma_.start(pass.a, pass.b);
      return pass;
    } else {
      using A = typename Mma::IteratorA;
      using B = typename Mma::IteratorB;
      const int b_rows = b.rows < Traits::kTileN ? b.rows : Traits::kTileN;
      Pass<A, B> pass{A(typename A::Params(cutlass::layout::RowMajor(a.row_stride)), const_cast<Element*>(a.data) + k0,
                        {a.rows, columns}, thread_, {0, 0}),
                      B(typename B::Params(cutlass::layout::ColumnMajor(b.row_stride)),
                        const_cast<Element*>(b.data) + k0, {columns, b_rows}, thread_, {0, 0})};
      mma_.start(pass.a, pass.b, (columns + Traits::kQkStep - 1) / Traits::kQkStep);
      return pass;
    }
  }
};

}  // namespace chained
}  // namespace memeff
