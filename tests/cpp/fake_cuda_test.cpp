// The stand-in for the CUDA driver under our own classes: an ordering call is found by who asked for it, and each that
// is dropped is noticed.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "control.h"
#include "cuda/cuda_api.h"
#include "cuda/device.h"
#include "cuda/stream_cuda.h"

namespace gpucomm::cuda {
namespace {

constexpr size_t kBytes = 4096;

Caller caller(StreamHandle stream) { return {stream}; }

std::vector<std::string> errors() {
  std::vector<std::string> texts;
  for (size_t i = 0; i < fake_report_count(); ++i) {
    if (fake_report_kind(i) != FAKE_NOTE) texts.emplace_back(fake_report_text(i));
  }
  return texts;
}

// Two rounds of: produced on one stream, packed on ours, consumed on another.
void run_rounds() {
  auto api = load(FAKE_CUDA_LIBRARY);
  auto device = std::make_shared<const GpuDevice>(api, 0);
  {
    const Current current(*api, device->context());
    DeviceMemory gradient(device, kBytes), bucket(device, kBytes), param(device, kBytes);
    CudaStream communication(device, nullptr), producer(device, nullptr), consumer(device, nullptr);
    for (unsigned char round = 0; round < 2; ++round) {
      api->memset_d8_async(gradient.address(), round, kBytes, producer.handle());
      communication.follow(caller(producer.handle()));
      api->memcpy_dtod_async(bucket.address(), gradient.address(), kBytes, communication.handle());
      const Event packed = communication.record();
      communication.lead(caller(producer.handle()), packed);  // before the gradient is written again
      communication.lead(caller(consumer.handle()), packed);
      api->memcpy_dtod_async(param.address(), bucket.address(), kBytes, consumer.handle());
      communication.order(caller(consumer.handle()), caller(communication.handle()));
    }
    fake_drain();
  }
}

class FakeCuda : public testing::Test {
 protected:
  void SetUp() override { fake_reset(); }
  void TearDown() override { fake_reset(); }
};

TEST_F(FakeCuda, AProgramThatIsOrderedReportsNothingUnderAnySeedAndLeavesNothing) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    fake_reset();
    fake_set_order(FAKE_RANDOM, seed);
    run_rounds();
    fake_check_leaks();
    EXPECT_EQ(errors(), std::vector<std::string>()) << "seed " << seed;
  }
}

TEST_F(FakeCuda, OrderingCallsAreToldApartByTheCallersOfOurOwnClasses) {
  run_rounds();
  std::vector<std::string> names;
  for (size_t site = 0; site < fake_site_count(); ++site) {
    names.emplace_back(fake_site_name(site));
    EXPECT_EQ(fake_site_calls(site), 2U) << names.back();
  }
  // follow and order: a record and a wait each; record; lead, from two lines.
  EXPECT_EQ(names.size(), 7U) << testing::PrintToString(names);
}

TEST_F(FakeCuda, EachOrderingCallThatIsDroppedIsReported) {
  run_rounds();
  const size_t sites = fake_site_count();
  for (size_t site = 0; site < sites; ++site) {
    fake_reset();
    fake_mutate(static_cast<int>(site));
    run_rounds();
    EXPECT_NE(errors(), std::vector<std::string>()) << site;
  }
}

TEST_F(FakeCuda, AScriptedFailureIsAnErrorThatNamesTheCall) {
  auto api = load(FAKE_CUDA_LIBRARY);
  auto device = std::make_shared<const GpuDevice>(api, 0);
  fake_fail_call("cuMemAlloc_v2", 1, 2);
  try {
    DeviceMemory memory(device, kBytes);
    FAIL() << "allocated";
  } catch (const CudaError& error) {
    EXPECT_EQ(error.result, kOutOfMemory);
  }
}

}  // namespace
}  // namespace gpucomm::cuda
