# SPDX-License-Identifier: Apache-2.0
"""What a check finds: errors, which fail it, and advice, each with its place in the file."""

from dataclasses import dataclass, field
from typing import Any

from tools.launch.documents import Document, Path
from tools.launch.structure import shown


@dataclass(frozen=True, order=True)
class Finding:
    """One line of a report; `rank` 0 is an error, 1 is advice."""

    line: int
    rank: int
    text: str

    def render(self, file: str) -> str:
        """`FILE:LINE: error: what; remedy`."""
        return f"{file}:{self.line}: {('error', 'advice')[self.rank]}: {self.text}"


@dataclass
class Findings:
    """Collects what is found in one document."""

    document: Document
    found: list[Finding] = field(default_factory=list)

    def error(self, path: Path, text: str) -> None:
        """A rule is broken at `path`; the text ends with the remedy."""
        self._add(0, path, text)

    def advise(self, path: Path, text: str) -> None:
        """Worth knowing, not wrong."""
        self._add(1, path, text)

    def _add(self, rank: int, path: Path, text: str) -> None:
        what = f"{shown(path)} {text}" if path else text
        finding = Finding(self.document.line(path), rank, what)
        if finding not in self.found:
            self.found.append(finding)


def at(value: Any, *path: str | int, kind: type = dict) -> Any:
    """What stands at a path in nested plain values; an empty `kind` where it is not one."""
    for step in path:
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            return kind()
    return value if isinstance(value, kind) else kind()


def words(value: Any) -> list[str]:
    """A list of strings; other items are left out (the structure check names them)."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
