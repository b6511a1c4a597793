// The stand-in for the CUDA driver under our own classes: an ordering call is found by who asked for it, and each that
// is dropped is noticed.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "cuda/codec_args.h"
#include "cuda/cuda_api.h"
#include "cuda/device.h"
#include "cuda/stream_cuda.h"
#include "fake_cuda/driver/control.h"

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

// A gradient of 100 floats in the middle of 1000, packed by two blocks.
class Pack {
 public:
  Pack()
      : api_(load(FAKE_CUDA_LIBRARY)),
        device_(std::make_shared<const GpuDevice>(api_, 0)),
        current_(*api_, device_->context()),
        gradient_(device_, 1000 * sizeof(float)),
        bucket_(device_, 1000 * sizeof(float)),
        pieces_(device_, sizeof kPieces),
        stream_(device_, nullptr) {
    api_->module_load_data(&module_, "image");
    api_->module_get_function(&pack_, module_, "pack_f32_f32");
    api_->memset_d8_async(gradient_.address(), 0x3f, 1000 * sizeof(float), stream_.handle());
    api_->memcpy_htod_async(pieces_.address(), kPieces, sizeof kPieces, stream_.handle());
  }
  ~Pack() { api_->module_unload(module_); }

  void launch() {
    codec::CodecArgs args{};
    args.bucket = bucket_.as<float>();
    args.pieces = pieces_.as<codec::Piece>();
    args.scale = 2.0;
    args.pointers[0] = gradient_.as<float>() + 100;
    void* arguments[] = {&args};
    EXPECT_EQ(api_->launch_kernel(pack_, 2, 1, 1, 256, 1, 1, 0, stream_.handle(), arguments, nullptr), kSuccess);
    args = {};  // they travel by value
  }
  // By a stream that is not ordered with that of the launch.
  void write_aside(DeviceAddress address, size_t bytes) {
    CudaStream other(device_, nullptr);
    api_->memset_d8_async(address, 0, bytes, other.handle());
    fake_drain();
  }
  float* gradient() { return gradient_.as<float>(); }
  float* bucket() { return bucket_.as<float>(); }

 private:
  static constexpr codec::Piece kPieces[2] = {{500, 0, 60, 0}, {560, 60, 40, 0}};
  std::shared_ptr<const Api> api_;
  std::shared_ptr<const GpuDevice> device_;
  Current current_;
  DeviceMemory gradient_, bucket_, pieces_;
  CudaStream stream_;
  Module module_ = nullptr;
  Function pack_ = nullptr;
};

TEST_F(FakeCuda, AKernelOfTheCodecRunsWithTheArgumentsOfItsLaunch) {
  Pack pack;
  pack.launch();
  fake_drain();
  float expected = 0;
  std::memset(&expected, 0x3f, sizeof expected);
  for (size_t i = 500; i < 600; ++i) ASSERT_EQ(pack.bucket()[i], 2 * expected) << i;
  EXPECT_NE(pack.bucket()[499], 2 * expected);
  EXPECT_NE(pack.bucket()[600], 2 * expected);
  EXPECT_EQ(errors(), std::vector<std::string>());
}

TEST_F(FakeCuda, WhatAKernelOfTheCodecTouchesIsMeasuredToTheByte) {
  Pack pack;
  pack.launch();
  auto address = [](const float* element) { return reinterpret_cast<DeviceAddress>(element); };
  pack.write_aside(address(pack.bucket()), 500 * sizeof(float));
  pack.write_aside(address(pack.bucket() + 600), 400 * sizeof(float));
  EXPECT_EQ(errors(), std::vector<std::string>());
  pack.write_aside(address(pack.bucket() + 599), sizeof(float));
  ASSERT_EQ(errors().size(), 1U);
  EXPECT_NE(errors()[0].find("[2396, 2400)"), std::string::npos) << errors()[0];
  pack.write_aside(address(pack.gradient() + 199), sizeof(float));
  EXPECT_EQ(errors().size(), 3U) << testing::PrintToString(errors());  // after the fill, and after pack's read
}

}  // namespace
}  // namespace gpucomm::cuda
