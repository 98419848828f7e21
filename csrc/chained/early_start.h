// A CUTLASS main loop whose first stages can be issued long before its products are wanted.
#pragma once

#include "cutlass/cutlass.h"

namespace memeff {
namespace chained {

// Mma: a stock MmaPipelined (sm70, sm75, SIMT) or MmaMultistage (sm80). Both operands stream from global memory, so any
// K works. start() fills the pipeline; finish() runs it and leaves the object ready for another start(). Shared memory
// may be refilled by start() once every thread is past a barrier that follows finish().
template <typename Mma>
class EarlyStart : public Mma {
 public:
  using Mma::Mma;

  CUTLASS_DEVICE void start(typename Mma::IteratorA& a, typename Mma::IteratorB& b, int k_tiles) {
    left_ = k_tiles;
    this->prologue(a, b, left_);
  }

  CUTLASS_DEVICE void finish(typename Mma::FragmentC& acc, typename Mma::IteratorA& a, typename Mma::IteratorB& b) {
    this->gmem_wait();
    this->gemm_iters(left_, acc, a, b);
    this->wind_down();
  }

 private:
  int left_ = 0;  // main loop iterations that start() did not cover
};

}  // namespace chained
}  // namespace memeff
