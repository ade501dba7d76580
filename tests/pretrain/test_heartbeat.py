# SPDX-License-Identifier: Apache-2.0
"""heartbeat.json: whole at every moment, and a memory of where the run keeps failing."""

import json
import os
import threading

import pytest

from fused_ops.errors import ConfigError
from pretrain.heartbeat import HEARTBEAT_FILE, Heartbeat, digest, read_heartbeat


def attempt(folder, step, phase="train", config="a", limit=3, **changes):
    beat = Heartbeat(folder, config, limit)
    beat.beat(step=step, phase=phase, **changes)
    beat.close()
    return read_heartbeat(folder)


def test_failures_at_one_step_are_counted_and_end_the_run(tmp_path):
    assert attempt(tmp_path, 7)["failures"] == 0
    assert attempt(tmp_path, 7)["failures"] == 1
    assert attempt(tmp_path, 7, phase="failed", reason="ValueError: x")["failures"] == 2
    with pytest.raises(ConfigError, match="step 7 has failed 3 times in a row") as failure:
        attempt(tmp_path, 7)
    assert "ValueError: x" in str(failure.value)
    assert str(tmp_path / HEARTBEAT_FILE) in str(failure.value)
    with pytest.raises(ConfigError, match="3 times"):
        attempt(tmp_path, 7)
    assert attempt(tmp_path, 7, config="b")["failures"] == 0, "what has changed is a new try"


def test_progress_and_good_ends_forget_failures(tmp_path):
    for step in (7, 7, 8, 8, 9):
        found = attempt(tmp_path, step)
    assert (found["failed_step"], found["failures"]) == (8, 2)
    attempt(tmp_path, 9, phase="stopped")
    assert attempt(tmp_path, 9)["failures"] == 0
    for _ in range(5):
        attempt(tmp_path, 9, limit=0)


def test_a_reader_never_sees_half_a_beat(tmp_path):
    beat, done = Heartbeat(tmp_path, "a", 3), threading.Event()

    def write():
        for step in range(4000):
            beat.beat(step=step, reason="r" * (step % 900), loss=float("nan"))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = []
    while not done.is_set():
        seen.append(json.loads((tmp_path / HEARTBEAT_FILE).read_text() or "{}").get("step", -1))
    thread.join()
    assert seen == sorted(seen)
    assert read_heartbeat(tmp_path)["step"] == 3999
    assert os.path.getsize(tmp_path / HEARTBEAT_FILE) == 1024


def test_a_full_disk_costs_beats_only(tmp_path, monkeypatch):
    beat = Heartbeat(tmp_path, "a", 3)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    beat.beat(step=3)
    beat.close()
    beat.beat(step=4)
    assert read_heartbeat(tmp_path / "nowhere") == {}


def test_digests():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})
