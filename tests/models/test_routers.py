# SPDX-License-Identifier: Apache-2.0
"""Kinds of routers and what goes wrong in experts: groups, bias, losses, capacity, no tokens."""

import math

import pytest
import torch

from fused_ops.recipe import get_recipe
from tests.models import toy

SIGMOID = {"moe_router_score_function": "sigmoid", "moe_aux_loss_coeff": 0.0}
PLAIN = {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}


def layer_of(pattern="E", **fields):
    (chunk,), config = toy.make(pattern, **(PLAIN | fields))
    return chunk, chunk.decoder.layers[-1].mlp, config


def route(layer, x):
    """(probabilities, map) of x [tokens, hidden], both [tokens, experts]."""
    probs, chosen = layer.router(x.unsqueeze(1))
    return probs, chosen


def test_experts_are_chosen_within_groups():
    fields = SIGMOID | {
        "num_moe_experts": 8,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk": 4,
    }
    _, layer, _ = layer_of(**fields)
    x = torch.randn(64, 64)
    probs, chosen = route(layer, x)
    groups = chosen.view(64, 4, 2)
    assert (chosen.sum(1) == 4).all()
    assert (groups.any(-1).sum(1) == 2).all()
    scores = torch.sigmoid(x @ layer.router.weight.t()).view(64, 4, 2)
    best = scores.sum(-1).topk(2, 1).indices  # the score of a group is the sum of its best two
    assert torch.equal(groups.any(-1), torch.zeros(64, 4).scatter(1, best, 1.0).bool())
    expected = scores.flatten(1) * chosen
    torch.testing.assert_close(probs, expected / expected.sum(1, keepdim=True))


def test_the_bias_moves_the_choice_and_not_the_weights():
    _, layer, _ = layer_of(**SIGMOID, moe_router_enable_expert_bias=True)
    x = torch.randn(64, 64)
    layer.router.expert_bias.copy_(torch.tensor([5.0, 0.0, 0.0, -5.0]))
    probs, chosen = route(layer, x)
    assert chosen[:, 0].all()
    assert not chosen[:, 3].any()
    scores = torch.sigmoid(x @ layer.router.weight.t()) * chosen
    torch.testing.assert_close(probs, scores / scores.sum(1, keepdim=True))


def test_the_bias_counts_in_fp32_and_moves_by_its_rate():
    """40 840 tokens are more than BF16 can count one by one."""
    fields = SIGMOID | {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.25}
    chunk, layer, config = layer_of(**fields)
    chunk.bfloat16()
    counts = layer.router.local_tokens_per_expert
    assert counts.dtype is torch.float32
    counts.fill_(40_840.0)
    assert float((counts + 1)[0]) == 40_841.0
    counts.zero_()
    chunk.float()
    toy.step([chunk], config)
    moved = layer.router.expert_bias
    assert moved.dtype is torch.float32
    # up where fewer tokens came than the mean, down where more did, by the rate
    assert set(moved.abs().tolist()) <= {0.0, 0.25}
    assert moved.abs().max() == 0.25


@pytest.mark.parametrize(
    "recompute",
    [
        {},
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
    ids=["plain", "full", "selective"],
)
def test_the_bias_counts_a_token_of_training_once_and_none_of_an_evaluation(recompute):
    """Batches of training have no padding; those of an evaluation may, and move no bias."""
    fields = SIGMOID | {"moe_router_enable_expert_bias": True}
    chunk, layer, _ = layer_of(**fields, **recompute)
    counts = layer.router.local_tokens_per_expert
    chosen = []
    hook = layer.router.register_forward_hook(lambda *seen: chosen.append(seen[2][1].sum(0)))
    with torch.no_grad():
        toy.loss_of(chunk)
    hook.remove()
    assert counts.tolist() == [0.0] * 4
    toy.loss_of(chunk).mean().backward()
    assert counts.tolist() == chosen[0].tolist()
    assert counts.sum() == 2 * toy.SEQ * 2


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "z_loss"])
def test_auxiliary_losses_reach_the_router_in_proportion(kind):
    gradients = {}
    for factor in (0.0, 1.0, 2.0):
        if kind == "z_loss":
            fields = {"moe_z_loss_coeff": 0.1 * factor}
        else:
            fields = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1 * factor}
        chunk, layer, _ = layer_of(**fields)
        toy.loss_of(chunk).mean().backward()
        gradients[factor] = layer.router.weight.grad.clone()
    once, twice = gradients[1.0] - gradients[0.0], gradients[2.0] - gradients[0.0]
    assert once.abs().max() > 1e-4
    torch.testing.assert_close(twice, 2 * once, rtol=1e-3, atol=1e-6)


def test_z_loss_is_the_mean_square_of_the_log_sum():
    chunk, layer, _ = layer_of(moe_z_loss_coeff=0.5)
    x = torch.randn(32, 1, 64)
    probs, _ = layer.router(x)
    (got,) = torch.autograd.grad(probs.sum() * 0, layer.router.weight)
    weight = layer.router.weight.detach().clone().requires_grad_()
    value = 0.5 * torch.logsumexp(x[:, 0] @ weight.t(), -1).square().mean()
    value.backward()
    torch.testing.assert_close(got, weight.grad, rtol=1e-4, atol=1e-6)
    assert chunk is not None


@pytest.mark.parametrize("pad", [False, True])
def test_no_expert_takes_more_than_its_capacity(pad):
    fields = {"moe_expert_capacity_factor": 0.75, "moe_pad_expert_input_to_capacity": pad}
    chunk, layer, _ = layer_of(**fields)
    seen = []
    layer.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1].tolist()))
    toy.loss_of(chunk).mean().backward()
    tokens = 2 * toy.SEQ
    capacity = math.ceil(tokens * 2 / 4 * 0.75)
    (counts,) = seen
    assert max(counts) <= capacity
    assert sum(counts) < tokens * 2
    if pad:
        assert counts == [capacity] * 4
    assert all(p.grad.isfinite().all() for p in chunk.parameters())


def test_a_bias_with_softmax_scores_is_refused_with_both_ways_out():
    from fused_ops.errors import ConfigError

    with pytest.raises(ConfigError, match=r"moe_router_enable_expert_bias needs .* sigmoid"):
        toy.make("E", moe_router_enable_expert_bias=True)


def test_a_dispatcher_whose_library_is_absent_is_refused():
    from fused_ops.errors import ConfigError

    with pytest.raises(ConfigError, match="flex needs the package deep_ep"):
        toy.make("E", moe_token_dispatcher_type="flex")


@pytest.mark.parametrize(
    "recipe", ["bf16", "nvfp4", "nvfp4_fast", "mxfp8", "fp8_blockwise", "nvfp4_v2"]
)
@pytest.mark.parametrize("counts", [(0, 1, 44, 33), (0, 0, 78, 0), (78, 0, 0, 0)], ids=str)
def test_ragged_tokens_in_poisoned_memory(recipe, counts, monkeypatch):
    """No garbage in any row, and none in the gradient of an expert without tokens."""
    (chunk,), _ = toy.make("E")
    experts = chunk.decoder.layers[0].mlp.experts
    for module in (experts.linear_fc1, experts.linear_fc2):
        module.recipe = get_recipe(recipe)

    def poisoned(make):
        def call(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
    x = torch.randn(sum(counts), 64, requires_grad=True)
    y, _ = experts(x, torch.tensor(counts), torch.ones(sum(counts)))
    y.square().mean().backward()
    assert y.isfinite().all()
    assert x.grad.isfinite().all()
    for module in (experts.linear_fc1, experts.linear_fc2):
        assert module.weight.grad.isfinite().all()
        for gradient, count in zip(module.weight.grad, counts):
            assert bool(gradient.any()) == (count > 0)


def test_prediction_is_averaged_over_micro_batches():
    """The gradient of the same samples in one micro-batch or in four."""
    gradients = []
    for count in (4, 1):
        chunks, config = toy.make("*-/*-")
        samples = [toy.batch(i) for i in range(toy.MICRO_BATCHES)]
        if count == 1:
            samples = [tuple(torch.cat(parts) for parts in zip(*samples))]
        gradients.append(_gradients(chunks, config, samples))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)


def _gradients(chunks, config, samples):
    before = toy.batch, toy.MICRO_BATCHES, toy.positions
    size = len(samples[0][0])
    toy.batch = lambda index, size=None: samples[index]
    toy.MICRO_BATCHES = len(samples)
    place = before[2](size)
    toy.positions = lambda *_: place
    try:
        toy.step(chunks, config)
    finally:
        toy.batch, toy.MICRO_BATCHES, toy.positions = before
    return {n: p.main_grad.clone() for n, p in chunks[0].named_parameters()}


def test_the_epsilon_of_norms_reaches_mamba_layers():
    losses = []
    for epsilon in (1e-5, 1e-1):
        (chunk,), _ = toy.make("M", layernorm_epsilon=epsilon)
        assert chunk.decoder.layers[0].norm.eps == epsilon
        with torch.no_grad():
            chunk.decoder.layers[0].norm.weight.fill_(1.0)
            losses.append(toy.loss_of(chunk))
    assert not torch.equal(*losses)
