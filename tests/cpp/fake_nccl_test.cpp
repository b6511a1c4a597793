// The stand-in for NCCL with threads as ranks, through the table that the transport calls NCCL by.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cuda/cuda_api.h"
#include "fake_cuda/driver/control.h"
#include "fake_cuda/nccl/control.h"
#include "nccl/nccl_api.h"

namespace gpucomm::nccl {
namespace {

constexpr size_t kNumel = 1000;

std::vector<std::string> errors() {
  std::vector<std::string> texts;
  for (size_t i = 0; i < fake_report_count(); ++i)
    if (fake_report_kind(i) != FAKE_NOTE) texts.emplace_back(fake_report_text(i));
  return texts;
}

// One rank: a thread with a device of its own.
struct Rank {
  std::shared_ptr<const cuda::Api> driver;
  std::shared_ptr<const Api> api;
  int rank;
  Comm comm = nullptr;
  cuda::StreamHandle stream = nullptr;

  float* allocate(size_t numel) const {
    cuda::DeviceAddress address = 0;
    EXPECT_EQ(driver->mem_alloc(&address, numel * sizeof(float)), cuda::kSuccess);
    return reinterpret_cast<float*>(address);
  }
  void finish() const {
    while (driver->stream_query(stream) == cuda::kNotReady) std::this_thread::yield();
  }
};

class FakeNccl : public testing::Test {
 protected:
  void SetUp() override {
    fake_reset();
    fake_nccl_reset();
  }
  void TearDown() override {
    EXPECT_EQ(errors(), std::vector<std::string>());
    EXPECT_EQ(fake_nccl_live_communicators(), 0);
    fake_reset();
  }
};

void run_ranks(int size, const std::function<void(Rank&)>& body) {
  fake_set_device_count(size);
  const auto driver = cuda::load(FAKE_CUDA_LIBRARY);
  const auto api = load({FAKE_NCCL_LIBRARY, ""});
  ASSERT_EQ(driver->init(0), cuda::kSuccess);  // once more: a reset driver is not initialised
  UniqueId id;
  check(*api, api->get_unique_id(&id), "ncclGetUniqueId");
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      cuda::Context context = nullptr;
      driver->primary_ctx_retain(&context, rank);
      const cuda::Current current(*driver, context);
      Rank mine{driver, api, rank};
      driver->stream_create_with_priority(&mine.stream, cuda::kStreamNonBlocking, 0);
      Config config;
      check(*api, api->comm_init_rank_config(&mine.comm, size, id, rank, &config), "ncclCommInitRankConfig");
      body(mine);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(FakeNccl, ThreadsAreRanksOfOneCommunicator) {
  for (int size = 1; size <= 4; ++size) {
    run_ranks(size, [&](Rank& mine) {
      float* data = mine.allocate(kNumel);
      for (size_t i = 0; i < kNumel; ++i) data[i] = static_cast<float>(mine.rank + 1) * static_cast<float>(i);
      check(*mine.api, mine.api->all_reduce(data, data, kNumel, kFloat32, kSum, mine.comm, mine.stream),
            "ncclAllReduce");
      mine.finish();
      for (size_t i = 0; i < kNumel; ++i)
        ASSERT_EQ(data[i], static_cast<float>(size * (size + 1) / 2) * static_cast<float>(i));
      check(*mine.api, mine.api->comm_destroy(mine.comm), "ncclCommDestroy");
    });
    fake_reset();
  }
}

TEST_F(FakeNccl, AThreadThatFailsLeavesTheOthersWaitingUntilTheyAbort) {
  ASSERT_EQ(fake_nccl_script("async_error rank=1 launch=0 result=2; remote_error ms=20"), nullptr);
  run_ranks(3, [&](Rank& mine) {
    float* data = mine.allocate(kNumel);
    check(*mine.api, mine.api->all_reduce(data, data, kNumel, kFloat32, kSum, mine.comm, mine.stream), "ncclAllReduce");
    Result error = kSuccess;
    while (error == kSuccess) {
      EXPECT_EQ(mine.driver->stream_query(mine.stream), cuda::kNotReady);
      check(*mine.api, mine.api->comm_get_async_error(mine.comm, &error), "ncclCommGetAsyncError");
    }
    EXPECT_EQ(error, mine.rank == 1 ? kSystemError : kRemoteError);
    check(*mine.api, mine.api->comm_abort(mine.comm), "ncclCommAbort");
    mine.finish();
  });
}

}  // namespace
}  // namespace gpucomm::nccl
