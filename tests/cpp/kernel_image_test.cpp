// Where the image of the kernels comes from, with tables of functions that stand for NVRTC and for the driver.
#include "cuda/kernel_image.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "cuda/embedded_kernels.h"

namespace gpucomm::cuda {
namespace {

namespace fs = std::filesystem;

// What the stand-ins were told, and what they are to answer.
struct Script {
  int compilations = 0;
  std::vector<std::string> options;
  std::string source, header, header_name;
  nvrtc::Result compile_result = nvrtc::kSuccess;
  Result load_result = kSuccess;
  const void* loaded = nullptr;
};
Script script;

constexpr char kCubin[] =
    "\x7f"
    "ELF for a test";
constexpr char kLog[] = "codec.cu(1): error: of a test\n";

nvrtc::Api stand_in_nvrtc(int version) {
  nvrtc::Api api;
  api.path = "/stand-in/libnvrtc.so";
  api.version = version;
  api.archs = {75, 80, 86, 90};
  api.get_error_string = [](nvrtc::Result) { return "NVRTC_ERROR_COMPILATION"; };
  api.create_program = [](nvrtc::Program*, const char* source, const char*, int headers, const char* const* texts,
                          const char* const* names) {
    EXPECT_EQ(headers, 1);
    script.source = source;
    script.header = texts[0];
    script.header_name = names[0];
    return nvrtc::Result{nvrtc::kSuccess};
  };
  api.compile_program = [](nvrtc::Program, int count, const char* const* options) {
    ++script.compilations;
    script.options.assign(options, options + count);
    return script.compile_result;
  };
  api.get_cubin_size = [](nvrtc::Program, size_t* bytes) {
    *bytes = sizeof kCubin;
    return nvrtc::Result{nvrtc::kSuccess};
  };
  api.get_cubin = [](nvrtc::Program, char* cubin) {
    std::memcpy(cubin, kCubin, sizeof kCubin);
    return nvrtc::Result{nvrtc::kSuccess};
  };
  api.get_program_log_size = [](nvrtc::Program, size_t* bytes) {
    *bytes = sizeof kLog;
    return nvrtc::Result{nvrtc::kSuccess};
  };
  api.get_program_log = [](nvrtc::Program, char* log) {
    std::memcpy(log, kLog, sizeof kLog);
    return nvrtc::Result{nvrtc::kSuccess};
  };
  api.destroy_program = [](nvrtc::Program*) { return nvrtc::Result{nvrtc::kSuccess}; };
  return api;
}

std::shared_ptr<Api> stand_in_driver() {
  auto api = std::make_shared<Api>();
  api->driver_version = 13000;
  api->get_error_name = [](Result, const char** text) {
    *text = "CUDA_ERROR_OF_A_TEST";
    return Result{kSuccess};
  };
  api->get_error_string = [](Result, const char** text) {
    *text = "refused by a test";
    return Result{kSuccess};
  };
  api->device_get_count = [](int* count) {
    *count = 1;
    return Result{kSuccess};
  };
  api->device_get = [](Device* device, int) {
    *device = 0;
    return Result{kSuccess};
  };
  api->device_get_name = [](char* name, int, Device) {
    std::strcpy(name, "stand-in");
    return Result{kSuccess};
  };
  api->device_get_pci_bus_id = [](char* id, int, Device) {
    std::strcpy(id, "0000:00:00.0");
    return Result{kSuccess};
  };
  api->device_get_attribute = [](int* value, DeviceAttribute attribute, Device) {
    *value = attribute == kComputeMajor ? 9 : 0;
    return Result{kSuccess};
  };
  api->primary_ctx_retain = [](Context* context, Device) {
    *context = nullptr;
    return Result{kSuccess};
  };
  api->primary_ctx_release = [](Device) { return Result{kSuccess}; };
  api->ctx_push_current = [](Context) { return Result{kSuccess}; };
  api->ctx_pop_current = [](Context*) { return Result{kSuccess}; };
  api->ctx_get_current = [](Context* context) {
    *context = nullptr;
    return Result{kSuccess};
  };
  api->module_load_data = [](Module*, const void* image) {
    script.loaded = image;
    return script.load_result;
  };
  return api;
}

class KernelImageTest : public testing::Test {
 protected:
  KernelImageTest() {
    script = {};
    std::string name = (fs::temp_directory_path() / "gpucomm-kernel-image-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    folder_ = name;
  }
  ~KernelImageTest() override { fs::remove_all(folder_); }
  std::string folder_;
};

TEST_F(KernelImageTest, TheSourceGoesToTheCompilerWithTheOneHeaderThatItIncludes) {
  const KernelImage image = compile_kernels(stand_in_nvrtc(12090), 90, "");
  EXPECT_EQ(image.bytes, std::string(kCubin, sizeof kCubin));
  EXPECT_EQ(script.source, kernels_source());
  EXPECT_NE(script.source.find("#include \"" + script.header_name + "\""), std::string::npos);
  EXPECT_EQ(script.source.find("#include"), script.source.rfind("#include"));
  EXPECT_NE(script.header.find("struct CodecArgs"), std::string::npos);
}

TEST_F(KernelImageTest, TheNewestArchitectureOfTheDevicesGenerationIsTaken) {
  EXPECT_NE(compile_kernels(stand_in_nvrtc(12090), 89, "").origin.find("for sm_86"), std::string::npos);
  EXPECT_EQ(script.options.front(), "--gpu-architecture=sm_86");
  EXPECT_NE(compile_kernels(stand_in_nvrtc(12090), 80, "").origin.find("for sm_80"), std::string::npos);
  for (const int unknown : {70, 100}) {
    EXPECT_THROW(compile_kernels(stand_in_nvrtc(12090), unknown, ""), UsageError) << unknown;
  }
}

TEST_F(KernelImageTest, WhatWasKeptIsNotCompiledAgainUnlessCompilerOrDeviceDiffer) {
  compile_kernels(stand_in_nvrtc(12090), 90, folder_);
  EXPECT_EQ(script.compilations, 1);
  EXPECT_EQ(compile_kernels(stand_in_nvrtc(12090), 90, folder_).bytes, std::string(kCubin, sizeof kCubin));
  EXPECT_EQ(script.compilations, 1);
  compile_kernels(stand_in_nvrtc(12040), 90, folder_);
  EXPECT_EQ(script.compilations, 2);
  compile_kernels(stand_in_nvrtc(12090), 80, folder_);
  EXPECT_EQ(script.compilations, 3);
}

TEST_F(KernelImageTest, AFailedCompilationCarriesTheCompilersMessagesAndKeepsNothing) {
  script.compile_result = nvrtc::kCompilation;
  try {
    compile_kernels(stand_in_nvrtc(12090), 90, folder_);
    FAIL() << "no error";
  } catch (const CommError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("codec.cu(1): error: of a test"), std::string::npos) << text;
    EXPECT_NE(text.find("/stand-in/libnvrtc.so"), std::string::npos) << text;
    EXPECT_NE(text.find("sm_90"), std::string::npos) << text;
  }
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(KernelImageTest, TheFatBinaryIsLoadedWhereTheDriverTakesIt) {
  if (fat_binary().empty()) GTEST_SKIP() << "this build had no nvcc";
  const GpuDevice device(stand_in_driver(), 0);
  std::string origin;
  load_kernels(device, {}, &origin);
  EXPECT_EQ(script.loaded, fat_binary().data());
  EXPECT_EQ(origin, "fat binary of the build");
}

TEST_F(KernelImageTest, IfNothingWillDoTheErrorSaysAllThatWasTried) {
  script.load_result = kNoBinaryForGpu;
  const GpuDevice device(stand_in_driver(), 0);
  std::string origin;
  try {
    KernelCompiler compiler;
    compiler.search.path = "/nonexistent/libnvrtc.so";
    load_kernels(device, compiler, &origin);
    FAIL() << "no error";
  } catch (const CommError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("/nonexistent/libnvrtc.so"), std::string::npos) << text;
    EXPECT_EQ(text.find("fat binary") != std::string::npos, !fat_binary().empty()) << text;
  }
}

}  // namespace
}  // namespace gpucomm::cuda
