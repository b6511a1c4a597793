#include "core/trace.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <stop_token>
#include <thread>
#include <vector>

namespace gpucomm {
namespace {

TEST(ClockTest, TicksNeverGoBack) {
  uint64_t last = ticks();
  for (int i = 0; i < 10000; ++i) {
    const uint64_t now = ticks();
    ASSERT_GE(now, last);
    last = now;
  }
}

// Between two readings of the clock lies the reading of the counter, and so must its conversion, give or take 1 us.
TEST(ClockTest, TicksConvertToTheMonotonicClock) {
  for (int i = 0; i < 200; ++i) {
    const int64_t before = monotonic_ns();
    const uint64_t now = ticks();
    const int64_t after = monotonic_ns();
    const int64_t converted = TickScale::measure().to_ns(now);
    ASSERT_GE(converted, before - 1000);
    ASSERT_LE(converted, after + 1000);
    std::this_thread::yield();
  }
}

// Each reading of the counter lies between two of the clock, so this holds under any pre-emption.
TEST(ClockTest, ConversionKeepsTheLengthOfAnInterval) {
  const int64_t before_begin = monotonic_ns();
  const uint64_t begin = ticks();
  const int64_t after_begin = monotonic_ns();
  while (monotonic_ns() - after_begin < 20'000'000) {
  }
  const int64_t before_end = monotonic_ns();
  const uint64_t end = ticks();
  const int64_t after_end = monotonic_ns();
  const int64_t converted = TickScale::measure().duration_ns(static_cast<int64_t>(end - begin));
  EXPECT_GE(converted, before_end - after_begin - 2000);
  EXPECT_LE(converted, after_end - before_begin + 2000);
}

TEST(TraceTest, KeepsEveryFieldInOrder) {
  Trace trace(8);
  trace.record(TraceKind::kPack, 3, 10, 20, 4096, 7);
  trace.record(TraceKind::kWait, -1, 20, 35, uint64_t{1} << 40, 65536 + 8);
  const std::vector<TraceEvent> events = trace.snapshot();
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].kind, TraceKind::kPack);
  EXPECT_EQ(events[0].id, 3);
  EXPECT_EQ(events[0].begin_ticks, 10u);
  EXPECT_EQ(events[0].end_ticks, 20u);
  EXPECT_EQ(events[0].bytes, 4096u);
  EXPECT_EQ(events[0].iteration, 7);
  EXPECT_EQ(events[1].kind, TraceKind::kWait);
  EXPECT_EQ(events[1].id, -1);
  EXPECT_EQ(events[1].bytes, uint64_t{1} << 40);
  EXPECT_EQ(events[1].iteration, 8) << "the low 16 bits";
  EXPECT_EQ(name_of(events[1].kind), "wait");
}

TEST(TraceTest, AFullRingKeepsTheNewestOldestFirst) {
  for (const size_t capacity : {1, 4, 5, 8}) {
    Trace trace(capacity);
    size_t rounded = 1;
    while (rounded < capacity) rounded *= 2;
    for (uint64_t i = 0; i < 21; ++i) trace.record(TraceKind::kReady, static_cast<int32_t>(i), i, i, i, i);
    const std::vector<TraceEvent> events = trace.snapshot();
    ASSERT_EQ(events.size(), rounded);
    for (size_t i = 0; i < rounded; ++i) EXPECT_EQ(events[i].begin_ticks, 21 - rounded + i);
    EXPECT_EQ(trace.recorded(), 21u);
  }
}

TEST(TraceTest, ClearForgetsEverything) {
  Trace trace(4);
  trace.record(TraceKind::kReady, 0, 1, 2, 3, 4);
  trace.clear();
  EXPECT_TRUE(trace.snapshot().empty());
  EXPECT_EQ(trace.recorded(), 0u);
  trace.record(TraceKind::kReady, 9, 1, 2, 3, 4);
  ASSERT_EQ(trace.snapshot().size(), 1u);
  EXPECT_EQ(trace.snapshot()[0].id, 9);
}

TEST(TraceTest, NoEventIsLostBetweenThreads) {
  Trace trace(4096);
  std::vector<std::thread> writers;
  for (int t = 0; t < 4; ++t) {
    writers.emplace_back([&trace, t] {
      for (uint64_t i = 0; i < 1000; ++i) trace.record(TraceKind::kPack, t, i, i, i, i);
    });
  }
  for (std::thread& writer : writers) writer.join();
  const std::vector<TraceEvent> events = trace.snapshot();
  ASSERT_EQ(events.size(), 4000u);
  std::vector<uint64_t> next(4, 0);
  for (const TraceEvent& event : events) {
    ASSERT_EQ(event.begin_ticks, next[static_cast<size_t>(event.id)]++) << "each thread's events in its own order";
  }
}

// One writer laps a small ring while it is read: apart from the newest, which may be half written, and what the writer
// reached during the copy, which is dropped, events are whole.
TEST(TraceTest, ASnapshotUnderWritingHoldsNoOverwrittenEvent) {
  Trace trace(64);
  std::jthread writer([&trace](std::stop_token stop) {
    for (uint64_t i = 0; !stop.stop_requested(); ++i) {
      trace.record(TraceKind::kPack, static_cast<int32_t>(i), i, i, i, i);
      if (i % 64 == 0) std::this_thread::yield();
    }
  });
  size_t seen = 0;
  for (int round = 0; round < 2000 || seen == 0; ++round) {  // the writer may get no core for a while
    const std::vector<TraceEvent> events = trace.snapshot();
    for (size_t i = 0; i + 1 < events.size(); ++i) {
      ASSERT_EQ(events[i].end_ticks, events[i].begin_ticks);
      ASSERT_EQ(events[i].bytes, events[i].begin_ticks);
      if (i > 0) {
        ASSERT_EQ(events[i].begin_ticks, events[i - 1].begin_ticks + 1);
      }
      ++seen;
    }
    std::this_thread::yield();
  }
  EXPECT_GT(seen, 0u);
}

}  // namespace
}  // namespace gpucomm
