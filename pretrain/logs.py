# SPDX-License-Identifier: Apache-2.0
"""What the program says, masked; on the standard error stream, and in RUN/logs with rotation."""

import logging
import logging.handlers
import socket
import sys
import traceback
from pathlib import Path
from types import TracebackType

from pretrain.redact import mask_text

_FILE_BYTES = 8 * 2**20
_FILES = 4


class MaskingFormatter(logging.Formatter):
    """A formatter whose every line is without secrets, exceptions included."""

    def format(self, record: logging.LogRecord) -> str:
        """Signature: `logging.Formatter.format`."""
        return mask_text(super().format(record))


class _QuietFile(logging.handlers.RotatingFileHandler):
    """A log file that a full disk, or a lost one, only silences."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Signature: `logging.Handler.handleError`. The record is lost; it went to stderr too."""


def log_to_stderr() -> None:
    """One line a record on the standard error stream; stack traces of crashes masked."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(MaskingFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    sys.excepthook = _masked_trace


def log_to_file(run_dir: Path, rank: int) -> logging.Handler:
    """Also writes records to RUN/logs/rankNNNNN.log, at most 32 MiB, made with the first record.

    Returns:
        The handler; `stop_logging` takes it away.
    """
    folder = run_dir / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logging.getLogger(__name__).warning("no log files in %s (%s)", folder, error)
    handler = _QuietFile(
        folder / f"rank{rank:05d}.log",
        maxBytes=_FILE_BYTES,
        backupCount=_FILES - 1,
        delay=True,
        encoding="utf-8",
        errors="replace",
    )
    form = f"%(asctime)s {socket.gethostname()} %(levelname)s %(message)s"
    handler.setLevel(logging.INFO)
    handler.setFormatter(MaskingFormatter(form))
    logging.getLogger().addHandler(handler)
    return handler


def stop_logging(handler: logging.Handler) -> None:
    """Closes a log file."""
    logging.getLogger().removeHandler(handler)
    handler.close()


def _masked_trace(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(mask_text(text))
