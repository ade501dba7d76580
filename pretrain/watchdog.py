# SPDX-License-Identifier: Apache-2.0
"""Finds the rank that hangs: not those that wait for it.

A thread of each rank tells two others what the rank does, once a beat: a program beside it
(`guardian.py`), which speaks when the rank's interpreter does not run, and a table in the store
where the ranks met. A rank that has made no progress for `hang_seconds` looks there. A rank whose
row does not change any more is stopped or gone; one whose row changes, but which is in no
collective, hangs by itself; the others wait. Every rank then says who it was, and exits with
`EXIT_RESTART`, so that the launcher starts the run again.

Progress is a new step, phase or micro-batch, or a new collective. Which collective that was is
asked of PyTorch's flight recorder, and only when nothing else has moved since the last beat.
"""

import datetime
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain.guardian import describe

log = logging.getLogger(__name__)

EXIT_RESTART = 75
"""Nothing is wrong with the run itself: start it again."""

# Phases in which a long silence is normal: building, compiling, writing.
_PATIENCE = {"start": 3.0, "save": 3.0, "evaluate": 2.0, "end": 3.0}
_STORE_SECONDS = 10.0
_FRAMES = 14


class Watchdog:
    """Watches this process and its peers. `mark` it as things go on; `close` it at the end.

    Args:
        rank, size: of this process among the run's.
        hang_seconds: time without progress that makes a rank hang; 0 watches nothing.
        on_beat: called once a beat in the watchdog's thread.

    Attributes:
        work: something that changes while the main thread computes, such as the number of the
            micro-batch; asked in the watchdog's thread.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        hang_seconds: float,
        on_beat: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.hang_seconds = rank, size, hang_seconds
        self.phase, self.step = "start", 0
        self.on_beat = on_beat
        self.work: Callable[[], object] = lambda: None
        self._marks = 0
        self._main = threading.main_thread().ident
        self._last: tuple[Any, ...] = ()
        self._moved = time.monotonic()
        self._collective: str | None = None
        self._waiting = False
        self._closed = threading.Event()
        self._beats = 0
        self._store = _table() if hang_seconds and size > 1 else None
        self._guardian = _guardian() if hang_seconds else None
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)
        self._thread.start()

    @property
    def beat_seconds(self) -> float:
        """Time between two beats."""
        return min(10.0, max(0.2, self.hang_seconds / 20.0)) if self.hang_seconds else 5.0

    @property
    def limit(self) -> float:
        """Time without progress that is too long now."""
        return self.hang_seconds * _PATIENCE.get(self.phase, 1.0)

    def mark(self, phase: str | None = None, step: int | None = None) -> None:
        """The main thread has come further."""
        self._marks += 1
        self.phase = phase or self.phase
        self.step = self.step if step is None else step

    def close(self) -> None:
        """Ends the thread and the program beside it."""
        self._closed.set()
        self._thread.join(timeout=5.0)
        if self._guardian is not None:
            assert self._guardian.stdin is not None, "it was started with a pipe"
            self._guardian.stdin.close()
            self._guardian.wait(timeout=10)
            self._guardian = None

    def _work(self) -> None:
        while not self._closed.wait(self.beat_seconds):
            try:
                self._beat()
            except Exception:
                log.debug("a beat of the watchdog failed", exc_info=True)

    def _beat(self) -> None:
        self._beats += 1
        now, marks = time.monotonic(), (self._marks, self.phase, self.work())
        if marks != self._last[:3]:
            self._last, self._moved = (*marks, None), now
        else:  # nothing but a collective can have moved
            number, self._collective, self._waiting = last_collective()
            if number != self._last[3]:
                self._last, self._moved = (*marks, number), now
        self._tell()
        self.on_beat()
        if self.hang_seconds and now - self._moved > self.limit and not self._closed.is_set():
            self._accuse(now - self._moved)

    def _row(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "step": self.step,
            "phase": self.phase,
            "collective": self._collective,
            "waiting": self._waiting,
            "stack": stack_of(self._main),
            "limit": self.limit,
            "beats": self._beats,
            "still": round(time.monotonic() - self._moved, 1),
        }

    def _tell(self) -> None:
        row = json.dumps(self._row())
        if self._guardian is not None and self._guardian.stdin is not None:
            try:
                os.write(self._guardian.stdin.fileno(), row.encode() + b"\n")
            except OSError:
                self._guardian = None
        if self._store is not None:
            try:
                self._store.set(str(self.rank), row)
            except (RuntimeError, dist.DistError):
                log.debug("the watchdog's table cannot be written", exc_info=True)

    def _accuse(self, seconds: float) -> None:
        """Says which rank hangs, and exits."""
        mine = self._row()
        try:
            text = self._verdict(mine, seconds)
        except (RuntimeError, dist.DistError, ValueError) as error:
            text = describe(
                mine,
                seconds,
                "the other ranks cannot be asked (the network is cut, or the machine of rank 0 is "
                f"gone: {str(error).splitlines()[0][:120]})",
            )
        if self._closed.is_set() or time.monotonic() - self._moved < seconds:
            return  # it went on while this was found out
        _say(text + f"watchdog: exiting with status {EXIT_RESTART}: start the run again\n")
        os._exit(EXIT_RESTART)

    def _verdict(self, mine: dict[str, Any], seconds: float) -> str:
        if self._store is None:
            return describe(mine, seconds, "it does not go on")
        if self._store.check(["verdict"]):
            return self._store.get("verdict").decode()
        former = self._table()
        end = time.monotonic() + 3.0 * self.beat_seconds + 0.5
        while time.monotonic() < end:  # this rank's own row must go on changing for the others
            time.sleep(self.beat_seconds)
            self._beats += 1
            self._tell()
        rows = self._table()
        silent = [r for r, old in zip(rows, former) if r["rank"] != self.rank and _same(r, old)]
        hanging = [r for r in rows if r not in silent and not r["waiting"]]
        if silent:
            named = [(row, "it does not answer: stopped, or its machine is gone") for row in silent]
        elif hanging and len(hanging) < len(rows):
            named = [(row, "it hangs outside of any collective") for row in hanging]
        elif len({row["collective"] for row in rows}) > 1:
            named = [(row, "the ranks wait in different collectives") for row in _behind(rows)]
        else:
            named = [(mine, "all ranks wait for each other: is the network cut between them?")]
        found = [describe(row, max(seconds, row["still"]), why) for row, why in named[:8]]
        others = sorted({row["rank"] for row in rows} - {row["rank"] for row, _ in named})
        text = "".join(found) + f"  waiting for it: ranks {_ranges(others)}\n"
        # The first verdict is everyone's: whoever has exited by now must not be taken for stopped.
        return self._store.compare_set("verdict", "", text).decode()

    def _table(self) -> list[dict[str, Any]]:
        assert self._store is not None, "there is a table among several ranks"
        raw = self._store.multi_get([str(rank) for rank in range(self.size)])
        return [json.loads(row) for row in raw]


def last_collective() -> tuple[int, str | None, bool]:
    """(its number, what it was, whether this rank waits in it), by PyTorch's flight recorder."""
    recorder = torch._C._distributed_c10d
    name = "_dump_nccl_trace_json" if torch.cuda.is_available() else "_dump_fr_trace_json"
    try:
        entries = json.loads(getattr(recorder, name)()).get("entries") or []
    except (AttributeError, ValueError, RuntimeError):
        return 0, None, False
    if not entries:
        return 0, None, False
    last = max(entries, key=lambda entry: entry.get("record_id", 0))
    group = " ".join(dict.fromkeys(str(part) for part in last.get("process_group", [])))
    what = (
        f"{last.get('profiling_name')} {last.get('collective_seq_id')} of group {group}, "
        f"sizes {last.get('input_sizes')}"
    )
    waits = any(not entry.get("retired", True) for entry in entries)
    return int(last.get("record_id", 0)) + 1, what, waits


def stack_of(thread: int | None) -> list[str]:
    """`file:line function` of a thread's innermost frames, innermost last."""
    frame = sys._current_frames().get(thread or 0)
    found: list[str] = []
    root = Path(__file__).resolve().parent.parent
    while frame is not None and len(found) < _FRAMES:
        name = frame.f_code.co_filename
        short = name.removeprefix(f"{root}/").split("site-packages/")[-1]
        found.append(f"{short}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]


def _same(row: dict[str, Any], former: dict[str, Any]) -> bool:
    return row["beats"] == former["beats"]


def _behind(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the collective that the fewest ranks wait in."""
    sizes: dict[Any, int] = {}
    for row in rows:
        sizes[row["collective"]] = sizes.get(row["collective"], 0) + 1
    fewest = min(sizes.values())
    return [row for row in rows if sizes[row["collective"]] == fewest]


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 -> '1-3, 7'."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts[:20])
    return (text or "none") + (", ..." if len(parts) > 20 else "")


def _table() -> Any:
    """A connection of its own to the store where the ranks met; None where there is no server."""
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        own = store.clone()
        own.set_timeout(datetime.timedelta(seconds=_STORE_SECONDS))
    except (AttributeError, RuntimeError, ValueError):
        log.debug("the watchdog has no table", exc_info=True)
        return None
    return dist.PrefixStore("watchdog", own)


def _guardian() -> "subprocess.Popen[bytes] | None":
    program = Path(__file__).with_name("guardian.py")
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(program)], stdin=subprocess.PIPE, cwd="/"
        )
    except OSError:
        log.warning("the watchdog's program could not be started", exc_info=True)
        return None


def _say(text: str) -> None:
    try:
        os.write(sys.stderr.fileno(), text.encode())
    except (OSError, ValueError, AttributeError):
        return  # nobody listens
