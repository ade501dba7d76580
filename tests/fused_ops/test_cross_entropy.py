# SPDX-License-Identifier: Apache-2.0
"""Cross entropy against torch's, in blocks and over a cut vocabulary, and kernels."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import fused_ops.cross_entropy
from fused_ops.cross_entropy import VocabShard, cross_entropy, reference
from tests.fused_ops import kernels


@pytest.fixture(params=[1 << 24, 50])
def block(request, monkeypatch):
    """All rows at once, and one row at a time."""
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(block, dtype):
    logits = (5 * torch.randn(4, 6, 33)).to(dtype).requires_grad_()
    labels = torch.randint(0, 33, (4, 6))
    g = torch.randn(4, 6)
    loss = cross_entropy(logits, labels)
    assert loss.dtype is torch.float32
    exact = logits.detach().float().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none").view(4, 6)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    (got,) = torch.autograd.grad(loss, logits, g)
    (want,) = torch.autograd.grad(expected, exact, g)
    torch.testing.assert_close(
        got, want.to(dtype), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6
    )


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[3e4, -3e4, 0.0]], requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([1]))
    loss.sum().backward()
    assert loss.item() == 6e4
    assert torch.equal(logits.grad, torch.tensor([[1.0, -1.0, 0.0]]))


def test_cut_vocabulary(block):
    cut_vocabulary("cpu", "reference")


def cut_vocabulary(device, implementation):
    """Two shards in one process: the reductions see what two ranks would put together."""
    logits, labels = 3 * torch.randn(8, 20, device=device), torch.randint(0, 20, (8,)).to(device)
    parts = [part.clone().requires_grad_() for part in logits.split([12, 8], -1)]
    maximum = logits.amax(-1)
    exact = torch.exp(logits - maximum[:, None]).sum(-1)
    target = (logits - maximum[:, None]).gather(-1, labels[:, None]).squeeze(-1)
    whole = F.cross_entropy(logits.requires_grad_(), labels, reduction="none")
    (want,) = torch.autograd.grad(whole.sum(), logits)
    found = []
    for start, part in zip((0, 12), parts):
        sums, given = iter((exact, target)), []

        def reduce_sum(t, sums=sums, given=given):
            given.append(t.clone())
            t.copy_(next(sums))

        shard = VocabShard(start, lambda t: t.copy_(maximum), reduce_sum)
        loss = cross_entropy(part, labels, shard=shard, implementation=implementation)
        torch.testing.assert_close(loss, whole)
        (got,) = torch.autograd.grad(loss.sum(), part)
        torch.testing.assert_close(got, want[:, start : start + part.shape[1]])
        found.append(given)
    for mine, others, total in zip(*found, (exact, target)):
        torch.testing.assert_close(mine + others, total)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_the_gradient_may_take_the_place_of_the_logits(implementation, monkeypatch):
    if implementation == "triton":
        kernels.interpret(monkeypatch, fused_ops.cross_entropy)
    logits, labels = torch.randn(4, 9, requires_grad=True), torch.randint(0, 9, (4,))
    copy = logits.detach().clone().requires_grad_()
    middle = logits * 1.0
    loss = cross_entropy(middle, labels, overwrite=True, implementation=implementation)
    (got,) = torch.autograd.grad(loss.sum(), middle, retain_graph=True)
    (want,) = torch.autograd.grad(cross_entropy(copy, labels).sum(), copy)
    torch.testing.assert_close(got, want)
    assert got.data_ptr() == middle.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss.sum(), middle)


@pytest.mark.parametrize("place", kernels.PLACES)
def test_kernels(place, monkeypatch):
    if place[0] == "cpu":
        kernels.interpret(monkeypatch, fused_ops.cross_entropy)
    cut_vocabulary(place[0], "triton")
    kernels.poison(monkeypatch)
    for rows, width in ((4, 33), (2, 4100), (1, 1)):
        logits, labels = 5 * torch.randn(rows, 1, width), torch.randint(0, width, (rows, 1))
        logits[0, 0, 0] = -float("inf")
        logits[-1, 0, -1] = 1e4
        labels[0] = width - 1
        kernels.compare(cross_entropy, (logits, labels), place, f"{rows}x{width}")
        kernels.compare(partial(cross_entropy, overwrite=True), (logits, labels), place)


@pytest.mark.gpu
def test_kernels_at_real_size():
    logits, labels = torch.randn(8192, 32768).bfloat16(), torch.randint(0, 32768, (8192,))
    kernels.twice_the_same(cross_entropy, (logits, labels))
    kernels.compare(cross_entropy, (logits, labels), ("cuda", torch.bfloat16, "bf16_output"))
    logits = logits.cuda().requires_grad_()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cross_entropy(logits * 1.0, labels.cuda(), overwrite=True).sum().backward()
    # One copy of the logits (`* 1.0`), and the gradient of that product.
    assert torch.cuda.max_memory_allocated() - before < 2.1 * logits.numel() * 2


def test_bad_labels():
    with pytest.raises(ValueError, match="labels must be"):
        cross_entropy(torch.randn(2, 3, 4), torch.zeros(3, 2, dtype=torch.long))
