#include "nccl/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace gpucomm::nccl {

using namespace std::chrono_literals;

namespace {

// Between two looks of the watcher: what is noticed so late does not matter beside the time a failure costs.
constexpr auto kBetweenLooks = 20ms;
// How long the end of a communicator may take before it is left behind; some versions of NCCL hang in abort.
constexpr auto kLongestEnd = 5s;
// How long work may last whose peer's process is gone.
constexpr auto kLongestAfterwards = 1s;
// Between two looks for signals while a wait blocks.
constexpr auto kBetweenInterrupts = 50ms;
constexpr auto kBetweenPolls = 20us;

std::chrono::duration<double> seconds(double s) { return std::chrono::duration<double>(s); }

// What the text of an error of NCCL's leaves the reader to guess.
std::string advice(Result result) {
  switch (result) {
    case kInvalidUsage:
      return "; check that LOCAL_RANK gives every rank of a host a GPU of its own, and that all run the same NCCL";
    case kSystemError:
      return "; check NCCL_SOCKET_IFNAME and that the hosts reach each other; NCCL_DEBUG=INFO says more";
    case kUnhandledCudaError:
      return "; the GPU reported an error; NCCL_DEBUG=INFO and CUDA_LAUNCH_BLOCKING=1 say more";
    case kRemoteError:
      return "; a peer died or lost its connection: look at the other ranks' first errors";
    default:
      return "";
  }
}

std::string where(const CommunicatorOptions& options) {
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  return "rank " + std::to_string(options.rank) + " of " + std::to_string(options.size) + " on " + host + ", " +
         options.device->text() + ", NCCL " + version_text(options.api->version);
}

CommError failure_of(const CommunicatorOptions& options, Result result, const std::string& what, Comm comm) {
  const std::string text = what + " (" + where(options) + ")";
  return CommError(NcclError(*options.api, result, text.c_str(), comm).what() + advice(result));
}

struct Ending {
  std::shared_ptr<const Api> api;
  std::shared_ptr<const cuda::GpuDevice> device;
  std::shared_ptr<std::mutex> inside;
  Comm comm;
  bool abort;
  std::vector<Registered> registered;           // freed after the communicator is gone
  std::vector<cuda::EventHandle> events;        // all that there are
  std::vector<cuda::EventHandle> outstanding;   // of those, what tells when the work under way is done
  std::chrono::steady_clock::time_point until;  // it is waited for

  bool is_done() {
    while (!outstanding.empty() && device->api().event_query(outstanding.back()) != cuda::kNotReady)
      outstanding.pop_back();
    return outstanding.empty();
  }
};

Result deregister(const Api& api, Comm comm, const Registered& registered) {
  return registered.window ? api.comm_window_deregister(comm, registered.window)
                           : api.comm_deregister(comm, registered.handle);
}

void end_now(Ending& ending) {
  try {
    const cuda::Current current(ending.device->api(), ending.device->context());
    cuda::CaptureMode mode = cuda::kCaptureRelaxed;
    ending.device->api().thread_exchange_capture_mode(&mode);
    while (!ending.abort && !ending.is_done()) {
      ending.abort = std::chrono::steady_clock::now() >= ending.until;
      std::this_thread::sleep_for(1ms);
    }
    // [Note: abort]
    const bool revokes = ending.abort && ending.api->comm_revoke;
    if (revokes) ending.api->comm_revoke(ending.comm, 0);
    // By trying: thread sanitizers do not know locks with a deadline.
    std::unique_lock<std::mutex> lock(*ending.inside, std::defer_lock);
    const auto deadline = std::chrono::steady_clock::now() + kLongestEnd;
    while ((!ending.abort || revokes) && !lock.try_lock() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(1ms);
    }
    if (ending.abort) {
      ending.api->comm_abort(ending.comm);
    } else {
      for (const Registered& registered : ending.registered) deregister(*ending.api, ending.comm, registered);
      ending.api->comm_destroy(ending.comm);
    }
    for (cuda::EventHandle event : ending.events) ending.device->api().event_destroy(event);
  } catch (const CommError&) {
    // The context is gone, and the communicator's memory with it.
  }
}

}  // namespace

std::shared_ptr<Communicator> Communicator::make(CommunicatorOptions options) {
  std::shared_ptr<Communicator> made(new Communicator(std::move(options)));
  made->initialise();
  made->watcher_ = std::thread([raw = made.get()] { raw->run_watcher(); });
  return made;
}

Communicator::Communicator(CommunicatorOptions options)
    : options_(std::move(options)), inside_(std::make_shared<std::mutex>()) {}

Communicator::~Communicator() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (watcher_.joinable()) watcher_.join();
  end(false);
  if (!ending_) return;
  if (options_.embedder) options_.embedder->before_blocking();
  ending_->wait_for(kLongestEnd);
  if (options_.embedder) options_.embedder->after_blocking();
}

namespace {

// Shared with the thread that initialises, which may never come back.
struct Init {
  std::mutex mutex;
  bool given_up = false;
  Comm comm = nullptr;
  std::exception_ptr failure;

  bool is_given_up() {
    const std::lock_guard lock(mutex);
    return given_up;
  }
};

Result make_now(CommunicatorOptions& options, Comm* comm) {
  if (!options.parent)
    return options.api->comm_init_rank_config(comm, options.size, options.id, options.rank, &options.config);
  options.parent->call([] { return std::string("making a smaller communicator"); },
                       [&](Comm parent) {
                         return options.api->comm_shrink(parent, options.excluded.data(),
                                                         static_cast<int>(options.excluded.size()), comm,
                                                         &options.config, kShrinkDefault);
                       });
  options.parent.reset();
  return options.config.blocking == 0 ? kInProgress : kSuccess;
}

void init_now(CommunicatorOptions& options, const std::shared_ptr<Init>& init) {
  Comm comm = nullptr;
  std::exception_ptr failure;
  try {
    const cuda::Current current(options.device->api(), options.device->context());
    options.config.comm_name = options.name.empty() ? nullptr : options.name.c_str();
    options.config.net_name = options.net_name.empty() ? nullptr : options.net_name.c_str();
    Result result = make_now(options, &comm);
    while (result == kInProgress && !init->is_given_up()) {
      std::this_thread::sleep_for(1ms);
      check(*options.api, options.api->comm_get_async_error(comm, &result), "ncclCommGetAsyncError", comm);
    }
    if (result != kSuccess) throw failure_of(options, result, "ncclCommInitRankConfig", comm);
  } catch (...) {
    failure = std::current_exception();
  }
  bool is_wanted = false;
  {
    const std::lock_guard lock(init->mutex);
    is_wanted = !init->given_up && !failure;
    init->comm = is_wanted ? comm : nullptr;
    init->failure = failure;
  }
  if (comm && !is_wanted) options.api->comm_abort(comm);  // which may hang
}

}  // namespace

void Communicator::initialise() {
  const auto init = std::make_shared<Init>();
  // False: it has just come to its end.
  const auto give_up = [&] {
    const std::lock_guard lock(init->mutex);
    init->given_up = true;
    return init->comm == nullptr;
  };
  const auto thread = Background::start(options_, [init](CommunicatorOptions& options) { init_now(options, init); });
  const auto deadline = Clock::now() + seconds(options_.timeout_s);
  Embedder* embedder = options_.embedder;
  for (bool done = false; !done;) {
    if (Clock::now() >= deadline) {
      if (!give_up()) break;
      throw CommTimeout({}, options_.timeout_s,
                        "NCCL's initialisation (" + where(options_) +
                            "; check that every rank got here, and that NCCL_SOCKET_IFNAME names an interface by which "
                            "the hosts reach each other; NCCL_DEBUG=INFO says more)");
    }
    if (embedder) embedder->before_blocking();
    done = thread->wait_for(kBetweenInterrupts);
    if (embedder) embedder->after_blocking();
    try {
      if (embedder) embedder->check_interrupt();
    } catch (...) {
      comm_ = give_up() ? nullptr : init->comm;
      end(true);
      throw;
    }
  }
  if (init->failure) std::rethrow_exception(init->failure);
  comm_ = init->comm;
}

Result Communicator::settle(Result result) {
  const auto deadline = Clock::now() + seconds(options_.timeout_s);
  while (result == kInProgress && !failed_ && Clock::now() < deadline) {
    std::this_thread::sleep_for(kBetweenPolls);
    if (options_.api->comm_get_async_error(comm_, &result) != kSuccess) return kInternalError;
  }
  return result;
}

void Communicator::call(const Text& what, const std::function<Result(Comm)>& body) {
  check_failure();
  Result result = kSuccess;
  {
    const std::lock_guard lock(*inside_);
    call_began_ = Clock::now().time_since_epoch().count();
    const cuda::Current current(options_.device->api(), options_.device->context());
    if (!failed_) result = settle(body(comm_));
    call_began_ = 0;
  }
  check_failure();
  if (result == kSuccess) return;
  // NCCL checks arguments before it does anything, and says so.
  const CommError failure = failure_of(options_, result, what(), comm_);
  if (result == kInvalidArgument) throw UsageError(failure.what());
  fail(std::make_exception_ptr(failure));
  throw failure;
}

void Communicator::watch(const Text& what, cuda::StreamHandle stream) {
  const cuda::Api& api = options_.device->api();
  const cuda::Current current(api, options_.device->context());
  cuda::CaptureStatus status = cuda::kCaptureNone;
  options_.device->check(api.stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  if (status != cuda::kCaptureNone) return;
  const std::lock_guard lock(mutex_);
  if (ended_) return;
  if (free_.empty()) {
    cuda::EventHandle made = nullptr;
    options_.device->check(api.event_create(&made, cuda::kEventDisableTiming), "cuEventCreate");
    events_.push_back(made);
    free_.push_back({.event = made, .what = nullptr, .since = {}});
  }
  InFlight& work = free_.front();
  options_.device->check(api.event_record(work.event, stream), "cuEventRecord");
  work.what = what;
  work.since = Clock::now();
  in_flight_.splice(in_flight_.end(), free_, free_.begin());
}

bool Communicator::register_memory(std::shared_ptr<void> memory, size_t bytes, bool symmetric) {
  const Api& api = *options_.api;
  Registered registered{std::move(memory)};
  void* address = registered.memory.get();
  const Text what = [bytes] { return "registering " + std::to_string(bytes) + " bytes"; };
  if (symmetric && api.comm_window_register) {
    call(what, [&](Comm comm) {
      return api.comm_window_register(comm, address, bytes, &registered.window, kWindowCollSymmetric);
    });
  } else if (!symmetric && api.comm_register) {
    call(what, [&](Comm comm) { return api.comm_register(comm, address, bytes, &registered.handle); });
  }
  if (!registered.window && !registered.handle) return false;
  const std::lock_guard lock(mutex_);
  if (!ended_) registered_.push_back(std::move(registered));
  return true;
}

void Communicator::deregister_memory(const void* memory) {
  Registered registered;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(registered_.begin(), registered_.end(),
                                    [&](const Registered& one) { return one.memory.get() == memory; });
    if (found == registered_.end()) return;
    registered = std::move(*found);
    registered_.erase(found);
  }
  if (failed_) return;  // it is gone with the communicator
  call([] { return std::string("taking back registered memory"); },
       [&](Comm comm) { return deregister(*options_.api, comm, registered); });
}

void Communicator::check_failure() {
  if (!failed_.load(std::memory_order_acquire)) return;  // partner: the store in fail()
  const std::lock_guard lock(mutex_);
  std::rethrow_exception(failure_);
}

void Communicator::fail(std::exception_ptr failure) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = std::move(failure);
    failed_.store(true, std::memory_order_release);  // partner: the load in check_failure()
  }
  end(true);
}

void Communicator::end(bool abort) noexcept {
  const std::lock_guard lock(mutex_);
  if (ended_ || !comm_) return;
  ended_ = true;
  options_.peers.clear();  // nothing is watched any more
  try {
    Ending ending{options_.api,           options_.device,    inside_, comm_, abort,
                  std::move(registered_), std::move(events_), {},      {}};
    for (const InFlight& work : in_flight_) ending.outstanding.push_back(work.event);
    ending.until = Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds(options_.timeout_s));
    in_flight_.clear();
    free_.clear();
    events_.clear();
    registered_.clear();
    ending_ = Background::start(std::move(ending), [](Ending& owned) { end_now(owned); });
  } catch (const std::system_error&) {
    // No thread is to be had: the communicator is leaked.
  }
}

void Communicator::run_watcher() {
  const cuda::Api& api = options_.device->api();
  cuda::CaptureMode mode = cuda::kCaptureRelaxed;
  api.thread_exchange_capture_mode(&mode);
  std::unique_lock lock(mutex_);
  while (!closing_ && !failure_) {
    changed_.wait_for(lock, kBetweenLooks, [&] { return closing_; });
    if (closing_ || failure_) return;
    lock.unlock();
    try {
      look();
    } catch (...) {
      fail(std::current_exception());
    }
    lock.lock();
  }
}

// Throws what it finds.
void Communicator::look() {
  const cuda::Current current(options_.device->api(), options_.device->context());
  const auto longest = std::chrono::duration_cast<Clock::duration>(seconds(options_.timeout_s));
  if (std::unique_lock inside(*inside_, std::try_to_lock); inside) {
    Result error = kSuccess;
    check(*options_.api, options_.api->comm_get_async_error(comm_, &error), "ncclCommGetAsyncError", comm_);
    if (error != kSuccess && error != kInProgress) {
      throw failure_of(options_, error, oldest_in_flight("a collective"), comm_);
    }
  } else if (const auto began = call_began_.load(); began != 0) {
    if (Clock::now().time_since_epoch() - Clock::duration(began) > longest) {
      throw CommTimeout({}, options_.timeout_s, "a call of NCCL's (" + where(options_) + ")");
    }
  }
  const std::lock_guard lock(mutex_);
  retire_completed();
  look_at_peers();
  if (in_flight_.empty() || Clock::now() - in_flight_.front().since <= longest) return;
  throw CommTimeout({}, options_.timeout_s, in_flight_.front().what() + " (" + where(options_) + ")");
}

// What a process did before it ended is complete soon; what it left undone never is.
void Communicator::look_at_peers() {
  if (in_flight_.empty()) return;
  for (const PeerProcess& peer : options_.peers) {
    if (!peer.process->ended()) continue;
    if (peer_gone_ == Clock::time_point()) peer_gone_ = Clock::now();
    if (Clock::now() - std::max(peer_gone_, in_flight_.front().since) < kLongestAfterwards) continue;
    throw PeerFailed(peer.rank, "its process ended, and " + in_flight_.front().what() + " is not complete (" +
                                    where(options_) + ")");
  }
}

std::string Communicator::oldest_in_flight(const std::string& otherwise) {
  const std::lock_guard lock(mutex_);
  return in_flight_.empty() ? otherwise : in_flight_.front().what();
}

// A collective could have begun once the one before it was complete.
void Communicator::retire_completed() {
  while (!in_flight_.empty()) {
    const cuda::Result result = options_.device->api().event_query(in_flight_.front().event);
    if (result == cuda::kNotReady) return;
    options_.device->check(result, "cuEventQuery");
    free_.splice(free_.begin(), in_flight_, in_flight_.begin());
    if (!in_flight_.empty()) in_flight_.front().since = std::max(in_flight_.front().since, Clock::now());
  }
}

}  // namespace gpucomm::nccl
