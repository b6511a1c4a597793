// What calls do at once, what waits for the end of the thread's group, and what a non-blocking communicator leaves to
// be polled for.
#pragma once

#include "fake_cuda/nccl/comm.h"
#include "fake_cuda/nccl/operation.h"

namespace fake_nccl {

// Work of the host on a communicator: done now, at the end of the group, or by polling. `guest` is the communicator
// that is being made, if any: that which decides about blocking, and which a second thread may abort.
Result submit(ncclComm* comm, const char* function, const Poll& poll);

// A collective, checked already.
Result submit(ncclComm* comm, const char* function, const Operation& operation, cuda::StreamHandle stream);

// A call within a group failed: the whole group will.
Result fail_group(Result result);

bool is_in_group();
Result start_group();
Result end_group();

}  // namespace fake_nccl
