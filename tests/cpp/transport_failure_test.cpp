// What ranks raise when one of them dies, stops, leaves, gives up or does something else; and what remains afterwards.
#include <dirent.h>
#include <signal.h>

#include <chrono>
#include <set>

#include "ranks.h"
#include "transport/shm_region.h"

namespace gpucomm::testing {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

Collective all_reduce(void* memory, size_t numel) {
  Collective c{};
  c.kind = CollectiveKind::kAllReduce;
  c.dtype = DType::kFloat32;
  c.numel = numel;
  c.in = c.out = memory;
  return c;
}

void reduce_once(ShmTransport& transport, size_t numel = 4) {
  std::vector<float> x(numel, 1.0f);
  InlineStream stream;
  transport.run(all_reduce(x.data(), numel), stream);
}

template <typename Error>
const Error* as(const std::exception_ptr& thrown) {
  static thread_local std::exception_ptr kept;
  kept = thrown;
  if (!thrown) return nullptr;
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& error) {
    return &error;
  } catch (...) {
    return nullptr;
  }
}

std::set<std::string> names_in_dev_shm() {
  std::set<std::string> names;
  DIR* folder = opendir("/dev/shm");
  if (folder == nullptr) return names;
  while (const dirent* entry = readdir(folder)) {
    if (std::string(entry->d_name).rfind("gpucomm", 0) == 0) names.insert(entry->d_name);
  }
  closedir(folder);
  return names;
}

// ---- Collectives that differ

struct Difference {
  const char* what;
  void (*change)(Collective&);
  const char* message;
};

class ShmMismatch : public ::testing::TestWithParam<Difference> {};

INSTANTIATE_TEST_SUITE_P(
    Fields, ShmMismatch,
    ::testing::Values(Difference{"numel", [](Collective& c) { c.numel -= 1; },
                                 "all_reduce #2: rank 5 has 4096 float32 sum, rank 7 has 4095 float32 sum"},
                      Difference{"dtype", [](Collective& c) { c.dtype = DType::kInt32; },
                                 "all_reduce #2: rank 5 has 4096 float32 sum, rank 7 has 4096 int32 sum"},
                      Difference{"op", [](Collective& c) { c.op = ReduceOp::kMax; },
                                 "all_reduce #2: rank 5 has 4096 float32 sum, rank 7 has 4096 float32 max"},
                      Difference{
                          "scale", [](Collective& c) { c.scale = 0.5; },
                          "all_reduce #2: rank 5 has 4096 float32 sum, rank 7 has 4096 float32 sum scaled by 0.500000"},
                      Difference{"kind",
                                 [](Collective& c) {
                                   c.kind = CollectiveKind::kBroadcast;
                                   c.root = 2;
                                 },
                                 "operation #2: rank 5 has all_reduce of 4096 float32 sum, rank 7 has broadcast of "
                                 "4096 float32 from rank 7"}),
    [](const auto& param) { return std::string(param.param.what); });

TEST_P(ShmMismatch, IsNamedAlikeOnEveryRank) {
  ShmOptions options = small_options();
  options.global_ranks = {5, 6, 7};
  const auto thrown = run_ranks_catching(3, options, [&](int rank, std::unique_ptr<ShmTransport>& transport) {
    reduce_once(*transport);
    std::vector<float> x(4096);
    Collective c = all_reduce(x.data(), x.size());
    if (rank == 2) GetParam().change(c);
    InlineStream stream;
    try {
      transport->run(c, stream);
    } catch (const CollectiveMismatch& first) {
      // Dead from then on: the same again, at once, and that it is dead.
      InlineStream other;
      try {
        transport->start(c, other);
        ADD_FAILURE() << "start() on a dead transport";
      } catch (const CollectiveMismatch& second) {
        EXPECT_EQ(std::string("this communicator is dead since an earlier operation: ") + first.what(), second.what());
      }
      throw;
    }
  });
  for (const auto& error : thrown) {
    ASSERT_NE(as<CollectiveMismatch>(error), nullptr) << text_of(error);
    EXPECT_EQ(text_of(error), GetParam().message);
  }
}

// ---- A peer that leaves

TEST(ShmFailure, AbortReachesEveryPeerWithItsReason) {
  ShmOptions options = small_options();
  options.global_ranks = {3, 4, 5};
  const auto begin = Clock::now();
  const auto thrown = run_ranks_catching(3, options, [](int rank, std::unique_ptr<ShmTransport>& transport) {
    if (rank == 1) {
      usleep(20000);
      transport->abort("loss is NaN");
      transport->abort("second thoughts");
    }
    reduce_once(*transport, 3000);
  });
  EXPECT_LT(seconds_since(begin), 2);
  for (const auto& error : thrown) {
    const PeerFailed* failed = as<PeerFailed>(error);
    ASSERT_NE(failed, nullptr) << text_of(error);
    EXPECT_EQ(failed->rank, 4);
    EXPECT_EQ(failed->reason, "loss is NaN");
  }
}

TEST(ShmFailure, AClosedPeerIsNamed) {
  const auto begin = Clock::now();
  const auto thrown = run_ranks_catching(3, small_options(), [](int rank, std::unique_ptr<ShmTransport>& transport) {
    reduce_once(*transport);
    if (rank == 2) {
      transport.reset();
    } else {
      reduce_once(*transport);
    }
  });
  EXPECT_LT(seconds_since(begin), 2);
  EXPECT_FALSE(thrown[2]);
  for (int rank = 0; rank < 2; ++rank) {
    const PeerFailed* failed = as<PeerFailed>(thrown[static_cast<size_t>(rank)]);
    ASSERT_NE(failed, nullptr) << text_of(thrown[static_cast<size_t>(rank)]);
    EXPECT_EQ(failed->rank, 2);
    EXPECT_NE(failed->reason.find("closed"), std::string::npos) << failed->reason;
  }
}

TEST(ShmFailure, WhatAPeerGaveBeforeItClosedStillCounts) {
  for (int round = 0; round < 30; ++round) {
    run_ranks(2, small_options(), [&](int rank, ShmTransport& transport) {
      if (rank == round % 2) usleep(3000);
      reduce_once(transport, round % 3 == 0 ? 4 : 500);
    });
  }
}

TEST(ShmFailure, ClosingDuringAnOperationFailsThePeersAndTheTask) {
  std::atomic<bool> closed{false};
  const auto thrown = run_ranks_catching(2, small_options(), [&](int rank, std::unique_ptr<ShmTransport>& transport) {
    if (rank == 1) {
      while (!closed.load()) usleep(100);
      reduce_once(*transport);
      return;
    }
    std::vector<float> x(4);
    InlineStream stream;
    transport->start(all_reduce(x.data(), 4), stream);
    transport.reset();
    closed.store(true);
    stream.synchronize(stream.record());
  });
  for (const auto& error : thrown) {
    ASSERT_NE(as<PeerFailed>(error), nullptr) << text_of(error);
    EXPECT_EQ(as<PeerFailed>(error)->rank, 0);
    EXPECT_NE(text_of(error).find("closed its transport during all_reduce #1"), std::string::npos) << text_of(error);
  }
}

TEST(ShmFailure, AMissingRankIsNamedAtTheTimeout) {
  ShmOptions options = small_options();
  options.global_ranks = {10, 11, 12};
  options.timeout_s = 0.4;
  std::atomic<int> finished{0};
  const auto thrown = run_ranks_catching(3, options, [&](int rank, std::unique_ptr<ShmTransport>& transport) {
    if (rank == 1) {
      while (finished.load() < 2) usleep(1000);
      reduce_once(*transport);  // late: learns that the others have given up
      return;
    }
    const auto begin = Clock::now();
    try {
      reduce_once(*transport);
    } catch (...) {
      EXPECT_GT(seconds_since(begin), 0.3);
      EXPECT_LT(seconds_since(begin), 1.5);
      finished.fetch_add(1);
      throw;
    }
  });
  for (const int rank : {0, 2}) {
    const CommTimeout* timeout = as<CommTimeout>(thrown[static_cast<size_t>(rank)]);
    ASSERT_NE(timeout, nullptr) << text_of(thrown[static_cast<size_t>(rank)]);
    EXPECT_EQ(timeout->missing, std::vector<int>{11});
    EXPECT_EQ(text_of(thrown[static_cast<size_t>(rank)]),
              "all_reduce #1 of 4 float32: rank 11 did not come within 0.4 s");
  }
  ASSERT_NE(as<PeerFailed>(thrown[1]), nullptr) << text_of(thrown[1]);
}

TEST(ShmFailure, AKilledProcessIsNoticedWithinASecond) {
  SKIP_WITHOUT_FORK();
  for (const size_t numel : {size_t{4}, size_t{200000}}) {
    ForkedRanks ranks(3, small_options(), [numel](int rank, std::unique_ptr<ShmTransport>& transport, Board& board) {
      for (int i = 0; i < 20; ++i) reduce_once(*transport, numel);
      if (rank == 1) {
        board.stage.store(1);
        for (;;) pause();
      }
      reduce_once(*transport, numel);
    });
    ranks.wait_for_stage(1);
    usleep(100000);
    EXPECT_FALSE(ranks.reported(0));
    const auto begin = Clock::now();
    const std::string pid = std::to_string(ranks.pid(1));
    ranks.end(1, SIGKILL);
    for (const int rank : {0, 2}) {
      const std::string report = ranks.report(rank, 5);
      EXPECT_NE(report.find("rank 1 failed: process " + pid + " ended"), std::string::npos) << report;
    }
    EXPECT_LT(seconds_since(begin), 1.0);
  }
}

TEST(ShmFailure, AStoppedProcessIsNamedAtTheTimeout) {
  SKIP_WITHOUT_FORK();
  ShmOptions options = small_options();
  options.timeout_s = 0.6;
  ForkedRanks ranks(3, options, [](int rank, std::unique_ptr<ShmTransport>& transport, Board& board) {
    for (int i = 0; i < 20; ++i) reduce_once(*transport, 5000);
    if (rank == 2) {
      board.stage.store(1);
      usleep(100000);
    }
    for (;;) reduce_once(*transport, 5000);
  });
  ranks.wait_for_stage(1);
  kill(ranks.pid(2), SIGSTOP);
  for (const int rank : {0, 1}) {
    const std::string report = ranks.report(rank, 5);
    EXPECT_NE(report.find("rank 2 did not come within 0.6 s"), std::string::npos) << report;
  }
  kill(ranks.pid(2), SIGCONT);
  EXPECT_NE(ranks.report(2, 5).find("failed: it gave up on this rank"), std::string::npos) << ranks.report(2, 0);
}

// ---- The embedder

class CountingEmbedder final : public Embedder {
 public:
  void before_blocking() override {
    EXPECT_FALSE(blocking);
    blocking = true;
  }
  void after_blocking() override {
    EXPECT_TRUE(blocking);
    blocking = false;
  }
  void check_interrupt() override {
    EXPECT_FALSE(blocking);
    ++checks;
    if (interrupt.load()) throw std::domain_error("interrupted by the user");
  }
  bool blocking = false;
  std::atomic<int> checks{0};
  std::atomic<bool> interrupt{false};
};

TEST(ShmFailure, AnInterruptEndsTheWaitOnAllRanks) {
  CountingEmbedder embedders[2];
  std::atomic<bool> over{false};
  ThreadExchange exchange(2);
  std::exception_ptr thrown[2];
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ShmOptions options = small_options();
      options.rank = rank;
      options.size = 2;
      options.embedder = &embedders[rank];
      options.exchange = [&, rank](const std::string& mine) { return exchange(rank, mine); };
      try {
        ShmTransport transport(options);
        if (rank == 1) {
          while (!over.load()) usleep(1000);
        }
        reduce_once(transport);
      } catch (...) {
        thrown[rank] = std::current_exception();
        over.store(true);
      }
    });
  }
  while (embedders[0].checks.load() < 2) usleep(1000);
  embedders[0].interrupt.store(true);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(text_of(thrown[0]), "interrupted by the user");
  EXPECT_FALSE(embedders[0].blocking);
  ASSERT_NE(as<PeerFailed>(thrown[1]), nullptr) << text_of(thrown[1]);
  EXPECT_NE(text_of(thrown[1]).find("rank 0 failed: it was interrupted"), std::string::npos) << text_of(thrown[1]);
}

// ---- Memory

TEST(ShmMemory, IsZeroAlignedAndComesBack) {
  run_ranks(1, small_options(), [](int, ShmTransport& transport) {
    EXPECT_THROW(transport.allocate(size_t{17} << 20), UsageError);
    for (int round = 0; round < 5; ++round) {
      // Two of these would not fit: the block must come back, and be zero again.
      const Memory memory = transport.allocate(size_t{10} << 20);
      const auto* bytes = static_cast<const unsigned char*>(memory.address);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes) % 4096, 0u);
      EXPECT_TRUE(std::all_of(bytes, bytes + memory.bytes, [](unsigned char b) { return b == 0; }));
      std::memset(memory.address, 0xff, memory.bytes);
    }
    std::vector<Memory> blocks;
    for (int i = 0; i < 8; ++i) blocks.push_back(transport.allocate(size_t{2} << 20));
    EXPECT_THROW(transport.allocate(1), UsageError);
    for (const int i : {1, 3, 2, 0, 7, 5, 6, 4}) blocks[static_cast<size_t>(i)] = {};
    transport.allocate(size_t{16} << 20);
  });
}

TEST(ShmMemory, OutlivesTheTransport) {
  std::vector<Memory> kept(2);
  run_ranks(2, small_options(), [&](int rank, ShmTransport& transport) {
    kept[static_cast<size_t>(rank)] = transport.allocate(4000);
    float* x = static_cast<float*>(kept[static_cast<size_t>(rank)].address);
    std::fill(x, x + 1000, static_cast<float>(rank + 1));
    InlineStream stream;
    transport.run(all_reduce(x, 1000), stream);
  });
  for (const Memory& memory : kept) EXPECT_EQ(static_cast<float*>(memory.address)[999], 3.0f);
}

TEST(ShmMemory, AForkedChildLeavesItsParentAlone) {
  SKIP_WITHOUT_FORK();
  ForkedRanks ranks(2, small_options(), [](int rank, std::unique_ptr<ShmTransport>& transport, Board&) {
    Memory memory = transport->allocate(8000);
    float* x = static_cast<float*>(memory.address);
    std::fill(x, x + 2000, static_cast<float>(rank + 1));
    const pid_t child = fork();
    if (child == 0) {
      InlineStream stream;
      bool refused = false;
      try {
        transport->run(all_reduce(x, 2000), stream);
      } catch (const UsageError&) {
        refused = true;
      }
      std::fill(x, x + 2000, 99.0f);  // to a copy of its own
      transport->abort("a child does not speak for its parent");
      memory = {};
      transport.reset();
      _exit(refused ? 0 : 1);
    }
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) throw std::runtime_error("the child could use the transport");
    if (x[0] != static_cast<float>(rank + 1)) throw std::runtime_error("the child wrote to its parent's memory");
    InlineStream stream;
    for (int i = 0; i < 100; ++i) transport->run(all_reduce(x, 2000), stream);
    transport->run(all_reduce(x, 0), stream);
    if (x[1999] != x[0] || x[0] == 0) throw std::runtime_error("wrong result after the fork");
  });
  EXPECT_EQ(ranks.report(0, 10), "done");
  EXPECT_EQ(ranks.report(1, 10), "done");
}

// ---- The handshake

TEST(ShmHandshake, ForkedProcessesReduce) {
  SKIP_WITHOUT_FORK();
  for (const RegionKind kind : {RegionKind::kMemfd, RegionKind::kPosix}) {
    const std::set<std::string> before = names_in_dev_shm();
    ShmOptions options = small_options();
    options.kind = kind;
    ForkedRanks ranks(4, options, [](int rank, std::unique_ptr<ShmTransport>& transport, Board& board) {
      InlineStream stream;
      for (const size_t numel : {size_t{1}, size_t{1000}, size_t{100000}}) {
        const Memory memory = transport->allocate(numel * 4);
        std::vector<float> ordinary(numel);
        for (float* x : {static_cast<float*>(memory.address), ordinary.data()}) {
          for (size_t i = 0; i < numel; ++i) x[i] = static_cast<float>(value_at(rank, i));
          transport->run(all_reduce(x, numel), stream);
          for (size_t i = 0; i < numel; ++i) {
            float want = 0;
            for (int peer = 0; peer < 4; ++peer) want += static_cast<float>(value_at(peer, i));
            if (x[i] != want) throw std::runtime_error("wrong result at " + std::to_string(i));
          }
        }
      }
      board.report(rank, "done");
      for (;;) pause();
    });
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(ranks.report(rank, 20), "done");
    EXPECT_EQ(names_in_dev_shm(), before);  // while the ranks live: so nothing is left if they are killed
  }
}

TEST(ShmHandshake, WhoCouldNotOpenWhatIsToldToAll) {
  ThreadExchange exchange(3);
  std::vector<std::thread> threads;
  std::vector<std::string> texts(3);
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      ShmOptions options = small_options();
      options.rank = rank;
      options.size = 3;
      options.global_ranks = {4, 5, 6};
      options.exchange = [&exchange, rank](const std::string& mine) {
        auto all = exchange(rank, mine);
        // Rank 1 hears of rank 2 with one bit of the nonce wrong: as if it had opened something else.
        if (rank == 1 && mine.size() > 256 && all[2].size() > 256) {
          const size_t nonce_at = all[2].size() - 256 - sizeof(shm::Layout) - sizeof(Nonce);
          all[2][nonce_at] = static_cast<char>(all[2][nonce_at] ^ 1);
        }
        return all;
      };
      try {
        ShmTransport transport(options);
        ADD_FAILURE() << "constructed";
      } catch (const TransportUnavailable& error) {
        texts[static_cast<size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_NE(texts[0].find("rank 5 could not open the memory of rank 6"), std::string::npos) << texts[0];
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0], texts[2]);
  EXPECT_TRUE(names_in_dev_shm().empty());
}

TEST(ShmHandshake, DifferentBufferSizesAreRefusedByAll) {
  ThreadExchange exchange(2);
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ShmOptions options = small_options();
      options.rank = rank;
      options.size = 2;
      options.slot_bytes = rank == 0 ? 4096 : 8192;
      options.exchange = [&exchange, rank](const std::string& mine) { return exchange(rank, mine); };
      try {
        ShmTransport transport(options);
      } catch (const TransportUnavailable&) {
        refused.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(refused.load(), 2);
}

TEST(ShmHandshake, LeavesNoDescriptorsBehind) {
  const auto open_descriptors = [] {
    DIR* folder = opendir("/proc/self/fd");
    int count = 0;
    while (readdir(folder) != nullptr) ++count;
    closedir(folder);
    return count;
  };
  const int before = open_descriptors();
  for (int round = 0; round < 5; ++round) {
    run_ranks(3, small_options(), [](int, ShmTransport& transport) { reduce_once(transport, 2000); });
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(ShmHandshake, ImpossibleRanksAreUsageErrors) {
  for (const auto& [rank, size] : {std::pair{0, 0}, std::pair{2, 2}, std::pair{-1, 2}, std::pair{0, 257}}) {
    ShmOptions options = small_options();
    options.rank = rank;
    options.size = size;
    EXPECT_THROW(ShmTransport{options}, UsageError) << rank << "/" << size;
  }
}

}  // namespace
}  // namespace gpucomm::testing
