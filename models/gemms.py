# SPDX-License-Identifier: Apache-2.0
"""Every GEMM of a model, from its pattern and configuration alone: global name and shape.

Names use megatron-core's attributes below a position that counts over the whole model, whatever
pipeline stage holds it: `layers.7.self_attention.linear_qkv`, `layers.8.mlp.experts.linear_fc1`,
`mtp.0.eh_proj`, `mtp.0.layers.1.mlp.linear_fc2`. A position is one symbol of the pattern; `|` and
the part after `/` (multi-token prediction) do not count.
"""

from dataclasses import dataclass
from typing import Any

from models.pattern import parse_pattern


@dataclass(frozen=True, kw_only=True)
class GemmShape:
    """One linear layer: weight [n, k], three GEMMs (fprop, dgrad, wgrad) of 2 k n FLOPs a token."""

    name: str
    """Global name."""
    position: int | None
    """Place in the pattern; None for multi-token prediction."""
    symbol: str
    """Pattern symbol of its layer; "/" for the projection of a prediction depth."""
    k: int
    """Input features of the whole weight, before any parallel split."""
    n: int
    """Output features of the whole weight."""
    copies: int = 1
    """Number of weights: the experts of a layer, else 1."""
    calls: int = 1
    """How often one token passes: the router's top-k, the depths of a repeated MTP layer."""
    bias: bool = False
    """Whether each weight has a bias [n]."""

    @property
    def flops(self) -> int:
        """FLOPs a token of one of the three GEMMs."""
        return 2 * self.k * self.n * self.calls

    @property
    def parameters(self) -> int:
        """Elements of all copies, bias included."""
        return self.copies * (self.k * self.n + (self.n if self.bias else 0))


def gemm_modules(pattern: str, config: Any) -> list[GemmShape]:
    """The linear layers of the model in order, multi-token prediction last.

    Args:
        pattern: the model's pattern.
        config: a megatron-core TransformerConfig, or anything with its attributes.
    """
    parsed = parse_pattern(pattern)
    modules = []
    for position, symbol in enumerate(parsed.layers):
        modules += _layer(config, symbol, f"layers.{position}", position)
    repeated = bool(parsed.mtp_depths and config.mtp_use_repeated_layer)
    calls = parsed.mtp_depths if repeated else 1
    for depth in range(1 if repeated else parsed.mtp_depths):
        hidden = config.hidden_size
        modules.append(
            GemmShape(
                name=f"mtp.{depth}.eh_proj",
                position=None,
                symbol="/",
                k=2 * hidden,
                n=hidden,
                calls=calls,
            )
        )
        for index, symbol in enumerate(parsed.mtp):
            modules += _layer(config, symbol, f"mtp.{depth}.layers.{index}", None, calls)
    return modules


def _layer(
    config: Any, symbol: str, prefix: str, position: int | None, repeat: int = 1
) -> list[GemmShape]:
    shapes = {"*": _attention, "+": _latent_attention, "-": _mlp, "E": _experts, "M": _mamba}
    common: dict[str, Any] = {"position": position, "symbol": symbol}
    return [
        GemmShape(
            name=f"{prefix}.{name}",
            k=k,
            n=n,
            copies=extra.get("copies", 1),
            calls=repeat * extra.get("calls", 1),
            bias=extra.get("bias", False),
            **common,
        )
        for name, k, n, extra in shapes[symbol](config)
    ]


_Shape = tuple[str, int, int, dict[str, Any]]


def _attention(config: Any) -> list[_Shape]:
    hidden, bias = config.hidden_size, config.add_bias_linear
    query = config.num_attention_heads * config.kv_channels
    rows = query + 2 * config.num_query_groups * config.kv_channels
    if getattr(config, "attention_output_gate", False):
        rows += query
    return [
        ("self_attention.linear_qkv", hidden, rows, {"bias": bias or config.add_qkv_bias}),
        ("self_attention.linear_proj", query, hidden, {"bias": bias}),
    ]


def _latent_attention(config: Any) -> list[_Shape]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    query = heads * (config.qk_head_dim + config.qk_pos_emb_head_dim)
    latent = config.kv_lora_rank
    at = "self_attention."
    if config.q_lora_rank is None:
        shapes: list[_Shape] = [(at + "linear_q_proj", hidden, query, {})]
    else:
        shapes = [
            (at + "linear_q_down_proj", hidden, config.q_lora_rank, {}),
            (at + "linear_q_up_proj", config.q_lora_rank, query, {}),
        ]
    up = heads * (config.qk_head_dim + config.v_head_dim)
    return [
        *shapes,
        (at + "linear_kv_down_proj", hidden, latent + config.qk_pos_emb_head_dim, {}),
        (at + "linear_kv_up_proj", latent, up, {}),
        (
            at + "linear_proj",
            heads * config.v_head_dim,
            hidden,
            {"bias": config.add_bias_linear},
        ),
    ]


def _mlp(config: Any) -> list[_Shape]:
    gate = 2 if config.gated_linear_unit else 1
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    bias = {"bias": config.add_bias_linear}
    return [("mlp.linear_fc1", hidden, gate * ffn, bias), ("mlp.linear_fc2", ffn, hidden, bias)]


def _experts(config: Any) -> list[_Shape]:
    gate = 2 if config.gated_linear_unit else 1
    hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
    latent = config.moe_latent_size
    width = latent or hidden
    routed = {"copies": config.num_moe_experts, "calls": config.moe_router_topk}
    routed["bias"] = config.add_bias_linear
    shapes: list[_Shape] = []
    if latent:
        shapes.append(("mlp.fc1_latent_proj", hidden, latent, {}))
        shapes.append(("mlp.fc2_latent_proj", latent, hidden, {}))
    shapes.append(("mlp.experts.linear_fc1", width, gate * ffn, routed))
    shapes.append(("mlp.experts.linear_fc2", ffn, width, routed))
    shared = config.moe_shared_expert_intermediate_size
    if shared:
        shapes.append(("mlp.shared_experts.linear_fc1", hidden, gate * shared, {}))
        shapes.append(("mlp.shared_experts.linear_fc2", shared, hidden, {}))
    return shapes


def mamba_inner(config: Any) -> tuple[int, int]:
    """Inner width and number of heads of a Mamba-2 mixer."""
    if config.mamba_num_heads is not None:
        return config.mamba_num_heads * config.mamba_head_dim, config.mamba_num_heads
    inner = 2 * config.hidden_size
    return inner, inner // config.mamba_head_dim


def _mamba(config: Any) -> list[_Shape]:
    inner, heads = mamba_inner(config)
    # z and x, then B and C of every group, then one dt a head
    rows = 2 * inner + 2 * config.mamba_num_groups * config.mamba_state_dim + heads
    return [
        ("mixer.in_proj", config.hidden_size, rows, {}),
        ("mixer.out_proj", inner, config.hidden_size, {}),
    ]
