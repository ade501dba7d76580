# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: a bar on a terminal, plain lines elsewhere, nothing on other ranks."""

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, Literal, TextIO

from tqdm import tqdm

Style = Literal["auto", "bar", "lines", "none"]


class Progress:
    """Shows step, loss, tokens/s and time left.

    Args:
        total_steps: the run's last step.
        first_step: steps already done, when the run continues.
        style: `bar`, `lines`, `none`; `auto` is a bar on a terminal and lines elsewhere.
        interval: steps between two lines.
        enabled: False shows nothing (other ranks).
        stream: where to write; the standard error stream by default.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 0,
        style: Style = "auto",
        interval: int = 10,
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self.stream = stream or sys.stderr
        self.total_steps = total_steps
        self.interval = interval
        self.first_step = first_step
        self._started = time.monotonic()
        self._bar: tqdm[None] | None = None
        if style == "auto":
            style = "bar" if self.stream.isatty() else "lines"
        self.style: Style = style if enabled else "none"
        if self.style == "bar":
            self._bar = tqdm(
                total=total_steps,
                initial=first_step,
                file=self.stream,
                unit="step",
                dynamic_ncols=True,
                bar_format="step {n_fmt}/{total_fmt} |{bar}| {desc}left {remaining} ",
            )

    def update(self, row: Mapping[str, Any]) -> None:
        """One completed step's row of metrics."""
        step = int(row["step"])
        if self._bar is not None:
            self._bar.set_description_str(_numbers(row) + "  ", refresh=False)
            self._bar.update(step - self._bar.n)
        elif self.style == "lines" and self._due(step):
            left = _clock(self._seconds_left(step))
            self._line(f"step {step}/{self.total_steps}  {_numbers(row)}  left {left}")

    def message(self, text: str) -> None:
        """A line of its own that does not tear the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        elif self.style == "lines":
            self._line(text)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _due(self, step: int) -> bool:
        ends = (self.first_step + 1, self.total_steps)
        return step % self.interval == 0 or step in ends

    def _seconds_left(self, step: int) -> float:
        done = max(1, step - self.first_step)
        return (time.monotonic() - self._started) / done * (self.total_steps - step)

    def _line(self, text: str) -> None:
        try:
            print(text, file=self.stream, flush=True)
        except OSError:  # a closed pipe or a full disk behind the log is no reason to stop
            logging.getLogger(__name__).debug("progress line lost", exc_info=True)


def _numbers(row: Mapping[str, Any]) -> str:
    parts = []
    if row.get("loss") is not None:
        parts.append(f"loss {float(row['loss']):.4f}")
    if row.get("tokens_per_s") is not None:
        parts.append(f"{short_count(float(row['tokens_per_s']))} tokens/s")
    if row.get("skipped"):
        parts.append("skipped")
    return "  ".join(parts)


def short_count(value: float) -> str:
    """1234 -> '1.23 k'; three significant digits."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.3g}"


def _clock(seconds: float) -> str:
    whole = max(0, round(seconds))
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes:02d}:{whole % 60:02d}"
