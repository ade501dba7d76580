# SPDX-License-Identifier: Apache-2.0
"""Steps that would harm a run: not finite, or a spike of the loss; and what is done about them.

The verdict is a function of numbers that all ranks share (the loss of the global batch, the norm of
the whole gradient, the run's recent losses), so every rank comes to the same one. An fp16 overflow
is the loss scale's business and no bad step, as long as the loss itself is finite.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as config_dataclass

from pretrain.step_result import StepResult

Policy = Literal["log", "skip", "rollback", "stop"]

# Of a normal distribution, the standard deviation over the median absolute deviation.
_MAD_SIGMA = 1.4826
# A loss that hardly moves would make a spike of every rounding: no spread below this share of it.
_LEAST_SPREAD = 1e-3


@config_dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid"))
class BadStepConfig:
    """What is done about steps whose loss or gradient is not finite, and about loss spikes.

    skip: no update, on to the next batch; train.max_skipped bounds how many in a row. rollback:
    back to the newest checkpoint, and on from there without the bad batch; max_rollbacks bounds
    it. stop: the run ends with status 2, weights as before the step."""

    policy: Literal["skip", "rollback", "stop"] = "skip"
    """Of a loss or a gradient that is not finite."""
    spike_policy: Literal["off", "log", "skip", "rollback", "stop"] = "log"
    """Of a loss spike; log: it is recorded, and trained on."""
    spike_zscore: float = Field(default=10.0, gt=0)
    """A spike: this many robust standard deviations above the median of recent losses."""
    spike_window: int = Field(default=128, ge=8)
    """How many recent losses those are."""
    spike_after: int = Field(default=32, ge=4)
    """Losses that must be known before any is called a spike."""
    max_rollbacks: int = Field(default=3, ge=0)
    """Rollbacks of a run at which the next one stops it."""
    inspect: bool = True
    """Compute a bad step a second time to find the layer, the GEMM and the samples; leaves no
    trace in the run. Not for spikes that are only logged."""
    max_dumps: int = Field(default=10, ge=0)
    """Files in RUN/bad_steps at which no more are written."""


class TrainingError(RuntimeError):
    """The run cannot go on for a reason that its user must see to."""


@dataclass(frozen=True)
class Bad:
    """A bad step."""

    kind: Literal["nonfinite", "spike"]
    reason: str
    policy: Policy
    zscore: float | None = None


def spike_zscore(loss: float, recent: Sequence[float]) -> float:
    """Robust z-score of a loss: its distance from the median, in units of the scaled MAD."""
    median = statistics.median(recent)
    spread = _MAD_SIGMA * statistics.median(abs(value - median) for value in recent)
    spread = max(spread, _LEAST_SPREAD * abs(median), 1e-12)
    return (loss - median) / spread


class BadSteps:
    """The judge of a run's steps. `recent` is part of the run's state: the caller keeps it."""

    def __init__(self, config: BadStepConfig) -> None:
        self.config = config

    def before_update(self, loss: float, recent: Sequence[float]) -> Bad | None:
        """What the loss alone says, before the weights are updated."""
        config = self.config
        if not math.isfinite(loss):
            return Bad("nonfinite", f"the loss is {loss}", config.policy)
        if config.spike_policy == "off" or len(recent) < config.spike_after:
            return None
        score = spike_zscore(loss, recent)
        if score <= config.spike_zscore:
            return None
        median = statistics.median(recent)
        reason = (
            f"the loss {loss:.4f} is {score:.1f} robust standard deviations above the median "
            f"{median:.4f} of the last {len(recent)}"
        )
        return Bad("spike", reason, config.spike_policy, score)

    def after_update(self, result: StepResult) -> Bad | None:
        """What the gradient says, where the loss said nothing; None for an fp16 overflow."""
        if result.updated or result.overflow:
            return None
        reason = (
            "an operand of a quantized GEMM was not finite"
            if result.nonfinite_operand
            else "the gradient was not finite"
        )
        return Bad("nonfinite", reason, self.config.policy)

    def remember(self, loss: float, recent: list[float]) -> None:
        """Adds the loss of a good step to `recent`, and lets the oldest go."""
        recent.append(loss)
        del recent[: -self.config.spike_window]
