/* What a test tells the stand-in, and what it asks it afterwards. Streams are handles as cuStreamCreate gave them; null
 * is the legacy stream of the current context. control.py wraps all of it for Python. */
#pragma once

#include <stdint.h>

#include "fake_cuda/driver/fake_stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- the run */

/* As freshly loaded, but for cuInit, which a program calls once: streams, events, memory, reports, clocks and scripts
 * are gone, and handles mean nothing. */
FAKE_EXPORT void fake_reset(void);

/* Which of the streams that could go on comes next: the one whose work was enqueued first, last, or any. */
typedef enum FakeOrder { FAKE_EARLIEST, FAKE_LATEST, FAKE_RANDOM } FakeOrder;
FAKE_EXPORT void fake_set_order(int order, uint64_t seed);

/* How long a drain and its kin wait for work that cannot go on (default 20 s). */
FAKE_EXPORT void fake_set_deadline(double seconds);

/* A device goes on by itself; here, a rank that drives nothing (it waits for a message that its peer will send after
 * their collective) would hold up all. So a thread runs what can run once nothing has driven for so long and work is
 * pending; 0: no such thread (the default, for runs that follow from their seed alone). */
FAKE_EXPORT void fake_drive_when_idle(double seconds);

/* Runs everything; false: not all of it within the deadline. Afterwards, red zones are checked. */
FAKE_EXPORT bool fake_drain(void);

/* Runs what work that were enqueued on the stream now would wait for, and nothing else. */
FAKE_EXPORT bool fake_run_until(struct CUstream_st* stream);

/* The same, and the host knows it: what it enqueues from here on is ordered after that. As a program does that reads a
 * value back. */
FAKE_EXPORT bool fake_synchronize(struct CUstream_st* stream);

/* What comes on `then` is after what is on `first`: an event record and a wait that belong to the test, and are no
 * sites of the program's. */
FAKE_EXPORT bool fake_order(struct CUstream_st* first, struct CUstream_st* then);

/* ---- other accesses than those of launches and copies */

/* What a torch op on this stream read and wrote, just now: work that is enqueued and complete at once. */
FAKE_EXPORT bool fake_op(struct CUstream_st* stream, const char* name, const FakeRange* ranges, size_t count);
FAKE_EXPORT bool fake_access(struct CUstream_st* stream, const void* address, size_t bytes, bool write,
                             const char* name);

/* An access by the host: ordered after what it has seen complete, before what it enqueues from here on. */
FAKE_EXPORT bool fake_host_access(const void* address, size_t bytes, bool write, const char* name);

/* The memory is device memory from here on, of the current context's device, and allocated on that stream: whoever
 * touches it must be ordered after this point of it. */
FAKE_EXPORT bool fake_register(const void* address, size_t bytes, const char* name, struct CUstream_st* stream);

/* The same for memory whose life until now is over: whoever touches it need not be ordered after anything yet. */
FAKE_EXPORT bool fake_adopt(const void* address, size_t bytes, const char* name);

/* Not device memory any longer, without having been freed. */
FAKE_EXPORT bool fake_forget(const void* address);

/* It is freed, which counts as a write on the stream after what is enqueued on the streams `used` until now. What they
 * are ordered after is run first, as the memory may be gone after this call. */
FAKE_EXPORT bool fake_unregister(const void* address, struct CUstream_st* stream, struct CUstream_st* const* used,
                                 size_t used_count);

/* ---- reports */

typedef enum FakeKind { FAKE_RACE, FAKE_MEMORY, FAKE_MISUSE, FAKE_LEAK, FAKE_STUCK, FAKE_NOTE } FakeKind;
FAKE_EXPORT size_t fake_report_count(void);
FAKE_EXPORT int fake_report_kind(size_t index);
FAKE_EXPORT uint64_t fake_report_times(size_t index);
FAKE_EXPORT const char* fake_report_text(size_t index); /* valid until the next call of anything here */
FAKE_EXPORT void fake_clear_reports(void);

/* Reports every stream, event, module, context and memory that was not given back. */
FAKE_EXPORT void fake_check_leaks(void);

/* ---- scripts */

FAKE_EXPORT void fake_set_device_count(int count);
FAKE_EXPORT void fake_set_driver_version(int version); /* 1000 * major + 10 * minor */
FAKE_EXPORT void fake_set_capability(int major, int minor);
FAKE_EXPORT void fake_set_memory(size_t bytes); /* of each device; more is out of memory */

/* The nth call from now (1: the next) of an exported function, by its symbol, does nothing but return `result`. */
FAKE_EXPORT void fake_fail_call(const char* function, uint64_t nth, int result);

/* Calls of a function so far. */
FAKE_EXPORT uint64_t fake_calls(const char* function);

/* ---- ordering call sites: event records and stream waits, told apart by where they are called from (the caller, and
 * its callers within the same library up to the depth; default 4) and numbered as they are met */

FAKE_EXPORT void fake_set_site_depth(int depth);
FAKE_EXPORT size_t fake_site_count(void);
FAKE_EXPORT const char* fake_site_name(size_t site); /* "cuEventRecord < _core.so+0x12 < +0x34" */
FAKE_EXPORT uint64_t fake_site_calls(size_t site);
/* Calls of this site do nothing from here on; -1: none. */
FAKE_EXPORT void fake_mutate(int site);

/* ---- capture: enforces its rules; the captured work runs as though the graph were launched at once */

FAKE_EXPORT bool fake_begin_capture(struct CUstream_st* stream, int mode);
/* False (and a report): the capture was broken, or a stream that joined it was not joined back. */
FAKE_EXPORT bool fake_end_capture(struct CUstream_st* stream);

/* ---- names, for reports */

FAKE_EXPORT void fake_name_stream(struct CUstream_st* stream, const char* name);
FAKE_EXPORT void fake_name_memory(const void* address, const char* name);

#ifdef __cplusplus
}
#endif
