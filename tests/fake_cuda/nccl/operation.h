// A collective as one rank gives it, and what ranks compare of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fake_cuda/nccl/functions.h"

namespace fake_nccl {

enum class Kind : int { kAllReduce, kReduceScatter, kAllGather, kBroadcast };

// Zero for what is no type.
size_t size_of(DataType type);

struct Operation {
  Kind kind;
  const void* in;
  void* out;
  size_t count;  // as the function takes it: for reduce_scatter and all_gather of one rank
  DataType type;
  RedOp op = kSum;
  int root = 0;

  size_t in_bytes(int size) const;
  size_t out_bytes(int size) const;
  bool reads(int rank) const { return kind != Kind::kBroadcast || rank == root; }
  // Where in and out may be one: in place as NCCL defines it for this rank.
  bool is_in_place(int rank) const;
  bool overlaps(int rank, int size) const;
};

// Where a buffer lies in a registered window: as good as a different buffer where it differs between ranks.
struct Placement {
  uint64_t window = 0;  // number of the registration + 1; 0: none
  uint64_t offset = 0;
  bool operator==(const Placement&) const = default;
};

// What is published of an operation; the n-th of every rank must be equal.
struct Descriptor {
  int kind, type, op, root;
  uint64_t count;
  bool registered;  // ncclCommRegister
  Placement in, out;

  bool same_operation(const Descriptor& other) const;
  bool same_placement(const Descriptor& other) const;
  std::string text() const;
};

Descriptor describe(const Operation& operation);

}  // namespace fake_nccl
