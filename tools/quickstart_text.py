# SPDX-License-Identifier: Apache-2.0
"""Real text that every machine with Python has: `python -m tools.quickstart_text --output FILE`.

Gathers the documentation topics, the docstrings of modules written in C and the library sources of
the running Python as JSON lines {"source", "text"}, about 12 MB. Nothing is downloaded. The order
is fixed and near duplicates are left out. A finished file is verified and kept.
"""

import argparse
import hashlib
import importlib
import inspect
import json
import os
import platform
import sys
import sysconfig
import tokenize
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# A document is a near duplicate when more than this share of its line groups was seen before.
_SEEN_SHARE = 0.5
_GROUP_LINES = 4

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "pydoc_data"}
# Building blocks of interpreters and GUI toolkits whose import has side effects.
_NOT_IMPORTED = {"_tkinter", "antigravity", "this", "__main__"}


def topics() -> Iterator[tuple[str, str]]:
    """The topics that `help()` shows: chapters of the language reference."""
    try:
        from pydoc_data.topics import topics as found
    except ImportError:
        return
    for name in sorted(found):
        yield f"python-topics/{name}", found[name].strip() + "\n"


def docstrings() -> Iterator[tuple[str, str]]:
    """Docstrings of modules that have no Python source; one document a module."""
    dynload = Path(sysconfig.get_path("platstdlib")) / "lib-dynload"
    names = set(sys.builtin_module_names)
    names |= {path.name.split(".")[0] for path in dynload.glob("*.so")}
    for name in sorted(names - _NOT_IMPORTED):
        if name.startswith(("_test", "_xx", "xx")):
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        text = "\n\n".join(_members(name, module))
        if len(text) > 200:
            yield f"python-docstrings/{name}", text + "\n"


def _members(name: str, owner: object, depth: int = 0) -> Iterator[str]:
    doc = inspect.getdoc(owner)
    if doc:
        yield f"{name}\n\n{doc}"
    if depth == 2:
        return
    for member in sorted(vars(owner)):
        value = vars(owner)[member]
        public = not member.startswith("_")
        is_class = inspect.isclass(value) and depth == 0
        if public and (is_class or (callable(value) and isinstance(value.__doc__, str))):
            yield from _members(f"{name}.{member}", value, depth + 1 if is_class else 2)


def sources() -> Iterator[tuple[str, str]]:
    """Sources of the standard library; one document a file."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS & set(relative.parts[:-1]):
            continue
        try:
            with tokenize.open(path) as stream:
                text = stream.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            yield f"python-library/{relative.as_posix()}", ""
            continue
        yield f"python-library/{relative.as_posix()}", text


class NearDuplicates:
    """Remembers groups of lines: a document is new when most of its groups are."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def is_new(self, text: str) -> bool:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        groups = {
            zlib.crc32("\n".join(lines[at : at + _GROUP_LINES]).encode("utf-8", "surrogatepass"))
            for at in range(max(1, len(lines) - _GROUP_LINES + 1))
        }
        new = len(groups & self._seen) <= _SEEN_SHARE * len(groups)
        if new:
            self._seen |= groups
        return new


def gather() -> tuple[list[bytes], Counter[str]]:
    """JSON lines in a fixed order, and what was kept and left out."""
    lines, counts, duplicates = [], Counter[str](), NearDuplicates()
    for documents in (topics(), docstrings(), sources()):
        for source, text in documents:
            if not text.strip():
                counts["empty or unreadable"] += 1
            elif not duplicates.is_new(text):
                counts["near duplicates"] += 1
            else:
                counts[source.split("/")[0]] += 1
                lines.append(json.dumps({"source": source, "text": text}).encode() + b"\n")
    return lines, counts


def _record_path(output: Path) -> Path:
    return output.with_name(output.name + ".done")


def is_done(output: Path) -> bool:
    """The file exists, is whole, and comes from this Python."""
    try:
        record = json.loads(_record_path(output).read_text())
        with open(output, "rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except (OSError, ValueError):
        return False
    return bool(record == {"sha256": digest, "python": platform.python_version()})


def write(output: Path) -> Counter[str]:
    """Writes the text under a temporary name, then renames it."""
    output.parent.mkdir(parents=True, exist_ok=True)
    lines, counts = gather()
    temporary = output.with_name(output.name + ".tmp")
    digest = hashlib.sha256()
    with open(temporary, "wb") as stream:
        for line in lines:
            digest.update(line)
            stream.write(line)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, output)
    record = {"sha256": digest.hexdigest(), "python": platform.python_version()}
    _record_path(output).write_text(json.dumps(record) + "\n")
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.quickstart_text", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines file to write")
    options = parser.parse_args(arguments)
    try:
        if is_done(options.output):
            print(f"{options.output}: done before and whole, kept")
            return 0
        counts = write(options.output)
    except OSError as error:
        print(
            f"the text must be writable; {error.filename or options.output}: {error.strerror}",
            file=sys.stderr,
        )
        return 2
    summary = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.1f} MB ({summary})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
