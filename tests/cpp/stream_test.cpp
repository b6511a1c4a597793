#include "core/stream.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "core/error.h"

namespace gpucomm {
namespace {

using Log = std::vector<std::string>;

// Complete after `waits_needed` waits; advance() alone gets it nowhere before that.
class ScriptedTask final : public Task {
 public:
  ScriptedTask(Log& log, std::string name, int waits_needed = 0)
      : log_(log), name_(std::move(name)), waits_needed_(waits_needed) {}

  bool advance() override {
    if (fails_in_advance) throw StepFailed(name_ + " failed");
    if (waits_needed_ > 0) return false;
    log_.push_back(name_);
    return true;
  }
  void wait() override {
    if (fails_in_wait) throw CommTimeout({1}, 0.5, name_);
    log_.push_back("wait " + name_);
    --waits_needed_;
  }

  bool fails_in_advance = false;
  bool fails_in_wait = false;

 private:
  Log& log_;
  std::string name_;
  int waits_needed_;
};

class StreamTest : public testing::Test {
 protected:
  std::shared_ptr<ScriptedTask> add(const std::string& name, int waits_needed = 0) {
    auto task = std::make_shared<ScriptedTask>(log, name, waits_needed);
    stream.enqueue(task);
    return task;
  }
  Log log;
  InlineStream stream;
};

TEST_F(StreamTest, EnqueueRunsNothing) {
  add("a");
  EXPECT_TRUE(log.empty());
  EXPECT_FALSE(stream.query(stream.record()));
}

TEST_F(StreamTest, AnEventOfAnEmptyStreamIsComplete) {
  const Event event = stream.record();
  EXPECT_TRUE(stream.query(event));
  stream.synchronize(event);
}

TEST_F(StreamTest, ProgressRunsInOrderUpToTheFirstTaskThatWouldWait) {
  add("a");
  add("b", 1);
  add("c");
  stream.progress();
  EXPECT_EQ(log, (Log{"a"}));
  stream.progress();
  EXPECT_EQ(log, (Log{"a"})) << "progress never waits, and nothing overtakes";
}

TEST_F(StreamTest, SynchronizeWaitsForWhatCameBeforeTheEventOnly) {
  add("a", 2);
  add("b");
  const Event event = stream.record();
  add("c");
  const Event last = stream.record();
  stream.synchronize(event);
  EXPECT_EQ(log, (Log{"wait a", "wait a", "a", "b"}));
  EXPECT_TRUE(stream.query(event));
  EXPECT_FALSE(stream.query(last));
  stream.synchronize(last);
  EXPECT_EQ(log.back(), "c");
}

TEST_F(StreamTest, ACompletedTaskIsReleased) {
  std::weak_ptr<ScriptedTask> task = add("a");
  stream.progress();
  EXPECT_TRUE(task.expired());
}

TEST_F(StreamTest, AFailureInProgressIsThrownAgainByEveryLaterCall) {
  add("a");
  add("b")->fails_in_advance = true;
  std::weak_ptr<ScriptedTask> after = add("c");
  const Event event = stream.record();
  EXPECT_THROW(stream.progress(), StepFailed);
  EXPECT_EQ(log, (Log{"a"}));
  EXPECT_TRUE(after.expired()) << "work behind the failure is dropped";
  EXPECT_FALSE(stream.query(event)) << "dropped work is not complete";
  EXPECT_THROW(stream.progress(), StepFailed);
  EXPECT_THROW(stream.synchronize(event), StepFailed);
  EXPECT_THROW(add("d"), StepFailed);
}

TEST_F(StreamTest, AFailureWhileWaitingKeepsItsTypeAndContents) {
  add("bucket 3", 1)->fails_in_wait = true;
  const Event event = stream.record();
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      stream.synchronize(event);
      FAIL() << "no error";
    } catch (const CommTimeout& error) {
      EXPECT_EQ(error.missing, (std::vector<int>{1}));
      EXPECT_NE(std::string(error.what()).find("bucket 3"), std::string::npos);
    }
  }
}

TEST_F(StreamTest, AnEventOfAnotherStreamIsRefused) {
  add("a");
  EXPECT_THROW(stream.synchronize(Event{2}), InternalError);
  EXPECT_TRUE(log.empty());
}

}  // namespace
}  // namespace gpucomm
