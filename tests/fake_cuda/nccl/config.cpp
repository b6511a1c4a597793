#include "fake_cuda/nccl/config.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "fake_cuda/nccl/report.h"

namespace fake_nccl {
namespace {

// The first `version` of the header that has a field, and where the structure ends before it.
struct Age {
  int since;
  size_t end_before;
};
constexpr Age kAges[] = {{22500, offsetof(Config, traffic_class)}, {22700, offsetof(Config, comm_name)}};

// The size of the structure in the header of a version up to 2.27. Sizes are multiples of 8.
size_t size_in(int version) {
  for (const Age& age : kAges)
    if (version < age.since) return (age.end_before + 7) / 8 * 8;
  return sizeof(Config);
}

Result refused(const std::string& text) { return failure(kInvalidArgument, "Invalid config " + text); }

bool is_set(int value) { return value != kUnset; }
bool is_flag(int value) { return !is_set(value) || value == 0 || value == 1; }

// Fields that the header's version, or this library, does not know yet get their defaults.
Config known_part(const Config& given) {
  Config config;
  std::memcpy(&config, &given, std::min({given.size, sizeof(Config), size_in(kLibraryVersion)}));
  const Config defaults;
  const int version = std::min(static_cast<int>(config.version), kLibraryVersion);
  if (version < 21400) config.blocking = defaults.blocking;
  if (version < 21700) {
    config.cga_cluster_size = defaults.cga_cluster_size;
    config.min_ctas = defaults.min_ctas;
    config.max_ctas = defaults.max_ctas;
    config.net_name = defaults.net_name;
  }
  if (version < 22500) config.traffic_class = defaults.traffic_class;
  if (version < 22700) {
    config.comm_name = defaults.comm_name;
    config.collnet_enable = defaults.collnet_enable;
    config.cta_policy = defaults.cta_policy;
    config.shrink_share = defaults.shrink_share;
    config.nvls_ctas = defaults.nvls_ctas;
  }
  return config;
}

Result check_values(const Config& config) {
  if (!is_flag(config.blocking)) return refused("blocking attribute value " + std::to_string(config.blocking));
  if (is_set(config.cga_cluster_size) && config.cga_cluster_size < 0)
    return refused("cgaClusterSize attribute value " + std::to_string(config.cga_cluster_size));
  // An unset maximum is the smallest int, so a minimum alone is above it.
  if ((is_set(config.min_ctas) && config.min_ctas <= 0) || (is_set(config.max_ctas) && config.max_ctas <= 0) ||
      config.min_ctas > config.max_ctas)
    return refused("min/max channels attribute value " + std::to_string(config.min_ctas) + "/" +
                   std::to_string(config.max_ctas));
  if (!is_flag(config.split_share)) return refused("splitShare attribute value " + std::to_string(config.split_share));
  if (!is_flag(config.collnet_enable))
    return refused("collnetEnable attribute value " + std::to_string(config.collnet_enable));
  if (is_set(config.cta_policy) && config.cta_policy < 0)
    return refused("CTAPolicy attribute value " + std::to_string(config.cta_policy));
  if (!is_flag(config.shrink_share))
    return refused("shrinkShare attribute value " + std::to_string(config.shrink_share));
  if (is_set(config.nvls_ctas) && config.nvls_ctas <= 0)
    return refused("nvlsCTAs attribute value " + std::to_string(config.nvls_ctas));
  return kSuccess;
}

}  // namespace

Result read_config(const char* function, const Config* config, const Options& inherited, Options* options) {
  *options = inherited;
  if (config == nullptr) return kSuccess;
  if (config->magic != kConfigMagic)
    return failure(kInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  const int version = static_cast<int>(config->version);
  if (version <= 22799 && config->size != size_in(version))
    misuse(function, "config",
           "size " + std::to_string(config->size) + " is not that of version " + std::to_string(version) + ", " +
               std::to_string(size_in(version)));
  const Config known = known_part(*config);
  const Result result = check_values(known);
  if (result != kSuccess) return result;
  if (is_set(known.blocking)) options->blocking = known.blocking == 1;
  last_given() = known;
  last_net_name() = known.net_name ? known.net_name : "";
  return kSuccess;
}

Config& last_given() {
  static Config config;
  return config;
}

std::string& last_net_name() {
  static std::string name;
  return name;
}

}  // namespace fake_nccl
