#include "optim/step_plan.h"

#include <algorithm>
#include <cmath>

#include "optim/thread_pool.h"

namespace gpucomm {

namespace {

// Small enough for an item's arrays to stay in the second-level cache between LAMB's passes, large enough to be worth
// a thread's while: some ten microseconds.
constexpr size_t kItemNumel = 32768;

// Where a cut that falls `offset` elements after an entry's begin is made.
size_t cut_at(size_t offset, size_t numel) {
  return offset >= numel ? numel : offset / kStepBlockNumel * kStepBlockNumel;
}

StepSlice part_of(const StepSlice& whole, size_t begin, size_t end) {
  const auto moved = [begin](void* array, size_t size) -> void* {
    return array == nullptr ? nullptr : static_cast<char*>(array) + begin * size;
  };
  const bool wide = whole.param_dtype == DType::kFloat64;
  StepSlice part = whole;
  part.param = moved(whole.param, size_of(whole.param_dtype));
  part.grad = moved(whole.grad, size_of(whole.grad_dtype));
  part.master = moved(whole.master, sizeof(float));
  for (auto& state : part.state) state = moved(state, wide ? sizeof(double) : sizeof(float));
  part.numel = end - begin;
  part.first += begin;
  return part;
}

// The beginning of a small parameter's arrays, on its way into the cache while its predecessor is stepped: hardware
// follows an array, but not from one to the next.
void fetch_ahead(const StepEntry& entry) {
  constexpr size_t kLine = 64, kMostBytes = 2048;
  const StepSlice& arrays = entry.arrays;
  for (const void* array : {arrays.param, arrays.grad, arrays.state[0], arrays.state[1]}) {
    if (array == nullptr) continue;
    const size_t bytes = std::min(arrays.numel * size_of(arrays.param_dtype), kMostBytes);
    for (size_t at = 0; at < bytes; at += kLine) __builtin_prefetch(static_cast<const char*>(array) + at, 0, 2);
  }
}

StepKernel kernel_for(const Kernels& table, StepRule rule, const StepSlice& arrays) {
  return table.step[arrays.param_dtype == DType::kFloat64 ? 1 : 0][static_cast<int>(rule)];
}

StepRule rule_of(StepMethod method) {
  switch (method) {
    case StepMethod::kSgd:
      return StepRule::kSgd;
    case StepMethod::kAdam:
      return StepRule::kAdam;
    case StepMethod::kLion:
      return StepRule::kLion;
    case StepMethod::kLamb:
      return StepRule::kLambMoments;
  }
  return StepRule::kSgd;
}

size_t blocks_of(size_t numel) { return (numel + kStepBlockNumel - 1) / kStepBlockNumel; }

}  // namespace

StepPlan::StepPlan(StepMethod method, size_t entries, size_t groups)
    : method_(method), entries_(entries), groups_(groups) {}

// Threads and cuts: with one thread, or too little for two, all is one item.
void StepPlan::run(const StepOptions& options, int threads, const Kernels& table) {
  line_up(options);
  if (total_ == 0) return;
  const bool alone = threads <= 1 || total_ < 2 * kItemNumel;
  const size_t item_numel = alone ? total_ : kItemNumel;
  const size_t items = (total_ + item_numel - 1) / item_numel;
  ThreadPool& pool = ThreadPool::instance();
  const bool twice = method_ == StepMethod::kLamb;
  pool.run(items, threads, [&](size_t item) {
    each_part(item, item_numel, [&](Work& work, size_t begin, size_t end) {
      twice ? moments_part(table, work, begin, end) : step_part(table, work, begin, end);
    });
  });
  if (twice && settle_ratios()) {
    pool.run(items, threads, [&](size_t item) {
      each_part(item, item_numel, [&](Work& work, size_t begin, size_t end) {
        if (work.cut) apply_part(table, work, begin, end);
      });
    });
  }
}

// Everything that may fail comes first: then the counts go up.
void StepPlan::line_up(const StepOptions& options) {
  work_.clear();
  scalars_.clear();
  scalars_group_.clear();
  total_ = 0;
  size_t blocks = 0;
  for (StepEntry& entry : entries_) {
    if (!entry.active) continue;
    work_.push_back({&entry, total_, scalars_for(entry, options), blocks, false, 1});
    total_ += entry.arrays.numel;
    if (method_ == StepMethod::kLamb) blocks += blocks_of(entry.arrays.numel);
  }
  squares_.resize(blocks);
  for (const Work& work : work_) {
    if (work.entry->count != nullptr) *work.entry->count += 1;
    work.entry->fresh = false;
  }
}

// Parameters of a group that have had as many steps, normally all of them, share their scalars.
size_t StepPlan::scalars_for(const StepEntry& entry, const StepOptions& options) {
  const uint64_t step = entry.count == nullptr ? 0 : static_cast<uint64_t>(*entry.count) + 1;
  if (!scalars_.empty()) {
    const StepScalars& last = scalars_.back();
    if (scalars_group_.back() == entry.group && last.step == step &&
        (method_ != StepMethod::kSgd || last.fresh == entry.fresh)) {
      return scalars_.size() - 1;
    }
  }
  const GroupOptions& group = groups_[static_cast<size_t>(entry.group)];
  scalars_.push_back(scalars_of(method_, group, options, step, entry.fresh));
  scalars_group_.push_back(entry.group);
  return scalars_.size() - 1;
}

// body(work, begin, end) for the parts of entries that lie in an item.
template <class Body>
void StepPlan::each_part(size_t item, size_t item_numel, const Body& body) {
  const size_t from = item * item_numel, to = from + item_numel;
  auto work = std::upper_bound(work_.begin(), work_.end(), from,
                               [](size_t position, const Work& candidate) { return position < candidate.begin; });
  if (work != work_.begin()) --work;
  for (; work != work_.end() && work->begin < to; ++work) {
    const size_t numel = work->entry->arrays.numel;
    const size_t begin = from <= work->begin ? 0 : cut_at(from - work->begin, numel);
    const size_t end = cut_at(to - work->begin, numel);
    if (work + 1 != work_.end()) fetch_ahead(*work[1].entry);
    if (begin < end) body(*work, begin, end);
  }
}

void StepPlan::step_part(const Kernels& table, Work& work, size_t begin, size_t end) {
  const StepSlice part = part_of(work.entry->arrays, begin, end);
  kernel_for(table, rule_of(method_), part)(part, scalars_[work.scalars], nullptr);
}

void StepPlan::moments_part(const Kernels& table, Work& work, size_t begin, size_t end) {
  const StepSlice part = part_of(work.entry->arrays, begin, end);
  BlockSquares* squares = squares_.data() + work.squares + begin / kStepBlockNumel;
  kernel_for(table, StepRule::kLambMoments, part)(part, scalars_[work.scalars], squares);
  if (part.numel == work.entry->arrays.numel) {
    work.ratio = trust_ratio(work);
    apply_part(table, work, begin, end);
  } else if (begin == 0) {  // by one thread only
    work.cut = true;
  }
}

void StepPlan::apply_part(const Kernels& table, Work& work, size_t begin, size_t end) {
  const StepSlice part = part_of(work.entry->arrays, begin, end);
  StepScalars scalars = scalars_[work.scalars];
  scalars.step_size *= work.ratio;
  kernel_for(table, StepRule::kLambApply, part)(part, scalars, nullptr);
}

// Of the parameters that were cut; whether there are any.
bool StepPlan::settle_ratios() {
  bool any = false;
  for (Work& work : work_) {
    if (!work.cut) continue;
    work.ratio = trust_ratio(work);
    any = true;
  }
  return any;
}

// ||w|| / ||update|| of the whole parameter; 1 where either is zero.
double StepPlan::trust_ratio(const Work& work) const {
  double param = 0, update = 0;
  for (size_t block = 0; block < blocks_of(work.entry->arrays.numel); ++block) {
    param += squares_[work.squares + block].param;
    update += squares_[work.squares + block].update;
  }
  return param > 0 && update > 0 ? std::sqrt(param) / std::sqrt(update) : 1;
}

}  // namespace gpucomm
