# SPDX-License-Identifier: Apache-2.0
"""Rows taken and summed, against torch's own, and the kernel against the reference."""

import pytest
import torch

import fused_ops.gather
from fused_ops.gather import Places, sum_rows, take_rows
from fused_ops.testing import assert_bitwise_equal
from tests.fused_ops import kernels

ROWS = 7


def copies(count=20):
    """Rows of copies, sorted by nothing; row 3 has none."""
    row = torch.randint(0, ROWS - 1, (count,))
    return torch.where(row >= 3, row + 1, row)


def test_values_and_gradients_are_torchs():
    row, x = copies(), torch.randn(ROWS, 6, requires_grad=True)
    places = Places(row, ROWS)
    y = take_rows(x, places)
    assert torch.equal(y, x[row])
    dy = torch.randn_like(y)
    want = torch.zeros(ROWS, 6).index_add_(0, row, dy)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dx, want)
    z = torch.randn(20, 6, requires_grad=True)
    total = sum_rows(z, places)
    assert torch.equal(total, torch.zeros(ROWS, 6).index_add_(0, row, z.detach()))
    assert not total[3].any()
    upstream = torch.randn_like(total)
    (dz,) = torch.autograd.grad(total, z, upstream)
    assert torch.equal(dz, upstream[row])


def test_bf16_sums_are_rounded_once():
    """1 + 2^-8 + 2^-8: after the first term a BF16 sum would lose each of the others."""
    row = torch.zeros(3, dtype=torch.int64)
    y = torch.tensor([[1.0], [2.0**-8], [2.0**-8]]).bfloat16()
    assert float(sum_rows(y, Places(row, 1))) == 1 + 2**-7


def test_shapes_that_do_not_fit():
    places = Places(copies(), ROWS)
    with pytest.raises(ValueError, match=r"\[7, features\]"):
        take_rows(torch.randn(6, 4), places)
    with pytest.raises(ValueError, match=r"\[20, features\]"):
        sum_rows(torch.randn(6, 4), places)


@pytest.mark.parametrize("place", kernels.PLACES)
def test_kernel(place, monkeypatch):
    device, dtype, _ = place
    if device == "cpu":
        kernels.interpret(monkeypatch, fused_ops.gather)
    kernels.poison(monkeypatch)
    for features in (20, 3000):
        for row in (copies(), torch.full((5,), 2), torch.zeros(0, dtype=torch.int64)):
            places = Places(row.to(device), ROWS)
            y = torch.randn(len(row), features).to(device, dtype)
            if len(row) == 0:
                continue
            got, want = (sum_rows(y, places, implementation=i) for i in ("triton", "reference"))
            assert_bitwise_equal(got, want, f"{len(row)} copies of {features}")


@pytest.mark.gpu
def test_kernel_at_real_size():
    """8192 tokens to six experts each, as they come back."""
    chosen = torch.stack([torch.randperm(64)[:6] for _ in range(8192)]).cuda()
    row = chosen.view(-1).argsort(stable=True) // 6
    places = Places(row, 8192)
    y = torch.randn(6 * 8192, 4096, device="cuda").bfloat16()
    got = sum_rows(y, places, implementation="triton")
    assert_bitwise_equal(got, sum_rows(y, places, implementation="reference"))
