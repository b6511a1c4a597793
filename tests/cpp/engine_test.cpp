// What the engine says of the gradients that it packed, over one rank.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/transport_loopback.h"

namespace gpucomm {
namespace {

constexpr size_t kNumel = 40;
constexpr int32_t kParameters = 4;

// Loopback's ranks, one bucket with all parameters in descending order, pieces of three elements of fp32.
struct OneBucket {
  explicit OneBucket(DType dtype = DType::kFloat32, int size = 1)
      : transport(std::make_shared<LoopbackTransport>(LoopbackOptions{.size = size})),
        engine({.transport = transport,
                .stream = std::make_shared<InlineStream>(),
                .codec = std::make_shared<CpuCodec>(),
                .trace = std::make_shared<Trace>(64)},
               kParameters, true, 12) {
    BucketSpec bucket{.memory = transport->allocate(kParameters * kNumel * size_of(dtype)),
                      .dtype = dtype,
                      .numel = kParameters * kNumel,
                      .slots = {}};
    for (int32_t i = 0; i < kParameters; ++i) {
      bucket.slots.push_back({kParameters - 1 - i, static_cast<size_t>(i) * kNumel, kNumel});
    }
    std::vector<BucketSpec> buckets;
    buckets.push_back(std::move(bucket));
    engine.set_plan(std::move(buckets), 0);
    engine.set_check_finite(true);
  }

  void pack(int32_t parameter, std::vector<float> grad) { engine.mark_ready(parameter, grad.data(), DType::kFloat32); }

  void finish() {
    for (const int32_t parameter : engine.missing()) engine.complete(parameter, nullptr, DType::kFloat32);
    engine.finish({});
    engine.disarm();
  }

  std::shared_ptr<Transport> transport;
  Engine engine;
};

std::vector<float> with(float value, size_t at) {
  std::vector<float> grad(kNumel, 3.0e38f);
  grad[at] = value;
  return grad;
}

TEST(EngineFiniteTest, TheLowestParameterWithANonfiniteElementIsRemembered) {
  OneBucket bucket;
  bucket.engine.arm();
  bucket.pack(0, with(1.0f, 0));
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), -1);
  bucket.pack(3, with(NAN, 0));
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), 3);
  bucket.pack(1, with(-INFINITY, kNumel - 1));
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), 1);
  bucket.pack(2, with(INFINITY, 7));
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), 1);
  bucket.finish();
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), 1);
}

TEST(EngineFiniteTest, AnElementInAnyPieceIsFound) {
  for (size_t at = 0; at < kNumel; ++at) {
    OneBucket bucket;
    bucket.engine.arm();
    bucket.pack(3, with(NAN, at));  // the first slot of the bucket: packed in pieces
    EXPECT_EQ(bucket.engine.nonfinite_parameter(), 3) << at;
    bucket.finish();
  }
}

TEST(EngineFiniteTest, ArmForgetsTheIterationBefore) {
  OneBucket bucket;
  bucket.engine.arm();
  bucket.pack(2, with(NAN, 1));
  bucket.finish();
  bucket.engine.arm();
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), -1);
  bucket.finish();
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), -1);
}

TEST(EngineFiniteTest, WhatIsCompletedOrWrittenByTheCallerIsLookedAtToo) {
  OneBucket bucket;
  bucket.engine.arm();
  const std::vector<float> grad = with(NAN, 5);
  bucket.engine.complete(2, grad.data(), DType::kFloat32);
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), 2);
  reinterpret_cast<float*>(bucket.engine.slot(1).address)[39] = INFINITY;
  bucket.engine.mark_packed(1);
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), 1);
  bucket.finish();
}

TEST(EngineFiniteTest, WhatOverflowsOnTheWayToANarrowerSlotIsNotFinite) {
  OneBucket bucket(DType::kFloat16);
  bucket.engine.arm();
  bucket.pack(1, std::vector<float>(kNumel, 65504.0f));
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), -1);
  bucket.pack(2, std::vector<float>(kNumel, 65536.0f));
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), 2);
  bucket.finish();
}

TEST(EngineFiniteTest, NobodyLooksUnlessAsked) {
  OneBucket bucket;
  bucket.engine.set_check_finite(false);
  bucket.engine.arm();
  bucket.pack(0, with(NAN, 0));
  EXPECT_EQ(bucket.engine.nonfinite_parameter(), -1);
  bucket.finish();
}

}  // namespace
}  // namespace gpucomm
