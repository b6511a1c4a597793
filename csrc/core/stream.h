// Ordered asynchronous work. A stream never blocks the one that enqueues; only synchronize() waits.
//
// On the CPU a stream is a queue of tasks that its owner's thread moves forward: progress() from a gradient hook, as
// far as it goes without waiting; synchronize() at the end of backward. A communication thread would only take the core
// from backward. On a GPU it is one of the device's own streams (cuda/stream_cuda.h), which runs by itself.
#pragma once

#include <cstdint>
#include <deque>
#include <exception>
#include <memory>

namespace gpucomm {

// A resumable piece of work, moved forward by the thread that owns the stream.
class Task {
 public:
  virtual ~Task() = default;
  // Does what can be done without waiting for a peer; true once the task is complete. Throws when it failed.
  virtual bool advance() = 0;
  // Blocks until advance() may get further. Throws CommTimeout, PeerFailed, or what the interrupt check raised.
  virtual void wait() = 0;
};

// A point in a stream: complete when everything enqueued before it is.
struct Event {
  uint64_t ticket = 0;
};

// Where the program's own work runs, which a stream is ordered with: on a GPU a stream of the program's, as the driver
// names it; on the CPU the thread that calls, and null.
struct Caller {
  void* stream = nullptr;
  bool operator==(const Caller&) const = default;
};

class Stream {
 public:
  virtual ~Stream() = default;
  virtual void enqueue(std::shared_ptr<Task> task) = 0;
  virtual Event record() = 0;
  virtual bool query(Event event) = 0;
  // Moves work forward without blocking. Throws the failure of a task; the stream stays failed.
  virtual void progress() = 0;
  // Waits for the event. Throws the failure of a task before it, however long ago that happened.
  virtual void synchronize(Event event) = 0;

  // Whether what is enqueued gets done without anybody moving it forward, so that what follows may be enqueued at once.
  virtual bool runs_by_itself() const = 0;
  // Orders what is enqueued here from now on after what the caller did until now.
  virtual void follow(Caller caller) = 0;
  // Orders what the caller does from now on after the event: where the caller is a thread, that waits.
  virtual void lead(Caller caller, Event event) = 0;
  // Orders what one stream of the program does from now on after what another did until now.
  virtual void order(Caller first, Caller then) = 0;
};

class InlineStream final : public Stream {
 public:
  void enqueue(std::shared_ptr<Task> task) override;
  Event record() override { return {enqueued_}; }
  bool query(Event event) override { return completed_ >= event.ticket; }
  void progress() override;
  void synchronize(Event event) override;
  bool runs_by_itself() const override { return false; }
  void follow(Caller) override {}
  void lead(Caller, Event event) override { synchronize(event); }
  void order(Caller, Caller) override {}

 private:
  bool advance_front();
  std::deque<std::shared_ptr<Task>> tasks_;
  uint64_t enqueued_ = 0;
  uint64_t completed_ = 0;
  std::exception_ptr failure_;
};

}  // namespace gpucomm
