// Iterations of the engine as it drives a GPU, for callgrind to count: one rank over the stand-ins for the CUDA driver
// and NCCL, headers by the loopback transport.
//
//   engine_cost PARAMETERS BUCKETS KIND
//
// KIND: plain; wire: gradients travel as bfloat16 and are unpacked beside their slots; norm: the norm of the means is
// measured; padded: 200 instructions beside each gradient, to see that they are counted.
//
// Calls counted_iteration() kIterations times, of which the first ones warm up. The device's communication stream
// stands still meanwhile and goes on in between, so that what the engine finds complete when it looks does not hang on
// time.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda/codec_cuda.h"
#include "cuda/cuda_api.h"
#include "cuda/device.h"
#include "cuda/kernel_image.h"
#include "cuda/stream_cuda.h"
#include "engine/engine.h"
#include "fake_cuda/driver/control.h"
#include "nccl/nccl_api.h"
#include "transport/transport_loopback.h"
#include "transport/transport_nccl.h"

namespace gpucomm {
namespace {

constexpr size_t kNumel = 16;
constexpr size_t kGradBytes = kNumel * sizeof(float);
constexpr int kIterations = 6;

struct Case {
  size_t parameters;
  size_t buckets;  // a divisor of parameters
  DType wire;
  bool norm;
  bool padded;
};

// One rank: what Python makes around an engine.
class Rank {
 public:
  explicit Rank(const Case& wanted)
      : wanted_(wanted),
        api_(cuda::load(FAKE_CUDA_LIBRARY)),
        device_(std::make_shared<const cuda::GpuDevice>(api_, 0)),
        current_(*api_, device_->context()),
        stream_(std::make_shared<cuda::CudaStream>(device_, nullptr)),
        program_(device_, nullptr),
        grads_(device_, wanted.parameters * kGradBytes),
        means_(device_, wanted.parameters * kGradBytes) {
    std::string origin;
    const auto kernels = std::make_shared<cuda::CudaKernels>(device_, cuda::load_kernels(*device_, {}, &origin));
    NcclOptions options;
    options.nccl = nccl::load({.path = FAKE_NCCL_LIBRARY, .wheel_path = ""});
    options.device = device_;
    nccl::check(*options.nccl, options.nccl->get_unique_id(&options.id), "ncclGetUniqueId");
    const auto transport = std::make_shared<NcclTransport>(options);
    engine_ = std::make_unique<Engine>(
        EngineParts{.transport = transport,
                    .stream = stream_,
                    .bucket_codec = std::make_shared<cuda::CudaCodec>(kernels, stream_),
                    .control_transport = std::make_shared<LoopbackTransport>(LoopbackOptions{}),
                    .control_stream = std::make_shared<InlineStream>(),
                    .trace = std::make_shared<Trace>(),
                    .caller = [caller = Caller{program_.handle()}] { return caller; }},
        wanted.parameters, true, 0);
    engine_->on_release([](std::span<const int32_t>, std::span<const Caller>) {});
    engine_->set_measure_norm(wanted.norm);
    plan(*transport);
    api_->memset_d8_async(grads_.address(), 0, grads_.bytes(), program_.handle());
    api_->memset_d8_async(means_.address(), 0, means_.bytes(), program_.handle());
  }

  const Case& wanted() const { return wanted_; }
  cuda::StreamHandle communication() const { return stream_->handle(); }
  Engine& engine() { return *engine_; }
  const void* grad(size_t parameter) const { return grads_.as<std::byte>() + parameter * kGradBytes; }

 private:
  // Parameters in reverse, as backward makes their gradients.
  void plan(Transport& transport) {
    const size_t slots = wanted_.parameters / wanted_.buckets, numel = slots * kNumel;
    auto parameter = static_cast<int32_t>(wanted_.parameters);
    std::vector<BucketSpec> buckets;
    for (size_t b = 0; b < wanted_.buckets; ++b) {
      BucketSpec& bucket =
          buckets.emplace_back(BucketSpec{transport.allocate(numel * size_of(wanted_.wire)), wanted_.wire, numel, {}});
      for (size_t k = 0; k < slots; ++k) bucket.slots.push_back({--parameter, k * kNumel, kNumel});
    }
    engine_->set_plan(std::move(buckets), 0);
    if (wanted_.wire == DType::kFloat32) return;
    for (size_t p = 0; p < wanted_.parameters; ++p) {
      engine_->unpack_to(static_cast<int32_t>(p), means_.as<std::byte>() + p * kGradBytes, DType::kFloat32);
    }
  }

  Case wanted_;
  std::shared_ptr<const cuda::Api> api_;
  std::shared_ptr<const cuda::GpuDevice> device_;
  cuda::Current current_;
  std::shared_ptr<cuda::CudaStream> stream_;
  cuda::CudaStream program_;
  cuda::DeviceMemory grads_, means_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace

// What the hooks and the end of a backward call. Callgrind knows it by its name.
extern "C" [[gnu::noinline]] void counted_iteration(Rank* rank) {
  Engine& engine = rank->engine();
  engine.arm();
  for (size_t p = rank->wanted().parameters; p-- > 0;) {
    if (rank->wanted().padded) asm volatile(".rept 200\n nop\n .endr");  // PADDING of counts.py
    engine.mark_ready(static_cast<int32_t>(p), rank->grad(p), DType::kFloat32);
  }
  for (const int32_t missing : engine.missing()) engine.complete(missing, nullptr, DType::kFloat32);
  engine.finish({});
  engine.disarm();
}

namespace {

// Work that holds a stream up until it is destroyed.
class Hold {
 public:
  explicit Hold(cuda::StreamHandle stream) {
    const FakeTask task{.name = "hold",
                        .step = [](void* self) { return static_cast<Hold*>(self)->is_over_.load(); },
                        .drop = nullptr,
                        .self = this,
                        .ranges = nullptr,
                        .range_count = 0};
    fake_enqueue(stream, &task);
  }
  ~Hold() {
    is_over_ = true;
    fake_drain();
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;

 private:
  std::atomic<bool> is_over_ = false;  // the watcher looks too
};

// What the stand-ins have noticed: then what was counted is not what it has to be.
bool is_faulty() {
  bool found = false;
  for (size_t i = 0; i < fake_report_count(); ++i) {
    if (fake_report_kind(i) == FAKE_NOTE) continue;
    std::fprintf(stderr, "engine_cost: %s\n", fake_report_text(i));
    found = true;
  }
  return found;
}

int run(const Case& wanted) {
  Rank rank(wanted);
  for (int i = 0; i < kIterations; ++i) {
    {
      const Hold hold(rank.communication());
      counted_iteration(&rank);
    }
    // The communicator's watcher sees that all is complete, and gives the events back that the next iteration needs.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  return is_faulty();
}

Case case_of(const char* const* arguments) {
  const std::string_view kind = arguments[2];
  if (kind != "plain" && kind != "wire" && kind != "norm" && kind != "padded") {
    throw UsageError("kind is " + std::string(kind));
  }
  const Case wanted{.parameters = std::stoul(arguments[0]),
                    .buckets = std::stoul(arguments[1]),
                    .wire = kind == "wire" ? DType::kBFloat16 : DType::kFloat32,
                    .norm = kind == "norm",
                    .padded = kind == "padded"};
  if (wanted.buckets == 0 || wanted.parameters % wanted.buckets != 0) throw UsageError("parameters by buckets");
  return wanted;
}

}  // namespace
}  // namespace gpucomm

int main(int count, char** arguments) {
  if (count != 4) {
    std::fprintf(stderr, "engine_cost PARAMETERS BUCKETS plain|wire|norm|padded\n");
    return 2;
  }
  try {
    return gpucomm::run(gpucomm::case_of(arguments + 1));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "engine_cost: %s\n", error.what());
    return 1;
  }
}
