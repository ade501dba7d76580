# SPDX-License-Identifier: Apache-2.0
"""The program continues from its checkpoints: bitwise, past damaged ones, with overrides."""

import io
import json
import shutil

import pytest
import torch
import yaml

from pretrain.__main__ import main
from pretrain.checkpoint.layout import COMPLETE
from pretrain.checkpoint.lock import RunLock
from pretrain.checkpoint.manager import find_latest
from pretrain.checkpoint.safe import read_index
from tests.toy import make_toy, toy_config

STEPS = 6


def losses(run, name="loss"):
    """{step: value} of the rows of a run; the last one of each step counts."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


def contents(run, step):
    """{name: bytes} of every weight and moment in a checkpoint, and the common values."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    found = {}
    for key, place in read_index(folder).storage_data.items():
        data = (folder / place.relative_path).read_bytes()[place.offset :][: place.length]
        value = torch.load(io.BytesIO(data), weights_only=True)
        whole = isinstance(value, torch.Tensor)
        name = (key.fqn, tuple(key.offset or ()))
        found[name] = (
            value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if whole else value
        )
    return found


def damage(run, step):
    """Flip a bit of a shard."""
    shard = run / "checkpoints" / f"step_{step:08d}" / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A hybrid in NVFP4 trained without a stop, with a checkpoint every second step."""
    folder = tmp_path_factory.mktemp("resume")
    sections = {
        "run": {"dir": str(folder / "runs"), "name": "whole"},
        "train": {"steps": STEPS, "dtype": "bf16", "global_batch_size": 4},
        "precision": {"recipe": "nvfp4"},
        "checkpoint": {"interval": 2, "keep_last": 0},
        "log": {"progress": "none", "report": False},
    }
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(toy_config(make_toy(folder / "data"), "M*-E", **sections)))
    assert main([str(config)]) == 0
    return config, folder / "runs"


def forget(run, *steps):
    for step in steps:
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_continued_run_is_bitwise_the_whole_one(trained, run, asynchronous):
    copy, command = run
    forget(copy, 4, 6)
    assert main([*command, f"checkpoint.async_save={asynchronous}"]) == 0
    assert losses(copy) == losses(trained[1] / "whole")
    assert contents(copy, STEPS) == contents(trained[1] / "whole", STEPS)


def test_a_damaged_checkpoint_is_named_and_trained_again(trained, run, capfd, caplog):
    copy, command = run
    damage(copy, 6)
    assert main(command) == 0
    said = capfd.readouterr().err + caplog.text
    assert "step_00000006/__0_0.distcp is damaged" in said
    assert "continuing from the older step_00000004" in said
    assert losses(copy) == losses(trained[1] / "whole")
    assert find_latest(copy).step == STEPS
    assert contents(copy, STEPS) == contents(trained[1] / "whole", STEPS)


def test_with_none_that_can_be_read_the_program_stops(run, capfd):
    copy, command = run
    damage(copy, 6)
    (copy / "checkpoints" / "step_00000004" / COMPLETE).unlink()
    forget(copy, 2)
    before = (copy / "metrics.jsonl").read_bytes()
    assert main(command) == 2
    errors = capfd.readouterr().err
    assert "none can be read" in errors
    assert "step_00000006/__0_0.distcp is damaged" in errors
    assert "step_00000004 has no COMPLETE" in errors
    assert "Traceback" not in errors
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_an_override_acts_from_the_first_step_and_is_shown(trained, run, capfd, caplog):
    copy, command = run
    forget(copy, 4, 6)
    assert main([*command, "checkpoint.override={optimizer.lr: 1e-5}"]) == 0
    assert "override optimizer.lr: " in capfd.readouterr().err + caplog.text
    old, new = losses(trained[1] / "whole", "lr"), losses(copy, "lr")
    peak = max(old.values())
    for step in (3, 4, 5, 6):
        assert new[step] == pytest.approx(old[step] * 1e-5 / peak, rel=1e-6)
    assert losses(copy)[3] == losses(trained[1] / "whole")[3]
    assert losses(copy)[5] != losses(trained[1] / "whole")[5]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("optimizer.lr=1e-5", "add optimizer.lr: 1e-05 to checkpoint.override"),
        ("run.seed=8", "run.seed: 7 in the checkpoint, 8 now"),
        ("checkpoint.resume=never", "already holds checkpoints"),
        ("checkpoint.override={model.pattern: M}", "cannot change model.pattern"),
    ],
)
def test_what_may_not_change_ends_with_status_2(trained, capfd, change, words):
    config, _ = trained
    assert main([str(config), change]) == 2
    errors = capfd.readouterr().err
    assert words in errors
    assert "Traceback" not in errors


def test_a_second_live_run_is_refused(run, capfd):
    copy, command = run
    lock = RunLock(copy)
    lock.take()
    assert main(command) == 2
    assert "belongs to a live run" in capfd.readouterr().err
    lock.release()
