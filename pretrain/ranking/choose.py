# SPDX-License-Identifier: Apache-2.0
"""From damages to a plan: the layers that are worth their share of BF16, and whether that is so."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fused_ops.errors import ConfigError
from models.gemms import GemmShape
from pretrain.comparison.gaps import t95
from pretrain.engine import Engine
from pretrain.ranking.measure import Damage, Measured, Recipes, damage, measure, paired
from pretrain.train_step import MicroBatch

BY = ("both", "loss", "gradient")


def scores(damages: Mapping[str, Damage], by: str) -> dict[str, float]:
    """A layer's share of the loss changes of all, of their squared gradient errors, or the mean of
    both. A layer alone that lowers the loss of a batch counts as doing no harm to it."""
    losses = {name: max(found.loss_change, 0.0) for name, found in damages.items()}
    errors = {name: found.gradient_error**2 for name, found in damages.items()}
    parts = {"loss": [losses], "gradient": [errors], "both": [losses, errors]}[by]
    totals = [sum(part.values()) or 1.0 for part in parts]
    return {
        name: sum(part[name] / total for part, total in zip(parts, totals)) / len(parts)
        for name in damages
    }


def check_room(share: float, names: Sequence[str], modules: Sequence[GemmShape]) -> None:
    """ConfigError where not even the smallest of these layers fits into a share of all linears'
    FLOPs."""
    smallest = min(flops_of([name], modules) for name in names)
    if smallest > share * (1 + 1e-9):
        raise ConfigError(
            f"--bf16-share must leave room for a layer; got {share:g}, and the smallest has "
            f"{smallest:.3f} of the linear layers' FLOPs; raise it"
        )


def within_share(
    ranked: Mapping[str, float], modules: Sequence[GemmShape], share: float
) -> list[str]:
    """Layers to keep in BF16, up to a share of all linears' FLOPs.

    Most score for its FLOPs first, or most score first: the choice that has more score. Without the
    second, small layers could take the room of a large one that does most of the damage.

    Raises:
        ConfigError: not even the smallest of them fits, or none has a score.
    """
    flops = {module.name: module.flops for module in modules}
    harmful = [name for name, score in ranked.items() if score > 0]
    if not harmful:
        raise ConfigError(
            "layers are chosen by the damage that they do alone, and none does any on this batch; "
            "rank by gradients too (--by both), or keep all of them in the recipe"
        )
    check_room(share, harmful, modules)
    choices = [
        fitting(sorted(harmful, key=key, reverse=True), modules, share)
        for key in (lambda name: ranked[name] / flops[name], lambda name: ranked[name])
    ]
    return max(choices, key=lambda names: sum(ranked[name] for name in names))


def fitting(names: Iterable[str], modules: Sequence[GemmShape], share: float) -> list[str]:
    """Those of these layers, in their order, that fit into a share of all linears' FLOPs."""
    flops = {module.name: module.flops for module in modules}
    budget, chosen = share * sum(flops.values()) * (1 + 1e-9), []
    for name in names:
        if flops[name] <= budget:
            budget -= flops[name]
            chosen.append(name)
    return chosen


def within_gap(
    ranked: Mapping[str, float],
    damages: Mapping[str, Damage],
    modules: Sequence[GemmShape],
    whole: float,
    allowed: float,
) -> list[str]:
    """Layers to keep in BF16 until the loss change of the others is at most `allowed`.

    The changes that layers do alone are scaled so that they add up to `whole`, that of all of them
    together.
    """
    flops = {module.name: module.flops for module in modules}
    alone = {name: max(found.loss_change, 0.0) for name, found in damages.items()}
    scale = whole / (sum(alone.values()) or 1.0)
    left, chosen = whole, []
    for name in sorted(ranked, key=lambda name: ranked[name] / flops[name], reverse=True):
        if left <= allowed:
            break
        left -= scale * alone[name]
        chosen.append(name)
    return chosen


def flops_of(names: Sequence[str], modules: Sequence[GemmShape]) -> float:
    """Their share of all linear layers' FLOPs."""
    total = sum(module.flops for module in modules)
    return sum(module.flops for module in modules if module.name in set(names)) / total


def last_layers(quantized: Sequence[str], modules: Sequence[GemmShape], share: float) -> list[str]:
    """Layers from the model's end, as long as they fit into a share of all linears' FLOPs. Those of
    multi-token prediction are none, as in a rule's `last 15%`: the loss does not depend on them."""
    predicting = {module.name for module in modules if module.position is None}
    return fitting([n for n in reversed(quantized) if n not in predicting], modules, share)


@dataclass(frozen=True)
class Verdict:
    """The plan beside the same share spent on the last layers, on samples that ranked nothing."""

    plan: Damage
    last: Damage
    none: Damage
    """Without any layer in BF16."""
    difference: float
    """Loss with the plan less loss with the last layers, mean over samples."""
    half: float
    """Half of its 95 % interval."""
    samples: int

    @property
    def text(self) -> str:
        """One sentence."""
        figure = f"{self.difference:+.2e} +- {self.half:.1e} nats a token"
        gradient = (
            f"gradient error {self.plan.gradient_error:.4f} and {self.last.gradient_error:.4f}"
        )
        if self.difference + self.half < 0:
            return f"the plan beats the last layers: loss {figure}; {gradient}"
        if self.difference - self.half > 0:
            return f"the plan does NOT beat the last layers: loss {figure}; {gradient}"
        return f"the plan does not distinguishably beat the last layers: loss {figure}; {gradient}"

    def gap(self, allowed: float) -> str:
        """One sentence: whether the plan loses no more than `allowed` nats a token."""
        change, half = self.plan.loss_change, t95(max(self.samples - 1, 1)) * self.plan.loss_error
        figure = f"loss {change:+.2e} +- {half:.1e} nats a token, {allowed:.2e} allowed"
        if change + half <= allowed:
            return f"the plan keeps --max-gap: {figure}"
        if change - half > allowed:
            return f"the plan does NOT keep --max-gap: {figure}"
        return f"whether the plan keeps --max-gap cannot be told on these batches: {figure}"


def verify(
    engine: Engine,
    batches: Sequence[Sequence[MicroBatch]],
    plan: Sequence[str],
    last: Sequence[str],
) -> Verdict:
    """Loss and gradients of both choices on some batches; the gradients are of the first."""
    recipes = engine.plan.recipes()

    def without(names: Sequence[str]) -> Recipes:
        return {name: recipe for name, recipe in recipes.items() if name not in names}

    def over(chosen: Recipes) -> Measured:
        found = [measure(engine, batch, chosen) for batch in batches]
        losses = {s: loss for each in found for s, loss in each.losses.items()}
        return Measured(losses, found[0].gradients)

    exact, own, other = over({}), over(without(plan)), over(without(last))
    mean, error = paired(own, other)
    half = t95(max(len(own.losses) - 1, 1)) * error
    none = damage(over(recipes), exact)
    return Verdict(damage(own, exact), damage(other, exact), none, mean, half, len(own.losses))


def render(
    found: Mapping[tuple[str, str], Damage],
    ranked: Mapping[str, float],
    whole: Damage,
    chosen: Sequence[str],
    modules: Sequence[GemmShape],
) -> str:
    """The ranking as text: the worst layer for its FLOPs first, its GEMMs below it."""
    flops = {module.name: module.flops for module in modules}
    total = sum(flops.values())
    wide = max(map(len, ranked)) + len(" BF16")
    lines = [
        f"{'layer':{wide}} {'score':>6} {'FLOPs':>6} {'loss change':>12} {'+-':>9} "
        f"{'gradient error':>14} {'bias':>9}"
    ]

    def line(name: str, one: Damage, score: str = "", share: str = "") -> str:
        return (
            f"{name:{wide}} {score:>6} {share:>6} {one.loss_change:>+12.2e} {one.loss_error:>9.1e} "
            f"{one.gradient_error:>14.4f} {one.gradient_bias:>+9.4f}"
        )

    for name in sorted(ranked, key=lambda name: ranked[name] / flops[name], reverse=True):
        mark = " BF16" if name in chosen else ""
        share = f"{flops[name] / total:.3f}"
        lines.append(line(name + mark, found[name, "all"], f"{ranked[name]:.3f}", share))
        lines += [
            line(f"    {gemm}", one)
            for (module, gemm), one in found.items()
            if module == name and gemm != "all"
        ]
    lines.append(line("all of them", whole))
    return "\n".join(lines)
