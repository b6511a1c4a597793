// Several communicators on one device. The device has room for so many collectives at once (`slots` of the script),
// each stream for one: ranks that launch the collectives of two communicators in different orders wait for each other
// for ever.
//
// Found twice. What each launch had before it on the other communicators travels with it, so that another order is
// reported even where the run got through. And a rank that cannot come to a launch because another one holds its place
// says so on the board, so that a deadlock is reported with both orders.
#pragma once

#include <cstdint>
#include <vector>

#include "fake_cuda/nccl/comm.h"

namespace fake_nccl {

// How many launches another communicator of the same device had had when this one was launched.
struct Before {
  uint64_t tag;  // of that communicator
  uint64_t launched;
};
std::vector<Before> launched_before(const ncclComm& comm);

// Reports where a peer had launched others of our communicators at another place.
void compare_orders(const char* function, const ncclComm& comm, uint64_t number, const std::vector<Before>& ours,
                    int peer, const std::vector<Before>& theirs);

// False while NCCL_LAUNCH_ORDER_IMPLICIT makes the launch wait for those that the host made earlier on the device.
bool is_next(const Launch& launch);

// Takes a place on the device for the launch. False where there is none.
bool take_place(Launch* launch);
void leave_place(Launch* launch);

// For a launch that runs and waits for peers: tells the peers of other communicators what it holds up, and looks
// whether those it waits for are held up in turn by what this rank has still before it.
void tell_held_up(const Launch& launch);
void find_deadlock(Launch& launch);

}  // namespace fake_nccl
