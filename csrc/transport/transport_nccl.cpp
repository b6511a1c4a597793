#include "transport/transport_nccl.h"

#include <algorithm>
#include <utility>

#include "nccl/communicator.h"

namespace gpucomm {

namespace {

nccl::CommunicatorOptions communicator_options(const NcclOptions& options) {
  nccl::Config config;
  config.blocking = options.blocking ? 1 : 0;
  // NCCL takes a lower limit only with an upper one.
  if (options.min_ctas > 0 || options.max_ctas > 0) {
    if (options.min_ctas < 0 || options.max_ctas < std::max(options.min_ctas, 1)) {
      throw UsageError("min_ctas is " + std::to_string(options.min_ctas) + " and max_ctas " +
                       std::to_string(options.max_ctas) + ", accepted is 1 <= min_ctas <= max_ctas, or 0 for both");
    }
    config.min_ctas = std::max(options.min_ctas, 1);
    config.max_ctas = options.max_ctas;
  }
  if (options.cga_cluster_size > 0) config.cga_cluster_size = options.cga_cluster_size;
  return {.api = options.nccl,
          .device = options.device,
          .id = options.id,
          .rank = options.rank,
          .size = options.size,
          .timeout_s = options.timeout_s,
          .name = options.name,
          .config = config,
          .embedder = options.embedder};
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

std::string text_of(const Collective& c) {
  return std::string(name_of(c.kind)) + " of " + std::to_string(c.numel) + " " + std::string(name_of(c.dtype));
}

}  // namespace

NcclTransport::NcclTransport(NcclOptions options)
    : Transport(options.rank, options.size, options.global_ranks), options_(std::move(options)) {
  comm_ = nccl::Communicator::make(communicator_options(options_));
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
    owner = {address, [nccl = options_.nccl, device](void* memory) {
               try {
                 const cuda::Current context(device->api(), device->context());
                 const cuda::BesideCaptures beside(device->api());
                 nccl->mem_free(memory);
               } catch (const CommError&) {
                 // The context is gone, and the memory with it.
               }
             }};
  } else {
    const auto memory = std::make_shared<cuda::DeviceMemory>(device, wanted);
    owner = {memory, memory->as<void>()};
  }
  cuda::CudaStream stream(device, options_.embedder);
  device->check(api.memset_d8_async(reinterpret_cast<cuda::DeviceAddress>(owner.get()), 0, bytes, stream.handle()),
                "cuMemsetD8Async");
  stream.synchronize(stream.record());
  return {owner, owner.get(), bytes, device->ordinal()};
}

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
    throw UsageError(text_of(collective) +
                     ": NCCL adds bytes in 8 bits, a sum beyond 255 would give another average: "
                     "take the average of a wider dtype");
  }
  const bool averages = averages_any && is_floating(collective.dtype);
  if (averages && !options_.scale) throw UsageError(text_of(collective) + ": no average without kernels");
  enqueue(collective, on->handle());
  if (averages) {
    options_.scale(collective.out, collective.dtype, collective.numel, 1.0 / size(), on->handle());
  }
}

void NcclTransport::enqueue(const Collective& c, cuda::StreamHandle stream) {
  const nccl::Api& api = *options_.nccl;
  const nccl::DataType type = nccl::type_of(c.dtype);
  const std::string what = text_of(c);
  comm_->call(what, [&](nccl::Comm comm) -> nccl::Result {
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
  });
  comm_->watch(what, stream);
}

void NcclTransport::abort(const std::string& reason) noexcept {
  comm_->fail(std::make_exception_ptr(CommError("this rank gave up: " + reason)));
}

void NcclTransport::check_failure() { comm_->check_failure(); }

}  // namespace gpucomm
