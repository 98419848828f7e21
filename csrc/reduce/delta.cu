// delta = rowsum(grad_out * out), and zeros where dQ is added up.
//
// A row of Kv columns belongs to 2^k neighbouring lanes, which read it in vectors and add their sums up by shuffles.
// Neighbouring groups of lanes take rows that lie side by side in memory: heads of one query (BMHK), or queries of one
// head where these are closer.
#include "reduce/element.h"
#include "reduce/reduce.h"

namespace memeff {
namespace reduce {
namespace {

struct DeltaKernelArgs {
  DeltaArgs a;
  int64_t rows;      // B * H * M
  int lanes;         // a power of two, at most 32: lanes of a row
  bool query_first;  // row numbers count queries fastest, else heads
};

struct Row {
  int64_t batch;
  int head, query;
};

// Index: 32 bits where all rows fit, since 64-bit divisions would cost more than the loads.
template <typename Index>
__device__ Row locate_row(const DeltaKernelArgs& args, int64_t number) {
  const Index fast = Index(args.query_first ? args.a.queries : args.a.heads);
  const Index slow = Index(args.query_first ? args.a.heads : args.a.queries);
  const Index rest = Index(number) / fast, first = Index(number) - rest * fast;
  const Index batch = rest / slow, second = rest - batch * slow;
  return {int64_t(batch), int(args.query_first ? second : first), int(args.query_first ? first : second)};
}

__device__ int64_t row_offset(const TensorView& view, const Row& row, int heads_per_group) {
  const int group = row.head / heads_per_group, member = row.head - group * heads_per_group;
  return row.batch * view.stride_b + group * view.stride_g + member * view.stride_h + row.query * view.stride_m;
}

// A sum of products. fp32 inputs keep its rounding errors beside it (Ogita, Rump, Oishi, "Accurate sum and dot
// product", 2005): dS = P (dP - delta) cancels where few keys carry a row, and what is left is then delta's error.
template <bool kExact>
struct Sum {
  float value = 0.f, error = 0.f;
  __device__ void add(float x, float y) {
    if (!kExact) {
      value = fmaf(x, y, value);
      return;
    }
    const float product = __fmul_rn(x, y);
    error += __fmaf_rn(x, y, -product);
    add(product);
  }
  __device__ void add(float x) {
    const float total = __fadd_rn(value, x), part = __fsub_rn(total, value);
    if (kExact) error += __fadd_rn(__fsub_rn(value, __fsub_rn(total, part)), __fsub_rn(x, part));
    value = total;
  }
  // The sum over two lanes.
  __device__ void add_lane(int distance) {
    const float other = __shfl_xor_sync(0xffffffffu, value, distance);
    if (kExact) error += __shfl_xor_sync(0xffffffffu, error, distance);
    add(other);
  }
  __device__ float total() const { return kExact && isfinite(value) ? value + error : value; }
};

// As CUTLASS rounds an operand to TF32: half of the last place added, the rest cut.
__device__ float as_tf32(float x) { return __uint_as_float((__float_as_uint(x) + 0x1000u) & 0xffffe000u); }

template <typename T, int kVector, typename Index, bool kTf32>
__global__ void __launch_bounds__(kThreads) delta_kernel(DeltaKernelArgs args) {
  using Vec = Vector<T, kVector>;
  const DeltaArgs& a = args.a;
  const int lane = threadIdx.x & (args.lanes - 1);
  const int rows_per_block = kThreads / args.lanes;
  const int vectors = a.value_dim / kVector;
  for (int64_t first = int64_t(blockIdx.x) * rows_per_block; first < args.rows;
       first += int64_t(gridDim.x) * rows_per_block) {
    const int64_t number = first + threadIdx.x / args.lanes;
    const bool valid = number < args.rows;  // every lane takes part in the shuffles
    const Row row = locate_row<Index>(args, valid ? number : args.rows - 1);
    const Vec* out =
        reinterpret_cast<const Vec*>(static_cast<const T*>(a.out.data) + row_offset(a.out, row, a.heads_per_group));
    const Vec* grad_out = reinterpret_cast<const Vec*>(static_cast<const T*>(a.grad_out.data) +
                                                       row_offset(a.grad_out, row, a.heads_per_group));
    Sum<sizeof(T) == 4> sum;
    for (int v = lane; v < vectors; v += args.lanes) {
      const Vec x = out[v], y = grad_out[v];
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        sum.add(to_float(x.at[i]), kTf32 ? as_tf32(to_float(y.at[i])) : to_float(y.at[i]));
    }
    for (int distance = args.lanes / 2; distance > 0; distance /= 2) {
      sum.add_lane(distance);
    }
    if (valid && lane == 0) a.delta[(row.batch * a.heads + row.head) * a.queries + row.query] = sum.total();
  }
  if constexpr (sizeof(T) == 2) {  // rows that add dQ up take 16 bits
    if (a.zeros == nullptr) return;
    const int64_t step = int64_t(gridDim.x) * kThreads * 4;
    for (int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 4; i < a.zero_numel; i += step) {
      *reinterpret_cast<float4*>(a.zeros + i) = make_float4(0.f, 0.f, 0.f, 0.f);
    }
  }
}

bool in_vectors(const TensorView& view, int32_t value_dim, int count, int bytes) {
  const int64_t odd = view.stride_b | view.stride_g | view.stride_h | view.stride_m | value_dim;
  return odd % count == 0 && reinterpret_cast<uintptr_t>(view.data) % uintptr_t(count * bytes) == 0;
}

template <typename T, int kVector, bool kTf32>
Status launch(const DeltaArgs& a, CUstream_st* stream) {
  DeltaKernelArgs args{a, a.batch * a.heads * a.queries, 1, a.grad_out.stride_m < a.grad_out.stride_h};
  while (args.lanes < 32 && args.lanes * kVector < a.value_dim) args.lanes *= 2;
  const unsigned blocks = blocks_for(args.rows, kThreads / args.lanes);
  if (args.rows <= UINT32_MAX) {
    delta_kernel<T, kVector, uint32_t, kTf32><<<blocks, kThreads, 0, stream>>>(args);
  } else {
    delta_kernel<T, kVector, uint64_t, kTf32><<<blocks, kThreads, 0, stream>>>(args);
  }
  return launched("reduce::delta", blocks);
}

template <typename T, bool kTf32 = false>
Status launch_of(const DeltaArgs& a, CUstream_st* stream) {
  constexpr int kVector = 16 / int(sizeof(T));
  const bool vectors =
      in_vectors(a.out, a.value_dim, kVector, sizeof(T)) && in_vectors(a.grad_out, a.value_dim, kVector, sizeof(T));
  return vectors ? launch<T, kVector, kTf32>(a, stream) : launch<T, 1, kTf32>(a, stream);
}

}  // namespace

Status launch_delta(const DeltaArgs& args, CUstream_st* stream) {
  switch (args.dtype) {
    case DType::kF16:
      return launch_of<__half>(args, stream);
    case DType::kBF16:
      return launch_of<__nv_bfloat16>(args, stream);
    case DType::kF32:
      return args.tf32 ? launch_of<float, true>(args, stream) : launch_of<float>(args, stream);
    default:
      return {Code::kInvalid, "reduce::delta takes float16, bfloat16 and float32"};
  }
}

}  // namespace reduce
}  // namespace memeff
