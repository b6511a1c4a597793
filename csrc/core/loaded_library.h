// The one library of its kind that a process uses, with the functions that were found in it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/dynamic_library.h"

namespace gpucomm {

// Api: the table of functions, with the library's `path`. The first call that succeeds decides for the process.
template <typename Api>
struct LoadedLibrary {
  std::mutex mutex;  // of what follows
  DynamicLibrary library;
  std::shared_ptr<const Api> api;  // null: none yet

  // Never destroyed: threads of the library's, or others that are in it, may run when the process ends.
  static LoadedLibrary& instance() {
    static LoadedLibrary& one = *new LoadedLibrary;
    return one;
  }

  // Whether it is the one that is asked for by a path, or by none.
  bool is(const std::string& path) const { return path.empty() || DynamicLibrary::loaded(path).is(library); }

  std::shared_ptr<const Api> set(DynamicLibrary opened, std::shared_ptr<const Api> functions) {
    library = std::move(opened);
    return api = std::move(functions);
  }
};

}  // namespace gpucomm
