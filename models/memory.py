# SPDX-License-Identifier: Apache-2.0
"""Memory of one rank by part, from the configuration alone: weights, gradients, optimizer.

What a layer keeps for its backward pass is in `models.saved`. Padding of buffers (a few kilobytes)
and what the device's own libraries take are left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fused_ops.recipe import is_quantized
from fused_ops.weight_operands import decodes_once, shares_codes
from models.config import ParallelConfig
from models.flops import MAMBA_CONV, ModelShape, head_norms, sinks
from models.gemms import GemmShape, mamba_inner
from models.pattern import parse_pattern, staged_pattern

ROW_PARALLEL = ("linear_proj", "linear_fc2", "out_proj")
DUPLICATED = ("fc1_latent_proj", "fc2_latent_proj")
_FP32 = 4
# FP32 masters and two moments; weights that are FP32 themselves are their own masters.
_OPTIMIZER = {True: 8, False: 12}


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Elements of the weights on one rank."""

    dense: int
    """In the dtype of the run, the same on the ranks of a data-parallel group."""
    experts: int
    """Of experts, the same on the ranks of an expert data-parallel group."""
    kept_fp32: int
    """A_log, D and dt_bias of Mamba layers: FP32 in every run."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.experts + self.kept_fp32


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """Over how many ranks the optimizer's states are spread."""

    dense: int
    """Data-parallel and context-parallel ranks."""
    experts: int
    """Ranks with the same experts."""


def sharing(parallel: ParallelConfig, world: int) -> Sharing:
    """How `world` processes share optimizer states; 1 each without the distributed optimizer."""
    if not parallel.use_distributed_optimizer:
        return Sharing(dense=1, experts=1)
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    return Sharing(
        dense=max(world // (tp * pp), 1),
        experts=max(world // parallel.expert_ranks, 1),
    )


def stage_symbols(shape: ModelShape, parallel: ParallelConfig, rank: int) -> list[tuple[int, str]]:
    """(position, symbol) of the main layers on rank `rank` of the pipeline, in order."""
    pipeline, virtual = parallel.pipeline_model_parallel_size, parallel.virtual
    text = staged_pattern(parse_pattern(shape.pattern), pipeline, virtual)
    stages = parse_pattern(text).stages
    found, position = [], 0
    for number, stage in enumerate(stages):
        if number % pipeline == rank:
            found += [(position + i, symbol) for i, symbol in enumerate(stage)]
        position += len(stage)
    return found


def rank_parameters(shape: ModelShape, parallel: ParallelConfig, rank: int) -> RankParameters:
    """Elements on rank `rank` of the pipeline."""
    config, pattern = shape.config, parse_pattern(shape.pattern)
    tp, last = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size - 1
    own = stage_symbols(shape, parallel, rank)
    positions = {position for position, _ in own}
    has_mtp = bool(pattern.mtp_depths) and rank == last
    modules = [
        m for m in shape.modules() if m.position in positions or (m.position is None and has_mtp)
    ]
    experts = sum(local_elements(m, parallel) for m in modules if is_expert(m))
    dense = sum(local_elements(m, parallel) for m in modules if not is_expert(m))
    kept = 0
    norm = config.hidden_size * (2 if config.normalization == "LayerNorm" else 1)
    small = [symbol for _, symbol in own]
    if has_mtp:
        depths = 1 if config.mtp_use_repeated_layer else pattern.mtp_depths
        small += list(pattern.mtp) * depths
        dense += 3 * norm * depths
    for symbol in small:
        rest, fp32 = _small(config, symbol, norm, tp)
        dense, kept = dense + rest, kept + fp32
    table = shape.vocab_size * config.hidden_size // tp
    dense += norm * (rank == last)
    dense += table * (rank == 0 or has_mtp)
    if rank == last and not (shape.tie_embeddings and (last == 0 or has_mtp)):
        dense += table  # the head, or the copy of a tied embedding
    return RankParameters(dense=dense, experts=experts, kept_fp32=kept)


def is_expert(module: GemmShape) -> bool:
    """Whether the weights are cut over expert-parallel ranks."""
    return ".mlp.experts." in module.name


def local_elements(module: GemmShape, parallel: ParallelConfig) -> int:
    """Elements of a linear layer on one rank, bias included."""
    weight = _weight_elements(module, parallel)
    if not module.bias:
        return weight
    if is_expert(module):
        return weight + module.copies // parallel.expert_model_parallel_size * module.n
    whole = module.name.endswith((*ROW_PARALLEL, *DUPLICATED))
    return weight + module.n // (1 if whole else parallel.tensor_model_parallel_size)


def _weight_elements(module: GemmShape, parallel: ParallelConfig) -> int:
    """The same of the weight alone."""
    if is_expert(module):
        etp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
        return module.copies // parallel.expert_model_parallel_size * (module.k * module.n // etp)
    tp = 1 if module.name.endswith(DUPLICATED) else parallel.tensor_model_parallel_size
    return module.k * module.n // tp


def _small(config: Any, symbol: str, norm: int, tp: int) -> tuple[int, int]:
    """(elements in the dtype of the run, elements kept FP32) besides linear layers."""
    count, kept = norm, 0
    if symbol in "*+":
        count += sinks(config) // tp
    if symbol == "*" and config.qk_layernorm:
        whole = getattr(config, "qk_norm_over", "head") != "head"  # over heads, which are cut
        count += head_norms(config) // (tp if whole else 1)
    elif symbol == "+" and config.qk_layernorm:
        count += config.kv_lora_rank + (config.q_lora_rank or 0)
    elif symbol == "E":
        count += config.num_moe_experts * (config.hidden_size + int(config.add_bias_linear))
        if config.moe_shared_expert_gate and config.moe_shared_expert_intermediate_size:
            count += config.hidden_size
    elif symbol == "M":
        inner, heads = mamba_inner(config)
        conv = inner + 2 * config.mamba_num_groups * config.mamba_state_dim
        count += (conv * (MAMBA_CONV + 1) + inner) // tp
        kept = 3 * heads // tp
    return count, kept


def state_bytes(
    parameters: RankParameters, shared: Sharing, *, element_size: int
) -> dict[str, float]:
    """Bytes of weights, gradients and optimizer on one rank.

    Args:
        parameters: of the rank.
        shared: from `sharing`.
        element_size: bytes of a weight in the dtype of the run.
    """
    each = _OPTIMIZER[element_size == _FP32]
    return {
        "weights": float(
            (parameters.dense + parameters.experts) * element_size + parameters.kept_fp32 * _FP32
        ),
        "gradients": float(parameters.total * _FP32),
        "optimizer": (
            (parameters.dense * each + parameters.kept_fp32 * _OPTIMIZER[True]) / shared.dense
            + parameters.experts * each / shared.experts
        ),
    }


def code_bytes(modules: Iterable[GemmShape], parallel: ParallelConfig, recipes: Any) -> float:
    """Bytes of the kept quantized forms of weights: as the operand of fprop, and of dgrad.

    On a GPU, where dgrad reads the forward's codes if they are those of its transpose, and keeps
    1 byte an element if that is exact.

    Args:
        modules: of one rank.
        recipes: recipe of each layer by global name.
    """
    total = 0.0
    for module in modules:
        recipe = recipes[module.name]
        elements = local_elements(module, parallel)
        total += elements * bytes_of(recipe.fprop_w, 0.0)
        if decodes_once(recipe):
            total += elements
        elif not shares_codes(recipe.fprop_w, recipe.dgrad_w):
            total += elements * bytes_of(recipe.dgrad_w, 0.0)
    return total


def path_bytes(
    modules: Iterable[GemmShape], parallel: ParallelConfig, shared: Sharing, recipes: Any
) -> float:
    """Bytes of the paths of weights whose oscillation is followed, on one rank: three FP32 numbers
    beside each master of a weight that the forward multiplies as codes.

    Args:
        modules: of the rank.
        shared: from `sharing`.
        recipes: recipe of each layer by global name.
    """
    total = 0.0
    for module in modules:
        if is_quantized(recipes[module.name].fprop_w):
            ranks = shared.experts if is_expert(module) else shared.dense
            total += 3 * _FP32 * _weight_elements(module, parallel) / ranks
    return total


def bytes_of(spec: Any, high: float) -> float:
    """Bytes of one element of an operand: of its code and its share of a block scale.

    high: what an operand takes that is not quantized.
    """
    if spec.is_high_precision:
        return high
    block = spec.block[0] * spec.block[1] if spec.block else 0
    scale = 4 if spec.scale == "fp32" else 1
    return (0.5 if spec.is_fp4 else 1.0) + (scale / block if block else 0.0)
