# SPDX-License-Identifier: Apache-2.0
"""Settings of checkpoints, and what finding and resuming one gives back."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field as Limit
from pydantic.dataclasses import dataclass as config_dataclass

from fused_ops.errors import ConfigError
from pretrain.checkpoint.io import CheckpointError
from pretrain.checkpoint.layout import Scan, candidates, check_contents, ever_finished, step_of

log = logging.getLogger(__name__)


@config_dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid"))
class CheckpointConfig:
    """When checkpoints are written, which are kept, and what a start does with those it finds."""

    interval: int = Limit(default=500, ge=0)
    """Steps between checkpoints; 0 writes only at the end of the run."""
    at_end: bool = True
    """Write one after the last step. false leaves it out, for runs of which only the figures are
    wanted; a run that is stopped before its end always writes one."""
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


def never_problems(config: CheckpointConfig, folder: Path, held: Scan) -> list[str]:
    """A problem where a run that is never to continue finds checkpoints in its `folder`."""
    if config.resume != "never" or not (held.whole or held.broken):
        return []
    return [
        f"checkpoint.resume=never, but {folder} already holds checkpoints: choose another "
        "run.name, delete that folder, or set checkpoint.resume=auto to continue"
    ]


def find_latest(path: str | Path) -> Found | None:
    """The newest whole checkpoint that `path` means: a step, a checkpoints or a run folder.

    Checksums included. None when none was ever finished; CheckpointError, naming each and why,
    when there are some but none can be read. Needs no process group.
    """
    skipped: list[str] = []
    for folder in candidates(Path(path)):
        reason = check_contents(folder)
        if reason is None:
            return Found(folder, step_of(folder) or 0, skipped=tuple(skipped))
        skipped.append(reason)
    if skipped and (step_of(Path(path)) is not None or ever_finished(Path(path))):
        raise CheckpointError("\n".join([f"no checkpoint of {path} can be read:", *skipped]))
    return None


def require_latest(path: str | Path) -> Found:
    """`find_latest` for who was told to read `path`: warns of newer ones that are passed over.

    Raises ConfigError where none was ever finished, CheckpointError where none can be read.
    """
    found = find_latest(path)
    if found is None:
        raise ConfigError(
            f"CKPT_DIR must hold a checkpoint; {path} holds none that is whole; give a run's "
            "checkpoints folder (runs/NAME/checkpoints) or one step of it"
        )
    for text in found.skipped:
        log.warning("checkpoint passed over, %s is read: %s", found.path.name, text)
    return found
