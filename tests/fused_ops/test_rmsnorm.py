# SPDX-License-Identifier: Apache-2.0
"""RMSNorm against torch's, values and gradients, and by groups."""

import pytest
import torch
import torch.nn.functional as F

from fused_ops.rmsnorm import rmsnorm


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
