"""The wrapper's constructor arguments: types, ranges, contradictions, and torch's classes of errors and warnings."""

import inspect
import re
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from expect import raises
from ranks import run_ranks
from torch import nn
from toys import ConvNet, mlp

from gpucomm import BucketPlan
from gpucomm import DistributedDataParallel as Ours

Stock = nn.parallel.DistributedDataParallel
FLAGS = [
    "init_sync",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "broadcast_buffers",
    "forward_sync_buffers",
]
HAS_TWO_NAMES = "forward_sync_buffers" in inspect.signature(Stock.__init__).parameters


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["True", 2, 0.5, [True]], ids=repr)
def test_a_flag_takes_no_other_thing(name, value):
    pattern = re.escape(f"{name} is {value!r} (") + ".*accepted is True or False"
    raises((TypeError, ValueError), pattern, lambda: Ours(mlp(), **{name: value}))


@pytest.mark.parametrize("value", [True, 1, np.bool_(True), np.int64(1)], ids=repr)
def test_a_flag_may_be_a_number_of_any_library(value):
    def body(rank, world):
        ours = Ours(mlp(), find_unused_parameters=value, static_graph=None)
        assert ours.find_unused_parameters is True
        assert ours.static_graph is False

    run_ranks(body, 1)


@pytest.mark.parametrize(
    ("name", "value", "kind", "accepted"),
    [
        ("bucket_cap_mb", -1, ValueError, "a number of MiB, 0 or more"),
        ("bucket_cap_mb", float("nan"), ValueError, "a number of MiB, 0 or more"),
        ("bucket_cap_mb", float("inf"), ValueError, "a number of MiB, 0 or more"),
        ("bucket_cap_mb", "25", TypeError, "a number of MiB, 0 or more"),
        ("bucket_cap_mb", True, TypeError, "a number of MiB, 0 or more"),
        ("bucket_cap_mb_list", 25, TypeError, "a list of numbers of MiB"),
        ("bucket_cap_mb_list", "25", TypeError, "a list of numbers of MiB"),
        ("bucket_cap_mb_list", [1, -2], ValueError, "a number of MiB, 0 or more"),
        ("dim", 0.5, TypeError, "an integer"),
        ("dim", "0", TypeError, "an integer"),
        ("device_ids", 0, TypeError, "a list of at most one device"),
        ("device_ids", "cpu", TypeError, "a list of at most one device"),
        ("device_ids", [0.5], TypeError, "a list of at most one device"),
        ("output_device", 0.5, TypeError, "a number, a torch.device or its name"),
        ("process_group", "gloo", TypeError, "a torch.distributed process group"),
        ("process_group", 0, TypeError, "a torch.distributed process group"),
        ("delay_all_reduce_named_params", "weight", TypeError, "a list of (name, parameter)"),
        ("delay_all_reduce_named_params", [torch.ones(1)], TypeError, "a name and its parameter"),
        ("param_to_hook_all_reduce", "weight", TypeError, "a parameter"),
        ("transport", 3, TypeError, "the name of a transport or a gpucomm.Transport"),
        ("plan", "[]", TypeError, "a gpucomm.BucketPlan"),
        ("timeout", "60", TypeError, "a timedelta or a number of seconds"),
        ("timeout", True, TypeError, "a timedelta or a number of seconds"),
        ("nonfinite", "skp", ValueError, "pass, raise, skip"),
    ],
)
def test_what_an_argument_cannot_be_is_refused_with_its_value_and_what_it_can_be(name, value, kind, accepted):
    with pytest.raises(kind) as caught:
        Ours(mlp(), **{name: value})
    assert name in str(caught.value)
    assert accepted in str(caught.value)
    part = value[-1] if isinstance(value, list) else value
    assert repr(part) in str(caught.value)


@pytest.mark.parametrize("module", [None, 3, [nn.Linear(2, 2)], nn.Linear])
def test_only_a_module_can_be_wrapped(module):
    raises(TypeError, "module is .*accepted is a torch.nn.Module", lambda: Ours(module))


def on_two_devices():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


def in_one_rank(make, kind, pattern):
    run_ranks(lambda rank, world: raises(kind, pattern, make), 1)


@pytest.mark.parametrize("wrapper", [Stock, Ours])
@pytest.mark.parametrize(
    ("module", "arguments", "kind", "pattern"),
    [
        (nn.ReLU, {}, RuntimeError, "doesn't have any parameter that requires a gradient"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), {}, RuntimeError, "any parameter that requires a gradient"),
        (lambda: nn.LazyLinear(2), {}, RuntimeError, "uninitialized parameters"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
            {},
            ValueError,
            "same type of devices",
        ),
        (mlp, {"device_ids": [0, 1]}, ValueError, "device_ids can only be None or contain a single element"),
        (mlp, {"device_ids": [0]}, ValueError, "device_ids and output_device arguments only work with"),
        (mlp, {"output_device": 1}, ValueError, "device_ids and output_device arguments only work with"),
        (mlp, {"delay_all_reduce_named_params": []}, ValueError, "need to be set at the same time"),
        (mlp, {"param_to_hook_all_reduce": nn.Parameter(torch.ones(1))}, ValueError, "need to be set at the same time"),
    ],
)
def test_what_torch_refuses_is_refused_with_its_class_and_key_words(module, arguments, kind, pattern, wrapper):
    in_one_rank(lambda: wrapper(module(), **arguments), kind, pattern)


def test_without_a_process_group_torchs_words_say_so():
    raises(RuntimeError, "Default process group has not been initialized", lambda: Ours(mlp()))


def test_a_rank_outside_of_the_group_is_told():
    def body(rank, world):
        group = dist.new_group([0])
        if rank == 1:
            raises(ValueError, "not a member of the process group", lambda: Ours(mlp(), process_group=group))

    run_ranks(body, 2)


def test_a_plan_and_a_bucket_cap_contradict_each_other():
    raises(ValueError, "plan and a bucket cap", lambda: Ours(mlp(), plan=BucketPlan(()), bucket_cap_mb=25))


def test_a_parameter_that_hooks_the_delayed_ones_requires_a_gradient():
    frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    arguments = {"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": frozen}
    raises(ValueError, "param_to_hook_all_reduce does not require a gradient", lambda: Ours(mlp(), **arguments))


# ---- what they mean


def test_without_a_cap_the_plan_is_our_own_and_torchs_default_is_reported():
    def body(rank, world):
        ours = Ours(nn.Linear(1024, 1024))
        assert ours.bucket_bytes_cap == 25 << 20
        assert ours.bucket_bytes_cap_default
        assert ours.bucket_bytes_cap_list == []

    run_ranks(body, 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"bucket_cap_mb": 0}, [[5], [4], [3], [2], [1], [0]]),
        ({"bucket_cap_mb": 400 / (1 << 20)}, [[5, 4], [3, 2], [1, 0]]),  # no smaller first bucket
        ({"bucket_cap_mb_list": [0, 400 / (1 << 20)]}, [[5], [4, 3], [2, 1], [0]]),  # the last one repeats
        ({"bucket_cap_mb_list": [800 / (1 << 20), 0]}, [[5, 4, 3, 2], [1], [0]]),
        ({"bucket_cap_mb": 0, "bucket_cap_mb_list": [1]}, [[5, 4, 3, 2, 1, 0]]),
    ],
)
def test_explicit_caps_are_exact(arguments, expected):
    """Six parameters of 200 bytes each."""

    def body(rank, world):
        ours = Ours(nn.ParameterList([torch.ones(50) for _ in range(6)]), **arguments)
        assert [[slot.parameter for slot in bucket.slots] for bucket in ours._reduction.plan.buckets] == expected
        assert not ours.bucket_bytes_cap_default
        caps = [int(cap * (1 << 20)) for cap in arguments.get("bucket_cap_mb_list", [arguments.get("bucket_cap_mb")])]
        assert ours.bucket_bytes_cap == max(caps)
        assert ours.bucket_bytes_cap_list == (caps if "bucket_cap_mb_list" in arguments else [])

    run_ranks(body, 1)


@pytest.mark.parametrize("wrapper", [Stock, Ours])
@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({}, 0),
        ({"broadcast_buffers": True}, 1),
        ({"broadcast_buffers": False}, 1),
        ({"forward_sync_buffers": False}, 0),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, 1),
        ({"check_reduction": True}, 1),
    ],
)
@pytest.mark.skipif(not HAS_TWO_NAMES, reason="this torch has no forward_sync_buffers")
def test_deprecated_arguments_warn_as_with_torch_where_the_wrapper_is_made(arguments, count, wrapper):
    def body(rank, world):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapper(mlp(), **arguments)
        deprecations = [w for w in caught if issubclass(w.category, FutureWarning)]
        assert len(deprecations) == count
        assert all(w.filename == __file__ for w in deprecations)

    run_ranks(body, 1)


@pytest.mark.parametrize(
    ("arguments", "at_init", "in_forward"),
    [
        ({}, True, True),
        ({"broadcast_buffers": False}, False, False),
        ({"forward_sync_buffers": False}, True, False),
        ({"broadcast_buffers": False, "forward_sync_buffers": True}, True, True),
        ({"init_sync": False}, False, True),
    ],
)
@pytest.mark.parametrize("wrapper", [Stock, Ours])
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.skipif(not HAS_TWO_NAMES, reason="this torch has no forward_sync_buffers")
def test_buffers_are_brought_together_when_the_arguments_say_so(arguments, at_init, in_forward, wrapper):
    def body(rank, world):
        model = ConvNet()
        model.norm.running_var.fill_(rank + 2.0)
        ddp = wrapper(model, **arguments)
        assert (model.norm.running_var[0] == 2.0).item() == (rank == 0 or at_init)
        model.norm.running_var.fill_(rank + 2.0)
        model.norm.momentum = 0.0
        ddp(torch.ones(2, 36)).sum().backward()
        assert (model.norm.running_var[0] == 2.0).item() == (rank == 0 or in_forward)
        assert ddp.broadcast_buffers is ddp.forward_sync_buffers is in_forward

    run_ranks(body, 2)


def test_unused_parameters_with_a_static_graph_are_no_matter_and_the_program_is_told():
    def body(rank, world):
        with pytest.warns(UserWarning, match="You passed find_unused_parameters=true"):
            ours = Ours(mlp(), static_graph=True, find_unused_parameters=True)
        with pytest.warns(UserWarning, match="no need to set it again"):
            ours._set_static_graph()

    run_ranks(body, 1)
