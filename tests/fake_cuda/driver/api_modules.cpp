// The driver's functions for modules, and launches of kernels on the host.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "fake_cuda/driver/driver.h"
#include "fake_cuda/driver/kernels.h"
#include "fake_cuda/driver/measure.h"

namespace fake {

namespace {

bool is_function(Function function) {
  const auto& modules = driver().modules.all();
  return std::any_of(modules.begin(), modules.end(), [&](const auto& module) {
    return std::any_of(module->functions.begin(), module->functions.end(),
                       [&](const auto& known) { return known.get() == function; });
  });
}

// One launch: arguments as they were when it was enqueued.
class Launch {
 public:
  Launch(const FakeKernel& kernel, void** arguments, FakeKernel::Index grid) : kernel_(kernel), grid_(grid) {
    size_t bytes = 0;
    for (size_t size : kernel.argument_bytes) bytes += rounded(size);
    values_.resize(bytes / sizeof(std::max_align_t));
    char* place = reinterpret_cast<char*>(values_.data());
    for (size_t i = 0; i < kernel.argument_bytes.size(); ++i) {
      std::memcpy(place, arguments[i], kernel.argument_bytes[i]);
      pointers_.push_back(place);
      place += rounded(kernel.argument_bytes[i]);
    }
  }

  // All blocks, in an order that the adversary chooses.
  void run(Work& work) {
    Recorder recorder(work.name + " on " + work.stream->name);
    recorder.ignore(values_.data(), values_.size() * sizeof(std::max_align_t));
    recorder.ignore(pointers_.data(), pointers_.size() * sizeof(void*));
    if (kernel_.own_variables) {
      for (const auto& [address, bytes] : kernel_.own_variables()) recorder.ignore(address, bytes);
    }
    std::vector<unsigned> blocks(size_t{grid_.x} * grid_.y * grid_.z);
    std::iota(blocks.begin(), blocks.end(), 0U);
    for (size_t i = blocks.size(); i > 1; --i)
      std::swap(blocks[i - 1], blocks[queues().random(static_cast<unsigned>(i))]);
    recorder.run([&] {
      for (unsigned block : blocks) {
        kernel_.run(pointers_.data(), grid_, {block % grid_.x, block / grid_.x % grid_.y, block / grid_.x / grid_.y});
      }
    });
    work.ranges = recorder.ranges();
  }

 private:
  static size_t rounded(size_t bytes) {
    return (bytes + sizeof(std::max_align_t) - 1) / sizeof(std::max_align_t) * sizeof(std::max_align_t);
  }

  const FakeKernel& kernel_;
  FakeKernel::Index grid_;
  std::vector<std::max_align_t> values_;
  std::vector<void*> pointers_;
};

}  // namespace

// Any image will do: the kernels are those that were compiled for the host.
Result cuModuleLoadData(Module* module, const void* image) {
  Call call("cuModuleLoadData", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (!image) return call.misuse(kInvalidValue, "no image");
  if (call.is_unsafe_in_capture()) return kStreamCaptureUnsupported;
  CUmod_st& made = driver().modules.make();
  made.context = &call.context();
  *module = &made;
  return kSuccess;
}

Result cuModuleUnload(Module module) {
  Call call("cuModuleUnload", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (!driver().modules.knows(module) || !module->is_alive) return call.misuse(kInvalidHandle, "not a module");
  module->is_alive = false;
  return kSuccess;
}

Result cuModuleGetFunction(Function* function, Module module, const char* name) {
  Call call("cuModuleGetFunction", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (!driver().modules.knows(module) || !module->is_alive) return call.misuse(kInvalidHandle, "not a module");
  if (module->context != &call.context()) return call.misuse(kInvalidHandle, "a module of another context");
  const FakeKernel* kernel = find_kernel(name);
  if (!kernel) return kNotFound;
  auto made = std::make_unique<CUfunc_st>();
  made->module = module;
  made->kernel = kernel;
  made->name = name;
  *function = made.get();
  module->functions.push_back(std::move(made));
  return kSuccess;
}

Result cuFuncGetAttribute(int* value, FunctionAttribute attribute, Function function) {
  Call call("cuFuncGetAttribute", Needs::kInit);
  if (call.is_refused()) return call.result();
  if (!is_function(function)) return call.misuse(kInvalidHandle, "not a function");
  switch (attribute) {
    case kFunctionLocalBytes:
      *value = 0;
      return kSuccess;
    case kFunctionRegisters:
      *value = 32;
      return kSuccess;
  }
  return call.misuse(kInvalidValue, "attribute " + std::to_string(attribute) + ", which this stand-in has not");
}

Result cuLaunchKernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared_bytes, StreamHandle handle, void** arguments,
                      void** extra) {
  Call call("cuLaunchKernel", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (!is_function(function)) return call.misuse(kInvalidHandle, "not a function");
  const std::string who = function->name + ": ";
  if (!function->module->is_alive) return call.misuse(kInvalidHandle, who + "its module was unloaded");
  if (function->module->context != &call.context()) return call.misuse(kInvalidHandle, who + "of another context");
  const size_t threads = size_t{block_x} * block_y * block_z;
  if (threads == 0 || threads > 1024 || grid_x == 0 || grid_x > 0x7fffffff || grid_y == 0 || grid_y > 65535 ||
      grid_z == 0 || grid_z > 65535) {
    return call.misuse(kInvalidValue, who + "a grid or block of a size that there is not");
  }
  if (shared_bytes > 48 * 1024) return call.misuse(kInvalidValue, who + "more shared memory than without asking");
  if (extra || (!arguments && !function->kernel->argument_bytes.empty())) {
    return call.misuse(kInvalidValue, who + "arguments by `extra`, or none");
  }
  CUstream_st* stream = call.stream(handle);
  if (!stream) return kInvalidHandle;
  auto launch = std::make_shared<Launch>(*function->kernel, arguments, FakeKernel::Index{grid_x, grid_y, grid_z});
  Work work;
  work.name = function->name;
  work.step = [launch](Work& self) {
    launch->run(self);
    return true;
  };
  queues().enqueue(*stream, std::move(work));
  return kSuccess;
}

// Every function that gpucomm loads is defined: this does not link otherwise.
[[gnu::used]] const Api kExported = [] {
  Api api;
#define GPUCOMM_FAKE_MEMBER(member, name, symbol, ...) api.member = &name;
  GPUCOMM_CUDA_FUNCTIONS(GPUCOMM_FAKE_MEMBER)
#undef GPUCOMM_FAKE_MEMBER
  return api;
}();

}  // namespace fake
