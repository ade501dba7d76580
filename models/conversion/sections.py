# SPDX-License-Identifier: Apache-2.0
"""From config.json to the `model` section and back, with proof that nothing was lost."""

import difflib
from collections.abc import Mapping
from typing import Any

import torch

from fused_ops.errors import ConfigError
from models.config import ModelConfig, ParallelConfig, transformer_config
from models.hf_mapping import FAMILIES
from models.hf_mapping.shapes import Sizes
from models.hf_mapping.table import Family
from models.pattern import parse_pattern

# What a model computes, by the layers that it concerns ("" all).
_FIELDS = {
    "": """hidden_size normalization layernorm_epsilon layernorm_zero_centered_gamma
        add_bias_linear apply_residual_connection_post_layernorm fp32_residual_connection""",
    "*": """num_attention_heads num_query_groups kv_channels add_qkv_bias qk_layernorm softmax_type
        softmax_scale rotary_interleaved no_rope_freq window_size attention_output_gate
        apply_query_key_layer_scaling qk_norm_over""",
    "+": """num_attention_heads q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
        rope_type rotary_base rotary_percent mscale_all_dim qk_layernorm""",
    "-": "ffn_hidden_size gated_linear_unit activation_func glu_linear_offset"
    " activation_func_clamp_value",
    "E": """num_moe_experts moe_ffn_hidden_size moe_router_topk moe_router_pre_softmax
        moe_router_score_function moe_router_enable_expert_bias moe_router_num_groups
        moe_router_group_topk moe_router_topk_scaling_factor moe_shared_expert_intermediate_size
        moe_shared_expert_gate moe_latent_size moe_apply_probs_on_input gated_linear_unit
        activation_func glu_linear_offset activation_func_clamp_value
        moe_expert_capacity_factor""",
    "M": "mamba_num_heads mamba_head_dim mamba_num_groups mamba_state_dim",
}
_YARN = (
    "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale"
    " mscale_all_dim"
)
# Values of config fields that mean the same.
_SAME = {"moe_router_topk_scaling_factor": 1.0, "moe_shared_expert_intermediate_size": 0}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a config.json. ConfigError names the nearest one."""
    name = hf_config.get("model_type")
    if name in FAMILIES:
        return FAMILIES[name]
    near = difflib.get_close_matches(str(name), FAMILIES, n=1)
    raise ConfigError(
        f"config.json: model_type must be one of {', '.join(FAMILIES)}; got {name!r}"
        + (f"; did you mean {near[0]}?" if near else "; CONTRIBUTING.md says how to add a family")
    )


def read_section(hf_config: Mapping[str, Any]) -> ModelConfig:
    """The `model` section of a config.json. ConfigError lists what cannot be represented."""
    return ModelConfig(**family_of(hf_config).read(dict(hf_config)))


def engine_config(section: ModelConfig, dtype: torch.dtype = torch.float32) -> Any:
    """megatron-core's config of a section, in one process."""
    return transformer_config(section.unstaged, ParallelConfig(), params_dtype=dtype)


def architecture(section: ModelConfig, vocab_size: int | None = None) -> dict[str, Any]:
    """Everything that decides what a model computes, by name, in one plain form."""
    pattern, config = parse_pattern(section.pattern), engine_config(section)
    found: dict[str, Any] = {
        "pattern": pattern.layers,
        "prediction": (pattern.mtp, pattern.mtp_depths),
        "vocab_size": vocab_size or section.vocab_size,
        "tie_embeddings": section.tie_embeddings,
    }
    if pattern.has("*"):
        found["position_embedding"] = section.position_embedding
        if section.position_embedding == "rope":
            found["rotary"] = (section.rotary_base, section.rotary_percent, section.rope_scaling)
        found["windows"] = _windows(pattern.layers, config)
    names = _FIELDS[""].split()
    for symbol in "*+-EM":
        if pattern.has(symbol):
            names += _FIELDS[symbol].split()
    if pattern.mtp_depths:
        names.append("mtp_use_repeated_layer")
    if pattern.has("+") and config.rope_type == "yarn":
        names += _YARN.split()
    for name in dict.fromkeys(names):
        value = getattr(config, name, None)
        value = _SAME.get(name) if value is None else value
        value = value.__name__ if callable(value) else value
        found[name] = tuple(value) if isinstance(value, list) else value
    if pattern.has("M") and found["mamba_num_heads"] is None:
        found["mamba_num_heads"] = 2 * config.hidden_size // config.mamba_head_dim
    return found


def _windows(layers: str, config: Any) -> tuple[bool, ...]:
    from megatron.core.transformer.utils import is_layer_window_attention

    return tuple(
        symbol == "*"
        and bool(
            is_layer_window_attention(config.window_size, config.window_attn_skip_freq, number)
        )
        for number, symbol in enumerate(layers, 1)
    )


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """What differs between two architectures, a line each."""
    return [
        f"{name}: {ours.get(name)!r} in the checkpoint, {theirs.get(name)!r} in config.json"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]


def choose_family(
    section: ModelConfig, vocab_size: int, name: str | None = None
) -> tuple[Family, dict[str, Any]]:
    """A family that can represent the model, and its config.json (without dtype).

    `name` asks for one. ConfigError says what the nearest family has no place for.
    """
    if name is not None and name not in FAMILIES:
        near = difflib.get_close_matches(name, FAMILIES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--family must be one of {', '.join(FAMILIES)}; got {name!r}{hint}")
    ours, config = architecture(section, vocab_size), engine_config(section)
    best: tuple[int, str, list[str]] | None = None
    for family in FAMILIES.values() if name is None else [FAMILIES[name]]:
        written, lost = _try_family(family, section, config, vocab_size, ours)
        if not lost:
            return family, written
        if best is None or len(lost) < best[0]:
            best = (len(lost), family.name, lost)
    assert best is not None, "there is a family"
    raise ConfigError(
        [f"this model does not fit the family {best[1]}: {line}" for line in best[2]]
        + [f"families are {', '.join(FAMILIES)}; CONTRIBUTING.md says how to add one"]
    )


def _try_family(
    family: Family, section: ModelConfig, config: Any, vocab_size: int, ours: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """(config.json, what it loses of the model)."""
    symbols = set(section.pattern.replace("|", "").replace("/", "")) - set(family.layers)
    if symbols:
        return {}, [f"it has no layer {symbol!r}" for symbol in sorted(symbols)] * 10
    if "/" in section.pattern and not family.mtp_layer:
        return {}, ["it has no multi-token prediction"] * 5
    try:
        written = {
            "architectures": [family.architecture],
            "model_type": family.name,
            "vocab_size": vocab_size,
            **family.write(section, config),
        }
        back = ModelConfig(**family.read(dict(written)))
        lost = differences(ours, architecture(back, vocab_size))
    except (ConfigError, TypeError) as error:
        return {}, list(getattr(error, "problems", [str(error)]))
    return written, lost


def sizes_of(section: ModelConfig, config: Any, vocab_size: int) -> Sizes:
    """What shape rules need."""
    from models.config import padded_vocab_size

    return Sizes(config, vocab_size, padded_vocab_size(section, vocab_size))
