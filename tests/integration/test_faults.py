# SPDX-License-Identifier: Apache-2.0
"""Faults of ranks: each run ends with the losses of one that nothing happened to, bit for bit."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.distributed import ROOT
from tests.pods import descendants, rank_processes
from tests.toy import make_toy, toy_config, write_toy_data

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS = 8
HANG = 10.0
# Only a hang reaches it, also on a machine that other work keeps busy.
LIMIT = 900.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Toy data, and an undisturbed run on two ranks."""
    place = tmp_path_factory.mktemp("toy")
    make_toy(place / "data")
    write_toy_data(place / "data" / "train", documents=6000)  # blocks of a cache: more than one
    config = toy_config(
        place / "data",
        "*E",
        run={"dir": str(place / "runs"), "hang_seconds": 300.0},
        train={"steps": STEPS, "eval_interval": 3, "eval_batches": 1},
        checkpoint={"interval": 2},
        log={"progress": "lines", "interval": 1, "report": False},
    )
    (place / "run.yaml").write_text(yaml.safe_dump(config))
    done = launch(place, "whole", "none:0:0")
    assert done.wait(timeout=LIMIT) == 0, done.log.read_text()[-4000:]
    return place


def launch(place: Path, name: str, fault: str, *words: str, restarts: int = 3):
    """torchrun of two ranks with a fault in them."""
    notes = place / f"notes-{name}"
    notes.mkdir(exist_ok=True)
    log = place / f"{name}.log"
    command = [
        str(ROOT / ".venv" / "bin" / "torchrun"), "--standalone", "--nproc_per_node=2",
        f"--max_restarts={restarts}", str(ROOT / "tests" / "faulty.py"), fault, str(notes),
        str(place / "run.yaml"), f"run.name={name}", *words,
    ]  # fmt: skip
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    process.log = log
    return process


def finish(process, timeout: float = LIMIT) -> str:
    """Waits for the end; kills it and fails when it does not come. Returns all output."""
    try:
        process.wait(timeout=timeout)
    except subprocess.TimeoutExpired:
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        raise AssertionError(process.log.read_text()[-6000:]) from None
    return process.log.read_text()


def losses(place: Path, name: str) -> dict[tuple[str, int], float]:
    rows = [
        json.loads(line)
        for line in (place / "runs" / name / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        (key, row["step"]): row[key] for row in rows for key in ("loss", "val_loss") if key in row
    }


def heartbeat(place: Path, name: str) -> dict:
    try:
        return json.loads((place / "runs" / name / "heartbeat.json").read_text())
    except (OSError, ValueError):
        return {}


def wait_for(process, happened, timeout: float = LIMIT) -> None:
    end = time.monotonic() + timeout
    while not happened():
        assert process.poll() is None, process.log.read_text()[-6000:]
        assert time.monotonic() < end, process.log.read_text()[-6000:]
        time.sleep(0.02)


@pytest.mark.parametrize(
    "fault",
    ["kill:1:4", "kill:0:5", "kill-save:0:4", "kill-save:1:4", "kill-evaluate:1:3", "error:1:4"],
)
def test_a_rank_that_dies_is_started_again(folder, fault):
    name = fault.replace(":", "-")
    process = launch(folder, name, fault)
    text = finish(process)
    assert process.returncode == 0, text[-4000:]
    assert len(list((folder / f"notes-{name}").iterdir())) == 1, "it did happen"
    assert losses(folder, name) == losses(folder, "whole"), "bitwise"
    assert heartbeat(folder, name)["phase"] == "done"


@pytest.mark.parametrize("fault", ["kill-fetch:-1:1", "kill-fetch:-1:5", "kill-fill:-1:5"])
def test_a_rank_that_dies_while_it_fills_the_cache(folder, fault):
    """Data behind fsspec: the cache's locks go with the process, and no half of a block is read."""
    name = fault.replace(":", "-")
    cache = folder / f"cache-{name}"
    words = [
        f"data.train=local://{folder / 'data' / 'train'}",
        f"data.cache={{dir: {cache}, block_kib: 64, ahead_samples: 8}}",
    ]
    process = launch(folder, name, fault, *words)
    text = finish(process)
    assert process.returncode == 0, text[-4000:]
    assert len(list((folder / f"notes-{name}").iterdir())) == 1, "it did happen"
    assert "cache entry" not in text, "no damaged block"
    assert losses(folder, name) == losses(folder, "whole"), "bitwise"
    blocks = [path for path in (cache / "blocks").rglob("*") if path.is_file()]
    left = [path for path in blocks if path.suffix == ".tmp"]  # of the dead process's threads
    assert left or not fault.startswith("kill-fill"), "it died in the middle of a write"
    assert len(blocks) - len(left) > int(fault.split(":")[2]), "and it was filled again"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_with_its_stack(folder, rank):
    """SIGSTOP: the watchdogs name it, not the one that waits; then all start again."""
    name = f"stopped-{rank}"
    hang = (f"run.hang_seconds={HANG}", "checkpoint.interval=20")
    process = launch(folder, name, "none:0:0", "train.steps=100000", *hang)
    wait_for(process, lambda: heartbeat(folder, name).get("step", 0) > 30)
    victim = rank_processes(process.pid)[rank]
    began = time.monotonic()
    os.kill(victim, signal.SIGSTOP)
    wait_for(process, lambda: "watchdog: rank" in process.log.read_text())
    assert time.monotonic() - began < 2 * HANG, "hang_seconds and a few beats"
    wait_for(process, lambda: "exiting with status 75" in process.log.read_text())
    wait_for(process, lambda: rank_processes(process.pid).get(rank, victim) != victim)
    text = process.log.read_text()
    named = [line for line in text.splitlines() if line.startswith("watchdog: rank")]
    assert named
    assert all(line.startswith(f"watchdog: rank {rank} ") for line in named), named
    assert f"process {victim}" in named[0]
    assert "stopped (SIGSTOP)" in text
    assert "last collective: gloo:" in text
    assert "pretrain/train" in text.split("stack, innermost last:")[1]
    wait_for(process, lambda: heartbeat(folder, name).get("pid") not in (None, victim))
    process.send_signal(signal.SIGTERM)
    finish(process)


def test_a_hanging_rank_is_named_with_its_stack(folder):
    process = launch(folder, "hang", "hang:1:4", f"run.hang_seconds={HANG}")
    text = finish(process)
    assert process.returncode == 0, text[-4000:]
    named = [line for line in text.splitlines() if line.startswith("watchdog: rank")]
    assert named
    assert all("watchdog: rank 1 " in line for line in named), named
    assert "it hangs outside of any collective" in text
    assert "tests/faulty.py" in text
    assert "hang_here" in text
    assert "waiting for it: ranks 0" in text
    assert losses(folder, "hang") == losses(folder, "whole")


def test_the_same_step_failing_again_and_again_stops_the_run(folder):
    process = launch(folder, "again", "kill:0:5:99", restarts=6)
    text = finish(process)
    assert process.returncode != 0
    assert len(list((folder / "notes-again").iterdir())) == 3, "run.max_failures"
    assert "step 5 has failed 3 times in a row" in text
    assert "data.skip_samples" in text
    # A change of the run file is a new try.
    mended = launch(folder, "again", "none:0:0", "data.skip_samples=[[0,0]]")
    text = finish(mended)
    assert mended.returncode == 0, text[-4000:]


def test_sigterm_to_the_launcher_saves_within_its_grace(folder):
    """A scheduler signals torchrun, which allows its workers 30 s."""
    process = launch(folder, "term", "none:0:0", "train.steps=100000", "checkpoint.interval=0")
    wait_for(process, lambda: heartbeat(folder, "term").get("step", 0) > 5)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    text = finish(process)
    assert time.monotonic() - began < 30
    assert heartbeat(folder, "term")["phase"] == "stopped", text[-3000:]
    saved = sorted((folder / "runs" / "term" / "checkpoints").glob("step_*"))
    assert len(saved) == 1
    assert (saved[0] / "COMPLETE").exists()


def test_a_file_stops_the_run_too(folder):
    """RUN/stop: how a batch script asks, minutes before its time is over."""
    process = launch(folder, "file", "none:0:0", "train.steps=100000", "checkpoint.interval=0")
    wait_for(process, lambda: heartbeat(folder, "file").get("step", 0) > 5)
    (folder / "runs" / "file" / "stop").touch()
    text = finish(process)
    assert process.returncode == 0, text[-3000:]
    assert heartbeat(folder, "file")["phase"] == "stopped"
    steps = [key[1] for key in losses(folder, "file")]
    again = launch(folder, "file", "none:0:0", f"train.steps={max(steps) + 1}")
    finish(again)
    assert again.returncode == 0
    assert heartbeat(folder, "file")["phase"] == "done"
