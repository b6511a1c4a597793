// Shared libraries opened at run time: what the build must not need and the machine may lack.
#pragma once

#include <string>
#include <vector>

namespace gpucomm {

// One reference to a loaded library, or to none. Symbols live as long as the library stays loaded: what hands out
// functions calls keep(), since drivers and NCCL run threads and exit handlers of their own and survive no unloading.
class DynamicLibrary {
 public:
  DynamicLibrary() = default;
  DynamicLibrary(DynamicLibrary&& other) noexcept;
  DynamicLibrary& operator=(DynamicLibrary&& other) noexcept;
  ~DynamicLibrary();

  // name: a path, or a name that the system's loader searches for. None on failure; *error then says why.
  static DynamicLibrary open(const std::string& name, std::string* error);
  // The copy that the process has loaded already, by path or by soname; none if it has not.
  static DynamicLibrary loaded(const std::string& name);

  explicit operator bool() const { return handle_ != nullptr; }
  bool is(const DynamicLibrary& other) const { return handle_ == other.handle_; }

  // nullptr if neither the library nor one that it depends on has the symbol.
  void* find(const char* symbol) const;
  // Whether the library has the symbol itself.
  bool defines(const char* symbol) const;

  // True if there is one.
  template <typename Function>
  bool resolve(const char* symbol, Function** function) const {
    *function = reinterpret_cast<Function*>(find(symbol));
    return *function != nullptr;
  }

  // Of the file, absolute and without links.
  std::string path() const;

  // Leaves the library loaded until the process ends.
  void keep() { kept_ = true; }

 private:
  explicit DynamicLibrary(void* handle) : handle_(handle) {}
  void close() noexcept;
  void* handle_ = nullptr;
  bool kept_ = false;
};

// Absolute, without links; the text itself if there is no such file.
std::string real_path(const std::string& path);

// The loaded libraries that define the symbol themselves, under whatever name they were loaded, in the order in which
// they were loaded. The program itself, and those that keep the symbol hidden, are not among them.
std::vector<DynamicLibrary> libraries_defining(const char* symbol);

}  // namespace gpucomm
