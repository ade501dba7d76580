# SPDX-License-Identifier: Apache-2.0
"""GPT-OSS: attention sinks, alternating windows, biases, clamped experts stored as one tensor."""

from typing import Any

from models.hf_mapping.dense import TOP, attention_rules, windowed_layers
from models.hf_mapping.shapes import INTERLEAVED, INTERLEAVED_BIAS, TRANSPOSED
from models.hf_mapping.table import Family, rule
from models.hf_mapping.values import (
    ConfigValues,
    attention_values,
    common_values,
    rope_values,
    window_values,
    written_common,
    written_rope,
    written_windows,
)

_EXPERTS = (
    rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    rule("mlp.router.weight", "mlp.router.weight"),
    rule("mlp.router.bias", "mlp.router.bias"),
    rule(
        "mlp.experts.linear_fc1.weight",
        "mlp.experts.gate_up_proj",
        INTERLEAVED,
        experts="stacked",
    ),
    rule(
        "mlp.experts.linear_fc1.bias",
        "mlp.experts.gate_up_proj_bias",
        INTERLEAVED_BIAS,
        experts="stacked",
    ),
    rule("mlp.experts.linear_fc2.weight", "mlp.experts.down_proj", TRANSPOSED, experts="stacked"),
    rule("mlp.experts.linear_fc2.bias", "mlp.experts.down_proj_bias", experts="stacked"),
)
# What transformers takes where config.json is silent.
_ABSENT = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


def _values(given: dict[str, Any]) -> dict[str, Any]:
    values = ConfigValues(given, _ABSENT)
    section = common_values(values)
    layers = values.need("num_hidden_layers")
    values.only("hidden_act", ["silu"], "experts of this family are gated by it")
    values.only("attention_bias", [True], "megatron-core has biases in all linear layers")
    values.only("swiglu_alpha", [1.702], "megatron-core's quick_gelu has this factor")
    section |= {"pattern": "*E" * layers, "position_embedding": "rope", **rope_values(values)}
    megatron = section["megatron"]
    megatron |= attention_values(values)
    megatron |= {
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "gated_linear_unit": True,
        "activation_func": "quick_gelu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": float(values.get("swiglu_limit", 7.0)),
        "ffn_hidden_size": values.need("intermediate_size"),
        "moe_ffn_hidden_size": values.need("intermediate_size"),
        "num_moe_experts": values.need("num_local_experts"),
        "moe_router_topk": values.need("num_experts_per_tok"),
        "moe_router_score_function": "softmax",
        "moe_aux_loss_coeff": values.get("router_aux_loss_coef", 1e-3),
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_dtype": "fp32",
    }
    alternating = [layer % 2 == 0 for layer in range(layers)]
    megatron |= window_values(values, windowed_layers(values, layers, alternating))
    return values.finish(section)


def _written(section: Any, config: Any) -> dict[str, Any]:
    layers = len(section.pattern.replace("|", "").split("/")[0]) // 2
    width, windowed = written_windows(config, layers)
    return {
        **written_common(section, config),
        **written_rope(section),
        "num_hidden_layers": layers,
        "intermediate_size": config.moe_ffn_hidden_size,
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_alpha": 1.702,
        "swiglu_limit": config.activation_func_clamp_value,
        "num_local_experts": config.num_moe_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "router_aux_loss_coef": config.moe_aux_loss_coeff,
        "sliding_window": width,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed],
    }


FAMILIES = (
    Family(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        top=TOP,
        layers={
            "*": (
                *attention_rules(),
                rule("self_attention.core_attention.softmax_offset", "self_attn.sinks"),
            ),
            "E": _EXPERTS,
        },
        read=_values,
        write=_written,
    ),
)
