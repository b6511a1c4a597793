// What the NCCL stand-in says: misuses, which fail the test, and the text of the last error, as NCCL keeps it.
#pragma once

#include <mutex>
#include <string>

#include "fake_cuda/driver/fake_stream.h"
#include "fake_cuda/nccl/functions.h"

namespace fake_nccl {

// The lock of the driver's stand-in, which guards everything here too.
struct DeviceLock {
  DeviceLock() { fake_lock(); }
  ~DeviceLock() { fake_unlock(); }
  DeviceLock(const DeviceLock&) = delete;
  DeviceLock& operator=(const DeviceLock&) = delete;
};

// Reports "function: [rule] text", unless the script allows the rule.
void misuse(const std::string& function, const char* rule, const std::string& text);

// Keeps the text for ncclGetLastError and gives the result back.
Result failure(Result result, const std::string& text);
const char* last_error();

const char* result_text(Result result);

}  // namespace fake_nccl
