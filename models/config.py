# SPDX-License-Identifier: Apache-2.0
"""The `model` section of a run file, its problems, and megatron-core's config made of it."""

import dataclasses
from dataclasses import field
from typing import Any, Literal

import torch
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from pydantic import ConfigDict, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from fused_ops.errors import ConfigError
from models.config_checks import layout_problems
from models.lost_settings import lost_problems, range_problems
from models.megatron_fields import field_names, read_megatron
from models.parallel_config import ParallelConfig
from models.pattern import Pattern, parse_pattern, pattern_problems, stage_problems
from models.presets import get_preset, merge_preset
from models.rotary import RopeScaling, note_concentration
from models.shape_checks import shape_problems, take_counts

_STRICT = ConfigDict(extra="forbid")


@dataclass(kw_only=True, frozen=True, config=_STRICT)
class ModelConfig:
    """What is trained."""

    preset: str | None = None
    """A named shape (`python -m tools.presets` lists them); every other key overrides it."""
    pattern: str = "*-*-"
    """One symbol a layer: M Mamba-2, * attention, + MLA, - MLP, E experts; | cuts stages, / MTP."""
    seq_length: int = 1024
    """Tokens of a sample."""
    vocab_size: int | None = None
    """Entries of the vocabulary; None takes the data's."""
    make_vocab_size_divisible_by: int = 128
    """The embedding is padded to a multiple of this. It does not depend on the layout, so that
    every layout trains the same model."""
    position_embedding: Literal["rope", "none"] = "rope"
    """How attention knows positions. Multi-latent attention has its own rotary part."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Share of each head that is rotated."""
    rope_scaling: RopeScaling | None = None
    """How rotary frequencies were stretched to a longer context: {type: llama3, factor: 8}."""
    qk_norm_over: Literal["head", "all_heads"] = "head"
    """What qk_layernorm takes its mean over: each head, or all heads of a token (OLMo)."""
    tie_embeddings: bool = False
    """Whether the output layer uses the embedding's weight."""
    init_std: float | None = None
    """Standard deviation of initial weights; None takes megatron-core's 0.02."""
    megatron: dict[str, Any] = field(default_factory=dict, metadata={"keys": field_names})
    """Any further field of megatron-core's TransformerConfig, such as hidden_size."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, given: Any) -> Any:
        values = dict(given.kwargs or {}) if isinstance(given, ArgsKwargs) else dict(given)
        if values.get("preset"):
            values = merge_preset(get_preset(values["preset"]), values)
        return ArgsKwargs((), values) if isinstance(given, ArgsKwargs) else values

    @property
    def unstaged(self) -> "ModelConfig":
        """The same model, its pattern without pipeline stages: as one process holds it."""
        return dataclasses.replace(self, preset=None, pattern=self.pattern.replace("|", ""))


def padded_vocab_size(model: ModelConfig, vocab_size: int) -> int:
    """Rows of the embedding: vocab_size, padded."""
    multiple = max(model.make_vocab_size_divisible_by, 1)  # less is a problem by itself
    return -(-vocab_size // multiple) * multiple


def model_problems(
    model: ModelConfig, parallel: ParallelConfig, vocab_size: int | None = None
) -> list[str]:
    """Everything that keeps this model from being built in this layout; nothing is built."""
    values, problems = _read_megatron(model)
    vocab_size = vocab_size or model.vocab_size
    broken = pattern_problems(model.pattern)
    counts = take_counts(values)
    problems += counts + broken + range_problems(values)
    if not broken:
        pattern = parse_pattern(model.pattern)
        if not counts:
            problems += shape_problems(pattern, values, rotary=model.position_embedding == "rope")
            problems += lost_problems(pattern, values)
        stages = (parallel.pipeline_model_parallel_size, parallel.virtual)
        problems += stage_problems(pattern, *stages)
        problems += layout_problems(
            pattern,
            values,
            parallel,
            seq_length=model.seq_length,
            padded_vocab=padded_vocab_size(model, vocab_size) if vocab_size else None,
        )
        if model.tie_embeddings and pattern.mtp_depths and stages[0] > 1:
            problems.append(
                "model.tie_embeddings with multi-token prediction (after '/' in model.pattern) "
                f"does not go with pipeline_model_parallel_size {stages[0]}: the last stage has "
                "the embedding twice and cannot save it; set one of them to false or 1"
            )
    problems += _position_problems(model, values)
    if model.qk_norm_over == "all_heads":
        problems += _all_heads_problems(values, parallel.tensor_model_parallel_size)
    if model.rope_scaling is not None:
        problems += _scaling_problems(model)
    for name in ("seq_length", "make_vocab_size_divisible_by", "vocab_size"):
        value = getattr(model, name)
        if value is not None and value < 1:
            problems.append(f"model.{name} must be at least 1, got {value}")
    if not 0 < model.rotary_percent <= 1:
        problems.append(
            f"model.rotary_percent is a share of each head, above 0 and at most 1; got "
            f"{model.rotary_percent}; position_embedding none rotates nothing"
        )
    return problems


def _read_megatron(model: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """Values of `model.megatron`, and every problem with them."""
    own = {f.name for f in dataclasses.fields(ModelConfig)} - {"megatron"}
    return read_megatron(model.megatron, own, multi_latent="+" in model.pattern)


def _all_heads_problems(values: dict[str, Any], tp: int) -> list[str]:
    problems, groups = [], values.get("num_query_groups")
    if groups and groups % tp:
        problems.append(
            f"model.qk_norm_over all_heads needs num_query_groups ({groups}) to be a multiple of "
            f"tensor_model_parallel_size {tp}; use fewer tensor-parallel processes"
        )
    if not values.get("qk_layernorm"):
        problems.append("model.qk_norm_over all_heads needs model.megatron.qk_layernorm; set it")
    if values.get("normalization", "RMSNorm") != "RMSNorm" or values.get(
        "layernorm_zero_centered_gamma"
    ):
        problems.append(
            "model.qk_norm_over all_heads is a plain RMSNorm; remove normalization and "
            "layernorm_zero_centered_gamma, or normalize each head"
        )
    return problems


def _position_problems(model: ModelConfig, values: dict[str, Any]) -> list[str]:
    """Settings of positions, and of norms of heads, that the attention of this model ignores."""
    problems, latent = [], "+" in model.pattern
    if latent and model.qk_norm_over == "all_heads":
        problems.append(
            "model.qk_norm_over all_heads does not reach multi-latent attention, which normalizes "
            "what it compresses to; remove it"
        )
    if latent and model.position_embedding == "none":
        problems.append(
            "model.position_embedding none does not reach multi-latent attention, which has its "
            "own rotary part; remove it"
        )
    yarn = latent and values.get("rope_type", "rope") != "rope"
    if model.rotary_percent != 1 and (yarn or model.position_embedding == "none"):
        why = "rope_type yarn rotates all" if yarn else "position_embedding is none"
        problems.append(
            f"model.rotary_percent {model.rotary_percent} would change nothing here: {why}; "
            "remove it"
        )
    return problems


def _scaling_problems(model: ModelConfig) -> list[str]:
    if "+" in model.pattern:
        return [
            "model.rope_scaling does not reach multi-latent attention; set rope_type yarn, "
            "rotary_scaling_factor and original_max_position_embeddings of model.megatron"
        ]
    if model.position_embedding == "none" or "*" not in model.pattern:
        return [
            "model.rope_scaling has nothing to stretch: no layer of this model rotates queries and "
            "keys; remove it, or set position_embedding to rope"
        ]
    return []


def transformer_config(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    params_dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
) -> TransformerConfig:
    """megatron-core's config, with settings that need neither Transformer Engine nor apex.

    Args:
        model, parallel: sections of a run file.
        params_dtype: type of weights and activations: float32, bfloat16 or float16.
        deterministic: forbid kernels whose sums depend on timing.

    Raises:
        ConfigError: every problem found, megatron-core's own refusals included.
    """
    problems = model_problems(model, parallel)
    if problems:
        raise ConfigError(problems)
    pattern = parse_pattern(model.pattern)
    kind = MLATransformerConfig if pattern.has("+") else TransformerConfig
    settings = _defaults(model, pattern)
    settings |= _read_megatron(model)[0]
    settings |= _owned(model, parallel, pattern, params_dtype, deterministic)
    try:
        config = kind(**settings)
    except (ValueError, AssertionError, RuntimeError, ImportError) as error:
        raise ConfigError(
            f"model.megatron: megatron-core refuses these settings: {error}"
        ) from error
    note_concentration(config, model.rope_scaling)
    config.qk_norm_over = model.qk_norm_over
    # Sums of long BF16 products stay FP32 on the GPU (nothing to do with the formats themselves).
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return config


def _defaults(model: ModelConfig, pattern: Pattern) -> dict[str, Any]:
    """Settings that `model.megatron` may change."""
    settings: dict[str, Any] = {
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "num_attention_heads": 1,  # megatron-core wants a number even without attention
    }
    if model.init_std is not None:
        settings["init_method_std"] = model.init_std
    if pattern.has("E"):
        settings["moe_token_dispatcher_type"] = "alltoall"
    if pattern.has("+"):
        settings |= {"rope_type": "rope", "rotary_base": model.rotary_base}
        settings["rotary_percent"] = model.rotary_percent
    return settings


def _owned(
    model: ModelConfig,
    parallel: ParallelConfig,
    pattern: Pattern,
    params_dtype: torch.dtype,
    deterministic: bool,
) -> dict[str, Any]:
    """Settings that follow from other sections, or that only one value is right for."""
    sizes = {
        name: getattr(parallel, name)
        for name in (f.name for f in dataclasses.fields(ParallelConfig))
        if name.endswith("_size") or name == "sequence_parallel"
    }
    interleaved = parallel.virtual > 1
    return sizes | {
        "num_layers": len(pattern.layers),
        "mtp_num_layers": pattern.mtp_depths or None,
        "multi_latent_attention": pattern.has("+"),
        "is_hybrid_model": True,
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "bf16": params_dtype is torch.bfloat16,
        "fp16": params_dtype is torch.float16,
        "deterministic_mode": deterministic and torch.cuda.is_available(),
        # The default, batch_p2p_comm=True, gives wrong gradients under the interleaved schedule.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "moe_grouped_gemm": pattern.has("E"),
        "transformer_impl": "local",
        # Not None: this is what makes megatron-core's schedules mark the first micro-batch of a
        # step (MegatronModule.set_is_first_microbatch), after which weights are quantized anew.
        "quant_recipe": RecipeConfig.from_config_dict({"matchers": {}, "configs": {}}),
        "use_cpu_initialization": False,
        "gradient_accumulation_fusion": False,  # its constructor needs apex; ours needs none
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
    }
