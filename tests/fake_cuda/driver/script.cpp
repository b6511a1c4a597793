#include "fake_cuda/driver/script.h"

#include <dlfcn.h>
#include <execinfo.h>

#include <cstdio>
#include <cstring>

namespace fake {

std::string Sites::caller_of(const char* function) const {
  constexpr int kFrames = 32;
  void* frames[kFrames];
  const int count = backtrace(frames, kFrames);
  Dl_info own{};
  dladdr(reinterpret_cast<const void*>(&script), &own);
  std::string text = function;
  const void* library = nullptr;
  bool is_ours = false;  // a sanitizer may come first, where it stands between us and backtrace()
  int depth = 0;
  for (int i = 0; i < count && depth < depth_; ++i) {
    Dl_info frame{};
    if (!dladdr(frames[i], &frame)) continue;
    is_ours |= frame.dli_fbase == own.dli_fbase;
    if (!is_ours || frame.dli_fbase == own.dli_fbase) continue;
    if (library && frame.dli_fbase != library) break;
    const char* name = std::strrchr(frame.dli_fname, '/');
    const auto offset = static_cast<const char*>(frames[i]) - static_cast<const char*>(frame.dli_fbase);
    char place[32];
    std::snprintf(place, sizeof place, "+%#tx", offset);
    text += std::string(" < ") + (library ? "" : name ? name + 1 : frame.dli_fname) + place;
    library = frame.dli_fbase;
    ++depth;
  }
  return text;
}

bool Sites::drops(const char* function) {
  const std::string name = caller_of(function);
  auto [place, is_new] = by_name_.try_emplace(name, sites_.size());
  if (is_new) sites_.push_back({name});
  ++sites_[place->second].calls;
  return mutated_ >= 0 && place->second == static_cast<size_t>(mutated_);
}

void Sites::clear() { *this = Sites(); }

int Calls::enter(const std::string& function) {
  const uint64_t nth = ++counts_[function];
  auto failures = failures_.find(function);
  if (failures == failures_.end()) return 0;
  auto failure = failures->second.find(nth);
  return failure == failures->second.end() ? 0 : failure->second;
}

uint64_t Calls::count(const std::string& function) const {
  auto place = counts_.find(function);
  return place == counts_.end() ? 0 : place->second;
}

void Calls::clear() { *this = Calls(); }

Script& script() {
  static Script* const instance = new Script;  // threads may outlive what is destroyed at exit
  return *instance;
}

}  // namespace fake
