"""Torch over the stand-in for the CUDA driver: CPU tensors that stand for CUDA ones, each op work on a stream."""

import threading

import pytest
import torch
from fake_cuda.shim import CudaShim, values


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
    (text,) = shim.control.take_errors("race")
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
    shim.control.take_errors("race")
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
    assert any("on side" in text and "on the legacy stream" in text for text in shim.control.take_errors("race"))


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
    assert shim.control.errors() == []
