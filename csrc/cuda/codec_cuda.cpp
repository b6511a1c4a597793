#include "cuda/codec_cuda.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "cuda/kernel_name.h"

namespace gpucomm::cuda {

namespace {

constexpr unsigned kThreads = 256;
// What a byte-wise memset makes of an int: larger than any slot.
constexpr unsigned char kNoneByte = 0x7f;
constexpr int kNone = 0x7f7f7f7f;

}  // namespace

CudaKernels::~CudaKernels() {
  try {
    const Current current(device_->api(), device_->context());
    device_->api().module_unload(module_);
  } catch (const CudaError&) {
    // The context is gone, and the module with it.
  }
}

Function CudaKernels::function(const char* name) {
  const auto known = functions_.find(std::string_view(name));
  if (known != functions_.end()) return known->second;
  const Current current(device_->api(), device_->context());
  const std::string what = std::string("cuModuleGetFunction of ") + name;
  Function found = nullptr;
  device_->check(device_->api().module_get_function(&found, module_, name), what.c_str());
  return functions_[name] = found;
}

void CudaKernels::scale(void* memory, DType dtype, size_t numel, double factor, StreamHandle stream) {
  if (numel == 0) return;
  codec::FlatArgs args{};
  args.data = memory;
  args.numel = numel;
  args.scale = factor;
  launch(kernel_name(Kernel::kScale, dtype), codec::flat_blocks(numel), args, stream);
}

void CudaKernels::launch(const char* name, unsigned blocks, codec::FlatArgs args, StreamHandle stream) {
  void* arguments[] = {&args};
  const Function kernel = function(name);
  const Current current(device_->api(), device_->context());
  device_->check(device_->api().launch_kernel(kernel, blocks, 1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr),
                 "cuLaunchKernel");
}

CudaCodec::CudaCodec(std::shared_ptr<CudaKernels> kernels, std::shared_ptr<CudaStream> stream)
    : kernels_(std::move(kernels)),
      device_(kernels_->device()),
      stream_(std::move(stream)),
      squared_norm_(std::make_shared<DeviceMemory>(device_, sizeof(float))),
      partials_(std::make_unique<DeviceMemory>(device_, codec::kMaxFlatBlocks * sizeof(float))) {}

void CudaCodec::set_plan(const std::vector<BucketLayout>& layouts) {
  std::vector<codec::Piece> pieces;
  buckets_.clear();
  for (const BucketLayout& layout : layouts) {
    Planned& bucket = buckets_.emplace_back(Planned{layout, {pieces.size()}});
    for (uint32_t slot = 0; slot < layout.slots.size(); ++slot) {
      const auto [offset, numel] = layout.slots[slot];
      for (size_t done = 0; done < numel; done += codec::kPieceNumel) {
        const auto part = static_cast<codec::u32>(std::min<size_t>(numel - done, codec::kPieceNumel));
        pieces.push_back({.slot_offset = offset + done, .grad_offset = done, .numel = part, .slot = slot});
      }
      bucket.first_piece.push_back(pieces.size());
    }
  }
  const Current current(device_->api(), device_->context());
  pieces_ = std::make_unique<DeviceMemory>(device_, pieces.size() * sizeof(codec::Piece));
  found_ = std::make_unique<DeviceMemory>(device_, buckets_.size() * sizeof(int));
  read_ = std::make_unique<PinnedMemory>(device_, found_->bytes());
  const Api& api = device_->api();
  device_->check(
      api.memcpy_htod_async(pieces_->address(), pieces.data(), pieces.size() * sizeof(codec::Piece), stream_->handle()),
      "cuMemcpyHtoDAsync");
  device_->check(api.memset_d8_async(found_->address(), kNoneByte, found_->bytes(), stream_->handle()),
                 "cuMemsetD8Async");
  stream_->synchronize(stream_->record());
}

Function CudaCodec::kernel(What what, DType grad, DType slot) {
  Function& known = functions_[static_cast<int>(what)][static_cast<int>(grad)][static_cast<int>(slot)];
  if (!known)
    known = kernels_->function(what == What::kPack ? kernel_name(Kernel::kPack, grad, slot)
                                                   : kernel_name(Kernel::kUnpack, slot, grad));
  return known;
}

void CudaCodec::pack(size_t bucket, std::span<const GradPointer> grads, double scale, bool check, Caller caller) {
  int* found = check ? found_->as<int>() + bucket : nullptr;
  launch_all(What::kPack, bucket, grads, scale, found, static_cast<StreamHandle>(caller.stream));
}

void CudaCodec::unpack(size_t bucket, std::span<const GradPointer> grads, Stream& stream) {
  launch_all(What::kUnpack, bucket, grads, 1.0, nullptr, static_cast<CudaStream&>(stream).handle());
}

void CudaCodec::launch_all(What what, size_t index, std::span<const GradPointer> grads, double scale,
                           int* first_nonfinite, StreamHandle stream) {
  const Planned& bucket = buckets_.at(index);
  GPUCOMM_ASSERT(grads.size() == bucket.layout.slots.size(), "bucket " + std::to_string(index));
  const Current current(device_->api(), device_->context());
  codec::CodecArgs args;  // 4 KiB, of which the kernels read no pointer but those of their slots
  args.bucket = bucket.layout.address;
  args.partial_norms = nullptr;
  args.first_nonfinite = first_nonfinite;
  args.device_scale = nullptr;
  args.scale = scale;
  // Zeros are packed as if of the bucket's own dtype.
  const auto dtype_of = [&](const GradPointer& grad) { return grad.address ? grad.dtype : bucket.layout.dtype; };
  for (size_t begin = 0, end = 0; begin < grads.size(); begin = end) {
    // As many slots of one dtype as fit: nearly always the whole bucket.
    const DType dtype = dtype_of(grads[begin]);
    for (; end < grads.size() && end - begin < codec::kPointersPerLaunch && dtype_of(grads[end]) == dtype; ++end) {
      args.pointers[end - begin] = grads[end].address;
    }
    const size_t pieces = bucket.first_piece[end] - bucket.first_piece[begin];
    if (pieces == 0) continue;
    args.pieces = pieces_->as<const codec::Piece>() + bucket.first_piece[begin];
    args.first_slot = static_cast<codec::u32>(begin);
    void* arguments[] = {&args};
    device_->check(device_->api().launch_kernel(kernel(what, dtype, bucket.layout.dtype), static_cast<unsigned>(pieces),
                                                1, 1, kThreads, 1, 1, 0, stream, arguments, nullptr),
                   "cuLaunchKernel");
  }
}

void CudaCodec::begin_norm(Stream& stream) {
  const Current current(device_->api(), device_->context());
  device_->check(device_->api().memset_d8_async(squared_norm_->address(), 0, squared_norm_->bytes(),
                                                static_cast<CudaStream&>(stream).handle()),
                 "cuMemsetD8Async");
}

// In an order that hangs on the bucket's size alone, so that ranks come to the same bits.
void CudaCodec::add_norm(size_t index, Stream& stream) {
  const BucketLayout& bucket = buckets_.at(index).layout;
  if (bucket.numel == 0) return;
  const StreamHandle handle = static_cast<CudaStream&>(stream).handle();
  codec::FlatArgs args{};
  args.data = bucket.address;
  args.numel = bucket.numel;
  args.partials = partials_->as<float>();
  args.partial_count = codec::flat_blocks(bucket.numel);
  args.result = squared_norm_->as<float>();
  kernels_->launch(kernel_name(Kernel::kSquaredNorm, bucket.dtype), args.partial_count, args, handle);
  kernels_->launch(kernel_name(Kernel::kSumPartials), 1, args, handle);
}

void CudaCodec::begin_check(Stream& stream) {
  const Current current(device_->api(), device_->context());
  device_->check(device_->api().memset_d8_async(found_->address(), kNoneByte, found_->bytes(),
                                                static_cast<CudaStream&>(stream).handle()),
                 "cuMemsetD8Async");
}

std::vector<int32_t> CudaCodec::read_check(Stream& stream) {
  const Current current(device_->api(), device_->context());
  device_->check(device_->api().memcpy_dtoh_async(read_->as<int>(), found_->address(), found_->bytes(),
                                                  static_cast<CudaStream&>(stream).handle()),
                 "cuMemcpyDtoHAsync");
  stream.synchronize(stream.record());
  std::vector<int32_t> found(read_->as<int>(), read_->as<int>() + buckets_.size());
  for (int32_t& slot : found) slot = slot == kNone ? -1 : slot;
  return found;
}

}  // namespace gpucomm::cuda
