#include <string>

#include "core/error.h"
#include "core/stream.h"

namespace gpucomm {

void InlineStream::enqueue(std::shared_ptr<Task> task) {
  if (failure_) std::rethrow_exception(failure_);
  tasks_.push_back(std::move(task));
  ++enqueued_;
}

bool InlineStream::advance_front() {
  try {
    if (!tasks_.front()->advance()) return false;
  } catch (...) {
    failure_ = std::current_exception();
    tasks_.clear();
    throw;
  }
  tasks_.pop_front();
  ++completed_;
  return true;
}

void InlineStream::progress() {
  if (failure_) std::rethrow_exception(failure_);
  while (!tasks_.empty() && advance_front()) {
  }
}

void InlineStream::synchronize(Event event) {
  if (failure_) std::rethrow_exception(failure_);
  GPUCOMM_ASSERT(event.ticket <= enqueued_, "event " + std::to_string(event.ticket) + " of a stream with " +
                                                std::to_string(enqueued_) + " tasks so far");
  while (completed_ < event.ticket) {
    if (advance_front()) continue;
    try {
      tasks_.front()->wait();
    } catch (...) {
      failure_ = std::current_exception();
      tasks_.clear();
      throw;
    }
  }
}

}  // namespace gpucomm
