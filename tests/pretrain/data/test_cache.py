# SPDX-License-Identifier: Apache-2.0
"""The cache of blocks: bounded, shared, and never a wrong byte."""

import os
import threading

import numpy as np
import pytest

from pretrain.data.cache import PIECE, BlockCache
from pretrain.data.manifest import DataError

SIZE = 3 * PIECE + 100


def block(number, size=SIZE):
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8).tobytes()


class Origin:
    """Where blocks come from; counts how often."""

    def __init__(self):
        self.fetched = []

    def __call__(self, number):
        def fetch():
            self.fetched.append(number)
            return block(number)

        return fetch


def entries(cache):
    return [path for path in (cache.folder / "blocks").glob("*/*") if path.is_file()]


def used(cache):
    return sum(path.stat().st_size for path in entries(cache))


def test_blocks_are_fetched_once_and_read_in_parts(tmp_path):
    cache, origin = BlockCache(tmp_path, 1 << 30), Origin()
    for first, count in ((0, SIZE), (0, 1), (PIECE - 3, 7), (SIZE - 1, 1), (2 * PIECE, PIECE)):
        assert cache.read("one", origin(1), first, count) == block(1)[first : first + count]
    assert cache.read("one", origin(1), 10) == block(1)[10:]
    cache.ensure("one", origin(1))
    other = BlockCache(tmp_path, 1 << 30)
    assert other.read("one", origin(1), 5, 5) == block(1)[5:10]
    assert origin.fetched == [1]
    assert other.read("two", origin(2)) == block(2)
    assert cache.read("two", origin(2)) == block(2)
    assert origin.fetched == [1, 2]


def test_the_limit_holds_and_what_was_used_last_stays(tmp_path):
    limit = 10 * (SIZE + 64)
    cache, origin = BlockCache(tmp_path, limit), Origin()
    for number in range(40):
        assert cache.read(str(number), origin(number)) == block(number)
        assert used(cache) <= limit
        # A use is recorded once in a while; here at once, and later than any other.
        for entry in cache._open.values():
            entry.touched = 0.0
        cache.read("0", origin(0), 0, 1)
        for age, path in enumerate(sorted(entries(cache), key=lambda p: p.stat().st_mtime_ns)):
            os.utime(path, ns=(age * 10**9, age * 10**9))
    assert origin.fetched.count(0) == 1
    assert origin.fetched == sorted(origin.fetched)
    assert len(entries(cache)) >= 7
    # An old one is fetched again; the count of bytes survives a restart and a lost count.
    assert cache.read("5", origin(5)) == block(5)
    assert origin.fetched[-1] == 5
    (tmp_path / "locks" / "usage").write_bytes(b"")
    again = BlockCache(tmp_path, limit)
    assert int((tmp_path / "locks" / "usage").read_text()) == used(again)
    for number in range(40, 60):
        again.read(str(number), origin(number))
        assert used(again) <= limit


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "outside"),
    [
        (lambda path: flip(path, 0), False),
        (lambda path: flip(path, SIZE - 1), False),
        (lambda path: flip(path, SIZE + 2), True),
        (lambda path: flip(path, -1), True),
        (lambda path: flip(path, -10), True),
        (lambda path: os.truncate(path, SIZE // 2), False),
        (lambda path: os.truncate(path, 0), False),
        (lambda path: path.write_bytes(b"x" * 10), False),
    ],
    ids=["first", "last", "sums", "footer", "length", "cut", "empty", "short"],
)
@pytest.mark.parametrize("is_open", [True, False])
def test_a_damaged_entry_is_fetched_again(tmp_path, damage, outside, is_open, caplog):
    cache, origin = BlockCache(tmp_path, 1 << 30), Origin()
    for _ in range(2):  # fetched, then opened
        cache.read("one", origin(1))
    (path,) = entries(cache)
    reader = cache if is_open else BlockCache(tmp_path, 1 << 30)
    damage(path)
    assert reader.read("one", origin(1)) == block(1)
    assert reader.read("one", origin(1)) == block(1)
    if is_open and outside:  # what is open has these in memory: its block is right
        assert origin.fetched == [1]
    else:
        assert origin.fetched == [1, 1]
        assert reader.counts["damaged cache entries fetched again"] == 1
        assert "it is fetched again" in caplog.text
    assert BlockCache(tmp_path, 1 << 30).read("one", origin(1)) == block(1)


def test_a_whole_entry_that_another_process_made_is_not_dropped(tmp_path):
    one, two, origin = BlockCache(tmp_path, 1 << 30), BlockCache(tmp_path, 1 << 30), Origin()
    for cache in (one, one, two):
        cache.read("key", origin(1))
    (path,) = entries(one)
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    with open(path, "r+b") as stream:  # in place: both have it open
        stream.write(content)
    assert one.read("key", origin(1)) == block(1)
    assert two.read("key", origin(1)) == block(1)
    assert origin.fetched == [1, 1]


def test_readers_at_once_fetch_a_block_once(tmp_path):
    origin, results = Origin(), []
    caches = [BlockCache(tmp_path, 1 << 30) for _ in range(8)]
    start = threading.Barrier(8)

    def read(cache):
        start.wait()
        results.extend(cache.read(str(n), origin(n)) == block(n) for n in range(5))

    threads = [threading.Thread(target=read, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 40
    assert sorted(origin.fetched) == [0, 1, 2, 3, 4]
    assert not [path for path in entries(caches[0]) if path.suffix == ".tmp"]


def test_a_full_disk_costs_the_entry_and_is_counted(tmp_path, monkeypatch, caplog):
    cache, origin = BlockCache(tmp_path, 1 << 30), Origin()

    def full(self, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_bytes", full)
        assert cache.read("one", origin(1)) == block(1)
        assert cache.read("one", origin(1)) == block(1)
    assert origin.fetched == [1, 1]
    assert cache.counts["blocks that did not fit on the cache's disk"] == 2
    assert "No space left" in caplog.text
    assert entries(cache) == []


def test_what_a_killed_process_left_does_not_count_and_goes(tmp_path):
    cache, origin = BlockCache(tmp_path, 4 * (SIZE + 64)), Origin()
    (tmp_path / "blocks" / "00").mkdir()
    left = tmp_path / "blocks" / "00" / "abc.1.2.tmp"
    left.write_bytes(b"x" * SIZE)
    os.utime(left, (0, 0))
    for number in range(6):
        cache.read(str(number), origin(number))
    assert not left.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data.cache.dir must be a folder .*file"):
        BlockCache(tmp_path / "file", 1 << 20)
