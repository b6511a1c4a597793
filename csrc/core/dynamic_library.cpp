#include "core/dynamic_library.h"

#include <dlfcn.h>
#include <link.h>

#include <climits>
#include <cstdlib>
#include <utility>

namespace gpucomm {

DynamicLibrary::DynamicLibrary(DynamicLibrary&& other) noexcept
    : handle_(std::exchange(other.handle_, nullptr)), kept_(std::exchange(other.kept_, false)) {}

DynamicLibrary& DynamicLibrary::operator=(DynamicLibrary&& other) noexcept {
  if (this != &other) {
    close();
    handle_ = std::exchange(other.handle_, nullptr);
    kept_ = std::exchange(other.kept_, false);
  }
  return *this;
}

DynamicLibrary::~DynamicLibrary() { close(); }

void DynamicLibrary::close() noexcept {
  if (handle_ != nullptr && !kept_) dlclose(handle_);
}

// RTLD_LOCAL: names of these libraries (a stand-in's above all) must not resolve anybody else's references.
DynamicLibrary DynamicLibrary::open(const std::string& name, std::string* error) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* text = dlerror();
    *error = text != nullptr ? text : name + " cannot be loaded";
  }
  return DynamicLibrary(handle);
}

DynamicLibrary DynamicLibrary::loaded(const std::string& name) {
  void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (handle == nullptr) dlerror();  // nobody's business later
  return DynamicLibrary(handle);
}

void* DynamicLibrary::find(const char* symbol) const {
  if (handle_ == nullptr) return nullptr;
  void* address = dlsym(handle_, symbol);
  if (address == nullptr) dlerror();
  return address;
}

// As the loader knows it; empty for none.
static std::string name_of(void* handle) {
  link_map* map = nullptr;
  return handle != nullptr && dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

bool DynamicLibrary::defines(const char* symbol) const {
  Dl_info owner;
  const void* address = find(symbol);
  return address != nullptr && dladdr(address, &owner) != 0 && name_of(handle_) == owner.dli_fname;
}

std::string DynamicLibrary::path() const { return real_path(name_of(handle_)); }

std::string real_path(const std::string& path) {
  char resolved[PATH_MAX];
  return realpath(path.c_str(), resolved) != nullptr ? resolved : path;
}

static int collect_name(dl_phdr_info* info, size_t, void* names) {
  static_cast<std::vector<std::string>*>(names)->push_back(info->dlpi_name);
  return 0;
}

std::vector<DynamicLibrary> libraries_defining(const char* symbol) {
  // In two rounds, because the walk holds the loader's lock. The program itself has the empty name.
  std::vector<std::string> names;
  dl_iterate_phdr(collect_name, &names);
  std::vector<DynamicLibrary> found;
  for (const std::string& name : names) {
    if (name.empty()) continue;
    DynamicLibrary library = DynamicLibrary::loaded(name);
    if (library.defines(symbol)) found.push_back(std::move(library));
  }
  return found;
}

}  // namespace gpucomm
