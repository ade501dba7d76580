# SPDX-License-Identifier: Apache-2.0
"""Whether a model can be laid over processes as `parallel` says: rule, value and remedy of each."""

import dataclasses
from typing import Any

from models.parallel_config import ParallelConfig
from models.pattern import Pattern
from models.shape_checks import divisors, feed_forward_width


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
    tp = parallel.tensor_model_parallel_size
    if padded_vocab is not None:
        problems += _divides("padded vocabulary", padded_vocab, tp, "make_vocab_size_divisible_by")
    if pattern.has("*") or pattern.has("+"):
        problems += _attention(values, tp)
    if pattern.has("+"):
        problems += _latent_attention(values, parallel)
    if pattern.has("-"):
        problems += _divides("ffn_hidden_size", feed_forward_width(values), tp, "ffn_hidden_size")
    if pattern.has("E"):
        problems += _experts(values, parallel)
    elif parallel.expert_model_parallel_size > 1:
        problems.append(
            f"parallel.expert_model_parallel_size {parallel.expert_model_parallel_size} has no "
            "experts to cut: model.pattern has no layer E; set it to 1"
        )
    if not pattern.has("E") and parallel.expert_tensor_parallel_size not in (None, tp):
        problems.append(
            f"parallel.expert_tensor_parallel_size {parallel.expert_tensor_parallel_size} has no "
            "experts to cut: model.pattern has no layer E; remove it"
        )
    if pattern.has("M"):
        problems += _mamba(values, tp, parallel.context_parallel_size)
    return problems


def size_problems(parallel: ParallelConfig) -> list[str]:
    """Sizes below one, with which nothing else can be worked out."""
    return [
        f"parallel.{f.name} must be at least 1, got {value}"
        for f in dataclasses.fields(parallel)
        if f.name.endswith("_size")
        and (value := getattr(parallel, f.name)) is not None
        and value < 1
    ]


def _sizes(parallel: ParallelConfig) -> list[str]:
    problems = size_problems(parallel)
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
    return [
        f"model.seq_length {seq_length} must be a multiple of {pieces} (two pieces for each of "
        f"{cp} context-parallel processes, times sequence-parallel ones); the next one is "
        f"{above_and_below(seq_length, pieces)}"
    ]


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
    groups = values.get("num_query_groups") or heads
    if groups % tp and tp % groups:
        near = min(divisors(groups), key=lambda n: abs(n - tp))
        problems.append(
            f"num_query_groups {groups} must be a multiple or a divisor of "
            f"tensor_model_parallel_size {tp}; the nearest such size is {near}"
        )
    return problems


def _latent_attention(values: dict[str, Any], parallel: ParallelConfig) -> list[str]:
    """Both down projections are cut over the processes along what they compress to."""
    tp = parallel.tensor_model_parallel_size
    queries, keys = values.get("q_lora_rank", 512), values.get("kv_lora_rank", 512)
    rotated = values.get("qk_pos_emb_head_dim", 64)
    problems = [] if queries is None else _divides("q_lora_rank", queries, tp, "q_lora_rank")
    if (keys + rotated) % tp:
        problems.append(
            f"kv_lora_rank + qk_pos_emb_head_dim ({keys} + {rotated}) must be a multiple of the "
            f"{tp} processes that share it; the next sum is {above_and_below(keys + rotated, tp)}: "
            "change kv_lora_rank"
        )
    if values.get("qk_layernorm") and tp > 1 and not parallel.sequence_parallel:
        # megatron-core adds up gradients of `q_layernorm` over ranks that each have all of it.
        problems.append(
            "qk_layernorm of multi-latent attention with tensor parallelism needs "
            "parallel.sequence_parallel, without which its gradient counts once for each of the "
            f"{tp} processes; set it to true"
        )
    return problems


def _experts(values: dict[str, Any], parallel: ParallelConfig) -> list[str]:
    tp = parallel.tensor_model_parallel_size
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size or tp
    experts = values.get("num_moe_experts") or 0
    problems = _divides("num_moe_experts", experts, ep, "num_moe_experts")
    width = values.get("moe_ffn_hidden_size") or feed_forward_width(values)
    problems += _divides("moe_ffn_hidden_size", width, etp, "moe_ffn_hidden_size")
    name = "moe_shared_expert_intermediate_size"
    problems += _divides(name, values.get(name) or 0, tp, name)
    if tp > 1 and not parallel.sequence_parallel:
        problems.append(
            "layers of experts with tensor parallelism need parallel.sequence_parallel; set it to "
            "true"
        )
    if values.get("add_bias_linear") and etp > 1:
        problems.append(
            f"biases of experts (add_bias_linear) do not go with expert tensor parallelism of {etp}"
            "; set parallel.expert_tensor_parallel_size to 1, or add_bias_linear to false"
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
        near = min(divisors(heads), key=lambda n: abs(n - groups))
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
