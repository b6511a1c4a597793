"""The stand-in for the CUDA driver that GPU code is tested over.

Does it run what was asked for, in every order that the program permits, and notice what a device would not tell?
"""

import ctypes
import threading
import time

import pytest
from fake_cuda.control import ORDERS
from fake_cuda.program import BLOCKING, DriverError, Program

NUMEL = 200


@pytest.fixture
def program(fake_cuda):
    with Program(fake_cuda) as running:
        yield running


# ---- streams and events


@pytest.mark.parametrize("order", ORDERS)
def test_enqueueing_runs_nothing_and_a_drain_all(program, order):
    program.control.order(order)
    stream, memory = program.stream(), program.allocate(NUMEL)
    program.fill(memory, NUMEL, 3.0, stream)
    assert all(value != 3.0 for value in program.values(memory, NUMEL))
    assert not program.is_idle(stream) or program.values(memory, NUMEL) == [3.0] * NUMEL
    assert program.control.drain()
    assert program.values(memory, NUMEL) == [3.0] * NUMEL


def test_run_until_runs_what_a_stream_depends_on_and_nothing_else(program):
    first, second, third = (program.stream() for _ in range(3))
    a, b, c = (program.allocate(1) for _ in range(3))
    program.fill(a, 1, 1.0, first)
    program.order(first, second)
    program.fill(a, 1, 2.0, first)
    program.fill(b, 1, 1.0, second)
    program.fill(c, 1, 1.0, third)
    assert program.control.run_until(second)
    assert program.values(a, 1) == [1.0]
    assert program.values(b, 1) == [1.0]
    assert program.values(c, 1) != [1.0]


def test_a_wait_takes_the_record_that_was_the_newest_then(program):
    first, second, event = program.stream(), program.stream(), program.event()
    a, b = program.allocate(1), program.allocate(1)
    program.fill(a, 1, 1.0, first)
    program.record(event, first)
    program.wait(second, event)
    program.copy(b, a, 1, second)
    program.fill(a, 1, 2.0, first)
    program.record(event, first)
    (text, *_) = program.control.take_errors("race")
    assert "test_fill on stream" in text
    assert "cuMemcpyDtoDAsync_v2 on stream" in text


def test_a_wait_for_an_event_never_recorded_orders_nothing_and_is_noted(program):
    stream, event = program.stream(), program.event()
    program.wait(stream, event)
    assert program.is_complete(event)
    assert ["never recorded" in note.text for note in program.control.reports("note")] == [True]


def test_an_event_seen_complete_orders_what_the_host_enqueues_next(program):
    first, second, event, memory = program.stream(), program.stream(), program.event(), program.allocate(NUMEL)
    program.fill(memory, NUMEL, 1.0, first)
    program.record(event, first)
    while not program.is_complete(event):
        pass
    program.fill(memory, NUMEL, 2.0, second)


@pytest.mark.parametrize("order", ORDERS)
def test_the_legacy_stream_synchronises_with_blocking_streams(program, order):
    program.control.order(order)
    blocking, memory = program.stream(flags=BLOCKING), program.allocate(NUMEL)
    program.fill(memory, NUMEL, 1.0, blocking)
    program.axpy(memory, memory, NUMEL, 0)
    program.axpy(memory, memory, NUMEL, blocking)
    program.control.drain()
    assert program.values(memory, NUMEL) == [4.0] * NUMEL


def test_the_legacy_stream_does_not_synchronise_with_non_blocking_streams(program):
    stream, memory = program.stream(), program.allocate(NUMEL)
    program.fill(memory, NUMEL, 1.0, stream)
    program.axpy(memory, memory, NUMEL, 0)
    program.control.take_errors("race")


def test_time_between_events_needs_them_timed_and_complete(program):
    stream, begin, end, bare = program.stream(), program.event(0), program.event(0), program.event()
    milliseconds = ctypes.c_float(-1)

    def elapsed(first, last):
        program.call("cuEventElapsedTime", ctypes.byref(milliseconds), ctypes.c_void_p(first), ctypes.c_void_p(last))

    program.record(begin, stream)
    program.record(end, stream)
    with pytest.raises(DriverError, match="600"):
        elapsed(begin, end)
    program.control.drain()
    elapsed(begin, end)
    assert milliseconds.value >= 0
    with pytest.raises(DriverError, match="400"):
        elapsed(bare, end)
    program.control.take_errors("misuse")


# ---- what is measured


def test_what_a_kernel_touches_is_measured(program):
    first, second, memory = program.stream(), program.stream(), program.allocate(NUMEL, "memory")
    program.fill(memory, 100, 1.0, first)
    program.fill(memory + 400, 100, 1.0, second)
    assert program.control.drain()
    assert program.control.errors() == []
    program.fill(memory + 396, 1, 1.0, second)
    (text,) = program.control.take_errors("race")
    assert "memory (800 bytes) [396, 400)" in text


def test_copies_that_a_kernel_makes_by_memcpy_are_measured(program):
    first, second, memory, other = program.stream(), program.stream(), program.allocate(NUMEL), program.allocate(NUMEL)
    program.fill(memory, NUMEL, 1.0, first)
    program.copy_kernel(other, memory, NUMEL, second)
    program.control.take_errors("race")


def test_atomics_of_a_kernel_are_measured(program):
    first, second, counter = program.stream(), program.stream(), program.allocate(1)
    program.call("cuMemsetD8Async", ctypes.c_uint64(counter), 0, ctypes.c_size_t(4), ctypes.c_void_p(first))
    program.order(first, second)
    program.launch("test_count", 640, second, ctypes.c_uint64(counter))
    program.control.drain()
    assert ctypes.c_int.from_address(counter).value == 10
    program.launch("test_count", 640, first, ctypes.c_uint64(counter))
    program.control.take_errors("race")


def test_a_kernel_that_leaves_its_memory_is_stopped_and_reported(program):
    stream, memory = program.stream(), program.allocate(NUMEL, "memory")
    program.fill(memory, NUMEL + 1, 1.0, stream)
    (text,) = program.control.take_errors("memory")
    assert text.startswith(f"test_fill on stream 1 writes to memory ({4 * NUMEL} bytes) [{4 * NUMEL}, {4 * NUMEL + 4})")


def test_a_kernel_on_freed_memory_is_stopped_and_reported(program):
    stream, memory = program.stream(), program.allocate(NUMEL, "memory")
    program.free(memory)
    program.fill(memory, NUMEL, 1.0, stream)
    (text,) = program.control.take_errors("memory")
    assert "freed memory" in text


def test_a_write_that_nobody_declared_is_found_in_the_red_zone(program):
    memory = program.allocate(NUMEL)
    ctypes.c_byte.from_address(memory + 4 * NUMEL).value = 1
    assert program.control.take_errors("memory") == ["memory 0 was written to past its end"]
    ctypes.c_byte.from_address(memory + 4 * NUMEL).value = ctypes.c_byte(0xA5).value


def test_freeing_memory_waits_for_the_device(program):
    stream, memory, other = program.stream(), program.allocate(NUMEL), program.allocate(NUMEL)
    program.fill(memory, NUMEL, 1.0, stream)
    program.fill(other, NUMEL, 1.0, stream)
    program.free(memory)
    assert program.values(other, NUMEL) == [1.0] * NUMEL
    program.fill(other, NUMEL, 1.0, program.stream())


# ---- work of other libraries, and several threads


def test_a_task_that_cannot_go_on_holds_up_its_own_stream_alone(program):
    first, second, memory = program.stream("first"), program.stream("second"), program.allocate(2)
    peer_is_here = []
    program.task("all-reduce", first, lambda: bool(peer_is_here))
    program.fill(memory, 1, 1.0, first)
    program.fill(memory + 4, 1, 2.0, second)
    program.control.deadline(0.05)
    assert not program.control.drain()
    (text,) = program.control.take_errors("stuck")
    assert "did not get to its end: first at all-reduce, 2 in all" in text
    assert program.values(memory + 4, 1) == [2.0]
    peer_is_here.append(True)
    assert program.control.drain()
    assert program.values(memory, 1) == [1.0]


def test_a_task_is_ordered_and_checked_as_all_work_is(program):
    first, second, memory = program.stream(), program.stream(), program.allocate(1)
    dropped = []
    program.task("reduce", first, lambda: True, lambda: dropped.append("reduce"), writes=((memory, 4),))
    program.task("gather", second, lambda: True, lambda: dropped.append("gather"), writes=((memory, 4),))
    (text,) = program.control.take_errors("race")
    assert "gather on stream" in text
    assert "reduce on stream" in text
    assert sorted(dropped) == ["gather", "reduce"]


def test_a_task_that_declares_memory_that_is_not_there_never_steps(program):
    memory, steps = program.allocate(1), []
    program.task("reduce", program.stream(), lambda: bool(steps.append(1)), writes=((memory, 8),))
    (text,) = program.control.take_errors("memory")
    assert text.endswith("past its end")
    assert steps == []


def test_what_nobody_drives_runs_once_that_is_asked_for(program):
    memory = program.allocate(1)
    program.control.drive_when_idle(0.001)
    program.fill(memory, 1, 1.0, program.stream())
    limit = time.monotonic() + 30
    while program.values(memory, 1) != [1.0]:
        assert time.monotonic() < limit
        time.sleep(0.001)
    program.control.drive_when_idle(0)


def test_host_and_device_memory_are_not_taken_for_each_other(program):
    stream, device = program.stream(), program.allocate(1)
    host = program.made("cuMemHostAlloc", ctypes.c_size_t(4), 0)
    for misuse in (
        lambda: program.copy(device, host, 1, stream),
        lambda: program.copy_to_host(device, device, 1, stream),
        lambda: program.free(host),
    ):
        with pytest.raises(DriverError, match="returned 1"):
            misuse()
    assert len(program.control.take_errors("misuse")) == 3


def test_threads_may_enqueue_and_drive_at_once(fake_cuda):
    counts = []

    def run(number):
        with Program(fake_cuda) as program:
            first, second, memory, event = program.stream(), program.stream(), program.allocate(NUMEL), program.event()
            program.fill(memory, NUMEL, 0.0, first)
            for _ in range(20):
                program.order(first, second)
                program.fill(memory, NUMEL, float(number), second)
                program.order(second, first)
                program.axpy(memory, memory, NUMEL, first)
                program.record(event, first)
                while not program.is_complete(event):
                    pass
                counts.append(program.values(memory, NUMEL) == [2.0 * number] * NUMEL)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [True] * 80
