#include "fake_cuda/nccl/operation.h"

namespace fake_nccl {
namespace {

constexpr const char* kKindNames[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast"};
constexpr const char* kTypeNames[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                      "uint64", "float16", "float32", "float64", "bfloat16"};
constexpr const char* kOpNames[] = {"sum", "prod", "max", "min", "avg"};

}  // namespace

size_t size_of(DataType type) {
  switch (type) {
    case kInt8:
    case kUint8:
      return 1;
    case kFloat16:
    case kBfloat16:
      return 2;
    case kInt32:
    case kUint32:
    case kFloat32:
      return 4;
    case kInt64:
    case kUint64:
    case kFloat64:
      return 8;
  }
  return 0;
}

size_t Operation::in_bytes(int size) const {
  return count * size_of(type) * (kind == Kind::kReduceScatter ? static_cast<size_t>(size) : 1);
}

size_t Operation::out_bytes(int size) const {
  return count * size_of(type) * (kind == Kind::kAllGather ? static_cast<size_t>(size) : 1);
}

bool Operation::is_in_place(int rank) const {
  const auto from = reinterpret_cast<uintptr_t>(in), to = reinterpret_cast<uintptr_t>(out);
  const uintptr_t part = static_cast<uintptr_t>(rank) * count * size_of(type);
  switch (kind) {
    case Kind::kReduceScatter:
      return to == from + part;
    case Kind::kAllGather:
      return from == to + part;
    default:
      return from == to;
  }
}

bool Operation::overlaps(int rank, int size) const {
  if (!reads(rank)) return false;
  const auto from = reinterpret_cast<uintptr_t>(in), to = reinterpret_cast<uintptr_t>(out);
  return from < to + out_bytes(size) && to < from + in_bytes(size);
}

bool Descriptor::same_operation(const Descriptor& other) const {
  return kind == other.kind && type == other.type && op == other.op && root == other.root && count == other.count;
}

bool Descriptor::same_placement(const Descriptor& other) const {
  return registered == other.registered && in == other.in && out == other.out;
}

std::string Descriptor::text() const {
  std::string text = std::string(kKindNames[kind]) + " of " + std::to_string(count) + " " + kTypeNames[type];
  if (kind == static_cast<int>(Kind::kAllReduce) || kind == static_cast<int>(Kind::kReduceScatter))
    text += std::string(", ") + kOpNames[op];
  if (kind == static_cast<int>(Kind::kBroadcast)) text += ", root " + std::to_string(root);
  return text;
}

Descriptor describe(const Operation& operation) {
  Descriptor descriptor{};
  descriptor.kind = static_cast<int>(operation.kind);
  descriptor.type = operation.type;
  descriptor.op = operation.op;
  descriptor.root = operation.root;
  descriptor.count = operation.count;
  return descriptor;
}

}  // namespace fake_nccl
