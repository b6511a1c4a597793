// step: one pass over the parameters of an optimizer that have a gradient.
//
// The entries are laid end to end and cut into items of equal length, which threads take one after the other. Cuts
// within a parameter are at multiples of kStepBlockNumel, so the result is the same bit for bit whatever their number.
// LAMB goes over a parameter twice, as the second pass needs the norms of the whole of it: at once where an item has
// all of it, else when all items are done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "optim/group_options.h"

namespace gpucomm {

// One parameter. Who fills it in keeps the arrays alive and in place while the plan runs.
struct StepEntry {
  StepSlice arrays{};
  float* count = nullptr;  // steps so far, counted up by run(); null: not counted
  int32_t group = 0;
  bool active = false;  // it has a gradient
  bool fresh = true;    // its momentum buffer holds nothing yet; run() ends that
};

class StepPlan {
 public:
  StepPlan(StepMethod method, size_t entries, size_t groups);

  StepMethod method() const { return method_; }
  std::span<StepEntry> entries() { return entries_; }
  std::span<GroupOptions> groups() { return groups_; }

  // Steps the active entries on at most `threads` threads. Throws nothing but std::bad_alloc, before anything changed.
  void run(const StepOptions& options, int threads, const Kernels& table = kernels());

 private:
  struct Work {  // an active entry
    StepEntry* entry;
    size_t begin;    // where it lies among the entries laid end to end
    size_t scalars;  // which of scalars_
    size_t squares;  // LAMB: where its blocks begin in squares_
    bool cut;        // LAMB: more than one item has a part of it
    double ratio;    // LAMB: the trust ratio
  };

  void line_up(const StepOptions& options);
  size_t scalars_for(const StepEntry& entry, const StepOptions& options);
  template <class Body>
  void each_part(size_t item, size_t item_numel, const Body& body);
  void step_part(const Kernels& table, Work& work, size_t begin, size_t end);
  void moments_part(const Kernels& table, Work& work, size_t begin, size_t end);
  void apply_part(const Kernels& table, Work& work, size_t begin, size_t end);
  double trust_ratio(const Work& work) const;
  bool settle_ratios();

  const StepMethod method_;
  std::vector<StepEntry> entries_;
  std::vector<GroupOptions> groups_;
  // Of the run in progress:
  std::vector<Work> work_;
  std::vector<StepScalars> scalars_;
  std::vector<int32_t> scalars_group_;
  std::vector<BlockSquares> squares_;
  size_t total_ = 0;
};

}  // namespace gpucomm
