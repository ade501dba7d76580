# SPDX-License-Identifier: Apache-2.0
"""A run under way: how far it is, and what its callbacks and its recovery see of the trainer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pretrain.engine import Engine
from pretrain.initialize import World
from pretrain.pretrain_config import PretrainConfig


@dataclass
class TrainState:
    """How far a run is; with the weights and the optimizer, all that a resumed run needs."""

    step: int = 0
    """Completed steps, skipped ones included."""
    consumed_samples: int = 0
    """Samples that went through the model: the position in the data."""
    consumed_tokens: int = 0
    """The same in tokens."""
    skipped: int = 0
    """Steps without an update."""
    skipped_in_a_row: int = 0
    """Of these, since the last update."""
    recent_losses: list[float] = field(default_factory=list)
    """Of good steps: what a loss spike is judged by."""
    rollbacks: int = 0
    """How often a bad step sent the run back to a checkpoint."""
    skip: list[list[int]] = field(default_factory=list)
    """Batches that were left out then, as [first, last] sample."""

    def advance(self, consumed_samples: int, tokens: int, updated: bool) -> None:
        """After a step, which ended at position `consumed_samples` of the data."""
        self.step += 1
        self.consumed_samples = consumed_samples
        self.consumed_tokens += tokens
        self.skipped += not updated
        self.skipped_in_a_row = 0 if updated else self.skipped_in_a_row + 1


class Training(Protocol):
    """What a callback may see of a run and ask of it. `pretrain.trainer.Trainer` is one."""

    config: PretrainConfig
    world: World
    run_dir: Path
    engine: Engine
    state: TrainState

    def each(self, moment: str, *details: Any) -> None:
        """Calls a moment of every callback."""
        ...

    def event(self, kind: str, **details: Any) -> None:
        """Something happened at the current step."""
        ...

    def load_newest(self) -> int:
        """Back to the newest whole checkpoint of this run; its step. TrainingError: there is none
        to go back to, and nothing has changed."""
        ...

    def step_over_samples(self) -> None:
        """Tells the loader which samples to leave out: the user's, and those of rollbacks."""
        ...
