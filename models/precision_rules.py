# SPDX-License-Identifier: Apache-2.0
"""From the `precision` section and the GEMMs of a model to one recipe a module.

Order of decision for each GEMM: the rules of the named plan, the user's rules, `precision.recipe`;
the first that matches wins. Steps of the schedule come after that, in order. Everything that cannot
be meant so is collected in `problems`.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fused_ops.errors import ConfigError
from fused_ops.recipe import (
    OPERAND_FIELDS,
    RECIPES,
    GemmRecipe,
    bits,
    is_quantized,
    recipe_from_dict,
)
from models.gemms import GemmShape
from models.plans import get_plan, match_module, nearest, select_layers
from models.precision_config import GEMMS, PHASES, PrecisionConfig, PrecisionStep

PRETRAINING = "pretraining"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule of a plan or of the user, or the selection of a schedule step."""

    source: str
    """Where it stands, for messages and the table."""
    layers: str | int
    modules: str
    gemms: tuple[str, ...]
    recipe: str
    optional: bool = False
    """May match nothing."""
    from_plan: bool = False
    pairs: bool = False
    """Widen its layers to whole (attention, MLP) pairs."""


@dataclass
class Resolution:
    """What the rules of one phase decide."""

    recipes: dict[str, GemmRecipe] = field(default_factory=dict)
    """By module name."""
    rules: dict[str, dict[str, str]] = field(default_factory=dict)
    """Which rule decided, by module name and GEMM."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class RecipeBook:
    """Built-in recipes and the user's own."""

    def __init__(self, config: PrecisionConfig) -> None:
        self.problems: list[str] = []
        self._recipes = dict(RECIPES)
        for name, operands in config.recipes.items():
            at = f"precision.recipes.{name}"
            if name in RECIPES:
                self.problems.append(f"{at} is the name of a built-in recipe; choose another name")
                continue
            try:
                self._recipes[name] = recipe_from_dict({"name": name, **operands})
            except ConfigError as error:
                self.problems += [f"{at}: {problem}" for problem in error.problems]
                # A stand-in, so that uses of the name are not reported as unknown too.
                self._recipes[name] = replace(RECIPES["bf16"], name=name)
        self._fp8_decode = config.decode == "fp8"

    def get(self, name: str, source: str, problems: list[str]) -> GemmRecipe:
        """The recipe of this name, with the run's way of decoding; else a problem, and BF16."""
        if name not in self._recipes:
            hint = nearest(name, self._recipes) or f"; there are {', '.join(self._recipes)}"
            problems.append(f"{source}: recipe {name!r} is unknown{hint}")
            return RECIPES["bf16"]
        recipe = self._recipes[name]
        return replace(recipe, decode="fp8") if self._fp8_decode else recipe


def is_paired(layers: str) -> bool:
    """Whether the pattern is a transformer: attention and MLP or experts in turn."""
    pairs = [layers[i : i + 2] for i in range(0, len(layers), 2)]
    return all(len(pair) == 2 and pair[0] in "*+" and pair[1] in "-E" for pair in pairs)


def phase_plans(config: PrecisionConfig, phase: str) -> dict[str, str | None]:
    """The named plan of each GEMM in a phase."""
    phases = config.phases
    if phase == PRETRAINING:
        backward = phases.pretraining_backward or config.plan
        forward = phases.pretraining_forward or config.plan
        return {"fprop": forward, "dgrad": backward, "wgrad": backward}
    assert phase in PHASES, f"unknown phase {phase!r}"
    return dict.fromkeys(GEMMS, getattr(phases, phase) or config.plan)


def collect_rules(
    config: PrecisionConfig, phase: str, paired: bool, problems: list[str]
) -> tuple[list[Rule], dict[str, tuple[str, str]]]:
    """The rules of a phase in order, and for each GEMM the default recipe with its source."""
    by_plan: dict[str | None, list[str]] = {}
    for gemm, name in phase_plans(config, phase).items():
        by_plan.setdefault(name, []).append(gemm)
    rules: list[Rule] = []
    defaults: dict[str, tuple[str, str]] = {}
    for name, gemms in by_plan.items():
        recipe, source = config.recipe or "bf16", "precision.recipe"
        if name is not None:
            try:
                plan = get_plan(name)
            except ConfigError as error:
                problems += [f"precision: {problem}" for problem in error.problems]
                defaults |= dict.fromkeys(gemms, (recipe, source))
                continue
            if config.recipe is None:
                recipe, source = plan.recipe, f"plan {name}"
            rules += [
                Rule(
                    source=f"plan {name}: {_describe(rule.layers, rule.modules)}",
                    layers=rule.layers,
                    modules=rule.modules,
                    gemms=tuple(gemms),
                    recipe=rule.recipe,
                    optional=rule.optional,
                    from_plan=True,
                    pairs=paired,
                )
                for rule in plan.rules
            ]
        defaults |= dict.fromkeys(gemms, (recipe, source))
    for index, rule in enumerate(config.rules):
        rules.append(
            Rule(
                source=f"precision.rules[{index}]",
                layers=rule.layers,
                modules=rule.modules,
                gemms=tuple(rule.gemms),
                recipe=rule.recipe,
            )
        )
    return rules, defaults


def _describe(layers: str | int, modules: str) -> str:
    parts = [str(layers)] * (layers != "all") + [modules] * (modules != "*")
    return " ".join(parts) or "all"


def matching(
    rule: Rule, modules: Sequence[GemmShape], num_layers: int, problems: list[str]
) -> list[GemmShape]:
    """The modules that a rule names; a problem if there are none."""
    try:
        selection = select_layers(rule.layers, num_layers, pairs=rule.pairs)
    except ValueError as error:
        problems.append(f"{rule.source}: {error}")
        return []
    if not rule.gemms:
        problems.append(f"{rule.source}: gemms must name one of {', '.join(GEMMS)}; got none")
        return []
    named = [module for module in modules if match_module(rule.modules, module.name)]
    found = [module for module in named if selection.contains(module.position)]
    if not found and not rule.optional:
        problems.append(_matches_nothing(rule, named, modules))
    return found


def _matches_nothing(rule: Rule, named: Sequence[GemmShape], modules: Sequence[GemmShape]) -> str:
    start = f"{rule.source} matches no module: layers {rule.layers!r}, modules {rule.modules!r}"
    if named:
        there = sorted({m.position for m in named if m.position is not None})
        places = ", ".join(map(str, there[:8])) + (" ..." if len(there) > 8 else "")
        where = f"layers {places}" if there else "multi-token prediction only"
        return f"{start}; such modules are in {where}: correct the layers, or remove the rule"
    generic = {re.sub(r"^(layers|mtp)\.\d+\.", "*.", module.name) for module in modules}
    ends = {name.rsplit(".", 1)[-1]: name for name in sorted(generic)}
    close = difflib.get_close_matches(rule.modules.rsplit(".", 1)[-1].strip("*"), ends, n=2)
    hint = (
        f"nearest: {', '.join(ends[end] for end in close)}"
        if close
        else (f"there are {', '.join(sorted(generic))}")
    )
    return f"{start}; {hint}; correct the glob, or remove the rule"


def resolve(
    config: PrecisionConfig,
    modules: Sequence[GemmShape],
    layers: str,
    phase: str = PRETRAINING,
) -> Resolution:
    """Decide every GEMM of a phase, without the schedule.

    Args:
        config: the precision section.
        modules: every linear layer of the model.
        layers: the pattern's symbols, one a position.
        phase: pretraining, sampler or rl_trainer.
    """
    result = Resolution()
    book = RecipeBook(config)
    # Names that mean nothing leave GEMMs undecided; what is wrong with a rule alone does not.
    unknown = list(book.problems)
    rules, defaults = collect_rules(config, phase, is_paired(layers), unknown)
    decided: dict[tuple[str, str], Rule] = {}
    for rule in rules:
        book.get(rule.recipe, rule.source, unknown)
        found = matching(rule, modules, len(layers), result.problems)
        keys = [(module.name, gemm) for module in found for gemm in rule.gemms]
        result.problems += _never_applies(
            rule, [decided[key] for key in keys if key in decided], keys
        )
        for key in keys:
            decided.setdefault(key, rule)
    default = {
        gemm: (book.get(name, source, unknown), source) for gemm, (name, source) in defaults.items()
    }
    result.problems = list(dict.fromkeys(unknown + result.problems))
    if unknown:
        return result
    for module in modules:
        chosen: dict[str, GemmRecipe] = {}
        sources: dict[str, str] = {}
        for gemm in GEMMS:
            decision = decided.get((module.name, gemm))
            if decision is None:
                chosen[gemm], sources[gemm] = default[gemm]
            else:
                chosen[gemm] = book.get(decision.recipe, decision.source, result.problems)
                sources[gemm] = decision.source
        result.recipes[module.name] = compose(chosen)
        result.rules[module.name] = sources
    result.notes += _unused_default(default, decided, modules)
    return result


def _never_applies(
    rule: Rule, overruled: Sequence[Rule], keys: Sequence[tuple[str, str]]
) -> list[str]:
    other = [first for first in overruled if first.recipe != rule.recipe]
    if rule.from_plan or not other or len(overruled) < len(keys):
        return []
    return [
        f"{rule.source} never applies: {other[0].source} comes first and decides everything it "
        "matches; put it before that rule, or remove it"
    ]


def compose(chosen: Mapping[str, GemmRecipe]) -> GemmRecipe:
    """One recipe of three: the one itself if they are the same."""
    recipe = chosen["fprop"]
    for gemm in ("dgrad", "wgrad"):
        if chosen[gemm] != chosen["fprop"]:
            recipe = recipe.with_gemm(gemm, chosen[gemm])
    return recipe


def _unused_default(
    default: Mapping[str, tuple[GemmRecipe, str]],
    decided: Mapping[tuple[str, str], Rule],
    modules: Iterable[GemmShape],
) -> list[str]:
    names = [module.name for module in modules]
    return list(
        dict.fromkeys(
            f"{source} {recipe.name} is used by no GEMM: rules decide all of them"
            for gemm, (recipe, source) in default.items()
            if any(is_quantized(getattr(recipe, operand)) for operand in OPERAND_FIELDS)
            and all((name, gemm) in decided for name in names)
        )
    )


def schedule_problems(schedule: Sequence[PrecisionStep]) -> list[str]:
    """What is wrong with the times of a schedule."""
    problems = []
    previous = None
    for index, step in enumerate(schedule):
        at = f"precision.schedule[{index}].from"
        if not 0.0 <= step.from_ <= 1.0:
            problems.append(
                f"{at} must be a fraction of the run between 0 and 1; got {step.from_:g}; "
                "write 0.82 for 82 %"
            )
        elif previous is not None and step.from_ <= previous:
            problems.append(
                f"{at} must be above the step before it ({previous:g}); got {step.from_:g}; "
                "sort the steps, or put changes of one time into one step"
            )
        previous = step.from_
    return problems


def step_rule(index: int, step: PrecisionStep) -> Rule:
    """The selection of a schedule step."""
    return Rule(
        source=f"precision.schedule[{index}]",
        layers=step.layers,
        modules=step.modules,
        gemms=tuple(step.gemms),
        recipe=step.recipe,
    )


def raise_precision(recipe: GemmRecipe, step: GemmRecipe, gemms: Sequence[str]) -> GemmRecipe:
    """A module's recipe after a schedule step.

    A weight that the forward does not quantize any more needs no square tiles in the backward:
    they were there so that both saw the same weight, and 1-D blocks have half their error (NVFP4
    paper, arXiv 2509.25149, appendix D).
    """
    for gemm in gemms:
        recipe = recipe.with_gemm(gemm, step)
    weight = recipe.dgrad_w
    if "dgrad" not in gemms and not is_quantized(recipe.fprop_w) and weight.is_fp4:
        rows, columns = weight.block or (1, 0)
        if rows > 1:
            recipe = replace(recipe, dgrad_w=replace(weight, block=(1, columns)))
    return recipe


def lowered_operands(before: GemmRecipe, after: GemmRecipe) -> list[str]:
    """Operands with fewer bits than before, as text."""
    return [
        f"{name} {getattr(before, name).format} to {getattr(after, name).format}"
        for name in OPERAND_FIELDS
        if bits(getattr(after, name)) < bits(getattr(before, name))
    ]
