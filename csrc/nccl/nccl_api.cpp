#include "nccl/nccl_api.h"

#include <vector>

#include "core/loaded_library.h"

namespace gpucomm::nccl {

// Until 2.8 the code was 1000 * major + 100 * minor + patch.
std::string version_text(int version) {
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int rest = version < 10000 ? version % 1000 : version % 10000;
  return std::to_string(major) + "." + std::to_string(rest / 100) + "." + std::to_string(rest % 100);
}

static std::string failure_text(const Api& api, Result result, const char* what, Comm comm) {
  const char* text = api.get_error_string(result);
  const char* last = api.get_last_error(comm);
  std::string message = std::string(what) + " failed with NCCL's result " + std::to_string(result) + ": " +
                        (text != nullptr ? text : "no text");
  if (last != nullptr && *last != '\0') message += std::string("; last error of NCCL: ") + last;
  return message;
}

NcclError::NcclError(const Api& api, Result failed_with, const char* what, Comm comm)
    : CommError(failure_text(api, failed_with, what, comm)), result(failed_with) {}

void check(const Api& api, Result result, const char* what, Comm comm) {
  if (result != kSuccess) throw NcclError(api, result, what, comm);
}

DataType type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return kFloat16;
    case DType::kBFloat16:
      return kBfloat16;
    case DType::kFloat32:
      return kFloat32;
    case DType::kFloat64:
      return kFloat64;
    case DType::kInt32:
      return kInt32;
    case DType::kInt64:
      return kInt64;
    case DType::kUInt8:
      return kUint8;
  }
  throw_internal("dtype is one of DType", std::to_string(static_cast<int>(dtype)), __FILE__, __LINE__);
}

// ---- loading

namespace {

constexpr int kOldest = 21800;
constexpr const char* kLibraryName = "libnccl.so.2";
constexpr const char* kMark = "ncclGetVersion";  // what makes a library an NCCL

std::shared_ptr<const Api> resolved(const DynamicLibrary& library) {
  auto api = std::make_shared<Api>();
  api->path = library.path();
  if (!library.resolve(kMark, &api->get_version)) {
    throw TransportUnavailable(api->path + " is not an NCCL: it has no " + kMark);
  }
  if (const Result result = api->get_version(&api->version); result != kSuccess) {
    throw TransportUnavailable(api->path + " does not tell its version: " + kMark + " returned " +
                               std::to_string(result));
  }
  const std::string found = "the NCCL " + api->path + " is " + version_text(api->version);
  if (api->version < kOldest) {
    throw TransportUnavailable(found + ", " + version_text(kOldest) + " or newer is needed");
  }
  // A function that the version does not promise is not taken, even if it is there: it may be unfinished.
#define GPUCOMM_NCCL_RESOLVE(member, symbol, since, ...)                                                \
  if (api->version >= (since) && !library.resolve(#symbol, &api->member) && (since) == 0) {             \
    throw TransportUnavailable(found + " and has no " #symbol ", as every one of 2.18 and newer does"); \
  }
  GPUCOMM_NCCL_FUNCTIONS(GPUCOMM_NCCL_RESOLVE)
#undef GPUCOMM_NCCL_RESOLVE
  return api;
}

std::string joined(const std::vector<std::string>& texts, const char* between) {
  std::string all;
  for (const std::string& text : texts) all += (all.empty() ? "" : between) + text;
  return all;
}

std::string paths(const std::vector<DynamicLibrary>& libraries) {
  std::vector<std::string> texts;
  for (const DynamicLibrary& library : libraries) texts.push_back(library.path());
  return joined(texts, " and ");
}

DynamicLibrary open_explicit(const std::string& path, const std::vector<DynamicLibrary>& present) {
  // By path or by name, but only what is loaded already if anything is: opening a second one would run its code.
  DynamicLibrary library = DynamicLibrary::loaded(path);
  if (!library && !present.empty()) {
    throw UsageError("NCCL is to be " + path + ", but the process has loaded " + paths(present) +
                     " already, and two NCCLs in one process break each other: leave the path out, or load that one "
                     "first (LD_PRELOAD)");
  }
  std::string error;
  if (!library) library = DynamicLibrary::open(path, &error);
  if (!library) {
    throw TransportUnavailable("NCCL cannot be loaded (" + error + "): an explicit path must lead to a libnccl.so.2");
  }
  return library;
}

DynamicLibrary open_found(const std::string& wheel_path, std::vector<DynamicLibrary> present) {
  if (present.size() > 1) {
    throw UsageError("the process has loaded several NCCLs already: " + paths(present) +
                     "; an explicit path must say which one counts");
  }
  if (!present.empty()) return std::move(present.front());
  std::vector<std::string> errors;
  std::string error;
  for (const std::string& name : {wheel_path, std::string(kLibraryName)}) {
    if (name.empty()) continue;
    DynamicLibrary library = DynamicLibrary::open(name, &error);
    if (library) return library;
    errors.push_back(error);
  }
  throw TransportUnavailable("NCCL is not here: the process has loaded none, " +
                             std::string(wheel_path.empty() ? "there is no wheel of it, " : "") + joined(errors, ", ") +
                             "; install nvidia-nccl-cu12 or nvidia-nccl-cu13, as the driver is");
}

}  // namespace

std::shared_ptr<const Api> load(const Search& search) {
  auto& loaded = LoadedLibrary<Api>::instance();
  const std::lock_guard lock(loaded.mutex);
  if (loaded.api != nullptr) {
    if (loaded.is(search.path)) return loaded.api;
    throw UsageError("NCCL is " + loaded.api->path + " in this process already, not " + search.path +
                     ": two of them in one process break each other");
  }
  std::vector<DynamicLibrary> present = libraries_defining(kMark);
  DynamicLibrary library =
      search.path.empty() ? open_found(search.wheel_path, std::move(present)) : open_explicit(search.path, present);
  std::shared_ptr<const Api> api = resolved(library);
  library.keep();
  return loaded.set(std::move(library), std::move(api));
}

}  // namespace gpucomm::nccl
