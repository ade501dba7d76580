# SPDX-License-Identifier: Apache-2.0
"""Embedding against torch's, and the kernel that adds its gradient against the reference."""

import pytest
import torch
import torch.nn.functional as F

import fused_ops.embedding
from fused_ops.embedding import embedding, triton_backend
from fused_ops.main_grad import beta_of, mark_zeroed
from fused_ops.testing import assert_bitwise_equal, assert_close
from tests.fused_ops import kernels


def gradient(ids, weight, dy, implementation, before=0.5):
    weight = weight.detach().clone().requires_grad_()
    weight.main_grad = torch.full(weight.shape, before, device=weight.device)
    gaps = bool((ids < 0).any())
    y = embedding(ids, weight, gaps=gaps, implementation=implementation)
    y.backward(dy)
    assert weight.grad is None  # no data-parallel hook waits for one
    return y, weight.main_grad


def test_values_and_gradients():
    ids, weight = torch.randint(0, 7, (3, 5)), torch.randn(9, 4, requires_grad=True)
    dy = torch.randn(3, 5, 4)
    y, got = gradient(ids, weight, dy, "reference")
    want = F.embedding(ids, weight)
    assert torch.equal(y, want)
    (plain,) = torch.autograd.grad(want, weight, dy)
    torch.testing.assert_close(got, plain + 0.5)


def test_a_later_product_adds_to_the_gradient_of_the_embedding():
    """Its sum is not zero any more: `fused_ops.main_grad`."""
    weight = torch.ones(3, 4, requires_grad=True)
    weight.main_grad = torch.zeros(3, 4)
    mark_zeroed([weight])
    embedding(torch.tensor([0]), weight).sum().backward()
    assert beta_of(weight) == 1


def test_negative_ids_are_zeros():
    ids = torch.tensor([[2, -1], [-1, 2]])
    y, got = gradient(ids, torch.ones(3, 4), torch.ones(2, 2, 4), "reference", 0.0)
    assert torch.equal(y[0], torch.tensor([[1.0] * 4, [0.0] * 4]))
    assert torch.equal(got, torch.tensor([[0.0] * 4, [0.0] * 4, [2.0] * 4]))


@pytest.mark.parametrize("place", kernels.PLACES)
def test_kernel(place, monkeypatch):
    device, dtype, _ = place
    if device == "cpu":
        kernels.interpret(monkeypatch, fused_ops.embedding)
    monkeypatch.setattr(triton_backend, "ROWS", 2)
    weight = torch.randn(40, 20).to(device, dtype)
    for ids in (
        torch.randint(-1, 40, (3, 4)),
        torch.full((1, 7), 5),
        torch.tensor([[0, 0, 39, -1, 0, 39]]),
        torch.full((1, 2), -1),
    ):
        dy = torch.randn(*ids.shape, 20).to(device, dtype)
        got = gradient(ids.to(device), weight, dy, "triton")
        want = gradient(ids.to(device), weight, dy, "reference")
        assert_bitwise_equal(got[0], want[0], "rows")
        assert_close(got[1], want[1], "fp32_sum", "gradient")


@pytest.mark.gpu
def test_kernel_at_real_size():
    weight = torch.randn(32768, 4096, device="cuda").bfloat16()
    ids = torch.randint(0, 32768, (1, 8192), device="cuda")
    ids[0, ::16] = 11  # a word as common as "the"
    dy = torch.randn(1, 8192, 4096, device="cuda").bfloat16()
    got, again = (gradient(ids, weight, dy, "triton")[1] for _ in range(2))
    assert_bitwise_equal(got, again, "a second run")
    assert_close(got, gradient(ids, weight, dy, "reference")[1], "fp32_sum")


def test_a_weight_without_main_grad_is_refused():
    with pytest.raises(ValueError, match=r"main_grad must be an fp32 \(3, 4\)"):
        embedding(torch.zeros(2, dtype=torch.long), torch.ones(3, 4))
