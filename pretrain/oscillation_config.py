# SPDX-License-Identifier: Apache-2.0
"""Settings of the reset of weights that oscillate between two codes."""

import math
from fractions import Fraction

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(
    extra="forbid", validate_by_name=True, validate_by_alias=True, serialize_by_alias=True
)


@dataclass(kw_only=True, frozen=True, config=_STRICT)
class OscillationReset:
    """Weights whose codes hop to and fro are put onto the values of their codes: OsciReset.

    Late in a run a weight may lie at the edge between two codes and cross it at every update: the
    forward pass sees it jump by a whole step of the grid, though it hardly moves. Of each element w
    of a weight that the forward multiplies as codes, with the master w_t (FP32) after update t and
    Q(w_t), the value of the layer's own operand fprop.w, two paths are summed over a window:

        weight path     sum of |w_t - w_(t-1)|
        quantized path  sum of |Q(w_t) - Q(w_(t-1))|

    A weight that drifts has a quantized path of about its weight path. Where it is at least
    `threshold` times as long (and the weight has moved) the master becomes Q(w), the middle of its
    code, and the update that follows starts from there; moments stay. Every `interval` updates.

    Source: Chen et al., "TetraJet-v2", arXiv 2510.27527, and its code (thu-ml/TetraJet-v2-
    NVFP4Training, oscillation_reset.py): windows of 50 updates every 200 or 400 from 0.6 to 0.7 of
    a run on, a threshold of 16 by default and of 8 in its run files. AMD's ALTO takes 4.
    """

    from_: float = Field(default=0.6, alias="from")
    """Fraction of train.steps after which the first window begins."""
    interval: int = 200
    """Updates from the beginning of one window to that of the next."""
    window: int = 50
    """Updates over which paths are summed; behind the last of them weights are reset."""
    threshold: float = 16.0
    """How many times as long as the weight path the quantized path of a reset weight is."""

    def begin(self, steps: int) -> int:
        """Steps of a run of `steps` before the first window."""
        return math.ceil(Fraction(str(self.from_)) * steps)

    def problems(self, steps: int) -> list[str]:
        """What cannot work in a run of `steps` updates, each with rule, value and remedy."""
        found = []

        def rule(holds: bool, text: str) -> None:
            if not holds:
                found.append("optimizer.oscillation_reset." + text)

        rule(
            0 <= self.from_ < 1,
            f"from must lie in [0, 1), a fraction of train.steps; got {self.from_}; 0.6 is usual",
        )
        rule(self.interval > 0, f"interval must be positive; got {self.interval}; 200 is usual")
        rule(self.window > 0, f"window must be positive; got {self.window}; 50 is usual")
        rule(
            self.window <= self.interval or min(self.interval, self.window) < 1,
            f"window must be at most interval={self.interval}; got {self.window}; shorten it",
        )
        rule(
            1 < self.threshold < math.inf,
            "threshold must be above 1 (weights that only drift have about 1) and finite; got "
            f"{self.threshold}; 16 is usual",
        )
        if not found and steps > 0:
            first = self.begin(steps) + self.window
            rule(
                first < steps,
                f"window must end before the run does: from={self.from_} and window={self.window} "
                f"put the first reset behind update {first} of train.steps={steps}, and no update "
                "follows it; begin earlier, or shorten the window",
            )
        return found
