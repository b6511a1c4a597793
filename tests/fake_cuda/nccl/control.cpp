#include "fake_cuda/nccl/control.h"

#include <map>
#include <stdexcept>
#include <string>

#include "fake_cuda/nccl/config.h"
#include "fake_cuda/nccl/launch.h"
#include "fake_cuda/nccl/windows.h"

using fake_nccl::DeviceLock;

extern "C" {

void fake_nccl_reset(void) {
  const DeviceLock lock;
  fake_nccl::forget_comms();
  fake_nccl::forget_memory();
  fake_nccl::replace_script({});
}

const char* fake_nccl_script(const char* text) {
  static std::string fault;
  const DeviceLock lock;
  try {
    fake_nccl::replace_script(fake_nccl::Script::parse(text));
    return nullptr;
  } catch (const std::invalid_argument& error) {
    fault = error.what();
    return fault.c_str();
  }
}

int fake_nccl_config(const char* member) {
  using fake_nccl::Config;
  static const std::map<std::string, int Config::*> members = {
      {"blocking", &Config::blocking},           {"cga_cluster_size", &Config::cga_cluster_size},
      {"min_ctas", &Config::min_ctas},           {"max_ctas", &Config::max_ctas},
      {"traffic_class", &Config::traffic_class}, {"collnet_enable", &Config::collnet_enable},
      {"cta_policy", &Config::cta_policy},       {"nvls_ctas", &Config::nvls_ctas},
  };
  const DeviceLock lock;
  return fake_nccl::last_given().*members.at(member);
}

const char* fake_nccl_net_name(void) {
  const DeviceLock lock;
  return fake_nccl::last_net_name().c_str();
}

uint64_t fake_nccl_launched(void) {
  const DeviceLock lock;
  return fake_nccl::launch_counts().launched;
}

uint64_t fake_nccl_completed(void) {
  const DeviceLock lock;
  return fake_nccl::launch_counts().completed;
}

int fake_nccl_live_communicators(void) {
  const DeviceLock lock;
  return static_cast<int>(fake_nccl::live_comms().size());
}

}  // extern "C"
