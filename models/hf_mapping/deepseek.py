# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V3: latent attention, shared experts, a bias that balances, prediction layers."""

from typing import Any

from models.hf_mapping.dense import TOP, mlp_rules
from models.hf_mapping.mixtures import expert_rules
from models.hf_mapping.shapes import GATE_UP, VOCABULARY
from models.hf_mapping.table import Family, rule
from models.hf_mapping.values import SWIGLU, ConfigValues, common_values, rope_given

_ATTENTION = (
    rule("input_layernorm.weight", "input_layernorm.weight"),
    rule("self_attention.linear_q_proj.weight", "self_attn.q_proj.weight"),
    rule("self_attention.linear_q_down_proj.weight", "self_attn.q_a_proj.weight"),
    rule("self_attention.q_layernorm.weight", "self_attn.q_a_layernorm.weight"),
    rule("self_attention.linear_q_up_proj.weight", "self_attn.q_b_proj.weight"),
    rule("self_attention.linear_kv_down_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    rule("self_attention.kv_layernorm.weight", "self_attn.kv_a_layernorm.weight"),
    rule("self_attention.linear_kv_up_proj.weight", "self_attn.kv_b_proj.weight"),
    rule("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
)
_EXPERTS = (
    *expert_rules("mlp.experts", "mlp.gate", ("gate_proj", "up_proj", "down_proj")),
    rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias"),
    rule(
        "mlp.shared_experts.linear_fc1.weight",
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        GATE_UP,
    ),
    rule("mlp.shared_experts.linear_fc2.weight", "mlp.shared_experts.down_proj.weight"),
)
_PREDICTION = (
    rule("enorm.weight", "enorm.weight"),
    rule("hnorm.weight", "hnorm.weight"),
    rule("eh_proj.weight", "eh_proj.weight"),
    rule("final_layernorm.weight", "shared_head.norm.weight"),
    rule("embedding.word_embeddings.weight", "embed_tokens.weight", VOCABULARY, copy=True),
    rule("output_layer.weight", "shared_head.head.weight", VOCABULARY, copy=True),
)
_ROPE = {
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "factor": "rotary_scaling_factor",
}
# What transformers takes where config.json is silent.
_ABSENT = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
}


def _values(given: dict[str, Any]) -> dict[str, Any]:
    values = ConfigValues(given, _ABSENT)
    section = common_values(values)
    layers = values.need("num_hidden_layers")
    dense = values.count("first_k_dense_replace", 3, least=0)
    heads = values.need("num_attention_heads")
    values.only("hidden_act", ["silu"], "experts of this family are SwiGLU")
    values.only("attention_bias", [False], "it is not built for this family")
    values.only("rope_interleave", [True], "latent attention rotates interleaved features")
    values.only("num_key_value_heads", [heads], "latent attention has a key for every head")
    values.only("moe_layer_freq", [1], "every layer after the dense ones has experts")
    router = router_values(values)
    pattern = "".join("+-" if layer < dense else "+E" for layer in range(layers))
    depths = values.count("num_nextn_predict_layers", 0, least=0)
    section["pattern"] = pattern + "/+E" * depths
    section["position_embedding"] = "rope"
    width = values.need("moe_intermediate_size")
    shared = values.count("n_shared_experts", 0, least=0)
    megatron = section["megatron"]
    megatron |= {**SWIGLU, **router, **_rope(values, section)}
    megatron |= {
        "num_attention_heads": heads,
        "q_lora_rank": values.count("q_lora_rank"),
        "kv_lora_rank": values.need("kv_lora_rank"),
        "qk_head_dim": values.need("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": values.need("qk_rope_head_dim"),
        "v_head_dim": values.need("v_head_dim"),
        "qk_layernorm": True,
        "ffn_hidden_size": values.need("intermediate_size"),
    }
    if "E" in pattern:
        megatron |= {
            "num_moe_experts": values.need("n_routed_experts"),
            "moe_ffn_hidden_size": width,
        }
        if shared:
            megatron["moe_shared_expert_intermediate_size"] = shared * width
    else:
        for name in router:
            del megatron[name]
    return values.finish(section)


def router_values(values: ConfigValues) -> dict[str, Any]:
    """A sigmoid router balanced by a bias, perhaps with groups of experts."""
    topk = values.need("num_experts_per_tok")
    values.only("norm_topk_prob", [True], "megatron-core normalizes sigmoid scores always")
    values.only("scoring_func", ["sigmoid"], "it is not built for this family")
    values.only("topk_method", ["noaux_tc"], "it is not built for this family")
    found: dict[str, Any] = {
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(values.get("routed_scaling_factor", 1.0)),
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-4,
        "moe_router_dtype": "fp32",
    }
    groups, chosen = values.count("n_group", 1), values.count("topk_group", 1)
    if topk == 1:
        values.problems.append(
            "config.json: num_experts_per_tok must be at least 2, got 1: megatron-core does not "
            "normalize the score of a single expert, transformers does"
        )
    if groups > 1:
        if topk // chosen != 2:
            values.problems.append(
                f"config.json: num_experts_per_tok // topk_group must be 2 where n_group > 1, got "
                f"{topk} // {chosen}: megatron-core ranks groups by that many experts, "
                "transformers by two"
            )
        found |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return found


def written_router(config: Any) -> dict[str, Any]:
    """The inverse of `router_values`."""
    return {
        "num_experts_per_tok": config.moe_router_topk,
        "norm_topk_prob": True,
        "routed_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
    }


def _rope(values: ConfigValues, section: dict[str, Any]) -> dict[str, Any]:
    kind, rope = rope_given(values)
    section["rotary_base"] = float(rope.get("rope_theta", 10000.0))
    if kind == "default":
        return {"rope_type": "rope"}
    if kind != "yarn":
        values.problems.append(
            f"config.json: rope_type must be default or yarn, got {kind!r}: others are not built "
            "for latent attention"
        )
    rope.only("truncate", [True], "latent attention rounds the bounds between frequencies")
    mscale = [name for name in ("mscale", "mscale_all_dim") if rope.get(name, 0.0)]
    if len(mscale) == 1:
        values.problems.append(
            f"config.json: mscale and mscale_all_dim must both be there or both absent, got only "
            f"{mscale[0]}: transformers and megatron-core take different values for the other"
        )
    found = {
        ours: rope.get(theirs, 0.0)
        for theirs, ours in _ROPE.items()
        if rope.values.get(theirs) is not None
    }
    return {"rope_type": "yarn", "mscale_all_dim": 0.0, **found}


def _written(section: Any, config: Any) -> dict[str, Any]:
    main, *mtp = section.pattern.replace("|", "").split("/")
    layers, experts = len(main) // 2, config.num_moe_experts
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": section.rotary_base}
    if config.rope_type == "yarn":
        rope |= {theirs: getattr(config, ours) for theirs, ours in _ROPE.items()}
        rope["rope_type"] = "yarn"
    found = {
        "hidden_size": config.hidden_size,
        "max_position_embeddings": section.seq_length,
        "tie_word_embeddings": section.tie_embeddings,
        "rms_norm_eps": config.layernorm_epsilon,
        "initializer_range": config.init_method_std,
        "num_hidden_layers": layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_nope_head_dim": config.qk_head_dim,
        "qk_rope_head_dim": config.qk_pos_emb_head_dim,
        "v_head_dim": config.v_head_dim,
        "intermediate_size": config.ffn_hidden_size,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_interleave": True,
        "first_k_dense_replace": main.index("E") // 2 if "E" in main else layers,
        "num_nextn_predict_layers": len(mtp),
        "rope_parameters": rope,
        "rope_theta": section.rotary_base,
        **written_router(config),
    }
    if experts:
        width, shared = config.moe_ffn_hidden_size, config.moe_shared_expert_intermediate_size
        found |= {"n_routed_experts": experts, "moe_intermediate_size": width}
        found["n_shared_experts"] = (shared or 0) // width
    return found


FAMILIES = (
    Family(
        name="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        top=TOP,
        layers={"+": _ATTENTION, "-": mlp_rules(), "E": _EXPERTS},
        mtp_layer="model.layers.{m}.",
        mtp_first=_PREDICTION,
        read=_values,
        write=_written,
    ),
)
