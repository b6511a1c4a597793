#include "transport/transport.h"

namespace gpucomm {

void Transport::check(const Collective& c) const {
  const std::string what(name_of(c.kind));
  if (c.kind == CollectiveKind::kBroadcast && (c.root < 0 || c.root >= size_)) {
    throw UsageError(what + ": root is " + std::to_string(c.root) + ", ranks are 0.." + std::to_string(size_ - 1));
  }
  if (c.numel > 0 && (c.out == nullptr || (c.kind != CollectiveKind::kBroadcast && c.in == nullptr))) {
    throw UsageError(what + ": null pointer with numel " + std::to_string(c.numel));
  }
  if (c.kind == CollectiveKind::kAllReduce && c.in != c.out) {
    throw UsageError(what + ": in and out differ, it works in place");
  }
  if (c.scale != 1.0 && !is_floating(c.dtype)) {
    throw UsageError(what + ": scale " + std::to_string(c.scale) + " with dtype " + std::string(name_of(c.dtype)));
  }
}

}  // namespace gpucomm
