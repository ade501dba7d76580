# SPDX-License-Identifier: Apache-2.0
"""The schedule in samples, its way through checkpoints, and the printed table."""

import json
from types import SimpleNamespace

import pytest
import torch
from pydantic import TypeAdapter

from fused_ops.errors import ConfigError
from fused_ops.recipe import RECIPES
from fused_ops.weight_codes import WeightCodes
from models.config import ModelConfig
from models.precision import PrecisionPlan, PrecisionState, model_shape, plan_precision
from models.precision_config import PrecisionConfig
from tests.models import toy

PATTERN = "*-M-*E/*-"
QKV = "layers.0.self_attention.linear_qkv"
LATE_FORWARD = {"from": 0.82, "gemms": ["fprop"], "recipe": "bf16"}


def precision(**section):
    return TypeAdapter(PrecisionConfig).validate_python(section)


@pytest.fixture(scope="module")
def shape():
    return model_shape(toy.section(PATTERN))


def late_forward(shape, total=1000, **changes):
    config = precision(recipe="nvfp4", schedule=[{**LATE_FORWARD, **changes}])
    return PrecisionPlan(config, shape, total)


def test_a_step_begins_at_its_sample(shape):
    plan = late_forward(shape)
    assert plan.update(819) == []
    assert plan.recipe(QKV) == RECIPES["nvfp4"]
    (line,) = plan.update(820)
    assert line == "precision: fprop of layers all, modules * to bf16 from sample 820"
    assert plan.update(828) == []
    recipe = plan.recipe(QKV)
    assert recipe.gemm_formats("fprop") == ("bf16", "bf16")
    assert recipe.wgrad_x == RECIPES["nvfp4"].wgrad_x


def test_fractions_are_exact():
    """0.07 * 100 is 7.000000000000001 in floating point, and its ceiling would be 8."""
    shape = model_shape(toy.section(PATTERN))
    assert late_forward(shape, total=100, **{"from": 0.07}).boundaries == [7]


def test_a_late_high_precision_forward_takes_1d_blocks_in_the_backward(shape):
    plan = late_forward(shape)
    assert plan.recipe(QKV).dgrad_w.block == (16, 16)
    plan.update(1000)
    assert plan.recipe(QKV).dgrad_w.block == (1, 16)
    fast = PrecisionPlan(precision(recipe="nvfp4_fast", schedule=[LATE_FORWARD]), shape, 10)
    assert fast.recipe(QKV).dgrad_w.source == "forward"
    fast.update(9)
    assert fast.recipe(QKV).dgrad_w.source == "tensor"


def test_a_step_may_name_layers_and_modules(shape):
    plan = late_forward(shape, layers="last 2", modules="*.linear_proj", recipe="mxfp8")
    plan.update(1000)
    changed = [m.name for m in plan.modules if plan.recipe(m.name) != RECIPES["nvfp4"]]
    assert changed == ["layers.4.self_attention.linear_proj"]


def test_steps_add_up(shape):
    schedule = [
        {"from": 0.5, "recipe": "mxfp8"},
        {"from": 0.9, "gemms": ["dgrad"], "recipe": "bf16"},
    ]
    plan = PrecisionPlan(precision(recipe="nvfp4", schedule=schedule), shape, 100)
    assert [plan.update(n) and plan.recipe(QKV).gemm_formats("dgrad")[0] for n in (49, 50, 90)] == [
        [],
        "mxfp8",
        "bf16",
    ]
    assert plan.recipe(QKV).gemm_formats("fprop") == ("mxfp8", "mxfp8")


def test_a_longer_run_keeps_the_switch_of_its_checkpoint(shape):
    first = late_forward(shape)
    first.update(900)
    saved = json.loads(json.dumps(first.state_dict()))
    longer = late_forward(shape, total=5000)
    assert longer.boundaries == [4100]
    longer.load_state_dict(saved)
    assert longer.boundaries == [820]
    assert longer.recipe(QKV).gemm_formats("fprop") == ("bf16", "bf16")
    assert longer.update(904) == []


def test_a_step_added_at_a_resume_counts_in_the_new_length(shape):
    first = late_forward(shape)
    first.update(900)
    schedule = [LATE_FORWARD, {"from": 0.9, "recipe": "bf16"}]
    resumed = PrecisionPlan(precision(recipe="nvfp4", schedule=schedule), shape, 2000)
    resumed.load_state_dict(first.state_dict())
    assert resumed.boundaries == [820, 1800]


def test_a_step_that_was_taken_cannot_be_removed(shape):
    first = late_forward(shape)
    first.update(900)
    without = PrecisionPlan(precision(recipe="nvfp4"), shape, 1000)
    with pytest.raises(ConfigError, match=r"has taken at sample 820 \(fprop to bf16\)"):
        without.load_state_dict(first.state_dict())
    first.consumed_samples = 100
    without.load_state_dict(first.state_dict())


def test_a_new_step_cannot_come_before_those_of_the_checkpoint(shape):
    first = late_forward(shape, total=1000)
    schedule = [{"from": 0.5, "gemms": ["wgrad"], "recipe": "bf16"}, LATE_FORWARD]
    resumed = PrecisionPlan(precision(recipe="nvfp4", schedule=schedule), shape, 5000)
    with pytest.raises(ConfigError, match=r"samples \[2500, 820\]"):
        resumed.load_state_dict(first.state_dict())


def test_modules_get_their_recipes_and_lose_their_codes_when_it_changes(shape):
    plan = late_forward(shape, layers="0")
    state = PrecisionState(seed=3)
    modules = {
        m.name: SimpleNamespace(recipe=None, weight_codes=WeightCodes(), delayed={})
        for m in plan.modules
    }
    plan.bind(modules.items(), state)
    for module in modules.values():
        weight = torch.zeros(2)
        module.weight_codes.get("w", weight, 0, (), lambda: SimpleNamespace(nbytes=1))
    plan.update(900)
    emptied = [name for name, module in modules.items() if module.weight_codes.nbytes == 0]
    assert emptied == ["layers.0.self_attention.linear_qkv", "layers.0.self_attention.linear_proj"]
    for name, module in modules.items():
        assert module.gemm_name == name
        assert module.precision_state is state
        assert module.recipe == plan.recipe(name)
        assert module.amax_scope == "layout_invariant"


def test_state():
    state = PrecisionState(seed=3, check_finite=True)
    state.set_micro_batch(5)
    state.set_step(7)
    assert (state.seed, state.step, state.micro_batch) == (3, 7, 0)
    epoch = state.weights_epoch
    state.weights_changed()
    assert state.weights_epoch != epoch
    assert state.nonfinite.dtype is torch.bool
    assert not state.nonfinite


def test_table_has_every_gemm_and_what_stays_high(shape):
    plan = PrecisionPlan(
        precision(recipe="nvfp4", rules=[{"layers": "1", "recipe": "mxfp8"}]), shape
    )
    rows = {row["name"]: row for row in plan.table()}
    assert rows[QKV]["fprop"] == {"x": "nvfp4 1x16", "w": "nvfp4 16x16"}
    assert rows[QKV]["dgrad"] == {"dy": "nvfp4 1x16 stochastic", "w": "nvfp4 16x16"}
    assert rows[QKV]["wgrad"] == {
        "dy": "nvfp4 1x16 hadamard16 stochastic",
        "x": "nvfp4 1x16 hadamard16",
    }
    assert rows["layers.1.mlp.linear_fc1"]["wgrad"] == {"dy": "mxfp8 1x32", "x": "mxfp8 1x32"}
    assert rows["layers.5.mlp.experts.linear_fc1"]["shape"] == "4 of 96 x 64"
    for name in (
        "embedding",
        "self_attention.core_attention",
        "mlp.router",
        "mixer.conv1d",
        "mixer.scan",
        "norms",
        "output_layer",
    ):
        assert rows[name]["recipe"] == "always high"
        assert rows[name]["reason"]
    assert len(rows) == len(plan.modules) + 7
    assert sum(row["flops_share"] for row in rows.values()) == pytest.approx(1, rel=1e-12)
    assert json.loads(json.dumps(plan.table())) == plan.table()


def test_shares_of_gemm_flops(shape):
    plan = PrecisionPlan(
        precision(recipe="nvfp4", rules=[{"layers": "1", "recipe": "mxfp8"}]), shape
    )
    shares = plan.flops_share()
    rows = plan.table()
    in_mxfp8 = [row for row in rows if row.get("fprop") == {"x": "mxfp8 1x32", "w": "mxfp8 1x32"}]
    assert shares["mxfp8"] == pytest.approx(sum(row["flops_share"] for row in in_mxfp8))
    assert sum(shares.values()) == pytest.approx(1, rel=1e-12)
    mixed = PrecisionPlan(precision(recipe="nvfp4_fwd_mxfp8_bwd"), shape).flops_share()
    assert mixed["mxfp8"] == pytest.approx(2 * mixed["nvfp4"])


def test_rendered_table_has_a_line_for_each_layer_and_gemm(shape):
    plan = PrecisionPlan(precision(recipe="nvfp4", schedule=[LATE_FORWARD]), shape, 1000)
    text = plan.render()
    lines = text.splitlines()
    with_gemm = [
        line for line in lines if any(f"  {g}  " in line for g in ("fprop", "dgrad", "wgrad"))
    ]
    high_products = 3  # core attention, router, output layer
    assert len(with_gemm) == 3 * (len(plan.modules) + high_products)
    assert lines[1].split()[:7] == [QKV, "128", "x", "64", "fprop", "nvfp4", "1x16"]
    assert "share of GEMM FLOPs: nvfp4 " in text
    assert "from sample 820: fprop of layers all, modules * to bf16" in text
    assert max(map(len, lines)) < 180


def test_high_precision_is_called_what_it_is():
    """In a run of FP32 a BF16 operand is not rounded: the table must not say that it is."""
    shape = model_shape(toy.section(PATTERN), params_dtype=torch.float32)
    plan = PrecisionPlan(precision(), shape)
    assert plan.table()[0]["fprop"] == {"x": "fp32", "w": "fp32"}
    assert plan.flops_share() == {"fp32": pytest.approx(1.0)}
    assert plan.notes() == [
        "operands in bf16 are computed in fp32, the type of weights and activations"
    ]


def test_padding_is_noted():
    shape = model_shape(toy.section("M", {"mamba_num_heads": 4, "mamba_num_groups": 1}))
    (note,) = PrecisionPlan(precision(recipe="nvfp4"), shape).notes()
    assert (
        note
        == "in_proj: dgrad contracts 164, padded to 176 (1 modules, first layers.0.mixer.in_proj)"
    )


def test_a_vocabulary_that_only_the_data_knows_is_noted():
    model = ModelConfig(pattern="*-", megatron=toy.BASE)
    plan = PrecisionPlan(precision(), model_shape(model))
    assert plan.notes() == ["the vocabulary is the data's: shares leave the output layer out"]


def test_a_pattern_cut_into_stages_has_the_same_table():
    config = precision(recipe="nvfp4", rules=[{"layers": "last 15%", "recipe": "bf16"}])
    whole = plan_precision(toy.section("*-M-*E/*-"), config).table()
    assert plan_precision(toy.section("*-M|-*E/*-"), config).table() == whole
    assert plan_precision(toy.section("*|-M|-*|E/*-"), config).table() == whole
    assert plan_precision(toy.section("*-M-E*/*-"), config).table() != whole
