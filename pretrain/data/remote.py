# SPDX-License-Identifier: Apache-2.0
"""Shards in an object store: blocks through the node's cache, fetched before they are needed."""

import hashlib
import logging
import os
import tempfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from pretrain.data.cache import PIECE, BlockCache, piece_sums
from pretrain.data.config import CacheConfig, DataConfig
from pretrain.data.manifest import DataError, Manifest, ShardInfo, load_manifest
from pretrain.data.shards import (
    ITEM_SIZES,
    ShardIndex,
    ShardSet,
    check_index_against,
    parse_index,
    size_problems,
)
from pretrain.data.store import (
    DamagedError,
    Retries,
    Store,
    is_url,
    join,
    local_path,
    open_store,
)

log = logging.getLogger(__name__)

# Requests whose blocks are known to have been asked for; older ones may be asked for again.
_REMEMBERED = 1 << 12


class Remote:
    """How a process reads object stores: one cache and one pool of requests for all folders."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self._cache: BlockCache | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._stores: list[Store] = []
        self._asked: OrderedDict[tuple[str, int], Future[None]] = OrderedDict()
        self._lock = threading.Lock()

    def store(self, url: str) -> Store:
        """The folder at a URL."""
        cache = self.config.cache
        store = open_store(
            url, self.config.storage, cache.reader, Retries(cache.attempts, cache.first_wait)
        )
        self._stores.append(store)
        return store

    @property
    def cache(self) -> BlockCache:
        """The node's cache; made when first used."""
        with self._lock:
            if self._cache is None:
                settings = self.config.cache
                self._cache = BlockCache(cache_folder(settings), int(settings.size_gib * 2**30))
            return self._cache

    def ask(self, shard: "RemoteShard", blocks: Iterable[int]) -> list[Future[None]]:
        """Starts to bring blocks of a shard here; those asked for before are not asked again."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.config.cache.workers, "data-fetch")
        found = []
        for block in blocks:
            key = (shard.key, block)
            with self._lock:
                future = self._asked.get(key)
                if future is None:
                    future = self._pool.submit(self._bring, shard, block)
                    self._asked[key] = future
                    while len(self._asked) > _REMEMBERED:
                        self._asked.popitem(last=False)
            found.append(future)
        return found

    def _bring(self, shard: "RemoteShard", block: int) -> None:
        try:
            shard.bring(block)
        except DataError as error:
            # Raised again where the bytes are read, after other attempts.
            log.info("fetched ahead in vain: %s", error)
            with self._lock:
                self._asked.pop((shard.key, block), None)

    @property
    def counts(self) -> Counter[str]:
        """What was fetched, repeated and found damaged by this process."""
        total: Counter[str] = Counter(self._cache.counts if self._cache else {})
        for store in self._stores:
            total.update(store.counts)
        return total

    def close(self) -> None:
        """Ends the pool; requests under way are waited for."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        counts = self.counts
        if counts["requests repeated"] or counts["damaged cache entries fetched again"]:
            said = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
            log.warning("data from object stores: %s", said)


def cache_folder(config: CacheConfig) -> Path:
    """The cache's folder: the one that is set, or one of this user in the temporary folder."""
    if config.dir is not None:
        return Path(config.dir)
    return Path(tempfile.gettempdir()) / f"nibble-data-{os.getuid()}"


class RemoteShard:
    """One shard of a folder in an object store."""

    def __init__(self, remote: Remote, store: Store, info: ShardInfo) -> None:
        self.info, self.dtype = info, np.dtype(info.dtype)
        self.bin_name = join(store.url, f"{info.name}.bin")
        self._remote, self._store = remote, store
        self._size = info.tokens * ITEM_SIZES[info.dtype]
        self._block = remote.config.cache.block_kib * 1024
        # By content, so that a folder that was replaced is not read from older entries.
        self.key = f"{info.bin_checksum}|{info.tokens}|{info.dtype}|{self._block}"
        self._starts: np.ndarray | None = None
        self._sums: np.ndarray | None = None
        self._has_sums: bool | None = None
        self._lock = threading.Lock()

    def blocks(self, first: int, count: int) -> range:
        """Numbers of the blocks that hold tokens [first, first + count)."""
        size = self.dtype.itemsize
        return range(first * size // self._block, -(-(first + count) * size // self._block))

    def bring(self, number: int) -> None:
        """Has a block in the cache afterwards. Raises DataError."""
        self._remote.cache.ensure(f"{self.key}|{number}", partial(self._fetch, number))

    def read(self, first: int, count: int) -> np.ndarray:
        """Tokens [first, first + count) of the shard, in the shard's own type; not writable."""
        low, high = first * self.dtype.itemsize, (first + count) * self.dtype.itemsize
        parts = []
        for number in self.blocks(first, count):
            start = number * self._block
            at, end = max(low, start) - start, min(high, start + self._block) - start
            parts.append(
                self._remote.cache.read(
                    f"{self.key}|{number}", partial(self._fetch, number), at, end - at
                )
            )
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)

    def document_starts(self) -> np.ndarray:
        """int64[documents]: token of the shard at which each document starts."""
        if self._starts is None:
            index = self._index()
            check_index_against(self._store_name(".idx"), index, self.info)
            self._starts = index.document_starts()
        return self._starts

    def _store_name(self, suffix: str) -> str:
        return join(self._store.url, self.info.name + suffix)

    def _fetch(self, number: int) -> bytes:
        """A block from the store, checked against the shard's NAME.crc32 where it has one."""
        first = number * self._block
        count = min(self._block, self._size - first)
        sums = self._checksums()

        def check(content: bytes) -> None:
            if sums is None:
                return
            pieces = sums[first // PIECE : -(-(first + count) // PIECE)]
            wrong = np.flatnonzero(piece_sums(content) != pieces)
            if wrong.size:
                at = first + int(wrong[0]) * PIECE
                raise DamagedError(f"the bytes from {at} on are not those that were written")

        return self._store.read(f"{self.info.name}.bin", first, count, check)

    def _checksums(self) -> np.ndarray | None:
        """The shard's NAME.crc32; None where it has none, as shards of other tools."""
        with self._lock:
            if self._sums is None:
                content = self._remote.cache.read(f"{self.key}|crc32", self._fetch_checksums)
                self._sums = np.frombuffer(content, "<u4")
            return self._sums if self._sums.size else None

    def _fetch_checksums(self) -> bytes:
        expected = 4 * -(-self._size // PIECE)

        def check(content: bytes) -> None:
            if len(content) != expected:
                raise DamagedError(f"{len(content)} of {expected} bytes arrived")

        return self._store.read_optional(f"{self.info.name}.crc32", check) or b""

    def _index(self) -> ShardIndex:
        where = self._store_name(".idx")

        def check(content: bytes) -> None:
            found = "sha256:" + hashlib.sha256(content).hexdigest()
            if found != self.info.idx_checksum:
                raise DamagedError("its checksum is not the manifest's")

        def fetch() -> bytes:
            try:
                return self._store.read_all(f"{self.info.name}.idx", check)
            except FileNotFoundError:
                raise DataError(f"each shard must have an index; {where} is missing") from None

        key = f"{self.info.idx_checksum}|idx|{self.info.tokens}|{self.info.documents}"
        return parse_index(self._remote.cache.read(key, fetch), where)


class RemoteShardSet(ShardSet):
    """The shards of a folder in an object store as one ring."""

    def __init__(self, url: str, manifest: Manifest, remote: Remote) -> None:
        self._remote, self._store = remote, remote.store(url)
        super().__init__(url, manifest)

    def check_start(self) -> None:
        """Every file is there, with the size that the manifest says, or DataError."""
        sizes, folder = self._store.sizes(), f"{self._store.url}/"
        problems: list[str] = []
        for info in self.manifest.shards:
            problems += size_problems(sizes, folder, info)
        if problems:
            raise DataError(problems)

    def make_shard(self, info: ShardInfo) -> RemoteShard:
        """Nothing is read yet."""
        return RemoteShard(self._remote, self._store, info)

    def fetch(self, windows: Iterable[tuple[int, int]], *, until_here: bool) -> None:
        """Starts to bring windows (start, count) here in that order; waits for them or not."""
        started: list[Future[None]] = []
        for start, count in windows:
            for number, first, taken in self.parts(start, count):
                shard = self.shard(number)
                assert isinstance(shard, RemoteShard), "make_shard makes no others"
                started += self._remote.ask(shard, shard.blocks(first, taken))
        if until_here:
            for future in started:
                future.result()

    def close(self) -> None:
        """Ends the pool of requests and says what had to be repeated."""
        self._remote.close()


def open_manifest(path: str, remote: Remote) -> Manifest:
    """The manifest of a folder on this machine or in an object store. Raises DataError."""
    return load_manifest(path, remote.store(path)) if is_url(path) else load_manifest(path)


def open_shards(path: str, manifest: Manifest, remote: Remote) -> ShardSet:
    """The shards of a folder on this machine or in an object store. Raises DataError."""
    if is_url(path):
        return RemoteShardSet(path, manifest, remote)
    return ShardSet(local_path(path), manifest)
