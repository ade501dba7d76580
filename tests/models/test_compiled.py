# SPDX-License-Identifier: Apache-2.0
"""A model under torch.compile trains as it does without."""

import pytest
import torch
from pydantic import TypeAdapter

from models.precision import PrecisionState, apply_precision
from models.precision_config import PrecisionConfig
from tests.models import toy


def two_steps(pattern, recipe, compile):
    """Losses and gradients (in main_grad) of two steps; only the step, and so the keys, differ."""
    chunks, _ = toy.make(pattern, dtype=torch.bfloat16)
    state = PrecisionState(seed=7)
    section = TypeAdapter(PrecisionConfig).validate_python({"recipe": recipe})
    apply_precision(chunks, section, state, total_samples=100)
    (chunk,) = chunks
    for parameter in chunk.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
        parameter.grad_added_to_main_grad = False
    run, found = compile(chunk), []
    for step in (1, 2):
        state.set_step(step)
        losses = toy.loss_of(run)
        losses.float().sum().backward()
        found.append(losses.detach())
        for parameter in chunk.parameters():
            if not parameter.grad_added_to_main_grad:
                parameter.main_grad += parameter.grad.float()
            parameter.grad, parameter.grad_added_to_main_grad = None, False
            found.append(parameter.main_grad.clone())
            parameter.main_grad.zero_()
    return found


@pytest.mark.parametrize("recipe", ["nvfp4", pytest.param("nvfp4_fast", marks=pytest.mark.slow)])
def test_a_compiled_model_trains_as_an_eager_one(recipe):
    """Attention, dense MLP, norms, output layer and loss, bit by bit, under stochastic rounding."""
    want = two_steps("*-", recipe, lambda chunk: chunk)
    torch._dynamo.reset()
    # cpu_compat turns torch.compile off for megatron-core's own uses of it.
    with torch._dynamo.config.patch(disable=False):
        got = two_steps("*-", recipe, lambda chunk: torch.compile(chunk, backend="aot_eager"))
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    assert graphs > 0, "nothing was compiled"
    half = len(want) // 2
    assert torch.equal(want[0], want[half]), "the forward pass has no dither"
    differ = sum(not torch.equal(a, b) for a, b in zip(want[:half], want[half:]))
    assert differ > half // 2, "another step is another dither"
    assert len(got) == len(want)
    for number, (a, b) in enumerate(zip(got, want)):
        assert torch.equal(a, b), f"result {number}: {float((a - b).abs().max())}"
