// GPUs: a device, its streams, the kernels and the codec on them, and the transport between them.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <cstring>
#include <map>

#include "bindings/bindings.h"
#include "bindings/embedder.h"
#include "bindings/names.h"
#include "cuda/codec_cuda.h"
#include "cuda/kernel_image.h"
#include "cuda/stream_cuda.h"
#include "transport/transport_nccl.h"

namespace py = pybind11;

namespace gpucomm {

namespace {

using cuda::CudaCodec;
using cuda::CudaKernels;
using cuda::CudaStream;
using cuda::GpuDevice;

std::shared_ptr<GpuDevice> make_device(int ordinal, const std::string& library) {
  const py::gil_scoped_release unlocked;  // a driver may take seconds to start
  return std::make_shared<GpuDevice>(cuda::load(library), ordinal);
}

std::shared_ptr<CudaKernels> make_kernels(const std::shared_ptr<GpuDevice>& device,
                                          const std::vector<std::string>& nvrtc_wheels,
                                          const std::string& cache_folder) {
  const py::gil_scoped_release unlocked;  // a compilation takes a second or more
  const cuda::KernelCompiler compiler{
      .search = {.path = "", .wheel_paths = nvrtc_wheels, .driver_version = 0, .arch = 0},
      .cache_folder = cache_folder};
  std::string origin;
  return std::make_shared<CudaKernels>(device, cuda::load_kernels(*device, compiler, &origin));
}

// Of ncclConfig_t, by the names of the options in Python.
int nccl::Config::* config_field(const std::string& name) {
  using Config = nccl::Config;
  static const std::map<std::string, int Config::*> fields = {
      {"blocking", &Config::blocking},           {"cga_cluster_size", &Config::cga_cluster_size},
      {"min_ctas", &Config::min_ctas},           {"max_ctas", &Config::max_ctas},
      {"traffic_class", &Config::traffic_class}, {"collnet_enable", &Config::collnet_enable},
      {"cta_policy", &Config::cta_policy},       {"nvls_ctas", &Config::nvls_ctas},
  };
  const auto found = fields.find(name);
  if (found == fields.end()) throw UsageError("config: " + name + " is no field of NCCL's that can be set");
  return found->second;
}

std::shared_ptr<NcclTransport> make_transport(std::shared_ptr<GpuDevice> device, std::shared_ptr<CudaKernels> kernels,
                                              int rank, int size, const std::string& unique_id, double timeout_s,
                                              std::vector<int> global_ranks, std::string name,
                                              const std::map<std::string, int>& config, const std::string& net_name,
                                              std::shared_ptr<NcclTransport> parent, std::vector<int> excluded,
                                              const std::vector<std::tuple<int, pid_t, uint64_t>>& peers) {
  NcclOptions options;
  options.rank = rank;
  options.size = size;
  options.global_ranks = std::move(global_ranks);
  options.timeout_s = timeout_s;
  options.nccl = nccl::load({});
  options.device = std::move(device);
  if (unique_id.size() != sizeof options.id)
    throw UsageError("unique_id: " + std::to_string(unique_id.size()) + " bytes");
  std::memcpy(options.id.bytes, unique_id.data(), unique_id.size());
  options.name = std::move(name);
  for (const auto& [field, value] : config) options.config.*config_field(field) = value;
  options.net_name = net_name;
  options.parent = std::move(parent);
  options.excluded = std::move(excluded);
  for (const auto& [peer, pid, start_time] : peers)
    options.peers.push_back({peer, std::make_shared<ProcessWatch>(pid, start_time)});
  options.scale = [kernels = std::move(kernels)](void* memory, DType dtype, size_t numel, double factor,
                                                 cuda::StreamHandle stream) {
    kernels->scale(memory, dtype, numel, factor, stream);
  };
  options.embedder = &PythonEmbedder::instance();
  return std::make_shared<NcclTransport>(std::move(options));
}

}  // namespace

void bind_gpu(py::module_& module) {
  module.def(
      "process_identity",
      [] { return std::make_tuple(boot_id() + pid_namespace(), getpid(), process_start_time(getpid())); },
      "Names of the machine and its pid namespace, this process there, its start in ticks since boot.");

  py::class_<GpuDevice, std::shared_ptr<GpuDevice>>(module, "GpuDevice")
      .def(py::init(&make_device), py::arg("ordinal"), py::arg("library") = "")
      .def_property_readonly("ordinal", &GpuDevice::ordinal)
      .def_property_readonly("text", &GpuDevice::text)
      .def_property_readonly("pci_bus_id", &GpuDevice::pci_bus_id)
      .def_property_readonly("compute_capability", &GpuDevice::compute_capability);

  py::class_<CudaStream, Stream, std::shared_ptr<CudaStream>>(module, "CudaStream")
      .def(py::init([](std::shared_ptr<GpuDevice> device) {
             return std::make_shared<CudaStream>(std::move(device), &PythonEmbedder::instance());
           }),
           py::arg("device"))
      .def(
          "follow",
          [](CudaStream& s, uintptr_t stream) {
            const Caller caller{reinterpret_cast<void*>(stream)};
            s.follow(caller);
            if (s.captures(s.handle())) s.lead(caller, s.record());  // nothing may come after it here, to lead back
          },
          py::arg("stream"), "orders what is enqueued here after what is enqueued there by now")
      .def(
          "watch",
          [](CudaStream& s, const std::shared_ptr<NcclTransport>& transport) {
            s.watch([watched = std::weak_ptr(transport)] {
              if (const auto alive = watched.lock()) alive->check_failure();
            });
          },
          py::arg("transport"), "a wait of the host for this stream ends, and raises, with what the transport noticed")
      .def(
          "synchronize", [](CudaStream& s) { s.synchronize(s.record()); }, "the host waits for all of its work")
      .def_property_readonly("handle", [](const CudaStream& s) { return reinterpret_cast<uintptr_t>(s.handle()); })
      .def(
          "captures",
          [](const CudaStream& s, uintptr_t stream) {
            return s.captures(reinterpret_cast<cuda::StreamHandle>(stream));
          },
          py::arg("stream"));

  py::class_<CudaKernels, std::shared_ptr<CudaKernels>>(module, "CudaKernels")
      .def(py::init(&make_kernels), py::arg("device"), py::arg("nvrtc_wheels") = std::vector<std::string>(),
           py::arg("cache_folder") = "");

  py::class_<BucketCodec, std::shared_ptr<BucketCodec>>(module, "BucketCodec");
  py::class_<CudaCodec, BucketCodec, std::shared_ptr<CudaCodec>>(module, "CudaCodec")
      .def(py::init([](std::shared_ptr<CudaKernels> kernels, std::shared_ptr<CudaStream> stream) {
             return std::make_shared<CudaCodec>(std::move(kernels), std::move(stream));
           }),
           py::arg("kernels"), py::arg("stream"))
      .def_property_readonly(
          "squared_norm",
          [](const CudaCodec& codec) {
            const auto& norm = codec.squared_norm();
            return Memory{norm, norm->as<void>(), norm->bytes(), codec.device()->ordinal()};
          },
          "a float: of the buckets as they were reduced, see Engine.set_measure_norm");

  py::class_<NcclTransport, Transport, std::shared_ptr<NcclTransport>>(module, "NcclTransport")
      .def(py::init(&make_transport), py::arg("device"), py::arg("kernels"), py::arg("rank"), py::arg("size"),
           py::arg("unique_id"), py::arg("timeout_s"), py::arg("global_ranks") = std::vector<int>(),
           py::arg("name") = "", py::arg("config") = std::map<std::string, int>(), py::arg("net_name") = "",
           py::arg("parent") = nullptr, py::arg("excluded") = std::vector<int>(),
           py::arg("peers") = std::vector<std::tuple<int, pid_t, uint64_t>>())
      .def_property_readonly("can_shrink", &NcclTransport::can_shrink)
      .def("register_memory", &NcclTransport::register_memory, py::arg("memory"), py::arg("symmetric"),
           py::call_guard<py::gil_scoped_release>(), "collective where symmetric; False: not to be had on this rank")
      .def("clear", &NcclTransport::clear, py::arg("memory"), "fills memory with zeros; waits for the device")
      .def("deregister_memory", &NcclTransport::deregister_memory, py::arg("memory"),
           py::call_guard<py::gil_scoped_release>())
      .def("check_failure", &NcclTransport::check_failure);
}

}  // namespace gpucomm
