# SPDX-License-Identifier: Apache-2.0
"""From an object store with injected latency and failures, the training loop does not wait."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.data.measure import synthetic_folder
from tests.pretrain.data.s3_server import FaultProxy, s3_server

ROOT = Path(__file__).resolve().parents[3]
RANKS, TOKENS_PER_SECOND, SEQ, MICRO = 8, 45_000, 8192, 2
# Between the data and the first step a run makes its model; that takes longer on any GPU.
SET_UP = 3.0

# One rank of the training loop: the computation of a step is a sleep of its length.
RANK = """
import json, sys, time
import torch
from pretrain.data import DataConfig, TrainLoader, open_dataset
from pretrain.data.config import CacheConfig

torch.set_num_threads(1)
options, cache, rank, ranks, seq, micro, speed, steps, set_up = json.loads(sys.argv[1])
config = DataConfig(
    train="s3://bucket/corpus", storage={"s3": options}, chunk_tokens=524_288, chunks_per_group=4,
    cache=CacheConfig(dir=cache, block_kib=64),
)
dataset = open_dataset(config, seq, seed=1)
loader = TrainLoader(dataset, micro * ranks, micro, rank, ranks, prefetch=True)
print("ready", flush=True)
sys.stdin.readline()
if set_up:
    loader.prepare(0)
    time.sleep(set_up)
waits, late, began = [], 0.0, time.perf_counter()
for step in range(steps):
    asked = time.perf_counter()
    loader.step(step * micro * ranks)
    waits.append(time.perf_counter() - asked)
    slept = time.perf_counter()
    time.sleep(micro * seq / speed)
    late += time.perf_counter() - slept - micro * seq / speed
total = time.perf_counter() - began
counts = dict(dataset.shards[0]._remote.counts)
loader.close()
print(json.dumps([total, waits, counts, late / total]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_ranks_wait_less_than_half_a_percent(tmp_path):
    """50 ms of latency, 1 % failures, 45 000 tokens a second a rank; a new group every 6 s.

    The first step counts: it is read while the run is set up.
    """
    folder, steps = synthetic_folder(tmp_path / "corpus", 1 << 24), 140
    with s3_server() as server:
        server.upload(folder.parent, "bucket")
        with FaultProxy(server.port, latency=0.05, failures=0.01) as proxy:
            found = _train(server.options(proxy.port), tmp_path / "cache", steps, SET_UP)
            counts = dict(proxy.counts)
            unprepared = _train(server.options(proxy.port), tmp_path / "other", 1, 0)
    fetched = sum(counts.get("blocks fetched", 0) for _, _, counts, _ in found)
    repeated = sum(counts.get("requests repeated", 0) for _, _, counts, _ in found)
    faults = sum(counts.get(name, 0) for name in ("500", "truncated", "reset"))
    first = max(waits[0] for _, waits, *_ in found)
    cold = max(waits[0] for _, waits, *_ in unprepared)
    shares = [sum(waits) / total for total, waits, *_ in found]
    print(
        f"{RANKS} ranks, {steps} steps of {MICRO} samples of {SEQ}: {fetched} blocks fetched, "
        f"{counts['requests']} requests, {faults} failed, {repeated} repeated; waits at most "
        f"{max(shares):.4%} of the time, {first:.3f} s of it at the first step, "
        f"which waits {cold:.3f} s where it is not prepared"
    )
    # Each block is fetched by one rank, and the checksums of each shard.
    blocks = sum(-(-path.stat().st_size // 65_536) for path in folder.glob("*.bin"))
    assert fetched == blocks + 2
    assert faults >= 1
    assert repeated >= 1
    late = max(late for *_, late in found)
    if max(shares) >= 0.005 and late > 0.002:
        pytest.skip(
            f"the machine is too busy to tell: sleeps of ranks ended late by {late:.2%} of the "
            f"time, without any data; they waited {max(shares):.2%} of it for batches"
        )
    assert max(shares) < 0.005


def _train(options, cache, steps, set_up):
    ranks = []
    for rank in range(RANKS):
        task = [options, str(cache), rank, RANKS, SEQ, MICRO, TOKENS_PER_SECOND, steps, set_up]
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK, json.dumps(task)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for process in ranks:
            assert process.stdout.readline() == "ready\n"
        for process in ranks:  # together, as after a barrier
            process.stdin.write("go\n")
            process.stdin.flush()
        return [json.loads(process.communicate(timeout=400)[0]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
