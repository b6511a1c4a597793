#include "transport/transport_shm.h"

#include "transport/shm_collectives.h"

namespace gpucomm {
namespace {

class CollectiveTask final : public Task {
 public:
  CollectiveTask(std::shared_ptr<shm::Collectives> collectives, uint64_t number)
      : collectives_(std::move(collectives)), number_(number) {}

  bool advance() override {
    if (!collectives_->complete(number_)) collectives_->progress();
    return collectives_->complete(number_);
  }
  void wait() override { collectives_->block(); }

 private:
  std::shared_ptr<shm::Collectives> collectives_;
  uint64_t number_;
};

}  // namespace

ShmTransport::ShmTransport(ShmOptions options)
    : Transport(options.rank, options.size, options.global_ranks),
      collectives_(std::make_shared<shm::Collectives>(options)) {}

ShmTransport::~ShmTransport() { collectives_->close(); }

Memory ShmTransport::allocate(size_t bytes) { return collectives_->allocate(bytes); }

void ShmTransport::start(const Collective& collective, Stream& stream) {
  check(collective);
  const uint64_t number = collectives_->begin(collective);
  try {
    stream.enqueue(std::make_shared<CollectiveTask>(collectives_, number));
  } catch (...) {
    // Peers count on the operation, and nobody here would ever finish it.
    collectives_->abort("its stream refused a collective");
    throw;
  }
  collectives_->progress();
}

void ShmTransport::run(const Collective& collective, Stream& stream) {
  if (!collectives_->idle() || !stream.query(stream.record())) return Transport::run(collective, stream);
  check(collective);
  collectives_->finish(collectives_->begin(collective));
}

void ShmTransport::abort(const std::string& reason) noexcept { collectives_->abort(reason); }

}  // namespace gpucomm
