# SPDX-License-Identifier: Apache-2.0
"""Deliberate breakages: each is applied in a scratch copy, and the tests named for it must fail.

A test that cannot fail proves nothing. The fast check keeps the list in step with the code: every
snippet occurs exactly once in its file, and every test exists.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = "tests/fused_ops"


@dataclass(frozen=True)
class Mutation:
    """`source` in `file` becomes `replacement`; then each of `tests` must fail."""

    name: str
    file: str
    source: str
    replacement: str
    tests: tuple[str, ...]


MUTATIONS = [
    Mutation(
        "wrong_tie_rule", "quantize/rounding.py",
        "        return encode_e2m1_(x)\n",
        "        return encode_e2m1_(x.mul_(1.0 + 2.0**-23))\n",
        ("test_quantize_definitions.py::test_nvfp4", "test_quantize_definitions.py::test_mxfp4"),
    ),
    Mutation(
        "block_scale_has_a_floor", "quantize/reference_nvfp4.py",
        "(amaxes * (s_enc * RN_SIXTH)).clamp_(max=FLT_MAX)",
        "(amaxes * (s_enc * RN_SIXTH)).clamp_(min=2.0**-6, max=FLT_MAX)",
        ("test_quantize_edge_cases.py::test_underflowing_block_scale_saturates_codes_and_decodes_to_zero",),
    ),
    Mutation(
        "block_scale_rounded_down", "quantize/reference_nvfp4.py",
        "(amaxes * (s_enc * RN_SIXTH)).clamp_(max=FLT_MAX)",
        "(amaxes * (s_enc * RN_SIXTH)).mul_(0.96875).clamp_(max=FLT_MAX)",
        ("test_quantize_vectors.py::test_every_array_of_every_case",
         "test_linear.py::test_gemms_of_the_stored_vectors"),
    ),
    Mutation(
        "saturating_cast_removed", "codecs.py",
        "x.clamp(-limit, limit).to(FP8_DTYPES[element])",
        "x.to(FP8_DTYPES[element])",
        ("test_formats.py::test_fp8_rounds_every_tie_and_saturates",),
    ),
    Mutation(
        "odd_column_in_the_low_nibble", "codecs.py",
        "return (pairs | (pairs >> 4)).to(torch.uint8)",
        "return ((pairs >> 8) | (pairs << 4)).to(torch.uint8)",
        ("test_formats.py::test_even_column_is_the_low_nibble",),
    ),
    Mutation(
        "better_of_two_never_chosen", "quantize/reference_pow2.py",
        "torch.where(errors[1] < errors[0], smaller, exponent)",
        "torch.where(errors[1] < -errors[0], smaller, exponent)",
        ("test_quantize_definitions.py::test_pow2",),
    ),
    Mutation(
        "four_over_six_with_numerator_2688", "formats.py",
        "6.0 * 256.0 if small else",
        "6.0 * 448.0 if small else",
        ("test_formats.py::test_numerator_belongs_to_the_quantizer",
         "test_recipe.py::test_numerators_belong_to_operands"),
    ),
    Mutation(
        "hadamard_on_one_operand_only", "operands.py",
        "    check_finite(call, name, source)\n    if call.row_block",
        '    spec = replace(spec, hadamard=0, signs="fixed") if name == "wgrad.x" else spec\n'
        "    check_finite(call, name, source)\n    if call.row_block",
        ("test_linear.py::test_gemms_of_the_stored_vectors",
         "test_linear.py::test_error_bands_on_gaussian_data"),
    ),
    Mutation(
        "amax_before_rotation", "operands.py",
        "    return source.amax(spec, columns, sign)",
        '    return source.amax(replace(spec, hadamard=0, signs="fixed"), columns, None)',
        ("test_linear.py::test_gemms_of_the_stored_vectors",
         "test_linear.py::test_forward_and_gradients_are_the_composition[nvfp4_v2]"),
    ),
    Mutation(
        "dgrad_with_the_wgrad_signs", "operands.py",
        '        "signs": signs(spec, call.key, name.split(".")[0], x.device),',
        '        "signs": signs(spec, call.key, name.split(".")[0].replace("dgrad", "wgrad")),',
        ("test_linear.py::test_forward_and_gradients_are_the_composition[nvfp4_v2]",),
    ),
    Mutation(
        "signs_of_dy_and_weight_differ_in_dgrad", "operands.py",
        '        "signs": signs(spec, call.key, name.split(".")[0], x.device),',
        '        "signs": signs(spec, call.key, "wgrad" if "dy" in name else name.split(".")[0]),',
        ("test_linear.py::test_forward_and_gradients_are_the_composition[nvfp4_v2]",),
    ),
    Mutation(
        "signs_are_never_resampled", "keys.py",
        'key.micro_batch if spec.signs == "micro_batch" else 0',
        "0",
        ("test_keys.py::test_signs_are_resampled_as_often_as_they_say",
         "test_keys.py::test_micro_batches_in_flight_keep_their_own_signs"),
    ),
    Mutation(
        "dither_ignores_the_micro_batch", "keys.py",
        "micro_batch = 0 if name in WEIGHT_OPERANDS else self.micro_batch",
        "micro_batch = 0",
        ("test_keys.py::test_every_field_and_operand_gives_another_key",
         "test_linear.py::test_same_key_same_result_and_another_key_another",
         "test_linear.py::test_gradients_are_unbiased_over_micro_batches"),
    ),
    Mutation(
        "dither_ignores_the_expert", "keys.py",
        "return replace(self, expert=self.expert + number)",
        "return replace(self, expert=self.expert)",
        ("test_grouped_linear.py::test_dither_is_keyed_with_the_expert",),
    ),
    Mutation(
        "row_and_column_streams_are_one", "keys.py",
        "self.layer, self.expert, STREAMS[name]",
        'self.layer, self.expert, STREAMS[name.replace("wgrad", "dgrad")]',
        ("test_keys.py::test_row_and_column_streams_of_a_gradient_differ",),
    ),
    Mutation(
        "stochastic_rounding_off_on_dy", "recipe.py",
        "    plain, tile = _nvfp4(), _nvfp4(block=(16, 16))\n"
        '    grad = _nvfp4(rounding="stochastic")\n',
        "    plain, tile = _nvfp4(), _nvfp4(block=(16, 16))\n    grad = _nvfp4()\n",
        ("test_recipe.py::test_only_gradients_are_rounded_stochastically",
         "test_linear.py::test_same_key_same_result_and_another_key_another"),
    ),
    Mutation(
        "stochastic_rounding_on_the_weight", "recipe.py",
        "        dgrad_w=tile,\n",
        '        dgrad_w=replace(tile, rounding="stochastic"),\n',
        ("test_recipe.py::test_only_gradients_are_rounded_stochastically",
         "test_recipe.py::test_operands_of_named_recipes[nvfp4-]"),
    ),
    Mutation(
        "one_numerator_for_both_operands", "scaled_matmul/reference.py",
        "        numerators *= operand.spec.numerator\n",
        "        numerators *= 2688.0 if nvfp4 else 1.0\n",
        ("test_scaled_matmul.py::test_each_operand_decodes_with_its_own_numerator",
         "test_linear.py::test_forward_and_gradients_are_the_composition[nvfp4_v2]"),
    ),
    Mutation(
        "alpha_folded_into_the_operands", "scaled_matmul/reference.py",
        "    total = _product(values(a, decode), values(b, decode), row_block)\n"
        "    return _epilogue(total, a, b, out_dtype, accumulate, beta, bias)\n",
        "    a, b = (o if isinstance(o, Tensor) else o.dequantize() for o in (a, b))\n"
        "    total = a.float() @ b.float().t()\n"
        "    return _epilogue(total, a, b, out_dtype, accumulate, beta, bias)\n",
        ("test_scaled_matmul.py::test_blackwell_model_and_plain_sums_where_they_differ",),
    ),
    Mutation(
        "blocks_of_rows_are_not_filled_up", "scaled_matmul/reference.py",
        "[block, block.new_zeros(missing, block.shape[1])]", "[block]",
        ("test_scaled_matmul.py::test_blocks_of_rows_give_each_row_the_same_bits",),
    ),
    Mutation(
        "a_piece_forgets_the_state_before_it", "mamba2_scan/reference.py",
        "torch.zeros_like(left[:, 0]) if start is None else start, []",
        "torch.zeros_like(left[:, 0]), []",
        ("test_mamba2_scan.py::test_pieces_of_a_sequence_equal_the_whole",),
    ),
    Mutation(
        "group_sums_added_to_nearest", "scaled_matmul/reference.py",
        "    return torch.where(too_far, torch.nextafter(total, torch.zeros_like(total)), total)\n",
        "    return total\n",
        ("test_scaled_matmul.py::test_add_toward_zero_against_rational_arithmetic",
         "test_scaled_matmul.py::test_blackwell_model_against_rational_arithmetic"),
    ),
    Mutation(
        "main_grad_overwritten", "scaled_matmul/reference.py",
        "    return accumulate.add_(total) if beta else accumulate.copy_(total)\n",
        "    return accumulate.copy_(total)\n",
        ("test_scaled_matmul.py::test_accumulates_in_place_after_alpha",
         "test_linear.py::test_main_grad_is_the_sum_over_micro_batches"),
    ),
    Mutation(
        "per_expert_amax_without_offset", "grouped_linear.py",
        "    return list(call.comm.reduce_amax(name, torch.stack(own)))\n",
        "    return [call.comm.reduce_amax(name, torch.stack(own))[0]] * len(parts)\n",
        ("test_grouped_linear.py::test_experts_are_linear_layers_of_their_own[nvfp4]",
         "test_grouped_linear.py::test_error_of_each_expert_is_that_of_its_format[nvfp4]"),
    ),
    Mutation(
        "gradient_of_empty_experts_uninitialised", "grouped_linear.py",
        "torch.zeros_like(weight)",
        "torch.empty_like(weight)",
        ("test_grouped_linear.py::test_gradient_of_an_empty_expert_is_exactly_zero",),
    ),
    Mutation(
        "weight_codes_ignore_the_version", "weight_codes.py",
        "        weight._version,\n",
        "",
        ("test_linear_weights.py::test_codes_are_never_stale[nvfp4-optimizer_step]",
         "test_linear_weights.py::test_codes_are_never_stale[nvfp4-load]",
         "test_linear_weights.py::test_codes_are_never_stale[nvfp4-edit_in_place]"),
    ),
    Mutation(
        "weight_codes_survive_a_cast", "weight_codes.py",
        "        weight.data_ptr(),\n        weight.dtype,\n",
        "",
        ("test_linear_weights.py::test_a_cast_alone_is_seen",),
    ),
    Mutation(
        "weight_codes_ignore_the_epoch", "weight_codes.py",
        "        weights_epoch,\n",
        "",
        ("test_linear_weights.py::test_the_epoch_covers_writes_that_no_counter_shows",),
    ),
    Mutation(
        "weight_codes_ignore_the_recipe", "weight_codes.py",
        "        variant,\n",
        "",
        ("test_linear_weights.py::test_a_change_of_recipe_is_seen",
         "test_linear_weights.py::test_resampled_signs_rebuild_dgrad_each_step_and_the_forward_never"),
    ),
    Mutation(
        "dgrad_weight_not_requantized", "weight_operands.py",
        '    if own.source == "forward":\n        codes',
        "    if False:\n        codes",
        ("test_linear.py::test_forward_and_gradients_are_the_composition[nvfp4_requant]",
         "test_linear.py::test_forward_and_gradients_are_the_composition[nvfp4_fast]"),
    ),
    Mutation(
        "amax_of_a_shard_alone", "operands.py",
        "    return call.comm.reduce_amax(name, amax_of(call, name, source, columns=columns))\n",
        "    return amax_of(call, name, source, columns=columns)\n",
        ("test_linear_layouts.py::test_sharded_equals_unsharded",
         "test_linear_layouts.py::test_the_layer_computes_the_same_in_every_layout"),
    ),
    Mutation(
        "origin_of_columns_not_turned", "operands.py",
        'options["origin"] = origin[::-1] if columns else origin',
        'options["origin"] = origin',
        ("test_linear_layouts.py::test_sharded_equals_unsharded",),
    ),
    Mutation(
        "input_saved_instead_of_its_codes", "linear.py",
        '        ctx.save_part = not is_quantized(spec) and spec.source == "tensor"\n',
        "        ctx.save_part = True\n",
        ("test_linear.py::test_codes_are_saved_for_backward_and_not_bf16",),
    ),
    Mutation(
        "main_grad_added_twice_by_the_hook", "linear.py",
        "    weight.grad_added_to_main_grad = True\n",
        "",
        ("test_linear.py::test_main_grad_is_the_sum_over_micro_batches",),
    ),
    Mutation(
        "non_finite_operands_unnoticed", "operands.py",
        "plain_amax(self.tensor, self.nonfinite)",
        "plain_amax(self.tensor)",
        ("test_linear.py::test_non_finite_operands_raise_the_flag",),
    ),
]  # fmt: skip


def test_the_list_matches_the_code():
    assert len(MUTATIONS) >= 15
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        text = (ROOT / "fused_ops" / mutation.file).read_text()
        assert text.count(mutation.source) == 1, (
            f"{mutation.name}: the snippet occurs {text.count(mutation.source)} times in "
            f"fused_ops/{mutation.file}; write it as the code now reads"
        )
        assert mutation.replacement != mutation.source, mutation.name
        assert mutation.tests, f"{mutation.name}: no test is named"
        for test in mutation.tests:
            file, function = test.split("::")
            function = function.split("[")[0]
            source = (ROOT / HERE / file).read_text()
            assert re.search(rf"^def {function}\(", source, re.M), f"{mutation.name}: no {test}"


@pytest.fixture
def copy(tmp_path):
    """The room and its tests, without the rest of the repository."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fused_ops", tmp_path / "fused_ops", ignore=ignore)
    shutil.copytree(ROOT / HERE, tmp_path / HERE, ignore=ignore)
    shutil.copytree(ROOT / "tests/data", tmp_path / "tests/data", ignore=ignore)
    for room in ("models", "pretrain", "tools"):  # a tool of the tests, and what it imports
        (tmp_path / room).mkdir()
    for file in ("tests/distributed.py", "tools/__init__.py", "tools/check_vectors.py",
                 "models/__init__.py", "pretrain/__init__.py", "pretrain/command_line.py",
                 "pyproject.toml"):  # fmt: skip
        shutil.copy(ROOT / file, tmp_path / file)
    (tmp_path / "conftest.py").write_text(
        "import pytest, torch\n\ntorch.set_num_threads(1)\n\n\n"
        "@pytest.fixture(autouse=True)\ndef seed():\n    torch.manual_seed(1234)\n"
    )
    return tmp_path


def run_tests(folder, tests):
    """Exit status and output of pytest in a copy."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=no", "-rf"]
    command += [f"{HERE}/{test}" for test in tests]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_named_tests_pass_without_a_mutation(copy):
    tests = sorted({test for mutation in MUTATIONS for test in mutation.tests})
    status, output = run_tests(copy, tests)
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutation_is_caught(mutation, copy):
    path = copy / "fused_ops" / mutation.file
    path.write_text(path.read_text().replace(mutation.source, mutation.replacement))
    status, output = run_tests(copy, mutation.tests)
    # 1: tests ran and some failed; anything else is no proof.
    assert status == 1, f"{mutation.name}: status {status}\n{output}"
    for test in mutation.tests:
        assert f"FAILED {HERE}/{test}" in output, f"{test} does not see {mutation.name}\n{output}"
