// Fills an operand of a ResidentMma from global memory: any number of valid rows and columns, the rest zero.
//
// The tile is `rows` x `columns` in global memory with unit stride along columns. Stages of the operand cut it along
// the columns (query, key: the contraction runs over K) or along the rows (value: the contraction runs over keys).
// Bounds are one predicate per access against the true extents, so a ragged tail needs no special order of tiles and no
// copied iterator. Zero-fill matters: 0 * NaN is NaN, so P = 0 does not hide what lies beyond the last key.
#pragma once

#include "common/offset.h"
#include "cutlass/arch/memory.h"
#include "cutlass/arch/memory_sm80.h"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_conversion.h"

namespace memeff {
namespace chained {

enum class StageAlong { kColumns, kRows };

template <typename Element_, typename ThreadMap_, int kStages_, StageAlong kAlong, int kStageExtent, int kAlignment>
struct TileLoaderBase {
  using Element = Element_;
  using ThreadMap = ThreadMap_;
  static constexpr int kStages = kStages_;
  static constexpr int kPerAccess = ThreadMap::kElementsPerAccess;
  static constexpr int kAccessRows = ThreadMap::Iterations::kStrided;
  static constexpr int kAccessColumns = ThreadMap::Iterations::kContiguous;
  static constexpr int kVector = kAlignment < kPerAccess ? kAlignment : kPerAccess;  // elements per load
  static constexpr int kVectors = kPerAccess / kVector;

  int row0, column0;  // this thread's first access

  CUTLASS_DEVICE explicit TileLoaderBase(int thread) {
    const auto start = ThreadMap::initial_offset(thread);
    row0 = start.strided();
    column0 = start.contiguous();
  }

  // Calls f(stage, access, row, column, address) for each access of this thread. Addresses advance by whole row steps,
  // so that only one of them lives at a time.
  template <typename F>
  CUTLASS_DEVICE void each_access(Element const* source, int64_t row_stride, F f) const {
    Element const* start = source + offset(row0, row_stride) + column0;
    CUTLASS_PRAGMA_UNROLL
    for (int stage = 0; stage < kStages; ++stage) {
      Element const* line = start;
      CUTLASS_PRAGMA_UNROLL
      for (int s = 0; s < kAccessRows; ++s) {
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < kAccessColumns; ++c) {
          const int row =
              row0 + s * ThreadMap::Delta::kStrided + (kAlong == StageAlong::kRows ? stage * kStageExtent : 0);
          const int column =
              column0 + c * ThreadMap::Delta::kContiguous + (kAlong == StageAlong::kColumns ? stage * kStageExtent : 0);
          f(stage, s * kAccessColumns + c, row, column, line + c * ThreadMap::Delta::kContiguous);
        }
        line += offset(ThreadMap::Delta::kStrided, row_stride);
      }
      start += kAlong == StageAlong::kRows ? offset(kStageExtent, row_stride) : kStageExtent;
    }
  }
};

// Which offset moves a shared-memory iterator to the next stage.
template <bool kOperandA>
CUTLASS_DEVICE cutlass::MatrixCoord stage_step(int stages) {
  return kOperandA ? cutlass::MatrixCoord(0, stages) : cutlass::MatrixCoord(stages, 0);
}

// sm80 and later: cp.async, nothing passes through registers. The caller commits and waits.
template <typename Base, typename SmemIterator, bool kOperandA>
struct AsyncTileLoader : Base {
  using Element = typename Base::Element;
  static constexpr int kBytes = Base::kVector * int(sizeof(Element));
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async moves 4, 8 or 16 bytes");
  static constexpr auto kCache =
      kBytes == 16 ? cutlass::arch::CacheOperation::Global : cutlass::arch::CacheOperation::Always;

  SmemIterator smem;

  template <typename TensorRef>
  CUTLASS_DEVICE AsyncTileLoader(TensorRef ref, int thread) : Base(thread), smem(ref, thread) {}

  CUTLASS_DEVICE void start(Element const* source, int64_t row_stride, int rows, int columns) {
    SmemIterator it = smem;
    it.set_iteration_index(0);
    this->each_access(source, row_stride, [&](int stage, int access, int row, int column, Element const* from) {
      if (access == 0 && stage > 0) {
        it.add_tile_offset(stage_step<kOperandA>(1));
        it.set_iteration_index(0);
      }
      auto* to = reinterpret_cast<char*>(it.get());
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < Base::kVectors; ++v) {
        cutlass::arch::cp_async_zfill<kBytes, kCache>(to + v * kBytes, from + v * Base::kVector,
                                                      row < rows && column + v * Base::kVector < columns);
      }
      ++it;
    });
  }
  CUTLASS_DEVICE void finish() {}
};

// Before sm80, and alignments that cp.async cannot take: loads fly into registers at start(), finish() stores them,
// converted to the operand's element type.
template <typename Base, typename SmemIterator, bool kOperandA>
struct RegisterTileLoader : Base {
  using Element = typename Base::Element;
  using SmemElement = typename SmemIterator::Element;
  static constexpr int kPerStage = Base::kAccessRows * Base::kAccessColumns * Base::kPerAccess;
  using Vector = cutlass::AlignedArray<Element, Base::kVector>;
  using Fragment = cutlass::Array<Element, kPerStage>;

  SmemIterator smem;
  Fragment fragments[Base::kStages];

  template <typename TensorRef>
  CUTLASS_DEVICE RegisterTileLoader(TensorRef ref, int thread) : Base(thread), smem(ref, thread) {}

  CUTLASS_DEVICE void start(Element const* source, int64_t row_stride, int rows, int columns) {
    this->each_access(source, row_stride, [&](int stage, int access, int row, int column, Element const* from) {
      auto* to = reinterpret_cast<Vector*>(&fragments[stage]) + access * Base::kVectors;
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < Base::kVectors; ++v) {
        to[v].clear();
        cutlass::arch::global_load<Vector, sizeof(Vector)>(to[v], from + v * Base::kVector,
                                                           row < rows && column + v * Base::kVector < columns);
      }
    });
  }

  CUTLASS_DEVICE void finish() {
    cutlass::NumericArrayConverter<SmemElement, Element, kPerStage> convert;
    CUTLASS_PRAGMA_UNROLL
    for (int stage = 0; stage < Base::kStages; ++stage) {
      smem.store(convert(fragments[stage]));
      smem.add_tile_offset(stage_step<kOperandA>(1));
    }
    smem.add_tile_offset(stage_step<kOperandA>(-Base::kStages));
  }
};

}  // namespace chained
}  // namespace memeff
