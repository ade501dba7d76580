# SPDX-License-Identifier: Apache-2.0
"""One live run to a run folder: a lock file naming the process that holds it.

The file is made by hard-linking a finished one into place, which is atomic, also on NFS. On the
same machine a holder is known to be dead when its process is gone (or is another one with the same
number). A holder on another machine counts as dead when it has not touched the file for
`STALE_SECONDS`, or when it belongs to an earlier start of the same job: launchers end all processes
of a job before they start it again.
"""

import atexit
import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from fused_ops.errors import ConfigError
from pretrain.checkpoint.io import explain

STALE_SECONDS = 900.0
TOUCH_SECONDS = 30.0
_RESTARTS = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


def _start_time(pid: int) -> str | None:
    """When a process of this machine started, in the kernel's ticks; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *rest = text.rpartition(")")[2].split()
    return None if state == "Z" else rest[18]


def _boot() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _job() -> list[str | int] | None:
    """[name of the job that started this process, how often it was started again before]."""
    name = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if name == "none":
        return None
    counts = (os.environ.get(key, "0") for key in _RESTARTS)
    return [name.split("-")[0], *(int(count) if count.isdigit() else 0 for count in counts)]


def _restarted(former: Any, now: list[str | int] | None) -> bool:
    """Whether the holder's job has been started again: then its processes are gone, wherever."""
    if not isinstance(former, list) or now is None or len(former) != len(now):
        return False
    return former[0] == now[0] and tuple(former[1:]) < tuple(now[1:])


class RunLock:
    """The lock of a run folder. `take`, `touch` now and then, `release`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / "lock"
        self._mine: dict[str, Any] | None = None
        self._touched = 0.0

    def take(self) -> str | None:
        """Hold the lock. Returns a note when a dead run's lock was taken over.

        Raises ConfigError when a live run holds it, or when the folder cannot be written.
        """
        pid = os.getpid()
        mine = {
            "host": socket.gethostname(),
            "pid": pid,
            "start": _start_time(pid),
            "boot": _boot(),
            "job": _job(),
        }
        temporary = self.path.with_name(f"lock.{mine['host']}.{pid}")
        note = None
        try:
            os.makedirs(self.path.parent, exist_ok=True)
            temporary.write_text(json.dumps(mine))
            try:
                for _ in range(10):
                    with contextlib.suppress(FileExistsError):
                        os.link(temporary, self.path)
                        break
                    note = self._clear_dead() or note
                else:
                    raise ConfigError(f"{self.path} changes hands all the time: run one at a time")
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"run folder: {explain(error, self.path.parent)}") from None
        self._mine, self._touched = mine, time.monotonic()
        atexit.register(self.release)
        return note

    def _clear_dead(self) -> str | None:
        """Remove the lock of a dead holder; ConfigError when it may be alive."""
        try:
            text = self.path.read_text()
            age = time.time() - self.path.stat().st_mtime
        except FileNotFoundError:
            return None
        try:
            holder = json.loads(text)
            host, pid = holder["host"], int(holder["pid"])
        except (ValueError, TypeError, KeyError):
            host, pid, holder = "?", 0, {}
        if host == socket.gethostname():
            same_boot = holder.get("boot") == _boot()
            alive = same_boot and holder.get("start") == _start_time(pid) is not None
        else:
            alive = age < STALE_SECONDS and not _restarted(holder.get("job"), _job())
        if alive:
            where = "this machine" if host == socket.gethostname() else host
            raise ConfigError(
                f"{self.path.parent} belongs to a live run (process {pid} on {where}): stop it, or"
                " choose another run.name"
                + ("" if where == "this machine" else f"; if it is dead, delete {self.path}")
            )
        # Two starts may both see the dead holder: only the one that moves its very file goes on.
        aside = self.path.with_name(f"lock.stale.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.path, aside)
            if aside.read_text() != text:
                with contextlib.suppress(FileExistsError):
                    os.link(aside, self.path)
            aside.unlink()
        return f"took over the lock of a dead run (process {pid} on {host})"

    def touch(self) -> None:
        """Tell other machines that this run lives; at most every `TOUCH_SECONDS`."""
        now = time.monotonic()
        if self._mine is not None and now - self._touched > TOUCH_SECONDS:
            self._touched = now
            with contextlib.suppress(OSError):
                os.utime(self.path)

    def problem(self) -> str | None:
        """Why this process no longer owns the folder; None when it does."""
        if self._mine is None:
            return None
        if not self.path.parent.is_dir():
            return f"the run folder {self.path.parent} was deleted while the run was using it"
        try:
            if json.loads(self.path.read_text()) == self._mine:
                return None
        except (OSError, ValueError):
            return f"{self.path} was deleted while the run was using it"
        return f"another run has taken over {self.path.parent}"

    def release(self) -> None:
        """Give the folder free; harmless when it is not held."""
        mine = self._mine is not None and self._mine["pid"] == os.getpid()  # not in a fork
        if mine and self.problem() is None:
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._mine = None
