# SPDX-License-Identifier: Apache-2.0
"""RMSNorm against torch's, values and gradients, by groups, and kernels against references."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fused_ops.rmsnorm
from fused_ops.rmsnorm import rmsnorm, rmsnorm_and_input, triton_backend
from tests.fused_ops import kernels


@pytest.mark.parametrize("zero_centered", [False, True])
def test_values_and_gradients(zero_centered):
    x = torch.randn(3, 5, 16, requires_grad=True)
    weight = torch.randn(16, requires_grad=True)
    y = rmsnorm(x, weight, eps=1e-3, zero_centered=zero_centered)
    gain = weight + 1 if zero_centered else weight
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * gain
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    g = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, [x, weight], g), torch.autograd.grad(expected, [x, weight], g)
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_groups_are_normalized_by_themselves():
    x, weight = torch.randn(4, 24), torch.randn(24)
    parts = [rmsnorm(a, b) for a, b in zip(x.split(8, -1), weight.split(8))]
    torch.testing.assert_close(rmsnorm(x, weight, group_size=8), torch.cat(parts, -1))
    assert (rmsnorm(x, weight, group_size=8) - rmsnorm(x, weight)).abs().max() > 1e-3


def test_bf16_statistics_are_fp32():
    x, weight = (100 * torch.randn(8, 512)).bfloat16(), torch.randn(512).bfloat16()
    expected = F.rms_norm(x.double(), (512,), weight.double(), 1e-5)
    # one rounding to BF16: half a unit in the last place, 2^-9
    assert ((rmsnorm(x, weight).double() - expected).abs() <= expected.abs() * 2**-8).all()


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"\[8\]"):
        rmsnorm(torch.randn(2, 8), torch.randn(4))
    with pytest.raises(ValueError, match="must divide"):
        rmsnorm(torch.randn(2, 8), torch.randn(8), group_size=3)


def test_the_input_comes_back_for_a_residual():
    """Gradients of both results meet in x, also where only one of them is used."""
    x, weight = torch.randn(3, 16), torch.randn(16)
    (y, same), (dx, dw) = kernels.run(rmsnorm_and_input, (x, weight))
    assert torch.equal(same, x)
    (plain,), _ = kernels.run(rmsnorm, (x, weight))
    assert torch.equal(y, plain)
    generator = torch.Generator().manual_seed(0)
    upstream, more = (torch.randn(3, 16, generator=generator) for _ in range(2))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    want = torch.autograd.grad(rmsnorm(x, weight), [x, weight], upstream)
    torch.testing.assert_close(dx, want[0] + more)
    torch.testing.assert_close(dw, want[1])


SHAPES = [  # shape, group_size, zero_centered
    ((3, 2, 48), None, False),
    ((2, 24), 8, False),
    ((1, 300), None, True),
    ((36, 16), None, False),  # more rows than a tile, and a second turn of a program
    ((1, 1), None, False),
]


@pytest.mark.parametrize("place", kernels.PLACES)
@pytest.mark.parametrize(("shape", "group_size", "zero_centered"), SHAPES)
def test_kernels(shape, group_size, zero_centered, place, monkeypatch):
    if place[0] == "cpu":
        kernels.interpret(monkeypatch, fused_ops.rmsnorm)
    kernels.poison(monkeypatch)
    monkeypatch.setattr(triton_backend, "PROGRAMS", 4)
    monkeypatch.setattr(triton_backend, "TILE", 64)
    x, weight = 5 * torch.randn(shape), torch.randn(shape[-1])
    # Of one feature the gradient is what eps leaves of 1 - 1: with a small one, rounding alone.
    options = {"zero_centered": zero_centered, "eps": 1e-3 if shape[-1] > 1 else 1.0}
    kernels.compare(partial(rmsnorm, group_size=group_size, **options), (x, weight), place)
    if group_size is None:
        kernels.compare(partial(rmsnorm_and_input, **options), (x, weight), place, "with input")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "group_size"), [((8192, 4096), None), ((8192, 8192), 1024), ((8192, 32, 128), None)]
)
def test_kernels_at_real_size(shape, group_size):
    x, weight = torch.randn(shape).bfloat16(), torch.randn(shape[-1]).bfloat16()
    op = partial(rmsnorm, group_size=group_size)
    kernels.twice_the_same(op, (x, weight))
    kernels.compare(op, (x, weight), ("cuda", torch.bfloat16, "bf16_output"))
    kernels.twice_the_same(rmsnorm_and_input, (x, weight))


@pytest.mark.gpu
def test_only_the_residual_is_used():
    x = torch.randn(4, 64, device="cuda", requires_grad=True)
    weight = torch.ones(64, device="cuda", requires_grad=True)
    _, same = rmsnorm_and_input(x, weight, implementation="triton")
    same.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
