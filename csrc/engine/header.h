// The header: a few words that every rank sends once an iteration, beside the gradients and never inside them. From it
// all ranks draw the same conclusions: errors, unused parameters, a second round, a divergence of the loops.
//
// On the wire: HeaderWords, then the bitmap of used parameters, then the bitmap of parameters that need a second round.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace gpucomm {

struct HeaderWords {
  uint64_t iteration;    // reductions since construction
  uint64_t layout_hash;  // of the plan in force
  uint32_t backwards;    // since the last reduction, this one included
  uint32_t forwards;     // training forwards of the wrapper since the last reduction
  uint32_t flags;        // below
  int32_t nonfinite;     // the first parameter with a gradient that is not finite, -1: none, or not looked for
  double weight;         // samples or tokens this rank's gradients stand for; 1 unless kWeighted or kJoined
  uint64_t wait_ns;      // spent waiting for peers in this iteration
};
static_assert(sizeof(HeaderWords) == 48);

enum HeaderFlags : uint32_t {
  kFailed = 1,    // this rank raised in this iteration
  kJoined = 2,    // it has no more data and only keeps its peers company
  kWeighted = 4,  // its weight was given by the program
};

// A set of parameter indices, 64 to a word.
class Bitmap {
 public:
  explicit Bitmap(size_t count) : count_(count), words_((count + 63) / 64) {}
  void set(size_t i) { words_[i / 64] |= uint64_t{1} << (i % 64); }
  bool test(size_t i) const { return words_[i / 64] >> (i % 64) & 1; }
  void clear() { words_.assign(words_.size(), 0); }
  void fill() { words_.assign(words_.size(), ~uint64_t{0}); }
  bool any() const {
    for (uint64_t word : words_)
      if (word) return true;
    return false;
  }
  size_t count() const { return count_; }
  std::span<uint64_t> words() { return words_; }
  std::span<const uint64_t> words() const { return words_; }

 private:
  size_t count_;
  std::vector<uint64_t> words_;
};

// What the headers of all ranks say together. The same on every rank.
struct Verdict {
  std::vector<HeaderWords> ranks;
  Bitmap used;           // on any rank
  Bitmap used_by_all;    // on every rank that has not joined
  Bitmap second_round;   // on any rank
  bool all_used = true;  // every parameter with a slot is in used_by_all
  // The plain case: iteration, layout_hash, backwards and forwards equal, no flags, all finite, no second round.
  bool agreed = true;

  explicit Verdict(size_t parameters) : used(parameters), used_by_all(parameters), second_round(parameters) {}
};

}  // namespace gpucomm
