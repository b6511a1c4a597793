// Memory of ncclMemAlloc, and memory registered with a communicator: windows (of all ranks at once) and plain ones.
#pragma once

#include <string>

#include "fake_cuda/nccl/comm.h"
#include "fake_cuda/nccl/operation.h"

namespace fake_nccl {

Result allocate_memory(const char* function, void** address, size_t bytes);
void forget_memory();
Result free_memory(const char* function, void* address);

// Ready to be asked once the ranks meet. The window is null, with success, where it cannot be had.
Result prepare_window(ncclComm* comm, const char* function, void* address, size_t bytes, Window* window, int flags,
                      Poll* poll);
Result end_window(ncclComm* comm, const char* function, Window window);

Result register_memory(ncclComm* comm, const char* function, void* address, size_t bytes, void** handle);
Result deregister_memory(ncclComm* comm, const char* function, void* handle);

// Where the operation's buffers lie in what is registered.
void place(const ncclComm& comm, const Operation& operation, Descriptor* descriptor);

// Reports what a communicator that ends has still registered.
void check_registrations(const ncclComm& comm, const char* function);

}  // namespace fake_nccl
