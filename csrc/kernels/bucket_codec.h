// Packs and unpacks whole buckets, with one launch for all of a bucket's slots: what a device wants that is told what
// to do from outside. (A CPU packs gradient by gradient, while each is in cache: codec.h.)
//
// Nothing here waits for the device, and nothing allocates in an iteration.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/stream.h"
#include "core/types.h"

namespace gpucomm {

// A slot of a bucket, as the codec has to know it. Elements are counted from the start of the bucket.
struct SlotLayout {
  size_t offset;
  size_t numel;
};

struct BucketLayout {
  void* address;
  DType dtype;
  size_t numel;
  std::vector<SlotLayout> slots;
};

// Where a gradient comes from, or goes to. Null: zeros are packed, nothing is unpacked.
struct GradPointer {
  void* address = nullptr;
  DType dtype = DType::kFloat32;
};

class BucketCodec {
 public:
  virtual ~BucketCodec() = default;
  // The buckets of the plan; only between iterations. May allocate, and wait for the device.
  virtual void set_plan(const std::vector<BucketLayout>& buckets) = 0;
  // Only the address of a bucket changes.
  virtual void move_bucket(size_t bucket, void* address) = 0;

  // slot[i] = to(scale * grad[i]) for all slots of the bucket, grads[k] for slot k, as work of the caller's. A gradient
  // may lie in its slot already. Looks for infinities and NaN in what it packs if `check` is true.
  virtual void pack(size_t bucket, std::span<const GradPointer> grads, double scale, bool check, Caller caller) = 0;
  // grad[i] = to(slot[i]), as work of the stream's.
  virtual void unpack(size_t bucket, std::span<const GradPointer> grads, Stream& stream) = 0;

  // The sum of squares of everything in the buckets, in fp32: begins anew; adds a bucket. As work of the stream's.
  virtual void begin_norm(Stream& stream) = 0;
  virtual void add_norm(size_t bucket, Stream& stream) = 0;

  // Forgets what was found so far; as work of the stream's.
  virtual void begin_check(Stream& stream) = 0;
  // The first slot with an element that is not finite, in each bucket, -1: none. As of what was packed before the
  // stream's work of now: waits for that.
  virtual std::vector<int32_t> read_check(Stream& stream) = 0;
};

}  // namespace gpucomm
