// S = Q K^T for fp32 and any K: tiles of both operands stream through two buffers, each multiplied from shared memory.
//
// EarlyStart over CUTLASS's multistage loop would serve too, but its 3xTF32 sums a whole stage before it rounds and
// cuts the high part toward zero, which the tolerance rule does not allow (docs/performance.md). Same contract as
// EarlyStart: start() fills the first buffer; finish() runs and ends with all copies landed and a barrier.
#pragma once

#include "chained/fma_product.h"
#include "cutlass/arch/memory_sm80.h"
#include "cutlass/cutlass.h"

namespace memeff {
namespace chained {

// Where a tile of an operand comes from: rows x columns (K) in global memory.
template <typename Element>
struct TileSource {
  Element const* data;
  int64_t row_stride;
  int rows, columns;
};

// Two buffers for a product of Mma's operands, whatever Mma does with them.
template <typename Storage>
struct StreamedBuffers {
  Storage buffers[2];
};

// Mma: a ResidentMma over one buffer. kSums: finish() may be asked for sums of kSumColumns columns, which then join the
// accumulator: a running sum rounds at each addition at its full size, and dropout leaves few weights to hide that.
template <typename Mma, typename LoaderA, typename LoaderB, int kStep, bool kSums_ = false>
class StreamedMma {
 public:
  using Element = typename LoaderA::Element;
  using FragmentC = typename Mma::FragmentC;
  using Operator = typename Mma::Operator;
  using Source = TileSource<Element>;
  static constexpr bool kSums = kSums_;
  static constexpr int kSumColumns = 128;
  static_assert(kSumColumns % kStep == 0, "whole tiles");
  struct Base {
    using SharedStorage = StreamedBuffers<typename Mma::Base::SharedStorage>;
  };

  CUTLASS_DEVICE StreamedMma(typename Base::SharedStorage& storage, int thread, int warp, int lane)
      : storage_(storage), thread_(thread), warp_(warp), lane_(lane) {}

  CUTLASS_DEVICE void start(Source const& a, Source const& b) { load(a, b, 0); }

  CUTLASS_DEVICE void finish(FragmentC& acc, Source const& a, Source const& b) {
    each_buffer(a, b, [&](auto& buffer, int left) {
      const Mma mma(buffer, thread_, warp_, lane_);
      mma(acc, left);
    });
  }
  // in_sums: else the bits are those of the other finish().
  CUTLASS_DEVICE void finish(FragmentC& acc, Source const& a, Source const& b, bool in_sums) {
    static_assert(kSums, "two accumulators");
    FragmentC sum;
    sum.clear();
    int columns = 0;
    each_buffer(a, b, [&](auto& buffer, int left) {
      const Mma mma(buffer, thread_, warp_, lane_);
      mma(sum, left);
      columns += kStep;
      if (in_sums && columns % kSumColumns != 0 && left > kStep) return;
      CUTLASS_PRAGMA_UNROLL
      for (int e = 0; e < FragmentC::kElements; ++e) acc[e] += sum[e];
      sum.clear();
    });
  }

 protected:
  typename Base::SharedStorage& storage_;
  int thread_, warp_, lane_;

  // f(buffer, columns of K that are left) for one tile of K after the other.
  template <typename F>
  CUTLASS_DEVICE void each_buffer(Source const& a, Source const& b, F f) {
#pragma unroll 1
    for (int k = 0; k < a.columns; k += kStep) {
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // this tile is there; every warp is done with the other buffer
      if (k + kStep < a.columns) load(a, b, k + kStep);
      f(storage_.buffers[(k / kStep) & 1], a.columns - k);
    }
    __syncthreads();
  }

 private:
  CUTLASS_DEVICE void load(Source const& a, Source const& b, int k) {
    auto& buffer = storage_.buffers[(k / kStep) & 1];
    LoaderA(buffer.operand_A_ref(), thread_).start(a.data + k, a.row_stride, a.rows, a.columns - k);
    LoaderB(buffer.operand_B_ref(), thread_).start(b.data + k, b.row_stride, b.rows, b.columns - k);
    cutlass::arch::cp_async_fence();
  }
};

// The same tiles, each score a compensated sum over all of K.
template <typename Coord, typename Mma, typename LoaderA, typename LoaderB, int kStep>
class CompensatedMma : public StreamedMma<Mma, LoaderA, LoaderB, kStep> {
 public:
  using Streamed = StreamedMma<Mma, LoaderA, LoaderB, kStep>;
  using typename Streamed::FragmentC;
  using typename Streamed::Source;
  using Operator = typename Mma::Operator;
  using Streamed::Streamed;

  CUTLASS_DEVICE void finish(FragmentC& acc, Source const& a, Source const& b) {
    using Product = FmaProduct<Coord, typename Operator::LayoutA, typename Operator::LayoutB>;
    static_assert(Product::kBlock == Coord::kColumns, "the sums of a warp tile must be one block");
    using Warps = typename Mma::WarpCount;
    const int row0 = this->warp_ % Warps::kM * Operator::Shape::kM;
    const int column0 = this->warp_ / Warps::kM * Operator::Shape::kN;
    CompensatedSum sums[Coord::kRows][Product::kBlock];
    this->each_buffer(a, b, [&](auto& buffer, int left) {
      auto query = buffer.operand_A_ref();
      auto key = buffer.operand_B_ref();
#pragma unroll 1
      for (int k = 0; k < kStep && k < left; k += 4) {
        Product::add_four(sums, query.data(), query.layout(), key.data(), key.layout(), row0, column0, this->lane_, 0,
                          k);
      }
    });
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Coord::kRows; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < Coord::kColumns; ++j) acc[Coord::index(i, j)] = sums[i][j].value();
    }
  }
};

}  // namespace chained
}  // namespace memeff
