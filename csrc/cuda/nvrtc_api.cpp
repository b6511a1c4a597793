#include "cuda/nvrtc_api.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "core/dynamic_library.h"

namespace gpucomm::nvrtc {

NvrtcError::NvrtcError(const Api& api, Result failed_with, const char* what)
    : CommError(std::string(what) + " failed with NVRTC's result " + std::to_string(failed_with) + ": " +
                api.get_error_string(failed_with)),
      result(failed_with) {}

void check(const Api& api, Result result, const char* what) {
  if (result != kSuccess) throw NvrtcError(api, result, what);
}

namespace {

constexpr const char* kLibraryNames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

// "13.0" of 13000.
std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The compiler opens its builtins by name at the first program; from 13 on it does not look beside itself.
void load_builtins(const Api& api) {
  const std::string name = "libnvrtc-builtins.so." + version_text(api.version);
  std::string error;
  DynamicLibrary builtins = DynamicLibrary::open(api.path.substr(0, api.path.rfind('/') + 1) + name, &error);
  if (!builtins) builtins = DynamicLibrary::open(name, &error);
  if (!builtins) throw TransportUnavailable(api.path + " lacks its builtins (" + error + ")");
  builtins.keep();
}

std::shared_ptr<const Api> resolved(const DynamicLibrary& library) {
  auto api = std::make_shared<Api>();
  api->path = library.path();
#define GPUCOMM_NVRTC_RESOLVE(member, symbol, ...)                                               \
  if (!library.resolve(#symbol, &api->member)) {                                                 \
    throw TransportUnavailable(api->path + " is no NVRTC of CUDA 12 or 13: it has no " #symbol); \
  }
  GPUCOMM_NVRTC_FUNCTIONS(GPUCOMM_NVRTC_RESOLVE)
#undef GPUCOMM_NVRTC_RESOLVE
  int major = 0, minor = 0, count = 0;
  check(*api, api->get_version(&major, &minor), "nvrtcVersion");
  api->version = 1000 * major + 10 * minor;
  check(*api, api->get_num_supported_archs(&count), "nvrtcGetNumSupportedArchs");
  api->archs.resize(count);
  check(*api, api->get_supported_archs(api->archs.data()), "nvrtcGetSupportedArchs");
  std::sort(api->archs.begin(), api->archs.end());
  load_builtins(*api);
  return api;
}

// By the file's path. Never destroyed: a compilation may be under way when the process ends.
struct Loaded {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const Api>> apis;
};

Loaded& loaded() {
  static Loaded& instance = *new Loaded;
  return instance;
}

// Empty, or why the images that it makes are of no use.
std::string objection(const Api& api, const Search& search) {
  const std::string found = "NVRTC " + api.path + " is of CUDA " + version_text(api.version);
  if (search.driver_version != 0 && api.version / 1000 > search.driver_version / 1000) {
    return found + ", the driver serves only " + version_text(search.driver_version);
  }
  const auto runs = [&](int arch) { return arch / 10 == search.arch / 10 && arch <= search.arch; };
  if (search.arch != 0 && std::none_of(api.archs.begin(), api.archs.end(), runs)) {
    return found + ", which does not know the device's sm_" + std::to_string(search.arch);
  }
  return "";
}

// The table of an opened library, if it will do; else null and why.
std::shared_ptr<const Api> accepted(DynamicLibrary library, const Search& search, std::string* error) {
  Loaded& state = loaded();
  std::shared_ptr<const Api>& api = state.apis[library.path()];
  if (api == nullptr) {
    library.keep();
    try {
      api = resolved(library);
    } catch (const CommError& failure) {
      *error = failure.what();
      return nullptr;
    }
  }
  *error = objection(*api, search);
  return error->empty() ? api : nullptr;
}

}  // namespace

std::shared_ptr<const Api> load(const Search& search) {
  const std::lock_guard lock(loaded().mutex);
  std::string errors;
  // The first that will do: of those that are loaded, then of files.
  const auto take = [&](DynamicLibrary library, std::string error) -> std::shared_ptr<const Api> {
    std::shared_ptr<const Api> api = library ? accepted(std::move(library), search, &error) : nullptr;
    // The same file may be found in several ways.
    if (api == nullptr && errors.find(error) == std::string::npos) errors += (errors.empty() ? "" : "; ") + error;
    return api;
  };
  std::vector<std::string> names = {search.path};
  if (search.path.empty()) {
    for (const char* name : kLibraryNames) {
      if (auto api = take(DynamicLibrary::loaded(name), "")) return api;
    }
    names = search.wheel_paths;
    names.insert(names.end(), std::begin(kLibraryNames), std::end(kLibraryNames));
  }
  for (const std::string& name : names) {
    std::string error;
    DynamicLibrary library = DynamicLibrary::open(name, &error);
    if (auto api = take(std::move(library), error)) return api;
  }
  throw TransportUnavailable("no NVRTC to compile the kernels with: " + errors +
                             (search.path.empty()
                                  ? "; install nvidia-cuda-nvrtc (CUDA 13) or nvidia-cuda-nvrtc-cu12, as "
                                    "the driver is, or a build of gpucomm made with nvcc"
                                  : ""));
}

}  // namespace gpucomm::nvrtc
