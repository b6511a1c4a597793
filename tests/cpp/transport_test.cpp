// What collectives compute, over shared memory and over loopback.
#include "transport/transport.h"

#include <cmath>
#include <cstdlib>
#include <new>
#include <random>

#include "core/clock.h"
#include "ranks.h"
#include "transport/transport_loopback.h"

namespace {
thread_local uint64_t allocations = 0;
}  // namespace

// Not inlined: the compiler would take malloc and free for a mismatch with new and delete.
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* address = std::malloc(bytes == 0 ? 1 : bytes)) return address;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* address) noexcept { std::free(address); }
[[gnu::noinline]] void operator delete(void* address, size_t) noexcept { std::free(address); }

namespace gpucomm::testing {
namespace {

constexpr DType kAllDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64,
                                DType::kInt32,   DType::kInt64,    DType::kUInt8};
constexpr ReduceOp kAllOps[] = {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProd};
constexpr Where kEverywhere[] = {Where::kHeap, Where::kOrdinary, Where::kMixed};

double contribution(ReduceOp op, int rank, size_t index) {
  return op == ReduceOp::kProd ? factor_at(rank, index) : value_at(rank, index);
}

double reduced(ReduceOp op, DType dtype, int size, size_t index) {
  double result = contribution(op, 0, index);
  for (int rank = 1; rank < size; ++rank) {
    const double next = contribution(op, rank, index);
    if (op == ReduceOp::kMin) result = std::min(result, next);
    if (op == ReduceOp::kMax) result = std::max(result, next);
    if (op == ReduceOp::kProd) result *= next;
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) result += next;
  }
  if (op == ReduceOp::kAvg) result = is_floating(dtype) ? result / size : std::trunc(result / size);
  if (dtype == DType::kUInt8) result = static_cast<double>(static_cast<int64_t>(result) % 256);
  return result;
}

// Averages of 16-bit types over 3 ranks round; everything else is exact.
double tolerance(ReduceOp op, DType dtype) {
  if (op != ReduceOp::kAvg || !is_floating(dtype)) return 0;
  return dtype == DType::kBFloat16 ? 0.1 : dtype == DType::kFloat16 ? 0.02 : 1e-5;
}

// One collective with its memory: fill, run, check.
class Case {
 public:
  Case(Transport& transport, Where where, const Collective& shape)
      : transport_(transport),
        shape_(shape),
        in_(transport, where, bytes(in_numel())),
        out_(transport, where, bytes(out_numel())) {
    for (size_t i = 0; i < in_numel(); ++i) store(in_address(), shape_.dtype, i, input(transport.rank(), i));
    shape_.in = in_address();
    shape_.out = out_.address();
  }

  const Collective& collective() const { return shape_; }

  void check() {
    size_t wrong = 0;
    for (size_t i = 0; i < out_numel(); ++i) {
      const double got = load(out_.address(), shape_.dtype, i);
      const double want = expected(i);
      if (std::abs(got - want) <= tolerance(shape_.op, shape_.dtype)) continue;
      if (wrong++ > 0) continue;
      ADD_FAILURE() << name_of(shape_.kind) << " " << name_of(shape_.op) << " " << name_of(shape_.dtype) << " numel "
                    << shape_.numel << " rank " << transport_.rank() << "/" << transport_.size() << ": [" << i
                    << "] is " << got << ", not " << want;
    }
    EXPECT_EQ(wrong, 0u);
  }

 private:
  bool in_place() const {
    return shape_.kind == CollectiveKind::kAllReduce || shape_.kind == CollectiveKind::kBroadcast;
  }
  void* in_address() { return in_place() ? out_.address() : in_.address(); }
  size_t bytes(size_t numel) const { return numel * size_of(shape_.dtype); }
  size_t ranks() const { return static_cast<size_t>(transport_.size()); }
  size_t in_numel() const {
    return shape_.kind == CollectiveKind::kReduceScatter ? shape_.numel * ranks() : shape_.numel;
  }
  size_t out_numel() const { return shape_.kind == CollectiveKind::kAllGather ? shape_.numel * ranks() : shape_.numel; }
  bool reduces() const {
    return shape_.kind == CollectiveKind::kAllReduce || shape_.kind == CollectiveKind::kReduceScatter;
  }
  double input(int rank, size_t index) const {
    return reduces() ? contribution(shape_.op, rank, index) : value_at(rank, index);
  }
  double expected(size_t i) const {
    switch (shape_.kind) {
      case CollectiveKind::kAllReduce:
        return reduced(shape_.op, shape_.dtype, transport_.size(), i);
      case CollectiveKind::kReduceScatter:
        return reduced(shape_.op, shape_.dtype, transport_.size(),
                       i + shape_.numel * static_cast<size_t>(transport_.rank()));
      case CollectiveKind::kAllGather:
        return value_at(static_cast<int>(i / shape_.numel), i % shape_.numel);
      default:
        return value_at(shape_.root, i);
    }
  }

  Transport& transport_;
  Collective shape_;
  Buffer in_, out_;
};

void run_and_check(Transport& transport, Where where, const Collective& shape) {
  InlineStream stream;
  Case one(transport, where, shape);
  transport.run(one.collective(), stream);
  one.check();
}

Collective shape_of(CollectiveKind kind, size_t numel, DType dtype = DType::kFloat32, ReduceOp op = ReduceOp::kSum,
                    int root = 0) {
  Collective shape{};
  shape.kind = kind;
  shape.dtype = dtype;
  shape.op = op;
  shape.root = root;
  shape.numel = numel;
  return shape;
}

constexpr CollectiveKind kDataKinds[] = {CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter,
                                         CollectiveKind::kAllGather, CollectiveKind::kBroadcast};

class ShmRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, ShmRanks, ::testing::Values(1, 2, 3, 4, 8));

TEST_P(ShmRanks, EveryCollectiveIsRightAtEverySizeInEveryMemory) {
  run_ranks(GetParam(), small_options(), [](int, ShmTransport& transport) {
    for (const Where where : kEverywhere) {
      // 20, 21: around what fits a descriptor; 1024, 1025: around a data slot and a piece; then several rounds.
      for (const size_t numel : {0, 1, 7, 20, 21, 1000, 1024, 1025, 4097, 30011}) {
        for (const CollectiveKind kind : kDataKinds) {
          run_and_check(transport, where, shape_of(kind, numel, DType::kFloat32, ReduceOp::kSum, transport.size() - 1));
        }
      }
    }
  });
}

TEST_P(ShmRanks, ABarrierLetsNobodyPassEarly) {
  std::atomic<int> arrived{0};
  const int size = GetParam();
  run_ranks(size, small_options(), [&](int rank, ShmTransport& transport) {
    InlineStream stream;
    for (int round = 1; round <= 50; ++round) {
      if ((round + rank) % 7 == 0) usleep(300);
      arrived.fetch_add(1);
      transport.run(shape_of(CollectiveKind::kBarrier, 0), stream);
      EXPECT_GE(arrived.load(), round * size);
    }
  });
}

TEST(ShmTransport, EveryOpAndDtypeIsRight) {
  run_ranks(3, small_options(), [](int, ShmTransport& transport) {
    for (const Where where : kEverywhere) {
      for (const DType dtype : kAllDTypes) {
        for (const ReduceOp op : kAllOps) {
          for (const size_t numel : {7, 300, 5000}) {
            run_and_check(transport, where, shape_of(CollectiveKind::kAllReduce, numel, dtype, op));
            run_and_check(transport, where, shape_of(CollectiveKind::kReduceScatter, numel, dtype, op));
          }
        }
        run_and_check(transport, where, shape_of(CollectiveKind::kAllGather, 2501, dtype));
        run_and_check(transport, where, shape_of(CollectiveKind::kBroadcast, 2501, dtype, ReduceOp::kSum, 1));
      }
    }
  });
}

TEST(ShmTransport, SixteenRanksOnFewCoresAreRight) {
  run_ranks(16, small_options(), [](int, ShmTransport& transport) {
    for (const size_t numel : {1, 1000, 9000}) {
      for (const CollectiveKind kind : kDataKinds) run_and_check(transport, Where::kMixed, shape_of(kind, numel));
    }
  });
}

TEST(ShmTransport, DefaultBuffersAreRight) {
  ShmOptions options;
  options.heap_bytes = size_t{64} << 20;
  run_ranks(2, options, [](int, ShmTransport& transport) {
    for (const Where where : kEverywhere) {
      // Gathered, pushed through data slots, staged in one and in several rounds.
      for (const size_t numel : {1000, 10000, 20000, 700001}) {
        for (const CollectiveKind kind : kDataKinds) run_and_check(transport, where, shape_of(kind, numel));
      }
    }
  });
}

TEST(ShmTransport, ScaleMultipliesEveryContribution) {
  run_ranks(2, small_options(), [](int rank, ShmTransport& transport) {
    InlineStream stream;
    for (const size_t numel : {5, 500, 5000}) {
      for (const Where where : kEverywhere) {
        Buffer buffer(transport, where, numel * 4);
        for (size_t i = 0; i < numel; ++i) store(buffer.address(), DType::kFloat32, i, value_at(rank, i));
        Collective c = shape_of(CollectiveKind::kAllReduce, numel, DType::kFloat32, ReduceOp::kAvg);
        c.scale = 4;
        c.in = c.out = buffer.address();
        transport.run(c, stream);
        for (size_t i = 0; i < numel; ++i) {
          ASSERT_EQ(load(buffer.address(), DType::kFloat32, i), 2 * (value_at(0, i) + value_at(1, i))) << i;
        }
      }
    }
  });
}

TEST(ShmTransport, OwnShardMayBeInPlace) {
  run_ranks(3, small_options(), [](int rank, ShmTransport& transport) {
    InlineStream stream;
    for (const Where where : kEverywhere) {
      for (const size_t numel : {6, 300, 5000}) {
        Buffer buffer(transport, where, 3 * numel * 4);
        float* data = static_cast<float*>(buffer.address());
        float* shard = data + static_cast<size_t>(rank) * numel;
        for (size_t i = 0; i < 3 * numel; ++i) data[i] = static_cast<float>(value_at(rank, i));
        Collective c = shape_of(CollectiveKind::kReduceScatter, numel);
        c.in = data;
        c.out = shard;
        transport.run(c, stream);
        c.kind = CollectiveKind::kAllGather;
        c.in = shard;
        c.out = data;
        transport.run(c, stream);
        for (size_t i = 0; i < 3 * numel; ++i) {
          ASSERT_EQ(data[i], static_cast<float>(reduced(ReduceOp::kSum, DType::kFloat32, 3, i))) << i;
        }
      }
    }
  });
}

TEST_P(ShmRanks, ManyOperationsInFlightOutrunTheRing) {
  run_ranks(GetParam(), small_options(), [](int rank, ShmTransport& transport) {
    std::minstd_rand random(static_cast<unsigned>(rank) + 1);
    InlineStream stream;
    std::vector<std::unique_ptr<Case>> cases;
    for (size_t i = 0; i < 150; ++i) {
      const size_t numel = i % 5 == 4 ? 3000 + i : i % 3 == 0 ? i % 20 : 100 + i;
      const Where where = kEverywhere[i % 3];
      cases.push_back(std::make_unique<Case>(
          transport, where,
          shape_of(kDataKinds[i % 4], numel, DType::kFloat32, ReduceOp::kSum, static_cast<int>(i) % transport.size())));
      transport.start(cases.back()->collective(), stream);
      if (random() % 9 == 0) usleep(static_cast<useconds_t>(random() % 400));
      if (random() % 3 == 0) stream.progress();
    }
    stream.synchronize(stream.record());
    for (const auto& one : cases) one->check();
  });
}

// Rank 0 completes all that is in the ring (small contributions need no second wait) while rank 1 has published but not
// read them: room in the ring then comes from rank 1 alone.
TEST(ShmTransport, ARingFullOfCompletedOperationsGoesOnOnceThePeerHasReadThem) {
  std::atomic<int> stage{0};
  run_ranks(2, small_options(), [&](int rank, ShmTransport& transport) {
    InlineStream stream;
    std::vector<std::unique_ptr<Case>> cases;
    const auto start = [&](int count) {
      for (int i = 0; i < count; ++i) {
        cases.push_back(std::make_unique<Case>(transport, Where::kHeap, shape_of(CollectiveKind::kAllReduce, 4)));
        transport.start(cases.back()->collective(), stream);
      }
    };
    if (rank == 0) {
      while (stage.load() < 1) usleep(100);
      start(100);
      stream.progress();
      EXPECT_TRUE(stream.query({32}));
      EXPECT_FALSE(stream.query({33}));
      stage.store(2);
    } else {
      start(32);
      stage.store(1);
      while (stage.load() < 2) usleep(100);
      usleep(20000);  // rank 0 should be waiting by now
      start(68);
    }
    stream.synchronize(stream.record());
    for (const auto& one : cases) one->check();
  });
}

TEST(ShmTransport, StartDoesNotWaitForPeers) {
  std::atomic<bool> started{false};
  run_ranks(2, small_options(), [&](int rank, ShmTransport& transport) {
    InlineStream stream;
    std::vector<std::unique_ptr<Case>> cases;
    if (rank == 1) {
      while (!started.load()) usleep(100);  // rank 0 gets here only if start() returned
    }
    for (int i = 0; i < 100; ++i) {
      cases.push_back(std::make_unique<Case>(transport, Where::kHeap, shape_of(CollectiveKind::kAllReduce, 500)));
      transport.start(cases.back()->collective(), stream);
      stream.progress();
    }
    if (rank == 0) {
      EXPECT_FALSE(stream.query({1}));
      started.store(true);
    }
    stream.synchronize(stream.record());
    for (const auto& one : cases) one->check();
  });
}

TEST(ShmTransport, TwoRunsAndAllRanksAreBitwiseEqual) {
  constexpr size_t kNumel = 20000;
  std::vector<std::vector<float>> results(8);
  for (size_t run = 0; run < 2; ++run) {
    run_ranks(4, small_options(), [&](int rank, ShmTransport& transport) {
      std::minstd_rand random(static_cast<unsigned>(rank) + 77);
      std::normal_distribution<float> normal;
      Buffer buffer(transport, run == 0 ? Where::kHeap : Where::kOrdinary, kNumel * 4);
      float* data = static_cast<float*>(buffer.address());
      for (size_t i = 0; i < kNumel; ++i) data[i] = normal(random) * 1e3f;
      Collective c = shape_of(CollectiveKind::kAllReduce, kNumel);
      c.in = c.out = data;
      InlineStream stream;
      transport.run(c, stream);
      results[run * 4 + static_cast<size_t>(rank)].assign(data, data + kNumel);
    });
  }
  for (size_t i = 1; i < results.size(); ++i) EXPECT_EQ(results[0], results[i]) << i;
}

TEST(ShmTransport, RunAllocatesNothing) {
  run_ranks(2, small_options(), [](int, ShmTransport& transport) {
    InlineStream stream;
    for (const size_t numel : {1, 500, 5000}) {
      for (const Where where : kEverywhere) {
        Case one(transport, where, shape_of(CollectiveKind::kAllReduce, numel));
        transport.run(one.collective(), stream);
        const uint64_t before = allocations;
        for (int i = 0; i < 50; ++i) transport.run(one.collective(), stream);
        EXPECT_EQ(allocations, before);
      }
    }
  });
}

TEST(ShmTransport, RunKeepsTheOrderOfTheStream) {
  struct Late final : Task {
    bool advance() override { return ++calls > 3; }
    void wait() override {}
    int calls = 0;
  };
  run_ranks(2, small_options(), [](int, ShmTransport& transport) {
    InlineStream stream;
    const auto late = std::make_shared<Late>();
    stream.enqueue(late);
    Case one(transport, Where::kHeap, shape_of(CollectiveKind::kAllReduce, 10));
    transport.run(one.collective(), stream);
    EXPECT_GT(late->calls, 3);
    one.check();
  });
}

TEST(ShmTransport, MistakesOfTheCallerLeaveItUsable) {
  run_ranks(2, small_options(), [](int, ShmTransport& transport) {
    InlineStream stream;
    Collective c = shape_of(CollectiveKind::kAllReduce, 5);
    EXPECT_THROW(transport.run(c, stream), UsageError);
    float a[5] = {}, b[5] = {};
    c.in = a;
    c.out = b;
    EXPECT_THROW(transport.run(c, stream), UsageError);
    c = shape_of(CollectiveKind::kBroadcast, 5, DType::kFloat32, ReduceOp::kSum, 2);
    c.out = a;
    EXPECT_THROW(transport.run(c, stream), UsageError);
    for (const CollectiveKind kind : {CollectiveKind::kAllGather, CollectiveKind::kReduceScatter}) {
      float whole[10] = {};
      c = shape_of(kind, 5);
      c.in = kind == CollectiveKind::kAllGather ? whole + 1 : whole;
      c.out = kind == CollectiveKind::kAllGather ? whole : whole + 1;
      EXPECT_THROW(transport.run(c, stream), UsageError);
    }
    run_and_check(transport, Where::kHeap, shape_of(CollectiveKind::kAllReduce, 5));
  });
}

TEST(Loopback, ComputesWhatEqualRanksWould) {
  LoopbackOptions options;
  options.size = 3;
  LoopbackTransport transport(options);
  EXPECT_EQ(transport.name(), "loopback");
  InlineStream stream;
  for (const size_t numel : {0, 1, 7, 1000}) {
    std::vector<float> x(numel * 3), y(numel * 3);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(value_at(0, i));
    Collective c = shape_of(CollectiveKind::kReduceScatter, numel);
    c.in = x.data();
    c.out = y.data();
    transport.run(c, stream);
    for (size_t i = 0; i < numel; ++i) ASSERT_EQ(y[i], 3 * x[i]);
    c.kind = CollectiveKind::kAllGather;
    transport.run(c, stream);
    for (size_t i = 0; i < 3 * numel; ++i) ASSERT_EQ(y[i], x[i % numel]);
    c.kind = CollectiveKind::kAllReduce;
    c.in = c.out = y.data();
    c.op = ReduceOp::kProd;
    transport.run(c, stream);
    for (size_t i = 0; i < numel; ++i) ASSERT_EQ(y[i], x[i] * x[i] * x[i]);
    c.kind = CollectiveKind::kBroadcast;
    c.root = 2;
    transport.run(c, stream);
    for (size_t i = 0; i < numel; ++i) ASSERT_EQ(y[i], x[i] * x[i] * x[i]);
  }
  transport.run(shape_of(CollectiveKind::kBarrier, 0), stream);
}

TEST(Loopback, CollectivesFollowOneAnotherOnTheLink) {
  LoopbackOptions options;
  options.size = 2;
  options.latency_s = 1e-3;
  options.bytes_per_s = 1e6;
  LoopbackTransport transport(options);
  InlineStream stream;
  std::vector<float> x(1000, 1.0f);  // 4 ms on the wire
  Collective c = shape_of(CollectiveKind::kAllReduce, x.size());
  c.in = c.out = x.data();
  const int64_t begin_ns = monotonic_ns();
  transport.start(c, stream);
  transport.start(c, stream);
  stream.progress();
  EXPECT_EQ(x[0], 1.0f);  // not before its time
  stream.synchronize(stream.record());
  EXPECT_GE(monotonic_ns() - begin_ns, 10'000'000);
  EXPECT_EQ(x[0], 4.0f);
}

TEST(Loopback, RefusesWhatItCannotBe) {
  LoopbackOptions options;
  options.size = 0;
  EXPECT_THROW(LoopbackTransport{options}, UsageError);
  options.size = 2;
  options.latency_s = -1;
  EXPECT_THROW(LoopbackTransport{options}, UsageError);
  options.latency_s = 0;
  options.bytes_per_s = 0;
  EXPECT_THROW(LoopbackTransport{options}, UsageError);
}

TEST(Loopback, AbortEndsIt) {
  LoopbackTransport transport({});
  transport.abort("enough");
  InlineStream stream;
  EXPECT_THROW(transport.run(shape_of(CollectiveKind::kBarrier, 0), stream), PeerFailed);
}

}  // namespace
}  // namespace gpucomm::testing
