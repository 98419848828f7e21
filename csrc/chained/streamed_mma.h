// S = Q K^T for fp32 and any K: tiles of both operands stream through two buffers, each multiplied by a ResidentMma.
//
// EarlyStart over CUTLASS's multistage loop would serve too, but its 3xTF32 sums a whole stage before it rounds and
// cuts the high part toward zero: two to four times the error of ResidentMma's (docs/performance.md). Same contract as
// EarlyStart: start() fills the first buffer; finish() runs and ends with all copies landed and a barrier.
#pragma once

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

// Fma: the same product by FFMA (FmaProduct), for tiles of up to kFmaRows rows.
template <typename Mma, typename LoaderA, typename LoaderB, int kStep, typename Fma, int kFmaRows>
class StreamedMma {
 public:
  using Element = typename LoaderA::Element;
  using FragmentC = typename Mma::FragmentC;
  using Operator = typename Mma::Operator;
  struct Base {
    struct SharedStorage {
      typename Mma::Base::SharedStorage buffers[2];
    };
  };

  CUTLASS_DEVICE StreamedMma(typename Base::SharedStorage& storage, int thread, int warp, int lane)
      : storage_(storage), thread_(thread), warp_(warp), lane_(lane) {}

  CUTLASS_DEVICE void start(TileSource<Element> const& a, TileSource<Element> const& b) { load(a, b, 0); }

  CUTLASS_DEVICE void finish(FragmentC& acc, TileSource<Element> const& a, TileSource<Element> const& b) {
#pragma unroll 1
    for (int k = 0; k < a.columns; k += kStep) {
      cutlass::arch::cp_async_wait<0>();
      __syncthreads();  // this tile is there; every warp is done with the other buffer
      if (k + kStep < a.columns) load(a, b, k + kStep);
      auto& buffer = storage_.buffers[(k / kStep) & 1];
      if (kFmaRows > 0 && a.rows <= kFmaRows) {
        fma(acc, buffer, a.columns - k < kStep ? a.columns - k : kStep);
      } else {
        const Mma mma(buffer, thread_, warp_, lane_);
        mma(acc, a.columns - k);
      }
    }
    __syncthreads();
  }

 private:
  typename Base::SharedStorage& storage_;
  int thread_, warp_, lane_;

  CUTLASS_DEVICE void fma(FragmentC& acc, typename Mma::Base::SharedStorage& buffer, int depth) const {
    if constexpr (kFmaRows > 0) {
      using Warps = typename Mma::WarpCount;
      auto a = buffer.operand_A_ref();
      auto b = buffer.operand_B_ref();
      Fma::add(acc, a.data(), a.layout(), b.data(), b.layout(), warp_ % Warps::kM * Operator::Shape::kM,
               warp_ / Warps::kM * Operator::Shape::kN, lane_, depth);
    }
  }

  CUTLASS_DEVICE void load(TileSource<Element> const& a, TileSource<Element> const& b, int k) {
    auto& buffer = storage_.buffers[(k / kStep) & 1];
    LoaderA(buffer.operand_A_ref(), thread_).start(a.data + k, a.row_stride, a.rows, a.columns - k);
    LoaderB(buffer.operand_B_ref(), thread_).start(b.data + k, b.row_stride, b.rows, b.columns - k);
    cutlass::arch::cp_async_fence();
  }
};

}  // namespace chained
}  // namespace memeff
