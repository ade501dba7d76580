# SPDX-License-Identifier: Apache-2.0
"""A run from its config to its last checkpoint: the loop, and what it is built of."""

import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fused_ops.errors import ConfigError
from models.gather_bytes import communication_lines
from pretrain.bad_steps import TrainingError
from pretrain.callbacks import Callback, Profile, Record, Report, Throughput, Watch
from pretrain.checkpoint.agree import on_first
from pretrain.checkpoint.io import load_json
from pretrain.checkpoint.layout import STATE
from pretrain.checkpoint.manager import CheckpointManager, Found, Resumed, override_config
from pretrain.checkpoint.state import unwrap
from pretrain.config import CONFIG_FILE, PretrainConfig, save_config
from pretrain.config_file import encode
from pretrain.cuda_graph import StepGraph, leave_default_stream
from pretrain.data.blend import RESOLUTION
from pretrain.data.dataset import open_both
from pretrain.data.loader import BatchOptions, TrainLoader, ValidLoader
from pretrain.data.share import Share, SharedTrainLoader, SharedValidLoader
from pretrain.ema import WeightAverage
from pretrain.engine import Engine, build_engine
from pretrain.environment import (
    git_state,
    peak_memory_gib,
    report_absences,
    write_environment,
)
from pretrain.evaluate import (
    StoppedError,
    any_rank,
    evaluate_sets,
    gathered_parameters,
    unless_stopped,
)
from pretrain.heartbeat import Heartbeat, digest
from pretrain.history import METRICS_FILE, lacks_evaluation
from pretrain.initialize import World, initialize
from pretrain.layout_notes import layout_notes
from pretrain.logs import log_to_file, stop_logging
from pretrain.metrics import MetricsLogger
from pretrain.numerics_monitor import NumericsMonitor
from pretrain.oscillation import left_out
from pretrain.progress import Progress
from pretrain.recovery import Recovery
from pretrain.redact import mask_secrets
from pretrain.signals import StopSignals
from pretrain.step_result import StepResult
from pretrain.train_step import MicroBatch, record_steps, train_step
from pretrain.training import TrainState
from pretrain.watchdog import Watchdog

log = logging.getLogger(__name__)

STOP_FILE = "stop"
"""RUN/stop asks a run to save and stop, as SIGTERM does."""


def _data_state(found: Found | None) -> dict[str, Any] | None:
    """What a checkpoint says about the data; None where the run starts afresh."""
    if found is None or found.parts == "model":
        return None
    state: dict[str, Any] | None = load_json(found.path / STATE)["extra"].get("data")
    return state


class Trainer:
    """One run. `Trainer(config).run()` trains it to the end, or to where a signal stops it.

    Args:
        config: the run.
        callbacks: called in every moment before the built-in ones.
        store: where the processes of this start have met; None: torch's own way.

    Raises (from the constructor):
        ConfigError: what the user can mend: folders, data, settings against a checkpoint's.
    """

    def __init__(
        self, config: PretrainConfig, callbacks: Sequence[Callback] = (), store: Any = None
    ) -> None:
        self.world: World = initialize(
            config.parallel,
            device=config.run.device,
            seed=config.run.seed,
            timeout_minutes=config.run.timeout_minutes,
            deterministic=config.train.deterministic,
            store=store,
        )
        self.run_dir = config.run.path
        self.callbacks: list[Callback] = list(callbacks)
        on_first(self._make_run_folder)
        self.checkpoints = CheckpointManager(config.checkpoint, self.run_dir)
        self._log_file = log_to_file(self.run_dir, self.world.rank)
        self.watchdog = Watchdog(self.world.rank, self.world.size, config.run.hang_seconds)
        try:
            heartbeat: Heartbeat | None = on_first(lambda: self._start_heartbeat(config), False)
            self.callbacks.insert(0, Watch(self.watchdog, heartbeat))
            found = self.checkpoints.find()
            if found is not None:
                config = override_config(config, config.checkpoint.override)
            self.config, self.state = config, TrainState()
            data_state = _data_state(found)
            self._open_data(data_state)
            self.loader.prepare(data_state["consumed_samples"] if data_state else 0)
            if config.train.cuda_graph_impl != "none":
                leave_default_stream()
            self.engine: Engine = build_engine(config, self.world, self.dataset.vocab_size)
            self.watchdog.work = lambda: self.engine.precision_state.micro_batch
            if config.train.cuda_graph_impl != "none":
                record_steps(self.engine)
            self._begin_average()
            if self.engine.oscillation is not None:
                self.checkpoints.paths = self.engine.oscillation.paths
            resumed = self._resume()
            self.recovery = Recovery(self)
            self.step_over_samples()
            self._prepare_callbacks(resumed)
        except BaseException as error:
            self.each("on_error", error)
            self.checkpoints.abort()
            self.watchdog.close()
            stop_logging(self._log_file)
            raise

    def run(self) -> TrainState:
        """Trains; saves and evaluates at the end; closes everything in every case."""
        try:
            with StopSignals(self.run_dir / STOP_FILE if self.world.is_main else None) as signals:
                stopped = self._train(signals)
                if not stopped and self.state.step == self.config.train.steps:
                    stopped = not self._evaluate(signals)
                if stopped or self.config.checkpoint.at_end:
                    self._save()
                self.each("on_phase", "end")
                self.checkpoints.wait()
            self._tell_consumed()
            self.each("on_phase", "stopped" if stopped else "done")
            if stopped:
                self.event("stop", signal=signals.received.name if signals.received else "asked")
        except BaseException as error:
            self.each("on_error", error)
            self.checkpoints.abort()
            raise
        finally:
            self.each("close")
            self.loader.close()
            stop_logging(self._log_file)
        self.checkpoints.close()
        return self.state

    def _train(self, signals: StopSignals) -> bool:
        """The loop. Returns whether it was stopped before its end."""
        config, state, engine = self.config.train, self.state, self.engine
        if self._evaluation_is_missing() and self._stopped_evaluating(signals):
            return True
        while state.step < config.steps:
            started, step = time.perf_counter(), state.step + 1
            self._switch_precision()
            engine.precision_state.set_step(step)
            self.each("before_step", step)
            micro_batches = self.loader.step(state.consumed_samples)
            samples = self.loader.step_samples(state.consumed_samples)
            result = train_step(engine, micro_batches, lambda: signals.asked, self.recovery.refuses)
            tokens = len(samples) * engine.seq_length
            state.advance(samples[-1] + 1, tokens, result.updated)
            if result.updated and self.checkpoints.average is not None:
                self.checkpoints.average.update()
            if engine.oscillation is not None and (told := engine.oscillation.take_report()):
                self.event("oscillation_reset", **told)
            self.each("after_compute", step)
            self.each("after_step", self._row(result, tokens, time.perf_counter() - started))
            self.recovery.after_step(result, micro_batches, samples)
            self.checkpoints.poll()
            state = self.state  # a rollback brings another
            if state.step != step:
                continue
            if result.stop and state.step < config.steps:
                return True
            if self._evaluation_is_due() and self._stopped_evaluating(signals):
                return True
            if self.checkpoints.due(step):
                self._save()
        return False

    # ---- what a step leaves

    def _row(self, result: StepResult, tokens: int, seconds: float) -> dict[str, Any]:
        row = {
            "step": self.state.step,
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens": self.state.consumed_tokens,
            "samples": self.state.consumed_samples,
            "tokens_per_s": tokens / seconds,
            "seconds": seconds,
            "skipped": int(not result.updated),
            "memory_gib": peak_memory_gib(self.world.device),
        }
        if self.config.train.dtype == "fp16":
            row["loss_scale"] = float(self.engine.optimizer.get_loss_scale())
        return row

    def load_newest(self) -> int:
        """Back to the newest whole checkpoint of this run; its step.

        Raises TrainingError, before anything is changed, where there is none to go back to.
        """
        engine, found = self.engine, self.checkpoints.newest()
        if found is None:
            raise TrainingError(
                "there is no checkpoint to roll back to; lower checkpoint.interval, or set "
                "train.bad_steps.policy=skip"
            )
        state, first = _data_state(found), self.dataset.first_sample
        if state is not None and state["consumed_samples"] < first:
            raise TrainingError(
                f"the newest whole checkpoint is {found.path.name}, of the data before it changed "
                f"at sample {first}; start the run again: it goes on from there, with the data "
                "that it has now"
            )
        resumed = self.checkpoints.roll_back(
            found,
            engine.chunks,
            engine.optimizer,
            engine.scheduler,
            resolved_config=mask_secrets(encode(self.config)),
        )
        self._take_over(resumed)
        return self.state.step

    def step_over_samples(self) -> None:
        """Tells the loader which samples to leave out: the user's, and those of rollbacks."""
        left_out = [(first, last) for first, last in self.state.skip]
        self.loader.leave_out([*self.config.data.skip_samples, *left_out])

    def _switch_precision(self) -> None:
        for change in self.engine.plan.update(self.state.consumed_samples):
            self.event("precision_switch", change=change)

    # ---- evaluation and checkpoints

    def _evaluation_is_due(self) -> bool:
        """Whether the interval asks for one at this step; the one at the end comes by itself."""
        step, train = self.state.step, self.config.train
        return train.eval_interval > 0 and step % train.eval_interval == 0 and step < train.steps

    def _evaluation_is_missing(self) -> bool:
        """Whether a run that continues was stopped before the evaluation of its step."""
        path, step = self.run_dir / METRICS_FILE, self.state.step
        return self._evaluation_is_due() and bool(on_first(lambda: lacks_evaluation(path, step)))

    def _stopped_evaluating(self, signals: StopSignals) -> bool:
        """Evaluates. Returns whether a signal to stop came by its end, on any rank."""
        return not self._evaluate(signals) or any_rank(self.engine, signals.asked)

    def _evaluate(self, signals: StopSignals) -> bool:
        """Returns False where a signal to stop came first: then it leaves no row."""
        train = self.config.train

        def batches(loader: SharedValidLoader) -> Iterator[Sequence[MicroBatch]]:
            found = loader.batches(train.eval_batches)
            return unless_stopped(self.engine, found, lambda: signals.asked)

        if not self.validation:
            return True
        self.each("on_phase", "evaluate")
        self.engine.precision_state.set_step(self.state.step)
        sets = {name: partial(batches, loader) for name, loader in self.validation.items()}
        try:
            losses = evaluate_sets(self.engine, sets, train.eval_also_bf16)
        except StoppedError:
            return False
        row = {"step": self.state.step, "tokens": self.state.consumed_tokens, **losses}
        self.each("on_eval", row)
        return True

    def _save(self) -> None:
        state, engine = self.state, self.engine
        if state.step == 0:
            return
        self.each("on_phase", "save")
        with gathered_parameters(engine):
            self.checkpoints.save(
                state.step,
                engine.chunks,
                engine.optimizer,
                engine.scheduler,
                extra={
                    "train_state": asdict(state),
                    "precision": engine.plan.state_dict(),
                    "oscillation_reset": engine.oscillation and engine.oscillation.state_dict(),
                    "vocab_size": self.config.model.vocab_size or self.dataset.vocab_size,
                    "data": self.dataset.state_dict(state.consumed_samples),
                },
                resolved_config=mask_secrets(encode(self.config)),
            )

    def _resume(self) -> int | None:
        """The step that the run continues from, or None."""
        engine = self.engine
        # With another sequence than the checkpoint's, and data.on_change=continue, the dataset has
        # been opened as its continuation.
        if not self.dataset.changes:
            self.checkpoints.fingerprints = self._fingerprints()
        resumed = self.checkpoints.resume(
            engine.chunks,
            engine.optimizer,
            engine.scheduler,
            resolved_config=mask_secrets(encode(self.config)),
        )
        self.checkpoints.fingerprints = self._fingerprints()
        if resumed is None:
            return None
        self._take_over(resumed)
        if self.world.is_main:
            for note in [*resumed.notes, *self.dataset.changes]:
                log.warning("%s", note)
        return self.state.step or None

    def _fingerprints(self) -> dict[str, str]:
        """What a checkpoint and a start that continues it must agree on, besides settings."""
        found, data = {"data": self.dataset.fingerprint}, self.config.data
        if data.isolate_documents or data.reset_position_ids:
            found["division into documents"] = self.dataset.division()
        return found

    def _take_over(self, resumed: Resumed) -> None:
        self.engine.precision_state.weights_changed()
        if isinstance(self.engine.graph, StepGraph):  # delayed scales that it knows may be gone
            self.engine.graph.forget()
        if resumed.extra:
            self.state = TrainState(**resumed.extra["train_state"])
            self.engine.plan.load_state_dict(resumed.extra["precision"])
            stored, oscillation = resumed.extra.get("oscillation_reset"), self.engine.oscillation
            resumed.notes.extend(
                left_out(stored) if oscillation is None else oscillation.load_state_dict(stored)
            )

    # ---- set-up

    def _start_heartbeat(self, config: PretrainConfig) -> Heartbeat:
        values = {"config": encode(config), "code": git_state(Path(__file__).parent.parent)}
        return Heartbeat(self.run_dir, digest(values), config.run.max_failures)

    def _begin_average(self) -> None:
        """A moving average of the weights, where the run asks for one."""
        decay = self.config.train.ema_decay
        if decay > 0:
            models = [unwrap(chunk) for chunk in self.engine.chunks]
            self.checkpoints.average = WeightAverage(models, decay)

    def _make_run_folder(self) -> None:
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            (self.run_dir / STOP_FILE).unlink(missing_ok=True)  # of an earlier start
            probe = self.run_dir / f".write-{os.getpid()}"
            probe.write_text("x")
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"the run folder must be writable; {self.run_dir} is not "
                f"({(error.strerror or str(error)).lower()}); set run.dir to a folder that is"
            ) from error

    def _open_data(self, state: dict[str, Any] | None) -> None:
        config, world = self.config, self.world
        sizes: dict[str, Any] = {
            "micro_batch_size": config.train.micro_batch_size,
            "dp_rank": world.data_parallel_rank,
            "dp_size": world.data_parallel_size,
            "options": BatchOptions.of(config.data),
        }
        model = config.model
        self.dataset, sets = open_both(
            config.data, model.seq_length, config.run.seed, model.vocab_size, state
        )
        loader = TrainLoader(
            self.dataset,
            config.train.batch_sizes,
            prefetch=config.data.prefetch,
            ahead_samples=config.data.cache.ahead_samples,
            **sizes,
        )
        shape = (config.train.micro_batch_size, model.seq_length)
        share = Share(world.groups, world.device, *shape)
        self.loader = SharedTrainLoader(loader, share, world.device)
        self._tell_blend()
        batch = config.train.global_batch_size
        self.validation = {
            name: SharedValidLoader(ValidLoader(data, batch, **sizes), share)
            for name, data in sets.items()
        }
        held = {name: data.fingerprint for name, data in sets.items()}
        self.contents = {  # as `data` has them: one folder, or by name
            "train": [s.fingerprint for each in self.dataset.segments for s in each.sources],
            "valid": held.get("", held),
        }

    def _tell_blend(self) -> None:
        """The shares of a blend as they were resolved."""
        if self.world.is_main and len(self.dataset.shards) > 1:
            for shards, units in zip(self.dataset.shards, self.dataset.weights):
                share = f"{units / RESOLUTION:.6f} ({units}/{RESOLUTION})"
                log.info("blend: %s of the samples from %s", share, shards.directory)

    def _tell_layout(self) -> None:
        """What moves as codes, and what does not; and what this layout changes."""
        for note in layout_notes(self.config, self.world.size):
            log.warning("%s", note)
        if self.config.precision.communicate == "packed":
            size = self.config.train.micro_batch_size
            for line in communication_lines(self.engine.plan, size):
                log.info("%s", line)

    def _tell_consumed(self) -> None:
        """What was read of each source of a blend."""
        if self.world.is_main and len(self.dataset.shards) > 1:
            for row in self.dataset.consumed(self.state.consumed_samples):
                said = "read: {samples} samples, {epochs:.4f} epochs of {path}".format(**row)
                log.info("%s", said)

    def _prepare_callbacks(self, resumed_step: int | None) -> None:
        config, main, run_dir = self.config, self.world.is_main, self.run_dir
        if main:
            save_config(config, run_dir / CONFIG_FILE)
            table = json.dumps(self.engine.plan.table(), indent=1) + "\n"
            (run_dir / "precision.json").write_text(table)
            facts = {"seed": config.run.seed, "device": str(self.world.device)}
            write_environment(run_dir, {**facts, "data": self.contents})
            report_absences()
            self._tell_layout()
        metrics = MetricsLogger(
            run_dir, config.log, encode(config), resumed_step=resumed_step, enabled=main
        )
        progress = Progress(
            config.train.steps,
            first_step=self.state.step,
            style=config.log.progress,
            interval=config.log.interval,
            enabled=main,
        )
        self.callbacks.append(Record(metrics, progress))
        if config.log.throughput_window:
            self.callbacks.append(Throughput(config.log.throughput_window, self.engine))
        if config.monitor.interval:
            show = metrics.show if main else None
            self.callbacks.append(
                NumericsMonitor(config.monitor, self.engine, run_dir, resumed_step, show)
            )
        if config.train.profile_steps:
            self.callbacks.append(Profile(config.train.profile_steps, run_dir / "profile"))
        if config.log.report:
            self.callbacks.append(Report())
        if resumed_step is not None:
            self.event("resume")

    def each(self, moment: str, *details: Any) -> None:
        """Calls a moment of every callback."""
        for callback in self.callbacks:
            getattr(callback, moment)(self, *details)

    def event(self, kind: str, **details: Any) -> None:
        """Something happened at the current step."""
        self.each("on_event", kind, self.state.step, details)
