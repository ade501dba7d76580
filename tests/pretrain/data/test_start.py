# SPDX-License-Identifier: Apache-2.0
"""A start over 10 T tokens in 100 000 shards, and memory over 100 000 batches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pretrain.data.measure import fake_manifest, synthetic_folder

ROOT = Path(__file__).resolve().parents[3]

START = """
import json, sys, time
from pathlib import Path
from pretrain.data import DataConfig, open_dataset
open_dataset  # imports numpy and pydantic before the clock starts
began = time.process_time()
dataset = open_dataset(DataConfig(train=sys.argv[1]), 8192, seed=1)
places = [dataset.place(sample) for sample in (0, 10**8, 10**9)]
seconds = time.process_time() - began
# Not getrusage: its peak counts the process that started this one.
lines = Path("/proc/self/status").read_text().splitlines()
used = next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM:"))
print(json.dumps([seconds, used, dataset.shards[0].tokens, places]))
"""

BATCHES = """
import json, sys
from pathlib import Path
from pretrain.data import DataConfig, SourceConfig, TrainLoader, open_dataset
from pretrain.data.config import CacheConfig
from pretrain.data.loader import BatchOptions
local, remote, cache, count = *sys.argv[1:4], int(sys.argv[4])

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))

config = DataConfig(
    train=[SourceConfig(path=local, weight=0.8), SourceConfig(path=remote, weight=0.2)],
    isolate_documents=True, cache=CacheConfig(dir=cache, size_gib=0.01, block_kib=64),
)
dataset = open_dataset(config, 512, seed=1)
loader = TrainLoader(dataset, 2, 1, options=BatchOptions.of(config), prefetch=True)
seen = []
for step in range(count // 2 + 1):
    if step % (count // 20) == 0:
        seen.append(resident())
    loader.step(2 * step)
loader.close()
print(json.dumps(seen))
"""


def program(text, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_manifest_of_100_000_shards(tmp_path):
    fake_manifest(tmp_path, 100_000)
    seconds, megabytes, tokens, places = program(START, tmp_path)
    assert tokens == 100_000 * 100_000_000 + 100_000 * 99_999 // 2
    assert seconds < 5
    assert megabytes < 1000
    assert all(0 <= start < tokens for _, start in places)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_flat_over_100_000_batches(tmp_path):
    """A blend of a local folder and one behind fsspec, whose cache holds a third of it."""
    for name in ("local", "far"):
        synthetic_folder(tmp_path / name, 1 << 24)
    remote = f"local://{tmp_path / 'far'}"
    seen = program(BATCHES, tmp_path / "local", remote, tmp_path / "cache", 100_000)
    assert len(seen) == 11
    # After a tenth of the batches every table has its size; a leak of 100 bytes a batch is 9 MB.
    print(seen)
    assert max(seen[1:]) - seen[1] < 8
