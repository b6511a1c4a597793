#include "core/error.h"

#include <cstdio>

namespace gpucomm {

PeerFailed::PeerFailed(int rank, const std::string& reason)
    : CommError("rank " + std::to_string(rank) + " failed: " + reason), rank(rank), reason(reason) {}

PeerFailed::PeerFailed(const std::string& message, const PeerFailed& earlier)
    : CommError(message), rank(earlier.rank), reason(earlier.reason) {}

static std::string timeout_text(const std::vector<int>& missing, double timeout_s, const std::string& what) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g s", timeout_s);
  const std::string who = missing.empty() ? "not complete" : ranks_text(missing) + " did not come";
  return what + ": " + who + " within " + seconds;
}

CommTimeout::CommTimeout(std::vector<int> missing_ranks, double timeout_s, const std::string& what)
    : CommError(timeout_text(missing_ranks, timeout_s, what)), missing(std::move(missing_ranks)) {}

CommTimeout::CommTimeout(const std::string& message, const CommTimeout& earlier)
    : CommError(message), missing(earlier.missing) {}

void throw_internal(const char* expression, const std::string& values, const char* file, int line) {
  throw InternalError(std::string("gpucomm internal error, please report: ") + expression + " is false (" + values +
                      ") at " + file + ":" + std::to_string(line));
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace gpucomm
