# SPDX-License-Identifier: Apache-2.0
"""What happens around the steps of a run, in named moments."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fused_ops.errors import ConfigError
from pretrain.engine import Engine
from pretrain.heartbeat import Heartbeat
from pretrain.metrics import MetricsLogger
from pretrain.progress import Progress
from pretrain.redact import mask_text
from pretrain.report.page import write_report
from pretrain.throughput import OwnTime, Regression, stragglers
from pretrain.training import Training
from pretrain.watchdog import Watchdog

log = logging.getLogger(__name__)
Row = Mapping[str, Any]


class Callback:
    """Moments of a run; every one is called on every rank, in the order of the callbacks."""

    def before_step(self, trainer: Training, step: int) -> None:
        """Before step `step` computes anything."""

    def after_compute(self, trainer: Training, step: int) -> None:
        """After what step `step` computes; what this takes is a part of the step's time."""

    def after_step(self, trainer: Training, row: Row) -> None:
        """After a step: its row of metrics."""

    def on_eval(self, trainer: Training, row: Row) -> None:
        """After an evaluation: its row of metrics."""

    def on_event(self, trainer: Training, kind: str, step: int, details: Row) -> None:
        """Something that is neither: resume, save, skip, precision_switch, stop."""

    def on_rollback(self, trainer: Training, step: int) -> None:
        """The run went back to the checkpoint of `step`; what came after it will come again."""

    def on_phase(self, trainer: Training, phase: str) -> None:
        """The run turns to evaluate, save or end; or it is done, or stopped."""

    def on_error(self, trainer: Training, error: BaseException) -> None:
        """The run fails with `error`; close follows."""

    def close(self, trainer: Training) -> None:
        """The end of the run, however it came."""


class Record(Callback):
    """Rows into metrics.jsonl and the other sinks, progress onto the terminal."""

    def __init__(self, metrics: MetricsLogger, progress: Progress) -> None:
        self.metrics, self.progress = metrics, progress

    def after_step(self, trainer: Training, row: Row) -> None:
        """Signature: `Callback.after_step`."""
        self.metrics.log(row)
        self.progress.update(row)

    def on_eval(self, trainer: Training, row: Row) -> None:
        """Signature: `Callback.on_eval`."""
        self.metrics.log(row)
        values = "  ".join(f"{k} {v:.4f}" for k, v in row.items() if k.startswith("val_loss"))
        self.progress.message(f"step {row['step']}: {values}")

    def on_event(self, trainer: Training, kind: str, step: int, details: Row) -> None:
        """Signature: `Callback.on_event`."""
        self.metrics.event(kind, step, **details)
        said = "  ".join(f"{name} {value}" for name, value in details.items())
        self.progress.message(f"step {step}: {kind}  {said}".rstrip())

    def on_rollback(self, trainer: Training, step: int) -> None:
        """Signature: `Callback.on_rollback`."""
        self.metrics.rewind(step)

    def close(self, trainer: Training) -> None:
        """Signature: `Callback.close`."""
        self.progress.close()
        self.metrics.close()


class Watch(Callback):
    """Tells the watchdog and heartbeat.json how far the run is."""

    def __init__(self, watchdog: Watchdog, heartbeat: Heartbeat | None) -> None:
        self.watchdog, self.heartbeat = watchdog, heartbeat
        if heartbeat is not None:
            watchdog.on_beat = heartbeat.beat

    def _tell(self, **changes: Any) -> None:
        if self.heartbeat is not None:
            self.heartbeat.beat(**changes)

    def before_step(self, trainer: Training, step: int) -> None:
        """Signature: `Callback.before_step`."""
        self.watchdog.mark("train", step)
        self._tell(phase="train", step=step)

    def after_step(self, trainer: Training, row: Row) -> None:
        """Signature: `Callback.after_step`."""
        self.watchdog.mark()
        self._tell(loss=row["loss"], tokens_per_s=round(row["tokens_per_s"], 1))

    def on_phase(self, trainer: Training, phase: str) -> None:
        """Signature: `Callback.on_phase`."""
        self.watchdog.mark(phase)
        self._tell(phase=phase)

    def on_error(self, trainer: Training, error: BaseException) -> None:
        """Signature: `Callback.on_error`."""
        if isinstance(error, ConfigError):  # the next start is another one
            self._tell(phase="stopped")
            return
        self._tell(phase="failed", reason=mask_text(f"{type(error).__name__}: {error}"[:300]))

    def close(self, trainer: Training) -> None:
        """Signature: `Callback.close`."""
        self.watchdog.close()
        if self.heartbeat is not None:
            self.heartbeat.close()


class Throughput(Callback):
    """Flags a run that has become slower, and the ranks that the others wait for."""

    def __init__(self, window: int, engine: Engine) -> None:
        self.window = window
        self.regression, self.own = Regression(window), OwnTime(engine.world.device)
        finalize = engine.config.finalize_model_grads_func
        assert finalize is not None, "an engine has a function that finishes gradients"
        engine.config.finalize_model_grads_func = self.own.wrap(finalize)
        self._named: list[int] = []
        self._steps = 0

    def before_step(self, trainer: Training, step: int) -> None:
        """Signature: `Callback.before_step`."""
        self.own.begin()

    def after_step(self, trainer: Training, row: Row) -> None:
        """Signature: `Callback.after_step`. Collective once a window."""
        self._steps += 1
        slower = self.regression.note(row["seconds"])
        if self._steps % self.window:
            return
        named = stragglers(self.own.take()) if trainer.world.size > 1 else []
        ranks = [one["rank"] for one in named]
        if ranks != self._named:
            self._named = ranks
            trainer.event("stragglers", ranks=named)
        if slower is not None:
            trainer.event("slower" if slower["times"] > 1.25 else "fast_again", **slower)


class Report(Callback):
    """report.html, when the run ends."""

    def close(self, trainer: Training) -> None:
        """Signature: `Callback.close`. A report that fails costs the report, not the run."""
        if not trainer.world.is_main:
            return
        try:
            write_report(trainer.run_dir)
        except OSError as error:  # a full disk, say
            log.warning("report.html could not be written: %s", error)
        except Exception:
            log.warning("report.html could not be written", exc_info=True)


class Profile(Callback):
    """A torch trace of chosen steps, and on a GPU a snapshot of its memory, in RUN/profile."""

    def __init__(self, steps: list[int], folder: Path) -> None:
        self.steps, self.folder = frozenset(steps), folder
        self._profiler: torch.profiler.profile | None = None

    def before_step(self, trainer: Training, step: int) -> None:
        """Signature: `Callback.before_step`."""
        if step not in self.steps:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if trainer.world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def after_step(self, trainer: Training, row: Row) -> None:
        """Signature: `Callback.after_step`."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"step{row['step']:08d}-rank{trainer.world.rank}"
        profiler.export_chrome_trace(str(self.folder / f"{name}.trace.json.gz"))
        table = profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40)
        (self.folder / f"{name}.txt").write_text(table)
        if trainer.world.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)

    def close(self, trainer: Training) -> None:
        """Signature: `Callback.close`."""
        if self._profiler is not None:  # the step failed
            self._profiler.stop()
            self._profiler = None
