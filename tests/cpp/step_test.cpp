// The step kernels of every table against those of the first, bit for bit, whole and cut; the threads that share a
// step.
#include "kernels/step.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "kernels/kernels.h"
#include "optim/step_plan.h"
#include "optim/thread_pool.h"

namespace gpucomm {
namespace {

constexpr DType kFloating[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

// A parameter with everything that a rule may want, in bytes of its own.
struct Tensors {
  Tensors(DType dtype, DType grad_dtype, size_t numel, bool with_master, unsigned seed) : dtype(dtype) {
    const size_t wide = dtype == DType::kFloat64 ? 8 : 4;
    param.resize(numel * size_of(dtype));
    grad.resize(numel * size_of(grad_dtype));
    master.resize(with_master ? numel * 4 : 0);
    for (auto& state : states) state.resize(numel * wide);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> values(numel);
    const auto fill = [&](std::vector<uint8_t>& array, DType as, bool positive) {
      for (float& value : values) value = positive ? std::fabs(normal(random)) : normal(random);
      kernels().pack[static_cast<int>(as)][static_cast<int>(DType::kFloat32)](array.data(), values.data(), numel, 1.0);
    };
    fill(param, dtype, false);
    fill(grad, grad_dtype, false);
    const DType state_dtype = wide == 8 ? DType::kFloat64 : DType::kFloat32;
    fill(states[0], state_dtype, false);
    fill(states[1], state_dtype, true);
    fill(states[2], state_dtype, true);
    if (with_master) fill(master, DType::kFloat32, false);  // some are the parameter's, most were "written since"
    slice.param = param.data();
    slice.grad = grad.data();
    slice.master = with_master ? master.data() : nullptr;
    for (int s = 0; s < kMaxStepStates; ++s) slice.state[s] = states[s].data();
    slice.param_dtype = dtype;
    slice.grad_dtype = grad_dtype;
    slice.numel = numel;
    slice.first = 24;
  }

  // Elements from `begin` to `end` of it.
  StepSlice part(size_t begin, size_t end) const {
    StepSlice cut = slice;
    const size_t wide = dtype == DType::kFloat64 ? 8 : 4;
    cut.param = static_cast<char*>(slice.param) + begin * size_of(dtype);
    cut.grad = static_cast<char*>(slice.grad) + begin * size_of(slice.grad_dtype);
    if (slice.master != nullptr) cut.master = static_cast<char*>(slice.master) + begin * 4;
    for (int s = 0; s < kMaxStepStates; ++s) cut.state[s] = static_cast<char*>(slice.state[s]) + begin * wide;
    cut.numel = end - begin;
    cut.first += begin;
    return cut;
  }

  bool operator==(const Tensors& other) const {
    return param == other.param && grad == other.grad && master == other.master && states[0] == other.states[0] &&
           states[1] == other.states[1] && states[2] == other.states[2];
  }

  DType dtype;
  std::vector<uint8_t> param, grad, master, states[kMaxStepStates];
  StepSlice slice{};
};

StepKernel kernel_of(const Kernels& table, StepRule rule, DType dtype) {
  return table.step[dtype == DType::kFloat64 ? 1 : 0][static_cast<int>(rule)];
}

std::vector<StepScalars> variants() {
  StepScalars k;
  k.grad_scale = 0.37;
  k.direction = -1;
  k.step_size = 0.01;
  k.keep = 0.999;
  k.beta1 = 0.9;
  k.beta2 = 0.99;
  k.momentum = 0.9;
  k.dampening = 0.2;
  k.root = 1.7;
  k.unbias = 1.3;
  k.eps = 1e-8;
  k.seed = 77;
  k.step = 5;
  std::vector<StepScalars> all = {k};
  const auto add = [&](const auto& change) {
    all.push_back(k);
    change(all.back());
  };
  add([](StepScalars& v) { v.l2 = 0.1; });
  add([](StepScalars& v) { v.amsgrad = true; });
  add([](StepScalars& v) { v.l2 = 0.1, v.amsgrad = true; });
  add([](StepScalars& v) { v.nesterov = true; });
  add([](StepScalars& v) { v.nesterov = v.fresh = true; });
  add([](StepScalars& v) { v.fresh = true; });
  add([](StepScalars& v) { v.momentum = 0; });
  add([](StepScalars& v) { v.stochastic_rounding = true; });
  add([](StepScalars& v) { v.grad_after = GradAfter::kScaled; });
  add([](StepScalars& v) { v.grad_after = GradAfter::kZeroed; });
  return all;
}

// body(rule, dtype, grad dtype, with master, scalars)
template <class Body>
void each_case(const Body& body) {
  for (const StepScalars& scalars : variants()) {
    for (int rule = 0; rule < kStepRuleCount; ++rule) {
      for (const DType dtype : kFloating) {
        for (const DType grad_dtype : kFloating) {
          if ((dtype == DType::kFloat64) != (grad_dtype == DType::kFloat64)) continue;
          for (const bool master : {false, true}) {
            if (master && size_of(dtype) != 2) continue;
            body(static_cast<StepRule>(rule), dtype, grad_dtype, master, scalars);
          }
        }
      }
    }
  }
}

TEST(Step, EveryTableGivesTheBitsOfTheFirst) {
  for (const size_t numel : {size_t{0}, size_t{1}, size_t{7}, size_t{1000}, size_t{1025}}) {
    each_case([&](StepRule rule, DType dtype, DType grad_dtype, bool master, const StepScalars& scalars) {
      Tensors expected(dtype, grad_dtype, numel, master, 1);
      std::vector<BlockSquares> sums(2), other_sums(2);
      auto* const squares = rule == StepRule::kLambMoments ? sums.data() : nullptr;
      auto* const other_squares = rule == StepRule::kLambMoments ? other_sums.data() : nullptr;
      kernel_of(kernel_table(0), rule, dtype)(expected.slice, scalars, squares);
      for (size_t index = 1; index < kernel_table_count(); ++index) {
        Tensors found(dtype, grad_dtype, numel, master, 1);
        kernel_of(kernel_table(index), rule, dtype)(found.slice, scalars, other_squares);
        ASSERT_EQ(found, expected) << kernel_table(index).isa << " rule " << static_cast<int>(rule);
        ASSERT_EQ(std::memcmp(sums.data(), other_sums.data(), sums.size() * sizeof(BlockSquares)), 0);
      }
    });
  }
}

TEST(Step, ACutAnywhereChangesNoBit) {
  constexpr size_t kNumel = 2100;
  each_case([&](StepRule rule, DType dtype, DType grad_dtype, bool master, const StepScalars& scalars) {
    const bool in_blocks = rule == StepRule::kLambMoments;
    for (const size_t at : {size_t{in_blocks ? kStepBlockNumel : 3}, size_t{in_blocks ? 2 * kStepBlockNumel : 1029}}) {
      Tensors whole(dtype, grad_dtype, kNumel, master, 2), cut(dtype, grad_dtype, kNumel, master, 2);
      std::vector<BlockSquares> sums(3), cut_sums(3);
      const StepKernel kernel = kernel_of(kernels(), rule, dtype);
      kernel(whole.slice, scalars, in_blocks ? sums.data() : nullptr);
      kernel(cut.part(0, at), scalars, in_blocks ? cut_sums.data() : nullptr);
      kernel(cut.part(at, kNumel), scalars, in_blocks ? cut_sums.data() + at / kStepBlockNumel : nullptr);
      ASSERT_EQ(cut, whole) << "rule " << static_cast<int>(rule) << " at " << at;
      ASSERT_EQ(std::memcmp(sums.data(), cut_sums.data(), sums.size() * sizeof(BlockSquares)), 0);
    }
  });
}

TEST(Step, ALambUpdateLeavesTheParameterAlone) {
  Tensors before(DType::kBFloat16, DType::kBFloat16, 100, false, 3),
      after(DType::kBFloat16, DType::kBFloat16, 100, false, 3);
  BlockSquares squares{};
  kernel_of(kernels(), StepRule::kLambMoments, DType::kBFloat16)(after.slice, variants()[0], &squares);
  EXPECT_EQ(after.param, before.param);
  EXPECT_GT(squares.param, 0);
  EXPECT_GT(squares.update, 0);
}

TEST(StepPlan, EveryTableAndNumberOfThreadsGivesTheSameBits) {
  for (const StepMethod method : {StepMethod::kSgd, StepMethod::kAdam, StepMethod::kLion, StepMethod::kLamb}) {
    std::vector<std::vector<Tensors>> runs;
    for (size_t table = 0; table < kernel_table_count(); ++table) {
      for (const int threads : {1, 2, 4}) {
        auto& tensors = runs.emplace_back();
        unsigned seed = 10;
        for (const size_t numel : {70'001, 0, 33, 1024, 100'000, 5}) {
          tensors.emplace_back(DType::kFloat32, DType::kFloat32, numel, false, seed++);
        }
        StepPlan plan(method, tensors.size(), 1);
        plan.groups()[0] = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1};
        std::vector<float> counts(tensors.size());
        for (size_t i = 0; i < tensors.size(); ++i) {
          plan.entries()[i].arrays = tensors[i].part(0, tensors[i].slice.numel);
          plan.entries()[i].count = &counts[i];
          plan.entries()[i].active = i != 3;
        }
        plan.run({}, threads, kernel_table(table));
        plan.run({}, threads, kernel_table(table));
        EXPECT_EQ(counts, (std::vector<float>{2, 2, 2, 0, 2, 2}));
        EXPECT_EQ(tensors[3], Tensors(DType::kFloat32, DType::kFloat32, 1024, false, 13));
        EXPECT_EQ(tensors, runs[0]);
      }
    }
  }
}

TEST(ThreadPool, EveryItemIsDoneOnce) {
  for (const int threads : {1, 2, 5}) {
    for (const size_t items : {size_t{0}, size_t{1}, size_t{1000}}) {
      std::vector<std::atomic<int>> done(items);
      ThreadPool::instance().run(items, threads, [&](size_t item) { ++done[item]; });
      for (const auto& times : done) EXPECT_EQ(times, 1);
    }
  }
}

TEST(ThreadPool, SeveralCallersAtOnceAreServed) {
  std::vector<std::thread> callers;
  std::atomic<int> done{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int turn = 0; turn < 50; ++turn) ThreadPool::instance().run(20, 3, [&](size_t) { ++done; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(done, 4 * 50 * 20);
}

#if !defined(__SANITIZE_THREAD__)  // which cannot start threads in a forked child
TEST(ThreadPool, AForkedChildHasThreadsOfItsOwn) {
  std::atomic<int> done{0};
  ThreadPool::instance().run(100, 3, [&](size_t) { ++done; });
  const pid_t child = fork();
  if (child == 0) {
    ThreadPool::instance().run(100, 3, [&](size_t) { ++done; });
    _exit(done == 200 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}
#endif

}  // namespace
}  // namespace gpucomm
