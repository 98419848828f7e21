// Fills an operand in three bf16 parts (split_parts.h) from fp32 in global memory: copies fly to a staging area by
// cp.async, finish() splits them. A thread reads only what it copied itself, so no barrier lies between.
#pragma once

#include "chained/split_parts.h"
#include "chained/tile_loader.h"

namespace memeff {
namespace chained {

// Base: TileLoaderBase of float over the thread map of the bf16 operand (eight elements an access). kPart: elements of
// one part of the operand. The staging area holds kStagingBytes; 16-byte words of one access of all threads lie side by
// side.
template <typename Base, typename SmemIterator, bool kOperandA, int kPart>
struct SplitTileLoader : Base {
  static constexpr int kThreads = Base::ThreadMap::kThreads;
  static constexpr int kAccesses = Base::kStages * Base::kAccessRows * Base::kAccessColumns;
  static constexpr int kStagingBytes = kAccesses * 32 * kThreads;
  static_assert(Base::kPerAccess == 8, "16 bytes of bf16 an access");
  static constexpr int kBytes = Base::kVector < 4 ? 4 : 16;  // of a copy: alignments 1 and 4
  static constexpr int kCopies = 32 / kBytes;
  static constexpr auto kCache =
      kBytes == 16 ? cutlass::arch::CacheOperation::Global : cutlass::arch::CacheOperation::Always;

  SmemIterator smem;
  char* staging;  // this thread's first word

  template <typename TensorRef>
  CUTLASS_DEVICE SplitTileLoader(TensorRef ref, void* staging_, int thread)
      : Base(thread), smem(ref, thread), staging(static_cast<char*>(staging_) + thread * 16) {}

  // The caller commits and waits for its own copies before finish().
  CUTLASS_DEVICE void start(float const* source, int64_t row_stride, int rows, int columns) {
    this->each_access(source, row_stride, [&](int stage, int access, int row, int column, float const* from) {
      const int number = stage * Base::kAccessRows * Base::kAccessColumns + access;
      CUTLASS_PRAGMA_UNROLL
      for (int copy = 0; copy < kCopies; ++copy) {
        const int element = copy * kBytes / 4;
        cutlass::arch::cp_async_zfill<kBytes, kCache>(
            staging + (number * 2 + element / 4) * kThreads * 16 + element % 4 * 4, from + element,
            row < rows && column + element < columns);
      }
    });
  }

  CUTLASS_DEVICE void finish() {
    SmemIterator it = smem;
    CUTLASS_PRAGMA_UNROLL
    for (int stage = 0; stage < Base::kStages; ++stage) {
      it.set_iteration_index(0);
      CUTLASS_PRAGMA_UNROLL
      for (int access = 0; access < Base::kAccessRows * Base::kAccessColumns; ++access) {
        store(stage * Base::kAccessRows * Base::kAccessColumns + access, it.get());
        ++it;
      }
      it.add_tile_offset(stage_step<kOperandA>(1));
    }
  }

 private:
  template <typename AccessType>
  CUTLASS_DEVICE void store(int number, AccessType* to) const {
    uint32_t words[kParts][4];
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float4 x = *reinterpret_cast<float4 const*>(staging + (number * 2 + half) * kThreads * 16);
      uint32_t pair[kParts];
      split_pair(x.x, x.y, pair);
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kParts; ++part) words[part][2 * half] = pair[part];
      split_pair(x.z, x.w, pair);
      CUTLASS_PRAGMA_UNROLL
      for (int part = 0; part < kParts; ++part) words[part][2 * half + 1] = pair[part];
    }
    CUTLASS_PRAGMA_UNROLL
    for (int part = 0; part < kParts; ++part) {
      *reinterpret_cast<uint4*>(reinterpret_cast<cutlass::bfloat16_t*>(to) + part * kPart) =
          make_uint4(words[part][0], words[part][1], words[part][2], words[part][3]);
    }
  }
};

}  // namespace chained
}  // namespace memeff
