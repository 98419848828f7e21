// One warpgroup's products: D (64 x N, fp32, in registers) += A (64 x 16 a step) * B, by CUTLASS's wgmma atoms.
//
// Operands in shared memory lie in chunks of 64 columns (128 bytes a row), as TMA writes them with its 128-byte
// swizzle; a chunk starts at a multiple of 1024 bytes, chunk c of a tile of R rows at c * R * 128:
//
//        row 0    [16-byte pieces 0 .. 7]                  piece x of row r lies at x ^ (r % 8)
//        row 1    [1 0 3 2 5 4 7 6]
//        ...                                               8 rows: 1024 bytes, the swizzle's period
//
// K-major operand (Q, K: the product runs along the columns): 16 columns a step, 32 bytes further.
// MN-major operand (V: it runs along the rows): 16 rows a step, 2048 bytes further.
// Accumulators: a warp's 16 rows as m16n8 tiles side by side, four values a lane and tile (WarpgroupCoord).
#pragma once

#include <utility>

#include "cute/arch/mma_sm90_desc.hpp"
#include "cute/arch/mma_sm90_gmma.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/numeric_types.h"

namespace memeff {
namespace hopper {

constexpr int kChunk = 64;                           // columns of 16 bits
constexpr int kRowBytes = kChunk * 2;                // of a chunk
constexpr int kPeriodBytes = 8 * kRowBytes;          // of the swizzle
constexpr int kStep = 16;                            // depth of one wgmma
constexpr int kStepsPerChunk = kChunk / kStep;       // K-major
constexpr int kStepBytesAlong = kStep * 2;           // K-major: within the rows
constexpr int kStepBytesAcross = kStep * kRowBytes;  // MN-major: from row to row

using cute::SM90::GMMA::Major;

// The wgmma atoms of an element type and a width N. Scores: both operands in shared memory; Values: A in registers.
template <typename Element, int kN>
struct Atoms;

namespace sm90 = cute::SM90::GMMA;
using cutlass::bfloat16_t;
using cutlass::half_t;

template <>
struct Atoms<half_t, 64> {
  using Scores = sm90::MMA_64x64x16_F32F16F16_SS<Major::K, Major::K>;
  using Values = sm90::MMA_64x64x16_F32F16F16_RS<Major::K, Major::MN>;
};
template <>
struct Atoms<half_t, 96> {
  using Scores = sm90::MMA_64x96x16_F32F16F16_SS<Major::K, Major::K>;
  using Values = sm90::MMA_64x96x16_F32F16F16_RS<Major::K, Major::MN>;
};
template <>
struct Atoms<half_t, 128> {
  using Scores = sm90::MMA_64x128x16_F32F16F16_SS<Major::K, Major::K>;
  using Values = sm90::MMA_64x128x16_F32F16F16_RS<Major::K, Major::MN>;
};
template <>
struct Atoms<half_t, 192> {
  using Scores = sm90::MMA_64x192x16_F32F16F16_SS<Major::K, Major::K>;
  using Values = sm90::MMA_64x192x16_F32F16F16_RS<Major::K, Major::MN>;
};
template <>
struct Atoms<half_t, 256> {
  using Scores = sm90::MMA_64x256x16_F32F16F16_SS<Major::K, Major::K>;
  using Values = sm90::MMA_64x256x16_F32F16F16_RS<Major::K, Major::MN>;
};
template <>
struct Atoms<bfloat16_t, 64> {
  using Scores = sm90::MMA_64x64x16_F32BF16BF16_SS<Major::K, Major::K>;
  using Values = sm90::MMA_64x64x16_F32BF16BF16_RS<Major::K, Major::MN>;
};
template <>
struct Atoms<bfloat16_t, 96> {
  using Scores = sm90::MMA_64x96x16_F32BF16BF16_SS<Major::K, Major::K>;
  using Values = sm90::MMA_64x96x16_F32BF16BF16_RS<Major::K, Major::MN>;
};
template <>
struct Atoms<bfloat16_t, 128> {
  using Scores = sm90::MMA_64x128x16_F32BF16BF16_SS<Major::K, Major::K>;
  using Values = sm90::MMA_64x128x16_F32BF16BF16_RS<Major::K, Major::MN>;
};
template <>
struct Atoms<bfloat16_t, 192> {
  using Scores = sm90::MMA_64x192x16_F32BF16BF16_SS<Major::K, Major::K>;
  using Values = sm90::MMA_64x192x16_F32BF16BF16_RS<Major::K, Major::MN>;
};
template <>
struct Atoms<bfloat16_t, 256> {
  using Scores = sm90::MMA_64x256x16_F32BF16BF16_SS<Major::K, Major::K>;
  using Values = sm90::MMA_64x256x16_F32BF16BF16_RS<Major::K, Major::MN>;
};

template <int kN>
using Accumulators = float[kN / 2];  // 64 x kN over 128 threads

// Keeps the compiler from moving uses of the accumulators across a wait. PTX ISA 9.7.15, asynchronous wgmma.
template <int kCount>
CUTLASS_DEVICE void fence(float (&acc)[kCount]) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(acc[i]);
}

// The descriptor of an operand at a shared-memory address; `chunk_bytes`: from one chunk of columns to the next, used
// by MN-major operands wider than a chunk.
CUTLASS_DEVICE uint64_t make_descriptor(uint32_t address, int chunk_bytes) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = uint16_t(address >> 4);
  descriptor.bitfield.leading_byte_offset_ = uint16_t(chunk_bytes >> 4);
  descriptor.bitfield.stride_byte_offset_ = uint16_t(kPeriodBytes >> 4);
  descriptor.bitfield.layout_type_ = uint8_t(sm90::LayoutType::B128);
  return descriptor;
}
CUTLASS_DEVICE uint64_t advance(uint64_t descriptor, int bytes) { return descriptor + uint64_t(bytes >> 4); }

template <typename Atom, int kCount, size_t... kI>
CUTLASS_DEVICE void issue_ss(uint64_t a, uint64_t b, float (&acc)[kCount], bool add, std::index_sequence<kI...>) {
  Atom::fma(a, b, acc[kI]..., add ? sm90::ScaleOut::One : sm90::ScaleOut::Zero);
}
template <typename Atom, int kCount, size_t... kI>
CUTLASS_DEVICE void issue_rs(uint32_t const* a, uint64_t b, float (&acc)[kCount], std::index_sequence<kI...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, acc[kI]..., sm90::ScaleOut::One);
}

// The same into the accumulators from kFirst on: some columns of a wider O.
template <typename Atom, int kFirst, int kCount, size_t... kI>
CUTLASS_DEVICE void issue_rs_at(uint32_t const* a, uint64_t b, float (&acc)[kCount], std::index_sequence<kI...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, acc[kFirst + kI]..., sm90::ScaleOut::One);
}

// Starts acc = A * B^T, 64 x kN x 16 kSteps. a, b: descriptors of A's 64 rows and of B, chunks a_chunk and b_chunk
// bytes apart. The caller commits and waits.
template <typename Element, int kN, int kSteps>
CUTLASS_DEVICE void start_scores(Accumulators<kN>& acc, uint64_t a, int a_chunk, uint64_t b, int b_chunk) {
  using Atom = typename Atoms<Element, kN>::Scores;
  CUTLASS_PRAGMA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    const int chunk = step / kStepsPerChunk, along = step % kStepsPerChunk * kStepBytesAlong;
    issue_ss<Atom>(advance(a, chunk * a_chunk + along), advance(b, chunk * b_chunk + along), acc, step > 0,
                   std::make_index_sequence<kN / 2>());
  }
}

// Starts acc += P * V, 64 x kN x 16 kSteps. weights: P as operand A, four registers a step.
template <typename Element, int kN, int kSteps>
CUTLASS_DEVICE void start_values(Accumulators<kN>& acc, uint32_t const (&weights)[4 * kSteps], uint64_t v) {
  using Atom = typename Atoms<Element, kN>::Values;
  CUTLASS_PRAGMA_UNROLL
  for (int step = 0; step < kSteps; ++step) {
    issue_rs<Atom>(weights + 4 * step, advance(v, step * kStepBytesAcross), acc, std::make_index_sequence<kN / 2>());
  }
}

// Where a lane's accumulators lie in its warp's 16 rows; the interface of chained/acc_coord.h. kPairs: row 8 i + g of
// operand A is query 2 g + i of the 16, so that a lane's two rows are those of one call of dropout's generator.
template <int kN, bool kPairs = false>
struct WarpgroupCoord {
  static constexpr int kRows = 2;
  static constexpr int kColumns = kN / 4;
  static constexpr bool kQuadCells = !kPairs;
  static constexpr int kRowStep = kPairs ? 1 : 8;  // from a lane's first row to its second

  CUTLASS_DEVICE static int row(int lane, int i) { return i * kRowStep + (lane >> 2) * (kPairs ? 2 : 1); }
  CUTLASS_DEVICE static int column(int lane, int j) { return (j >> 1) * 8 + (j & 1) + (lane & 3) * 2; }
  CUTLASS_HOST_DEVICE static constexpr int index(int i, int j) { return (j >> 1) * 4 + i * 2 + (j & 1); }
  CUTLASS_HOST_DEVICE static constexpr bool rows_shared(int mask) { return mask == 1 || mask == 2; }
};

}  // namespace hopper
}  // namespace memeff
