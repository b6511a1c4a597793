// The codec of a GPU: one launch a bucket for as many slots as its arguments hold pointers (codec_args.h), with maps of
// the slots that are uploaded once a plan.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/codec_args.h"
#include "cuda/device.h"
#include "cuda/stream_cuda.h"
#include "kernels/bucket_codec.h"

namespace gpucomm::cuda {

// The kernels of codec.cu, loaded into a device.
class CudaKernels {
 public:
  // Takes the module over, which load_kernels() gives.
  CudaKernels(std::shared_ptr<const GpuDevice> device, Module module) : device_(std::move(device)), module_(module) {}
  ~CudaKernels();
  CudaKernels(const CudaKernels&) = delete;
  CudaKernels& operator=(const CudaKernels&) = delete;

  // Throws CudaError for a name that the module does not have.
  Function function(const char* name);
  const std::shared_ptr<const GpuDevice>& device() const { return device_; }

  // One of the kernels over FlatArgs, as work of the stream.
  void launch(const char* name, unsigned blocks, codec::FlatArgs args, StreamHandle stream);
  // memory[i] *= factor, as work of the stream. Floating types only.
  void scale(void* memory, DType dtype, size_t numel, double factor, StreamHandle stream);

 private:
  std::shared_ptr<const GpuDevice> device_;
  Module module_;
  std::map<std::string, Function, std::less<>> functions_;
};

class CudaCodec final : public BucketCodec {
 public:
  // stream: for uploads.
  CudaCodec(std::shared_ptr<CudaKernels> kernels, std::shared_ptr<CudaStream> stream);

  void set_plan(const std::vector<BucketLayout>& buckets) override;
  void move_bucket(size_t bucket, void* address) override { buckets_.at(bucket).layout.address = address; }
  void pack(size_t bucket, std::span<const GradPointer> grads, double scale, bool check, Caller caller) override;
  void unpack(size_t bucket, std::span<const GradPointer> grads, Stream& stream) override;
  void begin_norm(Stream& stream) override;
  void add_norm(size_t bucket, Stream& stream) override;
  const std::shared_ptr<const GpuDevice>& device() const { return device_; }
  // On the device: what begin_norm() and add_norm() are about, a float.
  const std::shared_ptr<DeviceMemory>& squared_norm() const { return squared_norm_; }
  void begin_check(Stream& stream) override;
  std::vector<int32_t> read_check(Stream& stream) override;

 private:
  struct Planned {
    BucketLayout layout;
    std::vector<size_t> first_piece;  // of each slot in the map; one more, for where the last one ends
  };
  enum class What : uint8_t { kPack, kUnpack };
  void launch_all(What what, size_t bucket, std::span<const GradPointer> grads, double scale, int* first_nonfinite,
                  StreamHandle stream);
  Function kernel(What what, DType grad, DType slot);

  std::shared_ptr<CudaKernels> kernels_;
  std::shared_ptr<const GpuDevice> device_;
  std::shared_ptr<CudaStream> stream_;
  std::vector<Planned> buckets_;
  std::unique_ptr<DeviceMemory> pieces_;  // codec::Piece, of all buckets
  std::unique_ptr<DeviceMemory> found_;   // int, by bucket: the first slot that is not finite
  std::unique_ptr<PinnedMemory> read_;    // the same on the host
  std::shared_ptr<DeviceMemory> squared_norm_;
  std::unique_ptr<DeviceMemory> partials_;  // of a bucket's, one for each block
  Function functions_[2][kDTypeCount][kDTypeCount] = {};
};

}  // namespace gpucomm::cuda
