# SPDX-License-Identifier: Apache-2.0
"""Delayed FP8 scales belong to a run: shared by ranks, kept in checkpoints, left by evaluation."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from pretrain.__main__ import main
from tests.distributed import run_distributed
from tests.toy import make_toy, toy_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


# A while without: what the scales were before it is forgotten, whether the run stops in it or not.
PAUSE = [
    {"from": 0.3, "gemms": ["fprop", "dgrad"], "recipe": "fp8_blockwise"},
    {"from": 0.7, "gemms": ["fprop", "dgrad"], "recipe": "fp8_delayed"},
]


def write(folder: Path, tmp_path: Path, name: str, schedule=(), **train: int) -> Path:
    sections = {
        "run": {"dir": str(tmp_path / "runs"), "name": name},
        "train": {
            "steps": 8,
            "dtype": "bf16",
            "global_batch_size": 4,
            "micro_batch_size": 2,
            **train,
        },
        "precision": {"recipe": "fp8_delayed", "schedule": list(schedule)},
    }
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(toy_config(folder, "*E", **sections)))
    return path


def losses(tmp_path: Path, name: str) -> dict[int, float]:
    lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, lines) if "loss" in row}


@pytest.mark.parametrize("schedule", [(), PAUSE], ids=["always", "with a pause"])
def test_a_resumed_run_has_the_scales_of_an_unstopped_one(folder, tmp_path, schedule):
    """Evaluation in between changes nothing; the scales do move, so that this could fail."""
    whole = write(folder, tmp_path, "whole", schedule, eval_interval=3)
    assert main([str(whole), "checkpoint.interval=4", "checkpoint.keep_last=0"]) == 0
    cut = str(write(folder, tmp_path, "cut", schedule))
    runs = tmp_path / "runs"
    shutil.copytree(runs / "whole", runs / "cut")
    shutil.rmtree(runs / "cut" / "checkpoints" / "step_00000008")
    assert main([cut]) == 0
    whole = losses(tmp_path, "whole")
    assert sorted(whole) == list(range(1, 9))
    assert losses(tmp_path, "cut") == whole, "bitwise"


def _train(path: str) -> tuple[list[float], dict]:
    from pretrain.config import load_config
    from pretrain.trainer import Trainer

    config = load_config(path, for_training=True)
    trainer = Trainer(config)
    trainer.run()
    rows = (config.run.path / "metrics.jsonl").read_text().splitlines()
    own = [row["loss"] for row in map(json.loads, rows) if "loss" in row]
    return own, trainer.engine.plan.state_dict()["delayed"]


def test_two_ranks_share_the_scales_of_one(folder, tmp_path):
    results = [
        run_distributed(
            _train, ranks, 400.0, args=(str(write(folder, tmp_path, f"r{ranks}", steps=2)),)
        )
        for ranks in (1, 2)
    ]
    (one,), (first, second) = results
    assert first[1].keys() == second[1].keys() == one[1].keys()
    assert len(one[1]) == 4, "qkv, proj, fc1, fc2 of the experts"
    for name, slots in one[1].items():
        assert slots.keys() == first[1][name].keys()
        for slot, state in slots.items():
            # Another order of summation moves a BF16 value by an ulp, and its amax with it.
            for mine in (first[1][name][slot], second[1][name][slot]):
                torch.testing.assert_close(mine["history"], state["history"], rtol=2**-5, atol=0)
            used = first[1][name][slot]["used"]
            assert torch.equal(used, second[1][name][slot]["used"])
            assert used > 0
            assert used != 448, "the amax in use is one that was seen"
    assert one[0] == pytest.approx(first[0], rel=2e-3)
