# SPDX-License-Identifier: Apache-2.0
"""Activations against their formulas, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from fused_ops.activation import squared_relu, swiglu


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
