# SPDX-License-Identifier: Apache-2.0
"""Checks of the `model` and `parallel` sections: each gives rule, value and remedy."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import typing
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from models.pattern import Pattern

if TYPE_CHECKING:
    from models.config import ParallelConfig

ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.nn.functional.relu,
    "squared_relu": squared_relu,
    "quick_gelu": quick_gelu,
}

_ELSEWHERE = {
    "num_layers": "model.pattern has one symbol for each layer",
    "mtp_num_layers": "model.pattern says it after '/'",
    "is_hybrid_model": "every model here is one",
    "moe_layer_freq": "model.pattern places the layers of experts",
    "pipeline_model_parallel_layout": "model.pattern cuts stages with '|'",
    "num_layers_in_first_pipeline_stage": "model.pattern cuts stages with '|'",
    "num_layers_in_last_pipeline_stage": "model.pattern cuts stages with '|'",
    "params_dtype": "set train.dtype",
    "pipeline_dtype": "set train.dtype",
    "autocast_dtype": "set train.dtype",
    "bf16": "set train.dtype",
    "fp16": "set train.dtype",
    "deterministic_mode": "set train.deterministic",
    "calculate_per_token_loss": "the training loop decides it",
    "init_method_std": "set model.init_std",
    "rotary_base": "set model.rotary_base",
    "rotary_percent": "set model.rotary_percent",
    "transformer_impl": "precision.backend decides it",
    "quant_recipe": "precision.rules decide it",
    "overlap_p2p_comm": "it follows from the pipeline schedule",
    "batch_p2p_comm": "it follows from the pipeline schedule",
    "attention_backend": "core attention is PyTorch's",
}
_NEEDS_MORE = (
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "memory_efficient_layer_norm",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "fused_single_qkv_rope",
    "fused_residual_rmsnorm",
    "tp_comm_overlap",
    "use_transformer_engine_op_fuser",
    "use_te_activation_func",
    "use_te_rng_tracker",
    "use_kitchen",
    "use_grouped_gemm_for_shared_expert",
    "use_grouped_gemm_for_dense_mlp",
    "moe_permute_fusion",
    "moe_router_fusion",
    "moe_single_grouped_weight",
    "moe_single_grouped_bias",
    "cross_entropy_loss_fusion",
    "mla_down_proj_fusion",
    "delay_wgrad_compute",
    "defer_embedding_wgrad_compute",
    "use_cpu_initialization",
    "cpu_offloading",
    "moe_router_padding_for_quantization",
    "moe_router_padding_for_fp8",
)


def read_megatron(
    given: dict[str, Any], *, multi_latent: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Values of `model.megatron` in the types of the dataclass, and every problem with them."""
    kind = MLATransformerConfig if multi_latent else TransformerConfig
    names = {f.name for f in dataclasses.fields(kind) if not f.name.startswith("_")}
    hints = typing.get_type_hints(kind)
    values, problems = {}, []
    for key, value in given.items():
        problem = _name_problem(key, value, names, multi_latent)
        if problem is None:
            values[key], problem = _convert(key, value, hints.get(key, Any))
        if problem is not None:
            problems.append(problem)
    return values, problems


def _name_problem(key: str, value: Any, names: set[str], multi_latent: bool) -> str | None:
    where = f"model.megatron.{key}"
    if key.startswith(("fp8", "fp4", "first_last_layers_bf16")) or key.endswith("_in_bf16"):
        return (
            f"{where} has no effect without Transformer Engine's layers: megatron-core would train "
            "in BF16 and say nothing; set `precision` instead"
        )
    if key == "multi_latent_attention":
        if bool(value) != multi_latent:
            return f"{where} is {value}, but model.pattern decides it: '+' is such a layer"
        return None
    if key == "moe_grouped_gemm":
        return None if value else f"{where} is always true: the experts of a layer are one GEMM"
    if key in _ELSEWHERE:
        return f"{where} is not set here: {_ELSEWHERE[key]}"
    if key not in names:
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
        return f"{where} is no field of megatron-core's {_config_name(multi_latent)}" + (
            f"; did you mean {near[0]}?" if near else ""
        )
    if key.endswith(("parallel_size", "sequence_parallel")):
        return f"{where} is not set here: set parallel.{key}"
    if key in _NEEDS_MORE and value:
        return f"{where} needs layers of Transformer Engine or apex, which are not used; remove it"
    if key == "moe_token_dispatcher_type" and value == "flex" and not _has_flex():
        return (
            f"{where}: flex needs the package deep_ep, which is not installed; use alltoall (or "
            "allgather)"
        )
    if key == "recompute_modules" and (broken := sorted({"moe_act", "layernorm"} & set(value))):
        return (
            f"{where}: {', '.join(broken)} cannot be recomputed without Transformer Engine; choose "
            "from core_attn, mlp, moe, shared_experts, mla_up_proj"
        )
    if key.endswith(("_func", "init_method")) and key != "activation_func":
        return f"{where} is a function and cannot be set in a file"
    return None


def _has_flex() -> bool:
    return importlib.util.find_spec("deep_ep") is not None


def _convert(key: str, value: Any, hint: Any) -> tuple[Any, str | None]:
    where = f"model.megatron.{key}"
    if key == "activation_func":
        if value in ACTIVATIONS:
            return ACTIVATIONS[value], None
        return None, f"{where} must be one of {', '.join(ACTIVATIONS)}; got {value!r}"
    if key == "q_lora_rank":  # None is how megatron-core spells "no compression of queries"
        hint = hint | None
    try:
        return TypeAdapter(hint).validate_python(value), None
    except ValidationError as error:
        return None, f"{where}: {error.errors()[0]['msg']}; got {value!r}"
    except PydanticUserError:  # a type that only megatron-core can judge
        return value, None


def _config_name(multi_latent: bool) -> str:
    return "MLATransformerConfig" if multi_latent else "TransformerConfig"


def layout_problems(
    pattern: Pattern,
    values: dict[str, Any],
    parallel: ParallelConfig,
    *,
    seq_length: int,
    padded_vocab: int | None,
) -> list[str]:
    """Whether the model can be cut as `parallel` says; `values` come from `read_megatron`."""
    problems = _sizes(parallel)
    if problems:
        return problems
    problems += _sequence(parallel, seq_length)
    problems += _needed(pattern, values)
    tp = parallel.tensor_model_parallel_size
    if padded_vocab is not None:
        problems += _divides("padded vocabulary", padded_vocab, tp, "make_vocab_size_divisible_by")
    if pattern.has("*") or pattern.has("+"):
        problems += _attention(values, tp)
    if pattern.has("-") and values.get("ffn_hidden_size"):
        problems += _divides("ffn_hidden_size", values["ffn_hidden_size"], tp, "ffn_hidden_size")
    if pattern.has("E"):
        problems += _experts(values, parallel)
    elif parallel.expert_model_parallel_size > 1:
        problems.append(
            f"parallel.expert_model_parallel_size {parallel.expert_model_parallel_size} has no "
            "experts to cut: model.pattern has no layer E; set it to 1"
        )
    if pattern.has("M"):
        problems += _mamba(values, tp, parallel.context_parallel_size)
    return problems


def _sizes(parallel: ParallelConfig) -> list[str]:
    problems = [
        f"parallel.{f.name} must be at least 1, got {value}"
        for f in dataclasses.fields(parallel)
        if f.name.endswith("_size")
        and (value := getattr(parallel, f.name)) is not None
        and value < 1
    ]
    virtual, pipeline = parallel.virtual, parallel.pipeline_model_parallel_size
    if virtual > 1 and pipeline == 1:
        problems.append(
            f"parallel.virtual_pipeline_model_parallel_size {virtual} needs a pipeline; set "
            "pipeline_model_parallel_size to 2 or more, or remove it"
        )
    if parallel.sequence_parallel and parallel.tensor_model_parallel_size == 1:
        problems.append(
            "parallel.sequence_parallel needs tensor_model_parallel_size of 2 or more, got 1"
        )
    if parallel.overlap_param_gather and not (
        parallel.overlap_grad_reduce and parallel.use_distributed_optimizer
    ):
        problems.append(
            "parallel.overlap_param_gather needs overlap_grad_reduce and "
            "use_distributed_optimizer; set both to true"
        )
    return problems


def _sequence(parallel: ParallelConfig, seq_length: int) -> list[str]:
    cp, tp = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    pieces = (2 * cp if cp > 1 else 1) * (tp if parallel.sequence_parallel else 1)
    if seq_length % pieces == 0:
        return []
    down = seq_length - seq_length % pieces
    return [
        f"model.seq_length {seq_length} must be a multiple of {pieces} (two pieces for each of "
        f"{cp} context-parallel processes, times sequence-parallel ones); use "
        f"{down or pieces} or {down + pieces}"
    ]


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
        problems.append(
            f"model.megatron.num_moe_experts is {experts}, but model.pattern has no layer of "
            "experts; add E layers or remove it"
        )
    return problems


def _divides(name: str, value: int, by: int, remedy: str) -> list[str]:
    if value % by == 0:
        return []
    return [
        f"{name} ({value}) must be a multiple of the {by} processes that share it; the next one is "
        f"{above_and_below(value, by)}: change {remedy}"
    ]


def above_and_below(value: int, by: int) -> str:
    """The nearest multiples of `by`: the next, and the one before if it is not zero."""
    low, high = value - value % by, value + -value % by
    return f"{high}, the one before {low}" if low else f"{high}"


def _attention(values: dict[str, Any], tp: int) -> list[str]:
    heads = values.get("num_attention_heads")
    if not heads:
        return []
    problems = _divides("num_attention_heads", heads, tp, "num_attention_heads")
    if "q_lora_rank" in values and values["q_lora_rank"] is None and values.get("qk_layernorm"):
        problems.append(
            "qk_layernorm without compressed queries (q_lora_rank null) needs a fused layer of "
            "Transformer Engine; set q_lora_rank, or qk_layernorm to false"
        )
    groups = values.get("num_query_groups") or heads
    if heads % groups:
        near = min(_divisors(heads), key=lambda n: abs(n - groups))
        problems.append(
            f"num_attention_heads {heads} must be a multiple of num_query_groups {groups}; the "
            f"nearest divisor is {near}"
        )
    if groups % tp and tp % groups:
        near = min(_divisors(groups), key=lambda n: abs(n - tp))
        problems.append(
            f"num_query_groups {groups} must be a multiple or a divisor of "
            f"tensor_model_parallel_size {tp}; the nearest such size is {near}"
        )
    return problems


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _experts(values: dict[str, Any], parallel: ParallelConfig) -> list[str]:
    experts, topk = values.get("num_moe_experts") or 0, values.get("moe_router_topk", 2)
    ep = parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    problems = _divides("num_moe_experts", experts, ep, "num_moe_experts")
    if experts and topk > experts:
        problems.append(
            f"moe_router_topk {topk} is more than num_moe_experts {experts}; {experts} is the most"
        )
    width = values.get("moe_ffn_hidden_size") or values.get("ffn_hidden_size")
    if width:
        problems += _divides("moe_ffn_hidden_size", width, etp, "moe_ffn_hidden_size")
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        problems.append(
            "layers of experts with tensor parallelism need parallel.sequence_parallel; set it to "
            "true"
        )
    if values.get("moe_router_enable_expert_bias") and (
        values.get("moe_router_score_function", "softmax") == "softmax"
    ):
        problems.append(
            "moe_router_enable_expert_bias needs moe_router_score_function sigmoid (or "
            "sqrtsoftplus): a bias on softmax scores would not be a change of choice only"
        )
    return problems


def _mamba(values: dict[str, Any], tp: int, cp: int) -> list[str]:
    width = values.get("hidden_size") or 0
    head_dim, groups = values.get("mamba_head_dim", 64), values.get("mamba_num_groups", 8)
    heads = values.get("mamba_num_heads")
    if heads is None:
        if 2 * width % head_dim:
            return [
                f"twice hidden_size ({2 * width}) must be a multiple of mamba_head_dim {head_dim}; "
                "set mamba_num_heads"
            ]
        heads = 2 * width // head_dim
    problems = _divides("mamba heads", heads, tp * cp, "mamba_num_heads")
    problems += _divides("mamba_num_groups", groups, tp, "mamba_num_groups")
    if groups and heads % groups:
        near = min(_divisors(heads), key=lambda n: abs(n - groups))
        problems.append(
            f"mamba heads ({heads}) must be a multiple of mamba_num_groups {groups}; the nearest "
            f"divisor is {near}"
        )
    local = groups // tp
    if local and local % cp and cp % local:
        problems.append(
            f"mamba_num_groups for each tensor-parallel process ({local}) must be a multiple or a "
            f"divisor of context_parallel_size {cp}"
        )
    return problems
