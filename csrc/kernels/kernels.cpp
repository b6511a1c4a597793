#include "kernels/kernels.h"

#include <string>

#include "core/error.h"
#include "kernels/kernel_tables.h"

namespace gpucomm {

namespace {

const KernelTables& tables() {
  static const KernelTables tables = runnable_kernel_tables();
  return tables;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& best = *tables().table[tables().count - 1];
  return best;
}

size_t kernel_table_count() { return tables().count; }

const Kernels& kernel_table(size_t index) {
  GPUCOMM_ASSERT(index < tables().count,
                 "index " + std::to_string(index) + " of " + std::to_string(tables().count) + " tables");
  return *tables().table[index];
}

}  // namespace gpucomm
