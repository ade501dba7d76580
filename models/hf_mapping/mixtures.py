# SPDX-License-Identifier: Apache-2.0
"""Transformers of attention and softmax-routed experts: Qwen3-MoE, Mixtral, OLMoE."""

from typing import Any

from models.hf_mapping.dense import (
    TOP,
    attention_rules,
    mlp_rules,
    windowed_layers,
)
from models.hf_mapping.shapes import GATE_UP
from models.hf_mapping.table import Family, Rule, rule
from models.hf_mapping.values import (
    SWIGLU,
    ConfigValues,
    attention_values,
    common_values,
    rope_values,
    window_values,
    written_common,
    written_rope,
    written_windows,
)

# (experts' place in a layer, router, names of gate, up and down)
_PLACES = {
    "qwen3_moe": ("mlp.experts", "mlp.gate", ("gate_proj", "up_proj", "down_proj")),
    "olmoe": ("mlp.experts", "mlp.gate", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe.experts", "block_sparse_moe.gate", ("w1", "w3", "w2")),
}
# What transformers takes where config.json is silent, as far as it differs from family to family.
_ABSENT: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    "olmoe": {"rms_norm_eps": 1e-5, "router_aux_loss_coef": 0.01},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
}


def expert_rules(place: str, router: str, names: tuple[str, str, str]) -> tuple[Rule, ...]:
    """Router and gated experts, one tensor an expert, with the norm before them."""
    gate, up, down = (f"{place}.{{e}}.{name}.weight" for name in names)
    return (
        rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
        rule("mlp.router.weight", f"{router}.weight"),
        rule("mlp.experts.linear_fc1.weight", (gate, up), GATE_UP, experts="split"),
        rule("mlp.experts.linear_fc2.weight", down, experts="split"),
    )


def _values(name: str, given: dict[str, Any]) -> dict[str, Any]:
    values = ConfigValues(given, _ABSENT[name])
    section = common_values(values)
    layers = values.need("num_hidden_layers")
    values.only("hidden_act", ["silu"], "experts of this family are SwiGLU")
    values.only("attention_bias", [False], "it is not built for this family")
    values.only("clip_qkv", [], "megatron-core does not clip queries, keys and values")
    dense = _dense_layers(values, layers) if name == "qwen3_moe" else [False] * layers
    section |= {
        "pattern": "".join("*-" if d else "*E" for d in dense),
        "position_embedding": "rope",
        **rope_values(values),
    }
    width = "moe_intermediate_size" if name == "qwen3_moe" else "intermediate_size"
    renormalize = name == "mixtral" or values.get("norm_topk_prob", False)
    megatron = section["megatron"]
    megatron |= {**SWIGLU, **attention_values(values)}
    megatron |= {
        "ffn_hidden_size": values.need("intermediate_size"),
        "moe_ffn_hidden_size": values.need(width),
        "num_moe_experts": values.count("num_experts") or values.need("num_local_experts"),
        "moe_router_topk": values.need("num_experts_per_tok"),
        "moe_router_score_function": "softmax",
        # softmax over the chosen logits is the same as renormalizing the chosen probabilities
        "moe_router_pre_softmax": not renormalize,
        "moe_aux_loss_coeff": values.get("router_aux_loss_coef", 1e-3),
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_dtype": "fp32",
        "qk_layernorm": name != "mixtral",
    }
    if name == "olmoe":
        section["qk_norm_over"] = "all_heads"
    windowed = [name == "mixtral"] * layers
    if name == "qwen3_moe":
        on = values.get("use_sliding_window", False)
        windowed = windowed_layers(values, layers, [on] * layers) if on else [False] * layers
    megatron |= window_values(values, windowed)
    return values.finish(section)


def _dense_layers(values: ConfigValues, layers: int) -> list[bool]:
    only, step = values.get("mlp_only_layers", []), values.count("decoder_sparse_step", 1)
    return [layer in only or (layer + 1) % step > 0 for layer in range(layers)]


def _written(name: str, section: Any, config: Any) -> dict[str, Any]:
    pattern = section.pattern.replace("|", "").split("/")[0]
    layers = len(pattern) // 2
    found = written_common(section, config) | written_rope(section)
    renormalize = not config.moe_router_pre_softmax
    width, windowed = written_windows(config, layers)
    found |= {
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "num_experts_per_tok": config.moe_router_topk,
        "router_aux_loss_coef": config.moe_aux_loss_coeff,
        "intermediate_size": config.moe_ffn_hidden_size,
    }
    if name == "mixtral":
        found |= {"num_local_experts": config.num_moe_experts}
        found["sliding_window"] = width if all(windowed) else None
        return found
    found |= {"num_experts": config.num_moe_experts, "norm_topk_prob": renormalize}
    found["attention_bias"] = False
    if name == "olmoe":
        del found["head_dim"]
        return found
    return found | {
        "intermediate_size": config.ffn_hidden_size,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n in range(layers) if pattern[2 * n + 1 : 2 * n + 2] == "-"],
        "use_sliding_window": any(windowed),
        "sliding_window": width,
    }


def _family(name: str, architecture: str) -> Family:
    layers = {"*": attention_rules(), "E": expert_rules(*_PLACES[name])}
    if name == "qwen3_moe":
        layers["-"] = mlp_rules()
    return Family(
        name=name,
        architecture=architecture,
        top=TOP,
        layers=layers,
        read=lambda given: _values(name, given),
        write=lambda section, config: _written(name, section, config),
    )


FAMILIES = (
    _family("qwen3_moe", "Qwen3MoeForCausalLM"),
    _family("mixtral", "MixtralForCausalLM"),
    _family("olmoe", "OlmoeForCausalLM"),
)
