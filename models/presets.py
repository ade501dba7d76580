# SPDX-License-Identifier: Apache-2.0
"""Model shapes by name: published ones, and small ones of each kind for experiments.

A preset is the `model` section of a run file: plain data, each entry a few lines that change an
earlier one. `model.preset: NAME` loads it and every other key of the section overrides it.

Published shapes come from the models' own papers and `config.json` files: "Pretraining LLMs with
NVFP4" (arXiv 2509.25149, appendix A), Nemotron 3 (arXiv 2512.20848, 2604.12374), Llama 3
(arXiv 2407.21783), Qwen3 (arXiv 2505.09388), Mixtral (arXiv 2401.04088), DeepSeek-V3 (arXiv
2412.19437) and GPT-OSS (arXiv 2508.10925). Experiment presets are named by the parameters that one
token meets outside embedding and head, so that a dense, a MoE and a hybrid model of one name cost
about the same.
"""

import copy
import difflib
from collections.abc import Mapping
from typing import Any

from fused_ops.errors import ConfigError

_SWIGLU = {"gated_linear_unit": True, "activation_func": "silu"}
_SQUARED_RELU = {"gated_linear_unit": False, "activation_func": "squared_relu"}
_SOFTMAX_ROUTER = {
    "moe_router_score_function": "softmax",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-3,
    "moe_router_dtype": "fp32",
}
# The router without an auxiliary loss of DeepSeek-V3: a bias moves the choice, not the weights.
_SIGMOID_ROUTER = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1e-3,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-4,
    "moe_router_dtype": "fp32",
}

PRESETS: dict[str, dict[str, Any]] = {}
_SECTION_KEYS = (
    "pattern",
    "seq_length",
    "vocab_size",
    "position_embedding",
    "rotary_base",
    "rotary_percent",
    "rope_scaling",
    "qk_norm_over",
    "tie_embeddings",
)


def preset_names() -> list[str]:
    """Every preset, in the order in which they are defined."""
    return list(PRESETS)


def get_preset(name: str) -> dict[str, Any]:
    """The `model` section of a preset, a fresh copy.

    Raises:
        ConfigError: no preset has this name; the message offers the nearest ones.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}" if near else f"choose from: {', '.join(PRESETS)}"
        raise ConfigError(f"model.preset names a preset; got {name!r}; {hint}")
    return copy.deepcopy(PRESETS[name])


def merge_preset(preset: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `preset`: `megatron` is merged key by key, everything else replaced."""
    merged = {**copy.deepcopy(dict(preset)), **changes}
    merged["megatron"] = {**preset.get("megatron", {}), **changes.get("megatron", {})}
    return merged


def _define(name: str, base: str | None = None, /, **changes: Any) -> None:
    """Register `base` with `changes`: keys of the section itself, the rest goes to `megatron`."""
    section = {key: changes.pop(key) for key in list(changes) if key in _SECTION_KEYS}
    section["megatron"] = changes
    PRESETS[name] = merge_preset(PRESETS[base] if base else {}, section)


def _attention(heads: int, groups: int, head: int = 128) -> dict[str, int]:
    return {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": head}


def _mamba(heads: int, groups: int = 8, head: int = 64) -> dict[str, int]:
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": head,
        "mamba_num_groups": groups,
        "mamba_state_dim": 128,
    }


def _shape(hidden: int, ffn: int) -> dict[str, int]:
    return {"hidden_size": hidden, "ffn_hidden_size": ffn}


def _experts(count: int, topk: int, ffn: int, shared: int | None = None) -> dict[str, Any]:
    return {
        "num_moe_experts": count,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": ffn,
        "moe_shared_expert_intermediate_size": shared,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }


def _define_paper() -> None:
    # The hybrids of the NVFP4 paper: no bias, no dropout, no position embedding, untied.
    paper = {"seq_length": 8192, "vocab_size": 131072, "tie_embeddings": False}
    none = {**paper, "position_embedding": "none"}
    twelve = "M-M-M-M*-" * 6 + "M-M-M-M-"
    eight = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"
    _define(
        "nvfp4-paper-12b",
        pattern=twelve,
        **none,
        **_SQUARED_RELU,
        **_shape(5120, 20480),
        **_attention(40, 8),
        **_mamba(160),
    )
    _define(
        "nvfp4-paper-8b",
        "nvfp4-paper-12b",
        pattern=eight,
        **_shape(4096, 21504),
        **_attention(32, 4),
        **_mamba(128),
    )
    _define(
        "nvfp4-paper-1.2b",
        pattern="*-" * 20,
        **paper,
        position_embedding="rope",
        **_SQUARED_RELU,
        **_shape(2048, 6144),
        **_attention(16, 8),
    )


def _define_nemotron3() -> None:
    nano = "MEMEM*" + "EMEMEM*" * 4 + "EMEMEMEM*" + "EMEMEMEME"
    _define(
        "nemotron3-nano-30b-a3b",
        "nvfp4-paper-8b",
        pattern=nano,
        **_shape(2688, 1856),
        **_attention(32, 2),
        **_mamba(64),
        **_experts(128, 6, 1856, shared=3712),
        **_SIGMOID_ROUTER,
        moe_router_topk_scaling_factor=2.5,
    )
    # 88 blocks; experts work in a latent space of 1024; one MTP block serves two depths.
    ends = "MEMEMEM*" + "EMEMEMEM*" * 2, "EMEMEMEM*" + "EMEMEMEME"
    _define(
        "nemotron3-super-120b-a12b",
        "nemotron3-nano-30b-a3b",
        pattern=ends[0] + "EMEMEMEMEM*" * 4 + ends[1] + "/*E/*E",
        **_shape(4096, 2688),
        **_mamba(128),
        **_experts(512, 22, 2688, shared=5376),
        moe_latent_size=1024,
        moe_router_topk_scaling_factor=5.0,
        mtp_use_repeated_layer=True,
        mtp_loss_scaling_factor=0.3,
    )


def _define_dense() -> None:
    _define(
        "llama3-8b",
        pattern="*-" * 32,
        seq_length=8192,
        vocab_size=128256,
        position_embedding="rope",
        rotary_base=500000,
        tie_embeddings=False,
        **_SWIGLU,
        **_shape(4096, 14336),
        **_attention(32, 8),
    )
    _define(
        "llama3-70b", "llama3-8b", pattern="*-" * 80, **_shape(8192, 28672), **_attention(64, 8)
    )

    _define(
        "qwen3-8b",
        "llama3-8b",
        pattern="*-" * 36,
        seq_length=4096,
        vocab_size=151936,
        rotary_base=1000000,
        qk_layernorm=True,
        layernorm_epsilon=1e-6,
        **_shape(4096, 12288),
    )
    for name, layers, shape, heads, tied in (
        ("qwen3-0.6b", 28, (1024, 3072), 16, True),
        ("qwen3-1.7b", 28, (2048, 6144), 16, True),
        ("qwen3-4b", 36, (2560, 9728), 32, True),
        ("qwen3-14b", 40, (5120, 17408), 40, False),
        ("qwen3-32b", 64, (5120, 25600), 64, False),
    ):
        sizes = {**_shape(*shape), **_attention(heads, 8)}
        _define(name, "qwen3-8b", pattern="*-" * layers, tie_embeddings=tied, **sizes)


def _define_mixtures() -> None:
    _define(
        "qwen3-30b-a3b",
        "qwen3-8b",
        pattern="*E" * 48,
        **_shape(2048, 6144),
        **_attention(32, 4),
        **_experts(128, 8, 768),
        **_SOFTMAX_ROUTER,
    )
    _define(
        "mixtral-8x7b",
        "llama3-8b",
        pattern="*E" * 32,
        vocab_size=32000,
        rotary_base=1000000,
        **_experts(8, 2, 14336),
        **_SOFTMAX_ROUTER,
    )
    # Full attention in every layer and no biases or sinks, unlike the published model.
    _define(
        "gpt-oss-20b-like",
        "llama3-8b",
        pattern="*E" * 24,
        seq_length=4096,
        vocab_size=201088,
        rotary_base=150000,
        **_shape(2880, 2880),
        **_attention(64, 8, head=64),
        **_experts(32, 4, 2880),
        **_SOFTMAX_ROUTER,
    )


def _define_deepseek() -> None:
    _define(
        "deepseek-v3",
        "llama3-8b",
        pattern="+-" * 3 + "+E" * 58 + "/+E",
        seq_length=4096,
        vocab_size=129280,
        rotary_base=10000,
        layernorm_epsilon=1e-6,
        **_shape(7168, 18432),
        **_attention(128, 128),
        multi_latent_attention=True,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        rope_type="rope",
        qk_layernorm=True,
        **_experts(256, 8, 2048, shared=2048),
        **_SIGMOID_ROUTER,
        moe_router_num_groups=8,
        moe_router_group_topk=4,
        moe_router_topk_scaling_factor=2.5,
    )


def _define_experiments() -> None:
    """Dense, MoE and hybrid models of about 30M, 100M, 300M and 1B active parameters."""
    # hidden, layers, ffn, heads, seq_length; routed and shared width: 4 * routed + shared = ffn.
    sizes = {
        "30m": (640, 6, 1792, 5, 512, 256, 768),
        "100m": (1024, 8, 2816, 8, 1024, 512, 768),
        "300m": (1280, 15, 3456, 10, 2048, 640, 896),
        "1b": (2048, 20, 5504, 16, 4096, 1024, 1408),
    }
    for size, (hidden, layers, ffn, heads, seq_length, routed, shared) in sizes.items():
        _define(
            f"dense-{size}",
            pattern="*-" * layers,
            seq_length=seq_length,
            position_embedding="rope",
            tie_embeddings=False,
            **_SWIGLU,
            **_shape(hidden, ffn),
            **_attention(heads, heads),
        )
        _define(
            f"moe-{size}",
            f"dense-{size}",
            pattern="*E" * layers,
            **_experts(32, 4, routed, shared),
            **_SOFTMAX_ROUTER,
        )
    # hidden sizes that make in_proj a multiple of 16 rows
    unit = "M-M-M*-"
    hybrids = {
        "30m": (unit * 2 + "M-", 512, 4, 4, 512),
        "100m": (unit * 2, 1024, 8, 4, 1024),
        "300m": (unit * 2 + "M-M-", 1536, 12, 8, 2048),
        "1b": ("M-M-M-M*-" * 4, 2048, 16, 8, 4096),
    }
    for size, (pattern, hidden, heads, groups, seq_length) in hybrids.items():
        _define(
            f"hybrid-{size}",
            pattern=pattern,
            seq_length=seq_length,
            position_embedding="none",
            tie_embeddings=False,
            **_SQUARED_RELU,
            **_shape(hidden, 4 * hidden),
            **_attention(heads, max(heads // 4, 1)),
            **_mamba(hidden // 32, groups),
        )


for _family in (
    _define_paper,
    _define_nemotron3,
    _define_dense,
    _define_mixtures,
    _define_deepseek,
    _define_experiments,
):
    _family()
