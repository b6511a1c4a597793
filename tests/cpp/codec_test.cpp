#include "kernels/codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "core/error.h"

namespace gpucomm {
namespace {

std::vector<float> distinct_values(size_t numel) {
  std::vector<float> values(numel);
  for (size_t i = 0; i < numel; ++i) values[i] = static_cast<float>(i % 127) - 63.0f;  // exact in every type
  return values;
}

TEST(CodecTest, PackThenUnpackGivesTheGradientBackForEverySlotType) {
  CpuCodec codec;
  for (const DType slot_dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const size_t numel : {0, 1, 7, 1000}) {
      const std::vector<float> grad = distinct_values(numel);
      std::vector<double> slot(numel + 1);  // room for the widest type
      codec.pack(slot.data(), slot_dtype, grad.data(), DType::kFloat32, numel, 0.5);
      std::vector<float> back(numel);
      codec.unpack(back.data(), DType::kFloat32, slot.data(), slot_dtype, numel, 2.0);
      EXPECT_EQ(back, grad) << name_of(slot_dtype) << " numel " << numel;
    }
  }
}

TEST(CodecTest, PackScalesWithOneRounding) {
  CpuCodec codec;
  const float grad[] = {1.0f, -3.0f, 1e-3f};
  float slot[3];
  codec.pack(slot, DType::kFloat32, grad, DType::kFloat32, 3, 1.0 / 3.0);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(slot[i], grad[i] * static_cast<float>(1.0 / 3.0));
}

TEST(CodecTest, AGradientThatIsItsOwnSlotStaysAsItIs) {
  CpuCodec codec;
  std::vector<float> grad = distinct_values(1000);
  codec.pack(grad.data(), DType::kFloat32, grad.data(), DType::kFloat32, grad.size(), 1.0);
  codec.unpack(grad.data(), DType::kFloat32, grad.data(), DType::kFloat32, grad.size(), 1.0);
  EXPECT_EQ(grad, distinct_values(1000));
}

TEST(CodecTest, IntegersOfOneTypeAreCopied) {
  CpuCodec codec;
  const std::vector<int64_t> grad = {INT64_MIN, -1, 0, INT64_MAX};
  std::vector<int64_t> slot(4);
  codec.pack(slot.data(), DType::kInt64, grad.data(), DType::kInt64, 4, 1.0);
  EXPECT_EQ(slot, grad);
}

TEST(CodecTest, AConversionThatCannotBeServedNamesBothTypes) {
  CpuCodec codec;
  int32_t slot[1] = {7};
  const float grad[1] = {1.0f};
  try {
    codec.pack(slot, DType::kInt32, grad, DType::kFloat32, 1, 1.0);
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("float32 to int32"), std::string::npos) << error.what();
  }
  EXPECT_THROW(codec.unpack(slot, DType::kInt32, slot, DType::kInt32, 1, 0.5), UsageError);
  EXPECT_EQ(slot[0], 7);
}

TEST(CodecTest, ZeroClearsBytesAndNoMore) {
  CpuCodec codec;
  std::vector<unsigned char> slot(101, 0xff);
  codec.zero(slot.data(), 100);
  for (size_t i = 0; i < 100; ++i) ASSERT_EQ(slot[i], 0);
  EXPECT_EQ(slot[100], 0xff);
  codec.zero(nullptr, 0);
}

TEST(CodecTest, FirstNonfiniteLooksAtFloatingSlotsAlone) {
  CpuCodec codec;
  const float slot[] = {1.0f, -3.4e38f, INFINITY, NAN};
  EXPECT_EQ(codec.first_nonfinite(slot, DType::kFloat32, 4), 2);
  EXPECT_EQ(codec.first_nonfinite(slot, DType::kFloat32, 2), -1);
  EXPECT_EQ(codec.first_nonfinite(slot, DType::kInt32, 4), -1);
  EXPECT_EQ(codec.first_nonfinite(nullptr, DType::kFloat32, 0), -1);
}

}  // namespace
}  // namespace gpucomm
