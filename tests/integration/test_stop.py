# SPDX-License-Identifier: Apache-2.0
"""A signal to stop during an evaluation: heeded between its batches, and nothing is lost by it."""

import json
import os
import signal
from pathlib import Path

import pytest
import yaml

import pretrain.evaluate
import pretrain.train_step
from pretrain.__main__ import main
from tests.distributed import run_distributed
from tests.toy import make_toy, toy_config

STEPS = 6
DITHERED = {"base": "nvfp4", "fprop_x": {"format": "nvfp4", "rounding": "stochastic"}}
RECIPES = ("dithered", "fp8_delayed")
"""The forward pass of the one knows the step; the other keeps scales."""
BATCHES = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Toy data, and a run of each recipe that nothing stopped."""
    place = make_toy(tmp_path_factory.mktemp("toy"))
    for recipe in RECIPES:
        assert main([write(place, place, recipe, interval=2), f"run.name={recipe}"]) == 0
    return place


def write(folder: Path, tmp_path: Path, recipe: str, **checkpoint: int) -> str:
    sections = {
        "run": {"dir": str(tmp_path / "runs"), "name": "cut"},
        "train": {
            "steps": STEPS,
            "dtype": "bf16",
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "eval_interval": 2,
            "eval_batches": BATCHES,
        },
        "precision": {"recipe": recipe, "recipes": {"dithered": DITHERED}},
        "checkpoint": {"interval": 0, "keep_last": 0, **checkpoint},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(toy_config(folder, "*E", **sections)))
    return str(path)


def rows(tmp_path: Path, name: str) -> list[dict]:
    lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def values(tmp_path: Path, name: str, key: str) -> list[tuple[int, float]]:
    return [(row["step"], row[key]) for row in rows(tmp_path, name) if key in row]


def signal_at(monkeypatch, module, call: int) -> None:
    """SIGTERM during the call of that number of a module's `run_schedule`, from 1."""
    schedule, calls = module.run_schedule, []

    def signalled(*arguments, **named):
        calls.append(1)
        if len(calls) == call:
            signal.raise_signal(signal.SIGTERM)
        return schedule(*arguments, **named)

    monkeypatch.setattr(module, "run_schedule", signalled)


@pytest.mark.parametrize(
    ("recipe", "where", "call", "step", "validated"),
    [
        ("dithered", "train_step", 4, 4, [2]),
        ("dithered", "evaluate", BATCHES + 1, 4, [2]),
        ("fp8_delayed", "evaluate", BATCHES + 2, 4, [2]),
        pytest.param("dithered", "evaluate", 2 * BATCHES, 4, [2, 4], marks=pytest.mark.slow),
        pytest.param("fp8_delayed", "train_step", STEPS, STEPS, [2, 4], marks=pytest.mark.slow),
        pytest.param(
            "dithered", "evaluate", 2 * BATCHES + 2, STEPS, [2, 4], marks=pytest.mark.slow
        ),
        ("dithered", "evaluate", 3 * BATCHES, STEPS, [2, 4, 6]),
    ],
)
def test_nothing_is_lost(folder, tmp_path, monkeypatch, recipe, where, call, step, validated):
    config = write(folder, tmp_path, recipe, interval=2)
    with monkeypatch.context() as patch:
        signal_at(patch, getattr(pretrain, where), call)
        assert main([config]) == 0
    assert [at for at, _ in values(tmp_path, "cut", "loss")] == list(range(1, step + 1))
    assert [at for at, _ in values(tmp_path, "cut", "val_loss")] == validated
    done = step in validated and step == STEPS
    phase = json.loads((tmp_path / "runs" / "cut" / "heartbeat.json").read_text())["phase"]
    assert phase == ("done" if done else "stopped")
    if not done:
        assert rows(tmp_path, "cut")[-1]["event"] == "stop"
        saved = tmp_path / "runs" / "cut" / "checkpoints" / f"step_{step:08d}"
        assert (saved / "COMPLETE").exists()
        assert main([config]) == 0
    for key in ("loss", "val_loss"):
        found = values(tmp_path, "cut", key)
        assert found == values(folder, recipe, key), "bitwise, each once"


def test_a_cut_evaluation_at_the_end_of_a_run_that_then_goes_on(folder, tmp_path, monkeypatch):
    """The checkpoint of the last step is older than the evaluation."""
    config = write(folder, tmp_path, "dithered", interval=4)
    with monkeypatch.context() as patch:
        signal_at(patch, pretrain.evaluate, BATCHES + 2)
        assert main([config, "train.steps=4"]) == 0
    assert [at for at, _ in values(tmp_path, "cut", "val_loss")] == [2]
    assert main([config]) == 0
    assert values(tmp_path, "cut", "val_loss") == values(folder, "dithered", "val_loss")


def test_a_run_that_begins_from_another_validates_nothing_first(folder, tmp_path):
    """The validations of the steps before are that run's."""
    load = f"checkpoint.load={folder / 'runs' / 'dithered' / 'checkpoints' / 'step_00000004'}"
    assert main([write(folder, tmp_path, "dithered"), load]) == 0
    assert [at for at, _ in values(tmp_path, "cut", "loss")] == [5, 6]
    assert [at for at, _ in values(tmp_path, "cut", "val_loss")] == [6]


def _cut(path: str) -> None:
    """On a rank: only the second is asked to stop, in the second batch of the second evaluation."""
    if os.environ["RANK"] == "1":
        signal_at(pytest.MonkeyPatch(), pretrain.evaluate, BATCHES + 2)
    assert main([path]) == 0


def _whole(path: str) -> None:
    assert main([path]) == 0


def test_ranks_stop_at_the_same_batch(folder, tmp_path):
    config = write(folder, tmp_path, "dithered")
    run_distributed(_cut, 2, timeout=400, args=(config,))
    assert [at for at, _ in values(tmp_path, "cut", "loss")] == [1, 2, 3, 4]
    assert [at for at, _ in values(tmp_path, "cut", "val_loss")] == [2]
    run_distributed(_whole, 2, timeout=400, args=(config,))
    (tmp_path / "runs" / "cut").rename(tmp_path / "runs" / "continued")
    run_distributed(_whole, 2, timeout=400, args=(config,))
    for key in ("loss", "val_loss"):
        assert values(tmp_path, "continued", key) == values(tmp_path, "cut", key), "bitwise"
