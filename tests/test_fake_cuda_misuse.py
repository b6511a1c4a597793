"""The stand-in for the CUDA driver: what it refuses, what a test can make it refuse, and the rules of captures."""

import ctypes
import subprocess
import sys

import pytest
from fake_cuda.program import DriverError, Program

NUMEL = 200


@pytest.fixture
def program(fake_cuda):
    with Program(fake_cuda) as running:
        yield running


# ---- misuse


def test_calls_without_a_current_context_fail(fake_cuda):
    with Program(fake_cuda) as program:
        stream = program.stream()
    with pytest.raises(DriverError, match="201"):
        program.event()
    with pytest.raises(DriverError, match="201"):
        program.is_idle(stream)
    fake_cuda.take_errors("misuse")


def test_calls_before_init_fail(fake_cuda):
    program = f"import ctypes; print(ctypes.CDLL({str(fake_cuda.path)!r}).cuDevicePrimaryCtxRetain(None, 0))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "3\n"


def test_handles_of_another_device_are_refused(fake_cuda):
    fake_cuda.machine(device_count=2)
    with Program(fake_cuda) as first:
        stream = first.stream()
        with Program(fake_cuda, 1) as second, pytest.raises(DriverError, match="400"):
            second.record(second.event(), stream)
    (text,) = fake_cuda.take_errors("misuse")
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
    assert len(program.control.take_errors("misuse")) == 5


def test_what_is_not_given_back_is_reported(fake_cuda):
    with Program(fake_cuda) as program:
        program.stream("stream A")
        program.event()
        program.allocate(1, "memory A")
        fake_cuda.check_leaks()
        assert [text.split(" was never")[0] for text in fake_cuda.take_errors("leak")] == [
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
        program.control.take_errors("race")
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
    assert program.control.take_errors("misuse") == [
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
        program.control.take_errors("misuse")
