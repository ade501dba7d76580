# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: save, find the newest that is whole, resume.

How the trainer calls it (every call is collective: all ranks, in the same order)::

    manager = CheckpointManager(config.checkpoint, run_dir)  # before anything is written there
    found = manager.find()                      # Found or None; ConfigError says what to do
    if found is not None:                       # override only counts when continuing
        config = override_config(config, config.checkpoint.override)
    ... build chunks (DDP-wrapped), optimizer, scheduler from config ...
    manager.fingerprints = {"data": dataset.fingerprint}
    resumed = manager.resume(chunks, optimizer, scheduler, resolved_config=as_dict(config))
    if resumed is not None:
        state = TrainState(**resumed.extra["train_state"])
        for line in resumed.notes: print(line)  # warnings, changed settings, overrides
    for step in ...:
        ... one optimizer step ...
        manager.poll()                          # finishes an asynchronous save; cheap
        if manager.due(step) or stopping:
            manager.save(step, chunks, optimizer, scheduler,
                         extra={"train_state": asdict(state), "precision": plan.state_dict()},
                         resolved_config=as_dict(config))
    manager.wait()                              # last asynchronous save is complete
    manager.close()                             # also releases the run folder's lock
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict
from pydantic import Field as Limit
from pydantic.dataclasses import dataclass as config_dataclass

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; earlier ones are untouched. Says what to do."""


@config_dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid"))
class CheckpointConfig:
    """When checkpoints are written, which are kept, and what a start does with those it finds."""

    interval: int = Limit(default=500, ge=0)
    """Steps between checkpoints; 0 writes only at the end of the run."""
    keep_last: int = Limit(default=3, ge=0)
    """How many of the newest to keep; 0 keeps all."""
    keep_every: int = Limit(default=0, ge=0)
    """Checkpoints at multiples of this step are kept for good; 0: none."""
    async_save: bool = False
    """Write in a forked process while training goes on; at most one at a time."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: continue from the newest whole checkpoint, start afresh if there is none.
    must: refuse to start without one. never: refuse to start where checkpoints exist."""
    load: str | None = None
    """A checkpoint to start from (a step folder or a checkpoints folder) when this run has none."""
    load_parts: Literal["all", "model"] = "all"
    """What `load` takes: everything (step and optimizer too), or only the weights."""
    override: dict[str, Any] = Limit(default_factory=dict)
    """Settings, `section.key: value`, that replace those of the config when a run continues:
    `optimizer.*`, `precision.*`, `train.*`, in force from the first step."""


@dataclass(frozen=True)
class Found:
    """A whole checkpoint: where it is, its step, and what was passed over to reach it."""

    path: Path
    step: int
    parts: Literal["all", "model"] = "all"
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resumed:
    """What a resume restored."""

    step: int
    path: Path
    extra: dict[str, Any]
    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def override_config(config: T, override: dict[str, Any]) -> T:
    """`config` (nested dataclasses) with the dotted keys of `override` replaced and validated.

    Raises ConfigError naming every key that does not exist or whose value is not allowed.
    """
    raise NotImplementedError


class CheckpointManager:
    """Owns runs/NAME/checkpoints. Collective; needs torch.distributed (world size 1 is fine)."""

    def __init__(self, config: CheckpointConfig, run_dir: str | Path, *, lock: bool = True) -> None:
        """Takes the lock of `run_dir`. ConfigError when another live run holds it."""
        self.config = config
        self.run_dir = Path(run_dir)
        self.fingerprints: dict[str, str] = {}

    def find(self) -> Found | None:
        """The checkpoint this start continues from, by `resume` and `load`; None: start at 0."""
        raise NotImplementedError

    def resume(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        *,
        resolved_config: dict[str, Any],
    ) -> Resumed | None:
        """Loads what `find` found into model, optimizer, scheduler and generators."""
        raise NotImplementedError

    def due(self, step: int) -> bool:
        """Whether the interval asks for a checkpoint after `step` completed steps."""
        return self.config.interval > 0 and step % self.config.interval == 0

    def save(
        self,
        step: int,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        *,
        extra: dict[str, Any],
        resolved_config: dict[str, Any],
    ) -> None:
        """Writes step_{step:08d}; a no-op when that checkpoint was already saved or resumed from.

        `extra`: JSON-able values and small tensors, the same on every rank. Raises CheckpointError.
        """
        raise NotImplementedError

    def poll(self) -> None:
        """Completes an asynchronous save once all ranks have written. Call once a step."""

    def wait(self) -> None:
        """Blocks until no save is in flight."""

    def close(self) -> None:
        """wait(), then release the lock. Idempotent."""
