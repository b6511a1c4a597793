#include "engine/engine.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace gpucomm {

static size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Nearly always there is one, and std::find is unrolled for many.
static bool contains(const std::vector<Caller>& callers, Caller caller) {
  for (Caller one : callers)
    if (one == caller) return true;
  return false;
}

Engine::Engine(EngineParts parts, size_t parameters, bool average, size_t piece_bytes)
    : parts_(std::move(parts)),
      piece_bytes_(piece_bytes),
      slots_(parameters),
      packed_(parameters, 0),
      counted_(parameters, 0),
      used_(parameters),
      second_round_(parameters),
      header_bytes_(round_up(sizeof(HeaderWords) + 2 * used_.words().size_bytes(), 64)),
      verdict_(parameters) {
  GPUCOMM_ASSERT((parts_.codec == nullptr) != (parts_.bucket_codec == nullptr), "one codec");
  GPUCOMM_ASSERT(!parts_.bucket_codec || piece_bytes == 0, "pieces of " + std::to_string(piece_bytes) + " bytes");
  if (!parts_.control_transport) {
    parts_.control_transport = parts_.transport;
    parts_.control_stream = parts_.stream;
  }
  if (average) {
    (parts_.transport->scales_in_reduce() ? reduce_scale_ : pack_scale_) = 1.0 / parts_.transport->size();
  }
  header_memory_.resize(header_bytes_ * static_cast<size_t>(parts_.transport->size() + 1));
  ready_order_.reserve(parameters);
}

void Engine::set_plan(std::vector<BucketSpec> specs, uint64_t layout_hash) {
  GPUCOMM_ASSERT(mode_ == Mode::kIdle, "set_plan inside a backward");
  buckets_.clear();
  launched_ = reduced_ = 0;
  slots_.assign(slots_.size(), Slot{});
  for (BucketSpec& spec : specs) {
    const auto index = static_cast<int32_t>(buckets_.size());
    const size_t element_bytes = size_of(spec.dtype);
    GPUCOMM_ASSERT(spec.numel * element_bytes <= spec.memory.bytes, "bucket " + std::to_string(index));
    Bucket& bucket = buckets_.emplace_back();
    bucket.dtype = spec.dtype;
    bucket.numel = spec.numel;
    for (const SlotSpec& slot : spec.slots) {
      GPUCOMM_ASSERT(slot.offset + slot.numel <= spec.numel, "parameter " + std::to_string(slot.parameter));
      auto* base = static_cast<std::byte*>(spec.memory.address);
      slots_.at(static_cast<size_t>(slot.parameter)) = {.bucket = index,
                                                        .order = static_cast<uint32_t>(bucket.parameters.size()),
                                                        .dtype = spec.dtype,
                                                        .offset = slot.offset,
                                                        .numel = slot.numel,
                                                        .address = base + slot.offset * element_bytes,
                                                        .grad = base + slot.offset * element_bytes,
                                                        .grad_dtype = spec.dtype};
      bucket.parameters.push_back(slot.parameter);
    }
    bucket.memory = std::move(spec.memory);
  }
  layout_hash_ = layout_hash;
  has_new_memory_ = true;
  if (!parts_.bucket_codec) return;
  std::vector<BucketLayout> layouts;
  for (const Bucket& bucket : buckets_) {
    BucketLayout& layout = layouts.emplace_back(BucketLayout{bucket.memory.address, bucket.dtype, bucket.numel, {}});
    for (int32_t parameter : bucket.parameters) {
      const Slot& slot = slots_[static_cast<size_t>(parameter)];
      layout.slots.push_back({slot.offset, slot.numel});
    }
  }
  parts_.bucket_codec->set_plan(layouts);
}

void Engine::replace_memory(size_t index, Memory memory) {
  GPUCOMM_ASSERT(mode_ == Mode::kIdle, "replace_memory inside a backward");
  Bucket& bucket = buckets_.at(index);
  GPUCOMM_ASSERT(memory.bytes >= bucket.numel * size_of(bucket.dtype), "bucket " + std::to_string(index));
  for (int32_t parameter : bucket.parameters) {
    Slot& slot = slots_[static_cast<size_t>(parameter)];
    slot.address =
        static_cast<std::byte*>(memory.address) + (slot.address - static_cast<const std::byte*>(bucket.memory.address));
    if (!slot.unpacks) slot.grad = slot.address;
  }
  bucket.memory = std::move(memory);
  has_new_memory_ = true;
  if (parts_.bucket_codec) parts_.bucket_codec->move_bucket(index, bucket.memory.address);
}

void Engine::unpack_to(int32_t parameter, void* grad, DType grad_dtype) {
  GPUCOMM_ASSERT(mode_ == Mode::kIdle, "unpack_to inside a backward");
  Slot& slot = slots_.at(static_cast<size_t>(parameter));
  GPUCOMM_ASSERT(slot.bucket >= 0, "parameter " + std::to_string(parameter));
  Bucket& bucket = bucket_of(slot);
  if (slot.unpacks) bucket.unpacked_bytes -= slot.numel * size_of(slot.grad_dtype);
  slot.unpacks = has_new_memory_ = true;
  slot.grad = static_cast<std::byte*>(grad);
  slot.grad_dtype = grad_dtype;
  bucket.unpacked_bytes += slot.numel * size_of(grad_dtype);
}

void Engine::set_measure_norm(bool measure) {
  GPUCOMM_ASSERT(mode_ == Mode::kIdle && parts_.bucket_codec, "set_measure_norm");
  measures_norm_ = measure;
}

void Engine::hand_over_to(TakeBucket take) {
  GPUCOMM_ASSERT(mode_ == Mode::kIdle, "hand_over_to inside a backward");
  take_ = std::move(take);
  pack_scale_ = reduce_scale_ = 1.0;
}

void Engine::mark_reduced(size_t index) {
  const Bucket& bucket = buckets_.at(index);
  parts_.trace->record(TraceKind::kReduce, static_cast<int32_t>(index), bucket.launch_ticks, ticks(),
                       bucket.numel * size_of(bucket.dtype), iteration_);
  if (bucket.unpacked_bytes > 0 && !parts_.stream->runs_by_itself()) unpack(index);
}

void Engine::arm() {
  GPUCOMM_ASSERT(mode_ == Mode::kIdle, "arm inside a backward");
  if (parts_.stream->runs_by_itself()) note_reduced();  // what was not complete when the last iteration ended
  if (parts_.bucket_codec && (has_new_memory_ || measures_norm_)) {
    look_at_caller();
    parts_.stream->follow(caller_);  // what was done with memory before was work of the caller's
  }
  has_new_memory_ = false;
  if (measures_norm_) parts_.bucket_codec->begin_norm(*parts_.stream);
  mode_ = Mode::kReduce;
  adopt_thread();
  ++iteration_;
  ending_ = false;
  launched_ = 0;
  reduced_ = 0;
  wait_ticks_ = 0;
  ready_order_.clear();
  nonfinite_parameter_ = -1;
  packed_.assign(packed_.size(), 0);
  counted_.assign(counted_.size(), 0);
  second_round_.clear();
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.parameters.size();
    bucket.in_order = bucket.packed = bucket.launched = 0;
    if (!parts_.bucket_codec) continue;
    bucket.grads.assign(bucket.parameters.size(), {});
    bucket.producers.clear();
  }
}

void Engine::mark_ready(int32_t parameter, const void* grad, DType grad_dtype) {
  const Slot& slot = slots_[static_cast<size_t>(parameter)];
  const uint64_t ready = ticks();
  const size_t bytes = slot.numel * size_of(slot.dtype);
  used_.set(static_cast<size_t>(parameter));
  if (parts_.bucket_codec) {
    const bool again = counted_[static_cast<size_t>(parameter)] != 0;
    note_grad(parameter, grad, grad_dtype);
    if (again) return;
    parts_.trace->record(TraceKind::kReady, parameter, ready, ready, bytes, iteration_);
  } else {
    pack_in_pieces(parameter, grad, grad_dtype);
    parts_.trace->record(TraceKind::kPack, parameter, ready, ticks(), bytes, iteration_);
  }
  ready_order_.push_back(parameter);
  // What is handed over may have been refused, and is asked for again.
  if (count_down(parameter) || take_) launch_packed();
}

// Where the gradient lies, until its bucket is packed: in the slot itself too, where it was added to the last mean.
void Engine::note_grad(int32_t parameter, const void* grad, DType grad_dtype) {
  look_at_caller();
  const Slot& slot = slots_[static_cast<size_t>(parameter)];
  Bucket& bucket = bucket_of(slot);
  bucket.grads[slot.order] = {const_cast<void*>(grad), grad_dtype};
  if (!contains(bucket.producers, caller_)) bucket.producers.push_back(caller_);
}

// As work of the caller's, after what the other streams made for it.
void Engine::pack_bucket(size_t index) {
  Bucket& bucket = buckets_[index];
  const uint64_t begin = ticks();
  lead_caller();
  for (Caller producer : bucket.producers) parts_.stream->order(producer, caller_);
  parts_.bucket_codec->pack(index, bucket.grads, pack_scale_, check_finite_, caller_);
  parts_.stream->follow(caller_);
  releasing_.clear();
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    uint8_t& packed = packed_[static_cast<size_t>(bucket.parameters[i])];
    if (!packed) releasing_.push_back(bucket.parameters[i]);
    packed = 1;
  }
  bucket.packed = bucket.numel;
  parts_.trace->record(TraceKind::kPackBucket, static_cast<int32_t>(index), begin, ticks(),
                       bucket.numel * size_of(bucket.dtype), iteration_);
  std::erase(bucket.producers, caller_);
  bucket.producers.insert(bucket.producers.begin(), caller_);
  if (release_) release_(releasing_, bucket.producers);
}

// A stream of the program that did not take the last means may still run ahead of their reduction.
void Engine::lead_caller() {
  if (contains(led_, caller_)) return;
  parts_.stream->lead(caller_, last_reduced_);
  led_.push_back(caller_);
}

size_t Engine::piece_numel(const Bucket& bucket) const {
  return piece_bytes_ == 0 ? bucket.numel : std::max<size_t>(piece_bytes_ / size_of(bucket.dtype), 1);
}

// Packs up to each border between pieces that lies in the slot and launches what ends there; the rest is left to the
// caller. So a piece of a large gradient is reduced while it is in cache.
void Engine::pack_in_pieces(int32_t parameter, const void* grad, DType grad_dtype) {
  const Slot& slot = slots_[static_cast<size_t>(parameter)];
  Bucket& bucket = bucket_of(slot);
  const size_t piece = piece_numel(bucket);
  const bool in_order = bucket.in_order == slot.order;
  size_t done = 0;
  while (done < slot.numel) {
    size_t numel = slot.numel - done;
    if (in_order && piece > 0) numel = std::min(numel, piece - (slot.offset + done) % piece);
    std::byte* to = slot.address + done * size_of(slot.dtype);
    parts_.codec->pack(to, slot.dtype, static_cast<const std::byte*>(grad) + done * size_of(grad_dtype), grad_dtype,
                       numel, pack_scale_);
    check_finite(parameter, to, slot.dtype, numel);
    done += numel;
    if (in_order && done < slot.numel) {
      bucket.packed = slot.offset + done;
      launch_packed();
    }
  }
}

void Engine::complete(int32_t parameter, const void* grad, DType grad_dtype) {
  const Slot& slot = slots_[static_cast<size_t>(parameter)];
  if (parts_.bucket_codec) {
    note_grad(parameter, grad, grad_dtype);
    packed_[static_cast<size_t>(parameter)] = 1;
  } else if (grad == nullptr) {
    parts_.codec->zero(slot.address, slot.numel * size_of(slot.dtype));
  } else {
    parts_.codec->pack(slot.address, slot.dtype, grad, grad_dtype, slot.numel, pack_scale_);
    check_finite(parameter, slot.address, slot.dtype, slot.numel);
  }
  count_down(parameter);
}

int32_t Engine::nonfinite_parameter() {
  if (!parts_.bucket_codec || !check_finite_) return nonfinite_parameter_;
  const std::vector<int32_t> found = parts_.bucket_codec->read_check(*parts_.stream);
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] < 0) continue;
    const int32_t parameter = buckets_[i].parameters.at(static_cast<size_t>(found[i]));
    if (nonfinite_parameter_ < 0 || parameter < nonfinite_parameter_) nonfinite_parameter_ = parameter;
  }
  return nonfinite_parameter_;
}

// Before what was packed is launched: a peer may write its mean there from then on.
void Engine::check_finite(int32_t parameter, const void* packed, DType dtype, size_t numel) {
  if (!check_finite_ || (nonfinite_parameter_ >= 0 && nonfinite_parameter_ <= parameter)) return;
  if (parts_.codec->first_nonfinite(packed, dtype, numel) >= 0) nonfinite_parameter_ = parameter;
}

void Engine::mark_packed(int32_t parameter) {
  const Slot& slot = slots_[static_cast<size_t>(parameter)];
  if (parts_.bucket_codec)
    packed_[static_cast<size_t>(parameter)] = 1;  // it is not `.grad`: nothing is taken from there
  mark_ready(parameter, slot.grad, slot.grad_dtype);
}

void Engine::request_second_round(int32_t parameter) {
  used_.set(static_cast<size_t>(parameter));
  second_round_.set(static_cast<size_t>(parameter));
}

// True: something may be launched that could not be before.
bool Engine::count_down(int32_t parameter) {
  const int32_t index = slots_[static_cast<size_t>(parameter)].bucket;
  Bucket& bucket = buckets_[static_cast<size_t>(index)];
  uint8_t& counted = counted_[static_cast<size_t>(parameter)];
  GPUCOMM_ASSERT(bucket.pending > 0 && !counted, "parameter " + std::to_string(parameter));
  counted = 1;
  --bucket.pending;
  if (parts_.bucket_codec) {
    if (bucket.pending == 0) pack_bucket(static_cast<size_t>(index));
    return bucket.pending == 0;
  }
  packed_[static_cast<size_t>(parameter)] = 1;
  const size_t before = bucket.in_order;
  while (bucket.in_order < bucket.parameters.size() && packed(bucket.parameters[bucket.in_order])) ++bucket.in_order;
  if (bucket.in_order == bucket.parameters.size()) {
    bucket.packed = bucket.numel;
  } else if (bucket.in_order > before) {
    bucket.packed = slots_[static_cast<size_t>(bucket.parameters[bucket.in_order])].offset;
  }
  return bucket.in_order > before;
}

// Starts the reduction of every piece that is packed and before which all is launched, in plan order.
void Engine::launch_packed() {
  bool any = false;
  while (launched_ < buckets_.size()) {
    Bucket& bucket = buckets_[launched_];
    while (launch_next_piece(bucket)) any = true;
    if (bucket.launched < bucket.numel || bucket.pending > 0) break;
    if (bucket.numel == 0) {
      bucket.launch_ticks = ticks();
      bucket.reduced = parts_.stream->record();
    }
    ++launched_;
  }
  if (!any) return;
  parts_.stream->progress();
  note_reduced();
}

bool Engine::launch_next_piece(Bucket& bucket) {
  if (bucket.held && !ending_) return false;
  if (take_) return hand_over(bucket);
  const size_t end = std::min(bucket.launched + piece_numel(bucket), bucket.numel);
  if (end == bucket.launched || end > bucket.packed) return false;
  if (bucket.launched == 0) bucket.launch_ticks = ticks();
  void* address = static_cast<std::byte*>(bucket.memory.address) + bucket.launched * size_of(bucket.dtype);
  parts_.transport->start({.kind = CollectiveKind::kAllReduce,
                           .dtype = bucket.dtype,
                           .op = ReduceOp::kSum,
                           .numel = end - bucket.launched,
                           .scale = is_floating(bucket.dtype) ? reduce_scale_ : 1.0,
                           .in = address,
                           .out = address,
                           .bucket = static_cast<int32_t>(&bucket - buckets_.data())},
                          *parts_.stream);
  bucket.launched = end;
  if (end < bucket.numel) return true;
  const auto index = static_cast<size_t>(&bucket - buckets_.data());
  if (measures_norm_) parts_.bucket_codec->add_norm(index, *parts_.stream);
  if (parts_.stream->runs_by_itself() && bucket.unpacked_bytes > 0) unpack(index);
  bucket.reduced = parts_.stream->record();
  return true;
}

bool Engine::hand_over(Bucket& bucket) {
  if (bucket.pending > 0 || bucket.launched == bucket.numel) return false;
  bucket.launch_ticks = ticks();
  bucket.reduced = parts_.stream->record();
  bucket.launched = bucket.numel;  // also where it raises: it is not asked twice
  if (take_(static_cast<size_t>(&bucket - buckets_.data()), ending_)) return true;
  bucket.launched = 0;
  return false;
}

// Which buckets were reduced by now, as far as this rank has seen: it looks when a bucket is launched and at the end.
void Engine::note_reduced() {
  while (reduced_ < launched_ && parts_.stream->query(buckets_[reduced_].reduced)) {
    if (!take_) mark_reduced(reduced_);
    ++reduced_;
  }
}

// While backward still runs, if the bucket is reduced by then: its gradients were taken from their parameters when they
// were packed, so nobody looks at the memory that is written here.
void Engine::unpack(size_t index) {
  Bucket& bucket = buckets_[index];
  const uint64_t begin = ticks();
  if (parts_.bucket_codec) {
    for (size_t i = 0; i < bucket.parameters.size(); ++i) {
      const Slot& slot = slots_[static_cast<size_t>(bucket.parameters[i])];
      bucket.grads[i] = slot.unpacks ? GradPointer{slot.grad, slot.grad_dtype} : GradPointer{};
    }
    parts_.bucket_codec->unpack(index, bucket.grads, *parts_.stream);
  } else {
    unpack_slots(bucket);
  }
  parts_.trace->record(TraceKind::kUnpack, static_cast<int32_t>(index), begin, ticks(), bucket.unpacked_bytes,
                       iteration_);
}

void Engine::unpack_slots(const Bucket& bucket) {
  for (int32_t parameter : bucket.parameters) {
    const Slot& slot = slots_[static_cast<size_t>(parameter)];
    if (!slot.unpacks) continue;
    parts_.codec->unpack(slot.grad, slot.grad_dtype, slot.address, slot.dtype, slot.numel, 1.0);
  }
}

std::vector<int32_t> Engine::missing() const {
  std::vector<int32_t> result;
  bool any = false;
  for (const Bucket& bucket : buckets_) any |= bucket.pending > 0;
  if (!any) return result;
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].bucket >= 0 && !counted_[i]) result.push_back(static_cast<int32_t>(i));
  }
  return result;
}

void Engine::launch_rest() {
  GPUCOMM_ASSERT(mode_ == Mode::kReduce, "launch_rest outside a backward");
  ending_ = true;
  launch_packed();
}

const Verdict& Engine::finish(const HeaderWords& words) {
  launch_rest();
  GPUCOMM_ASSERT(launched_ == buckets_.size(), std::to_string(launched_) + " of " + std::to_string(buckets_.size()));
  start_header(words);
  const Event header = parts_.control_stream->record();
  parts_.control_stream->progress();
  if (parts_.stream->runs_by_itself()) {
    // The program's stream waits, and the ranks' hosts only for each other.
    if (check_finite_) parts_.bucket_codec->begin_check(*parts_.stream);
    last_reduced_ = parts_.stream->record();
    look_at_caller();
    parts_.stream->lead(caller_, last_reduced_);
    led_ = {caller_};
    note_reduced();
  } else {
    wait_for_buckets();
  }
  const uint64_t begin = ticks();
  parts_.control_stream->synchronize(header);
  note_wait(begin, -1, header_bytes_);
  parts_.trace->record(TraceKind::kHeader, -1, begin, ticks(), header_bytes_, iteration_);
  read_verdict();
  return verdict_;
}

void Engine::wait_for_buckets() {
  for (note_reduced(); reduced_ < launched_; note_reduced()) {
    const Bucket& bucket = buckets_[reduced_];
    const uint64_t begin = ticks();
    parts_.stream->synchronize(bucket.reduced);
    note_wait(begin, static_cast<int32_t>(reduced_), bucket.numel * size_of(bucket.dtype));
  }
}

void Engine::note_wait(uint64_t begin_ticks, int32_t id, size_t bytes) {
  const uint64_t end = ticks();
  wait_ticks_ += static_cast<int64_t>(end - begin_ticks);
  parts_.trace->record(TraceKind::kWait, id, begin_ticks, end, bytes, iteration_);
}

void Engine::start_header(const HeaderWords& words) {
  std::byte* mine = header_memory_.data();
  const size_t bitmap_bytes = used_.words().size_bytes();
  std::memcpy(mine, &words, sizeof words);
  std::memcpy(mine + sizeof words, used_.words().data(), bitmap_bytes);
  std::memcpy(mine + sizeof words + bitmap_bytes, second_round_.words().data(), bitmap_bytes);
  parts_.control_transport->start({.kind = CollectiveKind::kAllGather,
                                   .dtype = DType::kUInt8,
                                   .numel = header_bytes_,
                                   .in = mine,
                                   .out = mine + header_bytes_},
                                  *parts_.control_stream);
}

void Engine::read_verdict() {
  const std::byte* theirs = header_memory_.data() + header_bytes_;
  const size_t bitmap_words = used_.words().size();
  verdict_.ranks.resize(static_cast<size_t>(parts_.transport->size()));
  verdict_.used.clear();
  verdict_.used_by_all.fill();
  verdict_.second_round.clear();
  for (size_t r = 0; r < verdict_.ranks.size(); ++r, theirs += header_bytes_) {
    std::memcpy(&verdict_.ranks[r], theirs, sizeof(HeaderWords));
    const std::byte* bitmaps = theirs + sizeof(HeaderWords);
    for (size_t w = 0; w < bitmap_words; ++w) {
      uint64_t used, second;
      std::memcpy(&used, bitmaps + w * sizeof used, sizeof used);
      std::memcpy(&second, bitmaps + (bitmap_words + w) * sizeof second, sizeof second);
      verdict_.used.words()[w] |= used;
      if (!(verdict_.ranks[r].flags & kJoined)) verdict_.used_by_all.words()[w] &= used;
      verdict_.second_round.words()[w] |= second;
    }
  }
  const HeaderWords& first = verdict_.ranks[0];
  verdict_.all_used = true;
  for (size_t i = 0; i < slots_.size(); ++i) verdict_.all_used &= slots_[i].bucket < 0 || verdict_.used_by_all.test(i);
  verdict_.agreed = !verdict_.second_round.any();
  for (const HeaderWords& words : verdict_.ranks) {
    verdict_.agreed &= words.iteration == first.iteration && words.layout_hash == first.layout_hash &&
                       words.backwards == first.backwards && words.forwards == first.forwards && words.flags == 0 &&
                       words.nonfinite < 0;
  }
}

std::vector<int32_t> Engine::used_counts() const {
  std::vector<int32_t> counts(slots_.size(), 0);
  Bitmap used(slots_.size());
  const std::byte* theirs = header_memory_.data() + header_bytes_ + sizeof(HeaderWords);
  for (size_t r = 0; r < verdict_.ranks.size(); ++r, theirs += header_bytes_) {
    std::memcpy(used.words().data(), theirs, used.words().size_bytes());
    for (size_t i = 0; i < counts.size(); ++i) counts[i] += used.test(i);
  }
  return counts;
}

void Engine::disarm() {
  if (mode_ == Mode::kReduce) used_.clear();
  mode_ = Mode::kIdle;
}

}  // namespace gpucomm
