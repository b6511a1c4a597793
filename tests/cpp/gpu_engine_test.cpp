// The engine as it drives a GPU, over the stand-ins for the CUDA driver and NCCL: the same classes, one rank. A
// scenario is a small training program; what it returns are the races and wrong uses that the stand-ins noticed, and
// what was not as it has to be. Each ordering call that is dropped has to be noticed by one of them.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>
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

using cuda::DeviceMemory;
using Problems = std::vector<std::string>;

constexpr int32_t kParameters = 6;
constexpr size_t kNumel = 100;
constexpr size_t kSlot = 112;  // the next multiple of 16
constexpr size_t kPerBucket = 2;
constexpr double kLong = 60.0;

Caller caller_of(const cuda::CudaStream& stream) { return {stream.handle()}; }

// Work that waits until the test lets it go on.
struct Gate {
  bool open = false;
  void put_on(cuda::StreamHandle stream) {
    const FakeTask task{.name = "gate",
                        .step = [](void* self) { return static_cast<Gate*>(self)->open; },
                        .drop = nullptr,
                        .self = this,
                        .ranges = nullptr,
                        .range_count = 0};
    fake_enqueue(stream, &task);
  }
};

// One rank: what Python makes around an engine, and a program with parameters on a GPU.
std::set<std::string> program_sites;

struct Rank {
  explicit Rank(DType wire = DType::kFloat32, double timeout_s = kLong)
      : api(cuda::load(FAKE_CUDA_LIBRARY)),
        device(std::make_shared<const cuda::GpuDevice>(api, 0)),
        current(*api, device->context()),
        stream(std::make_shared<cuda::CudaStream>(device, nullptr)),
        main(device, nullptr),
        side(device, nullptr),
        codec(std::make_shared<cuda::CudaCodec>(
            std::make_shared<cuda::CudaKernels>(device, cuda::load_kernels(*device, {}, &origin)), stream)) {
    NcclOptions options;
    options.timeout_s = timeout_s;
    options.nccl = nccl::load({.path = FAKE_NCCL_LIBRARY, .wheel_path = ""});
    options.device = device;
    nccl::check(*options.nccl, options.nccl->get_unique_id(&options.id), "ncclGetUniqueId");
    transport = std::make_shared<NcclTransport>(options);
    engine = std::make_unique<Engine>(
        EngineParts{.transport = transport,
                    .stream = stream,
                    .bucket_codec = codec,
                    .control_transport = std::make_shared<LoopbackTransport>(LoopbackOptions{}),
                    .control_stream = std::make_shared<InlineStream>(),
                    .trace = std::make_shared<Trace>(1024),
                    .caller = [this] { return program; }},
        kParameters, true, 0);
    engine->on_release([this](std::span<const int32_t> parameters, std::span<const Caller> producers) {
      released.insert(released.end(), parameters.begin(), parameters.end());
      // As an allocator would, told by record_stream(): the memory is not used again before the pack is done with it.
      for (const Caller& producer : producers) order(producers[0], producer);
    });
    for (int32_t i = 0; i < kParameters; ++i) {
      grads.push_back(std::make_unique<DeviceMemory>(device, kNumel * sizeof(float)));
      params.push_back(std::make_unique<DeviceMemory>(device, kNumel * sizeof(float)));
      means.push_back(std::make_unique<DeviceMemory>(device, kNumel * sizeof(float)));
      sources.push_back(std::make_unique<DeviceMemory>(device, kNumel * sizeof(float)));
      std::vector<float> values(kNumel);
      std::iota(values.begin(), values.end(), static_cast<float>(1000 * i));
      upload(*sources.back(), values);
    }
    plan(wire);
  }

  void upload(const DeviceMemory& to, const std::vector<float>& values) {
    api->memcpy_htod_async(to.address(), values.data(), values.size() * sizeof(float), main.handle());
    fake_drain();
    order(caller_of(main), caller_of(side));
  }

  // Parameters in reverse, two in a bucket.
  void plan(DType wire) {
    std::vector<BucketSpec> buckets;
    for (size_t b = 0; b < kParameters / kPerBucket; ++b) {
      BucketSpec& bucket = buckets.emplace_back(
          BucketSpec{transport->allocate(kPerBucket * kSlot * size_of(wire)), wire, kPerBucket * kSlot, {}});
      for (size_t k = 0; k < kPerBucket; ++k) {
        bucket.slots.push_back({kParameters - 1 - static_cast<int32_t>(kPerBucket * b + k), k * kSlot, kNumel});
      }
    }
    engine->set_plan(std::move(buckets), 0);
    if (wire == DType::kFloat32) return;
    for (int32_t i = 0; i < kParameters; ++i) engine->unpack_to(i, means[i]->as<void>(), DType::kFloat32);
  }

  // The program's own order between its streams. Its sites are not the engine's.
  void order(Caller first, Caller then) const {
    if (first == then) return;
    const auto before = calls_by_site();
    make_order(first, then);
    const auto after = calls_by_site();
    for (const auto& [name, calls] : after) {
      const auto found = before.find(name);
      if (found == before.end() || found->second != calls) program_sites.insert(name);
    }
  }

  static std::map<std::string, uint64_t> calls_by_site() {
    std::map<std::string, uint64_t> calls;
    for (size_t site = 0; site < fake_site_count(); ++site) calls[fake_site_name(site)] = fake_site_calls(site);
    return calls;
  }

  void make_order(Caller first, Caller then) const {
    cuda::EventHandle event = nullptr;
    api->event_create(&event, cuda::kEventDisableTiming);
    api->event_record(event, static_cast<cuda::StreamHandle>(first.stream));
    api->stream_wait_event(static_cast<cuda::StreamHandle>(then.stream), event, 0);
    api->event_destroy(event);
  }

  // A gradient is computed on the program's stream of the moment, from the parameter, and handed over.
  void backward(int32_t parameter) {
    const auto on = static_cast<cuda::StreamHandle>(program.stream);
    const size_t bytes = kNumel * sizeof(float);
    api->memcpy_dtod_async(grads[parameter]->address(), params[parameter]->address(), bytes, on);
    api->memcpy_dtod_async(grads[parameter]->address(), sources[parameter]->address(), bytes, on);
    engine->mark_ready(parameter, grads[parameter]->as<void>(), DType::kFloat32);
  }

  // An iteration on the one stream or the other, with gradients of their own, whose means nobody reads.
  void iterate_apart(int iteration, unsigned char byte) {
    make_apart(iteration, byte);
    finish();
  }

  void make_apart(int iteration, unsigned char byte) {
    const cuda::CudaStream& on = iteration % 2 ? side : main;
    const auto& mine = iteration % 2 ? sources : grads;
    program = caller_of(on);
    engine->arm();
    for (int32_t p = kParameters - 1; p >= 0; --p) {
      api->memset_d8_async(mine[p]->address(), byte, kNumel * sizeof(float), on.handle());
      engine->mark_ready(p, mine[p]->as<void>(), DType::kFloat32);
    }
  }

  void finish() {
    for (const int32_t parameter : engine->missing()) engine->complete(parameter, nullptr, DType::kFloat32);
    engine->finish({});
    engine->disarm();
  }

  // The optimizer: every parameter becomes its mean.
  void step() {
    for (int32_t i = 0; i < kParameters; ++i) {
      api->memcpy_dtod_async(params[i]->address(), reinterpret_cast<cuda::DeviceAddress>(engine->slot(i).grad),
                             kNumel * sizeof(float), static_cast<cuda::StreamHandle>(program.stream));
    }
  }

  std::vector<float> param(int32_t parameter) {
    std::vector<float> values(kNumel);
    api->memcpy_dtoh_async(values.data(), params[parameter]->address(), kNumel * sizeof(float),
                           static_cast<cuda::StreamHandle>(program.stream));
    fake_drain();
    return values;
  }

  std::shared_ptr<const cuda::Api> api;
  std::shared_ptr<const cuda::GpuDevice> device;
  cuda::Current current;
  std::string origin;
  std::shared_ptr<cuda::CudaStream> stream;
  cuda::CudaStream main, side;  // of the program
  std::shared_ptr<cuda::CudaCodec> codec;
  std::shared_ptr<NcclTransport> transport;
  std::unique_ptr<Engine> engine;
  std::vector<std::unique_ptr<DeviceMemory>> grads, params, means, sources;
  std::vector<int32_t> released;
  Caller program{};
};

Problems reports() {
  Problems found;
  for (size_t i = 0; i < fake_report_count(); ++i) {
    if (fake_report_kind(i) != FAKE_NOTE) found.emplace_back(fake_report_text(i));
  }
  return found;
}

void expect(bool holds, const std::string& what, Problems* problems) {
  if (!holds) problems->push_back(what);
}

void expect_means(Rank& rank, Problems* problems) {
  for (int32_t i = 0; i < kParameters; ++i) {
    const std::vector<float> values = rank.param(i);
    for (size_t k = 0; k < kNumel; ++k) {
      const float wanted = static_cast<float>(1000 * i) + static_cast<float>(k);
      expect(values[k] == wanted, "parameter " + std::to_string(i) + " is wrong", problems);
      if (values[k] != wanted) break;
    }
  }
}

// ---- scenarios

// Three iterations on one stream.
void plain(Problems* problems) {
  Rank rank;
  rank.program = caller_of(rank.main);
  for (int iteration = 0; iteration < 3; ++iteration) {
    rank.engine->arm();
    for (int32_t p = kParameters - 1; p >= 0; --p) rank.backward(p);
    rank.finish();
    rank.step();
  }
  expect_means(rank, problems);
  expect(rank.released.size() == 3 * kParameters, "gradients released", problems);
}

// Gradients of one bucket are made on two streams, the last of a bucket on either.
void two_producers(Problems* problems) {
  Rank rank;
  for (int iteration = 0; iteration < 3; ++iteration) {
    rank.program = caller_of(rank.main);
    rank.engine->arm();
    rank.order(caller_of(rank.main), caller_of(rank.side));  // forward
    for (int32_t p = kParameters - 1; p >= 0; --p) {
      rank.program = caller_of((p + iteration) % 2 ? rank.main : rank.side);
      rank.backward(p);
    }
    rank.order(caller_of(rank.side), caller_of(rank.main));  // the end of backward, by autograd
    rank.program = caller_of(rank.main);
    rank.finish();
    rank.step();
  }
  expect_means(rank, problems);
}

// Iterations whose means nobody reads, each on another stream than the one before: nothing of the program orders them.
void streams_apart(Problems* problems) {
  Rank rank;
  for (int iteration = 0; iteration < 4; ++iteration) rank.iterate_apart(iteration, 0);
  fake_drain();
  expect(rank.engine->iteration() == 4, "iterations", problems);
}

// A gradient's bucket is packed on a stream that the program did not order after the last means, and looked at for NaN.
void another_stream_packs(Problems* problems) {
  Rank rank;
  rank.engine->set_check_finite(true);
  for (int iteration = 0; iteration < 4; ++iteration) rank.iterate_apart(iteration, 0xff);
  rank.make_apart(4, 0);
  expect(rank.engine->nonfinite_parameter() == -1, "what earlier iterations found is not forgotten", problems);
  rank.finish();
  fake_drain();
}

// Gradients travel in another dtype and are unpacked beside their slots.
void narrow_wire(Problems* problems) {
  Rank rank(DType::kBFloat16);
  rank.program = caller_of(rank.main);
  for (int iteration = 0; iteration < 3; ++iteration) {
    rank.engine->arm();
    for (int32_t p = kParameters - 1; p >= 0; --p) rank.backward(p);
    rank.finish();
    rank.step();
  }
  const std::vector<float> values = rank.param(0);
  for (size_t k = 0; k < kNumel; ++k) expect(values[k] == static_cast<float>(k), "rounded integers", problems);
}

// Memory for unpacked gradients comes from one stream of the program, and gradients from another one.
void new_memory(Problems* problems) {
  Rank rank(DType::kBFloat16);
  for (int iteration = 0; iteration < 3; ++iteration) {
    rank.program = caller_of(rank.side);
    for (int32_t p = 0; p < kParameters; ++p) {
      rank.api->memset_d8_async(rank.means[p]->address(), 0, kNumel * sizeof(float), rank.side.handle());
      rank.engine->unpack_to(p, rank.means[p]->as<void>(), DType::kFloat32);
    }
    rank.engine->arm();
    rank.program = caller_of(rank.main);
    for (int32_t p = kParameters - 1; p >= 0; --p) rank.backward(p);
    rank.finish();
    rank.step();
    rank.order(caller_of(rank.main), caller_of(rank.side));  // the optimizer, before memory is used again
  }
  expect(rank.param(0)[1] == 1.0f, "a mean", problems);
}

// Buckets get other memory while the device still works on what they had, which goes with its last owner.
void replaced_memory(Problems* problems) {
  Rank rank;
  rank.program = caller_of(rank.main);
  for (int iteration = 0; iteration < 3; ++iteration) {
    rank.engine->arm();
    for (int32_t p = kParameters - 1; p >= 0; --p) rank.backward(p);
    rank.finish();
    rank.step();
    for (size_t b = 0; b < kParameters / kPerBucket; ++b) {
      rank.engine->replace_memory(b, rank.transport->allocate(kPerBucket * kSlot * sizeof(float)));
    }
  }
  expect_means(rank, problems);
}

// The norm of the means is summed up beside backward, and read on the stream that takes the means; the next iteration
// is another stream's.
void norm(Problems* problems) {
  Rank rank;
  rank.engine->set_measure_norm(true);
  for (int iteration = 0; iteration < 4; ++iteration) {
    rank.make_apart(iteration, 0x40);
    rank.finish();
    rank.api->memcpy_dtod_async(rank.means[iteration]->address(), rank.codec->squared_norm()->address(), sizeof(float),
                                static_cast<cuda::StreamHandle>(rank.program.stream));
    rank.stream->follow(rank.program);  // as whoever reads it does, before the next sum begins
  }
  fake_drain();
  float element = 0;
  std::memset(&element, 0x40, sizeof element);
  for (int iteration = 0; iteration < 4; ++iteration) {
    const float sum = *rank.means[iteration]->as<float>();  // the stand-in's memory is the host's
    const float expected = static_cast<float>(kParameters * kNumel) * element * element;
    expect(std::abs(sum - expected) < 1e-4f * expected, "the norm is " + std::to_string(sum), problems);
  }
}

// A NaN is found in the slot in which it travels, and the host waits for what was packed until then.
void finite_check(Problems* problems) {
  Rank rank;
  rank.program = caller_of(rank.main);
  rank.engine->set_check_finite(true);
  for (int iteration = 0; iteration < 3; ++iteration) {
    std::vector<float> values(kNumel, 1.0f);
    if (iteration == 1) values[7] = std::numeric_limits<float>::quiet_NaN();
    rank.upload(*rank.sources[3], values);
    rank.engine->arm();
    for (int32_t p = kParameters - 1; p >= 0; --p) rank.backward(p);
    expect(rank.engine->nonfinite_parameter() == (iteration == 1 ? 3 : -1), "the parameter that is not finite",
           problems);
    rank.finish();
    rank.step();
  }
  fake_drain();
}

// Unused parameters travel as zeros; a gradient that is added to before its bucket is full travels once.
void unused_and_again(Problems* problems) {
  Rank rank;
  rank.program = caller_of(rank.main);
  for (int iteration = 0; iteration < 2; ++iteration) {
    rank.engine->arm();
    rank.backward(5);
    rank.backward(5);
    for (const int32_t p : {4, 3, 1, 0}) rank.backward(p);
    expect(rank.engine->missing() == std::vector<int32_t>{2}, "missing", problems);
    rank.finish();
    rank.step();
  }
  const std::vector<float> unused = rank.param(2), again = rank.param(5);
  expect(unused[1] == 0.0f, "zeros for an unused parameter", problems);
  expect(again[1] == 5001.0f, "a gradient that came twice", problems);
}

// Nothing counts as reduced before it is, and the host comes to the end of backward all the same.
void host_does_not_wait(Problems* problems) {
  Gate gate;
  Rank rank;
  rank.program = caller_of(rank.main);
  gate.put_on(rank.stream->handle());
  rank.engine->arm();
  for (int32_t p = kParameters - 1; p >= 0; --p) rank.backward(p);
  rank.finish();
  rank.step();
  expect(rank.engine->reduced() == 0, "a bucket counts as reduced behind a closed gate", problems);
  expect(rank.engine->launched() == kParameters / kPerBucket, "buckets launched", problems);
  gate.open = true;
  expect_means(rank, problems);
  rank.engine->arm();  // looks at what the last iteration left
  rank.engine->disarm();
  int reduces = 0;
  for (const TraceEvent& event : rank.engine->trace().snapshot()) reduces += event.kind == TraceKind::kReduce;
  expect(reduces == kParameters / kPerBucket, "reductions in the trace", problems);
}

// A collective that does not end within the timeout ends the communicator, from the watcher's thread.
void timeout(Problems* problems) {
  Gate gate;
  Rank rank(DType::kFloat32, 0.2);
  rank.program = caller_of(rank.main);
  gate.put_on(rank.stream->handle());
  rank.engine->arm();
  for (int32_t p = kParameters - 1; p >= 0; --p) rank.backward(p);
  rank.finish();
  std::string text;
  for (int i = 0; i < 400 && text.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    try {
      rank.transport->check_failure();
    } catch (const CommTimeout& error) {
      text = error.what();
    }
  }
  expect(text.find("all_reduce of bucket 0, 224 float32") != std::string::npos, "no timeout: " + text, problems);
  gate.open = true;
  fake_drain();
}

// Graphs are captured of two iterations, between others on another stream: the first of what comes on one stream, the
// second of two, where the bucket that is launched first is packed last and on the stream that was forked.
void captured(Problems* problems) {
  Rank rank;
  const std::vector<int32_t> in_order{5, 4, 3, 2, 1, 0}, first_last{3, 2, 1, 0, 5, 4};
  const auto iterate = [&](const cuda::CudaStream& on, const std::vector<int32_t>& parameters, bool forks) {
    rank.program = caller_of(on);
    rank.engine->arm();
    if (forks) rank.order(caller_of(on), caller_of(rank.side));
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (forks && i == parameters.size() - kPerBucket) rank.program = caller_of(rank.side);
      rank.backward(parameters[i]);
    }
    rank.program = caller_of(on);
    if (forks) rank.order(caller_of(rank.side), caller_of(on));  // the end of backward, by autograd
    rank.finish();
    rank.step();
  };
  iterate(rank.side, in_order, false);
  fake_synchronize(rank.side.handle());  // whoever captures has waited for the device
  for (const bool forks : {false, true}) {
    fake_begin_capture(rank.main.handle(), 0);
    iterate(rank.main, forks ? first_last : in_order, forks);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));  // in which the watcher looks
    expect(fake_end_capture(rank.main.handle()), "the capture is broken", problems);
    fake_synchronize(rank.main.handle());
  }
  iterate(rank.side, in_order, false);
  expect_means(rank, problems);
}

const std::vector<std::pair<std::string, std::function<void(Problems*)>>> scenarios = {
    {"plain", plain},
    {"two_producers", two_producers},
    {"streams_apart", streams_apart},
    {"another_stream_packs", another_stream_packs},
    {"narrow_wire", narrow_wire},
    {"new_memory", new_memory},
    {"replaced_memory", replaced_memory},
    {"norm", norm},
    {"finite_check", finite_check},
    {"unused_and_again", unused_and_again},
    {"host_does_not_wait", host_does_not_wait},
    {"captured", captured},
    {"timeout", timeout},
};

Problems run(const std::function<void(Problems*)>& scenario) {
  Problems problems;
  try {
    scenario(&problems);
  } catch (const std::exception& error) {
    problems.push_back(std::string("threw: ") + error.what());
  }
  for (const std::string& text : reports()) problems.push_back(text);
  return problems;
}

class GpuEngine : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override { fake_reset(); }
  void TearDown() override { fake_reset(); }
};

TEST_P(GpuEngine, IsOrderedUnderEverySeed) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    fake_reset();
    fake_set_order(FAKE_RANDOM, seed);
    EXPECT_EQ(run(scenarios[GetParam()].second), Problems()) << scenarios[GetParam()].first << ", seed " << seed;
    if (HasFailure()) return;
  }
  for (const int order : {FAKE_EARLIEST, FAKE_LATEST}) {
    fake_reset();
    fake_set_order(order, 0);
    EXPECT_EQ(run(scenarios[GetParam()].second), Problems()) << scenarios[GetParam()].first << ", order " << order;
  }
}

INSTANTIATE_TEST_SUITE_P(, GpuEngine, testing::Range(size_t{0}, scenarios.size()),
                         [](const auto& scenario) { return scenarios[scenario.param].first; });

// In a child, because what lacks an order may do anything: read memory that is gone, say. A wrong value, unlike a race,
// may take more than one seed to show.
bool is_noticed_by(const std::function<void(Problems*)>& scenario, size_t site) {
  const pid_t child = fork();
  if (child == 0) {
    dup2(open("/dev/null", O_WRONLY), STDERR_FILENO);  // how it crashes is nobody's concern
    for (unsigned seed = 0; seed < 8; ++seed) {
      fake_reset();
      fake_set_order(FAKE_RANDOM, seed);
      fake_set_site_depth(2);
      fake_set_deadline(1.0);
      fake_mutate(static_cast<int>(site));
      if (!run(scenario).empty()) _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  return waitpid(child, &status, 0) != child || status != 0;
}

// Told apart by the driver's function, its caller, and the caller of that.
TEST(GpuEngineMutations, EachOrderingCallThatIsDroppedIsNoticedBySomeScenario) {
  std::set<std::string> names, noticed;
  for (const auto& [name, scenario] : scenarios) {
    fake_reset();
    fake_set_site_depth(2);
    run(scenario);
    std::vector<std::string> here;
    for (size_t site = 0; site < fake_site_count(); ++site) here.emplace_back(fake_site_name(site));
    for (size_t site = 0; site < here.size(); ++site) {
      names.insert(here[site]);
      if (noticed.count(here[site]) || program_sites.count(here[site])) continue;
      if (is_noticed_by(scenario, site)) noticed.insert(here[site]);
    }
  }
  fake_reset();
  for (const std::string& name : program_sites) names.erase(name);
  for (const std::string& name : names) EXPECT_TRUE(noticed.count(name)) << "not noticed: " << name;
  EXPECT_GE(names.size(), 10U);  // what the compiler inlines is one with its caller
  RecordProperty("sites", static_cast<int>(names.size()));
}

}  // namespace
}  // namespace gpucomm
