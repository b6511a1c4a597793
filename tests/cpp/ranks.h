// Ranks for tests: threads of this process, or forked processes, connected through shared memory; and data that is
// unique per rank and index with results in closed form.
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/stream.h"
#include "kernels/kernels.h"
#include "transport/transport_shm.h"

#if defined(__SANITIZE_THREAD__)
#define SKIP_WITHOUT_FORK() GTEST_SKIP() << "ThreadSanitizer does not follow forked processes"
#else
#define SKIP_WITHOUT_FORK() (void)0
#endif

namespace gpucomm::testing {

// ---- Threads as ranks

class ThreadExchange {
 public:
  explicit ThreadExchange(int size) : size_(size), slots_(static_cast<size_t>(size)) {}

  std::vector<std::string> operator()(int rank, const std::string& mine) {
    std::unique_lock lock(mutex_);
    const uint64_t round = round_;
    slots_[static_cast<size_t>(rank)] = mine;
    if (++arrived_ == size_) {
      gathered_ = slots_;
      arrived_ = 0;
      ++round_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return round_ != round; });
    return gathered_;
  }

 private:
  int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> slots_, gathered_;
  int arrived_ = 0;
  uint64_t round_ = 0;
};

// Small buffers, so that a few kilobytes already need several rounds of staging.
inline ShmOptions small_options() {
  ShmOptions options;
  options.timeout_s = 30;
  options.heap_bytes = size_t{16} << 20;
  options.slot_bytes = 4096;
  options.piece_bytes = 4096;
  return options;
}

// Runs body(rank, transport) on one thread per rank. Returns what each rank threw, null where nothing.
inline std::vector<std::exception_ptr> run_ranks_catching(
    int size, const ShmOptions& options, const std::function<void(int, std::unique_ptr<ShmTransport>&)>& body) {
  ThreadExchange exchange(size);
  std::vector<std::exception_ptr> thrown(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        ShmOptions mine = options;
        mine.rank = rank;
        mine.size = size;
        if (!mine.exchange)
          mine.exchange = [&exchange, rank](const std::string& bytes) { return exchange(rank, bytes); };
        auto transport = std::make_unique<ShmTransport>(mine);
        body(rank, transport);
      } catch (...) {
        thrown[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return thrown;
}

inline void run_ranks(int size, const ShmOptions& options, const std::function<void(int, ShmTransport&)>& body) {
  for (const std::exception_ptr& thrown :
       run_ranks_catching(size, options, [&](int rank, std::unique_ptr<ShmTransport>& t) { body(rank, *t); })) {
    if (thrown) std::rethrow_exception(thrown);
  }
}

inline std::string text_of(const std::exception_ptr& thrown) {
  if (!thrown) return "";
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  }
}

// ---- Processes as ranks

// Memory shared by the forked ranks and the test: the exchange, what each rank reports, and a flag to steer them.
struct Board {
  static constexpr int kRanks = 8;
  struct Entry {
    std::atomic<uint64_t> round;
    size_t length;
    char bytes[2048];
    std::atomic<int> reported;
    char report[1024];
  };
  std::atomic<uint64_t> read;
  std::atomic<int> stage;
  Entry entries[kRanks];

  std::vector<std::string> exchange(int rank, int size, uint64_t round, const std::string& mine) {
    Entry& own = entries[rank];
    own.length = mine.size();
    std::memcpy(own.bytes, mine.data(), std::min(mine.size(), sizeof own.bytes));
    own.round.store(round);
    std::vector<std::string> all;
    for (int peer = 0; peer < size; ++peer) {
      while (entries[peer].round.load() < round) usleep(100);
      all.emplace_back(entries[peer].bytes, entries[peer].length);
    }
    read.fetch_add(1);
    while (read.load() < round * static_cast<uint64_t>(size)) usleep(100);
    return all;
  }
  void report(int rank, const std::string& text) {
    std::memcpy(entries[rank].report, text.c_str(), std::min(text.size() + 1, sizeof entries[rank].report - 1));
    entries[rank].reported.store(1);
  }
};

class ForkedRanks {
 public:
  using Body = std::function<void(int rank, std::unique_ptr<ShmTransport>& transport, Board& board)>;

  // Each rank reports what body threw, or "done".
  ForkedRanks(int size, const ShmOptions& options, const Body& body) {
    board_ =
        static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    for (int rank = 0; rank < size; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) {
        run(rank, size, options, body);
        _exit(0);
      }
      pids_.push_back(pid);
    }
  }
  ~ForkedRanks() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) end(static_cast<int>(rank), SIGKILL);
    munmap(board_, sizeof(Board));
  }
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;

  Board& board() { return *board_; }
  pid_t pid(int rank) const { return pids_[static_cast<size_t>(rank)]; }
  void end(int rank, int signal) {
    if (pids_[static_cast<size_t>(rank)] <= 0) return;
    kill(pids_[static_cast<size_t>(rank)], signal);
    waitpid(pids_[static_cast<size_t>(rank)], nullptr, 0);
    pids_[static_cast<size_t>(rank)] = 0;
  }
  bool reported(int rank) const { return board_->entries[rank].reported.load() != 0; }
  // Waits for the rank's report; empty if it takes longer than limit_s.
  std::string report(int rank, double limit_s) {
    for (double waited_s = 0; waited_s < limit_s; waited_s += 0.001) {
      if (reported(rank)) return board_->entries[rank].report;
      usleep(1000);
    }
    return "";
  }
  void wait_for_stage(int stage) {
    while (board_->stage.load() < stage) usleep(200);
  }

 private:
  void run(int rank, int size, ShmOptions options, const Body& body) {
    uint64_t round = 0;
    options.rank = rank;
    options.size = size;
    options.exchange = [&](const std::string& mine) { return board_->exchange(rank, size, ++round, mine); };
    try {
      auto transport = std::make_unique<ShmTransport>(options);
      body(rank, transport, *board_);
      board_->report(rank, "done");
    } catch (const std::exception& error) {
      board_->report(rank, error.what());
    }
  }

  Board* board_;
  std::vector<pid_t> pids_;
};

// ---- Data

// Small whole numbers: exact in every dtype, unique enough that a wrong rank, offset or order shows.
inline double value_at(int rank, size_t index) {
  return static_cast<double>((index * 5 + static_cast<size_t>(rank) * 7) % 13);
}

// One or two, so that products of eight stay exact.
inline double factor_at(int rank, size_t index) { return (index + static_cast<size_t>(rank)) % 3 == 0 ? 2 : 1; }

inline void store(void* memory, DType dtype, size_t index, double value) {
  std::byte* at = static_cast<std::byte*>(memory) + index * size_of(dtype);
  const auto put = [at](auto typed) { std::memcpy(at, &typed, sizeof typed); };
  if (dtype == DType::kInt32) return put(static_cast<int32_t>(value));
  if (dtype == DType::kInt64) return put(static_cast<int64_t>(value));
  if (dtype == DType::kUInt8) return put(static_cast<uint8_t>(static_cast<int64_t>(value)));
  kernels().pack[static_cast<int>(dtype)][static_cast<int>(DType::kFloat64)](at, &value, 1, 1.0);
}

inline double load(const void* memory, DType dtype, size_t index) {
  const std::byte* at = static_cast<const std::byte*>(memory) + index * size_of(dtype);
  const auto get = [at](auto typed) {
    std::memcpy(&typed, at, sizeof typed);
    return static_cast<double>(typed);
  };
  if (dtype == DType::kInt32) return get(int32_t{});
  if (dtype == DType::kInt64) return get(int64_t{});
  if (dtype == DType::kUInt8) return get(uint8_t{});
  double value = 0;
  kernels().pack[static_cast<int>(DType::kFloat64)][static_cast<int>(dtype)](&value, at, 1, 1.0);
  return value;
}

// kHeap: from allocate(); kOrdinary: malloc; kMixed: odd ranks ordinary.
enum class Where { kHeap, kOrdinary, kMixed };

class Buffer {
 public:
  Buffer(Transport& transport, Where where, size_t bytes) {
    if (where == Where::kHeap || (where == Where::kMixed && transport.rank() % 2 == 0)) {
      memory_ = transport.allocate(bytes);
      address_ = memory_.address;
    } else {
      ordinary_.resize(bytes + 64);
      address_ = ordinary_.data();
    }
  }
  void* address() { return address_; }

 private:
  Memory memory_;
  std::vector<std::byte> ordinary_;
  void* address_;
};

}  // namespace gpucomm::testing
