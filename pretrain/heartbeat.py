# SPDX-License-Identifier: Apache-2.0
"""RUN/heartbeat.json: what the run does now, and which step it failed at when it did.

One JSON object of fixed length, overwritten in place, so that a reader never sees half of it:
`time` (seconds since 1970), `step` (the one in progress), `phase` (start, train, evaluate, save,
stop, end; done, stopped or failed once it is over), `host`, `pid`, `loss`, `tokens_per_s`, and
`failures`: how often in a row the run has failed at `failed_step`.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from fused_ops.errors import ConfigError

log = logging.getLogger(__name__)

HEARTBEAT_FILE = "heartbeat.json"
_LENGTH = 1024
_OVER = ("done", "stopped")


def read_heartbeat(run_dir: Path) -> dict[str, Any]:
    """What RUN/heartbeat.json says; {} when there is none."""
    try:
        found = json.loads((run_dir / HEARTBEAT_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def digest(values: Any) -> str:
    """A short digest of plain values: whether a later start is the same."""
    text = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Heartbeat:
    """Writes the file; of the rank that speaks. Failures of the disk cost beats, never the run.

    Args:
        run_dir: the run's folder.
        config: digest of what makes this start the same as an earlier one.
        limit: failures at one step at which a start is refused; 0: none is.

    Raises:
        ConfigError: the run has failed `limit` times in a row at the same step, and nothing has
            been changed since.
    """

    def __init__(self, run_dir: Path, config: str, limit: int) -> None:
        self.path = run_dir / HEARTBEAT_FILE
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {
            "time": 0.0,
            "step": 0,
            "phase": "start",
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "loss": None,
            "tokens_per_s": None,
            "config": config,
            "failed_step": None,
            "failures": 0,
        }
        self._file = -1
        former = read_heartbeat(run_dir)
        if former.get("phase") not in (None, *_OVER) and former.get("config") == config:
            self._count(former, limit)
        with contextlib.suppress(OSError):
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)

    def _count(self, former: dict[str, Any], limit: int) -> None:
        step, again = former.get("step"), former.get("failed_step")
        failures = int(former.get("failures") or 0) + 1 if step == again else 1
        self._values["failed_step"], self._values["failures"] = step, failures
        if limit and failures >= limit:
            reason = former.get("reason") or "the process was killed"
            raise ConfigError(
                f"step {step} has failed {failures} times in a row ({reason}), and "
                f"run.max_failures={limit} says to stop; change what fails (data.skip_samples "
                "steps over samples, RUN/bad_steps has the cause of bad steps), or delete "
                f"{self.path} to try again"
            )

    def beat(self, **changes: Any) -> None:
        """Puts changes in and writes the file."""
        with self._lock:
            if self._file < 0:
                return
            self._values |= changes
            self._values["time"] = round(time.time(), 3)
            values = {
                key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in self._values.items()
            }
            text = json.dumps(values).encode()
            if len(text) >= _LENGTH:
                text = json.dumps({**values, "reason": str(values.get("reason"))[:200]}).encode()
            with contextlib.suppress(OSError):
                os.pwrite(self._file, text.ljust(_LENGTH - 1)[: _LENGTH - 1] + b"\n", 0)

    def close(self) -> None:
        """Closes the file; it stays as it is."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
