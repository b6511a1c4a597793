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
  uint32_t failed;       // this rank raised in this iteration
  uint32_t reserved;     // 0
  double weight;         // samples or tokens this rank's gradients stand for
  uint64_t wait_ns;      // spent waiting for peers in this iteration
};
static_assert(sizeof(HeaderWords) == 48);

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
  Bitmap used_by_all;    // on every rank
  Bitmap second_round;   // on any rank
  bool all_used = true;  // every parameter with a slot was used on every rank
  bool agreed = true;  // iteration, layout_hash, backwards and forwards equal; nobody failed or asks for a second round

  explicit Verdict(size_t parameters) : used(parameters), used_by_all(parameters), second_round(parameters) {}
};

}  // namespace gpucomm
