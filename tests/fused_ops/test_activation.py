# SPDX-License-Identifier: Apache-2.0
"""Activations against their formulas, values and gradients, and kernels against references."""

import pytest
import torch
import torch.nn.functional as F

import fused_ops.activation
from fused_ops.activation import squared_relu, swiglu
from fused_ops.dispatch import UnsupportedError
from tests.fused_ops import kernels


def _swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@pytest.mark.parametrize(
    ("op", "formula"), [(swiglu, _swiglu), (squared_relu, lambda x: F.relu(x) ** 2)]
)
@pytest.mark.parametrize("scaled", [False, True])
def test_values_and_gradients(op, formula, scaled):
    x = (3 * torch.randn(5, 7, 8)).requires_grad_()
    scale = torch.rand(5, 7, 1, requires_grad=True) if scaled else None
    inputs = [x] if scale is None else [x, scale]
    y = op(x, scale)
    expected = formula(x) if scale is None else formula(x) * scale
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    g = torch.randn_like(y)
    for got, want in zip(
        torch.autograd.grad(y, inputs, g), torch.autograd.grad(expected, inputs, g)
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_bf16_rounds_once():
    x = torch.randn(64, 32).bfloat16()
    assert torch.equal(swiglu(x), _swiglu(x.float()).bfloat16())
    assert torch.equal(squared_relu(x), F.relu(x.float()).square().bfloat16())


def test_bad_shapes():
    with pytest.raises(ValueError, match="even"):
        swiglu(torch.randn(2, 3))
    with pytest.raises(ValueError, match=r"scale must be \(2, 1\)"):
        squared_relu(torch.randn(2, 3), torch.randn(2))


def test_reference_is_exact():
    """In fp64 the reference's gradients are autograd's."""
    for op, formula in ((swiglu, _swiglu), (squared_relu, lambda x: F.relu(x) ** 2)):
        x, scale = 3 * torch.randn(4, 6), torch.rand(4, 1)
        _, got = kernels.run(op, (x, scale))
        _, want = kernels.run(lambda x, s, f=formula: f(x) * s, (x.double(), scale.double()))
        for a, b in zip(got, want):
            torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("place", kernels.PLACES)
@pytest.mark.parametrize("op", [swiglu, squared_relu])
def test_kernels(op, place, monkeypatch):
    if place[0] == "cpu":
        kernels.interpret(monkeypatch, fused_ops.activation)
    kernels.poison(monkeypatch)
    for rows, features in ((3, 8), (1, 2056), (1, 1)):
        x = 3 * torch.randn(rows, 1, features * (2 if op is swiglu else 1))
        x[0, 0, 0] = 100.0  # exp of it overflows
        x[-1, 0, -1] = -100.0
        for scale in (None, torch.rand(rows, 1, 1)):
            kernels.compare(op, (x, scale), place, f"{rows}x{features}")


@pytest.mark.gpu
@pytest.mark.parametrize("op", [swiglu, squared_relu])
def test_kernels_at_real_size(op):
    x, scale = torch.randn(8192, 28672).bfloat16(), torch.rand(8192, 1)
    kernels.twice_the_same(op, (x, scale))
    kernels.compare(op, (x, scale), ("cuda", torch.bfloat16, "bf16_output"))
    kernels.compare(op, (x[:, ::2], None), ("cuda", torch.bfloat16, "bf16_output"))


def test_a_forced_kernel_says_why_it_cannot():
    with pytest.raises(UnsupportedError, match="CUDA devices, the tensor is on cpu"):
        swiglu(torch.randn(2, 4), implementation="triton")
