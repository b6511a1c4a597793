// NVRTC, CUDA's compiler at run time, as a table of function pointers: it comes with every torch for CUDA, and is only
// needed where the package was built without nvcc.
//
// These are our own declarations of what we call; the ABI check compares each of them with the real nvrtc.h.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "core/error.h"

// NVRTC's own tag, so that its header may be included beside this one.
struct _nvrtcProgram;

namespace gpucomm::nvrtc {

using Result = int;
using Program = _nvrtcProgram*;

enum : Result {
  kSuccess = 0,
  kOutOfMemory = 1,
  kInvalidOption = 5,
  kCompilation = 6,
  kBuiltinOperationFailure = 7,
};

// F(member, name in nvrtc.h and symbol, type)
#define GPUCOMM_NVRTC_FUNCTIONS(F)                                                                               \
  F(get_error_string, nvrtcGetErrorString, const char*(Result result))                                           \
  F(get_version, nvrtcVersion, Result(int* major, int* minor))                                                   \
  F(get_num_supported_archs, nvrtcGetNumSupportedArchs, Result(int* count))                                      \
  F(get_supported_archs, nvrtcGetSupportedArchs, Result(int* archs))                                             \
  F(create_program, nvrtcCreateProgram,                                                                          \
    Result(Program* program, const char* source, const char* name, int header_count, const char* const* headers, \
           const char* const* header_names))                                                                     \
  F(compile_program, nvrtcCompileProgram, Result(Program program, int option_count, const char* const* options)) \
  F(get_cubin_size, nvrtcGetCUBINSize, Result(Program program, size_t* bytes))                                   \
  F(get_cubin, nvrtcGetCUBIN, Result(Program program, char* cubin))                                              \
  F(get_program_log_size, nvrtcGetProgramLogSize, Result(Program program, size_t* bytes))                        \
  F(get_program_log, nvrtcGetProgramLog, Result(Program program, char* log))                                     \
  F(destroy_program, nvrtcDestroyProgram, Result(Program* program))

struct Api {
#define GPUCOMM_NVRTC_MEMBER(member, symbol, ...) std::add_pointer_t<__VA_ARGS__> member = nullptr;
  GPUCOMM_NVRTC_FUNCTIONS(GPUCOMM_NVRTC_MEMBER)
#undef GPUCOMM_NVRTC_MEMBER
  std::string path;        // of the library's file
  int version = 0;         // 1000 * major + 10 * minor, as the driver counts
  std::vector<int> archs;  // that it compiles for, ascending: 80 is sm_80
};

// A call of NVRTC failed: what was called and NVRTC's text for the result.
class NvrtcError : public CommError {
 public:
  NvrtcError(const Api& api, Result result, const char* what);
  Result result;
};

// Where to look for the library, and what its images are to run on.
struct Search {
  std::string path;                      // an explicit one; nothing else is tried then
  std::vector<std::string> wheel_paths;  // of libraries in the wheels nvidia-cuda-nvrtc*, if there are any
  int driver_version = 0;                // 1000 * major + 10 * minor; 0: any
  int arch = 0;                          // of the device: 90 is sm_90; 0: any
};

// NVRTC: the explicit path; else the copies that the process has loaded already, the wheels', the system's, of these
// the first that the driver (an image of CUDA 13 needs a driver of CUDA 13) and the device accept: one that compiles
// for the device's arch, or for an earlier one of the same generation. Its builtins are loaded with it, whichever is
// taken. Throws TransportUnavailable: none will do (where it was looked for, and what is wrong with each). Calls that
// come to the same file share one table. Thread-safe.
std::shared_ptr<const Api> load(const Search& search);

// Throws NvrtcError unless result is kSuccess.
void check(const Api& api, Result result, const char* what);

}  // namespace gpucomm::nvrtc
