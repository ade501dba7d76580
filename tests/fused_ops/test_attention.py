# SPDX-License-Identifier: Apache-2.0
"""Attention against the plain product of softmax and values; on GPUs every way against fp32."""

from functools import partial

import pytest
import torch

from fused_ops.attention import DocumentBounds, Visible, attention
from fused_ops.attention.api import ATTENTION
from tests.fused_ops import kernels


def inputs(length, batch, heads, groups, dim, device="cpu", dtype=torch.float32):
    shapes = [(length, batch, n, dim) for n in (heads, groups, groups)]
    return [torch.randn(s, device=device, dtype=dtype) for s in shapes]


def documents(batch, length, cuts, device="cpu"):
    """Documents that start at `cuts` of the flattened tokens, and at every sample."""
    starts = sorted({*cuts, *range(0, batch * length, length)})
    ends = [*starts[1:], batch * length]
    sizes = torch.tensor([b - a for a, b in zip(starts, ends)])
    ids = torch.repeat_interleave(torch.arange(len(starts)), sizes).view(batch, length)
    bounds = torch.tensor([*starts, batch * length], dtype=torch.int32)
    return DocumentBounds(ids.to(device), bounds.to(device), int(sizes.max()))


def plain(query, key, value, documents=None, window=None):
    length, _, heads, dim = query.shape
    each = heads // key.shape[2]
    key, value = (t.repeat_interleave(each, 2) for t in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) / dim**0.5
    position = torch.arange(length, device=query.device)
    gap = position[:, None] - position
    hidden = (gap < 0) | (gap > (length if window is None else window))
    if documents is not None:
        hidden = hidden | (documents.ids[:, None, :, None] != documents.ids[:, None, None, :])
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("cuts", [None, (4, 15)])
def test_reference(cuts, window):
    tensors = inputs(12, 2, 6, 2, 8)
    bounds = None if cuts is None else documents(2, 12, cuts)
    options = {"documents": bounds, "window": window}
    got = kernels.run(lambda *t: attention(*t, Visible(**options)), tensors)
    want = kernels.run(lambda *t: plain(*t, **options), [t.double() for t in tensors])
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]]):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_a_mask_in_place_of_the_causal_rule():
    query, key, value = inputs(4, 1, 2, 2, 8)
    mask = torch.eye(4, dtype=torch.bool)
    out = attention(query, key, value, Visible(mask=mask))
    torch.testing.assert_close(out, value.flatten(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(4, 1, 3, 8)}, "groups dividing 4 heads"),
        ({"value": torch.zeros(4, 2, 2, 8)}, "value must be"),
        ({"key": torch.zeros(6, 1, 2, 8), "value": torch.zeros(6, 1, 2, 8)}, "need a mask"),
        ({"visible": Visible(documents=documents(1, 5, ()))}, r"document ids must be \(1, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    names = dict(zip(("query", "key", "value"), inputs(4, 1, 4, 2, 8)))
    with pytest.raises(ValueError, match=message):
        attention(**names | change)


def test_a_mask_excludes_the_rest():
    with pytest.raises(ValueError, match="a mask says all"):
        Visible(mask=torch.ones(4, 4, dtype=torch.bool), window=2)


def choice(*args):
    return ATTENTION.choose(None, *args, dropout=0.0, scale=None).name


def test_a_cpu_takes_the_reference():
    query, key, value = inputs(4, 1, 2, 2, 8, dtype=torch.bfloat16)
    assert choice(query, key, value, Visible()) == "reference"
    assert attention(query, key, value).dtype is torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["varlen", "sdpa"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("cuts", [None, (5, 700, 701, 1030)])
def test_on_a_gpu(cuts, window, implementation):
    if implementation == "varlen" and cuts is None and window is None:
        pytest.skip("plain causal attention is not what varlen is for")
    for batch, heads, groups in ((1, 8, 2), (2, 4, 4)):
        tensors = inputs(1024, batch, heads, groups, 128, "cuda")
        cut = (
            None
            if cuts is None
            else documents(batch, 1024, [c for c in cuts if c < batch * 1024], "cuda")
        )
        options = {"documents": cut, "window": window}
        half = [t.bfloat16() for t in tensors]
        got = kernels.run(
            partial(attention, visible=Visible(**options), implementation=implementation), half
        )
        want = kernels.run(partial(plain, **options), [t.float() for t in half])
        for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]]):
            # Probabilities and their gradients are rounded to bf16 before the second product.
            error = (a.float() - b).norm() / b.norm()
            assert error < 2**-7, f"{implementation}: {error:.1e}"


@pytest.mark.gpu
def test_documents_take_the_varlen_kernel_and_plain_attention_does_not():
    query, key, value = inputs(256, 1, 8, 2, 128, "cuda", torch.bfloat16)
    assert choice(query, key, value, Visible()) == "sdpa"
    visible = Visible(documents=documents(1, 256, (100,), "cuda"))
    assert choice(query, key, value, visible) == "varlen"


@pytest.mark.gpu
def test_cudnn_is_used_for_grouped_queries_and_nothing_is_copied():
    tensors = inputs(1024, 1, 8, 2, 128, "cuda", torch.bfloat16)
    for t in tensors:
        t.requires_grad_()
    upstream = torch.randn(1024, 1, 1024, device="cuda", dtype=torch.bfloat16)
    with torch.profiler.profile() as profile:
        torch.autograd.grad(attention(*tensors), tensors, upstream)
    names = {event.name for event in profile.events()}
    assert "aten::_scaled_dot_product_cudnn_attention" in names
    assert "aten::repeat_interleave" not in names
    copies = [n for n in names if n in ("aten::copy_", "aten::contiguous", "aten::clone")]
    assert not copies, copies
