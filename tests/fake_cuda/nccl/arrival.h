// How communicators come to be: at init from a unique id, by split and by shrink from another one.
#pragma once

#include <vector>

#include "fake_cuda/nccl/comm.h"

namespace fake_nccl {

// The communicator's way to the board of the id and through the checks of all ranks together. Its last result is
// kSuccess, or what NCCL says: kSystemError (nobody there), kInvalidUsage (a GPU twice, different versions or sizes).
Poll arrive(ncclComm* comm, const char* function, const UniqueId& id);

// The way of a split: `made` is null at the end where color is negative.
Poll split(ncclComm* parent, const char* function, int color, int key, ncclComm* made, ncclComm** result);

// Of a shrink, which only the ranks that stay call: `stay` are theirs in the parent.
Poll shrink(ncclComm* parent, const char* function, const std::vector<int>& stay, ncclComm* made);

}  // namespace fake_nccl
