# SPDX-License-Identifier: Apache-2.0
"""Parameters equal the built model's, FLOPs equal torch's counter, for every kind of layer."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.flops import (
    ModelShape,
    count_parameters,
    fixed_parts,
    flops_per_token,
    mfu,
    peak_tflops,
)
from models.precision import model_shape
from tests.models import toy

SHARED = {"moe_shared_expert_intermediate_size": 32}
KINDS = {
    "attention and gated MLP": ("*-", {}),
    "squared ReLU, QK norm": (
        "*-*-",
        {"gated_linear_unit": False, "activation_func": "squared_relu", "qk_layernorm": True},
    ),
    "biases": ("*-", {"add_bias_linear": True}),
    "bias of QKV": ("*-", {"add_qkv_bias": True}),
    "biases of experts and router": ("*E", {"add_bias_linear": True}),
    "sinks": ("*-*-/*-", {"softmax_type": "learnable"}),
    "sinks of MLA": ("+-", {"softmax_type": "learnable"}),
    "experts, shared expert": ("*E*E", SHARED),
    "experts, gate of the shared expert": ("*E", SHARED | {"moe_shared_expert_gate": True}),
    "latent experts": ("*E", SHARED | {"moe_latent_size": 32}),
    "sigmoid router with bias": (
        "E",
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    ),
    "MLA": ("+-+E", {"qk_layernorm": True}),
    "MTP": ("*-*E/*E", SHARED),
    "two depths of one repeated MTP layer": ("*-/*-/*-", {"mtp_use_repeated_layer": True}),
    "Mamba-2": ("M-M", {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_flops_equal_what_the_built_model_has(kind):
    pattern, fields = KINDS[kind]
    chunks, _ = toy.make(pattern, **fields)
    shape = model_shape(toy.section(pattern, fields), params_dtype=torch.float32)
    count = count_parameters(shape)
    assert count.total == sum(p.numel() for p in chunks[0].parameters())
    assert sum(count.parts.values()) == count.total

    # The plain backend multiplies the whole square of scores: twice what a causal mask keeps.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        toy.loss_of(chunks[0]).sum().backward()
    flops = flops_per_token(shape, causal=False)
    scan = flops.pop("scan", 0) + flops.pop("conv1d", 0)
    counted = counter.get_flop_counts()["Global"]
    if scan:  # the chunked form of the scan multiplies more than the recurrence
        counted = {op: n for op, n in counted.items() if op is not torch.ops.aten.bmm}
    assert sum(counted.values()) == sum(flops.values()) * 2 * toy.SEQ


def test_tied_embeddings_count_once():
    chunks, _ = toy.make("*-", model={"tie_embeddings": True})
    count = count_parameters(model_shape(toy.section("*-", tie_embeddings=True)))
    assert count.total == sum(p.numel() for p in chunks[0].parameters())
    assert "output_layer" not in count.parts


def test_active_parameters_leave_out_experts_that_a_token_does_not_meet():
    shape = model_shape(toy.section("*E/*E", SHARED))
    count = count_parameters(shape)
    one_expert = 64 * 2 * 48 + 48 * 64
    assert count.without_mtp - count.active == (4 - 2) * one_expert
    assert count.mtp > 4 * one_expert


def test_scan_counts_the_recurrence():
    """Outer product and read-out as the counter sees them, and one decay an element of state."""
    heads, width, state = 8, 16, 16
    x, b, c = (
        torch.randn(heads, width, 1),
        torch.randn(heads, 1, state),
        torch.randn(heads, state, 1),
    )
    with FlopCounterMode(display=False) as counter:
        torch.bmm(torch.bmm(x, b), c)
    shape = model_shape(toy.section("M"))
    scan = next(part for part in fixed_parts(shape) if part.name == "mixer.scan")
    assert scan.flops == counter.get_total_flops() + heads * width * state
    assert not scan.gemm


def test_causal_attention_counts_what_the_mask_keeps():
    shape = model_shape(toy.section("*-"))
    whole = flops_per_token(shape, causal=False)["core_attention"]
    kept = sum(range(1, toy.SEQ + 1)) / toy.SEQ**2
    assert flops_per_token(shape)["core_attention"] == pytest.approx(kept * whole, rel=1e-12)


@pytest.mark.parametrize(("window", "every"), [(5, None), (5, 2), (1000, None)])
def test_a_window_counts_what_it_keeps(window, every):
    fields = {"window_size": [window, 0], "window_attn_skip_freq": every}
    shape, plain = (model_shape(toy.section("*-*-*-", f)) for f in (fields, {}))
    positions = range(toy.SEQ)
    kept = sum(min(i + 1, window + 1) for i in positions), sum(i + 1 for i in positions)
    # layers 1, 3 and 5 of the pattern: every second one is 2, 4, 6
    share = kept[0] / kept[1]
    found = flops_per_token(shape)["core_attention"] / flops_per_token(plain)["core_attention"]
    assert found == pytest.approx(share, rel=1e-12)
    if every:
        moved = model_shape(toy.section("-*-*-*", fields))
        whole = flops_per_token(model_shape(toy.section("-*-*-*")))["core_attention"]
        assert flops_per_token(moved)["core_attention"] == whole


def test_closed_form_of_a_dense_transformer():
    """6 FLOPs a parameter of the blocks, and 6 h (s + 1) a layer for causal attention."""
    layers, hidden, seq = 2, 64, toy.SEQ
    shape = model_shape(toy.section("*-" * layers, {"num_query_groups": 4}))
    blocks = layers * (4 * hidden * hidden + 3 * hidden * 96)
    expected = 6 * blocks + 6 * hidden * toy.VOCAB + layers * 6 * hidden * (seq + 1)
    assert sum(flops_per_token(shape).values()) == expected


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("cpu", None),
        ("a GPU of tomorrow", None),
    ],
)
def test_dense_peak(name, peak):
    assert peak_tflops(name) == peak


def test_mfu_is_the_share_of_the_dense_peak():
    assert mfu(1e4, 49.47e9, 2, "NVIDIA H200") == pytest.approx(0.25)
    assert mfu(1e4, 49.47e9, 2, "cpu") is None


def test_shape_needs_no_megatron_config():
    """Anything with the attributes will do, so that a tool may count a shape of its own."""
    config = model_shape(toy.section("*-")).config
    shape = ModelShape(pattern="*-|*-", config=config, vocab_size=8, seq_length=4)
    whole = ModelShape(pattern="*-*-", config=config, vocab_size=8, seq_length=4)
    assert count_parameters(shape) == count_parameters(whole)
