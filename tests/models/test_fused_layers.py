# SPDX-License-Identifier: Apache-2.0
"""Fused ops in layers: where they are used, and that layers compute what megatron-core's do."""

import pytest
import torch
from megatron.core.transformer import attention, mlp as upstream
from megatron.core.transformer.moe import experts

from fused_ops.activation import squared_relu, swiglu
from fused_ops.errors import ConfigError
from models import attention as own_attention
from models.experts import GroupedMLP
from models.mlp import MLP, SharedExpertMLP, fused_activation
from models.norm import Norm, ResidualNorm
from tests.fused_ops import kernels
from tests.models import toy


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, swiglu),
        ({"activation_func": "squared_relu", "gated_linear_unit": False}, squared_relu),
        ({"activation_func_clamp_value": 7.0}, None),
        ({"activation_func": "gelu"}, None),
        ({"activation_func": "squared_relu"}, None),
        ({"bias_activation_fusion": True}, None),
    ],
)
def test_which_activation_is_fused(fields, wanted):
    _, config = toy.make("-", **fields)
    assert fused_activation(config) is wanted


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_mlp_is_upstreams(gated, scaled):
    """With biases, or a factor for each token (upstream's forward fails with both)."""
    fields = {} if gated else {"activation_func": "squared_relu", "gated_linear_unit": False}
    (chunk,), config = toy.make("-", add_bias_linear=not scaled, **fields)
    layer = chunk.decoder.layers[0].mlp
    assert type(layer) is MLP
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8)
    x, scale = torch.randn(5, 2, config.hidden_size), torch.rand(5, 2) if scaled else None
    got = kernels.run(lambda x, s: layer(x, s)[0], (x, scale))
    want = kernels.run(lambda x, s: upstream.MLP.forward(layer, x, s)[0], (x, scale))
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert layer(x)[1] is layer.linear_fc2.bias


def test_a_bias_gets_the_factor_too():
    (chunk,), config = toy.make("-", add_bias_linear=True)
    layer = chunk.decoder.layers[0].mlp
    with torch.no_grad():
        layer.linear_fc2.bias.normal_()
    x, scale = torch.randn(3, 1, config.hidden_size), torch.rand(3, 1)
    out, none = layer(x, scale)
    assert none is None
    plain, bias = layer(x)
    torch.testing.assert_close(out, (plain + bias) * scale[..., None])


def test_experts_are_upstreams():
    (chunk,), config = toy.make("E", moe_shared_expert_intermediate_size=32)
    layer = chunk.decoder.layers[0].mlp
    assert type(layer.shared_experts) is SharedExpertMLP
    assert type(layer.experts) is GroupedMLP
    x, share = torch.randn(12, config.hidden_size), torch.rand(12)
    counts = torch.zeros(config.num_moe_experts, dtype=torch.long)
    counts[0], counts[-1] = 5, 7
    forward = experts.TEGroupedMLP.forward
    got = kernels.run(lambda x, s: layer.experts(x, counts, s)[0], (x, share))
    want = kernels.run(lambda x, s: forward(layer.experts, x, counts, s)[0], (x, share))
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_norm_hands_the_residual_on():
    (chunk,), config = toy.make("*-E", qk_layernorm=True)
    heads = [layer.input_layernorm for layer in chunk.decoder.layers[:1]]
    heads += [layer.pre_mlp_layernorm for layer in chunk.decoder.layers[1:]]
    assert all(type(norm) is ResidualNorm for norm in heads)
    x = torch.randn(3, config.hidden_size)
    y, same = heads[0](x)
    assert same is x
    assert torch.equal(y, Norm.forward(heads[0], x))
    (chunk,), _ = toy.make("*-", normalization="LayerNorm")
    assert isinstance(chunk.decoder.layers[0].input_layernorm(x), torch.Tensor)
    toy.loss_of(chunk).mean().backward()
    recomputed = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    with pytest.raises(ConfigError, match="layernorm cannot be recomputed"):
        toy.make("*-", **recomputed)


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({}, {}),
        ({"qk_layernorm": True}, {"rotary_percent": 0.5}),
        ({"rotary_interleaved": True}, {}),
        ({"attention_output_gate": True}, {}),
        ({"no_rope_freq": [1]}, {}),
        ({}, {"position_embedding": "none"}),
    ],
)
def test_self_attention_is_upstreams(fields, model, monkeypatch):
    """Bit for bit in fp32, also where the fused op is not used."""
    (chunk,), config = toy.make("*", model=model, **fields)
    layer = chunk.decoder.layers[0].self_attention
    assert type(layer) is own_attention.SelfAttention
    rotated = []
    for name in ("rope", "split_rope"):
        op = getattr(own_attention, name)
        monkeypatch.setattr(
            own_attention,
            name,
            lambda x, a, *r, op=op: rotated.append(a is not None) or op(x, a, *r),
        )
    angles = None
    if model.get("position_embedding") != "none":
        angles = chunk.rotary_pos_emb(6)
        assert angles.shape == (6, 1, 1, int(config.kv_channels * model.get("rotary_percent", 1)))
    x = torch.randn(6, 2, config.hidden_size)

    def run(forward):
        out, gradients = kernels.run(
            lambda x: forward(layer, x, attention_mask=None, rotary_pos_emb=angles)[0], (x,)
        )
        return [*out, *gradients]

    got = run(type(layer).forward)
    fused = angles is not None and not {"rotary_interleaved", "no_rope_freq"} & set(fields)
    assert any(rotated) is fused
    rotated.clear()
    want = run(attention.SelfAttention.forward)
    assert not any(rotated), "upstream's own path was to be compared"
    for a, b in zip(got, want):
        assert torch.equal(a, b)
    if fused:
        plain = attention.SelfAttention.forward(layer, x, attention_mask=None)[0]
        assert not torch.equal(got[0], plain)
