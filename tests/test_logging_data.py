"""The logging data: torch's keys, with what is true of ours."""

import time

import pytest
import torch
from ranks import run_ranks
from torch import nn
from toys import ConvNet, TwoHeads, batch, mlp

from gpucomm import DistributedDataParallel as Ours

Stock = nn.parallel.DistributedDataParallel


def train(ddp, rank, iterations, *arguments, shape=(5, 24)):
    for iteration in range(iterations):
        ddp(batch(rank, iteration, *shape), *arguments).sum().backward()


@pytest.mark.parametrize("arguments", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@pytest.mark.parametrize("make", [mlp, ConvNet])
def test_all_keys_of_torch_are_there_and_those_of_construction_are_equal(make, arguments):
    times = ("time", "iteration", "error", "rebuilt", "bucket")

    def body(rank, world):
        stock, ours = Stock(make(), **arguments), Ours(make(), **arguments)
        mine, theirs = ours._get_ddp_logging_data(), stock._get_ddp_logging_data()
        assert mine == theirs
        for ddp in (stock, ours):
            train(ddp, rank, 4, shape=(5, 24 if make is mlp else 36))
        mine, theirs = ours._get_ddp_logging_data(), stock._get_ddp_logging_data()
        assert set(theirs) <= set(mine)
        for key, value in theirs.items():
            assert type(mine[key]) is type(value), key
            if not any(word in key for word in times):
                assert mine[key] == value, key
        assert mine["iteration"] == theirs["iteration"] == 3

    run_ranks(body, 2)


def test_sizes_order_and_plan_are_those_of_the_engine():
    def body(rank, world):
        ours = Ours(nn.Sequential(nn.Linear(10, 50), nn.Linear(50, 10)), bucket_cap_mb=0)
        sizes = [40, 2000, 200, 2000]
        assert ours._get_ddp_logging_data()["bucket_sizes"] == ", ".join(map(str, sizes))
        train(ours, rank, 3, shape=(5, 10))
        data = ours._get_ddp_logging_data()
        assert data["prev_iteration_grad_ready_order_indices"] == ", ".join(
            map(str, ours._reduction.engine.ready_order)
        )
        assert data["rebuilt_per_bucket_param_indices"].replace(",", "").split() == [
            str(i) for i in ours._reduction.plan.parameters
        ]
        assert sorted(map(int, data["rebuilt_bucket_sizes"].split(", "))) == sorted(sizes)
        assert data["has_rebuilt_buckets"] == 1
        assert data["num_buckets_reduced"] == 4
        assert ours._has_rebuilt_buckets

    run_ranks(body, 2)


def test_parameters_are_numbered_without_those_that_were_frozen_at_construction():
    def body(rank, world):
        model = mlp(depth=2)
        model[0].requires_grad_(False)
        ours = Ours(model)
        train(ours, rank, 2)
        data = ours._get_ddp_logging_data()
        assert sorted(data["prev_iteration_grad_ready_order_indices"].split(", ")) == ["0", "1", "2", "3"]
        assert data["num_parameter_tensors"] == 4

    run_ranks(body, 2)


def test_times_are_positive_ordered_and_those_of_the_wall_clock():
    def body(rank, world):
        before = time.time_ns()
        ours = Ours(mlp())
        train(ours, rank, 6)
        data = ours._get_ddp_logging_data()
        points = [
            before,
            data["forward_compute_time_start"],
            data["backward_compute_time_start"],
            data["backward_comm_time_start"],
            data["backward_comm_time_end"],
            time.time_ns(),
        ]
        assert points == sorted(points)
        assert data["backward_compute_time_start"] < data["backward_compute_time_end"]
        for name in ("forward_compute_time", "backward_compute_time", "backward_comm_time"):
            assert data[name] > 0
            assert data[f"avg_{name}"] > 0
            overlap = data["backward_compute_comm_overlap_time"]
            assert name.startswith("forward") or 0 <= overlap <= data[name]
        assert all(0 <= ns < 60e9 for ns in ours.reducer.get_backward_stats())
        assert len(ours.reducer.get_backward_stats()) == 8

    run_ranks(body, 2)


def test_after_the_first_ten_iterations_only_every_nth_is_sampled():
    def body(rank, world):
        ours = Ours(mlp())
        ours._set_ddp_runtime_logging_sample_rate(3)
        sampled = []
        for iteration in range(20):
            ours(batch(rank, iteration, 5, 24)).sum().backward()
            sampled.append(ours._get_ddp_logging_data()["iteration"])
        assert sampled == [0, *range(1, 10), 9, 9, 12, 12, 12, 15, 15, 15, 18, 18]
        with pytest.raises(ValueError, match="sample rate"):
            ours._set_ddp_runtime_logging_sample_rate(0)

    run_ranks(body, 2)


def test_unused_parameters_are_counted_in_bytes_and_the_graph_is_static_until_they_change():
    def body(rank, world):
        ours = Ours(TwoHeads(), find_unused_parameters=True)
        one_head = 4 * (2 * 6 + 2)
        for iteration in range(3):
            ours(batch(rank, iteration, 3, 6), 0).sum().backward()
        data = ours._get_ddp_logging_data()
        assert data["unused_parameter_size"] == one_head
        assert data["can_set_static_graph"] == 1
        assert ours.reducer._ddp_graph_static()
        ours(batch(rank, 4, 3, 6), 1).sum().backward()
        assert ours._get_ddp_logging_data()["can_set_static_graph"] == 0
        assert not ours.reducer._ddp_graph_static()

    run_ranks(body, 2)


def test_a_graph_that_changes_on_one_rank_only_is_static_on_none():
    def body(rank, world):
        ours = Ours(TwoHeads(), find_unused_parameters=True)
        for iteration in range(3):
            ours(batch(rank, iteration, 3, 6), iteration if rank == 1 and iteration < 2 else 0).sum().backward()
        return ours._get_ddp_logging_data()["can_set_static_graph"]

    assert run_ranks(body, 2) == [0, 0]


def test_errors_are_recorded_where_they_are_raised():
    def body(rank, world):
        ours = Ours(TwoHeads())
        assert "has_error" not in ours._get_ddp_logging_data()
        ours(batch(rank, 0, 3, 6), 0).sum().backward()
        with pytest.raises(RuntimeError) as caught:
            ours(batch(rank, 1, 3, 6), 0)
        data = ours._get_ddp_logging_data()
        assert data["has_error"] == 1
        assert data["error"] == str(caught.value)
        other = Ours(mlp())
        with pytest.raises(TypeError, match="must be callable"):
            other.register_comm_hook(None, 3)
        assert "must be callable" in other._get_ddp_logging_data()["error"]

    run_ranks(body, 2)


def test_what_the_program_asks_of_the_wrapper_is_reported():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    def body(rank, world):
        ours = Ours(mlp(), gradient_as_bucket_view=True, static_graph=True, bucket_cap_mb=3, forward_sync_buffers=False)
        ours.register_comm_hook(None, allreduce_hook)
        with ours.join():
            pass
        data = ours._get_ddp_logging_data()
        assert (data["gradient_as_bucket_view"], data["static_graph"], data["broadcast_buffers"]) == (1, 1, 0)
        assert data["bucket_cap_bytes"] == 3 << 20
        assert data["comm_hook"] == "allreduce_hook"
        assert data["join_uneven_inputs"] == 1

    run_ranks(body, 2)


def test_variables_of_the_environment_are_reported(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def body(rank, world):
        data = Ours(mlp())._get_ddp_logging_data()
        assert data["gloo_socket_ifname"] == "lo"
        assert data["cuda_visible_devices"] == "N/A"
        assert data["gloo_num_threads"] > 0
        assert not any(key.startswith("nccl") for key in data)

    run_ranks(body, 1)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float16, "c10::Half"), (torch.bfloat16, "c10::BFloat16"), (torch.complex64, "c10::complex<float>")],
    ids=str,
)
def test_dtypes_have_the_names_that_torch_gives_them(dtype, name):
    def body(rank, world):
        module = nn.ParameterList([torch.ones(3, dtype=dtype), torch.ones(3, dtype=torch.float64)])
        expected = Stock(module)._get_ddp_logging_data()["dtypes"]
        assert Ours(module)._get_ddp_logging_data()["dtypes"] == expected == f"{name}, double"

    run_ranks(body, 1)
