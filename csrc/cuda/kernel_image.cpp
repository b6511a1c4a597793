#include "cuda/kernel_image.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "core/error.h"
#include "cuda/cubin_cache.h"
#include "cuda/embedded_kernels.h"
#include "kernels/kernels.h"

namespace gpucomm::cuda {

namespace {

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// A cubin runs on its own generation, from its own minor number on.
int newest_arch_for(const nvrtc::Api& api, int compute_capability) {
  int best = 0;
  for (const int arch : api.archs) {
    if (arch / 10 == compute_capability / 10 && arch <= compute_capability) best = std::max(best, arch);
  }
  if (best == 0) {
    throw UsageError("NVRTC " + version_text(api.version) + " (" + api.path +
                     ") knows no architecture that runs on sm_" + std::to_string(compute_capability) +
                     ": a newer one is needed");
  }
  return best;
}

class Program {
 public:
  explicit Program(const nvrtc::Api& api) : api_(api) {
    const char* headers[] = {kernels_header().data()};
    const char* names[] = {"codec_args.h"};
    check(api_, api_.create_program(&program_, kernels_source().data(), "codec.cu", 1, headers, names),
          "nvrtcCreateProgram");
  }
  ~Program() { api_.destroy_program(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  std::string cubin(const std::vector<std::string>& options) {
    std::vector<const char*> words;
    for (const std::string& option : options) words.push_back(option.c_str());
    const nvrtc::Result result = api_.compile_program(program_, static_cast<int>(words.size()), words.data());
    if (result != nvrtc::kSuccess) {
      const std::string what = "compiling the CUDA kernels for " + options.front() + " with " + api_.path;
      const nvrtc::NvrtcError error(api_, result, what.c_str());
      throw CommError(std::string(error.what()) + "\n" + log());
    }
    size_t bytes = 0;
    check(api_, api_.get_cubin_size(program_, &bytes), "nvrtcGetCUBINSize");
    std::string cubin(bytes, '\0');
    check(api_, api_.get_cubin(program_, cubin.data()), "nvrtcGetCUBIN");
    return cubin;
  }

 private:
  std::string log() {
    size_t bytes = 0;
    if (api_.get_program_log_size(program_, &bytes) != nvrtc::kSuccess) return "(no log)";
    std::string text(bytes, '\0');
    if (api_.get_program_log(program_, text.data()) != nvrtc::kSuccess) return "(no log)";
    text.resize(text.find('\0') == std::string::npos ? bytes : text.find('\0'));
    return text;
  }

  const nvrtc::Api& api_;
  nvrtc::Program program_ = nullptr;
};

// On one line.
std::string cache_key(const nvrtc::Api& api, const std::vector<std::string>& options) {
  const std::string source = std::string(kernels_header()) + '\0' + std::string(kernels_source());
  std::string key = "gpucomm kernels, source " + std::to_string(kernels().checksum(source.data(), source.size())) +
                    ", NVRTC " + version_text(api.version) + ",";
  for (const std::string& option : options) key += " " + option;
  return key;
}

}  // namespace

KernelImage compile_kernels(const nvrtc::Api& nvrtc, int compute_capability, const std::string& cache_folder) {
  const std::string arch = "sm_" + std::to_string(newest_arch_for(nvrtc, compute_capability));
  const std::vector<std::string> options = {"--gpu-architecture=" + arch, "--std=c++17"};
  const std::string compiled = "compiled by NVRTC " + version_text(nvrtc.version) + " for " + arch;
  std::optional<CubinCache> cache;
  if (!cache_folder.empty()) {
    cache.emplace(cache_folder, cache_key(nvrtc, options));
    if (std::optional<std::string> cubin = cache->read())
      return {std::move(*cubin), compiled + ", from " + cache->path()};
  }
  KernelImage image = {Program(nvrtc).cubin(options), compiled};
  if (cache) {
    const std::string problem = cache->write(image.bytes);
    image.origin += problem.empty() ? ", kept in " + cache->path() : ", not kept: " + problem;
  }
  return image;
}

Module load_kernels(const GpuDevice& device, const KernelCompiler& compiler, std::string* origin) {
  const Api& api = device.api();
  const Current current(api, device.context());
  Module module = nullptr;
  std::string earlier;
  if (!fat_binary().empty()) {
    const Result result = api.module_load_data(&module, fat_binary().data());
    if (result == kSuccess) {
      *origin = "fat binary of the build";
      return module;
    }
    earlier = CudaError(api, result, "loading the fat binary of the build").what();
  }
  try {
    nvrtc::Search search = compiler.search;
    search.driver_version = api.driver_version;
    search.arch = device.compute_capability();
    const std::shared_ptr<const nvrtc::Api> nvrtc = nvrtc::load(search);
    const KernelImage image = compile_kernels(*nvrtc, device.compute_capability(), compiler.cache_folder);
    const std::string what = "cuModuleLoadData of kernels " + image.origin;
    device.check(api.module_load_data(&module, image.bytes.data()), what.c_str());
    *origin = image.origin + (earlier.empty() ? "" : " (" + earlier + ")");
    return module;
  } catch (const CommError& error) {
    if (earlier.empty()) throw;
    throw CommError(std::string(error.what()) + "\nbefore that: " + earlier);
  }
}

}  // namespace gpucomm::cuda
