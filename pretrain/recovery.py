# SPDX-License-Identifier: Apache-2.0
"""What a run does about a bad step: records it with its cause, then skips, rolls back, or stops."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from pretrain.bad_steps import Bad, BadSteps, TrainingError
from pretrain.data.loader import MicroBatch
from pretrain.inspect_step import inspect_step, write_dump
from pretrain.step_result import StepResult
from pretrain.training import Training

log = logging.getLogger(__name__)

DUMPS = "bad_steps"


class Recovery:
    """The judge of a run's steps, and the actions that follow from its verdicts.

    Every rank calls the same methods in the same order.
    """

    def __init__(self, trainer: Training) -> None:
        self.trainer = trainer
        self.judge = BadSteps(trainer.config.train.bad_steps)
        self._bad: Bad | None = None

    def refuses(self, loss: float) -> bool:
        """Whether the loss of the global batch forbids the update; asked before it."""
        self._bad = self.judge.before_update(loss, self.trainer.state.recent_losses)
        return self._bad is not None and self._bad.policy != "log"

    def after_step(
        self, result: StepResult, micro_batches: Sequence[MicroBatch], samples: list[int]
    ) -> None:
        """After a step was counted: acts on it.

        Args:
            result: of the step.
            micro_batches: this rank's.
            samples: of the whole step.

        Raises:
            TrainingError: the run stops here.
        """
        bad, self._bad = self._bad or self.judge.after_update(result), None
        if bad is None and result.updated:
            self.judge.remember(result.loss, self.trainer.state.recent_losses)
            return
        if bad is None:
            self._skip("the fp16 loss scale was too high; it is lowered", {})
            return
        details: dict[str, Any] = {"reason": bad.reason, "samples": [samples[0], samples[-1]]}
        if bad.zscore is not None:
            details["zscore"] = round(bad.zscore, 2)
        if bad.policy == "log":
            self.trainer.event("spike", **details)
            return
        details |= self._cause(bad, result, micro_batches, samples)
        if bad.policy == "skip":
            self._skip(bad.reason, details)
        elif bad.policy == "rollback":
            self._roll_back(bad, details, samples)
        else:
            self.trainer.event("bad_step", **details)
            raise TrainingError(
                f"step {self.trainer.state.step} was bad and train.bad_steps says stop: "
                f"{_told(details)}; set data.skip_samples to step over samples {samples[0]} to "
                f"{samples[-1]}, or lower optimizer.lr, and start again"
            )

    def _cause(
        self,
        bad: Bad,
        result: StepResult,
        micro_batches: Sequence[MicroBatch],
        samples: list[int],
    ) -> dict[str, Any]:
        """Where it went wrong, and the file that says more."""
        trainer, config = self.trainer, self.judge.config
        if not config.inspect:
            return {}
        inspection = inspect_step(trainer.engine, micro_batches)
        found: dict[str, Any] = {"cause": inspection.line()}
        if not inspection.reproduced and bad.kind == "nonfinite":
            found["transient"] = True
        folder = trainer.run_dir / DUMPS
        if trainer.world.is_main and len(list(folder.glob("step_*.json"))) < config.max_dumps:
            about = {
                "step": trainer.state.step,
                "reason": bad.reason,
                "policy": bad.policy,
                "result": dataclasses.asdict(result),
                "recent_losses": trainer.state.recent_losses[-16:],
                "batch": [samples[0], samples[-1]],
            }
            try:
                path = write_dump(folder, trainer.state.step, about, inspection)
                found["dump"] = str(path.relative_to(trainer.run_dir))
            except OSError as error:
                log.warning("the bad step could not be written to %s (%s)", folder, error)
        return found

    def _skip(self, reason: str, details: dict[str, Any]) -> None:
        trainer = self.trainer
        trainer.event("skip", **{"reason": reason, **details})
        limit, in_a_row = trainer.config.train.max_skipped, trainer.state.skipped_in_a_row
        if in_a_row >= limit:
            raise TrainingError(
                f"at most train.max_skipped={limit} steps in a row may be skipped; step "
                f"{trainer.state.step} was one more ({reason}); lower optimizer.lr, or continue "
                "from an earlier checkpoint"
            )

    def _roll_back(self, bad: Bad, details: dict[str, Any], samples: list[int]) -> None:
        trainer, limit = self.trainer, self.judge.config.max_rollbacks
        former = trainer.state
        if former.rollbacks >= limit:
            trainer.event("bad_step", **details)
            raise TrainingError(
                f"at most train.bad_steps.max_rollbacks={limit} rollbacks may be made; step "
                f"{former.step} asked for one more: {_told(details)}; lower optimizer.lr, or start "
                "again from an earlier checkpoint"
            )
        try:
            step = trainer.load_newest()
        except TrainingError as error:
            trainer.event("bad_step", **details)
            raise TrainingError(
                f"step {former.step} was bad ({_told(details)}), and {error}"
            ) from None
        trainer.state.rollbacks = former.rollbacks + 1
        trainer.state.skip = [*former.skip, [samples[0], samples[-1]]]
        trainer.step_over_samples()
        trainer.each("on_rollback", step)
        trainer.event("rollback", bad_step=former.step, **details)


def _told(details: dict[str, Any]) -> str:
    return "; ".join(str(details[key]) for key in ("reason", "cause", "dump") if key in details)
