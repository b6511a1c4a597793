#include "cuda/cubin_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "kernels/kernels.h"

namespace gpucomm::cuda {

namespace {

std::string checksum_text(const std::string& bytes) {
  const uint64_t sum = kernels().checksum(bytes.data(), bytes.size());
  std::string text(16, '0');
  for (int i = 0; i < 16; ++i) text[static_cast<size_t>(i)] = "0123456789abcdef"[(sum >> (60 - 4 * i)) & 15];
  return text;
}

// Of this attempt alone, whatever other threads and processes do.
std::string temporary_name(const std::string& path) {
  static std::atomic<unsigned> count{0};
  return path + "." + std::to_string(getpid()) + "." + std::to_string(count.fetch_add(1, std::memory_order_relaxed));
}

std::string failure(const std::string& what, const std::string& path) {
  return what + " " + path + ": " + std::strerror(errno);
}

std::string write_all(int file, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t written = ::write(file, bytes.data() + done, bytes.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return std::strerror(errno);
    done += static_cast<size_t>(written);
  }
  return "";
}

}  // namespace

CubinCache::CubinCache(const std::string& folder, const std::string& key)
    : folder_(folder), key_(key), path_(folder + "/gpucomm-kernels-" + checksum_text(key) + ".cubin") {}

std::string CubinCache::header(const std::string& cubin) const { return key_ + "\n" + checksum_text(cubin) + "\n"; }

std::optional<std::string> CubinCache::read() const {
  std::ifstream file(path_, std::ios::binary);
  if (!file) return std::nullopt;
  const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const size_t size = header("").size();
  if (bytes.size() <= size) return std::nullopt;
  std::string cubin = bytes.substr(size);
  if (bytes.compare(0, size, header(cubin)) != 0) return std::nullopt;
  return cubin;
}

std::string CubinCache::write(const std::string& cubin) const {
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) return "cannot make " + folder_ + ": " + error.message();
  const std::string temporary = temporary_name(path_);
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return failure("cannot create", temporary);
  std::string problem = write_all(file, header(cubin) + cubin);
  if (::close(file) != 0 && problem.empty()) problem = std::strerror(errno);
  if (!problem.empty()) {
    problem = "cannot write " + temporary + ": " + problem;
  } else if (::rename(temporary.c_str(), path_.c_str()) != 0) {
    problem = failure("cannot rename to", path_);
  } else {
    return "";
  }
  ::unlink(temporary.c_str());
  return problem;
}

}  // namespace gpucomm::cuda
