// What the epilogue does with each accumulator on its way out: a visitor for CUTLASS's EpilogueWithVisitor.
//
//   out[row, column] = acc * scale[row]                                   NoSource
//   out[row, column] = acc * scale[row] + source * source_scale[row]      FloatSource (fp32, prefetched one step ahead)
//
// CUTLASS moves the accumulators through shared memory so that rows leave in whole vectors; the row a vector belongs to
// is known here, so the softmax state reaches the output. Any row stride: BMHK needs no transpose.
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

namespace memeff {
namespace chained {

struct NoSource {
  CUTLASS_DEVICE void next(bool) {}
  CUTLASS_DEVICE float term(int, int) const { return 0.f; }
};

// Iterator: a PredicatedTileIterator over float with the destination's thread map.
template <typename Iterator>
struct FloatSource {
  Iterator iterator;
  float const* scale;  // shared memory, [rows of the tile]
  bool enabled;        // false: the source holds nothing yet
  typename Iterator::Fragment current, ahead;

  CUTLASS_DEVICE FloatSource(Iterator it, float const* row_scale, bool enable)
      : iterator(it), scale(row_scale), enabled(enable) {
    current.clear();
    ahead.clear();
    if (enabled) {
      iterator.load(ahead);
      ++iterator;
    }
  }
  // Makes the step's values current and starts the loads of the next.
  CUTLASS_DEVICE void next(bool more) {
    current = ahead;
    if (enabled && more) {
      iterator.load(ahead);
      ++iterator;
    }
  }
  // Nothing there means nothing read: scale * garbage must not become NaN.
  CUTLASS_DEVICE float term(int element, int row) const {
    return enabled && scale[row] != 0.f ? current[element] * scale[row] : 0.f;
  }
};

template <typename OutputIterator_, typename Source>
struct OutputVisitor {
  using OutputIterator = OutputIterator_;
  using ElementOutput = typename OutputIterator::Element;
  static constexpr int kIterations = OutputIterator::kIterations;
  static constexpr int kElementsPerAccess = OutputIterator::kElementsPerAccess;
  using AccumulatorFragment = cutlass::Array<float, kElementsPerAccess>;

  OutputIterator destination;
  Source source;
  float const* row_scale;  // shared memory, [kTileM]; rows beyond M hold a finite number
  typename OutputIterator::Fragment fragment;

  CUTLASS_DEVICE OutputVisitor(OutputIterator destination_, Source source_, float const* row_scale_)
      : destination(destination_), source(source_), row_scale(row_scale_) {}

  CUTLASS_DEVICE void begin_epilogue() {}
  CUTLASS_DEVICE void begin_step(int step) { source.next(step + 1 < kIterations); }
  CUTLASS_DEVICE void begin_row(int) {}
  CUTLASS_DEVICE void visit(int, int, int, int index, AccumulatorFragment const& acc) {
    const int row = destination.thread_start_row() + OutputIterator::ThreadMap::iteration_offset(index).row();
    const float scale = row_scale[row];
    AccumulatorFragment result;
    CUTLASS_PRAGMA_UNROLL
    for (int e = 0; e < kElementsPerAccess; ++e) {
      // A row that sees nothing has scale 0 and is 0, whatever 0 * V gave.
      result[e] = (scale == 0.f ? 0.f : acc[e] * scale) + source.term(index * kElementsPerAccess + e, row);
    }
    cutlass::NumericArrayConverter<ElementOutput, float, kElementsPerAccess> convert;
    reinterpret_cast<cutlass::Array<ElementOutput, kElementsPerAccess>*>(&fragment)[index] = convert(result);
  }
  CUTLASS_DEVICE void end_row(int) {}
  CUTLASS_DEVICE void end_step(int) {
    destination.store(fragment);
    ++destination;
  }
  CUTLASS_DEVICE void end_epilogue() {}
};

}  // namespace chained
}  // namespace memeff
