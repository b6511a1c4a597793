// Loading the CUDA driver, NCCL and NVRTC: what is said of libraries that will not do. The first that does decides for
// the process, so every load happens in a process of its own.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <functional>

#include "core/dynamic_library.h"
#include "cuda/cuda_api.h"
#include "cuda/nvrtc_api.h"
#include "nccl/nccl_api.h"

namespace gpucomm {
namespace {

std::string library(const std::string& name) { return std::string(GPUCOMM_TEST_LIBRARIES) + "/lib" + name + ".so"; }

// Runs the body in a child; it exits with 0, or else tells the exception by type and text.
[[noreturn]] void run(const std::function<void()>& body) {
  try {
    body();
  } catch (const UsageError& error) {
    std::fprintf(stderr, "UsageError: %s", error.what());
    _exit(1);
  } catch (const TransportUnavailable& error) {
    std::fprintf(stderr, "TransportUnavailable: %s", error.what());
    _exit(1);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "another exception: %s", error.what());
    _exit(1);
  }
  _exit(0);
}

void expect(bool condition, const char* text) {
  if (!condition) throw std::runtime_error(text);
}

#define EXPECT_WORKS(body) EXPECT_EXIT(run([&] body), testing::ExitedWithCode(0), "")
#define EXPECT_SAYS(body, text) EXPECT_EXIT(run([&] body), testing::ExitedWithCode(1), text)

TEST(DynamicLibrary, WhatCannotBeOpenedSaysWhy) {
  std::string error;
  EXPECT_FALSE(DynamicLibrary::open("/nowhere/libx.so", &error));
  EXPECT_NE(error.find("/nowhere/libx.so"), std::string::npos) << error;
}

TEST(DynamicLibrary, OnlyWhatIsLoadedIsFoundLoaded) {
  std::string error;
  EXPECT_FALSE(DynamicLibrary::loaded(library("nccl_22703")));
  {
    const DynamicLibrary opened = DynamicLibrary::open(library("nccl_22703"), &error);
    ASSERT_TRUE(opened) << error;
    EXPECT_TRUE(DynamicLibrary::loaded(library("nccl_22703")).is(opened));
    EXPECT_EQ(opened.path(), real_path(library("nccl_22703")));
  }
  EXPECT_FALSE(DynamicLibrary::loaded(library("nccl_22703"))) << "closed with the last reference";
}

TEST(DynamicLibrary, WhatIsKeptStaysLoaded) {
  EXPECT_WORKS({
    std::string error;
    DynamicLibrary::open(library("nccl_22703"), &error).keep();
    expect(bool(DynamicLibrary::loaded(library("nccl_22703"))), "it was unloaded");
  });
}

TEST(DynamicLibrary, TheDefiningLibraryIsFoundUnderAnyName) {
  std::string error;
  EXPECT_TRUE(libraries_defining("ncclGetVersion").empty());
  const DynamicLibrary one = DynamicLibrary::open(library("nccl_22703"), &error);
  const DynamicLibrary other = DynamicLibrary::open(library("nccl_22807"), &error);
  const std::vector<DynamicLibrary> found = libraries_defining("ncclGetVersion");
  ASSERT_EQ(found.size(), 2u);
  EXPECT_TRUE(found[0].is(one));
  EXPECT_TRUE(found[1].is(other));
}

// ---- the driver

TEST(CudaLibrary, IsLoadedOnceAndShared) {
  EXPECT_WORKS({
    const auto api = cuda::load(library("driver"));
    expect(api->driver_version == 12040 && api->path == real_path(library("driver")), "version or path");
    expect(api->launch_kernel != nullptr && api->init != nullptr, "functions");
    expect(cuda::load() == api && cuda::load(library("driver")) == api, "the same table");
  });
}

TEST(CudaLibrary, ThatIsNotThereSaysWhatToCheck) {
  EXPECT_SAYS({ cuda::load("/nowhere/libcuda.so.1"); }, "TransportUnavailable: .*/nowhere/libcuda.so.1.*explicit path");
}

TEST(CudaLibrary, ThatIsNoDriverIsRefused) {
  EXPECT_SAYS({ cuda::load(library("nccl_22703")); }, "TransportUnavailable: .*nccl_22703.* is not a CUDA driver");
}

TEST(CudaLibrary, WithoutAFunctionIsTooOldAndTheFunctionIsNamed) {
  EXPECT_SAYS(
      { cuda::load(library("driver_incomplete")); },
      "TransportUnavailable: .*too old: it serves CUDA 11.3, 12.0 or newer is needed; it has no "
      "cuEventRecordWithFlags");
}

TEST(CudaLibrary, OfAnOlderCudaIsTooOldThoughComplete) {
  EXPECT_SAYS({ cuda::load(library("driver_old")); }, "too old: it serves CUDA 11.8, 12.0 or newer is needed$");
}

TEST(CudaLibrary, ThatFindsNoDeviceSaysWhatToCheck) {
  EXPECT_SAYS(
      { cuda::load(library("driver_deviceless")); }, "TransportUnavailable: .*no device; .*CUDA_VISIBLE_DEVICES");
  EXPECT_SAYS({ cuda::load(library("driver_init_100")); }, "TransportUnavailable: .*cuInit.*100.*CUDA_VISIBLE_DEVICES");
}

TEST(CudaLibrary, ThatIsTheToolkitsStubIsSaidToBe) {
  EXPECT_SAYS({ cuda::load(library("driver_init_34")); }, "TransportUnavailable: .*stub");
}

TEST(CudaLibrary, ThatFailedLeavesTheChoiceOpen) {
  EXPECT_WORKS({
    try {
      cuda::load(library("driver_deviceless"));
    } catch (const TransportUnavailable&) {
    }
    cuda::load(library("driver"));
  });
}

TEST(CudaLibrary, OfAnotherFileLaterIsAUsageError) {
  EXPECT_SAYS(
      {
        cuda::load(library("driver"));
        cuda::load(library("driver_old"));
      },
      "UsageError: .*/libdriver.so.*/libdriver_old.so");
}

TEST(CudaError, NamesCallAndResult) {
  cuda::Api api;
  api.get_error_name = [](cuda::Result, const char** text) { return *text = "CUDA_ERROR_OUT_OF_MEMORY", 0; };
  api.get_error_string = [](cuda::Result, const char** text) { return *text = "out of memory", 0; };
  EXPECT_NO_THROW(cuda::check(api, cuda::kSuccess, "cuMemAlloc"));
  try {
    cuda::check(api, cuda::kOutOfMemory, "cuMemAlloc");
    FAIL() << "nothing was thrown";
  } catch (const cuda::CudaError& error) {
    EXPECT_EQ(error.result, cuda::kOutOfMemory);
    EXPECT_STREQ(error.what(), "cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory");
  }
}

std::vector<std::string> context_calls;

TEST(Current, PushesAndPopsTheContext) {
  cuda::Api api;
  api.ctx_push_current = [](cuda::Context) { return context_calls.emplace_back("push"), 0; };
  api.ctx_pop_current = [](cuda::Context*) { return context_calls.emplace_back("pop"), 0; };
  context_calls.clear();
  {
    const cuda::Current current(api, nullptr);
    context_calls.emplace_back("inside");
  }
  EXPECT_EQ(context_calls, (std::vector<std::string>{"push", "inside", "pop"}));
}

TEST(Current, ThatCouldNotPushDoesNotPop) {
  cuda::Api api;
  api.ctx_push_current = [](cuda::Context) { return 201; };
  api.ctx_pop_current = [](cuda::Context*) { return context_calls.emplace_back("pop"), 0; };
  context_calls.clear();
  EXPECT_THROW(cuda::Current(api, nullptr), cuda::CudaError);
  EXPECT_TRUE(context_calls.empty());
}

// ---- NCCL

TEST(NcclLibrary, HasTheFunctionsOfItsVersionAndNoMore) {
  EXPECT_WORKS({
    const auto api = nccl::load({library("nccl_22703"), ""});
    expect(api->version == 22703 && api->path == real_path(library("nccl_22703")), "version or path");
    expect(api->comm_split && api->mem_alloc && api->comm_window_register && api->comm_shrink, "functions of 2.27.3");
    expect(!api->comm_revoke, "a function of 2.28.7 that happens to be there");
  });
}

TEST(NcclLibrary, WithoutANewerFunctionIsLoadedWithoutIt) {
  EXPECT_WORKS({
    const auto api = nccl::load({library("nccl_22807_no_revoke"), ""});
    expect(!api->comm_revoke && api->comm_shrink, "functions");
  });
}

TEST(NcclLibrary, WithoutAFunctionThatAllHaveIsRefusedAndTheFunctionIsNamed) {
  EXPECT_SAYS(
      { nccl::load({library("nccl_no_split"), ""}); }, "TransportUnavailable: .*2.21.5 and has no ncclCommSplit");
}

TEST(NcclLibrary, ThatIsTooOldIsRefused) {
  EXPECT_SAYS(
      { nccl::load({library("nccl_21701"), ""}); },
      "TransportUnavailable: .*libnccl_21701.so is 2.17.1, 2.18.0 or newer is needed");
}

TEST(NcclLibrary, ThatIsNoneIsRefused) {
  EXPECT_SAYS({ nccl::load({library("driver"), ""}); }, "TransportUnavailable: .*libdriver.so is not an NCCL");
}

TEST(NcclLibrary, ThatWasRefusedIsNotInTheWayOfAnother) {
  EXPECT_WORKS({
    try {
      nccl::load({library("nccl_21701"), ""});
    } catch (const TransportUnavailable&) {
    }
    expect(nccl::load({library("nccl_22703"), ""})->version == 22703, "version");
  });
}

TEST(NcclLibrary, OfTheProcessComesBeforeThatOfTheWheel) {
  EXPECT_WORKS({
    expect(dlopen(library("nccl_22807").c_str(), RTLD_NOW) != nullptr, "dlopen");
    expect(nccl::load({"", library("nccl_22703")})->version == 22807, "version");
  });
}

TEST(NcclLibrary, OfTheWheelIsTakenWhereTheProcessHasNone) {
  EXPECT_WORKS({ expect(nccl::load({"", library("nccl_22703")})->version == 22703, "version"); });
}

TEST(NcclLibrary, ThatWouldBeASecondOneIsAUsageErrorNamingBoth) {
  EXPECT_SAYS(
      {
        expect(dlopen(library("nccl_22807").c_str(), RTLD_NOW) != nullptr, "dlopen");
        nccl::load({library("nccl_22703"), ""});
      },
      "UsageError: .*libnccl_22703.so.*libnccl_22807.so");
  EXPECT_SAYS(
      {
        nccl::load({library("nccl_22703"), ""});
        nccl::load({library("nccl_22807"), ""});
      },
      "UsageError: .*libnccl_22703.so.*libnccl_22807.so");
}

TEST(NcclLibrary, OfTwoInTheProcessMustBeNamed) {
  const auto load_both = [] {
    for (const char* name : {"nccl_22703", "nccl_22807"}) {
      expect(dlopen(library(name).c_str(), RTLD_NOW) != nullptr, "dlopen");
    }
  };
  EXPECT_SAYS(
      {
        load_both();
        nccl::load({"", ""});
      },
      "UsageError: .*libnccl_22703.so and .*libnccl_22807.so");
  EXPECT_WORKS({
    load_both();
    expect(nccl::load({library("nccl_22807"), ""})->version == 22807, "version");
  });
}

TEST(NcclLibrary, AskedForAgainIsTheSame) {
  EXPECT_WORKS({
    const auto api = nccl::load({library("nccl_22703"), ""});
    expect(nccl::load({"", library("nccl_22807")}) == api, "the wheel is only a place to look");
    expect(nccl::load({library("nccl_22703"), ""}) == api, "the same path");
  });
}

TEST(NcclError, HoldsTheTextsOfResultAndOfLastError) {
  EXPECT_SAYS(
      {
        const auto api = nccl::load({library("nccl_22703"), ""});
        nccl::check(*api, nccl::kSuccess, "ncclAllReduce");
        nccl::check(*api, nccl::kInvalidUsage, "ncclCommInitRankConfig");
      },
      "ncclCommInitRankConfig.* 5: invalid usage; last error of NCCL: rank 3 came twice");
}

TEST(Nccl, VersionsAreWrittenAsTheirCodesMean) {
  EXPECT_EQ(nccl::version_text(22703), "2.27.3");
  EXPECT_EQ(nccl::version_text(21801), "2.18.1");
  EXPECT_EQ(nccl::version_text(23012), "2.30.12");
  EXPECT_EQ(nccl::version_text(2708), "2.7.8");
}

// ---- NVRTC

TEST(NvrtcLibrary, ThatIsNotThereSaysWhereItWasLookedFor) {
  EXPECT_SAYS({ nvrtc::load({"/nowhere/libnvrtc.so.12", {}}); }, "TransportUnavailable: .*/nowhere/libnvrtc.so.12");
  EXPECT_SAYS(
      { nvrtc::load({"", {"/a/libnvrtc.so.13"}}); }, "TransportUnavailable: .*/a/libnvrtc.so.13.*nvidia-cuda-nvrtc");
}

TEST(NvrtcLibrary, ThatIsNoneIsRefused) {
  EXPECT_SAYS(
      { nvrtc::load({library("driver"), {}}); }, "TransportUnavailable: .*no NVRTC.*libdriver.so.*nvrtcGetErrorString");
}

}  // namespace
}  // namespace gpucomm
