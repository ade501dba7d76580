# SPDX-License-Identifier: Apache-2.0
"""A progress bar on a terminal, and nothing elsewhere."""

import sys
from types import TracebackType

from tqdm import tqdm


class Bar:
    """Counts `total` steps of a named piece of work on the standard error stream."""

    def __init__(self, name: str, total: int, *, show: bool = True) -> None:
        quiet = not show or not sys.stderr.isatty()
        self._bar = tqdm(total=total, desc=name, disable=quiet, dynamic_ncols=True, leave=False)

    def step(self, count: int = 1) -> None:
        """`count` steps are done."""
        self._bar.update(count)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
