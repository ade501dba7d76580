# SPDX-License-Identifier: Apache-2.0
"""Parameters and FLOPs of a model by part, from its configuration alone, and MFU.

FLOPs are those of the model, not of an implementation: two a multiply-add; the backward pass costs
twice the forward; recomputation, norms, activations, softmax and the optimizer count nothing;
causal attention sees (seq_length + 1) / 2 tokens on average, a sliding window those in it. The
Mamba-2 scan counts its recurrence: decay, update and read-out of a state of `inner x d_state`, five
FLOPs an element, whatever the chunked kernel really spends. MFU divides by the dense BF16 peak, in
every precision, so that runs compare.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.utils import is_layer_window_attention

from models.gemms import GemmShape, gemm_modules, mamba_inner
from models.pattern import parse_pattern

# Kernel width of the causal convolution in megatron-core's MambaMixer.
MAMBA_CONV = 4
_SCAN_FLOPS_AN_ELEMENT = 5


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What determines parameters and FLOPs."""

    pattern: str
    config: Any
    """A megatron-core TransformerConfig, or anything with its attributes."""
    vocab_size: int
    """Rows of the embedding."""
    seq_length: int
    """Tokens a sequence."""
    tie_embeddings: bool = False
    """Whether the head shares the embedding's weight."""

    def modules(self) -> list[GemmShape]:
        """The linear layers of the model."""
        return gemm_modules(self.pattern, self.config)


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Elements of the weights."""

    total: int
    """All of them, multi-token prediction included."""
    active: int
    """Those that one token meets in the main model, embedding and head included."""
    mtp: int
    """Those of multi-token prediction."""
    parts: dict[str, int]
    """By part; the sum is `total`."""

    @property
    def without_mtp(self) -> int:
        """Elements of the main model: what papers publish."""
        return self.total - self.mtp


@dataclass(frozen=True, kw_only=True)
class FixedPart:
    """A part of the model that stays in high precision."""

    name: str
    """Part of the name of the module that holds it."""
    reason: str
    """Why it is not quantized."""
    flops: float = 0.0
    """FLOPs a token of its matrix products, forward."""
    gemm: bool = True
    """Whether those FLOPs are matrix products, and count in shares of GEMM FLOPs."""


_PART_OF_NAME = (
    ("mtp.", "mtp"),
    (".self_attention.", "attention"),
    (".shared_experts.", "shared_experts"),
    (".experts.", "experts"),
    ("_latent_proj", "latent"),
    (".mixer.", "mamba"),
    (".mlp.", "mlp"),
)


def part_of(module: GemmShape) -> str:
    """The part that a linear layer belongs to: attention, mlp, experts, mamba, mtp, ..."""
    return next(part for key, part in _PART_OF_NAME if key in module.name)


def count_parameters(shape: ModelShape) -> ParameterCount:
    """Elements of every part. Padding of the vocabulary is the caller's: it is in `vocab_size`."""
    config, parsed = shape.config, parse_pattern(shape.pattern)
    parts: dict[str, int] = defaultdict(int)
    parts["embedding"] = shape.vocab_size * config.hidden_size
    if not shape.tie_embeddings:
        parts["output_layer"] = shape.vocab_size * config.hidden_size
    idle = 0
    for module in shape.modules():
        part = part_of(module)
        parts[part] += module.parameters
        if part == "experts":
            idle += module.parameters - module.parameters // module.copies * module.calls
    norm = config.hidden_size * (2 if config.normalization == "LayerNorm" else 1)
    parts["norms"] = norm
    for symbol in parsed.layers:
        for part, count in _small_parameters(config, symbol, norm).items():
            parts[part] += count
    if parsed.mtp_depths:
        blocks = 1 if config.mtp_use_repeated_layer else parsed.mtp_depths
        inner = sum(sum(_small_parameters(config, s, norm).values()) for s in parsed.mtp)
        parts["mtp"] += blocks * (3 * norm + inner)
    total, mtp = sum(parts.values()), parts.get("mtp", 0)
    return ParameterCount(total=total, active=total - mtp - idle, mtp=mtp, parts=dict(parts))


def head_norms(config: Any) -> int:
    """Elements of the norms of queries and keys in one attention layer."""
    each = 2 if config.normalization == "LayerNorm" else 1
    if getattr(config, "qk_norm_over", "head") == "head":
        return 2 * config.kv_channels * each
    groups = config.num_query_groups or config.num_attention_heads
    return (config.num_attention_heads + groups) * config.kv_channels * each


def sinks(config: Any) -> int:
    """Elements of the sinks of one attention layer: a logit for each head."""
    learnable = getattr(config, "softmax_type", "vanilla") == "learnable"
    return config.num_attention_heads if learnable else 0


def _small_parameters(config: Any, symbol: str, norm: int) -> dict[str, int]:
    """What a layer has besides its linear layers."""
    parts = {"norms": norm}
    if symbol in "*+":
        parts["attention"] = sinks(config)
    if symbol == "*" and config.qk_layernorm:
        parts["norms"] += head_norms(config)
    elif symbol == "+" and config.qk_layernorm:
        parts["norms"] += config.kv_lora_rank + (config.q_lora_rank or 0)
    elif symbol == "E":
        gate = config.moe_shared_expert_gate and config.moe_shared_expert_intermediate_size
        parts["router"] = config.hidden_size * (config.num_moe_experts + (1 if gate else 0))
        if config.add_bias_linear:
            parts["router"] += config.num_moe_experts
    elif symbol == "M":
        inner, heads = mamba_inner(config)
        conv = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
        # convolution with bias; A, D and the bias of dt; the gated norm
        parts["mamba"] = conv * (MAMBA_CONV + 1) + 3 * heads
        parts["norms"] += inner
    return parts


def fixed_parts(shape: ModelShape, *, causal: bool = True) -> list[FixedPart]:
    """What stays in high precision, with its forward FLOPs a token summed over the model.

    Args:
        shape: the model.
        causal: count the half of the scores that a causal mask keeps; False counts all of them.
    """
    config, parsed = shape.config, parse_pattern(shape.pattern)
    symbols = parsed.layers + parsed.mtp * parsed.mtp_depths
    hidden = config.hidden_size
    parts = [FixedPart(name="embedding", reason="a table, not a product")]
    if symbols.count("*") + symbols.count("+"):
        width = 2 * config.kv_channels
        if "+" in symbols:
            width = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
        flops = 2 * _tokens_seen(shape, causal) * config.num_attention_heads * width
        reason = "softmax and the products around it"
        parts.append(FixedPart(name="self_attention.core_attention", reason=reason, flops=flops))
    if layers := symbols.count("E"):
        flops = 2.0 * hidden * config.num_moe_experts * layers
        parts.append(FixedPart(name="mlp.router", reason="chooses experts", flops=flops))
        if config.moe_shared_expert_gate and config.moe_shared_expert_intermediate_size:
            flops = 2.0 * hidden * layers
            parts.append(
                FixedPart(name="mlp.shared_experts.gate_weight", reason="a gate", flops=flops)
            )
    if layers := symbols.count("M"):
        inner, _ = mamba_inner(config)
        conv = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
        scan = _SCAN_FLOPS_AN_ELEMENT * inner * config.mamba_state_dim
        parts += [
            FixedPart(
                name="mixer.conv1d",
                reason="not a GEMM",
                flops=2.0 * MAMBA_CONV * conv * layers,
                gemm=False,
            ),
            FixedPart(
                name="mixer.scan",
                reason="a recurrence; errors accumulate",
                flops=float(scan * layers),
                gemm=False,
            ),
        ]
    parts.append(FixedPart(name="norms", reason="elementwise"))
    head = 2.0 * hidden * shape.vocab_size * (1 + parsed.mtp_depths)
    parts.append(FixedPart(name="output_layer", reason="logits decide the loss", flops=head))
    return parts


def _tokens_seen(shape: ModelShape, causal: bool) -> float:
    """Keys that a token multiplies with on average, summed over the attention layers."""
    config, parsed, length = shape.config, parse_pattern(shape.pattern), shape.seq_length
    window = getattr(config, "window_size", None)
    total = 0.0
    for layers in [parsed.layers] + [parsed.mtp] * parsed.mtp_depths:
        for number, symbol in enumerate(layers, 1):
            if symbol not in "*+":
                continue
            if not causal:
                total += length
            elif window and is_layer_window_attention(window, config.window_attn_skip_freq, number):
                most = min(window[0] + 1, length)
                total += most - most * (most - 1) / (2 * length)
            else:
                total += (length + 1) / 2
    return total


def flops_per_token(shape: ModelShape, *, causal: bool = True) -> dict[str, float]:
    """FLOPs of a training step a token, forward and backward, by part; the sum is the model's."""
    parts: dict[str, float] = defaultdict(float)
    for module in shape.modules():
        parts[part_of(module)] += 3.0 * module.flops
    for part in fixed_parts(shape, causal=causal):
        if part.flops:
            parts[part.name.rsplit(".", 1)[-1]] += 3.0 * part.flops
    return dict(parts)


# Dense BF16 peak in TFLOP/s from NVIDIA's data sheets (half of the figure printed "with sparsity"):
# A100 (2021), L40S, H100 and H200 (2023-2024), HGX B200 and B300, GB200 and GB300 NVL72 (2025).
# The first name that occurs in the device's name counts.
PEAK_TFLOPS = (
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Dense BF16 peak of a GPU in TFLOP/s; None for a CPU or an unknown device."""
    name = device_name.lower()
    return next((peak for key, peak in PEAK_TFLOPS if key.lower() in name), None)


def mfu(tokens_per_second: float, flops: float, devices: int, device_name: str) -> float | None:
    """Share of the dense BF16 peak that a run reaches; None where no peak is known.

    Args:
        tokens_per_second: of the whole run.
        flops: of a token, forward and backward: the sum of `flops_per_token`.
        devices: number of GPUs.
        device_name: as `torch.cuda.get_device_name` gives it, or "cpu".
    """
    peak = peak_tflops(device_name)
    return None if peak is None else tokens_per_second * flops / (devices * peak * 1e12)
