# SPDX-License-Identifier: Apache-2.0
"""Operands of a real step, saved and multiplied again."""

from unittest import mock

import pytest
import torch
import yaml

from fused_ops.formats import OperandSpec
from fused_ops.quantize import quantize
from fused_ops.testing import relative_mse
from pretrain import captured
from pretrain.captured import exact_product, gemm_tensors, load_layers, product_errors
from tests import toy
from tools import bench_captured, capture


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A capture; it saves no checkpoint, which may be larger than the disk of /tmp."""
    folder = tmp_path_factory.mktemp("capture")
    toy.write_toy_data(folder / "train")
    config = toy.toy_config(folder, data={"train": str(folder / "train"), "valid": None})
    config["train"]["dtype"] = "bf16"
    config["precision"] = {"recipe": "nvfp4_fast"}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    before = sorted(folder.rglob("*"))
    arguments = ["--step", "3", "--layers", "*.linear_fc1,*.linear_proj", "optimizer.lr=1e-3"]
    no_save = mock.patch("pretrain.checkpoint.manager.CheckpointManager.save", None)
    with no_save:
        status = capture.main([str(folder / "run.yaml"), str(folder / "out.pt"), *arguments])
    assert status == 0
    assert sorted(folder.rglob("*")) == sorted([*before, folder / "out.pt"])
    return folder / "out.pt"


def test_what_is_captured(saved):
    layers = load_layers(saved)
    assert list(layers) == [
        "layers.0.self_attention.linear_proj", "layers.1.mlp.linear_fc1"
    ]  # fmt: skip
    layer = layers["layers.1.mlp.linear_fc1"]
    tokens = 4 * toy.SEQ_LENGTH
    sizes = {name: tuple(t.flatten(0, -2).shape) for name, t in layer.items()}
    assert sizes == {"x": (tokens, 64), "w": (256, 64), "dy": (tokens, 256)}
    assert {t.dtype for t in layer.values()} == {torch.bfloat16}
    # The input of fc1 is what a norm has left.
    rms = layer["x"].float().square().mean(-1).sqrt()
    torch.testing.assert_close(rms, torch.ones_like(rms), rtol=0.1, atol=0)
    assert float(layer["dy"].abs().max()) > 0


def test_errors_of_products(saved):
    layer = load_layers(saved)["layers.1.mlp.linear_fc1"]
    found = {(e.gemm, e.way): e for e in product_errors("fc1", layer, 64, "cpu")}
    assert len(found) == 9
    for (gemm, way), error in found.items():
        if "fp8" not in way:
            # FP32 sums of exact products: they may only differ where BF16 rounds.
            assert error.identical > 0.99, (gemm, way)
            assert abs(error.excess) < 1e-3, (gemm, way)
            assert error.squared < 2**-16, (gemm, way)
    fp8 = found["fprop", "nvfp4_fast, decode fp8"]
    assert fp8.identical < 0.9, "E4M3 rounds what 4over6 gives"
    assert 1e-5 < fp8.squared < 1e-2
    assert fp8.largest < 0.1


def test_the_errors_are_those_of_a_product_written_out():
    torch.manual_seed(0)
    layer = {"x": torch.randn(32, 64), "w": torch.randn(48, 64), "dy": torch.randn(32, 48)}
    a, b = gemm_tensors(layer, 16)["fprop"]
    spec = OperandSpec(format="nvfp4")
    qa, qb = quantize(a, spec), quantize(b, spec)
    want = qa.dequantize().double() @ qb.dequantize().double().t()
    torch.testing.assert_close(exact_product(qa, qb), want, rtol=1e-5, atol=1e-5)
    sizes = {gemm: [tuple(t.shape) for t in pair] for gemm, pair in gemm_tensors(layer, 16).items()}
    assert sizes == {
        "fprop": [(16, 64), (16, 64)], "dgrad": [(16, 48), (16, 48)], "wgrad": [(16, 32), (16, 32)]
    }  # fmt: skip


def test_a_wrong_product_is_seen(monkeypatch):
    torch.manual_seed(0)
    layer = {"x": torch.randn(32, 64), "w": torch.randn(48, 64), "dy": torch.randn(32, 48)}
    monkeypatch.setattr(
        captured, "scaled_matmul", lambda a, b, **_: exact_product(a, b).bfloat16() * 1.5
    )
    for error in product_errors("x", layer, 32, "cpu"):
        assert error.identical < 0.01
        assert 0.2 < error.squared < 0.3
        assert error.excess > 0.5


def test_the_benchmark_prints_the_errors_without_a_gpu(saved, capsys):
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, and its speed would be measured")
    assert bench_captured.main([str(saved), "--rows", "32"]) == 0
    text = capsys.readouterr().out
    assert text.count("identical") == 18
    assert "layers.1.mlp.linear_fc1: x (128, 64), kurtosis" in text
    assert "was not measured" in text


def test_a_micro_batch_may_be_chosen(saved, capsys):
    """The first is that of no choice; the weights are those of the step, the tokens are not."""
    config, layer = str(saved.parent / "run.yaml"), "layers.1.mlp.linear_fc1"
    arguments = ["--step", "3", "--layers", layer, "optimizer.lr=1e-3"]
    found = {0: load_layers(saved)[layer]}
    out = saved.parent / "second.pt"
    assert capture.main([config, str(out), *arguments, "--micro-batch", "1"]) == 0
    assert f"{out}: step 3, micro-batch 1, " in capsys.readouterr().out
    found[1] = load_layers(out)[layer]
    assert torch.equal(found[0]["w"], found[1]["w"])
    assert found[0]["x"].shape == found[1]["x"].shape
    for name in ("x", "dy"):
        assert relative_mse(found[1][name], found[0][name]) > 0.1
    for path, number in ((saved, 0), (out, 1)):
        assert torch.load(path)["micro_batch"] == number


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--layers", "layers.7.*,*.linear_fc1,*.linear", "--micro-batch", "2"],
            [
                "--layers must match linear layers; layers.7.* matches none of layers.0.self_",
                "--layers must match linear layers; *.linear matches none of layers.0.self_",
                "--micro-batch must be below 2, as many as step 20 has; got 2",
            ],
        ),
        # From the third step on batches are of one micro-batch.
        (
            [
                *("--step", "3", "--micro-batch", "1", "train.global_batch_size=4"),
                "train.step_batch_size_schedule=[[0, 8], [16, 4]]",
            ],
            ["--micro-batch must be below 1, as many as step 3 has; got 1"],
        ),
        (
            ["--step", "0", "--micro-batch", "-1"],
            ["--step must be at least 1, got 0", "--micro-batch must be at least 0, got -1"],
        ),
    ],
)
def test_mistakes(saved, arguments, said, capsys, monkeypatch):
    """Told before anything is trained."""
    monkeypatch.setattr("pretrain.trainer.train_step", None)
    config = saved.parent / "run.yaml"
    assert capture.main([str(config), str(saved.parent / "no.pt"), *arguments]) == 2
    lines = [f"error: {text}" for text in said]
    errors = capsys.readouterr().err.splitlines()
    assert [line[: len(start)] for line, start in zip(errors, lines, strict=True)] == lines
    assert not (saved.parent / "no.pt").exists()


def test_a_run_that_starts_behind_the_step(saved, tmp_path, capsys, monkeypatch):
    """Nothing is saved."""
    monkeypatch.setattr("pretrain.trainer.Trainer._resume", _at_step_five)
    config = saved.parent / "run.yaml"
    assert capture.main([str(config), str(tmp_path / "no.pt"), "--step", "5"]) == 2
    assert "step 5 must be one that is trained" in capsys.readouterr().err
    assert not (tmp_path / "no.pt").exists()


def _at_step_five(trainer):
    trainer.state.step = 5


def test_where_nothing_can_be_written_is_found_before_the_training(saved, tmp_path, capsys):
    """Together with what else is wrong."""
    config = saved.parent / "run.yaml"
    assert capture.main([str(config), str(tmp_path), "--step", "0"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "error: --step must be at least 1, got 0",
        f"error: OUT.pt must be a file that can be written; got {tmp_path} (is a directory)",
    ]


def test_a_file_of_something_else(tmp_path, capsys):
    """Nothing that a file may hold gives a stack trace."""
    path, text, empty = (tmp_path / name for name in ("other.pt", "text", "empty"))
    torch.save({"x": torch.ones(3)}, path)
    text.write_text("root:x:0:0:root:/root:/bin/bash\n" * 9)
    empty.touch()
    listed = tmp_path / "list.pt"
    torch.save({"layers": [torch.ones(3)]}, listed)
    for file in (path, text, empty, listed, tmp_path / "nothing.pt", tmp_path):
        assert bench_captured.main([str(file)]) == 2
        said = capsys.readouterr().err
        assert "must be a file of tools.capture" in said, file
        assert len(said.splitlines()) == 1, file


@pytest.mark.parametrize(
    "layer",
    [
        {"x": torch.ones(4, 32), "w": torch.ones(16, 48), "dy": torch.ones(4, 16)},
        {"x": torch.ones(4, 32), "w": torch.ones(16, 32), "dy": torch.ones(4, 24)},
        {"x": torch.ones(4, 32), "w": torch.ones(16, 32), "dy": torch.ones(3, 16)},
        {"x": torch.ones(4, 32), "w": torch.ones(16, 32).long(), "dy": torch.ones(4, 16)},
        {"x": torch.ones(0, 32), "w": torch.ones(16, 32), "dy": torch.ones(0, 16)},
        {"x": 1.0, "w": 2.0, "dy": 3.0},
    ],
)
def test_tensors_that_are_no_layer(tmp_path, layer, capsys):
    path = tmp_path / "wrong.pt"
    torch.save({"layers": {"a": layer, "b": layer, "half": {"x": torch.ones(4, 32)}}}, path)
    assert bench_captured.main([str(path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    for name, line in zip("ab", said):
        assert "x [..., in], w [out, in] and dy [..., out] of each layer" in line
        assert f"; {name} of" in line
