#include "transport/transport_nccl.h"

#include <utility>

namespace gpucomm {

namespace {

nccl::CommunicatorOptions communicator_options(const NcclOptions& options) {
  nccl::Config config = options.config;
  if (config.blocking == nccl::kUnset) config.blocking = 1;
  // NCCL takes a lower limit only with an upper one.
  if (config.min_ctas == nccl::kUnset && config.max_ctas != nccl::kUnset) config.min_ctas = 1;
  return {.api = options.nccl,
          .device = options.device,
          .id = options.id,
          .rank = options.rank,
          .size = options.size,
          .timeout_s = options.timeout_s,
          .name = options.name,
          .net_name = options.net_name,
          .config = config,
          .embedder = options.embedder,
          .peers = options.peers,
          .parent = options.parent ? options.parent->communicator() : nullptr,
          .excluded = options.excluded};
}

nccl::RedOp op_of(const Collective& collective) {
  switch (collective.op) {
    case ReduceOp::kSum:
      return nccl::kSum;
    case ReduceOp::kMin:
      return nccl::kMin;
    case ReduceOp::kMax:
      return nccl::kMax;
    case ReduceOp::kProd:
      return nccl::kProd;
    case ReduceOp::kAvg:
      // NCCL divides a sum of integers; floating contributions it multiplies by a rounded 1/N, which is off by 0.2 % in
      // bfloat16 on three ranks. Those are summed and then scaled.
      return is_floating(collective.dtype) ? nccl::kSum : nccl::kAvg;
  }
  throw_internal("op is one of ReduceOp", std::to_string(static_cast<int>(collective.op)), __FILE__, __LINE__);
}

nccl::Text text_of(const Collective& c) {
  return [kind = c.kind, dtype = c.dtype, bucket = c.bucket, numel = c.numel] {
    const std::string what = bucket < 0 ? "" : "bucket " + std::to_string(bucket) + ", ";
    return std::string(name_of(kind)) + " of " + what + std::to_string(numel) + " " + std::string(name_of(dtype));
  };
}

}  // namespace

NcclTransport::NcclTransport(NcclOptions options)
    : Transport(options.rank, options.size, options.global_ranks), options_(std::move(options)) {
  comm_ = nccl::Communicator::make(communicator_options(options_));
  options_.parent.reset();
  options_.peers.clear();
}

NcclTransport::~NcclTransport() = default;

Memory NcclTransport::allocate(size_t bytes) {
  const auto& device = options_.device;
  const cuda::Api& api = device->api();
  const cuda::Current current(api, device->context());
  const size_t wanted = bytes ? bytes : 1;
  std::shared_ptr<void> owner;
  if (options_.nccl->mem_alloc) {
    void* address = nullptr;
    nccl::check(*options_.nccl, options_.nccl->mem_alloc(&address, wanted), "ncclMemAlloc");
    owner = {address, [nccl = options_.nccl, device, embedder = options_.embedder](void* memory) {
               try {
                 const cuda::Current context(device->api(), device->context());
                 const cuda::BesideCaptures beside(device->api());
                 // It is unmapped, which unlike cuMemFree does not wait for what still uses it.
                 if (embedder) embedder->before_blocking();
                 device->api().ctx_synchronize();
                 if (embedder) embedder->after_blocking();
                 nccl->mem_free(memory);
               } catch (const CommError&) {
                 // The context is gone, and the memory with it.
               }
             }};
  } else {
    const auto memory = std::make_shared<cuda::DeviceMemory>(device, wanted);
    owner = {memory, memory->as<void>()};
  }
  const Memory memory{owner, owner.get(), bytes, device->ordinal()};
  clear(memory);
  return memory;
}

void NcclTransport::clear(const Memory& memory) {
  const auto& device = options_.device;
  cuda::CudaStream stream(device, options_.embedder);
  const cuda::Current current(device->api(), device->context());
  device->check(device->api().memset_d8_async(reinterpret_cast<cuda::DeviceAddress>(memory.address), 0, memory.bytes,
                                              stream.handle()),
                "cuMemsetD8Async");
  stream.synchronize(stream.record());
}

bool NcclTransport::register_memory(const Memory& memory, bool symmetric) {
  GPUCOMM_ASSERT(memory.device == options_.device->ordinal(), "memory of device " + std::to_string(memory.device));
  return comm_->register_memory({memory.owner, memory.address}, memory.bytes, symmetric);
}

void NcclTransport::deregister_memory(const Memory& memory) { comm_->deregister_memory(memory.address); }

void NcclTransport::start(const Collective& collective, Stream& stream) {
  check(collective);
  auto* on = dynamic_cast<cuda::CudaStream*>(&stream);
  GPUCOMM_ASSERT(on != nullptr, "a stream that is not of a GPU");
  GPUCOMM_ASSERT(on->device()->ordinal() == options_.device->ordinal(), on->device()->text());
  if (collective.kind == CollectiveKind::kBarrier) {
    throw UsageError("barrier: it is the hosts that meet, not their GPUs: through another transport");
  }
  if (collective.scale != 1.0) throw UsageError("scale is " + std::to_string(collective.scale) + ", NCCL takes none");
  const bool averages_any = collective.op == ReduceOp::kAvg && (collective.kind == CollectiveKind::kAllReduce ||
                                                                collective.kind == CollectiveKind::kReduceScatter);
  if (averages_any && collective.dtype == DType::kUInt8) {
    throw UsageError(text_of(collective)() +
                     ": NCCL adds bytes in 8 bits, a sum beyond 255 would give another average: "
                     "take the average of a wider dtype");
  }
  const bool averages = averages_any && is_floating(collective.dtype);
  if (averages && !options_.scale) throw UsageError(text_of(collective)() + ": no average without kernels");
  enqueue(collective, on->handle());
  if (averages) {
    options_.scale(collective.out, collective.dtype, collective.numel, 1.0 / size(), on->handle());
  }
}

void NcclTransport::enqueue(const Collective& c, cuda::StreamHandle stream) {
  const nccl::Api& api = *options_.nccl;
  const nccl::DataType type = nccl::type_of(c.dtype);
  const nccl::Text what = text_of(c);
  const auto body = [&](nccl::Comm comm) -> nccl::Result {
    switch (c.kind) {
      case CollectiveKind::kAllReduce:
        return api.all_reduce(c.in, c.out, c.numel, type, op_of(c), comm, stream);
      case CollectiveKind::kReduceScatter:
        return api.reduce_scatter(c.in, c.out, c.numel, type, op_of(c), comm, stream);
      case CollectiveKind::kAllGather:
        return api.all_gather(c.in, c.out, c.numel, type, comm, stream);
      case CollectiveKind::kBroadcast:
        return api.broadcast(c.out, c.out, c.numel, type, c.root, comm, stream);
      case CollectiveKind::kBarrier:
        break;
    }
    return nccl::kInvalidUsage;
  };
  comm_->call(what, std::cref(body));
  comm_->watch(what, stream);
}

void NcclTransport::abort(const std::string& reason) noexcept {
  comm_->fail(std::make_exception_ptr(CommError("this rank gave up: " + reason)));
}

bool NcclTransport::can_shrink() const { return options_.nccl->comm_shrink && !comm_->has_failed(); }

void NcclTransport::check_failure() { comm_->check_failure(); }

}  // namespace gpucomm
