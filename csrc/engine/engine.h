// The engine: ready -> pack -> reduce -> unpack for one wrapper's gradients.
//
// One iteration on one rank, all calls from the thread that runs backward:
//   arm()                   the first gradient hook of a backward that shall be reduced
//   mark_ready() per gradient: packs it into its slot; what is packed is reduced, piece by piece, as soon as everything
//                           before it in the plan is launched (the same order on every rank), without blocking
//   complete() per slot whose parameter got no gradient
//   finish()                launches what is left, exchanges the header, waits for everything
//
// It is given transports, streams and a codec and never learns what device it serves. Two ways to pack, by the codec it
// is given: each gradient at once (Codec), or a bucket once all its gradients are ready (BucketCodec), which until then
// stay where they are and may still be added to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "core/stream.h"
#include "core/trace.h"
#include "engine/bucket.h"
#include "engine/header.h"
#include "kernels/bucket_codec.h"
#include "kernels/codec.h"
#include "transport/transport.h"

namespace gpucomm {

// One parameter of a bucket, in a plan handed to set_plan().
struct SlotSpec {
  int32_t parameter;
  size_t offset;  // in elements from the start of the bucket
  size_t numel;
};

struct BucketSpec {
  Memory memory;
  DType dtype;
  size_t numel;
  std::vector<SlotSpec> slots;
};

// Takes over the reduction of a packed bucket. False: not now, ask again; `must`: at the end of backward it has to.
using TakeBucket = std::function<bool(size_t bucket, bool must)>;

// A bucket was packed as a whole: the gradients of these parameters are not needed any more where they lay. producers:
// the streams of the program on which they were made, and on which they may still be read: the first one packed them.
using ReleaseGrads = std::function<void(std::span<const int32_t> parameters, std::span<const Caller> producers)>;

// What an engine works with. Exactly one of the codecs; what is left out of control, its collectives go with the
// buckets.
struct EngineParts {
  std::shared_ptr<Transport> transport = nullptr;
  std::shared_ptr<Stream> stream = nullptr;
  std::shared_ptr<Codec> codec = nullptr;
  std::shared_ptr<BucketCodec> bucket_codec = nullptr;
  // What carries the headers, where the buckets' transport reaches only a device's memory.
  std::shared_ptr<Transport> control_transport = nullptr;
  std::shared_ptr<Stream> control_stream = nullptr;
  std::shared_ptr<Trace> trace = nullptr;
  // The stream of the program of the moment, on a device; none on the CPU.
  std::function<Caller()> caller = nullptr;
};

class Engine {
 public:
  enum class Mode : uint8_t {
    kIdle,    // between backwards
    kLocal,   // in a backward whose gradients stay local (no_sync)
    kReduce,  // in a backward whose gradients are reduced
  };

  // average: divide by the number of ranks (else the sum is wanted). piece_bytes: buckets are packed and reduced in
  // pieces of this size, 0: as a whole. Small pieces are reduced while they are in cache; the same on every rank.
  Engine(EngineParts parts, size_t parameters, bool average, size_t piece_bytes);

  // Replaces the plan. Only between iterations; the memory of a bucket stays with the engine until the next set_plan().
  void set_plan(std::vector<BucketSpec> buckets, uint64_t layout_hash);
  // Moves one bucket to other memory of the same size. Only between iterations.
  void replace_memory(size_t bucket, Memory memory);
  // Has the gradient of a parameter unpacked to `grad` (numel elements) once it is reduced. The memory stays the
  // caller's, alive until the next call for this parameter or the next set_plan(). Only between iterations.
  void unpack_to(int32_t parameter, void* grad, DType grad_dtype);

  // From now on buckets are not reduced by the transport but given to `take`: whole, in plan order, undivided. What it
  // makes of them has to be in their memory when the iteration ends; mark_reduced() notes it in the trace.
  void hand_over_to(TakeBucket take);
  void mark_reduced(size_t bucket);
  // Whether a bucket of the plan is kept from being launched before the end of backward.
  void hold_back(size_t bucket, bool held) { buckets_.at(bucket).held = held; }

  // Buckets are packed as a whole: gradients stay where they are until then, and `release` is called afterwards.
  bool packs_buckets() const { return parts_.bucket_codec != nullptr; }
  void on_release(ReleaseGrads release) { release_ = std::move(release); }

  // Whether the caller wants to see each gradient, instead of having it packed by the hook.
  void set_by_hand(bool by_hand) { by_hand_ = by_hand; }
  bool by_hand() const { return by_hand_; }

  void arm_local() {
    mode_ = Mode::kLocal;
    adopt_thread();
  }
  void arm();

  // Whether this is the thread on which the backward was seen last. It may move to another, but two backwards at once
  // on two threads would mix their gradients: the caller has to tell them apart, and to adopt the thread if it may go
  // on there.
  bool on_its_thread() const { return thread_ == std::this_thread::get_id(); }
  void adopt_thread() { thread_ = std::this_thread::get_id(); }

  // The gradient of `parameter` is complete in this backward and lies at `grad`, contiguous in the slot's element
  // order, in `grad_dtype`. Copies it into the slot; the caller may free it on return, or, with packs_buckets(), on
  // release. Never blocks.
  // Preconditions: mode kReduce, !packed(parameter), the parameter has a slot. A second call before the bucket is
  // packed tells that the gradient was added to, or lies elsewhere now.
  void mark_ready(int32_t parameter, const void* grad, DType grad_dtype);
  // The same for a slot whose parameter got no gradient in this backward: packs what `grad` holds, zeros if null.
  // Does not count as used, launches nothing.
  void complete(int32_t parameter, const void* grad, DType grad_dtype);
  // For a caller that has put the gradient where the program sees it (foreign layouts): packs it from there.
  void mark_packed(int32_t parameter);

  // Whether mark_ready(), mark_packed() and complete() look for infinities and NaN in what they packed, while it is in
  // cache and before a rank can reduce it: in the slot, as it will travel. Off until asked for; holds from the next
  // gradient on.
  void set_check_finite(bool check) { check_finite_ = check; }
  // The lowest parameter index with such an element in this iteration, on this rank; -1: none was found.
  // With packs_buckets() that waits for the device, finish() begins anew, and of a bucket only the first slot counts.
  int32_t nonfinite_parameter();

  // With packs_buckets(): whether each bucket's squares are summed up once it is reduced, with the codec. What the sum
  // is then, and read from it, is ordered as the means are.
  void set_measure_norm(bool measure);

  // The gradient cannot go through its slot (a second gradient after packing, no slot, another dtype): asks all ranks
  // for a second round on this parameter.
  void request_second_round(int32_t parameter);

  // The same without a gradient of this rank: the ranks have something to settle about the parameter.
  void ask_about(int32_t parameter) { second_round_.set(static_cast<size_t>(parameter)); }

  // Parameters with a slot that is not packed yet, ascending.
  std::vector<int32_t> missing() const;

  // Launches what is left; finish() does it too.
  void launch_rest();
  // Launches what is left, exchanges the header and waits for all of it. Blocks; throws CommTimeout, PeerFailed.
  // Afterwards the slots hold the reduced gradients on every rank, whatever the verdict.
  const Verdict& finish(const HeaderWords& words);
  // Ends the backward: mode kIdle; after a reduction also forgets which parameters were used.
  void disarm();

  Mode mode() const { return mode_; }
  void mark_used(int32_t parameter) { used_.set(static_cast<size_t>(parameter)); }
  bool used(int32_t parameter) const { return used_.test(static_cast<size_t>(parameter)); }
  bool packed(int32_t parameter) const { return packed_[static_cast<size_t>(parameter)] != 0; }
  const Slot& slot(int32_t parameter) const { return slots_[static_cast<size_t>(parameter)]; }
  size_t parameter_count() const { return slots_.size(); }
  size_t bucket_count() const { return buckets_.size(); }
  size_t launched() const { return launched_; }
  uint64_t iteration() const { return iteration_; }
  uint64_t layout_hash() const { return layout_hash_; }
  uint64_t wait_ns() const { return static_cast<uint64_t>(tick_scale_.duration_ns(wait_ticks_)); }
  // On how many ranks each parameter was used, as of the last finish().
  std::vector<int32_t> used_counts() const;
  // In which order the gradients of the last or current reduction became ready.
  const std::vector<int32_t>& ready_order() const { return ready_order_; }
  // Buckets reduced so far; when finish() threw, the bucket of this index was waited for (none: the header).
  size_t reduced() const { return reduced_; }
  // Counts what is reduced by now, and puts it into the trace; never waits.
  void look_at_reduced() { note_reduced(); }

  Transport& transport() { return *parts_.transport; }
  Stream& stream() { return *parts_.stream; }
  Trace& trace() { return *parts_.trace; }

 private:
  Bucket& bucket_of(const Slot& slot) { return buckets_[static_cast<size_t>(slot.bucket)]; }
  size_t piece_numel(const Bucket& bucket) const;
  void pack_in_pieces(int32_t parameter, const void* grad, DType grad_dtype);
  void check_finite(int32_t parameter, const void* packed, DType dtype, size_t numel);
  bool count_down(int32_t parameter);
  void note_grad(int32_t parameter, const void* grad, DType grad_dtype);
  void pack_bucket(size_t bucket);
  void look_at_caller() {
    if (parts_.caller) caller_ = parts_.caller();
  }
  void lead_caller();
  void wait_for_buckets();
  void launch_packed();
  bool launch_next_piece(Bucket& bucket);
  bool hand_over(Bucket& bucket);
  void note_reduced();
  void unpack(size_t bucket);
  void unpack_slots(const Bucket& bucket);
  void note_wait(uint64_t begin_ticks, int32_t id, size_t bytes);
  void start_header(const HeaderWords& words);
  void read_verdict();

  EngineParts parts_;
  double reduce_scale_ = 1.0;  // applied by the transport's reduction,
  double pack_scale_ = 1.0;    // or by pack where the transport cannot
  size_t piece_bytes_;
  TakeBucket take_;
  ReleaseGrads release_;
  Caller caller_;                   // who calls at present
  std::vector<Caller> led_;         // callers that come after the last iteration's reductions
  Event last_reduced_;              // of that iteration
  std::vector<int32_t> releasing_;  // scratch of pack_bucket()
  bool check_finite_ = false;
  bool measures_norm_ = false;
  bool has_new_memory_ = false;  // since the last iteration

  Mode mode_ = Mode::kIdle;
  bool by_hand_ = false;
  std::thread::id thread_;
  uint64_t iteration_ = 0;
  uint64_t layout_hash_ = 0;
  std::vector<Slot> slots_;
  std::vector<uint8_t> packed_;   // nothing can be added to its gradient but in a second round
  std::vector<uint8_t> counted_;  // its gradient is known: packed, or waiting for the rest of its bucket
  std::vector<int32_t> ready_order_;
  int32_t nonfinite_parameter_ = -1;
  std::vector<Bucket> buckets_;
  bool ending_ = false;  // all slots are packed
  size_t launched_ = 0;  // buckets launched as a whole in this iteration, in plan order
  size_t reduced_ = 0;   // of those, known to be complete
  int64_t wait_ticks_ = 0;
  const TickScale tick_scale_ = TickScale::measure();

  Bitmap used_;  // since the last reduction
  Bitmap second_round_;
  size_t header_bytes_;
  std::vector<std::byte> header_memory_;  // this rank's header, then everybody's
  Verdict verdict_;
};

}  // namespace gpucomm
