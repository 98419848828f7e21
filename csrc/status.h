// How launchers report: nothing in csrc but the binding throws, exits, prints or reads the environment.
#pragma once

#include <string>

namespace memeff {

enum class Code : int {
  kOk = 0,
  kInvalid = 1,      // inputs disagree: ValueError
  kUnsupported = 2,  // legal, but no kernel: NotImplementedError
  kCuda = 3,         // a CUDA call failed: RuntimeError
};

struct Status {
  Code code = Code::kOk;
  std::string message;
  bool ok() const { return code == Code::kOk; }
};

}  // namespace memeff

// Returns a Status that names the call, the kernel and its launch from the enclosing function when `call` fails.
#define MEMEFF_CUDA_CHECK(call, where)                                                                         \
  do {                                                                                                         \
    const cudaError_t error_ = (call);                                                                         \
    if (error_ != cudaSuccess)                                                                                 \
      return ::memeff::Status{::memeff::Code::kCuda,                                                           \
                              std::string(#call " failed in ") + (where) + ": " + cudaGetErrorString(error_)}; \
  } while (0)
