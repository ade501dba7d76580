# SPDX-License-Identifier: Apache-2.0
"""Cross entropy against torch's, in blocks, and over a cut vocabulary."""

import pytest
import torch
import torch.nn.functional as F

from fused_ops.cross_entropy import VocabShard, cross_entropy, reference


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
    """Two shards in one process: the reductions see what two ranks would put together."""
    logits, labels = 3 * torch.randn(8, 20), torch.randint(0, 20, (8,))
    parts = [part.clone().requires_grad_() for part in logits.split([12, 8], -1)]
    maximum = logits.amax(-1)
    exact = torch.exp(logits - maximum[:, None]).sum(-1)
    target = (logits - maximum[:, None]).gather(-1, labels[:, None]).squeeze(-1)
    whole = F.cross_entropy(logits.requires_grad_(), labels, reduction="none")
    (want,) = torch.autograd.grad(whole.sum(), logits)
    for start, part in zip((0, 12), parts):
        sums = iter((exact, target))
        shard = VocabShard(start, lambda t: t.copy_(maximum), lambda t, s=sums: t.copy_(next(s)))
        loss = cross_entropy(part, labels, shard=shard)
        torch.testing.assert_close(loss, whole)
        (got,) = torch.autograd.grad(loss.sum(), part)
        torch.testing.assert_close(got, want[:, start : start + part.shape[1]])


def test_bad_labels():
    with pytest.raises(ValueError, match="labels must be"):
        cross_entropy(torch.randn(2, 3, 4), torch.zeros(3, 2, dtype=torch.long))
