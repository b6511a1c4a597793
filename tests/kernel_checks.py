"""The kernels of codec.cu against torch, launched one by one on a GPU or on its stand-in (test_on_gpu.py).

    PYTHONPATH=bench python tests/kernel_checks.py [--few] [--stand-in]     # by themselves, for a memory checker

A check is a function of the device on which tensors are made and of the kernels; it raises AssertionError.
"""

import math
import sys
from pathlib import Path

import torch
from gpu.launch import Packing, scale, squared_norm, sum_of

HALVES_AND_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PAIRS = [(a, b) for a in HALVES_AND_FLOATS for b in HALVES_AND_FLOATS] + [(torch.float64, torch.float64)]
FEW = [PAIRS[0], PAIRS[2], PAIRS[5], PAIRS[-1]]  # for who has no time
NUMELS = (1, 7, 1000, 8192, 8193, 20011, 8)
SCALE = 0.3
NONE_FOUND = 2**31 - 1


def gradients(device, dtype, skip):
    """Of the sizes above; skip: elements before each, so that it starts unaligned."""
    made = [torch.randn(numel + skip, device=device, dtype=torch.float64).to(dtype) for numel in NUMELS]
    return [grad[skip:] for grad in made]


def wide(dtype):
    """What products are taken in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scaled(x, factor):
    """In the type in which the kernels compute, rounded to it first as the factor is."""
    return x.to(wide(x.dtype)) * torch.tensor(factor, dtype=wide(x.dtype), device=x.device)


def pack_is_bitwise_torchs_in_every_pair_of_types_aligned_or_not(device, kernels):
    for of, to in PAIRS:
        for skip_grad, skip_bucket in ((0, 0), (1, 0), (0, 1), (3, 5)):
            grads = gradients(device, of, skip_grad)
            packing = Packing(kernels, grads, to, SCALE, skip_bucket)
            packing.pack()
            what = f"{of} to {to}, {skip_grad} and {skip_bucket} elements off"
            for grad, slot in zip(grads, packing.slots(), strict=True):
                assert torch.equal(slot, scaled(grad, SCALE).to(to)), what
            assert untouched(packing), f"{what}: wrote between slots"
            assert int(packing.first_nonfinite) == NONE_FOUND, what


def untouched(packing):
    """Whether what no slot covers is as it was made."""
    outside = torch.ones(len(packing.bucket), dtype=torch.bool, device=packing.bucket.device)
    for offset, grad in zip(packing.offsets, packing.grads, strict=True):
        outside[offset : offset + grad.numel()] = False
    return bool((torch.where(outside, packing.bucket, -7.0) == -7.0).all())


def unpack_is_bitwise_torchs_in_every_pair_of_types_aligned_or_not(device, kernels):
    for of, to in PAIRS:
        for skip_grad, skip_bucket in ((0, 0), (1, 3)):
            grads = [torch.zeros(numel + skip_grad, dtype=to, device=device)[skip_grad:] for numel in NUMELS]
            packing = Packing(kernels, grads, of, SCALE, skip_bucket)
            packing.bucket.copy_(torch.randn(len(packing.bucket), device=device, dtype=torch.float64).to(of))
            packing.unpack()
            for grad, slot in zip(grads, packing.slots(), strict=True):
                assert torch.equal(grad, scaled(slot, SCALE).to(to)), f"{of} to {to}"


def many_gradients_take_several_launches(device, kernels):
    grads = [torch.randn(1 + i % 40, device=device) for i in range(1100)]
    packing = Packing(kernels, grads, torch.bfloat16, SCALE)
    packing.pack()
    expected = torch.cat([scaled(grad, SCALE).to(torch.bfloat16) for grad in grads])
    assert torch.equal(torch.cat(packing.slots()), expected)


def norms_are_those_of_float64(device, kernels):
    for dtype in (*HALVES_AND_FLOATS, torch.float64):
        for numel in (1, 1000, 50_001):
            x = torch.randn(numel, device=device, dtype=torch.float64).to(dtype)
            expected = float(x.double().square().sum())
            assert math.isclose(float(squared_norm(kernels, x)), expected, rel_tol=1e-5), (dtype, numel)
    grads = gradients(device, torch.float32, 0)
    packing = Packing(kernels, grads, torch.bfloat16, SCALE)
    packing.pack()
    expected = sum(float(scaled(grad, SCALE).double().square().sum()) for grad in grads)
    assert math.isclose(float(sum_of(kernels, packing.partial_norms)), expected, rel_tol=1e-5)


def norms_are_the_same_bits_each_time(device, kernels):
    x = torch.randn(300_000, device=device)
    assert len({float(squared_norm(kernels, x)) for _ in range(5)}) == 1


def the_first_gradient_that_is_not_finite_is_found(device, kernels):
    for of, to in PAIRS:
        for value in (math.inf, -math.inf, math.nan):
            for where in (1, 4, len(NUMELS) - 1):
                grads = gradients(device, of, 0)
                for grad in grads[where:]:
                    grad[-1] = value
                packing = Packing(kernels, grads, to, SCALE)
                packing.pack()
                assert int(packing.first_nonfinite) == where, f"{value} in {of} to {to}"


def what_does_not_fit_the_wire_is_not_finite(device, kernels):
    grads = gradients(device, torch.float32, 0)
    grads[2][5] = 1e5
    packing = Packing(kernels, grads, torch.float16, 1.0)
    packing.pack()
    assert int(packing.first_nonfinite) == 2


def scaling_is_torchs_with_a_factor_of_the_host_and_of_the_device(device, kernels):
    for dtype in (*HALVES_AND_FLOATS, torch.float64):
        for numel in (1, 1000, 20_011):
            x = torch.randn(numel, device=device, dtype=torch.float64).to(dtype)
            expected = scaled(x, SCALE).to(dtype)
            halved = scaled(x, SCALE * 0.5).to(dtype)
            y = x.clone()
            scale(kernels, x, SCALE)
            assert torch.equal(x, expected), (dtype, numel)
            scale(kernels, y, SCALE, torch.full((1,), 0.5, device=device))
            assert torch.equal(y, halved), (dtype, numel)


CHECKS = [
    pack_is_bitwise_torchs_in_every_pair_of_types_aligned_or_not,
    unpack_is_bitwise_torchs_in_every_pair_of_types_aligned_or_not,
    many_gradients_take_several_launches,
    norms_are_those_of_float64,
    norms_are_the_same_bits_each_time,
    the_first_gradient_that_is_not_finite_is_found,
    what_does_not_fit_the_wire_is_not_finite,
    scaling_is_torchs_with_a_factor_of_the_host_and_of_the_device,
]


def main(options):
    from gpu.device import gpu_of
    from gpu.launch import load_kernels
    from gpu.place import Place

    if "--few" in options:
        PAIRS[:] = FEW
    with gpu_of(Place(0, 1, Path(), "--stand-in" in options, 0.0)) as gpu:
        kernels = load_kernels()
        for check in CHECKS:
            check(gpu.torch_device, kernels)
            print(check.__name__, flush=True)
        gpu.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
