# SPDX-License-Identifier: Apache-2.0
"""Reads megatron-core's `.bin/.idx` shards as one stream of tokens.

An index file is (little endian): b"MMIDIDX\\0\\0", uint64 version 1, uint8 type code, uint64 number
of sequences S, uint64 number of document marks D + 1, int32[S] lengths, int64[S] byte offsets,
int64[D + 1] first sequence of each document and S. The reader takes tokens with positioned reads
rather than a memory map: a file that is cut while a run uses it is then an error with a name, not a
bus error, and the resident memory of a rank stays flat.
"""

import contextlib
import hashlib
import os
import struct
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from pretrain.data.manifest import ITEM_SIZES, DataError, Manifest, ShardInfo

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
TYPE_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}

# Opening a shard costs two file descriptors for a moment and one for as long as it is kept.
_MAX_OPEN = 256

# Up to this many shards, a missing or cut file is found when the run starts.
_CHECK_AT_START = 4096


@dataclass(frozen=True)
class ShardIndex:
    """The index of one shard.

    lengths: int32[sequences]; offsets: int64[sequences], bytes; marks: int64[documents + 1].
    """

    dtype: str
    lengths: np.ndarray
    offsets: np.ndarray
    marks: np.ndarray

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def documents(self) -> int:
        return int(self.marks.size) - 1

    def document_starts(self) -> np.ndarray:
        """int64[documents]: token of the shard at which each document starts."""
        sequences = self.marks[:-1]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])
        return ends[sequences]


def read_index(path: str | Path) -> ShardIndex:
    """Reads and checks an .idx file on its own. Raises DataError with file and offset."""
    return parse_index(_index_content(path), str(path))


def _index_content(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"a shard must have a readable index; {path}: {error.strerror}") from None


def parse_index(content: bytes, path: str) -> ShardIndex:
    """Checks the content of an .idx file on its own. Raises DataError with `path` and offset."""
    if len(content) < INDEX_HEADER.size:
        raise DataError(
            f"an index must hold its {INDEX_HEADER.size} byte header; "
            f"{path} ends at byte {len(content)}"
        )
    magic, version, code, sequences, num_marks = INDEX_HEADER.unpack_from(content)
    names = {code: name for name, code in TYPE_CODES.items()}
    if magic != INDEX_MAGIC or version != 1:
        raise DataError(f"an index must start with {INDEX_MAGIC!r} and version 1; {path}, byte 0")
    if code not in names or names[code] not in ITEM_SIZES:
        known = ", ".join(f"{TYPE_CODES[name]} ({name})" for name in ITEM_SIZES)
        raise DataError(f"an index's type must be one of {known}; {path}, byte 17, has {code}")
    expected = INDEX_HEADER.size + 12 * sequences + 8 * num_marks
    if num_marks < 1 or len(content) < expected:
        raise DataError(
            f"an index of {sequences} sequences and {num_marks} document marks must hold "
            f"{expected} bytes; {path} ends at byte {len(content)}: it was cut"
        )
    at = INDEX_HEADER.size
    lengths = np.frombuffer(content, np.int32, sequences, at)
    offsets = np.frombuffer(content, np.int64, sequences, at + 4 * sequences)
    marks = np.frombuffer(content, np.int64, num_marks, at + 12 * sequences)
    _check_index(path, names[code], lengths, offsets, marks)
    return ShardIndex(names[code], lengths, offsets, marks)


def _check_index(
    path: str, dtype: str, lengths: np.ndarray, offsets: np.ndarray, marks: np.ndarray
) -> None:
    at = INDEX_HEADER.size
    if lengths.size and int(lengths.min()) < 0:
        where = at + 4 * int(np.argmin(lengths))
        raise DataError(f"a sequence's length must not be negative; {path}, byte {where}")
    ends = np.cumsum(lengths, dtype=np.int64) * ITEM_SIZES[dtype]
    wrong = np.flatnonzero(offsets != ends - lengths.astype(np.int64) * ITEM_SIZES[dtype])
    if wrong.size:
        first = int(wrong[0])
        raise DataError(
            f"sequences must lie one after the other; {path}, byte "
            f"{at + 4 * lengths.size + 8 * first}: sequence {first} is said to start at byte "
            f"{int(offsets[first])} of the .bin file"
        )
    steps = np.diff(marks)
    if int(marks[0]) != 0 or int(marks[-1]) != lengths.size or (steps < 0).any():
        first = int(np.argmax(steps < 0)) if (steps < 0).any() else int(marks.size) - 1
        raise DataError(
            f"document marks must ascend from 0 to the number of sequences, {lengths.size}; "
            f"{path}, byte {at + 12 * lengths.size + 8 * first}"
        )


class _OpenShard:
    """One shard's file, kept open; the index is read when document starts are asked for."""

    def __init__(self, prefix: Path, info: ShardInfo) -> None:
        self.prefix, self.info = prefix, info
        self.bin_name = str(bin_path(prefix))
        self.dtype = np.dtype(info.dtype)
        # Opened before its size is asked for: a file may vanish between the two.
        try:
            self.descriptor = os.open(self.bin_name, os.O_RDONLY)
        except FileNotFoundError:
            raise DataError(_missing(self.bin_name, info)) from None
        except OSError as error:
            raise DataError(_unreadable(self.bin_name, error)) from None
        check_sizes(prefix, info)
        self._starts: np.ndarray | None = None

    def read(self, first: int, count: int) -> np.ndarray:
        """Tokens [first, first + count) of the shard, in the shard's own type."""
        tokens = np.empty(count, dtype=self.dtype)
        try:
            got = os.preadv(self.descriptor, [tokens.view(np.uint8)], first * self.dtype.itemsize)
        except OSError as error:
            raise DataError(_unreadable(self.bin_name, error)) from None
        if got != tokens.nbytes:
            end = first * self.dtype.itemsize + got
            raise DataError(
                f"a shard must keep its {self.info.tokens} tokens while it is used; "
                f"{self.bin_name} now ends at byte {end}"
            )
        return tokens

    def document_starts(self) -> np.ndarray:
        if self._starts is None:
            path = idx_path(self.prefix)
            content = _index_content(path)
            index = parse_index(content, str(path))
            check_index_against(str(path), index, self.info)
            if "sha256:" + hashlib.sha256(content).hexdigest() != self.info.idx_checksum:
                raise DataError(
                    f"an index must be the one that was described; {path}: its checksum is not the "
                    "manifest's: restore it, or index the folder again"
                )
            self._starts = index.document_starts()
        return self._starts

    def __del__(self) -> None:
        # Absent when the constructor raised.
        descriptor = self.__dict__.pop("descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def check_sizes(prefix: Path, info: ShardInfo) -> None:
    """The .bin file has the manifest's size and an .idx file lies beside it, or DataError."""
    folder = str(prefix).removesuffix(info.name)
    sizes = {}
    for path in (bin_path(prefix), idx_path(prefix)):
        with contextlib.suppress(FileNotFoundError):
            sizes[str(path).removeprefix(folder)] = os.path.getsize(path)
    problems = size_problems(sizes, folder, info)
    if problems:
        raise DataError(problems)


def _missing(path: str, info: ShardInfo) -> str:
    return (
        f"each shard of a manifest must exist; {path} is missing "
        f"(the manifest says {info.tokens} tokens): restore it, or index the folder again"
    )


def _unreadable(path: str, error: OSError) -> str:
    return f"each shard of a manifest must be readable; {path}: {error.strerror}"


def size_problems(sizes: Mapping[str, int], folder: str, info: ShardInfo) -> list[str]:
    """What is wrong with a shard, by {name in the folder: bytes} of its files."""
    expected = info.tokens * ITEM_SIZES[info.dtype]
    for name in (f"{info.name}.bin", f"{info.name}.idx"):
        if name not in sizes:
            return [_missing(f"{folder}{name}", info)]
    least = INDEX_HEADER.size + 8 * (info.documents + 1)
    index = sizes[f"{info.name}.idx"]
    if index < least:
        return [
            f"the index of {info.documents} documents must hold at least {least} bytes, its header "
            f"among them; {folder}{info.name}.idx ends at byte {index} (it was cut): restore it, "
            "or write the shard again"
        ]
    size = sizes[f"{info.name}.bin"]
    if size == expected:
        return []
    return [
        f"a shard of {info.tokens} {info.dtype} tokens must hold {expected} bytes; "
        f"{folder}{info.name}.bin ends at byte {size}: restore it, or index the folder again"
    ]


def check_index_against(path: str, index: ShardIndex, info: ShardInfo) -> None:
    """Index and manifest agree, or DataError naming the index file."""
    said = (info.dtype, info.tokens, info.documents)
    found = (index.dtype, index.tokens, index.documents)
    if said != found:
        raise DataError(
            "an index must agree with the manifest on type, tokens and documents; "
            f"{path} has {found}, the manifest says {said}: the manifest is stale, "
            "index the folder again"
        )


class Shard(Protocol):
    """One shard that can be read."""

    info: ShardInfo
    bin_name: str

    def read(self, first: int, count: int) -> np.ndarray:
        """Tokens [first, first + count) of the shard, in the shard's own type."""

    def document_starts(self) -> np.ndarray:
        """int64[documents]: token of the shard at which each document starts."""


class ShardSet:
    """All shards of a folder as one ring of `tokens` tokens. Opens files as they are needed."""

    def __init__(self, directory: str | Path, manifest: Manifest) -> None:
        self.directory, self.manifest = directory, manifest
        self._ends: list[int] = manifest.token_ends().tolist()
        self.tokens = self._ends[-1]
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()
        # A uint16 cannot exceed a vocabulary of 65 536, and so on: nothing to look for then.
        self._vocab_size = manifest.vocab_size
        self._may_exceed = {
            name: np.iinfo(name).max >= manifest.vocab_size or np.iinfo(name).min < 0
            for name in ITEM_SIZES
        }
        if len(manifest.shards) <= _CHECK_AT_START:
            self.check_start()

    def check_start(self) -> None:
        """Every file is there, with the size that the manifest says, or DataError."""
        for info in self.manifest.shards:
            check_sizes(Path(self.directory) / info.name, info)

    def make_shard(self, info: ShardInfo) -> Shard:
        """Opens one shard."""
        return _OpenShard(Path(self.directory) / info.name, info)

    def parts(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first token in it, tokens) that make up [start, start + count) of the ring."""
        while count > 0:
            number = bisect_right(self._ends, start)
            first = self._ends[number - 1] if number else 0
            taken = min(count, self._ends[number] - start)
            yield number, start - first, taken
            count -= taken
            start = (start + taken) % self.tokens

    def window(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the ring, in the shards' own integer type.

        Raises DataError when a file is missing or cut, or an id is outside the vocabulary.
        """
        pieces = [self._read(*part) for part in self.parts(start, count)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def document_starts(self, start: int, count: int) -> np.ndarray:
        """int64[k]: positions in the window [start, start + count) where a document starts."""
        pieces, done = [], 0
        for number, first, taken in self.parts(start, count):
            starts = self.shard(number).document_starts()
            low, high = np.searchsorted(starts, [first, first + taken])
            # Empty documents share a start.
            pieces.append(np.unique(starts[low:high]) - first + done)
            done += taken
        return np.concatenate(pieces)

    def fetch(self, windows: Iterable[tuple[int, int]], *, until_here: bool) -> None:
        """Says which (start, count) are read next; local files need no such word."""

    def close(self) -> None:
        """Ends what `fetch` started."""

    def _read(self, number: int, first: int, count: int) -> np.ndarray:
        shard = self.shard(number)
        tokens = shard.read(first, count)
        if self._may_exceed[shard.info.dtype]:
            # Negative ids are large as unsigned numbers.
            highest = tokens.view(f"u{tokens.itemsize}").max()
            if highest >= self._vocab_size:
                raise DataError(self._outside(shard, first, tokens))
        return tokens

    def _outside(self, shard: Shard, first: int, tokens: np.ndarray) -> str:
        wrong = np.flatnonzero((tokens < 0) | (tokens >= self._vocab_size))[0]
        where = (first + int(wrong)) * tokens.itemsize
        return (
            f"token ids must be in [0, {self._vocab_size}); {shard.bin_name}, byte "
            f"{where}, has {int(tokens[wrong])}: the shard is damaged or of another tokenizer"
        )

    def shard(self, number: int) -> Shard:
        """One shard, opened when first asked for."""
        with self._lock:
            shard = self._open.get(number)
            if shard is None:
                info = self.manifest.shards[number]
                shard = self._open[number] = self.make_shard(info)
                if len(self._open) > _MAX_OPEN:
                    self._open.popitem(last=False)
            else:
                self._open.move_to_end(number)
            return shard
