// The libraries of GPUs as Python sees them: loaded, asked for their versions, tried.
#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "cuda/cuda_api.h"
#include "cuda/nvrtc_api.h"
#include "nccl/nccl_api.h"

namespace py = pybind11;

namespace gpucomm {

namespace {

py::dict cuda_load(const std::string& path) {
  std::shared_ptr<const cuda::Api> api;
  int devices = 0;
  {
    const py::gil_scoped_release unlocked;  // a driver may take seconds to start
    api = cuda::load(path);
    cuda::check(*api, api->device_get_count(&devices), "cuDeviceGetCount");
  }
  py::dict found;
  found["path"] = api->path;
  found["driver_version"] = api->driver_version;
  found["devices"] = devices;
  return found;
}

std::shared_ptr<const nccl::Api> nccl_api(const std::string& path, const std::string& wheel_path) {
  const py::gil_scoped_release unlocked;  // hundreds of megabytes may have to be read
  return nccl::load({path, wheel_path});
}

py::dict nccl_load(const std::string& path, const std::string& wheel_path) {
  const auto api = nccl_api(path, wheel_path);
  py::list features;
#define GPUCOMM_NCCL_FEATURE(member, symbol, since, ...) \
  if ((since) != 0 && api->member != nullptr) features.append(#symbol);
  GPUCOMM_NCCL_FUNCTIONS(GPUCOMM_NCCL_FEATURE)
#undef GPUCOMM_NCCL_FEATURE
  py::dict found;
  found["path"] = api->path;
  found["version"] = api->version;
  found["version_text"] = nccl::version_text(api->version);
  found["features"] = features;
  return found;
}

py::bytes nccl_unique_id() {
  const auto api = nccl_api("", "");
  nccl::UniqueId id;
  {
    const py::gil_scoped_release unlocked;
    nccl::check(*api, api->get_unique_id(&id), "ncclGetUniqueId");
  }
  return py::bytes(id.bytes, sizeof id.bytes);
}

void nccl_try_init() {
  const auto api = nccl_api("", "");
  const py::gil_scoped_release unlocked;
  nccl::UniqueId id;
  nccl::Config config;
  nccl::Comm comm = nullptr;
  nccl::check(*api, api->get_unique_id(&id), "ncclGetUniqueId");
  nccl::check(*api, api->comm_init_rank_config(&comm, 1, id, 0, &config), "ncclCommInitRankConfig");
  nccl::check(*api, api->comm_destroy(comm), "ncclCommDestroy");
}

py::dict nvrtc_load(const std::string& path, const std::vector<std::string>& wheel_paths, int driver_version,
                    int arch) {
  std::shared_ptr<const nvrtc::Api> api;
  {
    const py::gil_scoped_release unlocked;
    api = nvrtc::load({path, wheel_paths, driver_version, arch});
  }
  py::dict found;
  found["path"] = api->path;
  found["version"] = api->version;
  found["archs"] = api->archs;
  return found;
}

}  // namespace

void bind_cuda(py::module_& module) {
  module.def("cuda_load", &cuda_load, py::arg("path") = "",
             "Loads the CUDA driver: its path, driver_version (12040 is CUDA 12.4) and number of devices. path: empty "
             "for the system's. Raises TransportUnavailable, and ValueError if another one is loaded already.");
  module.def("nccl_load", &nccl_load, py::arg("path") = "", py::arg("wheel_path") = "",
             "Loads NCCL: its path, version (22703 is 2.27.3), version_text and features, the names of those of its "
             "functions that not every version has. path: the library to take, empty for the one in the process, else "
             "wheel_path, else the system's. Raises TransportUnavailable, and ValueError if it would be a second one.");
  module.def("nccl_unique_id", &nccl_unique_id, "128 bytes from which ranks make a communicator.");
  module.def("nccl_try_init", &nccl_try_init,
             "Makes a communicator of this process alone on its current device and destroys it. Raises CommError with "
             "what NCCL says.");
  module.def(
      "nvrtc_load", &nvrtc_load, py::arg("path") = "", py::arg("wheel_paths") = std::vector<std::string>(),
      py::arg("driver_version") = 0, py::arg("arch") = 0,
      "Loads the run-time compiler: its path, version (12040 is CUDA 12.4) and archs (80 is sm_80). path: the "
      "library to take, empty for the first of the process's, the wheels' and the system's whose images a driver "
      "of that version and a device of that arch accept; 0 for any. Raises TransportUnavailable.");
}

}  // namespace gpucomm
