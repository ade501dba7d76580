# SPDX-License-Identifier: Apache-2.0
"""Recomputation computes a micro-batch with its own number, so with the same codes and dither."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from fused_ops.recipe import get_recipe
from models import micro_batch, parallel_linear
from models.parallel_linear import GemmModule
from models.precision import PrecisionState
from tests.models import toy

RECOMPUTE = {
    "none": {},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective": {
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp", "moe", "core_attn"],
    },
    "up_projection": {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
}


def _state():
    state = PrecisionState(seed=5)
    state.set_step(3)
    return state


def _prepare(recompute, pattern="M-*E"):
    (chunk,), _ = toy.make(pattern, **RECOMPUTE[recompute])
    base = get_recipe("nvfp4")
    signs = {
        name: replace(getattr(base, name), signs="micro_batch") for name in ("wgrad_dy", "wgrad_x")
    }
    state = _state()
    for name, module in chunk.named_modules():
        if isinstance(module, GemmModule):
            module.recipe, module.gemm_name = replace(base, name="test", **signs), name
            module.precision_state = state
    return chunk, state


@cache
def _run(recompute, pattern="M-*E"):
    """Two micro-batches in flight: forward 0, forward 1, backward 0, backward 1."""
    torch.manual_seed(0)
    chunk, state = _prepare(recompute, pattern)
    losses = []
    for number in (4, 9):
        state.micro_batch = number
        losses.append(toy.loss_of(chunk, number).mean())
    state.micro_batch = 77  # what the loop says now is not what is recomputed
    gradients = []
    for loss in losses:
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in chunk.named_parameters()})
    return [float(loss) for loss in losses], gradients


@pytest.mark.parametrize(
    ("recompute", "pattern"),
    [
        ("full", "M-*E"),
        ("selective", "M-*E"),
        # megatron-core compiles an extension for it: half a minute on a fresh machine.
        pytest.param("up_projection", "+", marks=pytest.mark.slow),
    ],
)
def test_same_bits_as_without(recompute, pattern):
    losses, gradients = _run("none", pattern)
    again, recomputed = _run(recompute, pattern)
    assert losses == again
    for before, after in zip(gradients, recomputed):
        different = [name for name in before if not torch.equal(before[name], after[name])]
        assert not different


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_layers_see_the_number_of_their_forward(recompute, monkeypatch):
    chunk, state = _prepare(recompute)
    seen = []

    def record(x, weight, bias=None, *, call):
        seen.append((call.name, call.key.micro_batch))
        return linear(x, weight, bias, call=call)

    linear = parallel_linear.linear
    monkeypatch.setattr(parallel_linear, "linear", record)
    losses = []
    for number in (4, 9):
        state.micro_batch = number
        losses.append(toy.loss_of(chunk, number).mean())
    assert {number for _, number in seen} == {4, 9}
    for loss, number in zip(losses, (4, 9)):
        seen.clear()
        loss.backward()
        assert seen, "nothing was recomputed"
        assert {n for _, n in seen} == {number}
    assert micro_batch.current() == 9  # the state from before the backward passes is back


def test_the_number_decides_the_dither():
    chunk, state = _prepare("none")
    gradients = []
    for number in (1, 2, 1):
        state.micro_batch = number
        chunk.zero_grad()
        toy.loss_of(chunk, 0).mean().backward()
        gradients.append(chunk.decoder.layers[1].mlp.linear_fc1.weight.grad.clone())
    assert not torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


def test_unknown_micro_batch_is_zero():
    toy.init_groups()
    assert micro_batch.current() == 0
    micro_batch.remember(11)
    assert micro_batch.current() == 11
