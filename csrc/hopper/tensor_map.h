// Host side of TMA: what the copy engine must know of an operand, made for every call and passed by value.
//
// A map has five dimensions, innermost first: columns, rows, heads of a group, groups, batch. A dimension along which
// the operand is broadcast (stride 0) has one element; kernels then count it as 0 (Operand::step_*). Elements beyond
// the columns or rows are read as zeros.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <string>

#include "params.h"
#include "status.h"

namespace memeff {
namespace hopper {

struct Operand {
  CUtensorMap map;
  int32_t step_h, step_g, step_b;  // 0 where broadcast, else 1
};

// The driver's encoder: a driver older than the toolkit's still has it, and nothing links to libcuda.
inline PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
    const bool ok = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return ok ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry) : nullptr;
  }();
  return found;
}

// columns, rows: of the operand; box_rows: of one copy, which is one chunk of 64 columns wide. step: a copy takes every
// step-th row.
inline Status make_operand(Operand* to, TensorView const& view, DType dtype, ForwardParams const& p, int32_t columns,
                           int32_t rows, int32_t box_rows, std::string const& where, int32_t step = 1) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
  if (encode == nullptr) {
    return {Code::kCuda, where + ": the driver has no cuTensorMapEncodeTiled; a driver for CUDA 12.0 or newer has it"};
  }
  to->step_h = view.stride_h != 0, to->step_g = view.stride_g != 0, to->step_b = view.stride_b != 0;
  const cuuint64_t groups = cuuint64_t(p.heads / p.heads_per_group);
  const cuuint64_t sizes[5] = {cuuint64_t(columns), cuuint64_t(rows), to->step_h ? cuuint64_t(p.heads_per_group) : 1,
                               to->step_g ? groups : 1, to->step_b ? cuuint64_t(p.batch) : 1};
  // Of a dimension with one element, any legal stride.
  const auto bytes = [&](int dimension, int64_t stride) {
    return sizes[dimension] == 1 ? cuuint64_t(16) : cuuint64_t(stride) * 2;
  };
  const cuuint64_t strides[4] = {bytes(1, view.stride_m), bytes(2, view.stride_h), bytes(3, view.stride_g),
                                 bytes(4, view.stride_b)};
  const cuuint32_t box[5] = {64, cuuint32_t(box_rows * step), 1, 1, 1};
  const cuuint32_t steps[5] = {1, cuuint32_t(step), 1, 1, 1};
  const CUresult result =
      encode(&to->map, dtype == DType::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
             const_cast<void*>(view.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Code::kCuda, where + ": cuTensorMapEncodeTiled returned " + std::to_string(int(result))};
}

}  // namespace hopper
}  // namespace memeff
