// pack, unpack, norms and scaling on the device. One source for three compilers: nvcc ahead of time, NVRTC at run time
// (which opens no header: hence one include, given to it in memory), and g++ for tests without a GPU
// (tests/fake_cuda/host_kernels.h stands for what the CUDA compilers build in).
//
// All of it is bound by memory. A block takes one stretch; a thread has kLoadsInFlight loads of 16 bytes on their way
// before it uses the first, and neighbouring threads take neighbouring groups of elements (see Tile). What may be null
// or unaligned is decided once a block. Kernels are correct for any blockDim, 1 included, and threads of a block meet
// nowhere but in block_sum.
#include "codec_args.h"

namespace gpucomm::codec {
namespace {

// ---- memory

// A pointer that was read from memory or from an array could point anywhere, for all the compiler knows; loads through
// it would take the generic path.
template <class T>
__device__ __forceinline__ T* global(void* address) {
#ifndef GPUCOMM_HOST_KERNELS
  __builtin_assume(__isGlobal(address));
#endif
  return static_cast<T*>(address);
}

template <class T>
__device__ __forceinline__ const T* global(const void* address) {
#ifndef GPUCOMM_HOST_KERNELS
  __builtin_assume(__isGlobal(address));
#endif
  return static_cast<const T*>(address);
}

constexpr u32 kChunkBytes = sizeof(uint4);

// In one instruction, whatever becomes of the words: left to itself the compiler may load halves.
__device__ __forceinline__ uint4 load_chunk(const uint4* address) {
#ifdef GPUCOMM_HOST_KERNELS
  return *address;
#else
  uint4 chunk;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "l"(address)
               : "memory");
  return chunk;
#endif
}

__device__ __forceinline__ bool aligned(const void* address) {
  return reinterpret_cast<u64>(address) % kChunkBytes == 0;
}

// ---- element types: how one is stored, what it is computed in, and how 16 bytes hold several

struct Float32 {
  using Storage = float;
  using Wide = float;
  static constexpr u32 kPerChunk = 4;
  // The largest magnitude that is finite once stored.
  static constexpr float kLargest = 0x1.fffffep127f;
  static __device__ __forceinline__ float load(float x) { return x; }
  static __device__ __forceinline__ float store(float x) { return x; }
  static __device__ __forceinline__ void load(uint4 chunk, float* wide) {
    wide[0] = __uint_as_float(chunk.x);
    wide[1] = __uint_as_float(chunk.y);
    wide[2] = __uint_as_float(chunk.z);
    wide[3] = __uint_as_float(chunk.w);
  }
  static __device__ __forceinline__ uint4 store(const float* wide) {
    return uint4{__float_as_uint(wide[0]), __float_as_uint(wide[1]), __float_as_uint(wide[2]),
                 __float_as_uint(wide[3])};
  }
};

struct Float64 {
  using Storage = double;
  using Wide = double;
  static constexpr u32 kPerChunk = 2;
  static constexpr double kLargest = 0x1.fffffffffffffp1023;
  static __device__ __forceinline__ double load(double x) { return x; }
  static __device__ __forceinline__ double store(double x) { return x; }
  static __device__ __forceinline__ double of(u32 low, u32 high) {
    return __longlong_as_double(static_cast<long long>((static_cast<u64>(high) << 32) | low));
  }
  static __device__ __forceinline__ void load(uint4 chunk, double* wide) {
    wide[0] = of(chunk.x, chunk.y);
    wide[1] = of(chunk.z, chunk.w);
  }
  static __device__ __forceinline__ uint4 store(const double* wide) {
    const u64 first = static_cast<u64>(__double_as_longlong(wide[0]));
    const u64 second = static_cast<u64>(__double_as_longlong(wide[1]));
    return uint4{static_cast<u32>(first), static_cast<u32>(first >> 32), static_cast<u32>(second),
                 static_cast<u32>(second >> 32)};
  }
};

// A 16-bit type is a codec of pairs: two elements in a word, the lower one first.
template <class Pairs>
struct TwoBytes {
  using Storage = unsigned short;
  using Wide = float;
  static constexpr u32 kPerChunk = 8;
  static __device__ __forceinline__ float load(Storage x) { return Pairs::low(x); }
  static __device__ __forceinline__ Storage store(float x) { return static_cast<Storage>(Pairs::pair(x, 0.0f)); }
  static __device__ __forceinline__ void load(uint4 chunk, float* wide) {
    const u32 words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      wide[2 * i] = Pairs::low(words[i]);
      wide[2 * i + 1] = Pairs::high(words[i]);
    }
  }
  static __device__ __forceinline__ uint4 store(const float* wide) {
    return uint4{Pairs::pair(wide[0], wide[1]), Pairs::pair(wide[2], wide[3]), Pairs::pair(wide[4], wide[5]),
                 Pairs::pair(wide[6], wide[7])};
  }
};

// The conversions of the hardware; before compute capability 8.0, and on the host, integer arithmetic (which is what
// csrc/kernels/half_bits.h explains).
#if !defined(GPUCOMM_HOST_KERNELS) && __CUDA_ARCH__ >= 800

struct HalfPairs {
  static __device__ __forceinline__ float widen(unsigned short half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
  }
  static __device__ __forceinline__ float low(u32 word) { return widen(static_cast<unsigned short>(word)); }
  static __device__ __forceinline__ float high(u32 word) { return widen(static_cast<unsigned short>(word >> 16)); }
  static __device__ __forceinline__ u32 pair(float low, float high) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

struct BFloatPairs {
  static __device__ __forceinline__ float low(u32 word) { return __uint_as_float(word << 16); }
  static __device__ __forceinline__ float high(u32 word) { return __uint_as_float(word & 0xffff0000u); }
  static __device__ __forceinline__ u32 pair(float low, float high) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
  }
};

#else

struct HalfPairs {
  static __device__ __forceinline__ float widen(u32 half) {
    const u32 magnitude = (half & 0x7fffu) << 13;
    const u32 sign = (half & 0x8000u) << 16;
    if (magnitude < 0x00800000u) {  // zero and subnormals
      const float bound = __uint_as_float(113u << 23);
      return __uint_as_float(sign | __float_as_uint(__uint_as_float(magnitude + (113u << 23)) - bound));
    }
    const u32 normal = magnitude + (112u << 23);
    if (magnitude < (0x7c00u << 13)) return __uint_as_float(sign | normal);
    const u32 quiet = magnitude > (0x7c00u << 13) ? 0x00400000u : 0u;
    return __uint_as_float(sign | (normal + (112u << 23)) | quiet);
  }
  static __device__ __forceinline__ u32 narrow(float value) {
    const u32 bits = __float_as_uint(value);
    const u32 magnitude = bits & 0x7fffffffu;
    const u32 sign = (bits >> 16) & 0x8000u;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu);
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
    if (magnitude < 0x38800000u) {
      return sign | (__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
    }
    return sign | ((magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
  }
  static __device__ __forceinline__ float low(u32 word) { return widen(word & 0xffffu); }
  static __device__ __forceinline__ float high(u32 word) { return widen(word >> 16); }
  static __device__ __forceinline__ u32 pair(float low, float high) { return narrow(low) | (narrow(high) << 16); }
};

struct BFloatPairs {
  static __device__ __forceinline__ u32 narrow(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }
  static __device__ __forceinline__ float low(u32 word) { return __uint_as_float(word << 16); }
  static __device__ __forceinline__ float high(u32 word) { return __uint_as_float(word & 0xffff0000u); }
  static __device__ __forceinline__ u32 pair(float low, float high) { return narrow(low) | (narrow(high) << 16); }
};

#endif

struct Float16 : TwoBytes<HalfPairs> {
  static constexpr float kLargest = 0x1.ffdffep15f;  // halfway to 2^16, which ties to even, is not
};

struct BFloat16 : TwoBytes<BFloatPairs> {
  static constexpr float kLargest = 0x1.fefffep127f;  // nor halfway to 2^128
};

// ---- what a thread learns of the elements that pass by

__device__ __forceinline__ float magnitude(float x) { return fabsf(x); }
__device__ __forceinline__ double magnitude(double x) { return fabs(x); }

// The norm and the finite check of what is stored as a To.
template <class To>
struct Watch {
  using Wide = typename To::Wide;
  Wide squares = 0;
  u32 nonfinite = 0;
  // No short circuit: one comparison an element, and a predicate that becomes a register once a group.
  template <u32 kNumel>
  __device__ __forceinline__ void see(const Wide* wide) {
    bool found = false;
    Wide sum = 0;  // of its own, which shortens the chain of additions and of their errors
#pragma unroll
    for (u32 i = 0; i < kNumel; ++i) {
      sum += wide[i] * wide[i];
      found = found | !(magnitude(wide[i]) <= To::kLargest);  // a NaN too
    }
    squares += sum;
    if (found) nonfinite = 1;
  }
};

// Squares alone.
template <class T>
struct Squares {
  typename T::Wide squares = 0;
  template <u32 kNumel>
  __device__ __forceinline__ void see(const typename T::Wide* wide) {
    typename T::Wide sum = 0;
#pragma unroll
    for (u32 i = 0; i < kNumel; ++i) sum += wide[i] * wide[i];
    squares += sum;
  }
};

struct Blind {
  template <u32 kNumel, class Wide>
  __device__ __forceinline__ void see(const Wide*) {}
};

// ---- to(scale * from)

constexpr u32 kLoadsInFlight = 4;

// Neighbouring threads that share a tile. A constant, so that the loads of a thread differ by constants alone.
#ifdef GPUCOMM_HOST_KERNELS
constexpr u32 kTeam = 1;
#else
constexpr u32 kTeam = 32;
#endif

// A group is the fewest elements that fill whole chunks on both sides. A tile is what a team has in flight at once:
// kAtOnce rows of kTeam groups; a thread has one column.
template <class From, class To>
struct Tile {
  static constexpr u32 kGroupNumel = From::kPerChunk > To::kPerChunk ? From::kPerChunk : To::kPerChunk;
  static constexpr u32 kLoads = kGroupNumel / From::kPerChunk;
  static constexpr u32 kStores = kGroupNumel / To::kPerChunk;
  static constexpr u32 kAtOnce = kLoadsInFlight / kLoads;
  static constexpr u32 kGroups = kAtOnce * kTeam;
};

// The column of a thread: `in` and `out` at its first group, `groups` how many there are from there to the end, counted
// over all columns. Not kWhole: fewer than the tile holds. Not kStore: only looked at.
template <class From, class To, bool kWhole, bool kStore, class Eye>
__device__ __forceinline__ void convert_column(uint4* out, const uint4* in, u32 groups, typename From::Wide scale,
                                               Eye& eye) {
  using T = Tile<From, To>;
  uint4 chunks[T::kAtOnce][T::kLoads];
#pragma unroll
  for (u32 k = 0; k < T::kAtOnce; ++k) {
#pragma unroll
    for (u32 i = 0; i < T::kLoads; ++i) {
      if (kWhole || k * kTeam < groups) chunks[k][i] = load_chunk(in + k * kTeam * T::kLoads + i);
    }
  }
#pragma unroll
  for (u32 k = 0; k < T::kAtOnce; ++k) {
    if (!kWhole && k * kTeam >= groups) break;
    typename From::Wide wide[T::kGroupNumel];
#pragma unroll
    for (u32 i = 0; i < T::kLoads; ++i) From::load(chunks[k][i], wide + i * From::kPerChunk);
#pragma unroll
    for (u32 i = 0; i < T::kGroupNumel; ++i) wide[i] *= scale;
    eye.template see<T::kGroupNumel>(wide);
    if constexpr (kStore) {
#pragma unroll
      for (u32 i = 0; i < T::kStores; ++i) out[k * kTeam * T::kStores + i] = To::store(wide + i * To::kPerChunk);
    }
  }
}

// All of a block together.
template <class From, class To, bool kStore, class Eye>
__device__ __forceinline__ void convert(typename To::Storage* out, const typename From::Storage* in, u64 numel,
                                        typename From::Wide scale, Eye& eye) {
  using T = Tile<From, To>;
  u64 done = 0;
  if (aligned(out) && aligned(in) && blockDim.x % kTeam == 0) {
    const u64 groups = numel / T::kGroupNumel;
    const u64 stride = static_cast<u64>(blockDim.x) * T::kAtOnce;
    u64 at = static_cast<u64>(threadIdx.x / kTeam) * T::kGroups + threadIdx.x % kTeam;
    uint4* to = reinterpret_cast<uint4*>(out) + at * T::kStores;
    const uint4* from = reinterpret_cast<const uint4*>(in) + at * T::kLoads;
#pragma unroll 1
    for (; at + (T::kGroups - kTeam) < groups; at += stride) {
      convert_column<From, To, true, kStore>(to, from, T::kGroups, scale, eye);
      to += stride * T::kStores;
      from += stride * T::kLoads;
    }
    if (at < groups) convert_column<From, To, false, kStore>(to, from, static_cast<u32>(groups - at), scale, eye);
    done = groups * T::kGroupNumel;
  }
  for (u64 i = done + threadIdx.x; i < numel; i += blockDim.x) {
    const typename From::Wide x = From::load(in[i]) * scale;
    eye.template see<1>(&x);
    if constexpr (kStore) out[i] = To::store(x);
  }
}

// A byte pattern of zeros is the zero of every type.
template <class To>
__device__ __forceinline__ void fill_zero(typename To::Storage* out, u32 numel) {
  u32 done = 0;
  if (aligned(out)) {
    const u32 chunks = numel / To::kPerChunk;
    for (u32 i = threadIdx.x; i < chunks; i += blockDim.x) reinterpret_cast<uint4*>(out)[i] = uint4{0, 0, 0, 0};
    done = chunks * To::kPerChunk;
  }
  for (u32 i = done + threadIdx.x; i < numel; i += blockDim.x) out[i] = typename To::Storage{};
}

template <class Wide>
__device__ __forceinline__ Wide full_scale(double scale, const float* device_scale) {
  const Wide own = static_cast<Wide>(scale);
  return device_scale == nullptr ? own : own * static_cast<Wide>(*global<float>(device_scale));
}

// ---- the threads of a block

// The sum over the threads of a block, in an order that hangs on blockDim alone; thread 0 has it. Every thread calls
// it, once a kernel.
template <class Wide>
__device__ __forceinline__ Wide block_sum(Wide value) {
#ifndef GPUCOMM_HOST_KERNELS
  constexpr u32 kWarp = 32;
  __shared__ Wide sums[kWarp];
  const u32 lane = threadIdx.x % kWarp;
  const u32 warp = threadIdx.x / kWarp;
  const u32 warps = (blockDim.x + kWarp - 1) / kWarp;
  // The last warp may be cut short.
  const u32 lanes = warp + 1 < warps ? kWarp : blockDim.x - warp * kWarp;
  const u32 present = lanes == kWarp ? 0xffffffffu : (1u << lanes) - 1;
#pragma unroll
  for (u32 distance = kWarp / 2; distance != 0; distance /= 2) {
    const Wide other = __shfl_down_sync(present, value, distance);
    if (lane + distance < lanes) value += other;
  }
  if (lane == 0) sums[warp] = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (u32 i = 1; i < warps; ++i) value += sums[i];
  }
#endif
  return value;
}

// ---- kernels

template <class From, class To>
__device__ __forceinline__ void pack(const CodecArgs& args) {
  using Wide = typename From::Wide;
  const Wide scale = full_scale<Wide>(args.scale, args.device_scale);
  const Piece piece = global<Piece>(args.pieces)[blockIdx.x];
  auto* out = global<typename To::Storage>(args.bucket) + piece.slot_offset;
  const void* grad = args.pointers[piece.slot - args.first_slot];
  Watch<To> watch;
  if (grad == nullptr) {
    fill_zero<To>(out, piece.numel);
  } else {
    const auto* in = global<const typename From::Storage>(grad) + piece.grad_offset;
    convert<From, To, true>(out, in, piece.numel, scale, watch);
  }
  if (watch.nonfinite != 0 && args.first_nonfinite != nullptr) {
    atomicMin(global<int>(args.first_nonfinite), static_cast<int>(piece.slot));
  }
  if (args.partial_norms != nullptr) {
    const Wide sum = block_sum(watch.squares);
    if (threadIdx.x == 0) global<float>(args.partial_norms)[blockIdx.x] = static_cast<float>(sum);
  }
}

template <class From, class To>
__device__ __forceinline__ void unpack(const CodecArgs& args) {
  using Wide = typename From::Wide;
  const Wide scale = full_scale<Wide>(args.scale, args.device_scale);
  const Piece piece = global<Piece>(args.pieces)[blockIdx.x];
  void* grad = args.pointers[piece.slot - args.first_slot];
  if (grad == nullptr) return;
  const auto* in = global<const typename From::Storage>(args.bucket) + piece.slot_offset;
  auto* out = global<typename To::Storage>(grad) + piece.grad_offset;
  Blind blind;
  convert<From, To, true>(out, in, piece.numel, scale, blind);
}

// The share of this block, in elements. All shares start as aligned as the first.
struct Share {
  u64 begin;
  u64 numel;
};

__device__ __forceinline__ Share share_of_block(u64 numel) {
  constexpr u64 kGranule = 1024;
  const u64 granules = (numel + kGranule - 1) / kGranule;
  const u64 most = (granules + gridDim.x - 1) / gridDim.x * kGranule;
  const u64 begin = most * blockIdx.x;
  if (begin >= numel) return {0, 0};
  return {begin, numel - begin < most ? numel - begin : most};
}

template <class T>
__device__ __forceinline__ void squared_norm(const FlatArgs& args) {
  using Wide = typename T::Wide;
  const Share share = share_of_block(args.numel);
  auto* at = global<typename T::Storage>(args.data) + share.begin;
  Squares<T> squares;
  convert<T, T, false>(at, at, share.numel, Wide{1}, squares);
  const Wide sum = block_sum(squares.squares);
  if (threadIdx.x == 0) global<float>(args.partials)[blockIdx.x] = static_cast<float>(sum);
}

template <class T>
__device__ __forceinline__ void scale(const FlatArgs& args) {
  using Wide = typename T::Wide;
  const Wide factor = full_scale<Wide>(args.scale, args.device_scale);
  if (factor == Wide{1}) return;
  const Share share = share_of_block(args.numel);
  auto* at = global<typename T::Storage>(args.data) + share.begin;
  Blind blind;
  convert<T, T, true>(at, at, share.numel, factor, blind);
}

__device__ __forceinline__ void sum_partials_of(const FlatArgs& args) {
  const float* partials = global<const float>(args.partials);
  float sum = 0.0f;
  for (u32 i = threadIdx.x; i < args.partial_count; i += blockDim.x) sum += partials[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *global<float>(args.result) += sum;
}

}  // namespace

// Two of the largest blocks fit a multiprocessor, so a thread has 48 registers: with fewer the compilers wait for the
// first load before the last is on its way, with more fewer blocks of the usual size are there to hide what each waits
// for.
#define GPUCOMM_KERNEL(name, Args, body) \
  extern "C" __global__ void __launch_bounds__(kMaxBlockThreads, 2) name(const __grid_constant__ Args args) { body; }
#define GPUCOMM_CONVERTING(from, From, to, To)                          \
  GPUCOMM_KERNEL(pack_##from##_##to, CodecArgs, (pack<From, To>(args))) \
  GPUCOMM_KERNEL(unpack_##from##_##to, CodecArgs, (unpack<From, To>(args)))
#define GPUCOMM_FLAT(name, Type)                                          \
  GPUCOMM_KERNEL(squared_norm_##name, FlatArgs, squared_norm<Type>(args)) \
  GPUCOMM_KERNEL(scale_##name, FlatArgs, scale<Type>(args))

GPUCOMM_CODEC_PAIRS(GPUCOMM_CONVERTING)
GPUCOMM_CODEC_TYPES(GPUCOMM_FLAT)
GPUCOMM_KERNEL(sum_partials, FlatArgs, sum_partials_of(args))

}  // namespace gpucomm::codec
