# SPDX-License-Identifier: Apache-2.0
"""In which runs weights that oscillate cannot be reset, or never would be."""

from collections.abc import Iterator, Mapping

from fused_ops.recipe import GemmRecipe, is_quantized
from fused_ops.weight_operands import follows_weight
from models.precision_plan import PrecisionPlan
from pretrain.oscillation_config import OscillationReset
from pretrain.pretrain_config import PretrainConfig

_RULE = "optimizer.oscillation_reset"
Recipes = Mapping[str, GemmRecipe]


def oscillation_problems(config: PretrainConfig, plan: PrecisionPlan) -> list[str]:
    """Why the resets of this run cannot work: each with what to change.

    Args:
        config: without other problems.
        plan: of its precision; it is moved on to the end of the run.
    """
    reset = config.optimizer.oscillation_reset
    if reset is None:
        return []
    found = []
    if config.optimizer.name != "adamw":
        found.append(
            f"{_RULE} needs the FP32 masters of optimizer.name=adamw; got {config.optimizer.name}; "
            f"set it to adamw, or {_RULE} to null"
        )
    if config.precision.backend != "fused_ops":
        found.append(
            f"{_RULE} quantizes weights as precision.backend=fused_ops does; got "
            f"{config.precision.backend}; set it to fused_ops, or {_RULE} to null"
        )
    windows = list(_windows(config, reset, plan))
    unfit = {
        recipe.fprop_w.label: name
        for recipes in windows
        for window in recipes
        for name, recipe in window.items()
        if is_quantized(recipe.fprop_w) and not follows_weight(recipe.fprop_w)
    }
    found += [
        f"{_RULE} needs codes that follow from the weight of the moment: fprop.w may be neither "
        f"dithered nor rotated nor fp8_delayed; {name} has {label!r}; change its recipe, or set "
        f"{_RULE} to null"
        for label, name in unfit.items()
    ]
    if not found and not any(_acts(*recipes) for recipes in windows):
        found.append(
            f"{_RULE} resets weights that the forward multiplies as codes, and in none of its "
            f"windows (from={reset.from_} on) any layer does; begin before precision.schedule "
            f"raises them all, quantize fprop.w of some layers, or set {_RULE} to null"
        )
    return found


def _windows(
    config: PretrainConfig, reset: OscillationReset, plan: PrecisionPlan
) -> Iterator[tuple[Recipes, Recipes]]:
    """The recipes of all layers at the first and last step of each window; equal ones once."""
    steps, sizes, last = config.train.steps, config.train.batch_sizes, None
    for begin in range(reset.begin(steps), steps - reset.window, reset.interval):
        both = []
        for step in (begin, begin + reset.window):
            plan.update(sizes.consumed_after(step))
            both.append((plan.active_steps, plan.recipes()))
        stages = tuple(stage for stage, _ in both)
        if stages != last:
            yield both[0][1], both[1][1]
        last = stages


def _acts(first: Recipes, last: Recipes) -> bool:
    """Whether the codes of some weight are of one kind all through a window."""
    kept = (first[name].fprop_w for name in first if first[name].fprop_w == last[name].fprop_w)
    return any(follows_weight(spec) for spec in kept)
