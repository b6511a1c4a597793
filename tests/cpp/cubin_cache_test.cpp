#include "cuda/cubin_cache.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

namespace gpucomm::cuda {
namespace {

namespace fs = std::filesystem;

class CubinCacheTest : public testing::Test {
 protected:
  CubinCacheTest() {
    std::string name = (fs::temp_directory_path() / "gpucomm-cubin-cache-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    folder_ = name;
  }
  ~CubinCacheTest() override { fs::remove_all(folder_); }

  static std::string contents(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  static void put(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }

  std::string folder_;
  const std::string cubin_ = std::string(
                                 "\x7f"
                                 "ELF\0\n",
                                 6) +
                             std::string(100000, 'k');
};

TEST_F(CubinCacheTest, WhatWasWrittenIsReadUnderItsKeyAlone) {
  const CubinCache cache(folder_ + "/made/on/the/way", "for sm_90");
  EXPECT_EQ(cache.read(), std::nullopt);
  EXPECT_EQ(cache.write(cubin_), "");
  EXPECT_EQ(cache.read(), cubin_);
  EXPECT_EQ(CubinCache(folder_ + "/made/on/the/way", "for sm_80").read(), std::nullopt);
}

TEST_F(CubinCacheTest, AFileThatIsNotWholeIsNotBelieved) {
  const CubinCache cache(folder_, "for sm_90");
  ASSERT_EQ(cache.write(cubin_), "");
  const std::string whole = contents(cache.path());
  std::string flipped = whole;
  flipped.back() ^= 1;
  for (const std::string& broken : {std::string(), whole.substr(0, 5), whole.substr(0, whole.size() - 1),
                                    whole.substr(0, whole.size() / 2), whole + "x", flipped, "x" + whole.substr(1)}) {
    put(cache.path(), broken);
    EXPECT_EQ(cache.read(), std::nullopt) << broken.size() << " of " << whole.size() << " bytes";
  }
  EXPECT_EQ(cache.write(cubin_), "");
  EXPECT_EQ(cache.read(), cubin_);
}

// Two keys could share a checksum, and with it a name.
TEST_F(CubinCacheTest, AFileOfAnotherKeyUnderTheSameNameIsNotBelieved) {
  const CubinCache mine(folder_, "for sm_90");
  const CubinCache other(folder_, "for sm_80");
  ASSERT_EQ(other.write(cubin_), "");
  fs::rename(other.path(), mine.path());
  EXPECT_EQ(mine.read(), std::nullopt);
}

TEST_F(CubinCacheTest, AFolderThatCannotBeMadeIsNamed) {
  put(folder_ + "/file", "");
  const std::string problem = CubinCache(folder_ + "/file/below", "for sm_90").write(cubin_);
  EXPECT_NE(problem.find(folder_ + "/file"), std::string::npos) << problem;
}

TEST_F(CubinCacheTest, WritersAtOnceLeaveOneWholeFile) {
  std::atomic<int> bad{0};
  std::vector<std::thread> writers;
  for (int i = 0; i < 4; ++i) {
    writers.emplace_back([&] {
      const CubinCache cache(folder_, "for sm_90");
      for (int k = 0; k < 20; ++k) {
        if (!cache.write(cubin_).empty() || cache.read() != cubin_) ++bad;
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(bad, 0);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

}  // namespace
}  // namespace gpucomm::cuda
