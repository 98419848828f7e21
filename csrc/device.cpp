#include "device.h"

#ifdef MEMEFF_CUDA  // set by the build where nvcc is there

#include <cuda_runtime_api.h>

#include <atomic>

namespace memeff {
namespace {

constexpr int kMaxDevices = 64;  // devices beyond are asked every time

Status query(int device, DeviceFacts* facts) {
  const std::string where = "device_facts(" + std::to_string(device) + ")";
  int major = 0, minor = 0;
  MEMEFF_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), where);
  MEMEFF_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), where);
  MEMEFF_CUDA_CHECK(cudaDeviceGetAttribute(&facts->smem_optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), where);
  MEMEFF_CUDA_CHECK(cudaDeviceGetAttribute(&facts->sm_count, cudaDevAttrMultiProcessorCount, device), where);
  facts->sm = 10 * major + minor;
  return {};
}

}  // namespace

Status device_facts(int device, DeviceFacts* facts) {
  static DeviceFacts known[kMaxDevices];
  static std::atomic<bool> is_known[kMaxDevices];
  const bool kept = device >= 0 && device < kMaxDevices;
  if (kept && is_known[device].load(std::memory_order_acquire)) {
    *facts = known[device];
    return {};
  }
  if (Status status = query(device, facts); !status.ok() || !kept) return status;
  known[device] = *facts;  // two threads write the same values
  is_known[device].store(true, std::memory_order_release);
  return {};
}

Status device_name(int device, std::string* name) {
  cudaDeviceProp properties;
  MEMEFF_CUDA_CHECK(cudaGetDeviceProperties(&properties, device), "device_name(" + std::to_string(device) + ")");
  *name = properties.name;
  return {};
}

DeviceGuard::DeviceGuard(int device) {
  const auto set = [&]() -> Status {
    const std::string where = "DeviceGuard(" + std::to_string(device) + ")";
    int current = -1;
    MEMEFF_CUDA_CHECK(cudaGetDevice(&current), where);
    if (current == device) return {};
    MEMEFF_CUDA_CHECK(cudaSetDevice(device), where);
    previous_ = current;
    return {};
  };
  status_ = set();
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace memeff

#else

namespace memeff {

static Status host_only() { return {Code::kUnsupported, "this build is host-only: it was made without nvcc"}; }

Status device_facts(int, DeviceFacts*) { return host_only(); }
Status device_name(int, std::string*) { return host_only(); }
DeviceGuard::DeviceGuard(int) : status_(host_only()) {}
DeviceGuard::~DeviceGuard() { (void)previous_; }

}  // namespace memeff

#endif
