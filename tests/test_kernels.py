"""The kernels that are called on arrays by themselves: checksums, and where the first non-finite element lies."""

import numpy as np
import pytest
import torch

from gpucomm import _core

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_the_first_nonfinite_element_is_found_wherever_it_is(dtype, bad):
    for numel in (1, 7, 1000, 5000):
        x = torch.ones(numel, dtype=dtype)
        assert _core.first_nonfinite(x) == -1
        for at in {0, numel // 2, numel - 1}:
            x[at] = bad
            x[-1] = bad
            assert _core.first_nonfinite(x) == at
            x[at] = x[-1] = 1


def test_an_imaginary_part_that_is_not_finite_counts_for_its_element():
    x = torch.ones(9, dtype=torch.complex64)
    torch.view_as_real(x)[5, 1] = float("nan")
    assert _core.first_nonfinite(x) == 5


def test_numbers_that_cannot_be_infinite_never_are():
    assert _core.first_nonfinite(torch.full((100,), -1, dtype=torch.int64)) == -1
    assert _core.first_nonfinite(np.full(100, 255, dtype=np.uint8)) == -1
    assert _core.first_nonfinite(torch.empty(0)) == -1


def test_any_dense_layout_is_read_in_the_order_of_memory():
    x = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    x[0, 2, 1, 1] = float("inf")
    assert _core.first_nonfinite(x) == (1 * 5 + 1) * 3 + 2


def test_an_array_with_gaps_is_refused():
    with pytest.raises(ValueError, match="first_nonfinite"):
        _core.first_nonfinite(torch.zeros(8, 8)[:, ::2])


def test_a_checksum_is_of_the_bytes_of_any_contiguous_array():
    x = torch.arange(1000.0)
    expected = _core.checksum(x)
    for same in (x.numpy(), x.numpy().tobytes(), x.view(10, 100), x.view(torch.int32)):
        assert _core.checksum(same) == expected
    assert _core.checksum(torch.view_as_complex(x.view(500, 2))) == expected
    assert 0 <= expected < 1 << 64


def test_a_checksum_sees_every_flipped_bit_and_every_swap_of_an_array():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, 777, dtype=np.uint8)
    seen = {_core.checksum(x)}
    for at in range(len(x)):
        for bit in range(8):
            x[at] ^= 1 << bit
            seen.add(_core.checksum(x))
            x[at] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(x)
    values = torch.arange(300, dtype=torch.bfloat16)
    for other in range(1, 300):
        swapped = values.clone()
        swapped[[0, other]] = swapped[[other, 0]]
        assert _core.checksum(swapped) != _core.checksum(values)


def test_a_checksum_does_not_depend_on_where_the_array_lies():
    x = torch.arange(5000, dtype=torch.int32).view(torch.uint8)
    for offset in range(1, 70):
        moved = torch.zeros(len(x) + offset, dtype=torch.uint8)
        moved[offset:] = x
        assert _core.checksum(moved[offset:]) == _core.checksum(x)


def test_a_checksum_of_an_array_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="checksum"):
        _core.checksum(torch.zeros(8, 8).t()[1:])
