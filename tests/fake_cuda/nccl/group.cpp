#include "fake_cuda/nccl/group.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "fake_cuda/nccl/launch.h"

namespace fake_nccl {
namespace {

struct Job {
  ncclComm* comm;
  const char* function;
  Poll poll;
  Result result = kInProgress;
};

struct Request {
  ncclComm* comm;
  const char* function;
  Operation operation;
  cuda::StreamHandle stream;
};

struct Group {
  int depth = 0;
  Result error = kSuccess;
  std::vector<Job> jobs;
  std::vector<Request> requests;
};

Group& group() {
  thread_local Group own;
  return own;
}

// Left to be polled for.
Result postpone(Job& job) {
  const DeviceLock lock;
  if (job.comm->pending.empty()) job.comm->polls_left = script().value("polls", "n", 1);
  job.comm->pending.push_back(job.poll);
  return kInProgress;
}

// All at once: ranks of one thread may wait for each other.
Result wait_for_all(std::vector<Job*> jobs) {
  std::vector<std::unique_ptr<Presence>> presences;
  for (const Job* job : jobs) presences.push_back(std::make_unique<Presence>(job->comm, job->function));
  return wait_for([&]() -> Result {
    Result first = kSuccess;
    bool all_done = true;
    for (Job* job : jobs) {
      if (job->result == kInProgress) job->result = job->poll();
      all_done &= job->result != kInProgress;
      if (first == kSuccess && job->result != kInProgress) first = job->result;
    }
    return all_done ? first : Result{kInProgress};
  });
}

Result run(std::vector<Job> jobs) {
  std::vector<Job*> blocking;
  Result postponed = kSuccess;
  for (Job& job : jobs) {
    if (job.comm->options.blocking)
      blocking.push_back(&job);
    else
      postponed = postpone(job);
  }
  if (!blocking.empty() && postponed != kSuccess)
    misuse("ncclGroupEnd", "group-blocking", "blocking and non-blocking communicators in one group");
  const Result waited = blocking.empty() ? Result{kSuccess} : wait_for_all(blocking);
  return waited != kSuccess ? waited : postponed;
}

// Launches once the host call is through: the script may hold it up, as connecting to a dead peer does.
Poll launching(const Request& first, std::vector<Operation> operations) {
  ncclComm* comm = first.comm;
  return guarded(comm, [=, begun_ms = int64_t{-1}]() mutable {
    if (begun_ms < 0) begun_ms = now_ms();
    if (const Statement* block = script().find("block", comm->subject(static_cast<int64_t>(comm->launched)))) {
      const std::optional<int64_t> until = block->number("ms");
      if (!until || now_ms() - begun_ms < *until) return Result{kInProgress};
    }
    return Launch::enqueue(comm, operations, first.stream, first.function);
  });
}

// One launch for each communicator, in the order of their first collectives.
std::vector<Job> launches_of(const std::vector<Request>& requests) {
  std::vector<Job> jobs;
  for (const Request& first : requests) {
    const auto same = [&](const Job& job) { return job.comm == first.comm; };
    if (std::any_of(jobs.begin(), jobs.end(), same)) continue;
    std::vector<Operation> operations;
    for (const Request& request : requests) {
      if (request.comm != first.comm) continue;
      operations.push_back(request.operation);
      if (request.stream != first.stream)
        misuse(request.function, "group-streams", first.comm->name() + " is on several streams in one group");
    }
    jobs.push_back({first.comm, first.function, launching(first, operations)});
  }
  return jobs;
}

}  // namespace

Result submit(ncclComm* comm, const char* function, const Poll& poll) {
  if (!is_in_group()) return run({{comm, function, poll}});
  group().jobs.push_back({comm, function, poll});
  return comm->options.blocking ? kSuccess : kInProgress;
}

Result submit(ncclComm* comm, const char* function, const Operation& operation, cuda::StreamHandle stream) {
  const Request request{comm, function, operation, stream};
  if (!is_in_group()) return run(launches_of({request}));
  group().requests.push_back(request);
  return comm->options.blocking ? kSuccess : kInProgress;
}

Result fail_group(Result result) {
  if (is_in_group() && group().error == kSuccess && result != kInProgress) group().error = result;
  return result;
}

bool is_in_group() { return group().depth > 0; }

Result start_group() {
  ++group().depth;
  return kSuccess;
}

Result end_group() {
  Group& own = group();
  if (own.depth == 0) {
    misuse("ncclGroupEnd", "group", "not in a group");
    return failure(kInvalidUsage, "ncclGroupEnd: not in a group call.");
  }
  if (--own.depth > 0) return kSuccess;
  const Group ended = std::exchange(own, Group());
  if (ended.error != kSuccess) return ended.error;
  const Result jobs = run(ended.jobs);
  if (jobs != kSuccess && jobs != kInProgress) return jobs;
  const Result launched = run(launches_of(ended.requests));
  return launched == kSuccess ? jobs : launched;
}

}  // namespace fake_nccl
