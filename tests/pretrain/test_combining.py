# SPDX-License-Identifier: Apache-2.0
"""Averages of checkpoints, moving averages of weights, and dense models that become experts."""

import pytest
import torch
import yaml

from fused_ops.errors import ConfigError
from pretrain.__main__ import main as pretrain
from pretrain.conversion.combining import average, upcycle
from pretrain.conversion.exporting import ExportOptions, export_checkpoint
from pretrain.conversion.importing import ImportOptions, import_folder
from pretrain.conversion.opened import open_checkpoint
from tests.distributed import run_distributed
from tests.models import hf_toys
from tests.toy import make_toy, toy_config
from tools import convert

DECAY = 0.75


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def run(folder):
    """Three steps in FP32, each saved, with a moving average."""
    values = toy_config(
        folder,
        "*-M",
        run={"name": "ema"},
        train={"steps": 3, "dtype": "fp32", "ema_decay": DECAY, "global_batch_size": 4},
        checkpoint={"interval": 1, "keep_last": 0},
    )
    config = folder / "ema.yaml"
    config.write_text(yaml.safe_dump(values))
    assert pretrain([str(config)]) == 0
    return config, folder / "runs" / "ema"


def steps_of(run_dir, **options):
    return [
        open_checkpoint(run_dir / "checkpoints" / f"step_{step:08d}", **options)
        for step in (1, 2, 3)
    ]


NAMES = ("decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.2.mixer.in_proj.weight.x")


def check_formula(run_dir):
    trained, averaged = steps_of(run_dir), steps_of(run_dir, weights="ema")
    for name in NAMES:
        weights = [c.reader.read(name) for c in trained]
        means = [c.reader.read(name) for c in averaged]
        assert not torch.equal(weights[0], weights[2])
        for before, weight, after in zip(means, weights[1:], means[1:]):
            # one FP32 rounding of the update, at most
            expected = DECAY * before.double() + (1 - DECAY) * weight.double()
            assert (after.double() - expected).abs().max() < 2e-7 * expected.abs().max()
    assert averaged[2].unused() == []


def test_the_moving_average_follows_its_formula(run):
    check_formula(run[1])


def test_a_continued_run_continues_its_average(run, folder, tmp_path):
    config, whole = run
    words = [f"run.dir={tmp_path}", "checkpoint.keep_last=0"]
    assert pretrain([str(config), *words, "train.steps=2"]) == 0
    assert pretrain([str(config), *words]) == 0
    again = open_checkpoint(tmp_path / "ema", weights="ema")
    first = open_checkpoint(whole, weights="ema")
    assert again.step == first.step == 3
    assert all(
        torch.equal(again.reader.read(n), first.reader.read(n))
        for n in first.reader
        if not n.startswith("optimizer")
    )


@pytest.mark.slow
def test_ranks_average_their_parts(run, tmp_path):
    config, _ = run
    words = [str(config), f"run.dir={tmp_path}", "parallel.tensor_model_parallel_size=2"]
    run_distributed(["-m", "pretrain", *words], 2, timeout=240)
    check_formula(tmp_path / "ema")


def test_the_average_leaves_as_a_model_folder(tmp_path):
    """Its values are those that the export has, where a family takes the model."""
    toy = make_toy(tmp_path / "toy")
    values = toy_config(toy, "*-", train={"steps": 2, "dtype": "bf16", "ema_decay": 0.5})
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    assert pretrain([str(config)]) == 0
    run_dir = toy / "runs" / "toy"
    words = ["export", str(run_dir), str(tmp_path / "out"), "--weights", "ema"]
    assert convert.main(words) == 0
    from safetensors.torch import load_file

    found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    average, trained = (
        open_checkpoint(run_dir, weights=w).reader.read(name) for w in ("ema", "trained")
    )
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, average)
    assert not torch.equal(found, trained)
    words = ["verify", str(run_dir), str(tmp_path / "out")]
    assert convert.main([*words, "--weights", "ema"]) == 0
    assert convert.main(words) == 1


def test_average_of_checkpoints(run, tmp_path, capsys):
    checkpoints = steps_of(run[1])
    path = average(checkpoints, tmp_path / "mean", show=False)
    mean = open_checkpoint(path)
    assert (mean.step, mean.state["parts"]) == (3, ["model"])
    for name in NAMES:
        expected = torch.stack([c.reader.read(name).double() for c in checkpoints]).mean(0)
        gap = (mean.reader.read(name).double() - expected).abs().max()
        assert gap < 3e-7 * expected.abs().max()
    words = ["average", str(tmp_path / "last"), str(run[1] / "checkpoints"), "--last", "2"]
    assert convert.main(words) == 0
    name = NAMES[0]
    expected = (checkpoints[1].reader.read(name) + checkpoints[2].reader.read(name)) / 2
    found = open_checkpoint(tmp_path / "last").reader.read(name)
    assert (found - expected).abs().max() < 3e-7 * expected.abs().max()
    with pytest.raises(ConfigError, match="at least 2"):
        average(checkpoints[:1], tmp_path / "x")
    capsys.readouterr()
    for swapped in (
        [words[2], words[1], "--last", "1"],
        [words[2], str(tmp_path / "new"), *words[3:]],
    ):
        assert convert.main(["average", *swapped]) == 2
    said = capsys.readouterr().err
    assert "--last must be at least 2; got 1" in said
    assert f"{tmp_path / 'new'} holds 0; it comes second, after the new folder" in said


def test_a_dense_model_becomes_experts(tmp_path, capsys):
    folder = hf_toys.make_toy("qwen3", tmp_path / "hf")
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    import_folder(folder, tmp_path / "dense", ImportOptions(show=False, verify=False))
    dense = open_checkpoint(tmp_path / "dense")
    path, gap = upcycle(dense, tmp_path / "moe", experts=12, topk=3, show=False)
    assert gap < 2e-6
    moe = open_checkpoint(path)
    assert moe.section.pattern == "*E*E"
    weight = dense.reader.read("decoder.layers.1.mlp.linear_fc1.weight")
    for expert in (0, 11):
        stacked = moe.reader.read("decoder.layers.1.mlp.experts.linear_fc1.weight", expert)
        assert torch.equal(stacked, weight)
    assert moe.reader.read("decoder.layers.1.mlp.router.weight").std() > 0.01
    # transformers says the same of the folder that it becomes
    done = export_checkpoint(moe, tmp_path / "out", ExportOptions(show=False))
    assert done.verdict.ok
    assert done.family == "qwen3_moe"
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    words = ["upcycle", str(tmp_path / "dense"), str(tmp_path / "half"), "--experts", "4"]
    assert convert.main([*words, "--pattern", "*-*E"]) == 0
    assert open_checkpoint(tmp_path / "half").section.pattern == "*-*E"
    assert convert.main([*words[:2], str(tmp_path / "no"), "--experts", "4", "--topk", "1"]) == 2
    assert "--topk must lie in 2 to --experts=4" in capsys.readouterr().err
    assert convert.main([*words[:2], str(tmp_path / "no"), "--experts", "-8"]) == 2
    assert "--experts must be at least 2; got -8" in capsys.readouterr().err
