# SPDX-License-Identifier: Apache-2.0
"""The damage of a precision, on real batches: loss and gradients beside those of 16-bit GEMMs.

    loss change       of the same samples, paired: mean and standard error over samples
    gradient error    |g - g0| / |g0| of all weights together
    gradient bias     <g - g0, g0> / <g0, g0>: what the error does along the gradient itself

Nothing is updated: forward and backward run with other recipes, and the plan's come back. Delayed
scales (fp8_delayed) are the checkpoint's throughout.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fused_ops.keys import GEMMS, OPERANDS
from fused_ops.recipe import RECIPES, GemmRecipe, is_quantized
from pretrain.engine import Engine
from pretrain.initialize import seed_everything
from pretrain.inspect_step import forward_step_by_sample
from pretrain.train_step import MicroBatch, run_schedule

Recipes = Mapping[str, GemmRecipe]


@dataclass(frozen=True)
class Measured:
    """Loss of every sample, and the gradients, under one set of recipes."""

    losses: Mapping[int, float]
    """By sample, the mean over its counted tokens; samples without any (padding) have none."""
    gradients: Sequence[torch.Tensor]
    """fp32 buffers of this process."""

    @property
    def loss(self) -> float:
        """Mean over samples."""
        return statistics.fmean(self.losses.values())


@dataclass(frozen=True)
class Damage:
    """What some recipes do, against 16-bit GEMMs."""

    loss_change: float
    """Mean over samples, in nats a token."""
    loss_error: float
    """Standard error of it."""
    gradient_error: float
    gradient_bias: float


def measure(engine: Engine, micro_batches: Sequence[MicroBatch], recipes: Recipes) -> Measured:
    """Forward and backward of some micro-batches with these recipes; others in 16 bits."""
    rows: list[tuple[int, float, float]] = []
    seed_everything(engine.precision_state.seed)  # dropout, where there is some, drops the same
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    with engine.plan.scales_kept(), engine.plan.instead(recipes):
        forward = partial(forward_step_by_sample, rows)
        run_schedule(engine, micro_batches, forward_only=False, forward=forward)
    gradients = [
        buffer.grad_data.detach().clone()
        for chunk in engine.chunks
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
    ]
    losses = {sample: loss / count for sample, loss, count in rows if count}
    engine.precision_state.nonfinite.zero_()
    return Measured(losses, gradients)


def begin_scales(engine: Engine, micro_batches: Sequence[MicroBatch]) -> None:
    """Gives operands of fp8_delayed that the checkpoint has no amax of the amax of these
    micro-batches, as a run has one after its first step. All other scales stay."""
    plan = engine.plan
    specs = [r.spec(*name.split(".")) for r in set(plan.recipes().values()) for name in OPERANDS]
    if any(spec.format == "fp8_delayed" for spec in specs):
        with plan.scales_kept(begin=True):
            run_schedule(engine, micro_batches, forward_only=False)


def damage(found: Measured, exact: Measured) -> Damage:
    """Of `found` against what 16-bit GEMMs gave for the same micro-batches."""
    mean, error = paired(found, exact)
    square = cross = norm = 0.0
    for own, other in zip(found.gradients, exact.gradients):
        difference = own - other
        square += float(difference.double().square().sum())
        cross += float((difference.double() * other.double()).sum())
        norm += float(other.double().square().sum())
    return Damage(
        mean, error, math.sqrt(square / norm) if norm else 0.0, cross / norm if norm else 0.0
    )


def paired(first: Measured, second: Measured) -> tuple[float, float]:
    """Mean and standard error over samples of the difference of their losses."""
    found = [first.losses[s] - second.losses[s] for s in first.losses.keys() & second.losses.keys()]
    if len(found) < 2:
        return (found[0] if found else 0.0), math.inf
    return statistics.fmean(found), statistics.stdev(found) / math.sqrt(len(found))


def quantized_modules(engine: Engine) -> list[str]:
    """The linear layers in which the plan quantizes something, in the model's order."""
    recipes = engine.plan.recipes()
    return [
        module.name
        for module in engine.plan.modules
        if any(is_quantized(spec) for gemm in GEMMS for spec in recipes[module.name].specs(gemm))
    ]


def each_alone(
    engine: Engine, micro_batches: Sequence[MicroBatch], exact: Measured, *, gemms: bool
) -> Iterable[tuple[str, str, Damage]]:
    """(module, "all" or a GEMM, damage), with that one quantized and everything else in 16 bits."""
    recipes = engine.plan.recipes()
    for name in quantized_modules(engine):
        recipe = recipes[name]
        yield name, "all", damage(measure(engine, micro_batches, {name: recipe}), exact)
        for gemm in GEMMS if gemms else ():
            if any(is_quantized(spec) for spec in recipe.specs(gemm)):
                alone = RECIPES["bf16"].with_gemm(gemm, recipe)
                yield name, gemm, damage(measure(engine, micro_batches, {name: alone}), exact)
