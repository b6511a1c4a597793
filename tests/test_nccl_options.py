"""NcclOptions: what NCCL is told, and buckets in memory that it knows of."""

import pytest
import torch
from expect import raises
from fake_cuda.ranks import on_gpu
from gradients import mean_gradients
from ranks import run_ranks
from toys import batch, mlp

from gpucomm import Communicator, NcclOptions
from gpucomm import DistributedDataParallel as Ours
from gpucomm.errors import TransportUnavailable

SMALL = 0.001  # MB: several buckets
REGISTERED = NcclOptions(register_buffers=True)


@pytest.fixture(autouse=True)
def stand_in(fake_cuda):
    """Built before the ranks are forked; skips where there is no compiler."""


def loss_of(module, rank, iteration):
    return module(batch(rank, iteration, 5, 24)).square().mean()


def train(ours, rank, iterations=4):
    for iteration in range(iterations):
        ours.zero_grad()
        loss_of(ours, rank, iteration).backward()
        yield iteration


# ---- what they may be


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"min_ctas": 0, "max_ctas": 4}, ValueError, "min_ctas is 0, accepted is a whole number from 1 on"),
        ({"min_ctas": 4}, ValueError, "min_ctas is 4 and max_ctas None"),
        ({"min_ctas": 4, "max_ctas": 2}, ValueError, "min_ctas is 4 and max_ctas 2"),
        ({"max_ctas": True}, TypeError, "max_ctas is True, accepted is a whole number"),
        ({"max_ctas": 2.0}, TypeError, "max_ctas is 2.0, accepted is a whole number"),
        ({"cga_cluster_size": 9}, ValueError, "cga_cluster_size is 9, accepted is a whole number from 0 to 8"),
        ({"nvls_ctas": 0}, ValueError, "nvls_ctas is 0"),
        ({"cta_policy": 3}, ValueError, "cta_policy is 3, accepted is a whole number from 0 to 2"),
        ({"collnet_enable": 1}, TypeError, "collnet_enable is 1, accepted are True and False"),
        ({"blocking": None}, TypeError, "blocking is None"),
        ({"register_buffers": "yes"}, TypeError, "register_buffers is 'yes'"),
        ({"net_name": ""}, TypeError, "net_name is ''"),
    ],
)
def test_an_option_that_is_none_is_refused_by_name(options, error, text):
    raises(error, text, lambda: NcclOptions(**options))


def test_options_beside_parameters_of_the_host_or_another_transport_are_refused():
    def body(rank, world):
        raises(
            ValueError,
            "nccl_options is given, and the parameters are on cpu",
            lambda: Ours(mlp(), nccl_options=REGISTERED),
        )
        raises(
            ValueError,
            "nccl_options beside transport='shm'",
            lambda: Ours(mlp(), transport="shm", nccl_options=REGISTERED),
        )
        raises(
            ValueError,
            "nccl_options beside transport='shm'",
            lambda: Communicator(transport="shm", nccl_options=REGISTERED),
        )
        raises(TypeError, "nccl_options", lambda: Ours(mlp(), nccl_options={"max_ctas": 4}))

    run_ranks(body, 1)


def test_options_that_differ_between_ranks_are_refused_on_all():
    def body(rank, world):
        with on_gpu(rank, world):
            options = NcclOptions(max_ctas=4 + rank)
            raises(
                TransportUnavailable,
                "nccl_options differ: {'max_ctas': 4} on rank 0, {'max_ctas': 5} on rank 1",
                lambda: Ours(mlp(), nccl_options=options),
            )

    run_ranks(body, 2)


@pytest.mark.parametrize("version", [21805, 22809, 23203])
def test_nccl_is_told_what_was_asked_for(version):
    everything = NcclOptions(2, 8, 2, 4, 1, False, 3, "Socket", blocking=True)

    def body(rank, world):
        with on_gpu(rank, world, version=version) as shim:
            for options, least in ((everything, 2), (NcclOptions(max_ctas=3), 1)):
                ours = Ours(mlp(), nccl_options=options)
                for _ in train(ours, rank, 1):
                    pass
                younger = {"nvls_ctas", "cta_policy", "collnet_enable"} | (
                    {"traffic_class"} if version < 22500 else set()
                )
                expected = {"min_ctas": least, **options.config()}
                for member, value in expected.items():
                    known = version >= 22703 or member not in younger
                    assert shim.nccl.config(member) == (value if known else None), member
                assert shim.nccl.net_name() == (options.net_name or "")

    run_ranks(body, 2)


def test_a_communicator_that_does_not_block_reduces_too():
    def body(rank, world):
        model = mlp()
        expected = mean_gradients(model, lambda m, r: loss_of(m, r, 0), world)
        with on_gpu(rank, world, script="polls n=3"):
            ours = Ours(model, nccl_options=NcclOptions(blocking=False))
            for _ in train(ours, rank, 1):
                for name, param in ours.module.named_parameters():
                    torch.testing.assert_close(param.grad, expected[name])

    run_ranks(body, 2)


# ---- registered buckets


def registered_calls(shim):
    names = ("ncclCommWindowRegister", "ncclCommRegister", "ncclMemAlloc")
    return [shim.control.calls(name) for name in names]


@pytest.mark.parametrize(("version", "kind"), [(21903, "plain"), (22703, "symmetric"), (23203, "symmetric")])
@pytest.mark.parametrize("wire_dtype", [None, torch.bfloat16])
def test_registered_buckets_give_the_same_means(version, kind, wire_dtype):
    def body(rank, world):
        model = mlp()
        expected = [mean_gradients(model, lambda m, r, i=i: loss_of(m, r, i), world) for i in range(4)]
        with on_gpu(rank, world, version=version) as shim:
            ours = Ours(model, bucket_cap_mb=SMALL, nccl_options=REGISTERED, wire_dtype=wire_dtype)
            for iteration in train(ours, rank):
                for name, param in ours.module.named_parameters():
                    tolerance = {} if wire_dtype is None else {"atol": 1e-2, "rtol": 2e-2}
                    torch.testing.assert_close(param.grad, expected[iteration][name], **tolerance)
            assert ours._reduction.slots._arena.kind == kind
            assert len(ours._reduction.plan.buckets) > 2
            # One block, known to NCCL once: the plan in ready order uses it again.
            symmetric = kind == "symmetric"
            assert registered_calls(shim) == [int(symmetric), int(not symmetric), 1]

    run_ranks(body, 2)


def test_a_gradient_that_the_program_keeps_lies_beside_the_registered_bucket_and_stays():
    def body(rank, world):
        with on_gpu(rank, world) as shim:
            ours = Ours(mlp(), nccl_options=REGISTERED)
            kept = []
            for _ in train(ours, rank):
                if rank == 0:
                    kept.append((ours.module[0].weight.grad, ours.module[0].weight.grad.clone()))
            for grad, copy in kept:
                assert torch.equal(grad, copy)
            assert registered_calls(shim)[2] == 1

    run_ranks(body, 2)


@pytest.mark.parametrize("script", ["no_windows rank=1", "no_cumem"])
def test_where_one_rank_cannot_have_a_window_all_register_plainly(script):
    def body(rank, world):
        with on_gpu(rank, world, script=script):
            ours = Ours(mlp(), nccl_options=REGISTERED)
            for _ in train(ours, rank, 3):
                pass
            assert ours._reduction.slots._arena.kind == "plain"

    run_ranks(body, 2)


def test_an_nccl_that_cannot_register_reduces_unregistered_and_says_so():
    def body(rank, world):
        with on_gpu(rank, world, version=21805):
            with pytest.warns(UserWarning, match="this NCCL cannot register memory on all ranks"):
                ours = Ours(mlp(), nccl_options=REGISTERED)
            for _ in train(ours, rank, 3):
                pass
            assert ours._reduction.slots._arena.kind == ""

    run_ranks(body, 2)


def test_a_plan_that_needs_more_memory_registers_anew():
    def body(rank, world):
        with on_gpu(rank, world) as shim:
            model = mlp(width=64)
            model[0].weight.requires_grad_(False)
            ours = Ours(model, bucket_cap_mb=SMALL, nccl_options=REGISTERED)
            ours(batch(rank, 0, 5, 64)).sum().backward()
            ours(batch(rank, 1, 5, 64)).sum().backward()
            before = registered_calls(shim)
            model[0].weight.requires_grad_(True)
            expected = mean_gradients(model, lambda m, r: m(batch(r, 2, 5, 64)).square().mean(), world)
            for _ in range(3):
                ours.zero_grad()
                ours(batch(rank, 2, 5, 64)).square().mean().backward()
                for name, param in ours.module.named_parameters():
                    torch.testing.assert_close(param.grad, expected[name])
            after = registered_calls(shim)
            assert after[0] == before[0] + 1

    run_ranks(body, 2)


class Backwards(torch.nn.Module):
    """Its gradients come in another order than its parameters do, so that a new plan follows the first iteration."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = torch.nn.Linear(24, 4)
        self.first = torch.nn.Linear(24, 24)
        self.middle = torch.nn.Linear(24, 24)

    def forward(self, x):
        return self.last(self.middle(self.first(x).tanh()).tanh())


def test_weights_beside_registered_buckets_and_a_new_plan():
    """The program's stream divides the means; the new plan's memory is cleared on another."""

    def body(rank, world):
        with on_gpu(rank, world):
            ours = Ours(Backwards(), bucket_cap_mb=SMALL, nccl_options=REGISTERED)
            first_plan = ours._reduction.plan
            for iteration in range(3):
                ours.zero_grad()
                with ours.weight(3 + rank):
                    ours(batch(rank, iteration, 5, 24)).square().sum().backward()
            assert ours._reduction.plan != first_plan

    run_ranks(body, 2)


def test_a_communication_hook_beside_registered_buckets_is_refused():
    def body(rank, world):
        with on_gpu(rank, world):
            ours = Ours(mlp(), nccl_options=REGISTERED)
            raises(
                RuntimeError,
                "a communication hook beside NcclOptions",
                lambda: ours.register_comm_hook(None, lambda state, bucket: None),
            )

    run_ranks(body, 1)


def test_connections_are_made_before_the_first_backward():
    def body(rank, world):
        with on_gpu(rank, world) as shim:
            before = shim.nccl.library.fake_nccl_launched()
            ours = Ours(mlp(), bucket_cap_mb=SMALL)
            sizes = {(bucket.dtype, bucket.numel) for bucket in ours._reduction.plan.buckets}
            assert len(sizes) > 1
            # Beside each size once: the model's values, which are broadcast.
            broadcasts = 1
            assert shim.nccl.library.fake_nccl_launched() == before + len(sizes) + broadcasts

    run_ranks(body, 2)
