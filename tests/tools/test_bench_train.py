# SPDX-License-Identifier: Apache-2.0
"""The benchmark of training steps: what its words mean, and its engine on a toy without a clock."""

import pytest

from fused_ops.errors import ConfigError
from models.config import ParallelConfig
from pretrain.command_line import recipe_settings
from tools import bench_train

TINY = {
    "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 16, "mamba_num_heads": 4, "mamba_head_dim": 32, "mamba_num_groups": 2,
    "mamba_state_dim": 16, "gated_linear_unit": False, "activation_func": "squared_relu",
}  # fmt: skip


def test_a_recipe_with_settings_of_its_own():
    text = "nvfp4_fast:fp8+precision.communicate=packed+precision.plan=nvfp4_paper"
    recipe, own = recipe_settings(text)
    assert recipe == "nvfp4_fast"
    assert own[0] == "precision.decode=fp8"
    config = bench_train.run_config("dense", recipe, own)
    precision = config.precision
    assert (precision.recipe, precision.decode) == ("nvfp4_fast", "fp8")
    assert (precision.communicate, precision.plan) == ("packed", "nvfp4_paper")
    assert recipe_settings("bf16") == ("bf16", [])
    for wrong, said in {
        "": "must have a name",
        ":fp8": "must have a name",
        "nvfp4:": "one of",
        "nvfp4:fp9": "did you mean 'fp8'",
    }.items():
        with pytest.raises(ConfigError, match=said):
            recipe_settings(wrong)
    for wrong in ("nvfp4+", "nvfp4+packed"):
        with pytest.raises(ConfigError, match=r"section\.key=value"):
            bench_train.run_config("dense", *recipe_settings(wrong))


@pytest.mark.parametrize(
    ("arguments", "problems"),
    [
        (
            ["--recipes", "bf16", "nosuch", "nvfp4:exactly", "nvfp4+foo", "nvfp4+precision.pla=x"],
            [
                "--recipes nosuch: precision.recipe: recipe 'nosuch' is unknown",
                "--recipes nvfp4:exactly: behind a recipe and a colon stands how it is decoded",
                "--recipes nvfp4+foo: an override must read section.key=value; got 'foo'",
                "--recipes nvfp4+precision.pla=x: precision.pla is not a setting",
            ],
        ),
        (["--set", "a"], ["an override must read section.key=value; got 'a'"]),
        (
            ["--set", "parallel.tensor_model_parallel_size=3"],
            ["must be a multiple of the 3 processes"],
        ),
    ],
)
def test_mistakes_are_told_together(arguments, problems, monkeypatch, capsys):
    """On a machine with a GPU; nothing is built for them."""
    monkeypatch.setattr(bench_train.torch.cuda, "is_available", lambda: True)
    assert bench_train.main(arguments) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) >= len(problems)
    for problem in problems:
        assert any(line.startswith("error: ") and problem in line for line in said), said


def test_numbers_that_mean_nothing(capsys):
    for word in ("--iterations", "--limit"):
        with pytest.raises(SystemExit, match="2"):
            bench_train.main([word, "0"])
        assert f"{word} must be greater than 0, got 0" in capsys.readouterr().err


def test_the_paper_s_model_is_the_preset():
    two = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    config = bench_train.run_config("paper12b", "nvfp4", two)
    assert config.model.pattern.count("M") == 28
    assert (config.model.vocab_size, config.model.position_embedding) == (131072, "none")
    assert config.parallel == ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    with pytest.raises(ConfigError, match="heads"):
        bench_train.run_config("paper12b", "nvfp4", ["parallel.tensor_model_parallel_size=3"])


@pytest.fixture
def tiny(monkeypatch):
    model = bench_train.Model(pattern="M-*-", megatron=TINY, vocab=128, position="none")
    monkeypatch.setitem(bench_train.MODELS, "tiny", model)
    monkeypatch.setattr(bench_train, "LENGTH", 32)
    monkeypatch.setattr(bench_train.torch.cuda, "get_device_name", lambda: "a clock that stands")

    def measure(run, iterations):
        for _ in range(iterations):
            run()
        return 2.0, 1.0, 0.5

    monkeypatch.setattr(bench_train, "measure", measure)


def test_what_is_measured_and_what_fails(tiny, capsys, monkeypatch):
    """Without Transformer Engine the baseline fails, is said to, and the rest is measured."""
    monkeypatch.setattr(bench_train, "find_spec", lambda name: None)
    monkeypatch.setitem(bench_train.MODELS, "dense", bench_train.MODELS["tiny"])
    words = ["--baseline", "bf16", "--step", "--iterations", "2"]
    options = ["--recipes", "bf16", "nvfp4+precision.plan=nvfp4_paper"]
    parsed = bench_train.command_line().parse_args([*words, *options])
    assert bench_train.Bench(parsed).run() == 1
    lines = capsys.readouterr().out.splitlines()
    assert "FAILED: transformer_engine is not installed, see requirements-gpu.txt" in lines[1]
    measured = [line.split("  ")[0] for line in lines[2:]]
    plan = "nvfp4 plan=nvfp4_paper"
    assert measured == ["bf16", "bf16, optimizer step", plan, f"{plan}, optimizer step"]
    assert all("16.0 k tok/s" in line for line in lines[2:])
