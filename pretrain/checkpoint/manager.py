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

import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fused_ops.errors import ConfigError
from pretrain.checkpoint.agree import on_all, on_first
from pretrain.checkpoint.compare import compare, model_notes, override_config
from pretrain.checkpoint.config import (
    CheckpointConfig,
    Found,
    Resumed,
    find_latest,
    never_problems,
)
from pretrain.checkpoint.io import (
    CheckpointError,
    dump_json,
    explain,
    file_entry,
    free_bytes,
    fsync_path,
    load_json,
    make_folder,
    remove_folder,
    write_durably,
)
from pretrain.checkpoint.layout import (
    COMPLETE,
    STATE,
    Scan,
    candidates,
    check_contents,
    prune,
    scan,
    seal,
    step_folder,
    step_of,
)
from pretrain.checkpoint.lock import RunLock
from pretrain.checkpoint.safe import UnsafeCheckpoint

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointManager",
    "Found",
    "Resumed",
    "UnsafeCheckpoint",
    "find_latest",
    "override_config",
]

log = logging.getLogger(__name__)
_MARGIN = 16 * 2**20
_INDEX = (".metadata", "metadata.json")


@dataclass
class _Pending:
    """A save in flight."""

    step: int
    folder: Path
    writer: Any
    small: dict[str, Any]


class CheckpointManager:
    """Owns RUN/checkpoints. Collective; needs torch.distributed (world size 1 is fine)."""

    def __init__(self, config: CheckpointConfig, run_dir: str | Path, *, lock: bool = True) -> None:
        """Takes the lock of `run_dir`. ConfigError when another live run holds it."""
        self.config = config
        self.run_dir = Path(run_dir)
        self.checkpoints = self.run_dir / "checkpoints"
        self.fingerprints: dict[str, str] = {}
        self.average: Any = None
        """A moving average of the weights (`pretrain.ema.WeightAverage`) to save and load."""
        self.paths: Any = None
        """How far weights have moved (`pretrain.weight_paths.WeightPaths`): saved by the optimizer,
        and to be loaded with it."""
        self.seconds_blocked = 0.0
        """How long the last `save` kept the caller."""
        self._rank = torch.distributed.get_rank()
        self._world_size = torch.distributed.get_world_size()
        self._lock = RunLock(self.run_dir)
        self._pending: _Pending | None = None
        self._found: Found | None = None
        self._searched = False
        self._known: set[int] = set()
        logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)
        if lock:
            note = on_first(self._lock.take)
            self._warn(note)

    # ---- what to continue from

    def find(self) -> Found | None:
        """The checkpoint this start continues from, by `resume` and `load`; None: start at 0.

        Every file's checksum is verified. ConfigError when the answer must not be guessed.
        """
        self._searched = True
        found: Scan = on_first(lambda: scan(self.checkpoints))
        exist = bool(found.whole or found.broken)
        if problems := never_problems(self.config, self.checkpoints, found):
            raise ConfigError(problems)
        self._found = self._newest(found) if exist else None
        if self._found is None and self.config.load is not None:
            self._found = self._given(Path(self.config.load))
        if self._found is None and self.config.resume == "must":
            raise ConfigError(
                f"checkpoint.resume=must, but {self.checkpoints} holds no checkpoint: check"
                " run.name and run.dir, set checkpoint.load, or set checkpoint.resume=auto to"
                " start afresh"
            )
        return self._found

    def _newest(self, found: Scan) -> Found | None:
        broken = {step_of(folder) or 0: reason for folder, reason in found.broken}
        for folder in found.whole:
            step = step_of(folder) or 0
            reason = self._damage(folder)
            if reason is None:
                newer = tuple(broken[s] for s in sorted(broken, reverse=True) if s > step)
                for text in newer:
                    self._warn(f"checkpoint passed over: {text}")
                if newer:
                    self._warn(f"continuing from the older {folder.name}: later steps run again")
                return Found(folder, step, skipped=newer)
            broken[step] = reason
        reasons = [broken[step] for step in sorted(broken, reverse=True)]
        if not found.once_complete and self.config.resume == "auto":
            for text in reasons:
                self._warn(f"checkpoint passed over: {text}")
            self._warn("no checkpoint of this run was ever finished: starting from step 0")
            return None
        raise ConfigError(
            [
                f"checkpoints exist in {self.checkpoints} but none can be read; not starting from"
                " step 0 over them. Restore one, set checkpoint.load, or choose another run.name:",
                *reasons,
            ]
        )

    def _given(self, path: Path) -> Found:
        skipped: list[str] = []
        for folder in on_first(lambda: candidates(path)):
            reason = self._damage(folder)
            if reason is None:
                for text in skipped:
                    self._warn(f"checkpoint passed over: {text}")
                step = step_of(folder) or 0
                return Found(folder, step, parts=self.config.load_parts, skipped=tuple(skipped))
            skipped.append(reason)
        raise ConfigError(
            [
                f"checkpoint.load={path} holds no checkpoint that can be read; check the path",
                *skipped,
            ]
        )

    def _damage(self, folder: Path) -> str | None:
        """Why a checkpoint is not whole, by checksums; the ranks share the reading."""
        reasons = on_all(lambda: check_contents(folder, self._rank, self._world_size))
        return next((reason for reason in reasons if reason), None)

    # ---- load

    def resume(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        *,
        resolved_config: dict[str, Any],
    ) -> Resumed | None:
        """Loads what `find` found into model, optimizer, scheduler and generators.

        `resolved_config` has the overrides applied. None: start at step 0. With parts "model" the
        step is 0 and `extra` empty. ConfigError lists settings that must not differ;
        CheckpointError when the checkpoint does not fit the model; UnsafeCheckpoint when it asks
        to run code.
        """
        from pretrain.checkpoint import state as checkpoint_state

        found = self._found if self._searched else self.find()
        if found is None:
            return None
        state = load_json(found.path / STATE)
        if found.parts == "model":
            checkpoint_state.load_sharded(found.path, chunks, None, whole=True)
            if self.average is not None:
                self.average.restart()
            if optimizer is not None:
                optimizer.reload_model_params()
            notes = [
                f"weights of {found.path} (step {found.step}); optimizer and step start afresh",
                *model_notes(state["config"], resolved_config),
            ]
            return Resumed(0, found.path, {}, state["config"], notes)
        if "optimizer" not in state["parts"] and optimizer is not None:
            raise ConfigError(
                f"{found.path} holds only weights: set checkpoint.load_parts=model to start"
                " from them"
            )
        notes = compare(
            state["config"],
            resolved_config,
            self.config.override,
            (state["fingerprints"], self.fingerprints),
        )
        checkpoint_state.load_sharded(found.path, chunks, optimizer, self.average, self.paths)
        if scheduler is not None and state["scheduler"] is not None:
            scheduler.load_state_dict(state["scheduler"])
        layout = checkpoint_state.layout_of(resolved_config, self._world_size)
        if state["layout"] == layout:
            checkpoint_state.restore_rng(checkpoint_state.read_rng(found.path, self._rank))
        else:
            notes.append(
                f"the layout differs ({state['layout']} -> {layout}): random generators start anew"
            )
        if found.path.parent == self.checkpoints:
            self._known.add(found.step)
        return Resumed(state["step"], found.path, state["extra"], state["config"], notes)

    def newest(self) -> Found | None:
        """This run's newest whole checkpoint as it is now; None: there is none."""
        self.wait()
        found: Scan = on_first(lambda: scan(self.checkpoints))
        whole = (folder for folder in found.whole if self._damage(folder) is None)
        folder = next(whole, None)
        return None if folder is None else Found(folder, step_of(folder) or 0)

    def roll_back(
        self,
        found: Found,
        chunks: Sequence[Any],
        optimizer: Any,
        scheduler: Any,
        *,
        resolved_config: dict[str, Any],
    ) -> Resumed:
        """Loads `found`, of `newest`, into the running engine."""
        self._found, self._searched = found, True
        self._known = {step for step in self._known if step <= found.step}
        scheduler.num_steps = 0  # its load_state_dict counts on from there
        # This start has accepted it, or has written it: its data may be those before a change.
        kept, self.fingerprints = self.fingerprints, {}
        try:
            resumed = self.resume(chunks, optimizer, scheduler, resolved_config=resolved_config)
            assert resumed is not None, "what was found can be resumed"
            return resumed
        finally:
            self.fingerprints = kept

    # ---- save

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

        `extra`: JSON-able values and small tensors, rank 0's are kept. An asynchronous save
        returns once the tensors are on the host; its failure is raised by `poll`, `wait` or the
        next `save`. Raises CheckpointError, on every rank; earlier checkpoints are untouched then.
        """
        from pretrain.checkpoint import state as checkpoint_state, write as checkpoint_write

        self.wait()
        if step in self._known:
            return
        start = time.perf_counter()
        folder = step_folder(self.checkpoints, step)
        state = checkpoint_state.sharded_state(chunks, optimizer, average=self.average)
        need = sum(on_all(lambda: checkpoint_state.local_bytes(state)))
        on_first(lambda: self._prepare(folder, need))
        about = {
            "step": step,
            "parts": ["model"] + ["optimizer"] * (optimizer is not None),
            "extra": extra,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "config": resolved_config,
            "fingerprints": self.fingerprints,
            "layout": checkpoint_state.layout_of(resolved_config, self._world_size),
            "written": {
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }

        def write_small() -> dict[str, Any]:
            names = [checkpoint_state.write_rng(folder, self._rank)]
            if self._rank == 0:
                write_durably(folder / STATE, dump_json(about))
                names.append(STATE)
            return {name: file_entry(folder / name) for name in names}

        with self._cleared_on_error(folder):
            small = on_all(lambda: _explained(write_small, folder))[self._rank]
            writer = checkpoint_write.ShardWriter(
                folder,
                state,
                forked=self.config.async_save,
                replicas=checkpoint_state.data_parallel_group(chunks[0]),
            )
            self._pending = _Pending(step, folder, writer, small)
        if not self.config.async_save:
            self.wait()
        self.seconds_blocked = time.perf_counter() - start

    def _prepare(self, folder: Path, need: int) -> None:
        """Rank 0: an empty folder for the checkpoint, on a disk with room for it."""
        problem = self._lock.problem()
        if problem is None and not self.run_dir.is_dir():
            problem = f"the run folder {self.run_dir} does not exist"
        if problem:
            raise CheckpointError(f"checkpoint {folder.name} was not written: {problem}")

        def make() -> None:
            make_folder(self.checkpoints)
            free = free_bytes(self.checkpoints)
            if free < need + _MARGIN:
                raise CheckpointError(
                    f"checkpoint {folder.name} was not written: it needs {need / 2**30:.2f} GiB,"
                    f" the disk of {self.checkpoints} has {free / 2**30:.2f} GiB free: free some"
                    " space, or lower checkpoint.keep_last"
                )
            if folder.exists():  # left by a crash, or damaged: this run has passed it over
                remove_folder(folder, COMPLETE)
            make_folder(folder)

        _explained(make, folder)

    def poll(self) -> None:
        """Completes an asynchronous save once all ranks have written. Call once a step."""
        self._lock.touch()
        self._finish(wait=False)

    def wait(self) -> None:
        """Blocks until no save is in flight. CheckpointError when it failed."""
        self._finish(wait=True)

    def _finish(self, *, wait: bool) -> None:
        pending = self._pending
        if pending is None:
            return
        with self._cleared_on_error(pending.folder):
            if not pending.writer.done(wait=wait):
                return
            entries = on_all(lambda: {**pending.writer.files(), **pending.small})
            on_first(lambda: _explained(lambda: self._seal(pending, entries), pending.folder))
        self._pending = None
        self._known.add(pending.step)
        self._warn(on_first(lambda: self._prune(pending.step)))

    def _seal(self, pending: _Pending, entries: list[dict[str, Any]]) -> None:
        files = {name: entry for part in entries for name, entry in part.items()}
        for name in _INDEX:
            fsync_path(pending.folder / name)
            files[name] = file_entry(pending.folder / name)
        problem = self._lock.problem()
        if problem:
            raise CheckpointError(f"checkpoint {pending.folder.name} is not complete: {problem}")
        seal(pending.folder, pending.step, files)

    def _prune(self, newest: int) -> str | None:
        try:
            prune(self.checkpoints, newest, self.config.keep_last, self.config.keep_every)
        except OSError as error:
            return f"old checkpoints were not deleted: {explain(error, self.checkpoints)}"
        return None

    def _cleared_on_error(self, folder: Path) -> "_ClearOnError":
        return _ClearOnError(self, folder)

    def abort(self) -> None:
        """After an error on some rank: stop a save in flight, release the lock. Not collective."""
        if self._pending is not None:
            self._pending.writer.abort()
            self._pending = None
        self._lock.release()

    def close(self) -> None:
        """wait(), then release the lock. Idempotent."""
        try:
            self.wait()
        finally:
            self._lock.release()

    def _warn(self, text: str | None) -> None:
        if text and self._rank == 0:
            log.warning("%s", text)


class _ClearOnError:
    """Forgets a failed save and frees its space; never touches a whole checkpoint."""

    def __init__(self, manager: CheckpointManager, folder: Path) -> None:
        self.manager, self.folder = manager, folder

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            return
        self.manager._pending = None
        if self.manager._rank == 0 and not (self.folder / COMPLETE).exists():
            try:
                remove_folder(self.folder)
            except OSError:
                log.warning("the unfinished %s could not be removed", self.folder)


def _explained(work: Any, folder: Path) -> Any:
    """`work()`, with a failing write in plain words. CheckpointError."""
    try:
        return work()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {folder.name} was not written: {explain(error, folder)}"
        ) from error
