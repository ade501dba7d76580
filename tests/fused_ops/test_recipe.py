# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fused_ops.errors import ConfigError
from fused_ops.formats import OperandSpec
from fused_ops.recipe import (
    OPERAND_FIELDS,
    RECIPES,
    GemmRecipe,
    bits,
    get_recipe,
    is_quantized,
    recipe_from_dict,
)

NAMES = [
    "bf16", "fp16", "fp32", "fp8_tensorwise", "fp8_delayed", "fp8_blockwise",
    "fp8_blockwise_fp32", "mxfp8", "mxfp4",
    "mxfp4_hadamard", "nvfp4", "nvfp4_4over6", "nvfp4_requant", "nvfp4_requant_4over6", "nvfp4_v2",
    "nvfp4_v2_4over6", "nvfp4_pow2", "nvfp4_pow2_from_codes", "nvfp4_fast", "nvfp4_fast_a8",
    "mxfp8_fwd_nvfp4_bwd", "nvfp4_fwd_mxfp8_bwd",
]  # fmt: skip


def labels(name):
    recipe = RECIPES[name]
    return [getattr(recipe, field).label for field in OPERAND_FIELDS]


def test_all_named_recipes_exist_under_their_names():
    assert sorted(RECIPES) == sorted(NAMES)
    assert all(recipe.name == name for name, recipe in RECIPES.items())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", ["bf16"] * 6),
        ("fp8_delayed", ["fp8_delayed"] * 2 + ["fp8_delayed e5m2", "fp8_delayed"] * 2),
        (
            "fp8_blockwise",
            ["fp8_blockwise 1x128", "fp8_blockwise 128x128"] * 2 + ["fp8_blockwise 1x128"] * 2,
        ),
        (
            "nvfp4",
            [
                "nvfp4 1x16",
                "nvfp4 16x16",
                "nvfp4 1x16 stochastic",
                "nvfp4 16x16",
                "nvfp4 1x16 hadamard16 stochastic",
                "nvfp4 1x16 hadamard16",
            ],
        ),
        (
            "nvfp4_requant_4over6",
            [
                "nvfp4 1x16 4over6_mse",
                "nvfp4 1x16 4over6_mse",
                "nvfp4 1x16 stochastic",
                "nvfp4 1x16 from_forward",
                "nvfp4 1x16 hadamard16 stochastic",
                "nvfp4 1x16 hadamard16",
            ],
        ),
        (
            "nvfp4_v2",
            [
                "nvfp4 1x16",
                "nvfp4 1x16",
                "nvfp4 1x16 hadamard128 ms_eden",
                "nvfp4 1x16 hadamard128 from_forward",
                "nvfp4 1x16 hadamard128 ms_eden",
                "nvfp4 1x16 hadamard128",
            ],
        ),
        (
            "nvfp4_fast",
            [
                "nvfp4 1x16 4over6_mse",
                "nvfp4 1x16 4over6_mse",
                "nvfp4 1x16 pow2 stochastic",
                "nvfp4 1x16 pow2 better_of_two from_forward",
                "nvfp4 1x16 pow2 hadamard16 stochastic",
                "nvfp4 1x16 pow2 hadamard16 better_of_two",
            ],
        ),
        (
            "nvfp4_fast_a8",
            [
                "fp8_tensorwise",
                "nvfp4 1x16 4over6_mse",
                "nvfp4 1x16 pow2 stochastic",
                "nvfp4 1x16 pow2 better_of_two from_forward",
                "nvfp4 1x16 pow2 hadamard16 stochastic",
                "nvfp4 1x16 pow2 hadamard16 better_of_two",
            ],
        ),
        (
            "mxfp8_fwd_nvfp4_bwd",
            [
                "mxfp8 1x32",
                "mxfp8 1x32",
                "nvfp4 1x16 stochastic",
                "nvfp4 1x16 from_forward",
                "nvfp4 1x16 hadamard16 stochastic",
                "nvfp4 1x16 hadamard16",
            ],
        ),
        (
            "nvfp4_fwd_mxfp8_bwd",
            ["nvfp4 1x16 row_scaled", "nvfp4 1x16", *["mxfp8 1x32"] * 4],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_operands_of_named_recipes(name, expected):
    assert labels(name) == expected


def test_only_gradients_are_rounded_stochastically():
    """SR or MS-EDEN on X or W diverges (NVFP4 paper, arXiv 2509.25149, appendix E.3)."""
    for recipe in RECIPES.values():
        for field in ("fprop_x", "fprop_w", "dgrad_w", "wgrad_x"):
            assert getattr(recipe, field).rounding == "nearest", (recipe.name, field)
        for field in ("dgrad_dy", "wgrad_dy"):
            four_bits = bits(getattr(recipe, field)) == 4
            assert getattr(recipe, field).is_random == four_bits, (recipe.name, field)


def test_v2_resamples_dgrad_per_step_and_wgrad_per_micro_batch():
    recipe = RECIPES["nvfp4_v2"]
    assert [getattr(recipe, f).signs for f in OPERAND_FIELDS] == [
        "fixed", "fixed", "step", "step", "micro_batch", "micro_batch",
    ]  # fmt: skip


def test_numerators_belong_to_operands():
    v2 = RECIPES["nvfp4_v2"]
    assert (v2.wgrad_dy.numerator, v2.wgrad_x.numerator) == (1536.0, 2688.0)
    assert RECIPES["nvfp4_fast"].fprop_w.numerator == 1536.0
    assert RECIPES["nvfp4"].fprop_w.numerator == 2688.0


def test_four_over_six_touches_the_forward_only():
    for name in ("nvfp4", "nvfp4_requant", "nvfp4_v2"):
        plain, four = RECIPES[name], RECIPES[f"{name}_4over6"]
        changed = {f for f in OPERAND_FIELDS if getattr(plain, f) != getattr(four, f)}
        # With 16x16 tiles dgrad multiplies by the forward's own codes, transposed.
        assert changed == {"fprop_x", "fprop_w"} | ({"dgrad_w"} if name == "nvfp4" else set())


def test_bits_order_precision():
    expected = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8_tensorwise": 8, "fp8_delayed": 8}
    expected |= {"fp8_blockwise": 8, "mxfp8": 8, "mxfp4": 4, "nvfp4": 4}
    assert {name: bits(OperandSpec(format=name)) for name in expected} == expected
    mixed = RECIPES["nvfp4_fwd_mxfp8_bwd"]
    assert [set(map(bits, mixed.specs(g))) for g in ("fprop", "dgrad")] == [{4}, {8}]


def test_with_gemm_replaces_one_gemm():
    late = RECIPES["nvfp4"].with_gemm("fprop", RECIPES["bf16"])
    assert late.gemm_formats("fprop") == ("bf16", "bf16")
    assert late.gemm_formats("dgrad") == ("nvfp4", "nvfp4")
    assert late.wgrad_dy == RECIPES["nvfp4"].wgrad_dy
    # Nothing is left to requantize from when the forward is no longer quantized.
    late = RECIPES["nvfp4_fast"].with_gemm("fprop", RECIPES["bf16"])
    assert late.dgrad_w == replace(RECIPES["nvfp4_fast"].dgrad_w, source="tensor")


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(ConfigError, match=r"got 'nvfp4_fst'; did you mean 'nvfp4_fast'\?"):
        get_recipe("nvfp4_fst")


def test_recipe_from_dict_operand_by_operand():
    recipe = recipe_from_dict(
        {
            "name": "mine",
            "base": "nvfp4_fast",
            "decode": "fp8",
            "fprop_x": "mxfp8",
            "fprop_w": {"format": "nvfp4", "block": [16, 16], "choice": "4over6_mae"},
        }
    )
    assert recipe.fprop_x == OperandSpec(format="mxfp8")
    assert recipe.fprop_w == OperandSpec(format="nvfp4", block=(16, 16), choice="4over6_mae")
    assert recipe.wgrad_x == RECIPES["nvfp4_fast"].wgrad_x
    assert (recipe.name, recipe.decode) == ("mine", "fp8")
    assert not is_quantized(recipe_from_dict({"name": "x"}).fprop_x)


def test_recipe_from_dict_reports_all_problems_with_the_nearest_names():
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(
            {
                "name": "mine",
                "base": "nvfp4_fas",
                "decode": "fp9",
                "fprob_x": "bf16",
                "fprop_w": {"format": "nvfp5"},
                "dgrad_w": {"format": "nvfp4", "blok": [16, 16], "rounding": "up"},
                "wgrad_x": {"format": "nvfp4", "hadamard": 16},
            }
        )
    text = caught.value.problems
    expected = [
        "did you mean 'fprop_x'", "did you mean 'nvfp4_fast'", "fprop_w: format is one of",
        "did you mean 'block'", "rounding is one of", "decode must be one of",
        "both operands of wgrad must be rotated alike",
    ]  # fmt: skip
    for words in expected:
        assert any(words in problem for problem in text), words
    assert len(text) == len(expected)


@pytest.mark.parametrize("data", [["nvfp4"], "nvfp4", None])
def test_recipe_that_is_no_mapping(data):
    with pytest.raises(ConfigError, match="must be a mapping"):
        recipe_from_dict(data)


def test_operands_of_one_gemm_must_be_rotated_alike():
    with pytest.raises(ConfigError, match="rotated alike, or the rotation does not cancel"):
        replace(RECIPES["nvfp4"], wgrad_x=OperandSpec(format="nvfp4"))
    per_step = OperandSpec(format="nvfp4", hadamard=16, signs="step")
    with pytest.raises(ConfigError, match="step signs"):
        replace(RECIPES["nvfp4"], wgrad_x=per_step)


def test_source_forward_needs_a_quantized_forward_operand():
    requantized = OperandSpec(format="nvfp4", source="forward")
    with pytest.raises(ConfigError, match="dgrad_w has source 'forward' but fprop_w is bf16"):
        GemmRecipe(name="mine", dgrad_w=requantized)
    with pytest.raises(ConfigError, match="dgrad_dy has no forward operand"):
        GemmRecipe(name="mine", dgrad_dy=requantized)


def test_the_study_measured_the_built_in_recipe():
    """A run's own recipe may not have a built-in's name, so study.yaml spells this one out."""
    text = (Path(__file__).parents[2] / "examples/study/study.yaml").read_text()
    measured = yaml.safe_load(text)["rows"]["nvfp4_fast_x8"]["precision"]
    ((name, data),) = measured["recipes"].items()
    recipe = recipe_from_dict({"name": name, **data})
    assert recipe == replace(RECIPES["nvfp4_fast_a8"], name=name)
