# SPDX-License-Identifier: Apache-2.0
"""Settings that the layers of one model would not read, though those of another do, and numbers
outside the range in which they mean something.

megatron-core takes them and trains something else than the file says.
"""

from typing import Any

from models.pattern import Pattern

# (lowest, whether it is allowed itself, bound above that is not allowed)
_RANGES: dict[str, tuple[float, bool, float | None]] = {
    "hidden_dropout": (0, True, 1),
    "attention_dropout": (0, True, 1),
    "layernorm_epsilon": (0, True, None),
    "softmax_scale": (0, False, None),
    "activation_func_clamp_value": (0, False, None),
    "mtp_loss_scaling_factor": (0, True, None),
    "moe_z_loss_coeff": (0, True, None),
    "moe_input_jitter_eps": (0, True, 1),
    "moe_router_topk_scaling_factor": (0, False, None),
    "moe_router_bias_update_rate": (0, True, None),
}
_YARN = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
)


def range_problems(values: dict[str, Any]) -> list[str]:
    """Numbers that no layer can take; `values` come from `read_megatron`."""
    problems = []
    for name, (low, closed, high) in _RANGES.items():
        value = values.get(name)
        if value is None:
            continue
        inside = value >= low if closed else value > low
        if not inside or (high is not None and value >= high):
            bounds = f"{'at least' if closed else 'above'} {low}"
            bounds += "" if high is None else f" and below {high}"
            problems.append(f"model.megatron.{name} must be {bounds}, got {value}")
    losses = values.get("moe_aux_loss_coeff", 0.0)
    if any(loss < 0 for loss in (losses if isinstance(losses, list) else [losses])):
        problems.append(f"model.megatron.moe_aux_loss_coeff must be at least 0, got {losses}")
    return problems


def lost_problems(pattern: Pattern, values: dict[str, Any]) -> list[str]:
    """Settings without effect beside the others; `values` come from `read_megatron`."""
    found = _latent_attention(values) if pattern.has("+") else []
    if pattern.has("E"):
        found += _experts(values)
    if values.get("window_attn_skip_freq") is not None and values.get("window_size") is None:
        found.append(("window_attn_skip_freq", "needs window_size", "set both, or remove it"))
    if not values.get("gated_linear_unit", True):
        found += [
            (name, "changes gated activations only", "set gated_linear_unit, or remove it")
            for name in ("glu_linear_offset", "activation_func_clamp_value")
            if values.get(name)
        ]
    if values.get("recompute_granularity") is None and not values.get("moe_layer_recompute"):
        found += [
            (name, "needs recompute_granularity", "set both, or remove it")
            for name in ("recompute_method", "recompute_num_layers", "recompute_modules")
            if values.get(name)
        ]
    return [
        f"model.megatron.{name} would change nothing here: it {rule}; {remedy}"
        for name, rule, remedy in found
    ]


def _latent_attention(values: dict[str, Any]) -> list[tuple[str, str, str]]:
    why = "is not read by multi-latent attention"
    found = [
        (name, why, "remove it")
        for name in ("softmax_scale", "no_rope_freq")
        if values.get(name) is not None
    ]
    groups = values.get("num_query_groups")
    if groups is not None and groups != values.get("num_attention_heads"):
        found.append(("num_query_groups", why, "remove it: every head has keys of its own"))
    if values.get("rope_type", "rope") == "rope":
        found += [
            (name, "needs rope_type yarn", "set it, or remove this")
            for name in _YARN
            if values.get(name) is not None
        ]
    return found


def _experts(values: dict[str, Any]) -> list[tuple[str, str, str]]:
    found = []
    if not values.get("moe_shared_expert_intermediate_size"):
        found += [
            (name, "needs moe_shared_expert_intermediate_size", "set both, or remove it")
            for name in ("moe_shared_expert_gate", "moe_shared_expert_overlap")
            if values.get(name)
        ]
    kind, loss = values.get("moe_router_load_balancing_type"), values.get("moe_aux_loss_coeff")
    if kind == "none" and loss:
        found.append(
            (
                "moe_aux_loss_coeff",
                "needs a moe_router_load_balancing_type with a loss",
                "set aux_loss, or the coefficient to 0",
            )
        )
    capacity = values.get("moe_expert_capacity_factor")
    if values.get("moe_token_drop_policy") and (capacity is None or capacity < 0):
        found.append(
            ("moe_token_drop_policy", "needs moe_expert_capacity_factor", "set both, or remove it")
        )
    return found
