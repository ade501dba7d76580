# SPDX-License-Identifier: Apache-2.0
"""Where a run's numbers go: metrics.jsonl always; wandb and TensorBoard where asked for.

Only metrics.jsonl is the record. The other sinks work in their own thread, behind a bounded
queue: an outage there costs rows there, never time or the run.
"""

import importlib.util
import logging
import math
import os
import queue
import re
import socket
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from fused_ops.errors import ConfigError
from pretrain.history import METRICS_FILE, JsonlSink
from pretrain.redact import mask_secrets

log = logging.getLogger(__name__)

WANDB_ID_FILE = "wandb_id"
_QUEUE_ROWS = 4096
_INIT_SECONDS = 15
_CLOSE_SECONDS = 25.0
_NAME = re.compile(r"[^A-Za-z0-9_./-]")


@dataclass(kw_only=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class LogConfig:
    """What a run shows and records beside metrics.jsonl."""

    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """Progress on the terminal: a bar, plain lines, nothing; auto is a bar on a terminal."""

    interval: int = Field(default=10, ge=1)
    """Steps between two plain progress lines."""

    report: bool = True
    """Write report.html when the run ends."""

    throughput_window: int = Field(default=50, ge=0)
    """Steps over which the step time is compared with the run's best, and ranks with one another:
    events `slower` and `stragglers`; 0: never."""

    tensorboard: bool = False
    """Also write TensorBoard event files to RUN/tensorboard."""

    wandb: bool = False
    """Also log to Weights & Biases."""

    wandb_project: str = "nibble"
    """Project of the wandb run."""

    wandb_entity: str | None = None
    """Team or user that owns the project; None is the account's default."""

    wandb_mode: Literal["auto", "online", "offline"] = "auto"
    """auto: online with an API key and a network, otherwise offline (send it later: wandb sync)."""


def log_config_problems(config: LogConfig) -> list[str]:
    """One line for each sink that was asked for and whose package is not installed."""
    asked = {"wandb": config.wandb, "tensorboard": config.tensorboard}
    return [
        f"log.{name}=true needs the package {name}, which is not installed; "
        f"`pip install {name}`, or set log.{name}=false"
        for name, wanted in asked.items()
        if wanted and importlib.util.find_spec(name) is None
    ]


class _Sink(Protocol):
    name: str

    def start(self) -> None: ...
    def write(self, row: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class MetricsLogger:
    """Writes each row to every sink. Build it on one rank: the last stage's first.

    Args:
        run_dir: the run's folder, `runs/NAME`.
        config: the `log` section.
        run_config: the resolved configuration, sent to wandb with its secrets masked.
        resumed_step: step of the checkpoint that the run continues from; None for a new history.
        enabled: False makes every method do nothing (other ranks).

    Raises:
        ConfigError: a sink's package is missing, or the folder cannot be written.
    """

    def __init__(
        self,
        run_dir: Path | str,
        config: LogConfig,
        run_config: Mapping[str, Any] | None = None,
        resumed_step: int | None = None,
        enabled: bool = True,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._jsonl: JsonlSink | None = None
        self._others: list[_Background] = []
        if not enabled:
            return
        problems = log_config_problems(config)
        if problems:
            raise ConfigError(problems)
        self._jsonl = JsonlSink(self.run_dir / METRICS_FILE, resumed_step)
        if config.tensorboard:
            self._others.append(_Background(_TensorBoard(self.run_dir, resumed_step)))
        if config.wandb:
            self._others.append(_Background(_Wandb(self.run_dir, config, run_config or {})))

    def log(self, row: Mapping[str, Any]) -> None:
        """One row of numbers; `row["step"]` is the number of completed steps."""
        assert type(row.get("step")) is int, f"a row needs an int step; got {row.get('step')!r}"
        if self._jsonl is not None:
            self._jsonl.write(row)
        for sink in self._others:
            sink.put(row)

    def show(self, row: Mapping[str, Any]) -> None:
        """A row for the other sinks only: numbers that have a file of their own."""
        for sink in self._others:
            sink.put(row)

    def event(self, kind: str, step: int, **details: Any) -> None:
        """One row for something that happened: resume, skip, precision_switch, save, stop."""
        if self._jsonl is not None:
            self._jsonl.write({"step": step, "event": kind, **details})

    def rewind(self, step: int) -> None:
        """Makes metrics.jsonl the history up to and including `step`; the other sinks keep all."""
        if self._jsonl is not None:
            self._jsonl.rewind(step)

    @property
    def lost_rows(self) -> int:
        """Rows that metrics.jsonl could not take."""
        return 0 if self._jsonl is None else self._jsonl.lost_rows

    def close(self) -> None:
        """Closes every sink; waits a bounded time for those that work in the background."""
        if self._jsonl is not None:
            self._jsonl.close()
        for sink in self._others:
            sink.close()
        self._others = []


class _Background:
    """Runs a sink in a thread of its own; failures and a full queue cost rows, not time."""

    def __init__(self, sink: _Sink) -> None:
        self.sink = sink
        self.lost_rows = 0
        self._rows: queue.Queue[Mapping[str, Any] | None] = queue.Queue(_QUEUE_ROWS)
        self._dead = False
        self._thread = threading.Thread(target=self._work, name=f"log-{sink.name}", daemon=True)
        self._thread.start()

    def put(self, row: Mapping[str, Any]) -> None:
        try:
            if self._dead:
                raise queue.Full
            self._rows.put_nowait(dict(row))
        except queue.Full:
            self.lost_rows += 1

    def close(self) -> None:
        try:
            self._rows.put(None, timeout=_CLOSE_SECONDS if self._thread.is_alive() else 0.0)
        except queue.Full:
            pass
        else:
            self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("%s did not finish in %.0f s; left behind", self.sink.name, _CLOSE_SECONDS)
        if self.lost_rows:
            log.warning("%s misses %d rows; see metrics.jsonl", self.sink.name, self.lost_rows)

    def _work(self) -> None:
        try:
            self.sink.start()
            while (row := self._rows.get()) is not None:
                self.sink.write(row)
            self.sink.close()
        except BaseException as error:  # a library's SystemExit must not pass either
            self._dead = True
            self.lost_rows += self._rows.qsize()
            log.warning(
                "%s failed (%s: %s); training goes on without it, metrics.jsonl has every row",
                self.sink.name,
                type(error).__name__,
                str(error).split("\n")[0],
            )


class _TensorBoard:
    name = "tensorboard"

    def __init__(self, run_dir: Path, resumed_step: int | None) -> None:
        self._folder = run_dir / "tensorboard"
        self._purge = None if resumed_step is None else resumed_step + 1

    def start(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._purge)

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    name = "wandb"

    def __init__(self, run_dir: Path, config: LogConfig, run_config: Mapping[str, Any]) -> None:
        self._run_dir = run_dir
        self._config = config
        self._run_config = mask_secrets(dict(run_config))

    def start(self) -> None:
        mode: str = self._config.wandb_mode
        wanted = _reachable_mode() if mode == "auto" else mode
        try:
            self._run = self._init(wanted)
        except Exception as error:
            if mode != "auto" or wanted == "offline":
                raise
            log.warning("wandb cannot be reached (%s); logging offline", type(error).__name__)
            self._run = self._init("offline")
        # wandb's own counter never goes back, so a resumed run would lose its repeated steps.
        self._run.define_metric("*", step_metric="step")

    def _init(self, mode: Any) -> Any:
        import wandb

        return wandb.init(
            project=self._config.wandb_project,
            entity=self._config.wandb_entity,
            name=self._run_dir.name,
            id=wandb_run_id(self._run_dir),
            resume="allow",
            dir=str(self._run_dir),
            config=self._run_config,
            mode=mode,
            # The command line may hold secrets; environment.json has it with those masked.
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=_INIT_SECONDS, x_disable_meta=True
            ),
        )

    def write(self, row: Mapping[str, Any]) -> None:
        self._run.log({**_numbers(row), "step": row["step"]})

    def close(self) -> None:
        self._run.finish()


def wandb_run_id(run_dir: Path) -> str:
    """The run's id, made once and kept in the run folder, so that a resumed run continues it."""
    path = run_dir / WANDB_ID_FILE
    kept = path.read_text().strip() if path.exists() else ""
    if kept:
        return kept
    made = uuid.uuid4().hex[:12]
    path.write_text(made + "\n")
    return made


def _reachable_mode() -> str:
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    netrc = Path.home() / ".netrc"
    has_key = "WANDB_API_KEY" in os.environ or (netrc.exists() and "wandb" in netrc.read_text())
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    name, _, port = host.partition(":")
    try:
        if has_key:
            socket.create_connection((name, int(port or 443)), timeout=3).close()
    except OSError:
        has_key = False
    return "online" if has_key else "offline"


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """The row's finite numbers under names that every sink takes; `step` is the axis, not one."""
    numbers = {}
    for name, value in row.items():
        value = value.item() if hasattr(value, "item") else value
        if name != "step" and isinstance(value, int | float) and math.isfinite(value):
            # A leading underscore is wandb's own name space (_step, _runtime).
            legal = _NAME.sub("_", name)
            numbers[f"metric{legal}" if legal.startswith("_") else legal] = float(value)
    return numbers
