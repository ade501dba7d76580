# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from fused_ops.grouped_linear import grouped_linear
from fused_ops.keys import StreamKey
from fused_ops.linear import LinearCall, LocalComm, linear
from fused_ops.main_grad import beta_of, mark_zeroed
from fused_ops.recipe import RECIPES
from fused_ops.weight_codes import WeightCodes

KEY = StreamKey(seed=5, step=17, micro_batch=2, layer=99, expert=8)
COUNTS = [0, 1, 44, 33, 0, 16]
NAMES = ["bf16", "nvfp4", "nvfp4_requant_4over6", "nvfp4_v2", "nvfp4_fast", "mxfp8",
         "nvfp4_fwd_mxfp8_bwd", "fp8_tensorwise", "fp8_delayed", "mxfp4_hadamard"]  # fmt: skip


def data(counts=COUNTS, dtype=torch.float32, width=48, out=40):
    """Experts of very different magnitude: an amax of the wrong one is off by powers of ten."""
    size = 10.0 ** torch.arange(len(counts)).sub(2).float()
    rows = torch.cat([s.expand(n) for s, n in zip(size, counts)]).unsqueeze(1)
    x = (torch.randn(sum(counts), width) * rows).to(dtype)
    w = (torch.randn(len(counts), out, width) * 0.1 / size.view(-1, 1, 1)).to(dtype)
    return x, w, (torch.randn(sum(counts), out) * rows).to(dtype)


def run(call, x, w, dy, counts=COUNTS):
    x, w = x.clone().requires_grad_(), torch.nn.Parameter(w.clone())
    y = grouped_linear(x, w, counts, call=call)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


def one_by_one(call, x, w, dy, counts=COUNTS):
    """Each expert through `linear`, under its own number."""
    outputs = []
    for e, (a, g) in enumerate(zip(x.split(counts), dy.split(counts))):
        a, own = a.clone().requires_grad_(), torch.nn.Parameter(w[e].clone())
        y = linear(a, own, call=replace(call, key=call.key.with_expert(e), delayed={}))
        y.backward(g)
        outputs.append((y.detach(), a.grad, own.grad))
    y, dx, dw = zip(*outputs)
    return torch.cat(y), torch.cat(dx), torch.stack(dw)


@pytest.fixture
def poisoned(monkeypatch):
    """New memory holds NaN instead of what happens to be there."""

    def poison(make):
        def poisoned_make(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out.fill_(77)

        return poisoned_make

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_linear_layers_of_their_own(name, poisoned):
    """Ragged, empty and single-token experts, bit for bit, with one amax each."""
    x, w, dy = data()
    call = LinearCall(recipe=RECIPES[name], key=KEY, delayed={})
    for value, expected in zip(run(call, x, w, dy), one_by_one(call, x, w, dy)):
        assert torch.isfinite(value).all()
        assert torch.equal(value, expected)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_fast", "mxfp8"])
def test_error_of_each_expert_is_that_of_its_format(name):
    """Experts of magnitudes 1e-2 to 1e3: none is decoded with another's amax."""
    counts = [64, 64, 64, 64]
    x, w, dy = data(counts)
    call = LinearCall(recipe=RECIPES[name], key=KEY)
    quantized, exact = (
        run(call, x, w, dy, counts),
        run(LinearCall(recipe=RECIPES["fp32"]), x, w, dy, counts),
    )
    for value, expected in zip(quantized[:2], exact[:2]):
        for a, b in zip(value.split(counts), expected.split(counts)):
            assert float((a - b).norm() / b.norm()) < 0.25
    for a, b in zip(quantized[2], exact[2]):
        assert float((a - b).norm() / b.norm()) < 0.25


def test_gradient_of_an_empty_expert_is_exactly_zero(poisoned):
    x, w, dy = data(dtype=torch.bfloat16)
    for name in ("bf16", "nvfp4", "nvfp4_v2", "nvfp4_fast"):
        dw = run(LinearCall(recipe=RECIPES[name], key=KEY), x, w, dy)[2]
        assert dw.dtype == torch.bfloat16
        for e, count in enumerate(COUNTS):
            assert (float(dw[e].float().abs().max()) == 0.0) == (count == 0)


@pytest.mark.parametrize("name", ["bf16", "nvfp4_fast"])
def test_main_grad_of_experts(name, poisoned):
    x, w, dy = data(dtype=torch.bfloat16)
    weight = torch.nn.Parameter(w.clone())
    weight.main_grad, weight.grad_added_to_main_grad = torch.full(w.shape, 0.25), False
    expected = weight.main_grad.clone()
    for m in range(2):
        key = replace(KEY, micro_batch=m)
        call = LinearCall(recipe=RECIPES[name], key=key, main_grad=True)
        grouped_linear(x.clone().requires_grad_(), weight, COUNTS, call=call).backward(dy)
        assert weight.grad_added_to_main_grad is True
        assert weight.grad.shape == w.shape
        weight.grad = None
        for e, (a, g) in enumerate(zip(x.split(COUNTS), dy.split(COUNTS))):
            own = torch.nn.Parameter(w[e].clone())
            own.main_grad = expected[e]
            linear(a, own, call=replace(call, key=key.with_expert(e))).backward(g)
    assert torch.equal(weight.main_grad, expected)
    for e, count in enumerate(COUNTS):
        assert bool((weight.main_grad[e] == 0.25).all()) == (count == 0)


@pytest.mark.parametrize("name", ["bf16", "nvfp4_fast"])
def test_the_first_gradient_of_experts_is_written(name):
    """Experts without tokens in the first micro-batch, or in the second, or in both."""
    x, w, dy = data(dtype=torch.bfloat16)
    found = {}
    for marked in (False, True):
        weight = torch.nn.Parameter(w.clone())
        weight.main_grad = torch.zeros(w.shape)
        mark_zeroed([weight], marked)
        for m, counts in enumerate((COUNTS, COUNTS[::-1])):
            call = LinearCall(recipe=RECIPES[name], key=replace(KEY, micro_batch=m), main_grad=True)
            grouped_linear(x.clone().requires_grad_(), weight, counts, call=call).backward(dy)
            assert beta_of(weight) == 1
        found[marked] = weight.main_grad
    idle = [e for e, pair in enumerate(zip(COUNTS, COUNTS[::-1])) if pair == (0, 0)]
    assert [e for e, g in enumerate(found[True]) if not g.any()] == idle
    assert torch.equal(found[True], found[False])


def test_rows_beyond_the_last_expert_are_ignored(poisoned):
    """A dispatch buffer is longer than its tokens; its tail may hold anything, NaN too."""
    x, w, dy = data()
    tail = torch.full((7, x.shape[1]), float("nan"))
    grad_tail = torch.full((7, dy.shape[1]), float("nan"))
    flag = torch.zeros((), dtype=torch.bool)
    for name in ("bf16", "nvfp4", "nvfp4_fast"):
        call = LinearCall(recipe=RECIPES[name], key=KEY, nonfinite=flag)
        expected = run(call, x, w, dy)
        y, dx, dw = run(call, torch.cat([x, tail]), w, torch.cat([dy, grad_tail]))
        assert torch.equal(y[:-7], expected[0])
        assert torch.equal(dx[:-7], expected[1])
        assert torch.equal(dw, expected[2])
        assert float(y[-7:].abs().max()) == 0.0
        assert float(dx[-7:].abs().max()) == 0.0
    assert not flag


def test_dither_is_keyed_with_the_expert():
    """Experts with equal tokens and weights get different stochastic gradients, equal forwards."""
    x, w, dy = torch.randn(32, 48), torch.randn(40, 48), torch.randn(32, 40)
    call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY)
    y, dx, dw = run(call, x.repeat(2, 1), w.expand(2, -1, -1), dy.repeat(2, 1), [32, 32])
    assert torch.equal(y[:32], y[32:])
    assert not torch.equal(dx[:32], dx[32:])
    assert not torch.equal(dw[0], dw[1])


def test_experts_of_one_process_and_of_two_ranks_agree():
    """Expert parallel: rank 1 holds experts 3 to 5 and starts its numbers there."""
    x, w, dy = data()
    call = LinearCall(recipe=RECIPES["nvfp4_fast"], key=KEY)
    whole = run(call, x, w, dy)
    first = sum(COUNTS[:3])
    a = run(call, x[:first], w[:3], dy[:first], COUNTS[:3])
    b = run(replace(call, key=KEY.with_expert(3)), x[first:], w[3:], dy[first:], COUNTS[3:])
    for value, *parts in zip(whole, a, b):
        assert torch.equal(value, torch.cat(parts))


class Counted(LocalComm):
    def __init__(self):
        self.seen = []

    def reduce_amax(self, name, amax):
        self.seen.append((name, tuple(amax.shape)))
        return amax


def test_amaxes_of_all_experts_are_reduced_in_one_tensor():
    x, w, dy = data()
    comm = Counted()
    run(LinearCall(recipe=RECIPES["nvfp4"], key=KEY, comm=comm), x, w, dy)
    activations = [event for event in comm.seen if not event[0].endswith(".w")]
    assert activations == [(name, (6,)) for name in ("fprop.x", "wgrad.x", "dgrad.dy", "wgrad.dy")]


def test_codes_of_experts_are_kept_apart():
    x, w, dy = data()
    weight = torch.nn.Parameter(w.clone())
    for name in ("nvfp4", "nvfp4_fast"):
        codes = WeightCodes()
        call = LinearCall(recipe=RECIPES[name], key=KEY, weight_codes=codes)
        for _ in range(2):
            leaf = x.clone().requires_grad_()
            y = grouped_linear(leaf, weight, COUNTS, call=call)
            y.backward(dy)
            expected = run(replace(call, weight_codes=None), x, weight.detach(), dy)
            assert torch.equal(y, expected[0])
            assert torch.equal(leaf.grad, expected[1])
            # An in-place edit of one expert's weight is seen.
            with torch.no_grad():
                weight[2].mul_(1.5)


def test_saved_bytes_are_codes():
    counts = [0, 1, 300, 211]
    x, w, _ = data(counts, torch.bfloat16, width=128)
    weight, total = torch.nn.Parameter(w.clone()), []

    def pack(t):
        if t.data_ptr() != weight.data_ptr():
            total.append(t.numel() * t.element_size())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY)
        grouped_linear(x.requires_grad_(), weight, counts, call=call)
    # 512 tokens of BF16; padding to 16 tokens an expert is in it.
    assert sum(total) <= 0.30 * 512 * 128 * 2


def test_tokens_per_expert_as_a_tensor():
    x, w, dy = data()
    call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY)
    a, b = run(call, x, w, dy), run(call, x, w, dy, torch.tensor(COUNTS))
    assert all(torch.equal(p, q) for p, q in zip(a, b))


def test_no_tokens_for_any_expert():
    counts = [0, 0]
    x, w, dy = torch.zeros(0, 48), torch.randn(2, 40, 48), torch.zeros(0, 40)
    y, dx, dw = run(LinearCall(recipe=RECIPES["nvfp4_v2"], key=KEY), x, w, dy, counts)
    assert (y.shape, dx.shape) == ((0, 40), (0, 48))
    assert float(dw.abs().max()) == 0.0


def test_check_finite_names_the_expert():
    x, w, dy = data()
    x[5, 0] = float("inf")
    call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY, check_finite=True, name="layers.1.mlp.fc1")
    with pytest.raises(
        FloatingPointError, match=r"layers\.1\.mlp\.fc1 expert 10: operand x of fpr"
    ):
        run(call, x, w, dy)


@pytest.mark.parametrize(
    ("x", "w", "counts", "message"),
    [
        (torch.zeros(4, 8), torch.zeros(16, 8), [4], r"weight \[experts, out, in\], got .*; stack"),
        (torch.zeros(4, 8), torch.zeros(2, 16, 8), [4], r"2 counts .* got \[4\]; count the rows"),
        (torch.zeros(4, 8), torch.zeros(2, 16, 8), [4, 1], r"at most 4 rows, got \[4, 1\]"),
        (torch.zeros(4, 8), torch.zeros(2, 16, 8), [5, -1], r"got \[5, -1\]"),
        (
            torch.zeros(4, 6),
            torch.zeros(2, 16, 8),
            [2, 2],
            r"got x \(4, 6\) and weight \(2, 16, 8\)",
        ),
    ],
)
def test_bad_input(x, w, counts, message):
    with pytest.raises(ValueError, match=message):
        grouped_linear(x, w, counts, call=LinearCall(recipe=RECIPES["nvfp4"]))
