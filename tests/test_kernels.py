"""The kernels that are called on arrays by themselves: where the first non-finite element lies."""

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
