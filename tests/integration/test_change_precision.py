# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of one precision goes on in another, both ways, and never by accident."""

import shutil

import pytest
import yaml

from pretrain.__main__ import main
from tests.distributed import run_distributed
from tests.integration.test_resume import losses
from tests.toy import make_toy, toy_config

HALF, WHOLE = 3, 6
RECIPES = ("bf16", "nvfp4")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each recipe without a stop, a checkpoint of its first half, and its command."""
    folder = tmp_path_factory.mktemp("precision")
    data = make_toy(folder / "data")
    commands = {}
    for recipe in RECIPES:
        sections = {
            "run": {"dir": str(folder / "runs"), "name": f"whole-{recipe}"},
            "train": {"steps": WHOLE, "dtype": "bf16", "global_batch_size": 4},
            "precision": {"recipe": recipe},
            "checkpoint": {"interval": HALF, "keep_last": 0},
        }
        path = folder / f"{recipe}.yaml"
        path.write_text(yaml.safe_dump(toy_config(data, "M-*E", **sections)))
        assert main([str(path)]) == 0
        commands[recipe] = [str(path), f"run.name=changed-{recipe}"]
    return folder / "runs", commands


@pytest.mark.parametrize(("first", "then"), [RECIPES, RECIPES[::-1]])
def test_going_on_in_another_precision(runs, first, then, capsys):
    folder, commands = runs
    here = f"checkpoint.load={folder}/whole-{first}/checkpoints/step_{HALF:08d}"
    refused = [*commands[first], here, f"precision.recipe={then}"]
    assert main(refused) == 2
    assert f"add precision.recipe: '{then}' to checkpoint.override" in capsys.readouterr().err

    assert main([*commands[first], here, f"checkpoint.override={{precision.recipe: {then}}}"]) == 0
    went_on = losses(folder / f"changed-{first}")
    stayed = losses(folder / f"whole-{first}")
    assert sorted(went_on) == list(range(HALF + 1, WHOLE + 1))
    for step, loss in went_on.items():
        # other codes, so other numbers; the same weights and samples, so close ones
        assert loss != stayed[step]
        assert loss == pytest.approx(stayed[step], rel=0.03)


def test_a_switch_stays_where_it_was_after_a_resume(tmp_path):
    """The forward in BF16 from the middle on, the backward in NVFP4 all the while. A run that is
    resumed behind the switch, or goes on for longer, does not go back to four bits."""
    data = make_toy(tmp_path / "data")
    late = {"from": 0.5, "gemms": ["fprop"], "recipe": "bf16"}

    def command(name, schedule):
        sections = {
            "run": {"dir": str(tmp_path / "runs"), "name": name},
            "train": {"steps": WHOLE, "dtype": "bf16", "global_batch_size": 4},
            "precision": {"recipe": "nvfp4", "schedule": schedule},
            "checkpoint": {"interval": HALF + 1, "keep_last": 0},
        }
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(toy_config(data, "*-", **sections)))
        return [str(path)]

    for name, schedule in (("switched", [late]), ("never", [])):
        assert main(command(name, schedule)) == 0
    switched, never = (losses(tmp_path / "runs" / name) for name in ("switched", "never"))
    assert [switched[n] == never[n] for n in range(1, WHOLE + 1)] == [True] * HALF + [False] * HALF
    for steps in (WHOLE, 3 * WHOLE):  # half of the longer run lies behind the checkpoint
        name = f"resumed-{steps}"
        shutil.copytree(tmp_path / "runs" / "switched", tmp_path / "runs" / name)
        shutil.rmtree(tmp_path / "runs" / name / "checkpoints" / f"step_{WHOLE:08d}")
        changes = [f"run.name={name}", f"train.steps={steps}"]
        assert main([*command("switched", [late]), *changes]) == 0
        again = losses(tmp_path / "runs" / name)
        assert [again[n] for n in (HALF + 2, WHOLE)] == [switched[n] for n in (HALF + 2, WHOLE)]


@pytest.mark.slow
def test_stages_in_another_layout(tmp_path):
    """A checkpoint of TP in the middle of a stage goes on under PP with recomputation and under DP:
    the step of the checkpoint's stage and the first of the next are those of the run itself."""
    data, steps = make_toy(tmp_path / "data"), 5
    schedule = [
        {"from": 0.4, "gemms": ["fprop"], "recipe": "mxfp8"},
        {"from": 0.8, "gemms": ["fprop"], "recipe": "bf16"},
    ]
    whole = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }

    def run(name, parallel, megatron, stages=schedule, **checkpoint):
        values = toy_config(
            data,
            "M-*-",
            run={"dir": str(tmp_path / "runs"), "name": name},
            train={"steps": steps, "global_batch_size": 8, "micro_batch_size": 2},
            optimizer={"eps": 1e-3},  # an update is no sign of a gradient's rounding
            precision={"recipe": "nvfp4_fast", "schedule": stages},
            checkpoint={"interval": 3, "keep_last": 0, **checkpoint},
            parallel=parallel,
        )
        values["model"]["megatron"] |= {"mamba_num_heads": 32, "mamba_head_dim": 8, **megatron}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        run_distributed(["-m", "pretrain", str(path)], 2, timeout=240)
        return [losses(tmp_path / "runs" / name, what) for what in ("loss", "grad_norm")]

    cut = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    here = {"load": f"{tmp_path}/runs/cut/checkpoints/step_{3:08d}"}
    expected, never = run("cut", cut, {}), run("never", cut, {}, stages=[])
    for name, parallel, megatron in (
        ("stages", {"pipeline_model_parallel_size": 2}, whole),
        ("replicas", {}, {}),
    ):
        for found, own, other in zip(run(name, parallel, megatron, **here), expected, never):
            assert sorted(found) == [4, 5]
            for step, value in found.items():
                assert value == pytest.approx(own[step], rel=1e-5), (name, step)
                assert value != pytest.approx(other[step], rel=1e-4), (name, step)
