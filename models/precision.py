# SPDX-License-Identifier: Apache-2.0
"""The precision of every GEMM, given to a built model.

Layers never ask what they are: `apply_precision` walks the built model once, names every linear
layer globally (megatron-core's own names are local to a pipeline stage) and hands it its recipe
from a `PrecisionPlan`. `PrecisionState` is what changes from call to call. What a layer does with a
recipe is in `models.parallel_linear`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from models.config import ModelConfig, ParallelConfig, padded_vocab_size, transformer_config
from models.flops import ModelShape
from models.gemms import GemmShape
from models.pattern import parse_pattern, staged_pattern
from models.precision_config import PrecisionConfig
from models.precision_plan import PrecisionPlan
from models.precision_state import PrecisionState

__all__ = [
    "PrecisionPlan",
    "PrecisionState",
    "apply_precision",
    "model_shape",
    "named_gemms",
    "named_parts",
    "plan_precision",
    "unwrap",
]


def model_shape(
    model: ModelConfig,
    *,
    vocab_size: int | None = None,
    params_dtype: torch.dtype = torch.bfloat16,
) -> ModelShape:
    """The shape of a model section in one process.

    Args:
        model: the model section.
        vocab_size: of the data, if the section leaves it open.
        params_dtype: type of weights and activations.

    Raises:
        ConfigError: megatron-core would not build the model.
    """
    # Pipeline cuts of the section are left out: one process has all layers.
    pattern = staged_pattern(parse_pattern(model.pattern.replace("|", "")))
    whole = replace(model, pattern=pattern, preset=None)
    return ModelShape(
        pattern=pattern,
        config=transformer_config(whole, ParallelConfig(), params_dtype=params_dtype),
        vocab_size=padded_vocab_size(model, vocab_size or model.vocab_size or 0),
        seq_length=model.seq_length,
        tie_embeddings=model.tie_embeddings,
    )


def plan_precision(
    model: ModelConfig,
    config: PrecisionConfig,
    *,
    vocab_size: int | None = None,
    params_dtype: torch.dtype = torch.bfloat16,
    total_samples: int | None = None,
) -> PrecisionPlan:
    """The plan of a model that is not built; arguments as `model_shape` and `PrecisionPlan`."""
    shape = model_shape(model, vocab_size=vocab_size, params_dtype=params_dtype)
    return PrecisionPlan(config, shape, total_samples)


def apply_precision(
    chunks: Sequence[torch.nn.Module],
    config: PrecisionConfig,
    state: PrecisionState,
    *,
    total_samples: int | None = None,
) -> PrecisionPlan:
    """Name every linear layer of this process and give it its recipe.

    Args:
        chunks: the model's chunks on this process, wrapped or not.
        config: the precision section.
        state: the process's state object.
        total_samples: samples of the whole run; needed with a schedule.

    Raises:
        ConfigError: the section contradicts itself or the model.
        AssertionError: the built model and the table of its linear layers (`models.gemms`) differ.
    """
    models = [unwrap(chunk) for chunk in chunks]
    first = models[0]
    shape = ModelShape(
        pattern=first.hybrid_layer_pattern,
        config=first.config,
        vocab_size=first.vocab_size,
        seq_length=first.max_sequence_length,
        tie_embeddings=first.share_embeddings_and_output_weights,
    )
    plan = PrecisionPlan(config, shape, total_samples, state.nonfinite.device)
    found = [pair for model in models for pair in named_gemms(model)]
    _assert_complete(plan.modules, models, found)
    state.check_finite = config.check_finite
    plan.bind(found, state)
    return plan


def unwrap(chunk: torch.nn.Module) -> Any:
    """The HybridModel inside data-parallel and 16-bit wrappers."""
    model: Any = chunk
    while not hasattr(model, "hybrid_layer_pattern"):
        model = model.module
    return model


def named_gemms(model: Any) -> Iterator[tuple[str, Any]]:
    """The linear layers of one chunk by global name; those that take no recipe included."""
    plain = (ColumnParallelLinear, RowParallelLinear, torch.nn.Linear)
    for name, module in named_parts(model):
        if hasattr(module, "gemm_name") or isinstance(module, plain):
            yield name, module


def named_parts(model: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module in the layers of one chunk by global name, of multi-token prediction too."""
    layers = [(f"layers.{layer.layer_number - 1}", layer) for layer in model.decoder.layers]
    layers += [(f"mtp.{depth.layer_number - 1}", depth) for depth in _prediction_layers(model)]
    for prefix, layer in layers:
        for name, module in layer.named_modules():
            yield f"{prefix}.{name}".replace("mtp_model_layer.", ""), module


def _prediction_layers(model: Any) -> Iterable[Any]:
    block = getattr(model, "mtp", None)
    return block.layers if block is not None else ()


def _assert_complete(
    modules: Sequence[GemmShape], models: Sequence[Any], found: Sequence[tuple[str, Any]]
) -> None:
    """The table and the model are two descriptions of one thing: they must not differ."""
    positions = {layer.layer_number - 1 for model in models for layer in model.decoder.layers}
    mtp = any(_prediction_layers(model) for model in models)
    expected = {
        module.name
        for module in modules
        if (mtp if module.position is None else module.position in positions)
    }
    names = [name for name, _ in found]
    plain = [name for name, module in found if not hasattr(module, "gemm_name")]
    differences = {
        "in the model but not in the table": sorted(set(names) - expected),
        "in the table but not in the model": sorted(expected - set(names)),
        "built twice": sorted({name for name in names if names.count(name) > 1}),
        "without a recipe of their own": plain,
    }
    text = "; ".join(f"{what}: {', '.join(v[:6])}" for what, v in differences.items() if v)
    assert not text, f"precision table and built model differ: {text}"
