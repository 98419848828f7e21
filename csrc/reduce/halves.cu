// Splits fp32 operands into fp16 parts and row scales (hopper/f32_plan.h). Lanes of a warp own 4 columns of a row each,
// 64 or 128 columns a row; columns beyond K or Kv become zeros.
#include "reduce/element.h"
#include "reduce/halves.h"

namespace memeff {
namespace reduce {
namespace {

using namespace hopper_f32;

constexpr int kRowsPerBlock = 64;
constexpr int kWarps = kThreads / 32;

struct OperandArgs {
  TensorView from;
  __half* to;
  float* scales;
  int32_t rows, columns, groups, members, scale_rows;
  uint32_t first_block, blocks_per_head;
  int32_t small_at, large_at, shift;  // places of its bounds; of its stored scale
};

struct SplitArgs {
  OperandArgs operands[3];
  uint32_t* bounds;
};

__device__ inline uint32_t pack_halves(float x, float y) {
  const __half2 both = __floats2half2_rn(x, y);
  return reinterpret_cast<uint32_t const&>(both);
}

__device__ inline uint2 pack_four(float4 x) { return make_uint2(pack_halves(x.x, x.y), pack_halves(x.z, x.w)); }

__device__ inline float4 rest_of(float4 x, uint2 high) {
  const float2 a = __half22float2(reinterpret_cast<__half2 const&>(high.x));
  const float2 b = __half22float2(reinterpret_cast<__half2 const&>(high.y));
  return make_float4(x.x - a.x, x.y - a.y, x.z - b.x, x.w - b.y);
}

__device__ inline float finite_size(float x) {
  const float size = fabsf(x);
  return size <= 3.402823466e38f ? size : 0.f;  // NaN too
}

__device__ inline float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// Raises *to to x >= 0; its bits compare as x does.
__device__ inline void raise(uint32_t* to, float x) {
  const uint32_t bits = __float_as_uint(x);
  if (bits > *const_cast<volatile uint32_t*>(to)) atomicMax(to, bits);
}

template <int kParts, int kWidth>
__global__ void __launch_bounds__(kThreads) split_kernel(const __grid_constant__ SplitArgs args) {
  constexpr int kLanes = kWidth / 4;    // of a row
  constexpr int kAtOnce = 32 / kLanes;  // rows a warp
  constexpr int kRows = kRowsPerBlock / kWarps / kAtOnce;
  const int which = blockIdx.x >= args.operands[2].first_block ? 2 : blockIdx.x >= args.operands[1].first_block;
  OperandArgs const& o = args.operands[which];
  const uint32_t block = blockIdx.x - o.first_block, head = block / o.blocks_per_head;
  const int row0 = int(block % o.blocks_per_head) * kRowsPerBlock + int(threadIdx.x / kLanes);
  const int column = int(threadIdx.x % kLanes) * 4;
  const int member = int(head % o.members), group = int(head / o.members % o.groups);
  const int batch = int(head / o.members / o.groups);
  const float* from = static_cast<const float*>(o.from.data) + batch * o.from.stride_b + group * o.from.stride_g +
                      member * o.from.stride_h + column;
  float4 x[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = row0 + i * kWarps * kAtOnce;
    x[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (row < o.rows && column < o.columns)
      x[i] = __ldcs(reinterpret_cast<const float4*>(from + row * o.from.stride_m));
  }
  float most_small = 0.f, largest = 0.f, inverse = 0.f;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = row0 + i * kWarps * kAtOnce;
    float size =
        fmaxf(fmaxf(finite_size(x[i].x), finite_size(x[i].y)), fmaxf(finite_size(x[i].z), finite_size(x[i].w)));
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) size = fmaxf(size, __shfl_xor_sync(0xffffffffu, size, mask));
    const int exponent = min(max(int(__float_as_uint(size) >> 23) - 127, kLeast), kMost);
    const float up = power_of_two(kTop - exponent);
    const float4 y = make_float4(x[i].x * up, x[i].y * up, x[i].z * up, x[i].w * up);
    const auto is_small = [](float z) { return z != 0.f && fabsf(z) < 0.25f; };
    const unsigned small = __ballot_sync(0xffffffffu, is_small(y.x) || is_small(y.y) || is_small(y.z) || is_small(y.w));
    const unsigned own = kAtOnce == 1 ? small : threadIdx.x % 32 < kLanes ? small & 0xffffu : small >> 16;
    most_small = fmaxf(most_small, size * float(4 * __popc(own)));
    largest = fmaxf(largest, size);
    if (size > 0.f) inverse = fmaxf(inverse, 1.f / size);
    if (row >= o.rows) continue;
    const int64_t line = int64_t(head) * o.rows + row;
    __half* to = o.to + line * (kParts * kWidth) + column;
    const uint2 high = pack_four(y);
    *reinterpret_cast<uint2*>(to) = high;
    if (kParts == 2) *reinterpret_cast<uint2*>(to + kWidth) = pack_four(rest_of(y, high));
    if (column == 0) o.scales[int64_t(head) * o.scale_rows + row] = power_of_two(exponent) * power_of_two(o.shift);
  }
  if (which == 2) most_small = inverse;  // of V it is how small a row is that counts
  if (kAtOnce == 2) {
    most_small = fmaxf(most_small, __shfl_xor_sync(0xffffffffu, most_small, 16));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
  }
  if (threadIdx.x % 32 != 0) return;
  raise(args.bounds + o.small_at, most_small);
  raise(args.bounds + o.large_at, largest);
}

OperandArgs operand_args(Plan const& plan, int which, TensorView const& from, int32_t columns, float* workspace,
                         int64_t* blocks) {
  SplitOperand const& o = plan.operands[which];
  constexpr int32_t kSmallAt[] = {0, 2, 5}, kLargeAt[] = {3, 1, 4}, kShift[] = {kQueryShift, kKeyShift, 0};
  const int64_t of_head = ceil_div(o.rows, kRowsPerBlock);
  const OperandArgs args{from,
                         reinterpret_cast<__half*>(workspace + o.data),
                         workspace + o.scales,
                         o.rows,
                         columns,
                         int32_t(o.groups),
                         int32_t(o.members),
                         int32_t(o.scale_rows()),
                         uint32_t(*blocks),
                         uint32_t(of_head),
                         kSmallAt[which],
                         kLargeAt[which],
                         kShift[which]};
  *blocks += o.heads() * of_head;
  return args;
}

}  // namespace

Status launch_halves(ForwardParams const& p, Plan const& plan, float* workspace, CUstream_st* stream) {
  SplitArgs args;
  int64_t blocks = 0;
  args.operands[0] = operand_args(plan, 0, p.query, p.head_dim, workspace, &blocks);
  args.operands[1] = operand_args(plan, 1, p.key, p.head_dim, workspace, &blocks);
  args.operands[2] = operand_args(plan, 2, p.value, p.value_dim, workspace, &blocks);
  args.bounds = reinterpret_cast<uint32_t*>(workspace);
  if (blocks > INT32_MAX) return {Code::kUnsupported, "reduce::halves: the operands exceed the grid limit of 2^31 - 1"};
  const cudaError_t error = cudaMemsetAsync(workspace, 0, kBounds * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return {Code::kCuda, std::string("reduce::halves: ") + cudaGetErrorString(error)};
  const unsigned grid = unsigned(blocks);
  if (plan.width == 64) {
    if (plan.parts == 2) split_kernel<2, 64><<<grid, kThreads, 0, stream>>>(args);
    if (plan.parts == 1) split_kernel<1, 64><<<grid, kThreads, 0, stream>>>(args);
  } else {
    if (plan.parts == 2) split_kernel<2, 128><<<grid, kThreads, 0, stream>>>(args);
    if (plan.parts == 1) split_kernel<1, 128><<<grid, kThreads, 0, stream>>>(args);
  }
  return launched("reduce::halves", grid);
}

}  // namespace reduce
}  // namespace memeff
