// The few calls of the CUDA runtime that the host part makes. A host-only build answers each with kUnsupported.
#pragma once

#include <cstdint>
#include <string>

#include "status.h"

namespace memeff {

struct DeviceFacts {
  int32_t sm = 0;          // compute capability as a number: 80, 90
  int32_t smem_optin = 0;  // bytes of shared memory a block may ask for
  int32_t sm_count = 0;
};

// Kept after the first call for a device.
Status device_facts(int device, DeviceFacts* facts);
Status device_name(int device, std::string* name);

// Makes a device current and puts the former one back at the end of the scope.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  const Status& status() const { return status_; }

 private:
  int previous_ = -1;  // -1: nothing to put back
  Status status_;
};

}  // namespace memeff
