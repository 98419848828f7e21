// Host side of the hopper family's fp32 forward kernels: the split of the operands, then the kernel.
#pragma once

#include "hopper/f32_forward.h"
#include "hopper/launch.h"
#include "reduce/halves.h"

namespace memeff {
namespace hopper_f32 {

// The TMA map of an operand's scales: rows of fp32, `box` of them at a time.
inline Status make_scales(Operand* to, SplitOperand const& o, const float* data, int box, std::string const& where) {
  const PFN_cuTensorMapEncodeTiled_v12000 encode = encoder();
  if (encode == nullptr) {
    return {Code::kCuda, where + ": the driver has no cuTensorMapEncodeTiled; a driver for CUDA 12.0 or newer has it"};
  }
  to->step_h = o.members > 1, to->step_g = o.groups > 1, to->step_b = o.batches > 1;
  const cuuint64_t head = cuuint64_t(o.scale_rows()) * sizeof(float);
  const cuuint64_t sizes[5] = {cuuint64_t(o.rows), 1, cuuint64_t(o.members), cuuint64_t(o.groups),
                               cuuint64_t(o.batches)};
  const cuuint64_t strides[4] = {head, head, head * o.members, head * o.members * o.groups};
  const cuuint32_t boxes[5] = {cuuint32_t(box), 1, 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  const CUresult result = encode(&to->map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 5, const_cast<float*>(data), sizes, strides,
                                 boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return {};
  return {Code::kCuda, where + ": cuTensorMapEncodeTiled returned " + std::to_string(int(result))};
}

template <typename Traits>
Status make_args(ForwardArgs* args, ForwardParams const& p, Plan const& plan, std::string const& where) {
  int32_t multiprocessors = 0;
  if (Status s = count_multiprocessors(&multiprocessors, where); !s.ok()) return s;
  float* workspace = p.parts.workspace;
  ForwardParams parts = p;  // operands of 16 bits
  TensorView* views[] = {&parts.query, &parts.key, &parts.value};
  for (int i = 0; i < 3; ++i) {
    SplitOperand const& o = plan.operands[i];
    *views[i] = view_of(o, workspace + o.data, o.rows, Traits::kColumns);
  }
  parts.head_dim = parts.value_dim = Traits::kColumns;
  if (Status s = hopper::make_forward_args<Traits>(args, parts, multiprocessors, where); !s.ok()) return s;
  args->p = p;
  SplitOperand const& q = plan.operands[0];
  args->query_scales = view_of(q, workspace + q.scales, q.scale_rows(), 1);
  if (Status s = make_scales(&args->key_scales, plan.operands[1], workspace + plan.operands[1].scales,
                             Traits::kScaleBox, where);
      !s.ok())
    return s;
  return make_scales(&args->value_scales, plan.operands[2], workspace + plan.operands[2].scales, Traits::kScaleBox,
                     where);
}

// Launches on `stream` of the current device. Never synchronises, never allocates.
template <typename Traits>
Status launch_forward(ForwardParams const& p, cudaStream_t stream, const char* name) {
  const std::string where = name;
  if (p.partial.out.data != nullptr) return {Code::kUnsupported, where + " writes no results in fp32 parts"};
  if (p.sequences.block_tables != nullptr) return {Code::kUnsupported, where + " reads no pages"};
  if (p.parts.workspace == nullptr) return {Code::kUnsupported, where + " needs a workspace"};
  const Plan plan = make_plan(p, Traits::kParts, Traits::kWidth);
  ForwardArgs args;
  if (Status s = make_args<Traits>(&args, p, plan, where); !s.ok()) return s;
  if (args.map.blocks == 0) {
    return {Code::kUnsupported, where + ": B * H * query tiles exceeds the grid limit of 2^31 - 1 thread blocks"};
  }
  if (Status s = reduce::launch_halves(p, plan, p.parts.workspace, stream); !s.ok()) return s;
  auto* kernel = &forward_kernel<Traits>;
  if (Status s = allow_shared_memory<Traits>(kernel, where); !s.ok()) return s;
  kernel<<<args.blocks, Traits::kThreads, Traits::kSmemBytes, stream>>>(args);
  return launched(where, args.blocks, Traits::kThreads, Traits::kSmemBytes);
}

}  // namespace hopper_f32
}  // namespace memeff
