# SPDX-License-Identifier: Apache-2.0
"""The fields of `model.megatron`: read in megatron-core's types, and what is wrong with each alone.

A field that would change nothing here is refused: a run that asks for it would get something else.
"""

import dataclasses
import difflib
import importlib.util
import typing
from collections.abc import Collection
from typing import Any

import torch
from megatron.core.activations import quick_gelu, squared_relu
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

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
    "transformer_impl": "precision.backend decides it",
    "quant_recipe": "precision.rules decide it",
    "overlap_p2p_comm": "it follows from the pipeline schedule",
    "batch_p2p_comm": "it follows from the pipeline schedule",
    "attention_backend": "core attention is PyTorch's",
    "experimental_attention_variant": "model.pattern has a symbol for each kind of attention",
    "mtp_hybrid_override_pattern": "model.pattern says it after '/'",
    "heterogeneous_block_specs": "model.pattern has one symbol for each layer",
    "account_for_embedding_in_pipeline_split": "model.pattern cuts stages with '|'",
    "account_for_loss_in_pipeline_split": "model.pattern cuts stages with '|'",
    "moe_enable_deepep": "set moe_token_dispatcher_type to flex",
    "moe_router_topk_limited_devices": "set moe_router_num_groups and moe_router_group_topk, which "
    "no layout changes",
    "enable_autocast": "set train.dtype",
    "perform_initialization": "weights begin as model.init_std or checkpoint.load says",
    "mlp_chunks_for_training": "the tokens of a micro-batch are one operand; recompute_modules "
    "[mlp] saves memory",
    "enable_cuda_graph": "train.cuda_graph_impl decides it",
    "external_cuda_graph": "train.cuda_graph_impl decides it",
}
_NEEDS_MORE = (
    "gradient_accumulation_fusion",
    "persist_layer_norm",
    "memory_efficient_layer_norm",
    "masked_softmax_fusion",
    "apply_rope_fusion",
    "fused_single_qkv_rope",
    "fp32_residual_connection",
    "fused_residual_rmsnorm",
    "tp_comm_overlap",
    "use_transformer_engine_op_fuser",
    "use_te_activation_func",
    "use_te_rng_tracker",
    "use_kitchen",
    "use_grouped_gemm_for_shared_expert",
    "use_grouped_gemm_for_dense_mlp",
    "moe_mlp_glu_interleave_size",
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
    "fine_grained_activation_offloading",
    "use_kitchen_attention",
    "use_ring_exchange_p2p",
    "tp_only_amax_red",
)
# What nothing here reads, or only a part of what it means: set, a run would train something else
# than its file says.
_CHANGES_NOTHING = (
    "activation_func_fp8_input_store",
    "activation_offload_fraction",
    "apply_query_key_layer_scaling",
    "apply_residual_connection_post_layernorm",
    "attention_softmax_in_fp32",
    "barrier_with_L1_time",
    "batch_invariant_mode",
    "cache_mla_latents",
    "config_logger_dir",
    "cp_comm_type",
    "cross_entropy_fusion_impl",
    "delay_offload_until_cuda_graph",
    "delta_offload_bytes_across_pp_ranks",
    "disable_parameter_transpose_cache",
    "ep_overlap_early_attn_memory_release",
    "expert_gtp_weight_remat_size",
    "expert_tensor_parallel_num_weight_shards",
    "fine_grained_offloading_max_inflight_offloads",
    "flash_attention_version",
    "flash_decode",
    "gtp_weight_remat_size",
    "hetereogenous_dist_checkpoint",
    "hierarchical_context_parallel_sizes",
    "high_priority_a2a_comm_stream",
    "hybrid_context_parallel",
    "init_model_with_meta_device",
    "kitchen_attention_backend",
    "log_max_attention_logit",
    "mamba_training_ssm_states_dtype",
    "max_seqlen_per_dp_cp_rank",
    "min_offloaded_tensor_size",
    "mlp_chunks_for_prefill",
    "moe_enable_routing_replay",
    "moe_expert_rank_capacity_factor",
    "moe_pad_experts_for_cuda_graph_inference",
    "moe_per_layer_logging",
    "moe_shared_expert_glu_interleave_size",
    "moe_token_dropping",
    "mrope_section",
    "mtp_standalone",
    "nccl_all_reduce_for_prefill",
    "num_microbatches_with_partial_activation_checkpoints",
    "offload_modules",
    "pipeline_model_parallel_comm_backend",
    "qk_l2_norm",
    "symmetric_ar_type",
    "tensor_parallel_num_weight_shards",
    "test_mode",
    "use_fused_weighted_squared_relu",
    "use_inference_optimized_layers",
    "wgrad_deferral_limit",
)
_CHANGES_NOTHING_PREFIXES = (
    "cpu_offloading_",
    "dsa_",
    "inference_",
    "linear_",
    "moe_paged_stash",
    "qk_clip",
    "tp_comm_",
)
# Maximal update parametrization scales learning rates by width as well, which no optimizer here
# does.
_HALF_DONE = ("use_mup", "mup_")
_CUDA_GRAPHS = "cuda_graph_"


def field_names() -> set[str]:
    """Names of megatron-core's fields, whether they can be set here or not."""
    return {f.name for f in dataclasses.fields(MLATransformerConfig)}


def read_megatron(
    given: dict[str, Any], of_model: Collection[str], *, multi_latent: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Values of `model.megatron` in the types of the dataclass, and every problem with them.

    `of_model`: keys of the `model` section itself, which are not set here.
    """
    kind = _kind(multi_latent)
    names = {f.name for f in dataclasses.fields(kind) if not f.name.startswith("_")}
    hints = typing.get_type_hints(kind)
    values, problems = {}, []
    for key, value in given.items():
        if key in of_model:
            problem: str | None = f"model.megatron.{key} is not set here: set model.{key}"
        else:
            problem = _name_problem(key, value, names, multi_latent)
        if problem is None:
            values[key], problem = _convert(key, value, hints.get(key, Any))
        if problem is not None:
            values.pop(key, None)
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
        built = [name for name in names if not name.startswith(_HALF_DONE)]
        near = difflib.get_close_matches(key, built, n=1, cutoff=0.5)
        return f"{where} is no field of megatron-core's {_kind(multi_latent).__name__}" + (
            f"; did you mean {near[0]}?" if near else ""
        )
    if value != _default(key, multi_latent):
        if key in _CHANGES_NOTHING or key.startswith(_CHANGES_NOTHING_PREFIXES):
            return f"{where} would change nothing here: no layer reads it; remove it"
        if key.startswith(_HALF_DONE):
            return (
                f"{where}: maximal update parametrization scales learning rates too, which is not "
                "built; remove it"
            )
        if key.startswith(_CUDA_GRAPHS):
            return f"{where} is not set here: train.cuda_graph_impl decides it"
    if key.endswith(("parallel_size", "sequence_parallel")):
        return f"{where} is not set here: set parallel.{key}"
    if key in _NEEDS_MORE and value:
        return f"{where} needs layers of Transformer Engine or apex, which are not used; remove it"
    if key == "moe_token_dispatcher_type" and value == "flex" and not _has_flex():
        return (
            f"{where}: flex needs the package deep_ep, which is not installed; use alltoall (or "
            "allgather)"
        )
    if key.endswith(("_func", "init_method")) and key != "activation_func":
        return f"{where} is a function and cannot be set in a file"
    return None


def _default(key: str, multi_latent: bool) -> Any:
    """What megatron-core takes where a field is not set."""
    found = next(f for f in dataclasses.fields(_kind(multi_latent)) if f.name == key)
    if found.default_factory is not dataclasses.MISSING:
        return found.default_factory()
    return found.default


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
        converted = TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        return None, f"{where}: {error.errors()[0]['msg']}; got {value!r}"
    except PydanticUserError:  # a type that only megatron-core can judge
        return value, None
    broken = {"moe_act", "layernorm"} & set(converted or ()) if key == "recompute_modules" else ()
    if broken:
        return None, (
            f"{where}: {', '.join(sorted(broken))} cannot be recomputed without Transformer "
            "Engine; choose from core_attn, mlp, moe, shared_experts, mla_up_proj"
        )
    return converted, None


def _kind(multi_latent: bool) -> type[TransformerConfig]:
    return MLATransformerConfig if multi_latent else TransformerConfig
