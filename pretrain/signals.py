# SPDX-License-Identifier: Apache-2.0
"""SIGTERM, Ctrl-C and a file ask a run to save and stop; a second signal exits at once."""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While entered, the first signal only sets `received`; the second ends the process.

    The run looks at `asked` between steps and between batches of an evaluation, on all ranks
    together, so that they stop at the same one although a signal may reach only one of them.
    Schedulers that can warn long before they kill, where a launcher in between allows less, create
    `file`.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.received: signal.Signals | None = None
        self.file = file
        self._looked, self._found = 0.0, False
        self._former: dict[signal.Signals, object] = {}

    @property
    def asked(self) -> bool:
        """Whether a signal came, or the file is there; it is looked for once a second."""
        now = time.monotonic()
        if self.file is not None and now - self._looked > 1.0:
            self._looked = now
            self._found = self._found or self.file.exists()
        return self.received is not None or self._found

    def __enter__(self) -> "StopSignals":
        for number in SIGNALS:
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is not None:
            _say(f"{name} again: exiting at once, without saving\n")
            os._exit(128 + number)
        self.received = signal.Signals(number)
        _say(f"{name}: finishing this step or batch, then saving; once more exits at once\n")


def _say(text: str) -> None:
    """Written past Python's buffers, whose locks the interrupted code may hold."""
    try:
        os.write(sys.stderr.fileno(), text.encode())
    except (OSError, ValueError, AttributeError):
        return  # nobody listens
