# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C ask a run to save and stop; asked again, it exits at once."""

import os
import signal
import sys
from types import FrameType, TracebackType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """While entered, the first signal only sets `received`; the second ends the process.

    The run looks at `received` between steps, on all ranks together, so that they stop at the
    same step although a signal may reach only one of them.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._former: dict[signal.Signals, object] = {}

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
        _say(f"{name}: finishing this step, then saving; once more exits at once\n")


def _say(text: str) -> None:
    """Written past Python's buffers, whose locks the interrupted code may hold."""
    try:
        os.write(sys.stderr.fileno(), text.encode())
    except (OSError, ValueError, AttributeError):
        return  # nobody listens
