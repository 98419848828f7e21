// Copies the query so that the heads of a key head are consecutive rows: a thread for each 16 bytes, or each element
// where addresses or sizes are no multiples of that.
#include "reduce/element.h"
#include "reduce/reduce.h"

namespace memeff {
namespace reduce {
namespace {

struct PackArgs {
  TensorView query;  // strides in vectors
  void* to;
  int64_t numel;                                     // vectors
  int32_t queries, groups, heads, row_heads, width;  // heads: of a group
};

template <typename V>
__global__ void __launch_bounds__(kThreads) pack_kernel(PackArgs a) {
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < a.numel; i += int64_t(gridDim.x) * kThreads) {
    int64_t rest = i / a.width;
    const int64_t column = i - rest * a.width, head = rest % a.row_heads;
    rest /= a.row_heads;
    const int64_t query = rest % a.queries;
    rest /= a.queries;
    const int64_t group = rest % a.groups, batch = rest / a.groups;
    V value{};
    if (head < a.heads) {
      value = static_cast<const V*>(a.query.data)[batch * a.query.stride_b + group * a.query.stride_g +
                                                  head * a.query.stride_h + query * a.query.stride_m + column];
    }
    static_cast<V*>(a.to)[i] = value;
  }
}

template <typename V>
Status launch(const ForwardParams& p, const ForwardParams& packed, int vector, CUstream_st* stream) {
  const TensorView& q = p.query;
  const TensorView view{q.data, q.stride_b / vector, q.stride_g / vector, q.stride_h / vector, q.stride_m / vector};
  const int32_t width = p.head_dim / vector;
  const PackArgs args{view,
                      const_cast<void*>(packed.query.data),
                      packed.batch * packed.heads * packed.queries * width,
                      p.queries,
                      packed.heads,
                      p.heads_per_group,
                      packed.row_heads,
                      width};
  const unsigned blocks = blocks_for(args.numel, kThreads);
  pack_kernel<V><<<blocks, kThreads, 0, stream>>>(args);
  return launched("reduce::pack", blocks);
}

}  // namespace

Status launch_pack(const ForwardParams& p, const ForwardParams& packed, DType dtype, CUstream_st* stream) {
  const int bytes = bytes_of(dtype), vector = 16 / bytes;
  const TensorView& q = p.query;
  const int64_t odd = q.stride_b | q.stride_g | q.stride_h | q.stride_m | p.head_dim;
  const bool whole = odd % vector == 0 && reinterpret_cast<uintptr_t>(q.data) % 16 == 0;
  if (whole) return launch<uint4>(p, packed, vector, stream);
  return bytes == 4 ? launch<uint32_t>(p, packed, 1, stream) : launch<uint16_t>(p, packed, 1, stream);
}

}  // namespace reduce
}  // namespace memeff
