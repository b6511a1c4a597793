#include "fake_cuda/driver/measure.h"

#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <cstring>

#include "fake_cuda/driver/memory.h"
#include "fake_cuda/driver/reports.h"

namespace fake {

thread_local Recorder* recorder = nullptr;

namespace {

// Where this library's own variables lie: a kernel's static ones are among them.
std::pair<uintptr_t, uintptr_t> own_image() {
  struct Search {
    uintptr_t inside;
    uintptr_t begin = 0;
    uintptr_t end = 0;
  };
  static const Search found = [] {
    Search own{reinterpret_cast<uintptr_t>(&own_image), 0, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* image, size_t, void* to) {
          auto& search = *static_cast<Search*>(to);
          uintptr_t begin = UINTPTR_MAX, end = 0;
          for (int i = 0; i < image->dlpi_phnum; ++i) {
            if (image->dlpi_phdr[i].p_type != PT_LOAD) continue;
            begin = std::min(begin, static_cast<uintptr_t>(image->dlpi_addr + image->dlpi_phdr[i].p_vaddr));
            end = std::max(end, static_cast<uintptr_t>(image->dlpi_addr + image->dlpi_phdr[i].p_vaddr +
                                                       image->dlpi_phdr[i].p_memsz));
          }
          if (search.inside < begin || search.inside >= end) return 0;
          search.begin = begin;
          search.end = end;
          return 1;
        },
        &own);
    return own;
  }();
  return {found.begin, found.end};
}

std::pair<uintptr_t, uintptr_t> own_stack() {
  thread_local const std::pair<uintptr_t, uintptr_t> found = [] {
    pthread_attr_t attributes;
    void* lowest = nullptr;
    size_t bytes = 0;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &lowest, &bytes);
    pthread_attr_destroy(&attributes);
    const auto begin = reinterpret_cast<uintptr_t>(lowest);
    return std::pair{begin, begin + bytes};
  }();
  return found;
}

}  // namespace

void Recorder::ignore(const void* address, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  ignored_.push_back({begin, begin + bytes});
}

void Recorder::run(const std::function<void()>& kernel) {
  const auto image = own_image();
  const auto stack = own_stack();
  ignored_.push_back({image.first, image.second});
  ignored_.push_back({stack.first, stack.second});
  recorder = this;
  // Kernels hold nothing that would need to be unwound.
  if (setjmp(stop_) == 0) kernel();
  recorder = nullptr;
}

bool Recorder::is_ignored(uintptr_t address, size_t bytes) const {
  return std::any_of(ignored_.begin(), ignored_.end(), [&](const Span& span) { return span.holds(address, bytes); });
}

bool Recorder::is_live(uintptr_t address, size_t bytes) {
  for (const Span& span : recent_) {
    if (span.holds(address, bytes)) return true;
  }
  const Allocation* allocation = memory().holding(address);
  if (!allocation || !allocation->holds(address, bytes)) return false;
  recent_[next_recent_++ % 4] = {allocation->base, allocation->base + allocation->bytes};
  return true;
}

void Recorder::append(std::vector<Span>& spans, uintptr_t address, size_t bytes) {
  // Kernels walk through a few stretches side by side.
  const size_t oldest = spans.size() > 4 ? spans.size() - 4 : 0;
  for (size_t i = spans.size(); i > oldest; --i) {
    Span& span = spans[i - 1];
    if (address < span.begin || address > span.end) continue;
    span.end = std::max(span.end, address + bytes);
    return;
  }
  spans.push_back({address, address + bytes});
}

void Recorder::touch(uintptr_t address, size_t bytes, bool write) {
  if (is_live(address, bytes)) {
    append(write ? writes_ : reads_, address, bytes);
  } else if (!is_ignored(address, bytes)) {
    recorder = nullptr;
    memory().check(who_, address, bytes, write);
    std::longjmp(stop_, 1);
  }
}

void Recorder::add_merged(std::vector<Span> spans, bool write, std::vector<FakeRange>& ranges) {
  std::sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.begin < b.begin; });
  Span open;
  auto close = [&] {
    if (open.end > open.begin) {
      ranges.push_back({reinterpret_cast<const void*>(open.begin), open.end - open.begin, write});
    }
  };
  for (const Span& span : spans) {
    if (span.begin <= open.end && open.end > 0) {
      open.end = std::max(open.end, span.end);
    } else {
      close();
      open = span;
    }
  }
  close();
}

std::vector<FakeRange> Recorder::ranges() const {
  std::vector<FakeRange> ranges;
  add_merged(reads_, false, ranges);
  add_merged(writes_, true, ranges);
  return ranges;
}

}  // namespace fake

// ---- what the compiler calls

#define FAKE_TOUCH(address, bytes, write) \
  if (fake::recorder) fake::recorder->touch(reinterpret_cast<uintptr_t>(address), bytes, write)

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}

#define FAKE_ACCESSES(bytes)                                                              \
  void __tsan_read##bytes(void* address) { FAKE_TOUCH(address, bytes, false); }           \
  void __tsan_write##bytes(void* address) { FAKE_TOUCH(address, bytes, true); }           \
  void __tsan_volatile_read##bytes(void* address) { FAKE_TOUCH(address, bytes, false); }  \
  void __tsan_volatile_write##bytes(void* address) { FAKE_TOUCH(address, bytes, true); }  \
  void __tsan_unaligned_read##bytes(void* address) { FAKE_TOUCH(address, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* address) { FAKE_TOUCH(address, bytes, true); }
FAKE_ACCESSES(1)
FAKE_ACCESSES(2)
FAKE_ACCESSES(4)
FAKE_ACCESSES(8)
FAKE_ACCESSES(16)

void __tsan_read_range(void* address, size_t bytes) { FAKE_TOUCH(address, bytes, false); }
void __tsan_write_range(void* address, size_t bytes) { FAKE_TOUCH(address, bytes, true); }

// An atomic operation reads and writes; what it reads is what earlier work left there. Memory orders may be relaxed, as
// one thread runs all of a kernel.
#define FAKE_ATOMICS(bits, Type)                                                                                    \
  Type __tsan_atomic##bits##_load(const volatile Type* address, int) {                                              \
    FAKE_TOUCH(address, sizeof(Type), false);                                                                       \
    return __atomic_load_n(address, __ATOMIC_RELAXED);                                                              \
  }                                                                                                                 \
  void __tsan_atomic##bits##_store(volatile Type* address, Type value, int) {                                       \
    FAKE_TOUCH(address, sizeof(Type), true);                                                                        \
    __atomic_store_n(address, value, __ATOMIC_RELAXED);                                                             \
  }                                                                                                                 \
  Type __tsan_atomic##bits##_exchange(volatile Type* address, Type value, int) {                                    \
    FAKE_TOUCH(address, sizeof(Type), false);                                                                       \
    FAKE_TOUCH(address, sizeof(Type), true);                                                                        \
    return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);                                                   \
  }                                                                                                                 \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile Type* address, Type* expected, Type value, int, int) { \
    FAKE_TOUCH(address, sizeof(Type), false);                                                                       \
    FAKE_TOUCH(address, sizeof(Type), true);                                                                        \
    return __atomic_compare_exchange_n(address, expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);        \
  }                                                                                                                 \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile Type* address, Type* expected, Type value, int success,  \
                                                  int failure) {                                                    \
    return __tsan_atomic##bits##_compare_exchange_strong(address, expected, value, success, failure);               \
  }                                                                                                                 \
  FAKE_FETCH(bits, Type, add)                                                                                       \
  FAKE_FETCH(bits, Type, sub) FAKE_FETCH(bits, Type, and) FAKE_FETCH(bits, Type, or) FAKE_FETCH(bits, Type, xor)
#define FAKE_FETCH(bits, Type, operation)                                                 \
  Type __tsan_atomic##bits##_fetch_##operation(volatile Type* address, Type value, int) { \
    FAKE_TOUCH(address, sizeof(Type), false);                                             \
    FAKE_TOUCH(address, sizeof(Type), true);                                              \
    return __atomic_fetch_##operation(address, value, __ATOMIC_RELAXED);                  \
  }
FAKE_ATOMICS(32, uint32_t)
FAKE_ATOMICS(64, uint64_t)

// Calls that kernels make are redirected here by the linker (--wrap).
void* __real_memcpy(void* to, const void* from, size_t bytes);
void* __real_memmove(void* to, const void* from, size_t bytes);
void* __real_memset(void* to, int value, size_t bytes);

void* __wrap_memcpy(void* to, const void* from, size_t bytes) {
  if (bytes > 0) {
    FAKE_TOUCH(from, bytes, false);
    FAKE_TOUCH(to, bytes, true);
  }
  return __real_memcpy(to, from, bytes);
}

void* __wrap_memmove(void* to, const void* from, size_t bytes) {
  if (bytes > 0) {
    FAKE_TOUCH(from, bytes, false);
    FAKE_TOUCH(to, bytes, true);
  }
  return __real_memmove(to, from, bytes);
}

void* __wrap_memset(void* to, int value, size_t bytes) {
  if (bytes > 0) {
    FAKE_TOUCH(to, bytes, true);
  }
  return __real_memset(to, value, bytes);
}

}  // extern "C"
