# SPDX-License-Identifier: Apache-2.0
"""The recipe of every linear layer, now and after each step of the schedule, from data alone."""

import math
from collections.abc import Mapping
from fractions import Fraction

import torch

from fused_ops.errors import ConfigError
from fused_ops.keys import OPERANDS
from fused_ops.recipe import GemmRecipe, is_quantized
from models.flops import ModelShape
from models.gemms import GemmShape
from models.pattern import parse_pattern
from models.precision_config import PHASES, PrecisionConfig
from models.precision_rules import (
    PRETRAINING,
    RecipeBook,
    Resolution,
    lowered_operands,
    matching,
    raise_precision,
    resolve,
    schedule_problems,
    step_rule,
)
from models.precision_support import backend_problems, reference_problems


class PrecisionStages:
    """The recipe of every linear layer, now and after each step of the schedule.

    Args:
        config: the precision section.
        shape: the model.
        total_samples: samples of the whole run, which fractions of the schedule refer to.
        device: where the run computes; the machine's GPU if it has one.

    Raises:
        ConfigError: every contradiction in the section, at once.
    """

    def __init__(
        self,
        config: PrecisionConfig,
        shape: ModelShape,
        total_samples: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.config, self.shape = config, shape
        self.modules: list[GemmShape] = shape.modules()
        self.phase = PRETRAINING
        self.consumed_samples = 0
        layers = parse_pattern(shape.pattern).layers
        problems: list[str] = []
        self._phases = {PRETRAINING: resolve(config, self.modules, layers)}
        for phase in PHASES[2:]:
            self._phases[phase] = resolve(config, self.modules, layers, phase)
        for resolution in self._phases.values():
            problems += resolution.problems
        self._stages = [self._phases[PRETRAINING].recipes]
        problems += schedule_problems(config.schedule)
        self._add_stages(len(layers), problems)
        stages = [*(r.recipes for r in self._phases.values()), *self._stages]
        used = {recipe for stage in stages for recipe in stage.values()}
        problems += backend_problems(config, stages, self.modules)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        problems += reference_problems(config, used, device)
        if problems:
            raise ConfigError(dict.fromkeys(problems))
        self.boundaries: list[int] | None = None
        if total_samples is not None:
            self.start(total_samples)

    def _add_stages(self, num_layers: int, problems: list[str]) -> None:
        book = RecipeBook(self.config)
        for index, step in enumerate(self.config.schedule):
            rule = step_rule(index, step)
            to = book.get(step.recipe, rule.source, problems)
            found = matching(rule, self.modules, num_layers, problems)
            before = self._stages[-1]
            if not before:
                continue
            after = dict(before)
            lowered: list[tuple[str, str]] = []
            for module in found:
                changed = raise_precision(before[module.name], to, rule.gemms)
                lowered += [
                    (module.name, text) for text in lowered_operands(before[module.name], changed)
                ]
                after[module.name] = changed
            if lowered:
                name, text = lowered[0]
                modules = len({module for module, _ in lowered})
                problems.append(
                    f"{rule.source} lowers the precision of {modules} modules, which a schedule "
                    f"may not: {name} {text}; name other layers, modules or gemms in the step"
                )
            self._stages.append(after)

    def start(self, total_samples: int) -> None:
        """Turn the schedule's fractions into samples: when a run first starts."""
        self.boundaries = [
            math.ceil(Fraction(str(step.from_)) * total_samples) for step in self.config.schedule
        ]

    @property
    def active_steps(self) -> int:
        """How many steps of the schedule have taken effect."""
        return sum(self.consumed_samples >= boundary for boundary in self.boundaries or [])

    def recipe(self, name: str) -> GemmRecipe:
        """The recipe that the linear layer of this global name has now."""
        return self.recipes()[name]

    def recipes(self) -> Mapping[str, GemmRecipe]:
        """The recipe of every linear layer now, by global name."""
        if self.phase != PRETRAINING:
            return self._phases[self.phase].recipes
        return self._stages[self.active_steps]

    def resolution(self) -> Resolution:
        """Which rules decided in the present phase."""
        return self._phases[self.phase]

    @property
    def is_quantized(self) -> bool:
        """Whether some operand of some GEMM is made of codes now."""
        return any(
            is_quantized(recipe.spec(*name.split(".")))
            for recipe in set(self.recipes().values())
            for name in OPERANDS
        )
