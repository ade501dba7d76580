# SPDX-License-Identifier: Apache-2.0
"""A bounded folder of blocks on a node's disk, shared by its processes.

An entry is one file: the block, a CRC-32 of each 64 KiB of it, and a footer. It appears by a
rename, so it is whole or absent; every read checks the pieces that it touches, and a damaged entry
is dropped and fetched again. The bytes that all entries take are counted in one file under a lock;
when they pass the limit, those that were used longest ago are deleted. A process that has an entry
open keeps reading it, deleted or not.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import struct
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pretrain.data.manifest import DataError

log = logging.getLogger(__name__)

PIECE = 65_536
"""Bytes under one checksum: the blocks of a shard's NAME.crc32."""

_FOOTER = struct.Struct("<8sQII")  # magic, bytes of the block, CRC-32 of the sums, CRC-32 of these
_MAGIC = b"BLOCK-01"
_STRIPES = 256

# A deleted entry takes room on the disk for as long as it is open: few are kept.
_KEPT_OPEN = 64

# After an eviction this share of the limit is left.
_LOW_WATER = 0.9

# A use is recorded once in this many seconds: a rename or a timestamp per read would cost more.
_TOUCH_SECONDS = 30.0


def piece_sums(content: bytes | memoryview) -> np.ndarray:
    """uint32[pieces]: CRC-32 of each 64 KiB."""
    view = memoryview(content)
    return np.array([zlib.crc32(view[at : at + PIECE]) for at in range(0, len(view), PIECE)], "<u4")


class _Entry:
    """One open block: reads are checked."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when there is none, ValueError when its end is damaged."""
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        size = os.fstat(self.descriptor).st_size
        footer = os.pread(self.descriptor, _FOOTER.size, max(0, size - _FOOTER.size))
        if len(footer) < _FOOTER.size or zlib.crc32(footer[:-4]) != _FOOTER.unpack(footer)[3]:
            raise ValueError("its footer is damaged")
        magic, self.length, of_sums, _ = _FOOTER.unpack(footer)
        pieces = -(-self.length // PIECE)
        if magic != _MAGIC or size != self.length + 4 * pieces + _FOOTER.size:
            raise ValueError("its size is not that of its block")
        sums = os.pread(self.descriptor, 4 * pieces, self.length)
        if zlib.crc32(sums) != of_sums:
            raise ValueError("its checksums are damaged")
        self.sums = np.frombuffer(sums, "<u4")
        self.touched = 0.0

    def read(self, first: int, count: int | None) -> bytes:
        """Bytes [first, first + count) of the block. Raises ValueError when they are damaged."""
        count = self.length - first if count is None else count
        low = first // PIECE
        high = min(-(-(first + count) // PIECE), self.sums.size)
        end = min(high * PIECE, self.length)
        content = os.pread(self.descriptor, end - low * PIECE, low * PIECE)
        if (piece_sums(content) != self.sums[low:high]).any() if content else count:
            raise ValueError(f"its bytes {low * PIECE} to {end - 1} are damaged")
        self._touch()
        return content[first - low * PIECE : first - low * PIECE + count]

    def _touch(self) -> None:
        now = time.monotonic()
        if now - self.touched > _TOUCH_SECONDS:
            self.touched = now
            with contextlib.suppress(OSError):
                os.utime(self.descriptor)

    def __del__(self) -> None:
        descriptor = self.__dict__.pop("descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


class BlockCache:
    """Blocks by key, at most `limit` bytes of them on disk.

    Attributes:
        counts: "blocks fetched", "bytes fetched", "damaged cache entries fetched again",
            "blocks that did not fit on the cache's disk".
    """

    def __init__(self, folder: Path, limit: int) -> None:
        """Makes the folder. Raises DataError when it cannot be written."""
        self.folder, self.limit = folder, limit
        self.counts: Counter[str] = Counter()
        self._open: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        try:
            for name in ("blocks", "locks"):
                (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked("usage") as usage:
                if _read_total(usage) is None:
                    _write_total(usage, self._evict(0))
        except OSError as error:
            raise DataError(
                f"data.cache.dir must be a folder that can be written; {folder}: {error.strerror}"
            ) from None

    def read(
        self, key: str, fetch: Callable[[], bytes], first: int = 0, count: int | None = None
    ) -> bytes:
        """Bytes [first, first + count) of the block `key`, which `fetch` gets where it is absent.

        `count` None: to the end of the block.
        """
        name = hashlib.sha256(key.encode()).hexdigest()
        entry = self._entry(name)
        if entry is not None:
            try:
                return entry.read(first, count)
            except ValueError as error:
                self._drop(name, str(error), entry)
        content = self._fill(name, fetch)
        if content is None:  # another thread or process was first
            return self.read(key, fetch, first, count)
        return content[first : None if count is None else first + count]

    def ensure(self, key: str, fetch: Callable[[], bytes]) -> None:
        """Brings the block `key` here where it is absent."""
        name = hashlib.sha256(key.encode()).hexdigest()
        if not self._path(name).exists():
            self._fill(name, fetch)

    # ---- entries

    def _path(self, name: str) -> Path:
        return self.folder / "blocks" / name[:2] / name

    def _entry(self, name: str) -> _Entry | None:
        with self._lock:
            entry = self._open.get(name)
            if entry is not None:
                self._open.move_to_end(name)
                return entry
        try:
            entry = _Entry(self._path(name))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._drop(name, str(error))
            return None
        with self._lock:
            self._open[name] = entry
            while len(self._open) > _KEPT_OPEN:
                self._open.popitem(last=False)
        return entry

    def _drop(self, name: str, reason: str, entry: _Entry | None = None) -> None:
        log.warning("cache entry %s: %s; it is fetched again", self._path(name), reason)
        self._count("damaged cache entries fetched again")
        with self._lock:
            self._open.pop(name, None)
        with contextlib.suppress(OSError), self._locked("usage") as usage:
            about = self._path(name).stat()
            # Another process may have put a whole one in its place.
            if entry is None or about.st_ino == os.fstat(entry.descriptor).st_ino:
                self._path(name).unlink()
                _write_total(usage, max(0, (_read_total(usage) or 0) - about.st_size))

    def _fill(self, name: str, fetch: Callable[[], bytes]) -> bytes | None:
        """Fetches and keeps a block; None when somebody else did so meanwhile."""
        with self._locked(f"{int(name[:8], 16) % _STRIPES:03d}"):
            if self._path(name).exists():
                return None
            content = fetch()
            self._count("blocks fetched")
            self._count("bytes fetched", len(content))
            try:
                self._keep(name, content)
            except OSError as error:
                self._count("blocks that did not fit on the cache's disk")
                log.warning("a block is not kept in %s: %s", self.folder, error.strerror or error)
            return content

    def _keep(self, name: str, content: bytes) -> None:
        sums = piece_sums(content).tobytes()
        footer = _FOOTER.pack(_MAGIC, len(content), zlib.crc32(sums), 0)[:-4]
        whole = b"".join((content, sums, footer, struct.pack("<I", zlib.crc32(footer))))
        path = self._path(name)
        path.parent.mkdir(exist_ok=True, mode=0o700)
        temporary = path.with_name(f"{name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            temporary.write_bytes(whole)
            with self._locked("usage") as usage:
                total = (_read_total(usage) or 0) + len(whole)
                if total > self.limit:
                    total = self._evict(len(whole)) + len(whole)
                _write_total(usage, total)
                os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def _evict(self, coming: int) -> int:
        """Deletes what was used longest ago; returns the bytes that are left. Holds the lock."""
        found = []
        for path in (self.folder / "blocks").glob("*/*"):
            with contextlib.suppress(OSError):
                about = path.stat()
                if path.suffix != ".tmp":
                    found.append((about.st_mtime_ns, about.st_size, path))
                elif time.time() - about.st_mtime > 3600:  # left by a process that was killed
                    path.unlink()
        left = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if left + coming <= _LOW_WATER * self.limit:
                break
            with contextlib.suppress(OSError):
                path.unlink()
            left -= size
        return left

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        """Holds a lock file among all threads and processes of the node; gives its descriptor."""
        descriptor = os.open(self.folder / "locks" / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _count(self, name: str, count: int = 1) -> None:
        with self._lock:
            self.counts[name] += count


def _read_total(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0)
    return int(text) if text.strip().isdigit() else None


def _write_total(descriptor: int, total: int) -> None:
    os.pwrite(descriptor, f"{total:<32d}".encode(), 0)
