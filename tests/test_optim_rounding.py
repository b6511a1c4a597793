"""Stochastic rounding of bfloat16 parameters: the formula, nothing lost on average, the same bits everywhere."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optim import OPTIMIZERS, give_gradients, parameters

from gpucomm.optim import SGD, AdamW

BF16 = torch.bfloat16


def philox(counter, key):
    """Philox4x32-10 of Salmon et al., 2011, on arrays of four and two words."""
    x, k = [np.asarray(word, np.uint64) for word in counter], [np.uint64(word) for word in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(10):
        a, b = x[0] * np.uint64(0xD2511F53), x[2] * np.uint64(0xCD9E8D57)
        x = [(b >> np.uint64(32)) ^ x[1] ^ k[0], b & low, (a >> np.uint64(32)) ^ x[3] ^ k[1], a & low]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return x


def test_the_generator_is_the_one_that_was_published():
    for counter, key, words in (
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        assert [int(word) for word in philox(counter, key)] == words


def random_bits(first, numel, step, seed):
    """16 bits for each of the elements from `first` on."""
    index = np.arange(first, first + numel, dtype=np.uint64)
    block = index // np.uint64(8)
    low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
    counter = [block & low, block >> high, np.full_like(block, step), np.zeros_like(block)]
    words = np.stack(philox(counter, [seed & 0xFFFFFFFF, seed >> 32]))
    place = (index % np.uint64(8)).astype(np.int64)
    chosen = words[place // 2, np.arange(numel)]
    return (chosen >> (np.uint64(16) * (index % np.uint64(2)))) & np.uint64(0xFFFF)


def rounded(values, first, step, seed):
    bits = values.numpy().view(np.uint32).astype(np.uint64) + random_bits(first, values.numel(), step, seed)
    return torch.from_numpy((bits >> np.uint64(16)).astype(np.uint16).view(np.int16)).view(BF16)


@pytest.mark.parametrize("seed", [0, 12345, (7 << 32) + 9])
def test_the_bits_are_those_of_the_formula(seed):
    shapes = [(3,), (0,), (1,), (2051,), (16,)]
    params = parameters(BF16, shapes)
    optimizer = SGD(params, lr=1e-3, stochastic_rounding=True, rounding_seed=seed)
    for step in range(1, 4):
        give_gradients(step, params)
        first, expected = 0, []
        for param in params:
            lr = torch.tensor(1e-3)
            wide = param.detach().float() - lr * param.grad.float()
            expected.append(rounded(wide, first, step, seed))
            first += -(-param.numel() // 8) * 8
        optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(params, expected, strict=True))


@settings(max_examples=25, deadline=None)
@given(at=st.integers(1, 124), seed=st.integers(0, 2**64 - 1))
def test_a_cut_at_a_multiple_of_eight_changes_no_bit(at, seed):
    at *= 8
    (whole,) = parameters(BF16, [(1000,)])
    halves = [torch.nn.Parameter(part.clone()) for part in (whole.detach()[:at], whole.detach()[at:])]
    options = {"lr": 1e-3, "stochastic_rounding": True, "rounding_seed": seed}
    optimizers = AdamW([whole], **options), AdamW(halves, **options)
    give_gradients(0, [whole])
    halves[0].grad, halves[1].grad = whole.grad[:at].clone(), whole.grad[at:].clone()
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(torch.cat([half.detach() for half in halves]), whole.detach())


def moved(**options):
    param = torch.nn.Parameter(torch.ones(4096, dtype=BF16))
    optimizer = SGD([param], lr=1.0, **options)
    param.grad = torch.full((4096,), 2.0**-13, dtype=BF16)  # 1/32 of the distance to the next number below 1
    for _ in range(32):
        optimizer.step()
    return float((1 - param.detach().float()).mean())


def test_updates_that_rounding_to_nearest_loses_are_kept_on_average():
    assert moved() == 0.0
    expected = 32 * 2.0**-13
    # Once below 1 the numbers are twice as close; each element's deviation is under one distance of 2^-8.
    assert abs(moved(stochastic_rounding=True) - expected) < 4 * 2.0**-8 / 64


def test_rounding_is_unbiased_at_every_fraction():
    numel = 1 << 16
    for fraction in (1 / 64, 1 / 4, 1 / 2, 7 / 8):
        param = torch.nn.Parameter(torch.ones(numel, dtype=BF16))
        optimizer = SGD([param], lr=1.0, stochastic_rounding=True, rounding_seed=3)
        param.grad = torch.full((numel,), -fraction * 2.0**-7, dtype=BF16)
        optimizer.step()
        went_up = float((param.detach() > 1).float().mean())
        deviation = (fraction * (1 - fraction) / numel) ** 0.5
        assert abs(went_up - fraction) < 4 * deviation


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_runs_of_a_seed_are_equal_and_of_another_are_not(cls):
    runs = []
    for seed in (1, 1, 2):
        params = parameters(BF16)
        optimizer = cls(params, lr=1e-3, stochastic_rounding=True, rounding_seed=seed)
        for step in range(4):
            give_gradients(step, params)
            optimizer.step()
        runs.append(torch.cat([param.detach().flatten() for param in params]))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_numbers_that_are_not_finite_stay_what_they_are():
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.38e38, 0.0, -0.0], dtype=BF16)
    param = torch.nn.Parameter(values.clone())
    optimizer = SGD([param], lr=0.0, stochastic_rounding=True)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(param.detach().nan_to_num(7.0), values.nan_to_num(7.0))
    assert bool(param.isnan()[2])


def test_parameters_of_other_types_are_rounded_to_nearest():
    for dtype in (torch.float32, torch.float16):
        runs = []
        for stochastic in (False, True):
            params = parameters(dtype)
            optimizer = AdamW(params, stochastic_rounding=stochastic)
            give_gradients(0, params)
            optimizer.step()
            runs.append(torch.cat([param.detach().flatten() for param in params]))
        assert torch.equal(*runs)
