# SPDX-License-Identifier: Apache-2.0
"""Selectors, named plans, first match wins, and every contradiction reported at once."""

import pytest
from hypothesis import given, strategies as st
from pydantic import TypeAdapter, ValidationError

from fused_ops.errors import ConfigError
from fused_ops.recipe import RECIPES
from models.config import ModelConfig
from models.plans import PLANS, match_module, select_layers
from models.precision import PrecisionPlan, model_shape, plan_precision
from models.precision_config import PrecisionConfig
from tests.models import toy

SHAPES = {}


def precision(**section):
    return TypeAdapter(PrecisionConfig).validate_python(section)


def plan(pattern, fields=None, **settings):
    key = (pattern, str(fields))
    if key not in SHAPES:
        SHAPES[key] = model_shape(toy.section(pattern, fields))
    return PrecisionPlan(precision(**settings), SHAPES[key], total_samples=1000)


def problems(pattern, fields=None, **settings):
    with pytest.raises(ConfigError) as caught:
        plan(pattern, fields, **settings)
    return caught.value.problems


def bf16_positions(found):
    return {m.position for m in found.modules if found.recipe(m.name).name == "bf16"}


@pytest.mark.parametrize(
    ("text", "layers", "positions"),
    [
        ("first 2", 10, {0, 1}),
        ("last 3", 10, {7, 8, 9}),
        ("last 15%", 62, set(range(52, 62))),
        ("last 7%", 100, set(range(93, 100))),
        ("first 12.5%", 16, {0, 1}),
        ("last 1/6", 24, {20, 21, 22, 23}),
        ("last 1 / 6", 25, {20, 21, 22, 23, 24}),
        ("3", 10, {3}),
        (3, 10, {3}),
        ("3-5", 10, {3, 4, 5}),
        ("first 1, 4, last 1", 10, {0, 4, 9}),
        ("last 8", 5, {0, 1, 2, 3, 4}),
        ("last 0%", 10, set()),
    ],
)
def test_selectors(text, layers, positions):
    selection = select_layers(text, layers)
    assert selection.positions == positions
    assert not selection.mtp


def test_mtp_is_selected_by_its_name_and_by_all():
    assert select_layers("mtp", 4).mtp
    assert select_layers("mtp", 4).positions == set()
    assert select_layers("all", 4).mtp
    assert select_layers("last 1, mtp", 4).contains(None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lst 3", "must be like"),
        ("last", "must be like"),
        ("", "must be like"),
        ("last 150%", "at most all of them"),
        ("last 1/0", "denominator"),
        ("7-3", "lower number first"),
        ("10", "from 0 to 9"),
        ("8-12", "from 0 to 9"),
        (-1, "must be like"),
    ],
)
def test_selectors_that_mean_nothing(text, message):
    with pytest.raises(ValueError, match=message):
        select_layers(text, 10)


@given(st.integers(0, 100), st.integers(1, 400))
def test_a_percentage_is_the_exact_fraction_rounded_up(percent, layers):
    count = len(select_layers(f"last {percent}%", layers).positions)
    assert 100 * (count - 1) < percent * layers <= 100 * count


def test_pairs_widen_outward():
    assert select_layers("last 3", 10, pairs=True).positions == {6, 7, 8, 9}
    assert select_layers("first 1", 10, pairs=True).positions == {0, 1}


def test_globs():
    assert match_module("*.mixer.out_proj", "layers.3.mixer.out_proj")
    assert not match_module("*mixer.out_proj", "layers.3.mixer.in_proj")
    assert match_module("*.in_proj, *.out_proj", "layers.3.mixer.in_proj")
    assert not match_module("!*.experts.*", "layers.3.mlp.experts.linear_fc1")
    assert match_module("!*.mlp.experts.*", "layers.3.mlp.shared_experts.linear_fc1")
    assert not match_module("layers.1.*", "layers.10.mixer.in_proj")
    assert not match_module("layers.*", "mtp.0.eh_proj")


HYBRID = "M-M-M-M*-" * 6 + "M-M-M-M-"


def test_nvfp4_paper_keeps_the_first_two_and_the_last_eight_blocks():
    found = plan(HYBRID, plan="nvfp4_paper")
    assert bf16_positions(found) == {0, 1, *range(54, 62)}
    kept = found.recipe("layers.2.mixer.in_proj")
    assert kept == RECIPES["nvfp4"]


def test_plans_round_outward_to_whole_pairs_in_a_transformer():
    # 15 % of 64 positions are 10: the last five of 32 blocks, as published for Llama-3 8B.
    assert bf16_positions(plan("*-" * 32, plan="nemotron3")) >= set(range(54, 64))
    assert bf16_positions(plan("*-" * 20, plan="fp8_paper")) == {0, 1, 38, 39}
    found = plan("*-" * 20, plan="fp8_paper")
    assert found.recipe("layers.3.mlp.linear_fc1") == RECIPES["fp8_blockwise_fp32"]
    assert found.recipe("layers.39.mlp.linear_fc1").name == "bf16"
    # the user's own selectors mean what they say
    own = plan("*-" * 20, recipe="nvfp4", rules=[{"layers": "first 1", "recipe": "bf16"}])
    assert bf16_positions(own) == {0}
    assert bf16_positions(plan("M-*-" * 5, plan="fp8_paper")) == {0, 18, 19}


def test_nemotron3():
    fields = {"moe_latent_size": 32, "moe_shared_expert_intermediate_size": 32}
    found = plan("ME*E" * 5 + "/*E", fields, plan="nemotron3")
    names = {
        "layers.0.mixer.in_proj": "nvfp4",
        "layers.0.mixer.out_proj": "mxfp8",
        "layers.1.mlp.fc1_latent_proj": "bf16",
        "layers.1.mlp.fc2_latent_proj": "bf16",
        "layers.1.mlp.experts.linear_fc1": "nvfp4",
        "layers.1.mlp.shared_experts.linear_fc2": "nvfp4",
        "layers.2.self_attention.linear_qkv": "bf16",
        "layers.2.self_attention.linear_proj": "bf16",
        "layers.16.mixer.out_proj": "mxfp8",
        "layers.17.mlp.experts.linear_fc1": "bf16",
        "layers.19.mlp.experts.linear_fc2": "bf16",
        "mtp.0.eh_proj": "bf16",
        "mtp.0.layers.1.mlp.experts.linear_fc1": "bf16",
    }
    assert {name: found.recipe(name).name for name in names} == names
    assert plan("M-M-", plan="nemotron3").recipe("layers.1.mlp.linear_fc1").name == "nvfp4"


def test_inkling2():
    found = plan("*E" * 24, {"moe_shared_expert_intermediate_size": 32}, plan="inkling2")
    routed = [found.recipe(f"layers.{i}.mlp.experts.linear_fc1").name for i in range(1, 48, 2)]
    assert routed == ["nvfp4"] * 20 + ["mxfp8"] * 4
    rest = [m.name for m in found.modules if ".mlp.experts." not in m.name]
    assert {found.recipe(name).name for name in rest} == {"bf16"}
    assert any("shared_experts" in name for name in rest)


def test_a_plan_lets_the_rest_take_another_recipe():
    found = plan(HYBRID, plan="nvfp4_paper", recipe="nvfp4_fast", decode="fp8")
    recipe = found.recipe("layers.30.mlp.linear_fc1")
    assert (recipe.name, recipe.decode) == ("nvfp4_fast", "fp8")


def test_inkling2_needs_experts():
    assert (
        "plan inkling2: last 1/6 *.mlp.experts.* matches no module"
        in problems("*-", plan="inkling2")[0]
    )


def test_first_match_wins_and_the_plan_comes_first():
    found = plan(
        HYBRID,
        plan="nvfp4_paper",
        rules=[
            {"layers": "last 15%", "recipe": "mxfp8"},
            {"modules": "*.mixer.*", "gemms": ["wgrad"], "recipe": "bf16"},
            {"modules": "*.out_proj", "recipe": "nvfp4_fast"},
        ],
    )
    assert found.recipe("layers.61.mlp.linear_fc1").name == "bf16"
    assert found.recipe("layers.53.mlp.linear_fc1").name == "mxfp8"
    mixed = found.recipe("layers.4.mixer.out_proj")
    assert mixed.fprop_x == RECIPES["nvfp4_fast"].fprop_x
    assert mixed.wgrad_dy == RECIPES["bf16"].wgrad_dy
    row = next(r for r in found.table() if r["name"] == "layers.4.mixer.out_proj")
    assert row["rule"] == "precision.rules[2], precision.rules[1]"


def test_a_recipe_of_the_users_own():
    found = plan(
        "*-",
        recipe="mine",
        recipes={"mine": {"base": "nvfp4", "fprop_x": "mxfp8", "dgrad_w": {"format": "nvfp4"}}},
    )
    recipe = found.recipe("layers.0.self_attention.linear_qkv")
    assert recipe.fprop_x.format == "mxfp8"
    assert recipe.dgrad_w.block == (1, 16)
    assert recipe.wgrad_x == RECIPES["nvfp4"].wgrad_x


def test_phases_name_plans_of_their_own():
    found = plan(
        "*E" * 6,
        plan="inkling2",
        phases={"pretraining_backward": "nvfp4_paper", "sampler": "inkling2"},
    )
    recipe = found.recipe("layers.4.self_attention.linear_qkv")
    assert recipe.fprop_x.format == "bf16"
    # first 2 and last 8 of 12 positions are BF16 in the backward
    assert recipe.dgrad_dy.format == "bf16"
    assert found.recipe("layers.3.mlp.experts.linear_fc1").dgrad_dy == RECIPES["nvfp4"].dgrad_dy
    assert found.recipe("layers.5.mlp.experts.linear_fc1").dgrad_dy.format == "bf16"
    assert found.recipe("layers.5.mlp.experts.linear_fc1").fprop_x.format == "nvfp4"
    found.set_phase("sampler")
    assert found.recipe("layers.5.mlp.experts.linear_fc1").name == "nvfp4"
    found.set_phase("pretraining")
    with pytest.raises(ConfigError, match="a phase is one of"):
        found.set_phase("sampling")


def test_a_rule_that_matches_nothing_is_an_error_with_the_nearest_names():
    (text,) = problems("*-*-", rules=[{"modules": "*.linear_qvk", "recipe": "bf16"}])
    assert text.startswith("precision.rules[0] matches no module")
    assert "nearest: *.self_attention.linear_qkv" in text


def test_a_rule_that_misses_its_layers_says_where_they_are():
    (text,) = problems(
        "M-M-*-", rules=[{"layers": "last 2", "modules": "*.in_proj", "recipe": "bf16"}]
    )
    assert "such modules are in layers 0, 2: correct the layers" in text
    (text,) = problems("*-*-", rules=[{"layers": "mtp", "recipe": "bf16"}])
    assert "matches no module" in text


def test_a_rule_behind_others_that_decide_everything_is_an_error():
    rules = [{"layers": "first 4", "recipe": "bf16"}, {"layers": "1-3", "recipe": "mxfp8"}]
    (text,) = problems("*-*-*-", recipe="nvfp4", rules=rules)
    assert text.startswith("precision.rules[1] never applies: precision.rules[0] comes first")
    same = [*rules[:1], {"layers": "1-3", "recipe": "bf16"}]
    assert bf16_positions(plan("*-*-*-", recipe="nvfp4", rules=same)) == {0, 1, 2, 3}


@pytest.mark.parametrize("start", [-0.1, 1.01, float("nan")])
def test_a_schedule_outside_the_run(start):
    (text,) = problems("*-", recipe="nvfp4", schedule=[{"from": start, "recipe": "bf16"}])
    assert "must be a fraction of the run between 0 and 1" in text


@pytest.mark.parametrize("second", [0.5, 0.4])
def test_a_schedule_that_does_not_increase(second):
    schedule = [{"from": 0.5, "recipe": "mxfp8"}, {"from": second, "recipe": "bf16"}]
    (text,) = problems("*-", recipe="nvfp4", schedule=schedule)
    assert "must be above the step before it (0.5)" in text


def test_a_schedule_that_lowers_precision():
    (text,) = problems(
        "*-*-",
        recipe="nvfp4",
        rules=[{"layers": "last 1", "recipe": "bf16"}],
        schedule=[{"from": 0.5, "recipe": "mxfp8"}],
    )
    assert "lowers the precision of 2 modules" in text
    assert "layers.3.mlp.linear_fc1 fprop_x bf16 to mxfp8" in text
    schedule = [
        {"from": 0.5, "recipe": "bf16"},
        {"from": 0.7, "gemms": ["wgrad"], "recipe": "nvfp4"},
    ]
    (text,) = problems("*-", recipe="nvfp4", schedule=schedule)
    assert text.startswith("precision.schedule[1] lowers the precision of 4 modules")


def test_everything_is_reported_at_once():
    found = problems(
        "*-*-",
        recipe="nvfp5",
        plan="nvfp4_papr",
        rules=[
            {"modules": "*.mixer.out_proj", "recipe": "mxfp8"},
            {"layers": "lst 3", "recipe": "bf16"},
            {"recipe": "bf61", "gemms": []},
        ],
        schedule=[{"from": 1.2, "recipe": "mxfp9"}],
        recipes={"bf16": {}, "mine": {"fprop_x": "nvfp9", "fprop_v": "bf16"}},
    )
    for text in (
        "precision.recipes.bf16 is the name of a built-in recipe",
        "precision.recipes.mine: fprop_x: format",
        "precision.recipes.mine: a recipe has no key 'fprop_v'",
        "did you mean 'nvfp4_paper'?",
        "precision.recipe: recipe 'nvfp5' is unknown; did you mean",
        "precision.rules[0] matches no module",
        "precision.rules[1]: layers must be like",
        "precision.rules[2]: recipe 'bf61' is unknown; did you mean 'bf16'?",
        "precision.rules[2]: gemms must name one of",
        "precision.schedule[0].from must be a fraction",
        "precision.schedule[0]: recipe 'mxfp9' is unknown",
    ):
        assert any(text in problem for problem in found), text
    assert len(found) == len(set(found))


def test_fp4_without_kernels_is_refused_where_the_reference_is_forbidden():
    found = problems("*-", recipe="nvfp4", allow_reference=False)
    assert "precision.allow_reference is false, but nvfp4 1x16" in found[0]
    assert "a CPU" in found[0]
    plan("*-", recipe="bf16", allow_reference=False)


def test_a_default_recipe_that_nothing_uses_is_noted():
    found = plan("*-*-", plan="nvfp4_paper")
    assert found.notes() == ["plan nvfp4_paper nvfp4 is used by no GEMM: rules decide all of them"]


def test_the_section_survives_being_saved():
    adapter = TypeAdapter(PrecisionConfig)
    config = precision(
        rules=[{"layers": "last 15%", "recipe": "bf16"}, {"layers": 3, "recipe": "bf16"}],
        schedule=[{"from": 0.82, "gemms": ["fprop"], "recipe": "bf16"}],
        phases={"sampler": "inkling2"},
    )
    saved = adapter.dump_python(config, mode="json")
    assert saved["schedule"][0]["from"] == 0.82
    assert adapter.validate_python(saved) == config
    with pytest.raises(ValidationError, match="rulez"):
        precision(rulez=[])


def test_every_plan_says_where_it_comes_from():
    assert set(PLANS) == {"nvfp4_paper", "fp8_paper", "nemotron3", "inkling2"}
    assert all(entry.source for entry in PLANS.values())


def test_unbuilt_models_are_refused_as_megatron_would():
    with pytest.raises(ConfigError, match="hidden_size"):
        plan_precision(ModelConfig(pattern="*-", megatron={"num_attention_heads": 3}), precision())
