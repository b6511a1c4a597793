"""The plan: which slots lie in which bucket."""

import pytest
import torch

from gpucomm import BucketPlan
from gpucomm.reduction.layout.buckets import (
    SLOT_ALIGNMENT,
    ParameterSpec,
    contiguous_strides,
    count_in_memory,
    is_dense,
)


def specs_of(*shapes, dtype=torch.float32):
    return [ParameterSpec.of(torch.empty(shape, dtype=dtype)) for shape in shapes]


def test_the_count_read_from_a_storage_is_torch_s():
    tensor = torch.empty(4)
    address = tensor.untyped_storage()._cdata
    counts = [count_in_memory(address)]
    kept = [tensor[1:], tensor.detach(), tensor.view(2, 2)[0]]
    counts.append(count_in_memory(address))
    assert counts[1] == torch._C._storage_Use_Count(address) == counts[0] + 3
    del kept
    assert count_in_memory(address) == counts[0]


def test_a_bucket_is_closed_once_it_holds_its_cap_and_the_last_cap_repeats():
    specs = specs_of(*[(16,)] * 6)  # 64 bytes each
    plan = BucketPlan.build(specs, [5, 4, 3, 2, 1, 0], [64, 128])
    assert [[s.parameter for s in b.slots] for b in plan.buckets] == [[5], [4, 3], [2, 1], [0]]
    assert plan.parameters == [5, 4, 3, 2, 1, 0]


def test_a_cap_of_zero_gives_each_parameter_a_bucket():
    assert len(BucketPlan.build(specs_of((3,), (0,), (5,)), range(3), [0]).buckets) == 3


def test_a_parameter_larger_than_the_cap_closes_its_bucket():
    plan = BucketPlan.build(specs_of((4,), (1000,), (4,)), range(3), [100])
    assert [[s.parameter for s in b.slots] for b in plan.buckets] == [[0, 1], [2]]


def test_each_dtype_has_buckets_of_its_own_and_its_own_count_of_caps():
    specs = [*specs_of((8,), (8,)), *specs_of((8,), (8,), dtype=torch.float64)]
    plan = BucketPlan.build(specs, [0, 2, 1, 3], [32, 1000])
    assert [(b.dtype, [s.parameter for s in b.slots]) for b in plan.buckets] == [
        ("float32", [0]),
        ("float64", [2]),
        ("float32", [1]),
        ("float64", [3]),
    ]


def test_slots_are_aligned_do_not_overlap_and_complex_numbers_are_pairs():
    specs = [*specs_of((3, 5), (1,), (0,), (17,)), *specs_of((4, 2), (1,), dtype=torch.complex64)]
    real, pairs = BucketPlan.build(specs, range(6), [1 << 20]).buckets
    for bucket in (real, pairs):
        end = 0
        for slot in bucket.slots:
            assert slot.offset % SLOT_ALIGNMENT == 0
            assert slot.offset >= end
            end = slot.offset + slot.numel
        assert end <= bucket.numel
    assert [slot.numel for slot in pairs.slots] == [16, 2]


def test_a_plan_can_do_without_gaps_between_slots():
    specs = specs_of((3, 5), (1,), (0,), (17,))
    (bucket,) = BucketPlan.build(specs, range(4), [1 << 20], alignment=1).buckets
    assert [slot.offset for slot in bucket.slots] == [0, 15, 16, 16]
    assert bucket.numel == 33


def test_the_size_of_a_bucket_does_not_depend_on_the_order():
    specs = specs_of((3,), (5,), (100,), (16,))
    sizes = {BucketPlan.build(specs, order, [1 << 20]).buckets[0].numel for order in ([0, 1, 2, 3], [3, 1, 0, 2])}
    assert len(sizes) == 1


def test_a_plan_survives_json_and_its_hash_tells_layouts_apart():
    specs = specs_of((3, 5), (7,), (9,))
    plan = BucketPlan.build(specs, [2, 1, 0], [1 << 20])
    assert BucketPlan.from_json(plan.to_json()) == plan
    assert BucketPlan.from_json(plan.to_json()).layout_hash == plan.layout_hash
    assert BucketPlan.build(specs, [2, 0, 1], [1 << 20]).layout_hash != plan.layout_hash


@pytest.mark.parametrize("text", ["", "{}", '[{"dtype": "float32"}]', "[1]"])
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match="not a bucket plan"):
        BucketPlan.from_json(text)


def test_dense_layouts_keep_their_strides_and_others_become_contiguous():
    last = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    assert is_dense(last)
    assert ParameterSpec.of(last).strides == last.stride()
    assert not is_dense(torch.empty(1).expand(3, 4))
    assert ParameterSpec.of(torch.empty(1).expand(3, 4)).strides == (4, 1)
    assert contiguous_strides((2, 0, 3)) == (3, 3, 1)
