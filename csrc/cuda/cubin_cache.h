// Compiled kernels on disk: one file for each key. A file is only believed if its key and the checksum of what it holds
// are right, and appears under its name whole, by a rename; so processes need no lock.
#pragma once

#include <optional>
#include <string>

namespace gpucomm::cuda {

class CubinCache {
 public:
  // key: whatever the result hangs on, one line.
  CubinCache(const std::string& folder, const std::string& key);
  const std::string& path() const { return path_; }

  // Nothing if there is no such file, or one that is not whole.
  std::optional<std::string> read() const;
  // Makes the folder. Returns why it could not be done, empty if it could.
  std::string write(const std::string& cubin) const;

 private:
  std::string header(const std::string& cubin) const;
  std::string folder_;
  std::string key_;
  std::string path_;
};

}  // namespace gpucomm::cuda
