# SPDX-License-Identifier: Apache-2.0
"""The recipes of a model as its linear layers get them: handed out, saved, resumed, told."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from fused_ops.errors import ConfigError
from fused_ops.recipe import RECIPES, GemmRecipe
from models import delayed
from models.precision_config import PrecisionStep
from models.precision_stages import PrecisionStages
from models.precision_state import PrecisionState
from models.precision_table import flops_share, plan_notes, render, table_rows


class PrecisionPlan(PrecisionStages):
    """What `PrecisionStages` says, for the linear layers that are bound to it; none at first.

    Unbound it answers questions about a model that is not built (`plan_precision`); bound it is the
    precision of one that is (`apply_precision`). Arguments and errors are those of
    `PrecisionStages`.
    """

    bound: tuple[tuple[str, Any], ...] = ()
    """(global name, layer) of each linear layer of this process."""
    _state: PrecisionState | None = None

    def update(self, consumed_samples: int) -> list[str]:
        """Apply the schedule between two optimizer steps.

        Args:
            consumed_samples: samples of all steps so far.

        Returns:
            One line for each step of the schedule that takes effect now.
        """
        assert self.boundaries is not None or not self.config.schedule, "start() was not called"
        before = self.active_steps
        self.consumed_samples = consumed_samples
        self._hand_out()
        if self.active_steps != before:
            delayed.drop_unused(self.bound)
        return [
            f"precision: {', '.join(step.gemms)} of layers {step.layers}, modules {step.modules} "
            f"to {step.recipe} from sample {(self.boundaries or [])[index]}"
            for index, step in enumerate(self.config.schedule)
            if before <= index < self.active_steps
        ]

    def set_phase(self, phase: str) -> None:
        """Give every module the recipe that it has in pretraining, sampler or rl_trainer.

        Raises:
            ConfigError: no such phase.
        """
        if phase not in self._phases:
            raise ConfigError(f"a phase is one of {', '.join(self._phases)}; got {phase!r}")
        self.phase = phase
        self._hand_out()

    def bind(self, modules: Iterable[tuple[str, Any]], state: PrecisionState) -> None:
        """Give the linear layers of this process their names, recipes and the shared state.

        Args:
            modules: (global name, layer); a layer is a `models.parallel_linear.GemmModule`.
            state: the process's own, which says later what changes from call to call.
        """
        for name, module in modules:
            module.gemm_name = name
            module.precision_state = state
            module.amax_scope = self.config.amax_scope
            module.backend = self.config.backend
            module.communicate = self.config.communicate
            self.bound += ((name, module),)
        self._state = state
        self._hand_out()

    @property
    def is_observed(self) -> bool:
        """Whether some linear layer of this process shows its operands to an observer."""
        return any(module.observer is not None for _, module in self.bound)

    def end_step(self, groups: Any) -> None:
        """After the backward passes of a step: delayed scales move on; see `delayed.end_step`."""
        delayed.end_step(self.bound, groups)

    def scales_kept(self, *, begin: bool = False) -> contextlib.AbstractContextManager[None]:
        """Inside, delayed scales see passes that are no steps of the run, and end as they began;
        with `begin`, operands without one get theirs from these passes."""
        return delayed.kept(self.bound, begin=begin)

    def without_scales(self) -> list[str]:
        """Layers whose forward pass needs a delayed scale that is not there."""
        return delayed.missing(self.bound)

    @contextlib.contextmanager
    def instead(self, recipes: Mapping[str, GemmRecipe]) -> Iterator[None]:
        """Inside, linear layers have these recipes, and those not named keep the dtype of their
        tensors; at the end what the plan says comes back."""
        self._hand_out({**dict.fromkeys(self.recipes(), RECIPES["bf16"]), **recipes})
        try:
            yield
        finally:
            self._hand_out()

    def _hand_out(self, recipes: Mapping[str, GemmRecipe] | None = None) -> None:
        """Give bound layers these recipes, by name, or those of now; codes of others are freed."""
        recipes = self.recipes() if recipes is None else recipes
        for name, module in self.bound:
            if module.recipe != recipes[name]:
                module.recipe = recipes[name]
                module.weight_codes.drop()
        if self._state is not None:
            self._state.phase = self.phase

    def state_dict(self) -> dict[str, Any]:
        """The schedule in samples, and delayed scales, for checkpoints.

        A collective over all processes if layers are bound; the same on all of them.
        """
        steps = [
            {"from_samples": boundary, **_step_key(step)}
            for boundary, step in zip(self.boundaries or [], self.config.schedule)
        ]
        state: dict[str, Any] = {"consumed_samples": self.consumed_samples, "schedule": steps}
        histories = delayed.state_dict(self.bound)
        return {**state, "delayed": histories} if histories else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the samples at which the steps of a resumed run begin.

        Steps that the checkpoint knows keep their place, whatever the run's length is now; new ones
        count in fractions of the new length.

        Raises:
            ConfigError: the checkpoint has taken a step that the schedule does not have any more.
        """
        consumed, steps = state["consumed_samples"], list(state["schedule"])
        boundaries = list(self.boundaries or [0] * len(self.config.schedule))
        for index, step in enumerate(self.config.schedule):
            for stored in steps:
                if {**_step_key(step), "from_samples": stored["from_samples"]} == stored:
                    boundaries[index] = stored["from_samples"]
                    steps.remove(stored)
                    break
        problems = [
            f"precision.schedule lacks a step that the checkpoint has taken at sample "
            f"{stored['from_samples']} ({', '.join(stored['gemms'])} to {stored['recipe']}), so "
            "precision would fall; put it back"
            for stored in steps
            if stored["from_samples"] <= consumed
        ]
        if boundaries != sorted(set(boundaries)):
            problems.append(
                f"precision.schedule: steps begin at samples {boundaries}, partly from the "
                "checkpoint, which is not increasing; move the new steps"
            )
        if problems:
            raise ConfigError(problems)
        self.boundaries = boundaries
        self.update(consumed)
        self.load_scales(state)

    def load_scales(self, state: Mapping[str, Any]) -> None:
        """Of what `state_dict` gave, the delayed scales alone."""
        if self._state is not None:
            device = self._state.nonfinite.device
            delayed.load_state_dict(self.bound, state.get("delayed", {}), device)

    def table(self) -> list[dict[str, Any]]:
        """One row a linear layer and one for each part that stays high; plain data."""
        return table_rows(self)

    def notes(self) -> list[str]:
        """What is right but may surprise: padding, dtypes, a recipe that nothing uses."""
        return plan_notes(self)

    def flops_share(self) -> dict[str, float]:
        """Share of the training step's GEMM FLOPs by format; sums to 1."""
        return flops_share(self)

    def render(self) -> str:
        """The table as text: one line a linear layer and GEMM, with both operands."""
        return render(self)


def _step_key(step: PrecisionStep) -> dict[str, Any]:
    """What tells a step of the schedule from others in a checkpoint, as plain data."""
    key = asdict(step)
    return {**key, "gemms": list(key["gemms"]), "layers": str(key["layers"])}
