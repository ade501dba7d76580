# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several processes, and of processes that are killed in the middle of a save."""

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

from pretrain.checkpoint.manager import find_latest
from tests.pretrain.checkpoint_trial import Ranks, run

STEPS = 10


def options(**checkpoint):
    return {"checkpoint": {"interval": 1, **checkpoint}}


def train(world_size, run_dir, until, wanted):
    with Ranks(world_size, run, run_dir, wanted, until) as ranks:
        return ranks.results()


@pytest.mark.parametrize(
    "asynchronous",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["sync", "async"],
)
def test_two_data_parallel_ranks_resume_bitwise(tmp_path, asynchronous):
    wanted = options(interval=2, async_save=asynchronous)
    straight = train(2, tmp_path / "a", 6, wanted)
    train(2, tmp_path / "b", 3, {**wanted, "checkpoint": {**wanted["checkpoint"], "interval": 3}})
    resumed = train(2, tmp_path / "b", 6, wanted)
    for rank in (0, 1):
        assert resumed[rank]["from"] == 3
        assert resumed[rank]["losses"] == straight[rank]["losses"][3:]
        assert np.array_equal(resumed[rank]["weights"], straight[rank]["weights"])
    files = os.listdir(tmp_path / "b" / "checkpoints" / "step_00000006")
    assert {"rng_00000.json", "rng_00001.json"} <= set(files)


def test_tensor_parallel_two_continues_as_one_and_as_data_parallel(tmp_path):
    """Model and optimizer reshard; without dropout the losses go on as they were.

    FP32: the order of sums differs between layouts, by 1e-7 of a loss near 4 in a step; the bound
    is ten times that for each of the two steps.
    """
    wanted = {**options(interval=2), "dtype": "fp32", "dropout": 0.0}
    split = {**wanted, "parallel": {"tensor_model_parallel_size": 2}}
    straight = train(2, tmp_path, 4, split)[0]
    (tmp_path / "checkpoints" / "step_00000004" / "COMPLETE").unlink()
    later = options(interval=0)["checkpoint"]
    for world_size in (1, 2):
        result = train(world_size, tmp_path, 4, {**wanted, "checkpoint": later})[0]
        assert result["from"] == 2
        assert result["losses"] == pytest.approx(straight["losses"][2:], abs=2e-6 * 4)
        assert any("random generators start anew" in note for note in result["notes"])
        assert "changed parallel.tensor_model_parallel_size: 2 -> 1" in result["notes"]


def test_a_shard_damaged_on_one_rank_is_named_by_all(tmp_path):
    wanted = options(keep_last=0)
    train(2, tmp_path, 2, wanted)
    shard = tmp_path / "checkpoints" / "step_00000002" / "__1_0.distcp"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    results = train(2, tmp_path, 2, wanted)
    for result in results:
        assert result["from"] == 1
        assert "step_00000002/__1_0.distcp is damaged" in result["skipped"][0]


def children(pid):
    """Processes forked by a process that still runs."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def writers_of(ranks):
    """The forked processes of all ranks that write right now."""
    return [pid for process in ranks.processes for pid in children(process.pid)]


def await_writer(ranks):
    """Until some rank has forked its writer: a kill now lands in the middle of its work."""
    end = time.monotonic() + 5
    while not writers_of(ranks) and time.monotonic() < end:
        time.sleep(0.001)


def kill_during_saves(run_dir, world_size, wanted, kills, seed):
    """Start, kill at a random moment of a save, start again..., then finish; compare everything.

    Each start must find the newest checkpoint that was finished, or the one being finished when it
    was killed, and give the losses of the run that nobody killed.
    """
    draw = random.Random(seed)
    asynchronous = wanted["checkpoint"]["async_save"]
    straight = train(world_size, run_dir / "straight", STEPS, options(interval=0))
    losses = straight[0]["losses"]
    killed = run_dir / "killed"
    finished, length, writers = 0, 0.3, 0
    for _ in range(kills):
        with Ranks(world_size, run, killed, wanted, STEPS) as ranks:
            begun, started = 0, None
            after = draw.choice([1, 2, 3])
            for kind, step, loss in ranks.messages():
                if kind == "step":
                    if started is None:
                        started = step - 1
                        assert started >= finished, f"step {finished} was finished and is lost"
                    assert loss == losses[step - 1], f"step {step} after a resume at {started}"
                elif kind == "saving":
                    begun += 1
                    moment = time.perf_counter()
                    if begun == after or step == STEPS - 1:
                        if asynchronous and draw.random() < 0.5:
                            await_writer(ranks)
                        else:
                            time.sleep(draw.uniform(0, 1.2 * length))
                        break
                elif kind == "saved":
                    length = time.perf_counter() - moment
                    # an asynchronous save is finished when the next one returns
                    finished = step - 1 if asynchronous else step
            forked = writers_of(ranks)
            ranks.kill()
            writers += len(forked)
            end = time.monotonic() + 5
            while not all(gone(pid) for pid in forked) and time.monotonic() < end:
                time.sleep(0.01)
            assert all(gone(pid) for pid in forked), "a writer outlived its run"
        found = find_latest(killed) if (killed / "checkpoints").is_dir() else None
        assert (found.step if found else 0) >= finished
    results = train(world_size, killed, STEPS, wanted)
    for rank, result in enumerate(results):
        assert result["losses"] == losses[result["from"] :]
        assert np.array_equal(result["weights"], straight[rank]["weights"])
    return writers


@pytest.mark.parametrize(
    ("world_size", "asynchronous", "kills"),
    [
        pytest.param(1, False, 2, marks=pytest.mark.slow),
        (1, True, 2),
        pytest.param(2, False, 1, marks=pytest.mark.slow),
        pytest.param(2, True, 1, marks=pytest.mark.slow),
    ],
    ids=["sync", "async", "sync2", "async2"],
)
def test_killed_during_saves(tmp_path, world_size, asynchronous, kills):
    wanted = options(async_save=asynchronous, keep_last=2)
    kill_during_saves(tmp_path, world_size, wanted, kills, seed=world_size + 10 * asynchronous)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("world_size", "kills"), [(1, 8), (2, 7)])
def test_killed_during_many_saves(tmp_path, world_size, asynchronous, kills):
    wanted = options(async_save=asynchronous, keep_last=2)
    writers = kill_during_saves(tmp_path, world_size, wanted, kills, seed=100 + world_size)
    assert not asynchronous or writers > 0, "no kill met a writer at work"
