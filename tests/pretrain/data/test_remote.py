# SPDX-License-Identifier: Apache-2.0
"""Object stores: the samples of the local folder, whatever the network does on the way."""

import importlib.util
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import megatron.core.datasets.indexed_dataset  # noqa: F401  (it looks for boto3 when imported)
import numpy as np
import pytest

from pretrain.data import (
    DataConfig,
    DataError,
    SourceConfig,
    TrainLoader,
    ValidLoader,
    open_dataset,
    open_validation,
)
from pretrain.data.config import CacheConfig
from pretrain.data.store import Retries, Store, open_store
from tests.pretrain.data.s3_server import FaultProxy, s3_server
from tests.pretrain.data.shard_folders import documents, write_folder

ROOT = Path(__file__).resolve().parents[3]
SEQ = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """About 30 blocks of 64 KiB in three shards."""
    root = tmp_path_factory.mktemp("remote")
    write_folder(root / "corpus", documents(30_000, seed=1))
    write_folder(root / "small", documents(300, seed=2), num_shards=2)
    return root


@pytest.fixture(scope="module")
def server(folder):
    with s3_server() as running:
        running.upload(folder, "bucket")
        yield running


def config(options, folder, train="s3://bucket/corpus", cache=None, **more):
    settings = {"block_kib": 64, "first_wait": 0.01, **(cache or {})}
    return DataConfig(
        train=train,
        storage={"s3": options},
        cache=CacheConfig(dir=str(folder), **settings),
        **more,
    )


def remote_counts(dataset):
    return dataset.shards[0]._remote.counts


def test_samples_are_the_local_ones_through_every_fault(folder, server, tmp_path):
    local = open_dataset(DataConfig(train=str(folder / "corpus")), SEQ, seed=3)
    with FaultProxy(server.port, latency=0.002, failures=0.5) as proxy:
        # 25 attempts all fail once in 10**7 requests.
        often = {"attempts": 25, "first_wait": 0.001}
        settings = config(
            server.options(proxy.port), tmp_path / "cache", cache=often, isolate_documents=True
        )
        dataset = open_dataset(settings, SEQ, seed=3)
        assert dataset.fingerprint == local.fingerprint
        ours, theirs = TrainLoader(dataset, 64, 8, prefetch=True), TrainLoader(local, 64, 8)
        windows = local.orders[0].samples_per_epoch
        for consumed in range(0, windows + 64, 64):
            for one, two in zip(ours.step(consumed), theirs.step(consumed), strict=True):
                assert (one["tokens"] == two["tokens"]).all()
                assert (one["labels"] == two["labels"]).all()
        for sample in range(0, 500, 7):
            starts = dataset.document_starts(sample)
            assert starts.tolist() == local.document_starts(sample).tolist()
        counts = remote_counts(dataset)
        ours.close()
    assert all(proxy.counts[fault] >= 1 for fault in ("500", "truncated", "reset"))
    assert counts["requests repeated"] >= 9
    blocks = sum(-(-shard.tokens * 2 // 65_536) for shard in dataset.shards[0].manifest.shards)
    assert blocks > 25
    # Each block once, and of each shard its index and its checksums.
    assert counts["blocks fetched"] == blocks + 2 * 3


def test_validation_reads_urls_and_local_files_mix_in_a_blend(folder, server, tmp_path):
    settings = config(
        server.options(),
        tmp_path / "cache",
        train=[
            SourceConfig(path="s3://bucket/corpus", weight=0.7),
            SourceConfig(path=f"file://{folder / 'small'}", weight=0.3),
        ],
        valid="s3://bucket/small",
    )
    plain = DataConfig(
        train=[
            SourceConfig(path=str(folder / "corpus"), weight=0.7),
            SourceConfig(path=str(folder / "small"), weight=0.3),
        ],
        valid=str(folder / "small"),
    )
    one, two = open_dataset(settings, SEQ, seed=1), open_dataset(plain, SEQ, seed=1)
    assert one.fingerprint == two.fingerprint
    assert all((one.sample(i) == two.sample(i)).all() for i in range(200))
    valid = [open_validation(c, SEQ)[""] for c in (settings, plain)]
    for ours, theirs in zip(*(ValidLoader(v, 8, 4).batches() for v in valid), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a["tokens"] == b["tokens"]).all()
            assert (a["loss_mask"] == b["loss_mask"]).all()
    one.close()
    valid[0].close()


READER = """
import json, sys
from pretrain.data import DataConfig, open_dataset
from pretrain.data.config import CacheConfig
options, cache, count = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = DataConfig(train="s3://bucket/corpus", storage={"s3": options},
                    cache=CacheConfig(dir=cache, block_kib=64))
dataset = open_dataset(config, 64, seed=3)
dataset.fetch(list(range(count)), until_here=True)
total = sum(int(dataset.sample(i).sum()) for i in range(count))
print(json.dumps([total, dict(dataset.shards[0]._remote.counts)]))
"""


def test_processes_of_a_node_share_what_they_fetch(folder, server, tmp_path):
    count = 4000
    local = open_dataset(DataConfig(train=str(folder / "corpus")), SEQ, seed=3)
    expected = sum(int(local.sample(i).sum()) for i in range(count))
    with FaultProxy(server.port, latency=0.05) as proxy:
        command = [sys.executable, "-c", READER, json.dumps(server.options(proxy.port))]
        ranks = [
            subprocess.Popen(
                [*command, str(tmp_path / "cache"), str(count)], cwd=ROOT, stdout=subprocess.PIPE
            )
            for _ in range(2)
        ]
        found = [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    assert [total for total, _ in found] == [expected] * 2
    blocks = sum(-(-shard.tokens * 2 // 65_536) for shard in local.shards[0].manifest.shards)
    assert sum(counts.get("blocks fetched", 0) for _, counts in found) == blocks + 3


def test_fetching_ahead_is_bounded_and_in_order(folder, server, tmp_path):
    dataset = open_dataset(config(server.options(), tmp_path / "cache"), SEQ, seed=3)
    loader = TrainLoader(dataset, 4, 2, dp_rank=1, dp_size=2, ahead_samples=6)
    asked = []
    fetch = dataset.fetch
    dataset.fetch = lambda ids, until_here: (asked.append(ids), fetch(ids, until_here=until_here))
    loader.step(0)
    assert asked == [[2, 3], [6, 7, 10, 11, 14, 15]]
    loader.close()


def test_shards_without_block_checksums_are_read(folder, tmp_path):
    memory = fsspec.filesystem("memory")
    for path in (folder / "small").iterdir():
        if path.suffix != ".crc32":
            memory.pipe(f"/plain/{path.name}", path.read_bytes())
    settings = config({}, tmp_path / "cache", train="memory://plain", isolate_documents=True)
    ours = open_dataset(settings, SEQ, seed=1)
    theirs = open_dataset(DataConfig(train=str(folder / "small")), SEQ, seed=1)
    assert all((ours.sample(i) == theirs.sample(i)).all() for i in range(100))
    assert ours.document_starts(5).tolist() == theirs.document_starts(5).tolist()
    ours.close()


@pytest.fixture
def in_memory(folder, tmp_path):
    """A copy in fsspec's memory that a test may damage, and the settings that read it."""
    memory = fsspec.filesystem("memory")
    place = f"/broken-{tmp_path.name}"
    for path in (folder / "corpus").iterdir():
        memory.pipe(f"{place}/{path.name}", path.read_bytes())
    settings = config({}, tmp_path / "cache", train=f"memory:/{place}", cache={"attempts": 3})
    return memory, place, settings


def read_all(dataset):
    for sample in range(dataset.orders[0].samples_per_epoch):
        dataset.window(sample)


def test_bytes_that_change_in_the_store_are_named(in_memory):
    memory, place, settings = in_memory
    content = bytearray(memory.cat_file(f"{place}/shard_00001.bin"))
    content[200_000] ^= 1
    memory.pipe(f"{place}/shard_00001.bin", bytes(content))
    dataset = open_dataset(settings, SEQ, seed=3)
    with pytest.raises(DataError, match=r"shard_00001.bin.* 196608 on are not those that were wr"):
        read_all(dataset)
    assert remote_counts(dataset)["requests repeated"] == 2


def test_a_shard_that_vanishes_is_named(in_memory):
    memory, place, settings = in_memory
    dataset = open_dataset(settings, SEQ, seed=3)
    loader = TrainLoader(dataset, 8, 8, prefetch=True, ahead_samples=1)
    loader.step(0)
    memory.rm(f"{place}/shard_00002.bin")
    with pytest.raises(DataError, match=r"shard_00002.bin.*FileNotFoundError"):
        [loader.step(consumed) for consumed in range(8, 14_000, 8)]
    loader.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda m, p: m.rm(f"{p}/shard_00001.bin"), "shard_00001.bin is missing"),
        (lambda m, p: m.rm(f"{p}/shard_00001.idx"), "shard_00001.idx is missing"),
        (lambda m, p: m.pipe(f"{p}/shard_00000.bin", b"12"), "shard_00000.bin ends at byte 2"),
        (lambda m, p: m.rm(f"{p}/manifest.json"), "must hold manifest.json; no memory://"),
        (lambda m, p: m.pipe(f"{p}/manifest.json", b"{"), "whole and of version 1"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused_at_the_start(in_memory, damage, words):
    memory, place, settings = in_memory
    damage(memory, place)
    with pytest.raises(DataError, match=words):
        open_dataset(settings, SEQ, seed=3)


def test_an_index_that_is_not_the_manifests_is_named(in_memory):
    memory, place, settings = in_memory
    content = bytearray(memory.cat_file(f"{place}/shard_00000.idx"))
    content[-1] ^= 1
    memory.pipe(f"{place}/shard_00000.idx", bytes(content))
    with pytest.raises(DataError, match=r"shard_00000.idx: .*checksum is not the manifest's"):
        open_dataset(settings, SEQ, seed=3).shards[0].document_starts(0, 100)


class Flaky:
    """A way into a store that fails as it is told."""

    def __init__(self, *outcomes):
        self.outcomes, self.times = list(outcomes), []

    def read(self, url, first, count):
        self.times.append(time.monotonic())
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def test_waits_double_and_short_answers_are_asked_for_again():
    backend = Flaky(OSError("reset"), b"123", TimeoutError(), b"1234")
    store = Store("x://y", backend, Retries(attempts=4, first_wait=0.04))
    assert store.read("name", 0, 4) == b"1234"
    gaps = np.diff(backend.times)
    # Jitter takes at most half.
    assert all(gap >= wait / 2 for gap, wait in zip(gaps, (0.04, 0.08, 0.16), strict=True))
    assert store.counts == {"requests": 4, "requests repeated": 3}


def test_attempts_end_and_final_errors_are_not_repeated():
    store = Store("x://y", Flaky(*[OSError("again")] * 3), Retries(attempts=3, first_wait=0.001))
    with pytest.raises(DataError, match=r"within 3 attempts; x://y/name, bytes 0 to 3: OSError"):
        store.read("name", 0, 4)
    for error in (FileNotFoundError("gone"), PermissionError("no"), ImportError("none")):
        backend = Flaky(error)
        with pytest.raises(DataError, match=r"x://y/name, bytes 0 to 3"):
            Store("x://y", backend, Retries()).read("name", 0, 4)
        assert len(backend.times) == 1


def test_a_store_that_does_not_answer_fails_in_bounded_time(tmp_path):
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "x", "secret": "y"}
    began = time.monotonic()
    settings = config(options, tmp_path, cache={"attempts": 3})
    with pytest.raises(DataError, match=r"within 3 attempts; s3://bucket/corpus/manifest.json"):
        open_dataset(settings, SEQ, seed=1)
    assert time.monotonic() - began < 120


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    with pytest.raises(DataError, match=r"package of its protocol; nosuch://x"):
        open_store("nosuch://x")
    with pytest.raises(DataError, match="megatron-core reads s3:// and msc:// only"):
        open_store("gs://x", reader="megatron_core")
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    for package in ("s3fs", "boto3"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=r"install s3fs"):
        open_store("s3://bucket/x")


def test_megatron_cores_own_s3_reader(folder, server, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    settings = config({}, tmp_path / "cache", cache={"reader": "megatron_core"})
    ours = open_dataset(settings, SEQ, seed=1)
    theirs = open_dataset(DataConfig(train=str(folder / "corpus")), SEQ, seed=1)
    ours.fetch(list(range(300)), until_here=True)
    assert all((ours.sample(i) == theirs.sample(i)).all() for i in range(300))
    assert ours.document_starts(5).tolist() == theirs.document_starts(5).tolist()
    with pytest.raises(DataError, match=r"must hold manifest.json; no s3://bucket/nothing"):
        open_dataset(config({}, tmp_path, train="s3://bucket/nothing"), SEQ, seed=1)
    ours.close()


@pytest.mark.skipif(
    importlib.util.find_spec("multistorageclient") is None,
    reason="needs the package multi-storage-client",
)
def test_megatron_cores_own_msc_reader(folder, tmp_path, monkeypatch):
    storage = {"type": "file", "options": {"base_path": str(folder)}}
    (tmp_path / "msc.json").write_text(
        json.dumps({"profiles": {"here": {"storage_provider": storage}}})
    )
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    more = {"cache": {"reader": "megatron_core"}, "train": "msc://here/corpus"}
    ours = open_dataset(config({}, tmp_path / "cache", **more), SEQ, seed=1)
    theirs = open_dataset(DataConfig(train=str(folder / "corpus")), SEQ, seed=1)
    assert all((ours.sample(i) == theirs.sample(i)).all() for i in range(300))
    ours.close()


def test_reading_while_the_cache_is_emptied(in_memory, tmp_path):
    """Another process, or a clean-up of the temporary folder, deletes entries at any time."""
    _, _, settings = in_memory
    dataset, done = open_dataset(settings, SEQ, seed=3), threading.Event()

    def clean():
        while not done.wait(0.01):
            for path in (tmp_path / "cache" / "blocks").glob("*/*"):
                path.unlink(missing_ok=True)

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        local = [dataset.sample(i).tolist() for i in range(300)]
    finally:
        done.set()
        cleaner.join(10)
    again = open_dataset(settings, SEQ, seed=3)
    assert [again.sample(i).tolist() for i in range(300)] == local
