#include "fake_cuda/nccl/report.h"

#include "fake_cuda/nccl/script.h"

namespace fake_nccl {
namespace {

// One for the process, as in NCCL. The text lives until the next error.
std::string& kept() {
  static auto* const text = new std::string;
  return *text;
}

}  // namespace

void misuse(const std::string& function, const char* rule, const std::string& text) {
  const DeviceLock lock;
  if (!is_rule(rule)) return fake_misuse((function + ": the stand-in reports the unknown rule " + rule).c_str());
  if (script().allows(rule)) return;
  fake_misuse((function + ": [" + rule + "] " + text).c_str());
}

Result failure(Result result, const std::string& text) {
  const DeviceLock lock;
  kept() = text;
  return result;
}

const char* last_error() {
  const DeviceLock lock;
  return kept().c_str();
}

const char* result_text(Result result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case kSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case kInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case kInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case kInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case kRemoteError:
      return "remote process exited or there was a network error";
    case kInProgress:
      return "NCCL operation in progress";
    case kTimeout:
      return "timeout";
    default:
      return "unknown result code";
  }
}

}  // namespace fake_nccl
