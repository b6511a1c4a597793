/* What tests tell the NCCL stand-in, over C so that ctypes can call it. Wrong uses are reported as those of the
 * driver's stand-in are (fake_misuse), each with the rule that was broken in brackets: "ncclAllReduce: [in-place] ...".
 *
 * [Note: the script] Faults and modes are a text of statements, parted by ';' or line ends: a verb and key=value words.
 * It comes from the environment variable FAKE_NCCL_SCRIPT, or from fake_nccl_script, which replaces it. Where a
 * statement takes rank=, comm= or launch=, one that is left out means all. comm counts the communicators that this
 * process has made for that rank, launch the launches of a communicator (a group is one), both from 0.
 *
 *   delay rank= comm= launch= ms= steps=     a launch whose turn has come waits before it joins in
 *   async_error rank= comm= launch= result=  the launch never completes, the communicator gets the asynchronous error
 *   die rank= comm= launch=                  the process ends by SIGKILL at that launch's turn
 *   block rank= comm= launch= ms=            the host call that launches does not return (ms=, else until abort or
 * revoke) remote_error ms=                         kRemoteError, this long after a peer died, left or failed; else
 * never init_hang rank= comm= ms=                this rank does not come to the init (ms=, else never) init_error rank=
 * comm= result= text=     the init fails after all have come; text= takes the rest of the statement abort_hang rank=
 * comm= ms=               abort does not return for this long no_windows rank= comm=                   registering a
 * window succeeds and gives none no_cumem                                 ncclMemAlloc gives plain memory, which
 * windows do not take slots n=                                 the device has room for n collectives that run at once
 *   polls n=                                 how often a non-blocking communicator is in progress before it goes on (1)
 *   fp32_sums                                16-bit types are accumulated in fp32, as symmetric kernels do
 *   ring seed=                               another order of the ranks in sums
 *   allow rule=                              does not report this rule
 */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FAKE_NCCL_EXPORT __attribute__((visibility("default")))

/* As freshly loaded, but for the environment's script: communicators are gone, memory of ncclMemAlloc is unknown. To be
 * called with fake_reset. */
FAKE_NCCL_EXPORT void fake_nccl_reset(void);

/* Replaces the script. Null, or what is wrong with the text (valid until the next call); then nothing has changed. */
FAKE_NCCL_EXPORT const char* fake_nccl_script(const char* text);

/* What the last ncclConfig_t that was taken said of a member, by our name of it (nccl_api.h): INT_MIN if it is unset,
 * or not known to this version. */
FAKE_NCCL_EXPORT int fake_nccl_config(const char* member);
FAKE_NCCL_EXPORT const char* fake_nccl_net_name(void);

/* Launches of all communicators of this process: enqueued, and completed. Monotone. */
FAKE_NCCL_EXPORT uint64_t fake_nccl_launched(void);
FAKE_NCCL_EXPORT uint64_t fake_nccl_completed(void);

/* Communicators that were neither destroyed nor aborted. */
FAKE_NCCL_EXPORT int fake_nccl_live_communicators(void);

#ifdef __cplusplus
}
#endif
