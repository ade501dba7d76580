# SPDX-License-Identifier: Apache-2.0
"""Each kind of layer against the same model written down plainly: losses and all gradients."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from models import prediction
from models.attention import zigzag_order, zigzag_positions
from tests.fused_ops.test_mamba2_scan import recurrence
from tests.models import toy


def _norm(x, weight):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def _rotate(x):
    """Rotary embedding of [b, s, heads, d], halves rotated, base 10000."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half) / half)
    angle = (torch.arange(x.shape[1])[:, None] * frequency)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def _attention(x, p, config):
    x = _norm(x, p["input_layernorm.weight"])
    groups, dim = config.num_query_groups, config.kv_channels
    each = config.num_attention_heads // groups
    mixed = (x @ p["self_attention.linear_qkv.weight"].T).unflatten(-1, (groups, each + 2, dim))
    q, k, v = mixed[..., :each, :], mixed[..., each, :], mixed[..., each + 1, :]
    q = _rotate(_norm(q.flatten(2, 3), p["self_attention.q_layernorm.weight"]))
    k = _rotate(_norm(k, p["self_attention.k_layernorm.weight"]))
    k, v = (t.repeat_interleave(each, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / dim**0.5
    future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)
    return out @ p["self_attention.linear_proj.weight"].T


def _swiglu(x, first, second):
    gate, up = (x @ first.T).chunk(2, -1)
    return (F.silu(gate) * up) @ second.T


def _mlp(x, p, config):
    x = _norm(x, p["pre_mlp_layernorm.weight"])
    return _swiglu(x, p["mlp.linear_fc1.weight"], p["mlp.linear_fc2.weight"])


def _experts(x, p, config):
    x = _norm(x, p["pre_mlp_layernorm.weight"])
    scores, chosen = (x @ p["mlp.router.weight"].T).topk(config.moe_router_topk, -1)
    share, out = scores.softmax(-1), torch.zeros_like(x)
    for expert in range(config.num_moe_experts):
        weight = (share * (chosen == expert)).sum(-1, keepdim=True)
        first, second = (p[f"mlp.experts.linear_fc{i}.weight"][expert] for i in (1, 2))
        out = out + weight * _swiglu(x, first, second)
    return out


def _mamba(x, p, config):
    x = _norm(x, p["norm.weight"])
    heads, dim = config.mamba_num_heads, config.mamba_head_dim
    inner, wide = heads * dim, config.mamba_num_groups * config.mamba_state_dim
    z, xBC, dt = (x @ p["mixer.in_proj.weight"].T).split([inner, inner + 2 * wide, heads], -1)
    xBC = F.pad(xBC.transpose(1, 2), (3, 0))
    xBC = F.conv1d(xBC, p["mixer.conv1d_weight"], p["mixer.conv1d_bias"], groups=inner + 2 * wide)
    u, B, C = F.silu(xBC).transpose(1, 2).split([inner, wide, wide], -1)
    B, C = (t.unflatten(-1, (config.mamba_num_groups, -1)) for t in (B, C))
    dt, A = F.softplus(dt + p["mixer.dt_bias"]), -p["mixer.A_log"].exp()
    y = recurrence(u.unflatten(-1, (heads, dim)), dt, A, B, C, p["mixer.D"]).flatten(2)
    y = (y * F.silu(z)).unflatten(-1, (config.mamba_num_groups, -1))
    y = _norm(y, p["mixer.norm.weight"].unflatten(-1, (config.mamba_num_groups, -1))).flatten(2)
    return y @ p["mixer.out_proj.weight"].T


LAYERS = {"*": _attention, "-": _mlp, "E": _experts, "M": _mamba}


def _plain(parameters, pattern, config, index):
    tokens, labels = toy.batch(index)
    x = F.embedding(tokens, parameters["embedding.word_embeddings.weight"])
    for i, symbol in enumerate(pattern):
        prefix = f"decoder.layers.{i}."
        own = {n.removeprefix(prefix): p for n, p in parameters.items() if n.startswith(prefix)}
        x = x + LAYERS[symbol](x, own, config)
    x = _norm(x, parameters["decoder.final_norm.weight"])
    logits = x @ parameters["output_layer.weight"].T
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return loss.view(labels.shape)


@pytest.mark.parametrize("pattern", ["*", "-", "E", "M", "M-*E"])
def test_equals_a_plain_composition(pattern):
    fields = {"qk_layernorm": True}
    if "E" in pattern:
        fields |= {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}
    (chunk,), config = toy.make(pattern, **fields)
    with torch.no_grad():  # weights of ordinary size, so that every part matters
        for name, parameter in chunk.named_parameters():
            if "norm" in name or name.endswith("mixer.D"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "weight" in name and "conv" not in name:
                parameter.mul_(5.0)
    exact = {n: p.detach().double().requires_grad_() for n, p in chunk.named_parameters()}
    torch.set_default_dtype(torch.float64)
    try:
        expected = _plain(exact, pattern, config, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    loss = toy.loss_of(chunk)
    # FP32 sums of a few hundred terms, through up to four layers, against FP64.
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=2e-5)
    loss.mean().backward()
    gradients = torch.autograd.grad(expected.mean(), list(exact.values()))
    for (name, parameter), want in zip(chunk.named_parameters(), gradients):
        assert want.abs().max() > 0, f"{name}: no gradient to compare"
        error = (parameter.grad - want).abs().max() / want.abs().max()
        assert error < 5e-5, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("pattern", "fields"),
    [
        ("*-*-", {}),
        ("*E*E", {"moe_shared_expert_intermediate_size": 32}),
        ("M-M*E", {}),
        ("+-", {}),
        ("+E", {"moe_latent_size": 32, "q_lora_rank": None}),
        ("+-", {"qk_layernorm": True}),
        ("*-*-/*-", {}),
        ("ME*-/*E/*E", {}),
        ("*E", {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
        ("*-", {"normalization": "LayerNorm", "add_bias_linear": True}),
        ("*-", {"activation_func": "squared_relu", "gated_linear_unit": False}),
    ],
)
def test_builds_and_every_parameter_learns(pattern, fields):
    (chunk,), config = toy.make(pattern, **fields)
    loss = toy.loss_of(chunk)
    assert loss.shape == (2, toy.SEQ)
    assert abs(float(loss.mean()) - torch.tensor(200.0).log()) < 0.2  # untrained: uniform
    loss.mean().backward()
    for name, parameter in chunk.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), f"{name} has a gradient that is not finite"
    assert config.num_layers == len(pattern.split("/")[0])


def test_bf16_keeps_the_decays_of_mamba_in_fp32():
    (chunk,), _ = toy.make("M-", dtype=torch.bfloat16)
    chunk.bfloat16()
    fp32 = {n.split("mixer.")[-1] for n, p in chunk.named_parameters() if p.dtype != torch.bfloat16}
    assert fp32 == {"A_log", "D", "dt_bias"}
    loss = toy.loss_of(chunk)
    loss.mean().backward()
    assert loss.isfinite().all()


@pytest.mark.parametrize("pattern", ["M-*", "+-"])
def test_documents_do_not_see_each_other_by_one_bit(pattern):
    (chunk,), _ = toy.make(pattern)
    tokens, labels = toy.batch(0)
    cut = 13
    bounds = torch.tensor([0, cut, toy.SEQ, toy.SEQ + cut, 2 * toy.SEQ])
    mask = torch.ones(2, toy.SEQ)

    def losses(tokens, bounds):
        with torch.no_grad():
            return chunk(
                tokens, toy.positions(), None, labels=labels, loss_mask=mask, cu_seqlens=bounds
            )

    other = tokens.clone()
    other[:, :cut] = (other[:, :cut] + 7) % toy.VOCAB
    before, after = losses(tokens, bounds), losses(other, bounds)
    assert not torch.equal(before[:, :cut], after[:, :cut])
    assert torch.equal(before[:, cut:], after[:, cut:])
    open_before, open_after = losses(tokens, None), losses(other, None)
    assert not torch.equal(open_before[:, cut:], open_after[:, cut:])
    torch.testing.assert_close(before[:, :cut], open_before[:, :cut])

    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds)
    with torch.no_grad():
        assert torch.equal(toy.loss_of(chunk, packed_seq_params=packed), before)


def test_bounds_that_do_not_fit_are_refused():
    (chunk,), _ = toy.make("*-")
    with pytest.raises(ValueError, match="cu_seqlens must go from 0"):
        toy.loss_of(chunk, cu_seqlens=torch.tensor([0, 5]))


@pytest.mark.parametrize(("pattern", "depths"), [("*-/*-/*-", 2), ("M-/M", 1), ("*E/*E", 1)])
def test_predictions_stay_within_their_document(pattern, depths, monkeypatch):
    """Losses of predictions: those of each document alone, and none beyond its end."""
    (chunk,), _ = toy.make(pattern)
    tokens, labels = toy.batch(0)
    cut, found = 13, []

    class Recorder:
        @staticmethod
        def apply(states, loss):
            found.append(loss.detach())
            return states

    monkeypatch.setattr(prediction, "MTPLossAutoScaler", Recorder)

    def losses(start, end, bounds, mask=None):
        """[b, s] of each depth, without the factor that makes them a mean."""
        found.clear()
        piece = slice(start, end)
        mask = torch.ones_like(tokens[:, piece], dtype=torch.float32) if mask is None else mask
        with torch.no_grad():
            chunk(
                tokens[:, piece].contiguous(),
                toy.positions()[:, : end - start].contiguous(),
                None,
                labels=labels[:, piece].contiguous(),
                loss_mask=mask,
                cu_seqlens=bounds,
            )
        return [loss * loss.ne(0).sum() for loss in found]

    whole = losses(0, toy.SEQ, torch.tensor([0, cut, toy.SEQ, toy.SEQ + cut, 2 * toy.SEQ]))
    assert len(whole) == depths
    first, second = losses(0, cut, None), losses(cut, toy.SEQ, None)
    for depth, loss in enumerate(whole, 1):
        silent = loss.eq(0).all(0).nonzero().flatten().tolist()
        ends = [end - i for end in (cut, toy.SEQ) for i in range(depth, 0, -1)]
        assert silent == ends, "a token looks ahead as far as its document goes"
        alone = torch.cat([first[depth - 1], second[depth - 1]], 1)
        torch.testing.assert_close(loss, alone, rtol=1e-5, atol=1e-5)
    # What a document's tokens are changes no loss of another by one bit.
    for changed in (slice(0, cut), slice(cut, toy.SEQ)):
        before = tokens.clone()
        tokens[:, changed] = (tokens[:, changed] + 7) % toy.VOCAB
        after = losses(0, toy.SEQ, torch.tensor([0, cut, toy.SEQ, toy.SEQ + cut, 2 * toy.SEQ]))
        tokens.copy_(before)
        for one, other in zip(whole, after):
            differs = (one != other).any(0)
            assert differs[changed].any()
            differs[changed] = False
            assert not differs.any()


def test_tied_embeddings_share_one_weight_and_its_gradient():
    (chunk,), _config = toy.make("*-", model={"tie_embeddings": True})
    assert "output_layer.weight" not in dict(chunk.named_parameters())
    weight = chunk.embedding.word_embeddings.weight
    toy.loss_of(chunk).mean().backward()
    once = weight.grad.clone()
    assert once.abs().sum(1).min() > 0  # the output layer reaches every row, also unseen tokens


def test_attention_dropout_draws_from_the_tracker():
    (chunk,), _ = toy.make("*", attention_dropout=0.5)
    first, second = toy.loss_of(chunk), toy.loss_of(chunk)
    assert not torch.equal(first, second)
    chunk.eval()
    assert torch.equal(toy.loss_of(chunk), toy.loss_of(chunk))


def test_sliding_window():
    (chunk,), _ = toy.make("*", window_size=[4, 0])
    tokens, labels = toy.batch(0)
    other = tokens.clone()
    other[:, 3] = (other[:, 3] + 7) % toy.VOCAB
    mask = torch.ones(2, toy.SEQ)
    with torch.no_grad():
        a, b = (
            chunk(t, toy.positions(), None, labels=labels, loss_mask=mask) for t in (tokens, other)
        )
    assert (a[:, 3:8] != b[:, 3:8]).all()
    assert torch.equal(a[:, 8:], b[:, 8:])


def test_zigzag():
    """Gathered pieces in zigzag_order give the positions of the whole sequence in order."""
    for ranks in (1, 2, 3, 4):
        length = 8 * ranks
        held = [
            zigzag_positions(length // ranks, ranks, rank, torch.device("cpu"))
            for rank in range(ranks)
        ]
        pieces = torch.cat(held).chunk(2 * ranks)
        whole = torch.cat([pieces[i] for i in zigzag_order(ranks)])
        assert torch.equal(whole, torch.arange(length))
