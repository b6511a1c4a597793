#include "transport/transport_loopback.h"

#include <errno.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <optional>
#include <vector>

#include "core/clock.h"
#include "kernels/kernels.h"

namespace gpucomm {
namespace {

constexpr int64_t kSliceNs = 50 * 1000 * 1000;
constexpr size_t kAlignment = 4096;

// What N ranks that all contribute `in` would find in `out`.
void compute(const Collective& c, int size) {
  const size_t bytes = c.numel * size_of(c.dtype);
  if (bytes == 0) return;
  if (c.kind == CollectiveKind::kAllGather) {
    for (int rank = 0; rank < size; ++rank) {
      std::byte* part = static_cast<std::byte*>(c.out) + static_cast<size_t>(rank) * bytes;
      if (part != c.in) std::memcpy(part, c.in, bytes);
    }
    return;
  }
  if (c.kind != CollectiveKind::kAllReduce && c.kind != CollectiveKind::kReduceScatter) return;
  // The same additions in the same order as with N ranks, so the rounding is the same too.
  const std::vector<const void*> sources(static_cast<size_t>(size), c.in);
  void* const destination = c.out;
  const bool averages = c.op == ReduceOp::kAvg && is_floating(c.dtype);
  kernels().reduce[static_cast<int>(c.dtype)][static_cast<int>(c.op)](sources.data(), size, &destination, 1, c.numel,
                                                                      averages ? c.scale / size : c.scale);
}

size_t payload_bytes(const Collective& c, int size) {
  if (c.kind == CollectiveKind::kBarrier) return 0;
  const bool whole = c.kind == CollectiveKind::kReduceScatter || c.kind == CollectiveKind::kAllGather;
  return c.numel * size_of(c.dtype) * (whole ? static_cast<size_t>(size) : 1);
}

}  // namespace

struct LoopbackTransport::Link {
  LoopbackOptions options;
  int64_t free_at_ns = 0;  // when the last collective started so far is over
  std::mutex mutex;        // of the reason: abort may come from any thread
  std::optional<std::string> aborted;

  void ensure_usable() {
    const std::lock_guard lock(mutex);
    if (aborted) throw PeerFailed(0, *aborted);
  }
};

class LoopbackTransport::ModelledTask final : public Task {
 public:
  ModelledTask(std::shared_ptr<Link> link, const Collective& collective, int64_t done_at_ns)
      : link_(std::move(link)), collective_(collective), done_at_ns_(done_at_ns) {}

  bool advance() override {
    link_->ensure_usable();
    if (done_at_ns_ > 0 && monotonic_ns() < done_at_ns_) return false;
    compute(collective_, link_->options.size);
    return true;
  }

  void wait() override {
    Embedder* const embedder = link_->options.embedder;
    for (int64_t left_ns; (left_ns = done_at_ns_ - monotonic_ns()) > 0;) {
      link_->ensure_usable();
      if (embedder != nullptr) embedder->check_interrupt();
      const timespec slice{0, static_cast<long>(std::min(left_ns, kSliceNs))};
      if (embedder != nullptr) embedder->before_blocking();
      clock_nanosleep(CLOCK_MONOTONIC, 0, &slice, nullptr);  // a signal ends it early: then the interrupt check is due
      if (embedder != nullptr) embedder->after_blocking();
    }
  }

 private:
  std::shared_ptr<Link> link_;
  Collective collective_;
  int64_t done_at_ns_;  // 0: at once
};

LoopbackTransport::LoopbackTransport(const LoopbackOptions& options)
    : Transport(0, options.size), link_(std::make_shared<Link>()) {
  if (options.size < 1)
    throw UsageError("loopback: size is " + std::to_string(options.size) + ", at least 1 is needed");
  if (!(options.latency_s >= 0)) {
    throw UsageError("loopback: latency_s is " + std::to_string(options.latency_s) + ", it cannot be negative");
  }
  if (!(options.bytes_per_s > 0)) {
    throw UsageError("loopback: bytes_per_s is " + std::to_string(options.bytes_per_s) + ", it must be positive");
  }
  link_->options = options;
}

LoopbackTransport::~LoopbackTransport() = default;

Memory LoopbackTransport::allocate(size_t bytes) {
  link_->ensure_usable();
  const size_t size = std::max(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
  void* address = size >= bytes ? std::aligned_alloc(kAlignment, size) : nullptr;
  if (address == nullptr) throw std::bad_alloc();
  std::memset(address, 0, size);
  return {std::shared_ptr<void>(address, std::free), address, bytes};
}

void LoopbackTransport::start(const Collective& collective, Stream& stream) {
  link_->ensure_usable();
  check(collective);
  const LoopbackOptions& options = link_->options;
  int64_t done_at_ns = 0;
  const double seconds =
      options.latency_s + static_cast<double>(payload_bytes(collective, options.size)) / options.bytes_per_s;
  if (seconds > 0) {
    link_->free_at_ns = std::max(link_->free_at_ns, monotonic_ns()) + static_cast<int64_t>(seconds * 1e9);
    done_at_ns = link_->free_at_ns;
  }
  stream.enqueue(std::make_shared<ModelledTask>(link_, collective, done_at_ns));
}

void LoopbackTransport::abort(const std::string& reason) noexcept {
  const std::lock_guard lock(link_->mutex);
  if (!link_->aborted) link_->aborted = reason;
}

}  // namespace gpucomm
