# SPDX-License-Identifier: Apache-2.0
"""A run's configuration: presets, rules between sections, saving, freezing."""

import dataclasses

import pytest
import torch
import yaml

from fused_ops.errors import ConfigError
from pretrain.config import load_config, make_config, precision_plan, save_config
from pretrain.config_file import encode
from tests.toy import make_toy, toy_config


def _problems(data, **options):
    with pytest.raises(ConfigError) as error:
        make_config(data, **options)
    return error.value.problems


def test_defaults_and_round_trip(tmp_path):
    config = make_config(toy_config(tmp_path, "M-*E"))
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert list(yaml.safe_load((tmp_path / "config.yaml").read_text())) == [
        *("run", "model", "data", "train", "optimizer", "parallel", "precision"),
        *("checkpoint", "log", "monitor"),
    ]
    assert not list(tmp_path.glob("*.tmp"))


def test_config_is_frozen(tmp_path):
    config = make_config(toy_config(tmp_path))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3


def test_file_preset_and_overrides_in_that_order_of_precedence(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {preset: dense-30m, seq_length: 64, megatron: {hidden_size: 320}}\n"
        "data: {train: x}\n"
    )
    words = ["model.megatron.ffn_hidden_size=96", "model.vocab_size=100", "train.steps=5"]
    config = load_config(path, words)
    assert config.model.pattern == "*-*-*-*-*-*-", "from the preset"
    assert config.model.seq_length == 64, "from the file"
    assert config.model.megatron["hidden_size"] == 320
    assert config.model.megatron["ffn_hidden_size"] == 96
    assert config.model.megatron["kv_channels"] == 128
    assert (config.model.vocab_size, config.train.steps) == (100, 5)
    assert make_config(encode(config)) == config, "a resolved config stands for itself"


def test_unknown_preset_names_near_ones():
    problems = _problems({"model": {"preset": "hybrid-30"}, "data": {"train": "x"}})
    assert "hybrid-30m" in problems[0]


def test_problems_of_all_sections_together(tmp_path):
    data = toy_config(
        tmp_path,
        run={"name": "a/b", "seed": -1},
        model={"pattern": "*-", "megatron": {"hidden_size": 64, "hidden_dropuot": 0.1}},
        train={"steps": 10, "global_batch_size": 6, "profile_steps": [0, 3, 11], "lr": 1},
        optimizer={"betas": [0.9, 2.0], "warmup_steps": 40},
        parallel={"tensor_model_parallel_size": 2},
        precision={"recipe": "nvfp5"},
        log={"intervall": 3},
    )
    text = "\n".join(_problems(data, for_training=True))
    for part in (
        "run.name must be a plain folder name; got 'a/b'",
        "run.seed must be greater than or equal to 0; got -1",
        "hidden_dropuot",
        "hidden_dropout",
        "train.profile_steps must lie in 1 to train.steps=10; got [0, 11]",
        "train.lr is not a setting; got 1; did you mean optimizer.lr",
        "optimizer.betas must lie in [0, 1)",
        "optimizer.warmup_steps must lie in [0, train.steps=10); got 40",
        "the number of processes must be a multiple of",
        "log.intervall is not a setting; got 3; did you mean log.interval",
        "data.train: a data folder must exist",
        "data.valid: a data folder must exist",
    ):
        assert part in text, f"{part!r} not in\n{text}"


@pytest.mark.parametrize(
    ("section", "key", "meant"),
    [
        ("model", "hidden_size", "model.megatron.hidden_size"),
        ("train", "num_attention_heads", "model.megatron.num_attention_heads"),
        ("model", "sequence_parallel", "parallel.sequence_parallel"),
        ("parallel", "tp", "parallel.tensor_model_parallel_size"),
        ("parallel", "pp", "parallel.pipeline_model_parallel_size"),
        ("parallel", "vpp", "parallel.virtual_pipeline_model_parallel_size"),
        ("parallel", "ep", "parallel.expert_model_parallel_size"),
        ("parallel", "etp", "parallel.expert_tensor_parallel_size"),
        ("train", "gbs", "train.global_batch_size"),
    ],
)
def test_a_key_of_another_place_or_in_short_names_the_one_that_is_meant(
    section, key, meant, tmp_path
):
    data = toy_config(tmp_path)
    data[section] = data.get(section, {}) | {key: 2}
    said = next(text for text in _problems(data) if text.startswith(f"{section}.{key} is"))
    assert said.endswith(f"did you mean {meant}")


def test_precision_is_checked_before_anything_is_built(tmp_path):
    problems = _problems(toy_config(tmp_path, precision={"recipe": "nvfp5"}))
    assert any("nvfp5" in problem for problem in problems)
    problems = _problems(
        toy_config(tmp_path, precision={"rules": [{"modules": "*.nothing", "recipe": "bf16"}]})
    )
    assert any("nothing" in problem for problem in problems)


def test_no_word_about_what_a_wrong_setting_would_decide(tmp_path):
    problems = _problems(toy_config(tmp_path, train={"steps": "5"}, optimizer={"warmup_steps": 3}))
    assert problems == ["train.steps must be a valid integer; got '5'"]


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"global_batch_size": 6, "micro_batch_size": 4}, "the nearest valid sizes are 4 and 8"),
        ({"dtype": "fp8"}, "train.dtype must be 'fp32', 'bf16' or 'fp16'; got 'fp8'"),
        ({"steps": 1.5}, "train.steps must be a valid integer"),
        ({"global_batch_size": 0}, "greater than or equal to 1"),
    ],
)
def test_train_section(tmp_path, train, said):
    text = "\n".join(_problems(toy_config(make_toy(tmp_path), train=train), for_training=True))
    assert said in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_what_this_machine_lacks(tmp_path):
    data = toy_config(make_toy(tmp_path), run={"device": "cuda"}, optimizer={"name": "muon"})
    text = "\n".join(_problems(data, for_training=True))
    assert "run.device=cuda needs a GPU" in text
    assert "optimizer.name=muon needs the package" in text
    assert make_config(data).run.device == "cuda", "elsewhere the same file is right"


def test_more_processes_need_a_batch_that_divides(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    text = "\n".join(_problems(toy_config(make_toy(tmp_path)), for_training=True))
    assert (
        "micro_batch_size * data-parallel ranks = 4 * 3; got 8; the nearest valid size is 12"
        in text
    )
    data = toy_config(make_toy(tmp_path), parallel={"expert_model_parallel_size": 2})
    assert "expert_model_parallel_size" in "\n".join(_problems(data, for_training=True))


def test_a_dry_run_asks_nothing_of_the_machine(tmp_path):
    config = make_config(toy_config(tmp_path, train={"dry_run": True}), for_training=True)
    assert "linear_qkv" in precision_plan(config).render()


def test_a_recipe_that_is_unknown_is_said_beside_a_model_that_cannot_be(tmp_path):
    """A model without a shape has no precision table, but names can be checked."""
    with pytest.raises(ConfigError) as caught:
        make_config(
            {
                "model": {"pattern": "*-", "megatron": {"hidden_sizes": 3}},
                "data": {"train": "none"},
                "optimizer": {"lr": float("inf")},
                "precision": {
                    "recipe": "nvfp5",
                    "rules": [{"modules": "*.zzz", "recipe": "bf17"}],
                },
            }
        )
    text = "\n".join(caught.value.problems)
    for part in ("hidden_sizes", "'nvfp5'", "'bf17'", "lr must be positive and finite"):
        assert part in text


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"optimizer.lr": -1.0}, ["optimizer.lr must be positive", "optimizer.min_lr must lie"]),
        ({"optimizer": {"betas": [0.9, 2.0]}}, ["optimizer.betas must lie in [0, 1)"]),
        ({"optimizer.lr": "fast"}, ["optimizer.lr must be a valid number"]),
        ({"optimizer.oscillation_reset": {"threshold": 0}}, ["threshold must be above 1"]),
        ({"precision.recipe": "nvfp5"}, ["recipe 'nvfp5' is unknown"]),
        (
            {"precision.recipe": "bf16", "optimizer.oscillation_reset": {"from": 0.5}},
            ["in none of its windows (from=0.5 on) any layer does"],
        ),
        ({"train.global_batch_size": 7}, ["train.global_batch_size must be a multiple"]),
    ],
)
def test_an_override_is_held_to_the_rules_of_the_run(tmp_path, override, said):
    """Before anything is built, and beside what is wrong anyway."""
    data = toy_config(make_toy(tmp_path), precision={"recipe": "nvfp4"}, train={"steps": 400})
    data["checkpoint"]["override"] = override
    found = _problems(data, for_training=True)
    assert len(found) == len(said), found
    for text, words in zip(found, said):
        assert text.startswith("checkpoint.override: "), text
        assert words in text
    data["optimizer"]["weight_decay"] = -1.0
    assert [text for text in _problems(data, for_training=True) if text not in found] == [
        "optimizer.weight_decay must be >= 0; got -1.0"
    ]
    data["optimizer"]["weight_decay"] = 0.1
    data["checkpoint"]["override"] = {"optimizer.oscillation_reset": {}, "train.steps": 500}
    assert make_config(data, for_training=True).optimizer.oscillation_reset is None
