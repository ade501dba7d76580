# SPDX-License-Identifier: Apache-2.0
"""What preflight forecasts beside what was measured on one H200 (BENCHMARKS.md)."""

from dataclasses import replace

import pytest

from fused_ops.formats import OperandSpec
from models.precision import model_shape
from models.precision_plan import PrecisionPlan
from models.throughput import DEVICES, elementwise_bytes, token_time, weight_seconds
from pretrain.command_line import recipe_settings
from pretrain.preflight import CONTEXT_BYTES, GIB, rank_memory
from tools.bench_train import LENGTH, run_config

H200 = DEVICES["h200"]
TP2 = "+parallel.tensor_model_parallel_size=2+parallel.sequence_parallel=true"
# Forward and backward of one micro-batch, weights quantized within it, ms: the device's time (one
# CUDA graph, or the sum of its kernels) where it was measured, since launches are counted apart.
STEPS = {
    ("dense", "bf16"): 180.6,
    ("dense", "nvfp4"): 189.6,
    ("dense", "nvfp4_fast"): 159.9,
    ("dense", "nvfp4_fast:fp8"): 146.8,
    ("dense", "nvfp4_fast_a8:fp8"): 139.2,
    ("dense", "nvfp4_pow2"): 143.5,
    ("hybrid", "bf16"): 206.5,
    ("hybrid", "nvfp4"): 219.0,
    ("hybrid", "nvfp4_fast:fp8"): 163.9,
    ("moe", "bf16"): 94.1,
    ("moe", "nvfp4"): 113.1,
    ("moe", "nvfp4_fast:fp8"): 104.6,
}
# Peak of torch's allocator in the same runs, GiB: without the moments, which these do not make.
PEAKS = {
    ("dense", "bf16"): 28.3,
    ("dense", "nvfp4"): 28.4,
    ("hybrid", "bf16"): 35.2,
    ("hybrid", "nvfp4_fast:fp8"): 35.0,
    ("moe", "bf16"): 56.0,
    ("moe", "nvfp4"): 57.5,
    ("moe", "nvfp4_fast:fp8"): 62.1,
    ("dense", "nvfp4_fast:fp8" + TP2): 14.6,
    ("dense", "nvfp4_pow2" + TP2): 14.7,
}


def opened(model, recipe):
    """(run, shape, recipe of each linear layer)."""
    name, settings = recipe_settings(recipe)
    config = run_config(model, name, settings)
    shape = model_shape(config.model)
    return config, shape, PrecisionPlan(config.precision, shape, 1000).recipes()


@pytest.mark.parametrize("case", STEPS, ids=" ".join)
def test_time_of_a_micro_batch(case):
    """The rates were taken from these steps and from single operations: one set for all of them."""
    config, shape, recipes = opened(*case)
    each = token_time(shape, recipes, H200, config.precision.decode)
    quantized, _ = weight_seconds(shape, recipes, H200)
    assert each.one_by_one == ()
    milliseconds = 1e3 * (each.total * LENGTH + quantized)
    assert milliseconds == pytest.approx(STEPS[case], rel=0.06)


@pytest.mark.parametrize(
    ("recipe", "slow"),
    [
        ("nvfp4_fast_a8:fp8", ()),
        ("nvfp4_fast_a8", ("nvfp4_fast_a8",)),
        ("nvfp4_v2", ("nvfp4_v2",)),
        ("mxfp8", ("mxfp8",)),
    ],
)
def test_experts_that_go_one_by_one_are_said(recipe, slow):
    config, shape, recipes = opened("moe", recipe)
    assert token_time(shape, recipes, H200, config.precision.decode).one_by_one == slow


@pytest.mark.parametrize("case", PEAKS, ids=" ".join)
def test_peak_memory(case):
    """Nothing was fitted to these: sizes alone. The issue is a rank that does not fit."""
    config, shape, recipes = opened(*case)
    world = config.parallel.tensor_model_parallel_size
    memory = rank_memory(config, shape, recipes, world, 0)
    moments = 8 * memory.parameters
    forecast = (memory.total - moments - CONTEXT_BYTES) / GIB
    assert forecast == pytest.approx(PEAKS[case], rel=0.07)


def test_bytes_of_elementwise_work():
    """Dense toy by hand: 17 norms, 8 of each layer, queries, keys and values, logits."""
    _, shape, _ = opened("dense", "bf16")
    norms, activations = 17 * 6 * 4096, 8 * 8 * 14336
    attention, logits = 8 * 4 * (32 + 2 * 8) * 128, 3 * 32768
    assert elementwise_bytes(shape) == 2 * (norms + activations + attention + logits)


def test_row_scales_are_a_pass_over_the_sums():
    """16 bytes an output for each operand that has them: FP32 sums instead of BF16 ones, read,
    scaled, written, read, rounded. Dense: 8 layers of QKV, projection, gate and up, down."""
    _, shape, recipes = opened("dense", "nvfp4_fwd_mxfp8_bwd")
    outputs = 8 * ((32 + 2 * 8) * 128 + 4096 + 2 * 14336 + 4096)
    found = token_time(shape, recipes, H200, "exact").parts["row scales"]
    assert found == pytest.approx(16 * outputs / 4e12)
    _, _, v1 = opened("dense", "nvfp4")
    assert token_time(shape, v1, H200, "exact").parts["row scales"] == 0.0
    rows = OperandSpec(format="nvfp4", row_scaled=True)
    both = {name: replace(r, dgrad_dy=rows, dgrad_w=rows) for name, r in v1.items()}
    inputs = 8 * (3 * 4096 + 14336)
    found = token_time(shape, both, H200, "exact").parts["row scales"]
    assert found == pytest.approx(2 * 16 * inputs / 4e12)


def test_what_weights_take_a_step():
    """V1 quantizes each weight once, for both products; nvfp4_fast once for each."""
    _, shape, v1 = opened("dense", "nvfp4")
    _, _, fast = opened("dense", "nvfp4_fast")
    _, _, high = opened("dense", "bf16")
    once, updated = weight_seconds(shape, v1, H200)
    assert weight_seconds(shape, fast, H200) == (pytest.approx(2 * once), updated)
    assert weight_seconds(shape, high, H200) == (0.0, updated)
    # FP32 gradient, master and two moments of 2.01 B parameters, read and written
    assert updated == pytest.approx(2.01e9 * 38 / 4e12, rel=0.01)
