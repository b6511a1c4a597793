#include "fake_cuda/driver/queues.h"

#include <thread>

#include "fake_cuda/driver/memory.h"
#include "fake_cuda/driver/reports.h"

namespace fake {

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool may_run(const CUstream_st& stream) {
  if (stream.pending.empty()) return false;
  for (const WorkPtr& other : stream.pending.front()->after) {
    if (!other->done) return false;
  }
  return true;
}

}  // namespace

CUstream_st& Queues::make_stream(CUctx_st& context, bool blocking, int priority) {
  CUstream_st& stream = streams_.make();
  stream.context = &context;
  stream.line = lines_++;
  stream.blocking = blocking;
  stream.priority = priority;
  stream.precedence = generator_();
  stream.name = "stream " + std::to_string(stream.line);
  return stream;
}

// The legacy stream waits for all blocking streams of its context, and each of them for it.
std::vector<WorkPtr> Queues::legacy_order(const CUstream_st& stream) const {
  std::vector<WorkPtr> after;
  const CUstream_st* legacy = stream.context->legacy;
  if (&stream == legacy) {
    for (const auto& other : streams_.all()) {
      if (other.get() != legacy && other->context == stream.context && other->blocking && other->tail) {
        after.push_back(other->tail);
      }
    }
  } else if (stream.blocking && legacy && legacy->tail) {
    after.push_back(legacy->tail);
  }
  return after;
}

WorkPtr Queues::enqueue(CUstream_st& stream, Work work, const std::vector<WorkPtr>& after) {
  auto owned = std::make_shared<Work>(std::move(work));
  owned->stream = &stream;
  owned->sequence = sequence_++;
  owned->capture = stream.capture;
  stream.clock.join(host_);
  std::vector<WorkPtr> others = legacy_order(stream);
  others.insert(others.end(), after.begin(), after.end());
  for (const WorkPtr& other : others) {
    stream.clock.join(other->clock);
    if (!other->done) owned->after.push_back(other);
  }
  owned->epoch = stream.clock.tick(stream.line);
  owned->clock = stream.clock;
  stream.pending.push_back(owned);
  stream.tail = owned;
  return owned;
}

void Queues::complete(CUstream_st& stream, Work& work) {
  if (!work.ranges.empty()) {
    const Access access{work.epoch, accesses().site(work.name, stream.name)};
    for (const FakeRange& range : work.ranges) {
      const auto address = reinterpret_cast<uintptr_t>(range.address);
      if (!range.write) accesses().read(address, range.bytes, access, work.clock);
    }
    for (const FakeRange& range : work.ranges) {
      const auto address = reinterpret_cast<uintptr_t>(range.address);
      if (range.write) accesses().write(address, range.bytes, access, work.clock);
    }
  }
  if (work.drop) work.drop();
  work.step = nullptr;
  work.drop = nullptr;
  work.after.clear();
  work.done = true;
  work.completed_ns = now_ns();
}

void Queues::step(CUstream_st& stream) {
  WorkPtr work = stream.pending.front();
  if (!work->started) {
    work->started = true;
    bool all_valid = true;
    std::erase_if(work->ranges, [](const FakeRange& range) { return range.bytes == 0; });
    for (const FakeRange& range : work->ranges) {
      all_valid &= memory().check(work->name + " on " + stream.name, reinterpret_cast<uintptr_t>(range.address),
                                  range.bytes, range.write);
    }
    if (!all_valid) {
      work->step = nullptr;
      work->ranges.clear();
    }
  }
  running_ = true;
  const bool is_complete = !work->step || work->step(*work);
  running_ = false;
  if (is_complete) {
    complete(stream, *work);
    stream.pending.pop_front();
    blocked_.clear();
  } else {
    blocked_.insert(work.get());
  }
}

// The streams have an order of precedence at random, in which one changes its place now and then. A choice among all at
// each step would hardly ever let one stream fall far behind the others, and that is where orderings are missed.
CUstream_st& Queues::random_one(const std::vector<CUstream_st*>& ready) {
  constexpr unsigned kStepsToAChange = 8;
  if (random(kStepsToAChange) == 0) ready[random(static_cast<unsigned>(ready.size()))]->precedence = generator_();
  return **std::max_element(ready.begin(), ready.end(),
                            [](const CUstream_st* a, const CUstream_st* b) { return a->precedence < b->precedence; });
}

Queues::Progress Queues::step_one(const Chosen* among) {
  driven_ = std::chrono::steady_clock::now();
  std::vector<CUstream_st*> ready;
  bool is_blocked = false;
  for (const auto& stream : streams_.all()) {
    if (!may_run(*stream)) continue;
    const Work* work = stream->pending.front().get();
    if (among && !among->contains(work)) continue;
    if (blocked_.contains(work)) {
      is_blocked = true;
    } else {
      ready.push_back(stream.get());
    }
  }
  if (ready.empty()) return is_blocked ? Progress::kBlocked : Progress::kNone;
  auto is_earlier = [](const CUstream_st* a, const CUstream_st* b) {
    return a->pending.front()->sequence < b->pending.front()->sequence;
  };
  switch (order_) {
    case Order::kEarliest:
      step(**std::min_element(ready.begin(), ready.end(), is_earlier));
      break;
    case Order::kLatest:
      step(**std::max_element(ready.begin(), ready.end(), is_earlier));
      break;
    case Order::kRandom:
      step(random_one(ready));
      break;
  }
  return Progress::kSome;
}

bool Queues::drive(const std::function<bool()>& is_over, const Chosen* among, const std::string& what) {
  if (running_) {
    reports().add(Kind::kMisuse, what + ": called from within work of a stream");
    return false;
  }
  const auto begin = std::chrono::steady_clock::now();
  blocked_.clear();
  while (!is_over()) {
    if (step_one(among) == Progress::kSome) continue;
    if (std::chrono::steady_clock::now() - begin > deadline_) {
      reports().add(Kind::kStuck, what + " did not get to its end: " + pending_text());
      return false;
    }
    // Waits for peers of other processes, or for other threads to enqueue.
    lock_.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    lock_.lock();
    blocked_.clear();
  }
  return true;
}

void Queues::add_before(const WorkPtr& work, Chosen& chosen) const {
  std::vector<const Work*> todo{work.get()};
  while (!todo.empty()) {
    const Work* next = todo.back();
    todo.pop_back();
    if (next->done || chosen.contains(next)) continue;
    for (const WorkPtr& pending : next->stream->pending) {
      if (pending->sequence > next->sequence) break;
      if (!chosen.insert(pending.get()).second) continue;
      for (const WorkPtr& other : pending->after) todo.push_back(other.get());
    }
  }
}

bool Queues::run_until(const WorkPtr& work, const std::string& what) {
  Chosen chosen;
  add_before(work, chosen);
  return drive([&] { return work->done; }, &chosen, what);
}

bool Queues::run_before(const std::vector<CUstream_st*>& streams, const std::string& what) {
  std::vector<WorkPtr> last;
  for (const CUstream_st* stream : streams) {
    const std::vector<WorkPtr> others = legacy_order(*stream);
    last.insert(last.end(), others.begin(), others.end());
    if (stream->tail) last.push_back(stream->tail);
  }
  Chosen chosen;
  for (const WorkPtr& work : last) add_before(work, chosen);
  return drive([&] { return std::all_of(last.begin(), last.end(), [](const WorkPtr& work) { return work->done; }); },
               &chosen, what);
}

bool Queues::drain(const CUctx_st* context, const std::string& what) {
  auto is_over = [&] {
    return std::all_of(streams_.all().begin(), streams_.all().end(), [&](const auto& stream) {
      return stream->pending.empty() || (context && stream->context != context);
    });
  };
  return drive(is_over, nullptr, what);
}

void Queues::run_some() {
  if (running_) return;
  blocked_.clear();
  // Mostly a few, now and then about as many as there are: whoever polls may be far ahead of the device, or behind it.
  size_t pending = 0;
  for (const auto& stream : streams_.all()) pending += stream->pending.size();
  for (unsigned steps = random(random(2) ? 4 : static_cast<unsigned>(pending) + 2); steps > 0; --steps) {
    if (step_one(nullptr) != Progress::kSome) return;
  }
}

void Queues::run_if_idle(std::chrono::steady_clock::time_point since) {
  if (running_ || driven_ > since) return;
  blocked_.clear();
  while (step_one(nullptr) == Progress::kSome) {
  }
  driven_ = since;
}

bool Queues::is_idle(const CUstream_st& stream) const {
  if (!stream.pending.empty()) return false;
  const std::vector<WorkPtr> others = legacy_order(stream);
  return &stream != stream.context->legacy ||
         std::all_of(others.begin(), others.end(), [](const WorkPtr& work) { return work->done; });
}

Access Queues::host_access(const std::string& name) {
  return {host_.tick(kHostLine), accesses().site(name, "the host")};
}

void Queues::set_order(Order order, uint64_t seed) {
  order_ = order;
  generator_.seed(seed);
}

std::string Queues::pending_text() const {
  std::string text;
  for (const auto& stream : streams_.all()) {
    if (stream->pending.empty()) continue;
    const Work& front = *stream->pending.front();
    text += (text.empty() ? "" : "; ") + stream->name + " at " + front.name + (may_run(*stream) ? "" : " (waits)") +
            ", " + std::to_string(stream->pending.size()) + " in all";
  }
  return text.empty() ? "nothing is pending" : text;
}

void Queues::clear() {
  for (const auto& stream : streams_.all()) {
    for (const WorkPtr& work : stream->pending) {
      if (work->drop) work->drop();
      work->after.clear();
    }
  }
  streams_.clear();
  blocked_.clear();
  host_ = {};
  lines_ = kHostLine + 1;
  sequence_ = 0;
  set_order(Order::kRandom, 1);
  deadline_ = std::chrono::duration<double>(20.0);
}

Queues& queues() {
  static Queues* const instance = new Queues;  // threads may outlive what is destroyed at exit
  return *instance;
}

}  // namespace fake
