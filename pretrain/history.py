# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl: one JSON object a line, one history however often the run stopped.

Three kinds of rows share the file, told apart by their keys: training rows (`loss`), validation
rows (`val_loss` or `val_loss/NAME`, and `val_loss_bf16` likewise) and events (`event`). Every row
carries `step`.
Values that JSON cannot hold are written as the strings "NaN", "Infinity" and "-Infinity", which
`float()` reads back.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fused_ops.errors import ConfigError

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
NUMERICS_FILE = "numerics.jsonl"
"""Rows of `pretrain.numerics_monitor`, kept the same way."""
DROPPED_FILE = "metrics.dropped.jsonl"
"""Lines of metrics.jsonl that a resumed run replaces; other histories have one of their own."""

Row = dict[str, Any]


def dropped_file(path: Path) -> Path:
    """Where a history's replaced lines go: metrics.dropped.jsonl for metrics.jsonl."""
    return path.with_suffix(f".dropped{path.suffix}")


def encode_row(row: Mapping[str, Any]) -> bytes:
    """One line of strict JSON, newline included. Tensors and numpy scalars become numbers."""
    return (json.dumps(_legal(row), allow_nan=False) + "\n").encode()


def read_metrics(path: Path) -> list[Row]:
    """The whole rows of a metrics file, in order; torn or foreign lines are left out."""
    rows, _ = split_lines(path.read_bytes() if path.exists() else b"")
    return rows


def lacks_evaluation(path: Path, step: int) -> bool:
    """Whether a metrics file has the training row of a step and no validation row of it."""
    keys = {key.split("/")[0] for row in read_metrics(path) if row["step"] == step for key in row}
    return "loss" in keys and "val_loss" not in keys


def split_lines(data: bytes) -> tuple[list[Row], list[bytes]]:
    """(rows, damaged lines) of a metrics file's bytes. A row is an object with an int `step`."""
    rows: list[Row] = []
    damaged: list[bytes] = []
    for line in data.split(b"\n"):
        row = _decode(line)
        if row is not None:
            rows.append(row)
        elif line.strip(b"\0 \t\r"):
            damaged.append(line)
    return rows, damaged


def cut_history(path: Path, last_step: int | None) -> int:
    """Makes `path` the history up to and including `last_step`; None starts a new history.

    Rows after it, and damaged lines, move to NAME.dropped.jsonl beside it, so that nothing is lost.
    A half-written last line is repaired. Written to a temporary name, then renamed.

    Returns:
        The number of lines moved.
    """
    if not path.exists():
        return 0
    data = path.read_bytes()
    rows, damaged = split_lines(data)
    kept = [r for r in rows if last_step is not None and r["step"] <= last_step]
    dropped = [r for r in rows if last_step is None or r["step"] > last_step]
    content = b"".join(encode_row(r) for r in kept)
    if content == data:
        return 0
    moved = [encode_row(r) for r in dropped] + [line + b"\n" for line in damaged]
    with open(dropped_file(path), "ab") as backup:
        backup.writelines(moved)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return len(moved)


@dataclass
class JsonlSink:
    """Appends rows to metrics.jsonl, unbuffered: a killed process loses no finished row.

    A write that fails (disk full, quota, lost mount) is counted and reported once, and training
    goes on; what a failed write left behind is cut off before the next row.
    """

    path: Path
    resumed_step: int | None = None
    lost_rows: int = 0

    def __post_init__(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            moved = cut_history(self.path, self.resumed_step)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"the run folder must be writable; {self.path} cannot be written "
                f"({error.strerror}); free or unlock it, or choose another run.dir"
            ) from error
        self._size = os.fstat(self._file).st_size
        self._failing = False
        if moved:
            log.info(
                "%s: %d lines that this run replaces went to %s",
                self.path,
                moved,
                dropped_file(self.path).name,
            )

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends one row, or counts it as lost."""
        line = encode_row(row)
        try:
            if self._failing:
                os.ftruncate(self._file, self._size)
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(28, f"wrote {written} of {len(line)} bytes")
        except OSError as error:
            self._lose(error)
            return
        self._size += len(line)
        if self._failing:
            self._failing = False
            log.warning("%s is written again; %d rows were lost", self.path, self.lost_rows)

    def rewind(self, step: int) -> None:
        """Moves the rows after `step` to metrics.dropped.jsonl; a failure costs the order only."""
        try:
            cut_history(self.path, step)
            fresh = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            log.warning("%s could not be cut back to step %d (%s)", self.path, step, error)
            return
        os.close(self._file)
        self._file, self._size = fresh, os.fstat(fresh).st_size

    def close(self) -> None:
        """Closes the file; says once more how many rows are missing."""
        if self._file < 0:
            return
        os.close(self._file)
        self._file = -1
        if self.lost_rows:
            log.warning("%s: %d rows could not be written", self.path, self.lost_rows)

    def _lose(self, error: OSError) -> None:
        self.lost_rows += 1
        if not self._failing:
            log.warning("%s cannot be written (%s); training goes on", self.path, error)
        self._failing = True


def _decode(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(row, dict) and type(row.get("step")) is int
    return row if whole else None


def _legal(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _legal(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_legal(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
