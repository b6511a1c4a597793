"""The stand-in for the CUDA driver that GPU code is tested over.

Does it run what was asked for, in every order that the program permits, and notice what a device would not tell?
"""

import ctypes
import subprocess
import sys
import threading
import time

import pytest
import torch
from fake_cuda.control import ORDERS
from fake_cuda.program import BLOCKING, DriverError, Program
from fake_cuda.shim import CudaShim, values

NUMEL = 200
SEEDS = range(200)


@pytest.fixture
def program(fake_cuda):
    with Program(fake_cuda) as running:
        yield running


def take_errors(control, kind):
    """The reports of one kind, which must be all errors; they are expected, so the fixture does not see them."""
    control.drain()
    errors = control.errors()
    assert errors
    assert {error.kind for error in errors} == {kind}, errors
    control.clear_reports()
    return [error.text for error in errors]


# ---- an iteration as the engine does it, with each of its orderings under a name


class Iteration:
    """Two gradients are made on a stream each, packed into a bucket, reduced, unpacked and applied, each on a stream of
    its own, and the bucket is used again; `dropped` is the name of the ordering that is forgotten."""

    ORDERINGS = (
        "upload before pack",
        "first producer before pack",
        "second producer before pack",
        "pack before reduce",
        "reduce before unpack",
        "unpack before consumer",
        "unpack before the next pack",
        "consumer before the next unpack",
        "pack before the gradient is freed",
        "consumer before copy",
        "copy before the host reads",
    )
    ROUNDS = 2
    # 2 * (first + second + table) of each round, summed.
    RESULT = [2.0 * (1 + 10 + 1) + 2.0 * (2 + 10 + 1)] * NUMEL

    def __init__(self, program, dropped=None):
        self.program = program
        self.dropped = dropped
        names = ("upload", "first", "second", "pack", "reduce", "unpack", "main", "copy")
        self.streams = {name: program.stream(name) for name in names}
        self.table, self.bucket, self.reduced, self.param = (
            program.allocate(NUMEL, name) for name in ("table", "bucket", "reduced", "param")
        )
        self.others = [program.allocate(NUMEL, f"second gradient {i}") for i in range(self.ROUNDS)]
        self.gradients = [torch.zeros(NUMEL) for _ in range(self.ROUNDS)]
        self.pinned = program.made("cuMemHostAlloc", ctypes.c_size_t(4 * NUMEL), 0)

    def order(self, name, first, then):
        if name != self.dropped:
            self.program.order(self.streams[first], self.streams[then])

    def run(self):
        """What the host reads at the end."""
        p, s, control = self.program, self.streams, self.program.control
        p.fill(self.table, NUMEL, 1.0, s["upload"])
        self.order("upload before pack", "upload", "pack")
        p.fill(self.param, NUMEL, 0.0, s["main"])
        for i in range(self.ROUNDS):
            self.round(i)
        used = [] if self.dropped == "pack before the gradient is freed" else [s["pack"]]
        for gradient in self.gradients:
            control.unregister(gradient.data_ptr(), s["first"], used)
        self.order("consumer before copy", "main", "copy")
        p.copy_to_host(self.pinned, self.param, NUMEL, s["copy"])
        if self.dropped != "copy before the host reads":
            while not p.is_idle(s["copy"]):
                pass
        control.host_access(self.pinned, 4 * NUMEL, False)
        return p.values(self.pinned, NUMEL)

    def round(self, i):
        p, s = self.program, self.streams
        gradient = self.gradients[i].data_ptr()
        p.control.register(gradient, 4 * NUMEL, f"first gradient {i}", s["first"])
        p.fill(gradient, NUMEL, 1.0 + i, s["first"])
        p.fill(self.others[i], NUMEL, 10.0, s["second"])
        self.order("first producer before pack", "first", "pack")
        self.order("second producer before pack", "second", "pack")
        p.copy_kernel(self.bucket, gradient, NUMEL, s["pack"])
        p.axpy(self.bucket, self.others[i], NUMEL, s["pack"])
        p.axpy(self.bucket, self.table, NUMEL, s["pack"])
        self.order("pack before reduce", "pack", "reduce")
        p.axpy(self.bucket, self.bucket, NUMEL, s["reduce"])
        self.order("reduce before unpack", "reduce", "unpack")
        p.copy(self.reduced, self.bucket, NUMEL, s["unpack"])
        self.order("unpack before consumer", "unpack", "main")
        self.order("unpack before the next pack", "unpack", "pack")
        p.axpy(self.param, self.reduced, NUMEL, s["main"])
        self.order("consumer before the next unpack", "main", "unpack")


def test_a_correct_program_is_right_in_every_order_and_nothing_is_reported(fake_cuda):
    for seed in SEEDS:
        fake_cuda.reset()
        fake_cuda.order("random", seed)
        with Program(fake_cuda) as program:
            assert Iteration(program).run() == Iteration.RESULT
            assert fake_cuda.drain()
            assert fake_cuda.errors() == []


@pytest.mark.parametrize("dropped", Iteration.ORDERINGS)
def test_a_dropped_ordering_is_reported_in_every_order(fake_cuda, dropped):
    schedules = [("earliest", 0), ("latest", 0)] + [("random", seed) for seed in range(10)]
    for order, seed in schedules:
        fake_cuda.reset()
        fake_cuda.order(order, seed)
        with Program(fake_cuda) as program:
            Iteration(program, dropped).run()
            fake_cuda.drain()
            assert fake_cuda.reports("race", "memory"), f"missed in order {order}, seed {seed}"
        fake_cuda.clear_reports()


@pytest.mark.parametrize("dropped", [name for name in Iteration.ORDERINGS if "freed" not in name])
def test_values_are_wrong_in_some_order_without_an_ordering(fake_cuda, dropped):
    results = set()
    for seed in range(40):
        fake_cuda.reset()
        fake_cuda.order("random", seed)
        with Program(fake_cuda) as program:
            results.add(Iteration(program, dropped).run() == Iteration.RESULT)
            fake_cuda.drain()
        fake_cuda.clear_reports()
    assert False in results


def test_a_run_follows_from_its_seed(fake_cuda):
    def result(seed):
        fake_cuda.reset()
        fake_cuda.order("random", seed)
        with Program(fake_cuda) as program:
            values = str(Iteration(program, "first producer before pack").run())
            fake_cuda.drain()
        texts = [report.text for report in fake_cuda.reports()]
        fake_cuda.clear_reports()
        return values, texts

    assert [result(seed) for seed in range(20)] == [result(seed) for seed in range(20)]


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
    (text, *_) = take_errors(program.control, "race")
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
    take_errors(program.control, "race")


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
    take_errors(program.control, "misuse")


# ---- what is measured


def test_what_a_kernel_touches_is_measured(program):
    first, second, memory = program.stream(), program.stream(), program.allocate(NUMEL, "memory")
    program.fill(memory, 100, 1.0, first)
    program.fill(memory + 400, 100, 1.0, second)
    assert program.control.drain()
    assert program.control.errors() == []
    program.fill(memory + 396, 1, 1.0, second)
    (text,) = take_errors(program.control, "race")
    assert "memory (800 bytes) [396, 400)" in text


def test_copies_that_a_kernel_makes_by_memcpy_are_measured(program):
    first, second, memory, other = program.stream(), program.stream(), program.allocate(NUMEL), program.allocate(NUMEL)
    program.fill(memory, NUMEL, 1.0, first)
    program.copy_kernel(other, memory, NUMEL, second)
    take_errors(program.control, "race")


def test_atomics_of_a_kernel_are_measured(program):
    first, second, counter = program.stream(), program.stream(), program.allocate(1)
    program.call("cuMemsetD8Async", ctypes.c_uint64(counter), 0, ctypes.c_size_t(4), ctypes.c_void_p(first))
    program.order(first, second)
    program.launch("test_count", 640, second, ctypes.c_uint64(counter))
    program.control.drain()
    assert ctypes.c_int.from_address(counter).value == 10
    program.launch("test_count", 640, first, ctypes.c_uint64(counter))
    take_errors(program.control, "race")


def test_a_kernel_that_leaves_its_memory_is_stopped_and_reported(program):
    stream, memory = program.stream(), program.allocate(NUMEL, "memory")
    program.fill(memory, NUMEL + 1, 1.0, stream)
    (text,) = take_errors(program.control, "memory")
    assert text.startswith(f"test_fill on stream 1 writes to memory ({4 * NUMEL} bytes) [{4 * NUMEL}, {4 * NUMEL + 4})")


def test_a_kernel_on_freed_memory_is_stopped_and_reported(program):
    stream, memory = program.stream(), program.allocate(NUMEL, "memory")
    program.free(memory)
    program.fill(memory, NUMEL, 1.0, stream)
    (text,) = take_errors(program.control, "memory")
    assert "freed memory" in text


def test_a_write_that_nobody_declared_is_found_in_the_red_zone(program):
    memory = program.allocate(NUMEL)
    ctypes.c_byte.from_address(memory + 4 * NUMEL).value = 1
    assert take_errors(program.control, "memory") == ["memory 0 was written to past its end"]
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
    (text,) = take_errors(program.control, "stuck")
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
    (text,) = take_errors(program.control, "race")
    assert "gather on stream" in text
    assert "reduce on stream" in text
    assert sorted(dropped) == ["gather", "reduce"]


def test_a_task_that_declares_memory_that_is_not_there_never_steps(program):
    memory, steps = program.allocate(1), []
    program.task("reduce", program.stream(), lambda: bool(steps.append(1)), writes=((memory, 8),))
    (text,) = take_errors(program.control, "memory")
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
    assert len(take_errors(program.control, "misuse")) == 3


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


# ---- misuse


def test_calls_without_a_current_context_fail(fake_cuda):
    with Program(fake_cuda) as program:
        stream = program.stream()
    with pytest.raises(DriverError, match="201"):
        program.event()
    with pytest.raises(DriverError, match="201"):
        program.is_idle(stream)
    take_errors(fake_cuda, "misuse")


def test_calls_before_init_fail(fake_cuda):
    program = f"import ctypes; print(ctypes.CDLL({str(fake_cuda.path)!r}).cuDevicePrimaryCtxRetain(None, 0))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "3\n"


def test_handles_of_another_device_are_refused(fake_cuda):
    fake_cuda.machine(device_count=2)
    with Program(fake_cuda) as first:
        stream = first.stream()
        with Program(fake_cuda, 1) as second, pytest.raises(DriverError, match="400"):
            second.record(second.event(), stream)
    (text,) = take_errors(fake_cuda, "misuse")
    assert text == "cuEventRecord: stream 1 belongs to device 0, current is 1"


def test_destroyed_handles_and_double_frees_are_refused(program):
    stream, event, memory = program.stream(), program.event(), program.allocate(1)
    program.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))
    program.call("cuEventDestroy_v2", ctypes.c_void_p(event))
    program.free(memory)
    other = program.stream()
    for misuse in (
        lambda: program.record(program.event(), stream),
        lambda: program.record(event, other),
        lambda: program.wait(other, event),
        lambda: program.free(memory),
        lambda: program.call("cuStreamDestroy_v2", ctypes.c_void_p(stream)),
    ):
        with pytest.raises(DriverError):
            misuse()
    assert len(take_errors(program.control, "misuse")) == 5


def test_what_is_not_given_back_is_reported(fake_cuda):
    with Program(fake_cuda) as program:
        program.stream("stream A")
        program.event()
        program.allocate(1, "memory A")
        fake_cuda.check_leaks()
        assert [text.split(" was never")[0] for text in take_errors(fake_cuda, "leak")] == [
            "memory A, 4 bytes,",
            "stream A",
            "event 1",
            "the context of device 0",
        ]


def test_a_kernel_that_there_is_not_is_not_found(program):
    module = program.made("cuModuleLoadData", b"image")
    with pytest.raises(DriverError, match="500"):
        program.made("cuModuleGetFunction", ctypes.c_void_p(module), b"no_such_kernel")


def test_the_kernels_of_the_codec_are_there(program):
    module = program.made("cuModuleLoadData", b"image")
    for name in (b"pack_f32_f32", b"unpack_bf16_f32", b"squared_norm_f16", b"sum_partials"):
        assert program.made("cuModuleGetFunction", ctypes.c_void_p(module), name)


# ---- scripts


def test_a_scripted_call_fails_and_those_around_it_do_not(program):
    program.control.fail_call("cuMemAlloc_v2", 2, 2)
    program.allocate(1)
    with pytest.raises(DriverError, match="cuMemAlloc_v2 returned 2"):
        program.allocate(1)
    program.allocate(1)
    assert program.control.calls("cuMemAlloc_v2") == 3


def test_the_machine_is_as_scripted(program):
    program.control.machine(device_count=3, driver_version=12020, capability=(8, 0), memory_bytes=1000)
    number = ctypes.c_int()
    answers = []
    for symbol, *arguments in (
        ("cuDriverGetVersion",),
        ("cuDeviceGetCount",),
        ("cuDeviceGetAttribute", 75, 0),
        ("cuDeviceGetAttribute", 76, 0),
    ):
        program.call(symbol, ctypes.byref(number), *arguments)
        answers.append(number.value)
    assert answers == [12020, 3, 8, 0]
    program.allocate(200)
    with pytest.raises(DriverError, match="returned 2"):
        program.allocate(100)


def test_without_a_device_init_says_so(fake_cuda):
    fake_cuda.machine(device_count=0)
    with pytest.raises(DriverError, match="cuInit returned 100"):
        Program(fake_cuda).__enter__()


def test_ordering_calls_are_counted_by_site_and_can_be_dropped(program):
    first, second, memory = program.stream(), program.stream(), program.allocate(NUMEL)

    def run():
        program.fill(memory, NUMEL, 1.0, first)
        program.order(first, second)
        program.fill(memory, NUMEL, 2.0, second)
        program.order(second, first)
        program.control.drain()

    run()
    assert [site.name.split(" < ")[0] for site in program.control.sites()] == ["cuEventRecord", "cuStreamWaitEvent"]
    assert [site.calls for site in program.control.sites()] == [2, 2]
    for site in range(2):
        with program.control.mutation(site):
            run()
        take_errors(program.control, "race")
        program.control.synchronize(first)
        program.control.synchronize(second)
    run()


# ---- capture


def test_a_capture_that_forks_and_joins_is_whole(program):
    main, side, memory = program.stream(), program.stream(), program.allocate(NUMEL)
    program.fill(memory, NUMEL, 0.0, main)  # loads the kernel
    with program.control.capture(main):
        program.fill(memory, NUMEL, 1.0, main)
        program.order(main, side)
        program.fill(memory, NUMEL, 2.0, side)
        program.order(side, main)


def test_a_capture_must_join_what_it_forked(program):
    main, side, memory = program.stream(), program.stream("side"), program.allocate(NUMEL)
    program.fill(memory, NUMEL, 0.0, main)  # loads the kernel

    def fork():
        with program.control.capture(main):
            program.order(main, side)
            program.fill(memory, NUMEL, 2.0, side)

    with pytest.raises(RuntimeError, match="invalid"):
        fork()
    assert take_errors(program.control, "misuse") == [
        "fake_end_capture: side joined the capture and was not joined back"
    ]


def test_a_capture_forbids_waits_on_the_outside_queries_and_allocations(program):
    main, other, event = program.stream(), program.stream(), program.event()
    program.record(event, other)
    for misuse, result in (
        (lambda: program.wait(main, event), "905"),
        (lambda: program.is_idle(main), "900"),
        (lambda: program.is_complete(event), "900"),
        (lambda: program.allocate(1), "900"),
    ):
        with (
            pytest.raises(RuntimeError, match="invalid"),
            program.control.capture(main),
            pytest.raises(DriverError, match=result),
        ):
            misuse()
        take_errors(program.control, "misuse")


# ---- torch through the shim


def reported_texts(control):
    return [report.text for report in control.errors()]


@pytest.fixture
def shim(fake_cuda):
    with CudaShim(fake_cuda) as running:
        yield running


def test_torch_ops_are_work_on_the_current_stream(shim):
    side = shim.program.stream("side")
    x = torch.ones(8)
    with shim.stream(side):
        y = x * 2
    shim.record_stream(x, side)
    assert y.tolist() == [2.0] * 8
    (text,) = take_errors(shim.control, "race")
    assert text.startswith("write by aten::ones on the legacy stream and read by aten::mul on side")


def test_torch_ops_that_are_ordered_report_nothing(shim):
    side = shim.program.stream("side")
    x = torch.ones(8)
    shim.control.wait_stream(side, 0)
    with shim.stream(side):
        y = x * 2
    shim.control.wait_stream(0, side)
    assert values(shim, y.add_(1)) == [3.0] * 8


def test_views_are_no_access(shim):
    side = shim.program.stream("side")
    x = torch.ones(8)
    with shim.stream(side):
        assert x.view(2, 4).t().detach().shape == (4, 2)


def test_a_torch_op_runs_what_it_was_ordered_after(shim):
    side = shim.program.stream("side")
    x = torch.zeros(8)
    shim.control.wait_stream(side, 0)
    shim.program.fill(x.data_ptr(), 8, 5.0, side)
    assert values(shim, x.clone()) == [0.0] * 8
    take_errors(shim.control, "race")
    shim.control.wait_stream(0, side)
    assert values(shim, x.clone()) == [5.0] * 8


def test_backward_and_optimizers_are_seen_in_the_thread_that_called_them(shim):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    threads = set()
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: threads.add(threading.get_ident()))
    side = shim.program.stream("side")
    shim.control.wait_stream(side, 0)
    with shim.stream(side):
        model(torch.ones(2, 4)).sum().backward()
    assert threads == {threading.get_ident()}
    shim.control.drain()
    assert shim.control.errors() == []
    optimizer.step()  # on the legacy stream, which does not wait for side
    assert any("on side" in text and "on the legacy stream" in text for text in take_errors(shim.control, "race"))


def test_backward_runs_on_the_stream_of_its_forward_and_joins_the_callers(shim):
    side = shim.program.stream("side")
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    seen = {}
    for name, layer in (("first", first), ("second", second)):
        layer.weight.register_post_accumulate_grad_hook(lambda _, name=name: seen.update({name: shim.current}))
    x = torch.ones(2, 4)
    shim.control.wait_stream(side, 0)
    with shim.stream(side):
        middle = first(x)
    shim.control.wait_stream(0, side)
    second(middle).sum().backward()
    assert seen == {"first": side, "second": 0}
    torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1).step()
    for tensor in (x, middle, *(param.grad for param in first.parameters())):
        shim.record_stream(tensor, side)
        shim.record_stream(tensor, 0)


def test_what_the_test_itself_orders_is_no_site_of_the_program(shim):
    side = shim.program.stream("side")
    layer = torch.nn.Linear(4, 4)
    shim.control.wait_stream(side, 0)
    with shim.stream(side):
        loss = layer(torch.ones(2, 4)).sum()
    loss.backward()
    assert shim.control.sites() == []


def test_freeing_a_tensor_is_a_write_on_its_stream(shim):
    side, out = shim.program.stream("side"), shim.program.allocate(8)
    x = torch.ones(8)
    shim.control.wait_stream(side, 0)
    shim.program.copy_kernel(out, x.data_ptr(), 8, side)
    del x
    shim.control.drain()
    kinds = {report.kind for report in shim.control.errors()}
    shim.control.clear_reports()
    assert kinds
    assert kinds <= {"race", "memory"}


def test_a_recorded_stream_keeps_a_tensor_until_it_is_done(shim):
    side, out = shim.program.stream("side"), shim.program.allocate(8)
    x = torch.ones(8)
    shim.control.wait_stream(side, 0)
    shim.program.copy_kernel(out, x.data_ptr(), 8, side)
    shim.record_stream(x, side)
    del x
    shim.control.drain()
    assert shim.program.values(out, 8) == [1.0] * 8
    assert reported_texts(shim.control) == []
