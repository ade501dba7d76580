# SPDX-License-Identifier: Apache-2.0
"""Places runs on devices, several beside each other, until all are finished or time is over.

Each run is its own process. Stopping asks them to save and stop, as SIGTERM does to a run; called
again, the same study goes on. A process whose study dies is told to stop by the kernel.
"""

import ctypes
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from pretrain.study.plan import StudyRun, is_finished, write_run_file

log = logging.getLogger(__name__)

HUNG = 75
"""Status of a run that wants to be started again."""
_MOST_STARTS = 3
_LIVE = re.compile(r"belongs to a live run (\([^)]*\)).*?(; if it is dead, .*)?$", re.MULTILINE)
"""As `pretrain.checkpoint.lock` says it: whose run, and what to do where that cannot be known."""
_WAIT = 5.0
"""Seconds until a run is tried again whose folder another one holds."""
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Places:
    """Where runs may go.

    gpus: numbers of devices; empty: the CPU. per_device: runs beside each other on each.
    """

    gpus: tuple[int, ...] = ()
    per_device: int = 1

    @property
    def slots(self) -> list[int | None]:
        """A device for each run that may go at once; devices take turns."""
        devices: list[int | None] = list(self.gpus) or [None]
        return devices * self.per_device


@dataclass
class Outcome:
    """What a call of `run_all` came to, by names of runs."""

    finished: list[str] = field(default_factory=list)
    """In this call."""
    failed: dict[str, str] = field(default_factory=dict)
    """And the last lines of what they said."""
    stopped: list[str] = field(default_factory=list)
    """Saved, to be continued."""
    not_started: list[str] = field(default_factory=list)


@dataclass
class _Process:
    run: StudyRun
    slot: int
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """Where in the log what it says begins."""

    def last_lines(self, count: int = 6) -> str:
        """Of what it said."""
        text = self.log.read_bytes()[self.log_start :].decode(errors="replace")
        return "\n".join(text.splitlines()[-count:])

    @property
    def held_by(self) -> str | None:
        """Whose the run's folder is, where the process ended because of that."""
        found = _LIVE.search(self.last_lines()) if self.process.returncode == 2 else None
        return None if found is None else "".join(filter(None, found.groups()))


class _Stop:
    """Whether the study is asked to stop: by a signal, or because its time is over."""

    def __init__(self, minutes: float | None) -> None:
        self.end = None if minutes is None else time.monotonic() + 60.0 * minutes
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Stop":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    @property
    def now(self) -> bool:
        """Whether to stop now."""
        return bool(self.signal) or (self.end is not None and time.monotonic() >= self.end)


def run_all(
    runs: Sequence[StudyRun],
    places: Places,
    folder: Path,
    *,
    minutes: float | None = None,
    grace_seconds: float = 90.0,
    tell: Callable[[str], None] = print,
    after: Callable[[StudyRun], None] = lambda run: None,
) -> Outcome:
    """Runs what is unfinished, in order.

    Args:
        runs: of the study.
        places: devices.
        folder: run files and what the processes say go to its `files` and `logs`.
        minutes: stop everything after this time; None: go on to the end.
        grace_seconds: how long a run may take to save when it is stopped; then it is killed.
        tell: takes a line for the user.
        after: called when a run has finished.
    """
    outcome = Outcome()
    waiting = [run for run in runs if not is_finished(run)]
    slots, active = places.slots, list[_Process]()
    starts: dict[str, int] = {}
    not_before: dict[str, float] = {}
    held = set[str]()
    with _Stop(minutes) as stop:
        while (waiting or active) and not stop.now:
            for one in [each for each in active if each.process.poll() is not None]:
                active.remove(one)
                again = _end(one, starts, held, outcome, tell, after)
                if again is not None:
                    not_before[one.run.name] = time.monotonic() + again
                    waiting.insert(0, one.run)
            free = [i for i in range(len(slots)) if i not in {each.slot for each in active}]
            now = time.monotonic()
            ready = [run for run in waiting if not_before.get(run.name, 0.0) <= now]
            for slot, run in zip(free, ready):
                waiting.remove(run)
                starts[run.name] = starts.get(run.name, 0) + 1
                active.append(_start(run, slot, slots[slot], folder))
                if run.name not in held:
                    tell(f"{run.name}: started on {_device(slots[slot])}")
            time.sleep(0.2)
        _stop_all(active, grace_seconds, outcome, tell, after)
    outcome.not_started = [run.name for run in waiting]
    return outcome


def _device(gpu: int | None) -> str:
    return "the CPU" if gpu is None else f"GPU {gpu}"


def _start(run: StudyRun, slot: int, gpu: int | None, folder: Path) -> _Process:
    file = write_run_file(run, folder / "files")
    path = folder / "logs" / f"{run.name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "" if gpu is None else _visible(gpu)}
    env.setdefault("OMP_NUM_THREADS", "1")
    words = [sys.executable, "-m", "pretrain", str(file.resolve()), "log.progress=none"]
    words.append(f"run.device={'cpu' if gpu is None else 'cuda'}")
    with path.open("ab") as out:
        log_start = out.tell()
        process = subprocess.Popen(
            words,
            cwd=_ROOT,
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the study, which asks its runs to stop
            preexec_fn=_die_with_parent,
        )
    return _Process(run, slot, process, path, log_start)


def _visible(gpu: int) -> str:
    """The number of a device, among those that the study itself may see."""
    seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return seen[gpu] if gpu < len(seen) else str(gpu)


def _die_with_parent() -> None:
    """In the child: SIGTERM when the study dies (Linux: prctl, PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _end(
    one: _Process,
    starts: dict[str, int],
    held: set[str],
    outcome: Outcome,
    tell: Callable[[str], None],
    after: Callable[[StudyRun], None],
) -> float | None:
    """Notes how a process ended; seconds after which to start it again, or None.

    held: names of runs that have said whose their folder is.
    """
    status, name = one.process.returncode, one.run.name
    if status == 0 and is_finished(one.run):
        outcome.finished.append(name)
        tell(f"{name}: finished")
        after(one.run)
        return None
    if holder := one.held_by:  # perhaps of a study that was cut: it is saving
        starts[name] -= 1
        if name not in held:
            held.add(name)
            tell(
                f"{name}: its folder belongs to a live run {holder}; it waits for that to end, "
                f"and is tried again every {_WAIT:g} s: stop that run if nobody needs it"
            )
        return _WAIT
    said = one.last_lines()
    if status in (0, HUNG) and starts[name] < _MOST_STARTS:
        tell(f"{name}: ended with status {status} before its end; started again")
        return 0.0
    outcome.failed[name] = said
    tell(f"{name}: failed with status {status}\n{said}")
    return None


def _stop_all(
    active: list[_Process],
    grace_seconds: float,
    outcome: Outcome,
    tell: Callable[[str], None],
    after: Callable[[StudyRun], None],
) -> None:
    for one in active:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + grace_seconds
    for one in active:
        try:
            one.process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
            tell(f"{one.run.name}: did not save within {grace_seconds:.0f} s and was killed")
        if is_finished(one.run):
            outcome.finished.append(one.run.name)
            after(one.run)
        elif one.process.returncode in (0, -signal.SIGKILL, -signal.SIGTERM) or one.held_by:
            outcome.stopped.append(one.run.name)
        else:
            outcome.failed[one.run.name] = one.last_lines()
