# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling of FP8: the scale of a step comes from amaxes of earlier steps.

Source: TransformerEngine's DelayedScaling recipe; Micikevicius et al., arXiv 2209.05433.
"""

from typing import Any

import torch
from torch import Tensor

from fused_ops.codecs import ELEMENT_MAX
from fused_ops.errors import ConfigError


class DelayedScaling:
    """Amax history of one operand.

    Within a step pass `amax` to quantize() and what the tensor really had to `observe`. At the
    end of the step, once the group has reduced `history[0]`, call `update`: the scale becomes
    (largest element / amax) / 2**margin, and stays what it was when that amax is 0. An amax that is
    not finite counts as none: kept, it would hold the scale for as long as the history goes back.
    """

    def __init__(
        self,
        element: str = "e4m3",
        *,
        history_length: int = 1024,
        algorithm: str = "max",
        margin: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        problems = []
        if element not in ("e4m3", "e5m2"):
            problems.append(f"delayed scaling is for e4m3 or e5m2; got element {element!r}")
        if history_length < 1:
            problems.append(f"history_length is at least 1; got {history_length}")
        if algorithm not in ("max", "most_recent"):
            problems.append(f"algorithm is max or most_recent; got {algorithm!r}")
        if problems:
            raise ConfigError(problems)
        self.element, self.algorithm, self.margin = element, algorithm, margin
        self.history = torch.zeros(history_length, device=device)
        self._used = torch.tensor(ELEMENT_MAX[element] * 2.0**-margin, device=device)

    @property
    def amax(self) -> Tensor:
        """fp32 scalar for quantize(): the amax in use times 2**margin; before any update the
        value that makes the scale 1."""
        return self._used * 2.0**self.margin

    def observe(self, amax: Tensor) -> None:
        """Note the amax (fp32 scalar) of a tensor of this step."""
        self.history[0] = torch.maximum(self.history[0], amax.to(self.history).reshape(()))

    def update(self) -> None:
        """End of a step: choose the next amax, roll the history, clear the slot in use."""
        # In place: recorded launches know where they are.
        newest = self.history[0]
        newest.copy_(torch.where(torch.isfinite(newest), newest, 0.0))
        chosen = self.history.max() if self.algorithm == "max" else newest
        self._used.copy_(torch.where(chosen > 0, chosen, self._used))
        self.history.copy_(self.history.roll(-1))
        self.history[0] = 0.0

    def state_dict(self) -> dict[str, Any]:
        """History and the amax in use; both decide the codes of the next step."""
        return {"history": self.history.clone(), "used": self._used.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the history must have the same length."""
        if state["history"].shape != self.history.shape:
            raise ConfigError(
                f"the saved amax history has {state['history'].numel()} steps, this one "
                f"{self.history.numel()}: set history_length to the saved number"
            )
        self.history.copy_(state["history"])
        self._used.copy_(state["used"])
