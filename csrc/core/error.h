// The exceptions of the engine. Each becomes a Python exception of the same name (bindings/errors.cpp).
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace gpucomm {

// The caller's mistake: becomes ValueError. Nothing was changed and the object stays usable.
class UsageError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Base of everything that went wrong between ranks.
class CommError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A peer raised in this iteration. Recoverable: the next iteration works.
class StepFailed : public CommError {
 public:
  using CommError::CommError;
};

// A peer is gone (died, closed or aborted). The object that raised it is dead from then on.
class PeerFailed : public CommError {
 public:
  PeerFailed(int rank, const std::string& reason);
  PeerFailed(const std::string& message, const PeerFailed& earlier);
  int rank;  // as Transport::global_rank gives it
  std::string reason;
};

// Peers did not come within the timeout; missing is empty where nobody can tell which. The object that raised it is
// dead from then on.
class CommTimeout : public CommError {
 public:
  CommTimeout(std::vector<int> missing, double timeout_s, const std::string& what);
  CommTimeout(const std::string& message, const CommTimeout& earlier);
  std::vector<int> missing;  // as Transport::global_rank gives them
};

// Ranks started different collectives under the same number. The object that raised it is dead from then on.
class CollectiveMismatch : public CommError {
 public:
  using CommError::CommError;
};

// The transport that was asked for cannot be had between these ranks; raised by all of them alike. Nothing was created.
class TransportUnavailable : public CommError {
 public:
  using CommError::CommError;
};

// A fault of gpucomm itself: expression, values, file:line.
class InternalError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

[[noreturn]] void throw_internal(const char* expression, const std::string& values, const char* file, int line);

// "rank 2" or "ranks 1, 3 and 5".
std::string ranks_text(const std::vector<int>& ranks);

}  // namespace gpucomm

#define GPUCOMM_ASSERT(expression, values) \
  ((expression) ? (void)0 : ::gpucomm::throw_internal(#expression, (values), __FILE__, __LINE__))
