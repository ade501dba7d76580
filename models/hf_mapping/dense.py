# SPDX-License-Identifier: Apache-2.0
"""Transformers of attention and SwiGLU: Llama 3, Mistral, Qwen2, Qwen3."""

from typing import Any

from models.hf_mapping.shapes import GATE_UP, QKV, VOCABULARY
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

TOP = (
    rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", VOCABULARY),
    rule("decoder.final_norm.weight", "model.norm.weight"),
    rule("output_layer.weight", "lm_head.weight", VOCABULARY),
)
# What transformers takes where config.json is silent, as far as it differs from family to family.
_ABSENT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
}
_PROJECTIONS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def attention_rules() -> tuple[Rule, ...]:
    """Attention with its norm; biases and norms of heads count where the model has them."""
    qkv = "self_attention.linear_qkv"
    rules = [rule("input_layernorm.weight", "input_layernorm.weight")]
    for kind in ("weight", "bias"):
        rules += [
            rule(f"{qkv}.{kind}", tuple(f"{name}.{kind}" for name in _PROJECTIONS), QKV),
            rule(f"self_attention.linear_proj.{kind}", f"self_attn.o_proj.{kind}"),
        ]
    rules += [
        rule(f"self_attention.{x}_layernorm.weight", f"self_attn.{x}_norm.weight") for x in "qk"
    ]
    return tuple(rules)


def mlp_rules() -> tuple[Rule, ...]:
    """The gated MLP with its norm."""
    rules = [rule("pre_mlp_layernorm.weight", "post_attention_layernorm.weight")]
    for kind in ("weight", "bias"):
        gate_up = tuple(f"mlp.{name}_proj.{kind}" for name in ("gate", "up"))
        rules += [
            rule(f"mlp.linear_fc1.{kind}", gate_up, GATE_UP),
            rule(f"mlp.linear_fc2.{kind}", f"mlp.down_proj.{kind}"),
        ]
    return tuple(rules)


def windowed_layers(values: ConfigValues, layers: int, otherwise: list[bool]) -> list[bool]:
    """Which layers have a sliding window, from layer_types where it is given."""
    types = values.get("layer_types", [])
    if not types:
        return otherwise
    if len(types) != layers or any(t not in ("sliding_attention", "full_attention") for t in types):
        values.problems.append(
            f"config.json: layer_types must name sliding_attention or full_attention for each of "
            f"{layers} layers, got {types}"
        )
    return [kind == "sliding_attention" for kind in types]


def _windows(name: str, values: ConfigValues, layers: int) -> list[bool]:
    if name == "mistral":
        return [True] * layers
    if not name.startswith("qwen") or not values.get("use_sliding_window", False):
        return [False] * layers
    first = values.count("max_window_layers", 28, least=0)
    return windowed_layers(values, layers, [layer >= first for layer in range(layers)])


def dense_values(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """config.json of one of these families -> the `model` section."""
    values = ConfigValues(given, _ABSENT[name])
    section = common_values(values)
    layers = values.need("num_hidden_layers")
    values.only("hidden_act", ["silu"], "the MLP of this family is SwiGLU")
    section |= {"pattern": "*-" * layers, "position_embedding": "rope", **rope_values(values)}
    megatron = section["megatron"]
    megatron |= {**SWIGLU, **attention_values(values)}
    megatron["ffn_hidden_size"] = values.need("intermediate_size")
    attention = values.get("attention_bias", False)
    if name == "llama":
        megatron["add_bias_linear"] = attention
        values.only(
            "mlp_bias", [attention], "megatron-core has biases in all linear layers or in none"
        )
    elif name == "qwen2":
        megatron["add_qkv_bias"] = True
    else:
        values.only("attention_bias", [False], "it is not built for this family")
    megatron["qk_layernorm"] = name == "qwen3"
    megatron |= window_values(values, _windows(name, values, layers))
    return values.finish(section)


def written_dense(name: str, section: Any, config: Any) -> dict[str, Any]:
    """The `model` section -> config.json."""
    layers = len(section.pattern.replace("|", "").split("/")[0]) // 2
    found = written_common(section, config) | written_rope(section)
    found |= {
        "num_hidden_layers": layers,
        "intermediate_size": config.ffn_hidden_size,
        "hidden_act": "silu",
    }
    width, windowed = written_windows(config, layers)
    if name == "llama":
        found |= {"attention_bias": config.add_bias_linear, "mlp_bias": config.add_bias_linear}
    elif name == "mistral":
        found["sliding_window"] = width if all(windowed) else None
    else:
        found |= {
            "use_sliding_window": any(windowed),
            "sliding_window": width,
            "max_window_layers": windowed.index(True) if any(windowed) else layers,
            "layer_types": ["sliding_attention" if w else "full_attention" for w in windowed],
        }
    if name == "qwen2":
        del found["head_dim"]  # the family has no place for it
    if name == "qwen3":
        found["attention_bias"] = False
    return found


def _family(name: str, architecture: str) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        top=TOP,
        layers={"*": attention_rules(), "-": mlp_rules()},
        read=lambda given: dense_values(name, given),
        write=lambda section, config: written_dense(name, section, config),
    )


FAMILIES = (
    _family("llama", "LlamaForCausalLM"),
    _family("mistral", "MistralForCausalLM"),
    _family("qwen2", "Qwen2ForCausalLM"),
    _family("qwen3", "Qwen3ForCausalLM"),
)
