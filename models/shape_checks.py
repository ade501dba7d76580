# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an architecture in every layout: sizes, heads, routers, biases."""

from typing import Any

from models.pattern import Pattern

# Fields that count something: at least one of it, where they are given.
_COUNTS = (
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "num_moe_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_latent_size",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "mamba_num_heads",
    "mamba_head_dim",
    "mamba_state_dim",
    "mamba_num_groups",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "v_head_dim",
    "recompute_num_layers",
)
_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none", "sinkhorn", "quantile_balancing")
_SOFTMAX = ("vanilla", "learnable")


def take_counts(values: dict[str, Any]) -> list[str]:
    """Counts below one: what is wrong with them; they are taken out of `values`."""
    wrong = [name for name in _COUNTS if values.get(name) is not None and values[name] < 1]
    return [f"model.megatron.{name} must be at least 1, got {values.pop(name)}" for name in wrong]


def shape_problems(pattern: Pattern, values: dict[str, Any], *, rotary: bool) -> list[str]:
    """What keeps this model from being built in any layout.

    Args:
        pattern: its layers.
        values: from `read_megatron`, without counts below one.
        rotary: whether positions rotate queries and keys.
    """
    problems = _needed(pattern, values)
    if pattern.has("*") or pattern.has("+"):
        problems += _attention(pattern, values, rotary)
    if pattern.has("E"):
        problems += _router(values) + _biases(values)
    return problems + _recomputed_predictions(pattern, values)


def feed_forward_width(values: dict[str, Any]) -> int:
    """ffn_hidden_size, or what megatron-core takes for it."""
    return values.get("ffn_hidden_size") or 4 * (values.get("hidden_size") or 0)


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _needed(pattern: Pattern, values: dict[str, Any]) -> list[str]:
    problems = []
    if not values.get("hidden_size"):
        problems.append("model.megatron.hidden_size is needed: the width of the residual stream")
    if (pattern.has("*") or pattern.has("+")) and not values.get("num_attention_heads"):
        problems.append("model.megatron.num_attention_heads is needed for attention layers")
    experts = values.get("num_moe_experts")
    if pattern.has("E") and not experts:
        problems.append("model.megatron.num_moe_experts is needed for layers of experts (E)")
    if experts and not pattern.has("E"):
        others = sorted(key for key in values if key.startswith("moe_"))
        problems.append(
            f"model.megatron.num_moe_experts is {experts}, but model.pattern has no layer of "
            "experts; add E layers, or remove it from the run file"
            + (f", and with it {', '.join(others)}" if others else "")
        )
    return problems


def _recomputed_predictions(pattern: Pattern, values: dict[str, Any]) -> list[str]:
    """megatron-core recomputes the layers of multi-token prediction one by one, or stops."""
    together = values.get("recompute_num_layers") or 1
    if not pattern.mtp_depths or values.get("recompute_method") != "uniform" or together == 1:
        return []
    return [
        f"model.megatron.recompute_num_layers {together} with recompute_method uniform does not go "
        f"with multi-token prediction (after '/' in model.pattern); set it to 1, or "
        "recompute_method to block, which leaves prediction layers as they are"
    ]


def _attention(pattern: Pattern, values: dict[str, Any], rotary: bool) -> list[str]:
    problems = []
    kind = values.get("softmax_type", "vanilla")
    if kind not in _SOFTMAX:
        problems.append(
            f"model.megatron.softmax_type {kind!r} is not built; use vanilla, or learnable "
            "(attention sinks)"
        )
    window = values.get("window_size")
    if window is not None and window[1] > 0:
        problems.append(
            f"model.megatron.window_size {list(window)} would let a token see those behind it, "
            f"which a causal model cannot; use [{window[0]}, 0]"
        )
    if window is not None and window[0] < 0:
        problems.append(
            f"model.megatron.window_size {list(window)} would let a token see nothing; set how "
            "many tokens before it one sees, or null for all"
        )
    heads = values.get("num_attention_heads") or 1
    groups = values.get("num_query_groups") or heads
    if heads % groups:
        near = min(divisors(heads), key=lambda n: abs(n - groups))
        problems.append(
            f"num_attention_heads {heads} must be a multiple of num_query_groups {groups}; the "
            f"nearest divisor is {near}"
        )
    if pattern.has("+"):
        return problems + _latent_attention(values)
    hidden, width = values.get("hidden_size"), values.get("kv_channels")
    if hidden is None:
        return problems
    if width is None and hidden % heads:
        problems.append(
            f"hidden_size {hidden} is no multiple of num_attention_heads {heads}, so the width of "
            f"a head must be said: set kv_channels, such as {max(hidden // heads, 1)}"
        )
    elif rotary and (width or hidden // heads) % 2:
        width = width or hidden // heads
        problems.append(
            f"kv_channels ({width}) must be even, since features are rotated in pairs; use "
            f"{width + 1}, or position_embedding none"
        )
    return problems


def _latent_attention(values: dict[str, Any]) -> list[str]:
    problems = []
    if "q_lora_rank" in values and values["q_lora_rank"] is None and values.get("qk_layernorm"):
        problems.append(
            "qk_layernorm without compressed queries (q_lora_rank null) needs a fused layer of "
            "Transformer Engine; set q_lora_rank, or qk_layernorm to false"
        )
    rotated = values.get("qk_pos_emb_head_dim", 64)
    if rotated < 2 or rotated % 2:
        problems.append(
            f"qk_pos_emb_head_dim ({rotated}) must be even and at least 2, since features are "
            f"rotated in pairs; use {max(rotated + rotated % 2, 2)}"
        )
    if values.get("add_qkv_bias"):
        problems.append(
            "add_qkv_bias has no meaning for multi-latent attention; remove it (add_bias_linear "
            "adds biases to every linear layer)"
        )
    if values.get("rope_type", "yarn") not in ("rope", "yarn"):
        problems.append(f"rope_type must be rope or yarn; got {values['rope_type']!r}")
    return problems


def _router(values: dict[str, Any]) -> list[str]:
    experts, topk = values.get("num_moe_experts") or 0, values.get("moe_router_topk", 2)
    kinds = values.get("moe_router_load_balancing_type", "aux_loss")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    problems = [
        f"moe_router_load_balancing_type must be one of {', '.join(_LOSSES)}; got {kind!r}"
        for kind in kinds
        if kind not in _LOSSES
    ]
    if experts and topk > experts:
        problems.append(
            f"moe_router_topk {topk} is more than num_moe_experts {experts}; {experts} is the most"
        )
    loss = values.get("moe_aux_loss_coeff", 0.0)
    alone = next((kind for kind in kinds if kind in ("sinkhorn", "quantile_balancing")), None)
    if alone and (any(loss) if isinstance(loss, list) else loss):
        problems.append(
            f"moe_router_load_balancing_type {alone} balances without a loss; set "
            f"moe_aux_loss_coeff to 0 (it is {loss})"
        )
    if values.get("moe_apply_probs_on_input") and topk != 1:
        problems.append(
            f"moe_apply_probs_on_input needs moe_router_topk 1, got {topk}; set one of them"
        )
    if values.get("moe_shared_expert_overlap") and values.get("moe_latent_size"):
        problems.append(
            "moe_shared_expert_overlap does not go with moe_latent_size; set it to false"
        )
    if values.get("moe_router_enable_expert_bias") and (
        values.get("moe_router_score_function", "softmax") == "softmax"
    ):
        problems.append(
            "moe_router_enable_expert_bias needs moe_router_score_function sigmoid (or "
            "sqrtsoftplus): a bias on softmax scores would not be a change of choice only"
        )
    return problems + _router_groups(experts, topk, values)


def _router_groups(experts: int, topk: int, values: dict[str, Any]) -> list[str]:
    groups, chosen = values.get("moe_router_num_groups"), values.get("moe_router_group_topk")
    if groups is None and chosen is None:
        return []
    if groups is None or chosen is None:
        return [
            "moe_router_num_groups and moe_router_group_topk go together; got "
            f"{groups} and {chosen}; set both, or neither"
        ]
    if not experts or experts % groups:
        return []  # megatron-core says the latter
    if chosen > groups:
        return [f"moe_router_group_topk {chosen} is more than moe_router_num_groups {groups}"]
    held, scored = experts // groups * chosen, max(topk // chosen, 1)
    problems = []
    if topk > held:
        problems.append(
            f"moe_router_topk {topk} is more than the {held} experts of moe_router_group_topk "
            f"{chosen} groups; choose {-(-topk * groups // experts)} groups, or {held} experts"
        )
    elif scored > experts // groups:
        problems.append(
            f"a group is scored by its best {scored} experts (moe_router_topk {topk} / "
            f"moe_router_group_topk {chosen}) and has {experts // groups}; choose more groups"
        )
    return problems


def _biases(values: dict[str, Any]) -> list[str]:
    if not values.get("add_bias_linear"):
        return []
    return [
        f"add_bias_linear does not go with {name}, whose layers have no bias; set it to false"
        for name in ("moe_latent_size", "moe_shared_expert_intermediate_size")
        if values.get(name)
    ]
