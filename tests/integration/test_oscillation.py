# SPDX-License-Identifier: Apache-2.0
"""Runs that reset weights stop and continue: bitwise in the middle of a window, off, and on."""

import json

import pytest
import yaml

from pretrain.__main__ import main
from pretrain.checkpoint.safe import read_index
from pretrain.weight_paths import PATHS
from tests.integration.test_resume import contents, forget, losses
from tests.toy import make_toy, toy_config

STEPS = 6
RESET = {"from": 0, "interval": 4, "window": 3, "threshold": 1.5}
"""Followed from update 1 on, reset before update 4, followed again from update 5 on."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A dense model in NVFP4 that resets weights, with a checkpoint every second step."""
    folder = tmp_path_factory.mktemp("oscillation")
    sections = {
        "run": {"dir": str(folder / "runs"), "name": "whole"},
        "train": {"steps": STEPS, "dtype": "bf16", "global_batch_size": 4, "eval_batches": 1},
        "optimizer": {"oscillation_reset": RESET},
        "precision": {"recipe": "nvfp4"},
        "checkpoint": {"interval": 2, "keep_last": 0},
    }
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(toy_config(make_toy(folder / "data"), "-", **sections)))
    assert main([str(config)]) == 0
    return config, folder / "runs"


def held(run, step):
    """Names of the paths in a checkpoint."""
    names = read_index(run / "checkpoints" / f"step_{step:08d}").state_dict_metadata
    return sorted(n for n in names if n.startswith(tuple(f"optimizer.state.{p}." for p in PATHS)))


def events(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("event") == "oscillation_reset"]


def test_checkpoints_hold_paths_in_windows_alone(trained):
    run = trained[1] / "whole"
    # Three of each of two weights, and none of embedding, head and norms.
    assert [len(held(run, step)) for step in (2, 4, 6)] == [6, 0, 6]
    (event,) = events(run)
    assert event["step"] == 4
    assert 0.01 < event["share"] < 0.9
    assert event["path_ratio"] > 1
    assert set(event["layers"]) == {f"layers.0.mlp.linear_fc{i}" for i in (1, 2)}


@pytest.mark.parametrize("step", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_continued_run_is_bitwise_the_whole_one(trained, run, step):
    """From the middle of a window, and from between two."""
    copy, command = run
    whole = trained[1] / "whole"
    forget(copy, *range(step + 2, STEPS + 1, 2))
    assert main([*command, f"checkpoint.interval={STEPS}"]) == 0
    assert losses(copy) == losses(whole)
    assert contents(copy, STEPS) == contents(whole, STEPS)
    first, again = events(whole)[-1], events(copy)[-1]
    assert all(first[key] == again[key] for key in ("step", "share", "path_ratio", "layers"))


@pytest.mark.slow
def test_switched_off_and_on_again_windows_begin_anew_and_that_is_said(trained, run, capfd, caplog):
    copy, command = run
    forget(copy, 4, 6)
    null = "checkpoint.override={optimizer.oscillation_reset: null}"
    assert main([*command, "train.steps=4", null]) == 0
    said = capfd.readouterr().err + caplog.text
    assert "oscillation_reset is off: the checkpoint's interval under way is left out" in said
    assert held(copy, 4) == []
    assert events(copy) == []
    assert losses(copy)[4] == losses(trained[1] / "whole")[4]  # of before its update

    caplog.clear()
    again = yaml.safe_dump({"optimizer.oscillation_reset": RESET}, default_flow_style=True)
    assert main([*command, f"checkpoint.override={again.strip()}"]) == 0
    said = capfd.readouterr().err + caplog.text
    assert "oscillation_reset is new: paths of weights begin at length 0" in said
    assert events(copy) == []  # the window would end behind the 7th update
    assert len(held(copy, 6)) == 6
    assert losses(copy)[5] != losses(trained[1] / "whole")[5]


def test_another_setting_must_be_overridden(run, capfd):
    copy, command = run
    forget(copy, STEPS)
    assert main([*command, "optimizer.oscillation_reset.threshold=2.5"]) == 2
    assert "add optimizer.oscillation_reset.threshold: 2.5 to checkpoint.override" in (
        capfd.readouterr().err
    )
