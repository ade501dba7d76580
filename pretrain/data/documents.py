# SPDX-License-Identifier: Apache-2.0
"""Reads documents from files: JSON lines, Parquet, text, arrays of token ids, compressed or not."""

import glob
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import zstandard

from pretrain.data.manifest import DataError
from pretrain.data.parquet import parquet_texts

_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".npy": "tokens",
}
_COMPRESSIONS = (".zst", ".gz")
KNOWN = (
    "*.jsonl, *.ndjson, *.txt, *.text, *.md, *.rst, *.npy, each also with .zst or .gz, or *.parquet"
)

_TOKENS_AT_ONCE = 1 << 22

# What a damaged or cut file makes its reader raise.
_UNREADABLE = (zstandard.ZstdError, zlib.error, OSError, EOFError)


@dataclass(frozen=True)
class InputFile:
    path: Path
    kind: str
    """jsonl (a document a line), parquet (a document a row), text (a document a file), tokens
    (documents end with an id)."""

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def compression(self) -> str:
        return self.path.suffix if self.path.suffix in _COMPRESSIONS else ""


def find_inputs(arguments: list[str], counts: Counter[str]) -> list[InputFile]:
    """Files, folders (searched) and glob patterns -> input files in a fixed order.

    `counts` gets the files of folders that are of another kind. Raises DataError with every
    argument that names nothing, something unknown, or a file that another one names too.
    """
    found: list[InputFile] = []
    problems = []
    for argument in arguments:
        path = Path(argument)
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.is_file()]
            members = [p for p in inside if _kind(p)]
            for other in (p for p in inside if not _kind(p)):
                counts[f"files *{other.suffix} of another kind, skipped"] += 1
            if not members:
                problems.append(f"an input folder must hold {KNOWN}; {argument} holds none")
        else:
            members = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(argument))]
            if not members:
                problems.append(f"an input must exist; there is no {argument}")
        for member in members:
            kind = _kind(member)
            if kind is None:
                problems.append(f"an input must be one of {KNOWN}; got {member}")
            else:
                found.append(InputFile(member, kind))
    seen: set[Path] = set()
    for place in (file.path.resolve() for file in found):
        if place in seen:
            problems.append(
                f"an input must be named once; {place} is named twice: its documents would be "
                "repeated (to repeat data, give its source a weight)"
            )
        seen.add(place)
    if problems:
        raise DataError(problems)
    return found


def _kind(path: Path) -> str | None:
    packed = path.suffix in _COMPRESSIONS
    kind = _KINDS.get((path.with_suffix("") if packed else path).suffix)
    # Parquet compresses its columns itself; a packed file could not be read in parts.
    return None if packed and kind == "parquet" else kind


class _Tracked(io.RawIOBase):
    """Counts the bytes that were read from the file, for a progress bar."""

    def __init__(self, path: Path, progress: list[int]) -> None:
        self._stream = open(path, "rb", buffering=0)  # noqa: SIM115 (closed with this object)
        self._progress = progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = self._stream.readinto(buffer) or 0
        self._progress[0] += count
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Zstd(io.RawIOBase):
    """Decompresses all frames; a frame that ends early is an EOFError, not an early end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._pending = raw, memoryview(b"")
        self._frame: zstandard.ZstdDecompressionObj | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._pending:
            content = self._raw.read(1 << 20)
            if not content and self._frame is not None:
                raise EOFError("its last zstd frame is cut")
            if not content:
                return 0
            self._pending = memoryview(b"".join(self._decompress(content)))
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def _decompress(self, content: bytes) -> Iterator[bytes]:
        while content:
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            yield self._frame.decompress(content)
            content = self._frame.unused_data
            if self._frame.eof:
                self._frame = None

    def close(self) -> None:
        self._raw.close()
        super().close()


def open_input(file: InputFile, progress: list[int]) -> BinaryIO:
    """The decompressed bytes; `progress[0]` grows by the bytes read from disk."""
    raw = io.BufferedReader(_Tracked(file.path, progress), 1 << 20)
    if file.compression == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if file.compression == ".zst":
        return cast(BinaryIO, io.BufferedReader(_Zstd(cast(BinaryIO, raw)), 1 << 20))
    return cast(BinaryIO, raw)


@dataclass(frozen=True)
class Record:
    """What a worker turns into documents: one line, one row or one whole file."""

    content: bytes
    kind: str
    path: str
    line: int

    def place(self) -> str:
        words = {"jsonl": f", line {self.line}", "parquet": f", row {self.line}"}
        return self.path + words.get(self.kind, "")


def records(file: InputFile, progress: list[int], text_key: str = "text") -> Iterator[Record]:
    """Lines of a JSON lines file, rows of a Parquet file, or a text file as one record.

    `text_key` names the column of a Parquet file; the other columns are not read.
    """
    if file.kind == "parquet":
        yield from parquet_records(file, progress, text_key)
        return
    try:
        with open_input(file, progress) as stream:
            if file.kind == "text":
                yield Record(stream.read(), "text", str(file.path), 0)
                return
            for number, line in enumerate(stream, 1):
                yield Record(line, "jsonl", str(file.path), number)
    except _UNREADABLE as error:
        raise DataError(f"an input must be readable to its end; {file.path}: {error}") from None


def parquet_records(file: InputFile, progress: list[int], text_key: str) -> Iterator[Record]:
    """Rows of a Parquet file; a row without a text is an empty record, so that it is counted."""
    number, done = 0, 0
    for contents, share in parquet_texts(file.path, text_key):
        progress[0] += int(share * file.size) - done
        done = int(share * file.size)
        for content in contents:
            number += 1
            yield Record(content, "parquet", str(file.path), number)


def text_of(record: Record, text_key: str, counts: Counter[str]) -> str | None:
    """The document's text, or None for an empty one; counts what is empty or repaired.

    Bytes that are not UTF-8 become U+FFFD and the document is counted. NUL and CR stay.
    Raises DataError with file and line for a line that is not a JSON object with that key.
    """
    content = record.content
    try:
        decoded = content.decode()
    except UnicodeDecodeError:
        decoded = content.decode(errors="replace")
        counts["documents with invalid UTF-8, repaired"] += 1
    if record.kind == "text":
        text = decoded.removeprefix("\ufeff")
    elif record.kind == "parquet":
        text = decoded
    else:
        line = decoded.removeprefix("\ufeff").strip("\r\n\t ")
        if not line:
            counts["empty lines, skipped"] += 1
            return None
        text = _json_text(line, text_key, record)
    if not text:
        counts["empty documents, skipped"] += 1
        return None
    if not text.isascii():
        clean = text.encode("utf-8", "replace").decode()
        if clean != text:
            counts["documents with lone surrogates, repaired"] += 1
            text = clean
    return text


def _json_text(line: str, text_key: str, record: Record) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"each line must be a JSON object; {record.place()}: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get(text_key), str):
        keys = ", ".join(sorted(value)) if isinstance(value, dict) else type(value).__name__
        raise DataError(
            f"each line must be a JSON object with a string {text_key!r}; {record.place()} has "
            f"{keys}: name another key with --text-key"
        )
    return str(value[text_key])


def token_blocks(file: InputFile, vocab_size: int, progress: list[int]) -> Iterator[np.ndarray]:
    """The ids of a one-dimensional integer .npy array, some at a time, checked.

    Raises DataError with file and position for another shape or type, an id outside the
    vocabulary, or an array that ends early.
    """
    with open_input(file, progress) as stream:
        try:
            count, dtype = _npy_header(stream)
        except (ValueError, *_UNREADABLE) as error:
            raise DataError(
                f"a token array must be a one-dimensional .npy of integers; {file.path}: {error}"
            ) from None
        done = 0
        while done < count:
            wanted = min(_TOKENS_AT_ONCE, count - done) * dtype.itemsize
            try:
                content = _read_exactly(stream, wanted)
            except _UNREADABLE as error:
                raise DataError(
                    f"an input must be readable to its end; {file.path}: {error}"
                ) from None
            if len(content) != wanted:
                at = done + len(content) // dtype.itemsize
                raise DataError(
                    f"a token array of {count} ids must hold them all; {file.path} ends at id {at}"
                )
            block = np.frombuffer(content, dtype)
            wrong = np.flatnonzero((block < 0) | (block >= vocab_size))
            if wrong.size:
                raise DataError(
                    f"token ids must be in [0, {vocab_size}), the tokenizer's; {file.path}, "
                    f"position {done + int(wrong[0])}, has {int(block[wrong[0]])}"
                )
            done += block.size
            yield block


def _npy_header(stream: BinaryIO) -> tuple[int, np.dtype]:
    version = np.lib.format.read_magic(stream)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(stream)
    if len(shape) != 1 or dtype.kind not in "iu":
        raise ValueError(f"it has shape {shape} and type {dtype}")
    return int(shape[0]), dtype


def _read_exactly(stream: BinaryIO, count: int) -> bytes:
    parts = []
    while count:
        part = stream.read(count)
        if not part:
            break
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
