# SPDX-License-Identifier: Apache-2.0
"""What happens around the steps of a run, in named moments."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pretrain.metrics import MetricsLogger
from pretrain.progress import Progress
from pretrain.report.page import write_report

if TYPE_CHECKING:
    from pretrain.trainer import Trainer

log = logging.getLogger(__name__)
Row = Mapping[str, Any]


class Callback:
    """Moments of a run; every one is called on every rank, in the order of the callbacks."""

    def before_step(self, trainer: "Trainer", step: int) -> None:
        """Before step `step` computes anything."""

    def after_step(self, trainer: "Trainer", row: Row) -> None:
        """After a step: its row of metrics."""

    def on_eval(self, trainer: "Trainer", row: Row) -> None:
        """After an evaluation: its row of metrics."""

    def on_event(self, trainer: "Trainer", kind: str, step: int, details: Row) -> None:
        """Something that is neither: resume, save, skip, precision_switch, stop."""

    def on_rollback(self, trainer: "Trainer", step: int) -> None:
        """The run went back to the checkpoint of `step`; what came after it will come again."""

    def on_error(self, trainer: "Trainer", error: BaseException) -> None:
        """The run fails with `error`; close follows."""

    def close(self, trainer: "Trainer") -> None:
        """The end of the run, however it came."""


class Record(Callback):
    """Rows into metrics.jsonl and the other sinks, progress onto the terminal."""

    def __init__(self, metrics: MetricsLogger, progress: Progress) -> None:
        self.metrics, self.progress = metrics, progress

    def after_step(self, trainer: "Trainer", row: Row) -> None:
        """Signature: `Callback.after_step`."""
        self.metrics.log(row)
        self.progress.update(row)

    def on_eval(self, trainer: "Trainer", row: Row) -> None:
        """Signature: `Callback.on_eval`."""
        self.metrics.log(row)
        values = "  ".join(f"{k} {v:.4f}" for k, v in row.items() if k.startswith("val_loss"))
        self.progress.message(f"step {row['step']}: {values}")

    def on_event(self, trainer: "Trainer", kind: str, step: int, details: Row) -> None:
        """Signature: `Callback.on_event`."""
        self.metrics.event(kind, step, **details)
        said = "  ".join(f"{name} {value}" for name, value in details.items())
        self.progress.message(f"step {step}: {kind}  {said}".rstrip())

    def on_rollback(self, trainer: "Trainer", step: int) -> None:
        """Signature: `Callback.on_rollback`."""
        self.metrics.rewind(step)

    def close(self, trainer: "Trainer") -> None:
        """Signature: `Callback.close`."""
        self.progress.close()
        self.metrics.close()


class Report(Callback):
    """report.html, when the run ends."""

    def close(self, trainer: "Trainer") -> None:
        """Signature: `Callback.close`. A report that fails costs the report, not the run."""
        if not trainer.world.is_main:
            return
        try:
            write_report(trainer.run_dir)
        except Exception:
            log.warning("report.html could not be written", exc_info=True)


class Profile(Callback):
    """A torch trace of chosen steps, and on a GPU a snapshot of its memory, in RUN/profile."""

    def __init__(self, steps: list[int], folder: Path) -> None:
        self.steps, self.folder = frozenset(steps), folder
        self._profiler: torch.profiler.profile | None = None

    def before_step(self, trainer: "Trainer", step: int) -> None:
        """Signature: `Callback.before_step`."""
        if step not in self.steps:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if trainer.world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        self._profiler = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def after_step(self, trainer: "Trainer", row: Row) -> None:
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

    def close(self, trainer: "Trainer") -> None:
        """Signature: `Callback.close`."""
        if self._profiler is not None:  # the step failed
            self._profiler.stop()
            self._profiler = None
