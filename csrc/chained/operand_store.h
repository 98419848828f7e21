// Writes a warp's accumulators, converted, straight into the shared-memory layout that the next product's operand-A
// iterator reads: the b2b link of the chain. One code for Volta, tensor cores and SIMT, because the layout is a
// functor.
#pragma once

#include "cutlass/array.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

namespace memeff {
namespace chained {

// Coord: AccCoord of the accumulators. Layout: operand A's (row, column) -> offset. kPairs: adjacent columns are
// adjacent in Layout, so that two elements go out in one store (all but SIMT's column-major operand).
template <typename Coord, typename Element, typename Layout, bool kPairs>
struct OperandStore {
  // row0, column0: the warp tile's origin in the operand.
  template <typename Fragment>
  CUTLASS_DEVICE static void store(Fragment const& acc, Element* operand, Layout const& layout, int row0, int column0,
                                   int lane) {
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < Coord::kColumns; j += kPairs ? 2 : 1) {
      const int column = column0 + Coord::column(lane, j);
      Element* first = operand + layout({row0 + Coord::row(lane, 0), column});
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Coord::kRows; ++i) {
        // Where the swizzle repeats with the rows, a row step is a constant number of elements.
        Element* to = Coord::kRowsRepeat ? first + i * int(layout({8, 0}))
                                         : operand + layout({row0 + Coord::row(lane, i), column});
        if constexpr (kPairs) {
          cutlass::NumericArrayConverter<Element, float, 2> convert;
          cutlass::Array<float, 2> pair;
          pair[0] = acc[Coord::index(i, j)];
          pair[1] = acc[Coord::index(i, j + 1)];
          *reinterpret_cast<cutlass::AlignedArray<Element, 2>*>(to) =
              reinterpret_cast<cutlass::AlignedArray<Element, 2> const&>(
                  static_cast<cutlass::Array<Element, 2> const&>(convert(pair)));
        } else {
          *to = Element(acc[Coord::index(i, j)]);
        }
      }
    }
  }
};

}  // namespace chained
}  // namespace memeff
