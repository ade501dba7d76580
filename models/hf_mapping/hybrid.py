# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 and the hybrids with it: Nemotron-H, Nemotron-3 (experts, latent experts), Mamba2."""

from typing import Any

from models.hf_mapping.deepseek import router_values, written_router
from models.hf_mapping.shapes import CONV, IN_PROJ, QKV, VOCABULARY
from models.hf_mapping.table import Family, rule
from models.hf_mapping.values import ConfigValues, attention_values, common_values, written_common

_SEGMENTS = ("z", "x", "B", "C", "dt")


def _mamba(norm: str) -> tuple:
    conv = tuple(
        rule(
            tuple(f"mixer.conv1d.{kind}.{part}" for part in _SEGMENTS[1:4]),
            f"mixer.conv1d.{kind}",
            CONV,
        )
        for kind in ("weight", "bias")
    )
    plain = ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight")
    return (
        rule("norm.weight", norm),
        rule(
            tuple(f"mixer.in_proj.weight.{part}" for part in _SEGMENTS),
            "mixer.in_proj.weight",
            IN_PROJ,
        ),
        *conv,
        *(rule(f"mixer.{name}", f"mixer.{name}") for name in plain),
    )


_TOP = (
    rule("embedding.word_embeddings.weight", "backbone.embeddings.weight", VOCABULARY),
    rule("decoder.final_norm.weight", "backbone.norm_f.weight"),
    rule("output_layer.weight", "lm_head.weight", VOCABULARY),
)
_ATTENTION = (
    rule("input_layernorm.weight", "norm.weight"),
    rule(
        "self_attention.linear_qkv.weight",
        ("mixer.q_proj.weight", "mixer.k_proj.weight", "mixer.v_proj.weight"),
        QKV,
    ),
    rule("self_attention.linear_proj.weight", "mixer.o_proj.weight"),
)
_MLP = (
    rule("pre_mlp_layernorm.weight", "norm.weight"),
    rule("mlp.linear_fc1.weight", "mixer.up_proj.weight"),
    rule("mlp.linear_fc2.weight", "mixer.down_proj.weight"),
)
_EXPERTS = (
    rule("pre_mlp_layernorm.weight", "norm.weight"),
    rule("mlp.router.weight", "mixer.gate.weight"),
    rule("mlp.router.expert_bias", "mixer.gate.e_score_correction_bias"),
    rule("mlp.experts.linear_fc1.weight", "mixer.experts.{e}.up_proj.weight", experts="split"),
    rule("mlp.experts.linear_fc2.weight", "mixer.experts.{e}.down_proj.weight", experts="split"),
    rule("mlp.shared_experts.linear_fc1.weight", "mixer.shared_experts.up_proj.weight"),
    rule("mlp.shared_experts.linear_fc2.weight", "mixer.shared_experts.down_proj.weight"),
    rule("mlp.fc1_latent_proj.weight", "mixer.fc1_latent_proj.weight"),
    rule("mlp.fc2_latent_proj.weight", "mixer.fc2_latent_proj.weight"),
)
_NO_LIMIT = (float("inf"), {"__float__": "Infinity"}, "Infinity", "inf")
# Every spelling of a layer's kind that configurations use.
_KINDS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
}
_NAMES = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# What transformers takes where config.json is silent.
_ABSENT = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "moe_shared_expert_intermediate_size": 7688,
}


def _pattern(values: ConfigValues, types: tuple[str, ...], string: str) -> str:
    for name in types:
        kinds = list(map(str, values.get(name, [])))
        if kinds:
            wrong = sorted(set(kinds) - set(_KINDS))
            if wrong:
                values.problems.append(f"config.json: {name} has {wrong}; know {sorted(_KINDS)}")
            return "".join(_KINDS.get(kind, "") for kind in kinds)
    return values.get(string, "")


def _mamba_values(values: ConfigValues, heads: str, head_dim: str, state: str) -> dict[str, Any]:
    values.only("conv_kernel", [4], "megatron-core's convolution has width 4")
    values.only("use_conv_bias", [True], "megatron-core's convolution has a bias")
    values.only("use_bias", [False], "megatron-core's projections have no bias here")
    values.only("mamba_proj_bias", [False], "megatron-core's projections have no bias here")
    limit = values.get("time_step_limit", [])
    # JSON has no infinity: transformers writes {"__float__": "Infinity"}.
    if limit and (len(limit) != 2 or limit[0] != 0 or limit[1] not in _NO_LIMIT):
        values.problems.append(
            f"config.json: time_step_limit must be [0, inf], got {limit}: megatron-core does not "
            "clamp time steps"
        )
    return {
        "mamba_num_heads": values.need(heads),
        "mamba_head_dim": values.need(head_dim),
        "mamba_num_groups": values.need("n_groups"),
        "mamba_state_dim": values.need(state),
    }


def _nemotron_values(given: dict[str, Any]) -> dict[str, Any]:
    epsilon = "layer_norm_epsilon" if "layer_norm_epsilon" in given else "norm_eps"
    values = ConfigValues(given, {**_ABSENT, epsilon: 1e-5})
    section = common_values(values, epsilon)
    megatron = section["megatron"]
    pattern = _pattern(values, ("layers_block_type", "layer_types"), "hybrid_override_pattern")
    if not pattern:
        values.problems.append("config.json must say hybrid_override_pattern or layers_block_type")
    for name in ("attention_bias", "mlp_bias"):
        values.only(name, [False], "it is not built for this family")
    values.only("mlp_hidden_act", ["relu2"], "its feed-forward layers use squared ReLU")
    values.only("mamba_hidden_act", ["silu"], "its mixers use SiLU")
    megatron |= {
        "gated_linear_unit": False,
        "activation_func": "squared_relu",
        **attention_values(values),
        "ffn_hidden_size": values.need("intermediate_size"),
    }
    depths, mtp = values.count("num_nextn_predict_layers", 0, least=0), ""
    if depths:
        mtp = _pattern(values, ("mtp_layers_block_type",), "mtp_hybrid_override_pattern") or "*E"
    if "M" in pattern + mtp:
        megatron |= _mamba_values(values, "mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    if "E" in pattern + mtp:
        megatron |= {
            **router_values(values),
            "num_moe_experts": values.need("n_routed_experts"),
            "moe_ffn_hidden_size": values.need("moe_intermediate_size"),
            "moe_latent_size": values.count("moe_latent_size"),
        }
        shared = values.count("moe_shared_expert_intermediate_size", 0, least=0)
        if shared and values.count("n_shared_experts", 1, least=0):
            megatron["moe_shared_expert_intermediate_size"] = shared
    if values.get("mtp_use_repeated_layer", False):  # a key of our exports
        megatron["mtp_use_repeated_layer"] = True
    section["pattern"] = pattern + f"/{mtp}" * depths
    section["position_embedding"] = "none"
    return values.finish(section)


def _written_mamba(config: Any, heads: str, head_dim: str, state: str) -> dict[str, Any]:
    count = config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim
    return {
        heads: count,
        head_dim: config.mamba_head_dim,
        state: config.mamba_state_dim,
        "n_groups": config.mamba_num_groups,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
        "chunk_size": 128,
    }


def _written_nemotron(section: Any, config: Any) -> dict[str, Any]:
    main, *mtp = section.pattern.replace("|", "").split("/")
    found = written_common(section, config, "layer_norm_epsilon") | {
        "norm_eps": config.layernorm_epsilon,
        "hybrid_override_pattern": main,
        "layers_block_type": [_NAMES.get(symbol, symbol) for symbol in main],
        "num_hidden_layers": len(main),
        "num_nextn_predict_layers": len(mtp),
        "intermediate_size": config.ffn_hidden_size,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "residual_in_fp32": False,
        "expand": 2,
        # transformers raises time steps to this; megatron-core does not.
        "time_step_min": 1e-12,
    }
    if mtp:
        if config.mtp_use_repeated_layer:
            found["mtp_use_repeated_layer"] = True
        found["mtp_hybrid_override_pattern"] = mtp[0]
        found["mtp_layers_block_type"] = [_NAMES.get(symbol, symbol) for symbol in mtp[0]]
    if "M" in section.pattern:
        names = ("mamba_num_heads", "mamba_head_dim", "ssm_state_size")
        found |= _written_mamba(config, *names)
    if "E" in section.pattern:
        shared = config.moe_shared_expert_intermediate_size or 0
        found |= {
            **written_router(config),
            "n_routed_experts": config.num_moe_experts,
            "moe_intermediate_size": config.moe_ffn_hidden_size,
            "moe_latent_size": config.moe_latent_size,
            "n_shared_experts": int(shared > 0),
            "moe_shared_expert_intermediate_size": shared,
        }
    return found


def _mamba2_values(given: dict[str, Any]) -> dict[str, Any]:
    values = ConfigValues(given, {"layer_norm_epsilon": 1e-5})
    section = common_values(values, "layer_norm_epsilon")
    megatron = section["megatron"]
    values.only("hidden_act", ["silu"], "its mixers use SiLU")
    values.only("rms_norm", [True], "megatron-core's mixers norm their output")
    values.only("norm_before_gate", [False], "megatron-core gates before the norm")
    section["pattern"] = "M" * values.need("num_hidden_layers")
    section["position_embedding"] = "none"
    megatron |= _mamba_values(values, "num_heads", "head_dim", "state_size")
    return values.finish(section)


def _written_mamba2(section: Any, config: Any) -> dict[str, Any]:
    found = {
        "hidden_size": config.hidden_size,
        "max_position_embeddings": section.seq_length,
        "tie_word_embeddings": section.tie_embeddings,
        "layer_norm_epsilon": config.layernorm_epsilon,
        "initializer_range": config.init_method_std,
        "num_hidden_layers": len(section.pattern.replace("|", "").split("/")[0]),
        "hidden_act": "silu",
        "residual_in_fp32": True,
        **_written_mamba(config, "num_heads", "head_dim", "state_size"),
    }
    inner = found["num_heads"] * found["head_dim"]
    if inner % config.hidden_size == 0:
        found["expand"] = inner // config.hidden_size
    return found


FAMILIES = (
    Family(
        name="mamba2",
        architecture="Mamba2ForCausalLM",
        layer="backbone.layers.{n}.",
        symbols_a_layer=1,
        top=_TOP,
        layers={"M": _mamba("norm.weight")},
        read=_mamba2_values,
        write=_written_mamba2,
    ),
    Family(
        name="nemotron_h",
        stores_tied_head=True,
        architecture="NemotronHForCausalLM",
        layer="backbone.layers.{n}.",
        symbols_a_layer=1,
        top=_TOP,
        layers={"M": _mamba("norm.weight"), "*": _ATTENTION, "-": _MLP, "E": _EXPERTS},
        mtp_layer="mtp.layers.{k}.",
        mtp_first=tuple(
            rule(f"{name}.weight", f"{name}.weight") for name in ("enorm", "hnorm", "eh_proj")
        ),
        mtp_last=(rule("final_layernorm.weight", "final_layernorm.weight"),),
        read=_nemotron_values,
        write=_written_nemotron,
    ),
)
