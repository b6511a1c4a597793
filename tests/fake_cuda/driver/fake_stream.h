/* What a stand-in for another library of the device (NCCL) is built on: device work of its own on the streams of
 * libfake_cuda.so, which it links against. Plain C, so that it holds across shared objects.
 *
 * Nothing runs when it is enqueued. It runs when something drives the streams (a query, a drain, a torch op that
 * depends on it), in an order that a seeded adversary chooses, always under the one lock of the stand-in. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FAKE_EXPORT __attribute__((visibility("default")))

struct CUstream_st;

/* A stretch of memory that a task reads or writes. */
typedef struct FakeRange {
  const void* address;
  size_t bytes;
  bool write;
} FakeRange;

/* Device work. `step` gets it as far as it goes without waiting: true once it is complete, false where it cannot go on
 * for now (a peer has not come); other streams go on meanwhile, and `step` is called again. It may run on any host
 * thread, under the lock, and must neither block nor throw. `ranges` (copied, may be empty) are what it touches over
 * its whole life: checked to lie within live allocations before the first step, and against the order of all other
 * accesses after the last one. If they do not, the error is reported and `step` is never called. */
typedef struct FakeTask {
  const char* name; /* in reports; copied */
  bool (*step)(void* self);
  void (*drop)(void* self); /* frees self: after the last step, or where there will be none; may be null */
  void* self;
  const FakeRange* ranges;
  size_t range_count;
} FakeTask;

/* Takes the task in every case (drop is called where it is refused). The stream may be null, the legacy stream of the
 * current context. Returns a CUresult: 0, 201 (no context is current), 400 (not a stream, a destroyed one, or one of
 * another context than the current one; reported). */
FAKE_EXPORT int fake_enqueue(struct CUstream_st* stream, const FakeTask* task);

/* The ordinal of the current context's device, or -1 where none is current. */
FAKE_EXPORT int fake_current_device(void);

/* Of the memory at an address: false where it is in no live allocation. Names live until fake_reset. */
typedef struct FakeAllocation {
  const void* base;
  size_t bytes;
  const char* name;
  int device; /* -1: pinned host memory */
  bool is_host;
} FakeAllocation;
FAKE_EXPORT bool fake_find_allocation(const void* address, FakeAllocation* found);

/* Device memory with guarded ends, as cuMemAlloc gives it but aligned as asked (a power of two, 0: 512) and under a
 * name. Null: no context is current, or bytes is 0. Freed by cuMemFree, which waits for the device, or by fake_unmap.
 */
FAKE_EXPORT void* fake_allocate(size_t bytes, size_t alignment, const char* name);
/* Frees it without waiting, as unmapping memory does: what is still to run and touches it is reported when it runs.
 * False: not the start of live memory of the device. */
FAKE_EXPORT bool fake_unmap(void* address);

/* The lock under which everything here happens; recursive, and held during `step`. For state of one's own that both
 * `step` and the library's functions touch. Never wait for a peer while holding it. */
FAKE_EXPORT void fake_lock(void);
FAKE_EXPORT void fake_unlock(void);

/* Something was used wrongly: recorded as an error of the test, with the calling function's name first
 * ("ncclAllReduce: ..."). */
FAKE_EXPORT void fake_misuse(const char* text);

/* The result that a test has scripted for this call of a function (fake_fail_call in control.h), else 0; counts the
 * call. For every function that a stand-in exports. */
FAKE_EXPORT int fake_enter(const char* function);

/* Is an iteration being captured on this stream (0 no, 1 yes, 2 broken)? */
FAKE_EXPORT int fake_capture_status(struct CUstream_st* stream);

/* A number below `bound` from the adversary's generator, so that a whole run follows from one seed. */
FAKE_EXPORT unsigned fake_random(unsigned bound);

#ifdef __cplusplus
}
#endif
