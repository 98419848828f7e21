// Order between a stream's kernels (common/early_launch.h).
#pragma once

namespace memeff {
namespace ptx {

// Lets the stream's next kernel take its places, if it asked for that. PTX ISA 9.7.13
// "griddepcontrol"; sm_90 and later, nothing before.
__device__ inline void admit_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the stream's previous kernel has ended and its writes are seen.
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ptx
}  // namespace memeff
