# SPDX-License-Identifier: Apache-2.0
"""What layers keep for their backward pass: bytes a token on one rank, by part.

Counted are tensors that autograd holds at the end of a forward pass: inputs of norms and
activations in the dtype of the run, and the operand that each linear layer keeps for wgrad, in
codes where the recipe quantizes it. Experts are taken to be evenly loaded. A Mamba layer is counted
with the fused kernel of mamba-ssm, which keeps its input and its output before the gate; the norm
behind it keeps the gated one.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fused_ops.linear import input_operands
from fused_ops.recipe import GemmRecipe, is_quantized
from models.config import ParallelConfig
from models.flops import ModelShape
from models.gemms import GemmShape, mamba_inner
from models.memory import DUPLICATED, ROW_PARALLEL, bytes_of, is_expert


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What of a layout decides how much of a token a rank keeps."""

    tp: int
    sp: bool
    etp: int
    element_size: int
    packed: bool = False
    """Whether codes are gathered, in the backward those of wgrad."""

    @classmethod
    def of(cls, parallel: ParallelConfig, element_size: int, communicate: str = "bf16") -> "Layout":
        """Of a run whose activations take `element_size` bytes."""
        tp = parallel.tensor_model_parallel_size
        return cls(
            tp=tp,
            sp=parallel.sequence_parallel,
            etp=parallel.expert_tensor_parallel_size or tp,
            element_size=element_size,
            packed=communicate == "packed",
        )

    @property
    def tokens(self) -> int:
        """Over how many ranks tokens between matrices are cut."""
        return self.tp if self.sp else 1


def saved_bytes(
    modules: Iterable[GemmShape],
    symbols: Iterable[str],
    shape: ModelShape,
    recipes: Mapping[str, GemmRecipe],
    layout: Layout,
) -> dict[str, float]:
    """Bytes a token of some layers, by part.

    Args:
        modules: their linear layers.
        symbols: their pattern symbols.
        shape: the model.
        recipes: of each linear layer by global name.
        layout: how they are cut.
    """
    parts: dict[str, float] = defaultdict(float)
    for module in modules:
        part, size = _operand(module, recipes[module.name], layout, shape.config)
        parts[part] += size
    for symbol in symbols:
        for part, elements in _tensors(symbol, shape, layout).items():
            parts[part] += elements * layout.element_size
    return dict(parts)


def _operand(
    module: GemmShape, recipe: GemmRecipe, layout: Layout, config: Any
) -> tuple[str, float]:
    """(part, bytes a token) of what a linear layer keeps of its input."""
    spec = recipe.spec("wgrad", "x")
    high = spec.is_high_precision and spec.source == "tensor"
    if spec.is_high_precision and not high:
        spec = recipe.spec("fprop", "x")  # kept in the codes of the forward
    each = layout.element_size if high else bytes_of(spec, layout.element_size)
    part = f"operands: {'high precision' if high else spec.format}"
    rows = module.name.endswith(ROW_PARALLEL)
    if is_expert(module):
        # Tokens of an expert are those of all tensor-parallel ranks, which the experts share.
        ranks = layout.tp // layout.etp * (layout.etp if rows else 1)
        return part, module.k * module.calls * each / max(ranks, 1)
    if rows:
        return part, module.k * each / layout.tp
    if module.name.endswith(DUPLICATED):
        return part, module.k * module.calls * each / layout.tokens
    if high and _shares_input(module, config):
        return part, 0.0
    # In high precision, and where codes move, the rank's part is kept and gathered again.
    moves = layout.packed and input_operands(recipe, backward=True) == ("fprop.x", "wgrad.x")
    own = high or (moves and is_quantized(recipe.fprop_x))
    return part, module.k * module.calls * each / (layout.tokens if own else 1)


def _shares_input(module: GemmShape, config: Any) -> bool:
    """Whether another layer keeps the very tensor that this one would."""
    if module.name.endswith("linear_kv_down_proj"):
        return True
    return module.name.endswith("shared_experts.linear_fc1")


def _tensors(symbol: str, shape: ModelShape, layout: Layout) -> dict[str, float]:
    """Elements a token that a layer keeps besides the operands, in the dtype of the run."""
    config = shape.config
    hidden = config.hidden_size / layout.tokens
    kept = {"norms": float(hidden)}
    if symbol == "*":
        kept |= _attention(config, layout.tp)
    elif symbol == "+":
        kept |= _latent_attention(config, layout)
    elif symbol == "-":
        kept["activations"] = _gate(config) * config.ffn_hidden_size / layout.tp
    elif symbol == "E":
        kept |= _experts(config, layout)
    elif symbol == "M":
        inner, heads = mamba_inner(config)
        rows = 2 * inner + 2 * config.mamba_num_groups * config.mamba_state_dim + heads
        kept["mamba"] = (rows + 2 * inner) / layout.tp
    elif symbol == "/":
        kept["norms"] = 3 * float(hidden)
    return kept


def _gate(config: Any) -> int:
    return 2 if config.gated_linear_unit else 1


def _attention(config: Any, tp: int) -> dict[str, float]:
    query = config.num_attention_heads * config.kv_channels / tp
    keys = config.num_query_groups * config.kv_channels / tp
    mixed = query + 2 * keys
    # Rotated or normalized queries and keys are new tensors; the values lie in the mixed one.
    return {"attention": mixed + (query + keys) + query}


def _latent_attention(config: Any, layout: Layout) -> dict[str, float]:
    heads = config.num_attention_heads / layout.tp
    width = config.qk_head_dim + config.qk_pos_emb_head_dim
    latent = config.kv_lora_rank + config.qk_pos_emb_head_dim + (config.q_lora_rank or 0)
    queries, keys, values = heads * width, heads * width, heads * config.v_head_dim
    return {"attention": latent / layout.tokens + queries + keys + 2 * values}


def _experts(config: Any, layout: Layout) -> dict[str, float]:
    topk, etp, experts = config.moe_router_topk, layout.etp, config.num_moe_experts
    spread = max(layout.tp // etp, 1) * etp  # of the features of an expert, and of its tokens
    kept = {
        # The router keeps its input; scores and probabilities are FP32.
        "router": config.hidden_size / layout.tokens
        + 3 * experts * 4 / layout.element_size / layout.tokens,
        "activations": topk * _gate(config) * config.moe_ffn_hidden_size / spread,
    }
    if config.moe_shared_expert_intermediate_size:
        shared = _gate(config) * config.moe_shared_expert_intermediate_size
        kept["activations"] += shared / layout.tp
    return kept
