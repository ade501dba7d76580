# SPDX-License-Identifier: Apache-2.0
"""The plan as a precision section: chosen layers in BF16 before what the run's own rules say."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from fused_ops.keys import GEMMS
from fused_ops.recipe import is_quantized
from models.pattern import parse_pattern
from models.plans import select_layers
from models.precision_plan import PrecisionPlan
from models.precision_rules import PRETRAINING, RecipeBook, Rule, collect_rules, is_paired, matching
from pretrain.config import PretrainConfig, precision_plan
from pretrain.config_file import decode, encode


def plan_section(config: PretrainConfig, chosen: Sequence[str]) -> dict[str, Any]:
    """The run's precision section, changed so far that the chosen layers are in BF16.

    Rules of a named plan come before a run's own: one that quantizes a chosen layer is written out
    as rules behind the new ones. Rules that nothing is left for are left out, and steps of the
    schedule that go to quantized recipes spare the chosen layers: they would lower them.

    Raises:
        ConfigError: the section does not load.
    """
    plan = precision_plan(config)
    section: dict[str, Any] = encode(config)["precision"]
    names = sorted(chosen, key=_place)
    spread, rules = _rules(config, plan, names)
    if spread:
        section["plan"] = None
        section["phases"] |= {"pretraining_forward": None, "pretraining_backward": None}
        section["recipe"] = rules.pop()["recipe"]
    section["rules"] = [{"modules": name, "recipe": "bf16"} for name in names] + rules
    section["schedule"] = _sparing(config, section["schedule"], names)
    section["phases"] = {phase: name for phase, name in section["phases"].items() if name}
    _check(config, plan, section, set(chosen))
    return {key: value for key, value in section.items() if value not in (None, [], {}, ())}


def _rules(
    config: PretrainConfig, plan: PrecisionPlan, names: Sequence[str]
) -> tuple[bool, list[dict[str, Any]]]:
    """Whether the named plan is written out, and the rules that come behind the new ones.

    Written out, the last one is what nothing else decides.
    """
    layers = parse_pattern(plan.shape.pattern).layers
    rules, defaults = collect_rules(config.precision, PRETRAINING, is_paired(layers), [])
    found = [
        (rule, {(m.name, gemm) for m in matching(rule, plan.modules, len(layers), [])
                for gemm in rule.gemms})
        for rule in rules
    ]  # fmt: skip
    new = {(name, gemm) for name in names for gemm in GEMMS}
    spread = any(rule.from_plan and rule.recipe != "bf16" and keys & new for rule, keys in found)
    decided, kept = set(new), []
    for rule, keys in found:
        if keys - decided and (spread or not rule.from_plan):
            kept.append(_written(rule, len(layers)))
        decided |= keys
    if spread:
        common, _ = defaults["fprop"]
        kept += [
            {"gemms": [gemm], "recipe": name}
            for gemm, (name, _) in defaults.items()
            if name != common
        ]
        kept.append({"recipe": common})
    return spread, kept


def _written(rule: Rule, num_layers: int) -> dict[str, Any]:
    """A rule as a run file has it; layers that were widened to pairs by number."""
    text: dict[str, Any] = {}
    if rule.pairs and rule.layers != "all":
        selected = select_layers(rule.layers, num_layers, pairs=True)
        parts = [str(position) for position in sorted(selected.positions)]
        text["layers"] = ", ".join(parts + ["mtp"] * selected.mtp)
    elif rule.layers != "all":
        text["layers"] = rule.layers
    if rule.modules != "*":
        text["modules"] = rule.modules
    if tuple(rule.gemms) != GEMMS:
        text["gemms"] = list(rule.gemms)
    return {**text, "recipe": rule.recipe}


def _sparing(
    config: PretrainConfig, steps: Sequence[dict[str, Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    book, kept = RecipeBook(config.precision), []
    for step in steps:
        recipe = book.get(step["recipe"], "", [])
        quantizes = any(is_quantized(spec) for gemm in GEMMS for spec in recipe.specs(gemm))
        if quantizes:
            step = step | {"modules": ",".join([step["modules"], *(f"!{name}" for name in names)])}
        kept.append(step)
    return kept


def _check(
    config: PretrainConfig, before: PrecisionPlan, section: dict[str, Any], chosen: set[str]
) -> None:
    """The section loads, and does to every layer what it says."""
    precision = decode(type(config.precision), section)
    after = precision_plan(replace(config, precision=precision)).recipes()
    for name, recipe in before.recipes().items():
        wanted = "bf16" if name in chosen else recipe.name
        assert after[name].name == wanted, f"{name} is {after[name].name}, not {wanted}"


def _place(name: str) -> tuple[int, str]:
    digits = [part for part in name.split(".") if part.isdigit()]
    return (int(digits[0]) if digits else 0, name)


def write_plan(path: Path, section: dict[str, Any], head: Iterable[str]) -> None:
    """Writes the plan as YAML: a precision section that a run file takes as it is."""
    comments = "".join(f"# {text}\n" for text in head if text)
    body = yaml.safe_dump({"precision": section}, sort_keys=False, width=100)
    path.write_text(comments + body)
