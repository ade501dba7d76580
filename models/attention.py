# SPDX-License-Identifier: Apache-2.0
"""Core attention, over whole sequences or cut ones, and attention layers around it."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker, mappings
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import attention as attention_layers, multi_latent_attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.autograd.function import FunctionCtx

from fused_ops.attention import Visible, attention
from fused_ops.rope import rope, split_rope
from models.comm import is_distributed
from models.documents import Documents, document_ids
from models.generation.cache import CacheStep
from models.parallel_linear import ColumnParallelLinear


def zigzag_order(ranks: int) -> list[int]:
    """Which piece of the gathered sequence comes first, second, ...

    Context parallelism cuts a sequence into 2 * ranks pieces and gives rank r the pieces r and
    2 * ranks - 1 - r, so that causal attention costs every rank the same. Gathering puts both
    pieces of a rank together; piece i of the sequence is then at zigzag_order(ranks)[i].
    """
    first = [2 * rank for rank in range(ranks)]
    second = [2 * rank + 1 for rank in reversed(range(ranks))]
    return first + second


def zigzag_positions(length: int, ranks: int, rank: int, device: torch.device) -> Tensor:
    """Global positions of the `length` tokens that rank holds, int64 [length]."""
    half = length // 2
    piece = torch.arange(half, device=device)
    return torch.cat([piece + rank * half, piece + (2 * ranks - 1 - rank) * half])


class _GatherSequence(torch.autograd.Function):
    """[s / ranks, ...] -> [s, ...] in the order of the sequence; backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        full = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(full, x.contiguous(), group=group)
        pieces = full.chunk(2 * group.size())
        return torch.cat([pieces[i] for i in zigzag_order(group.size())])

    @staticmethod
    def backward(ctx: FunctionCtx, dy: Tensor) -> tuple[Tensor, None]:
        group = ctx.group  # type: ignore[attr-defined]
        order = zigzag_order(group.size())
        pieces = dy.chunk(len(order))
        full = torch.cat([pieces[order.index(i)] for i in range(len(order))])
        part = full.new_empty(full.shape[0] // group.size(), *full.shape[1:])
        dist.reduce_scatter_tensor(part, full, group=group)
        return part, None


class CoreAttention(MegatronModule):
    """softmax(Q K^T) V with causal mask, for grouped queries, context parallelism and documents.

    Keys and values are not repeated for the queries of a group. With context parallelism the keys
    and values of the whole sequence are gathered. The signature is megatron-core's.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        if config.softmax_type not in ("vanilla", "learnable"):
            raise ValueError(
                f"softmax_type {config.softmax_type!r} is not built here; use 'vanilla' or "
                "'learnable' (attention sinks)"
            )
        if attn_mask_type is not AttnMaskType.causal:
            raise ValueError(f"attention masks are causal here, got {attn_mask_type}")
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.layer_number = layer_number
        self.window = config.window_size if windowed else None
        self.scale = softmax_scale
        self.cp_group = pg_collection.cp if is_distributed(pg_collection.cp) else None
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.tp_group = pg_collection.tp
        self.softmax_offset = self._sinks(config) if config.softmax_type == "learnable" else None

    def _sinks(self, config: Any) -> torch.nn.Parameter:
        """One logit a head of this rank that no key has: it takes weight from the values."""
        heads = config.num_attention_heads // self.tp_group.size()
        sinks = torch.empty(heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
        if config.perform_initialization:
            config.init_method(sinks)
        parameter = torch.nn.Parameter(sinks)
        set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        return parameter

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [s, b, heads, d], key and value [s, b, groups, d] -> [s, b, heads * d_value]."""
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported; pass None")
        if isinstance(packed_seq_params, CacheStep):
            return self._attend_cached(query, key, value, packed_seq_params)
        dropout = self.dropout if self.training else 0.0
        ids = document_ids(packed_seq_params)
        if self.cp_group is not None:
            key = _GatherSequence.apply(key, self.cp_group)
            value = _GatherSequence.apply(value, self.cp_group)
        if self.softmax_offset is not None:
            mask = self._mask(query, key.shape[0], ids)
            return self._attend_with_sinks(query, key, value, mask, dropout)
        if self.cp_group is not None:
            visible = Visible(mask=self._mask(query, key.shape[0], ids))
        else:
            visible = Visible(
                documents=None if ids is None else packed_seq_params.bounds,
                window=None if self.window is None else self.window[0],
            )
        with self._random_state(dropout):
            return attention(query, key, value, visible, dropout=dropout, scale=self.scale)

    def _attend_cached(self, query: Tensor, key: Tensor, value: Tensor, step: CacheStep) -> Tensor:
        """The new tokens of several sequences, [tokens, 1, heads, d], see what their caches hold.

        Keys and values [tokens, 1, groups, d] are put there first. -> [tokens, 1, heads * d_value].
        """
        out = query.new_empty(query.shape[0], query.shape[2] * value.shape[-1])
        for group in step.groups:
            new_query, new_key, new_value = (t[:, 0][group.rows] for t in (query, key, value))
            window = None if self.window is None else self.window[0]
            keys, values, first = step.cache.extend(
                self.layer_number, group, new_key, new_value, window
            )
            position = torch.arange(group.past, group.past + group.new, device=query.device)
            gap = position.unsqueeze(-1) - torch.arange(first, group.end, device=query.device)
            mask = gap >= 0
            if window is not None:
                mask = mask & (gap <= window)
            if self.softmax_offset is not None:
                seen = self._attend_with_sinks(new_query, keys, values, mask, 0.0)
            else:
                # From the start it is the training forward's own call.
                visible = Visible(mask=mask) if group.past else Visible(window=window)
                seen = attention(new_query, keys, values, visible, scale=self.scale)
            out[group.rows] = seen
        return out.unsqueeze(1)

    def _attend_with_sinks(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float
    ) -> Tensor:
        """query [s, b, heads, d], key and value [keys, b, groups, d] -> [s, b, heads * d_value].

        The sink's logit is one more column of the scores, whose value is zero. Scores in FP32.
        """
        assert self.softmax_offset is not None, "sinks are what this is for"
        dtype = query.dtype
        if not query.is_cuda:  # BF16 products are slow on a CPU
            query, key, value = query.float(), key.float(), value.float()
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, 1) for t in (key, value))
        scale = self.scale if self.scale is not None else query.shape[-1] ** -0.5
        scores = (query @ key.transpose(-1, -2)).float() * scale
        scores = scores.masked_fill(~mask, float("-inf"))
        sinks = self.softmax_offset.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        with self._random_state(dropout):
            weights = torch.nn.functional.dropout(weights, dropout, training=dropout > 0)
        out = weights.to(value.dtype) @ value
        return out.permute(2, 0, 1, 3).flatten(2).to(dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The sinks, cut over the tensor-parallel ranks like the heads."""
        if self.softmax_offset is None:
            return {}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )

    def _random_state(self, dropout: float) -> Any:
        # With sequence parallelism megatron-core has forked the state around the whole layer.
        if dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        return get_cuda_rng_tracker().fork()

    def _mask(self, query: Tensor, keys: int, documents: Tensor | None) -> Tensor:
        """Which key each query of this rank sees, bool [(b, 1,) s, keys]."""
        position = torch.arange(query.shape[0], device=query.device)
        if self.cp_group is not None:
            ranks, rank = self.cp_group.size(), dist.get_rank(self.cp_group)
            position = zigzag_positions(query.shape[0], ranks, rank, query.device)
        gap = position.unsqueeze(-1) - torch.arange(keys, device=query.device)
        mask = gap >= 0
        if self.window is not None:
            mask = mask & (gap <= self.window[0])
        if documents is None:
            return mask
        same = documents[:, position].unsqueeze(-1) == documents.unsqueeze(-2)
        return (mask & same).unsqueeze(1)


class MLASelfAttention(multi_latent_attention.MLASelfAttention):
    """Multi-latent attention whose down projections are layers with recipes too.

    megatron-core accepts three classes for them and no subclass; they are built as its own column
    parallel layer and adopted. It also forgets to sum the gradient of the rotary part of the keys,
    which all heads share, over the ranks that hold the heads; `_qkv_down_projection` does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(self, name):
                ColumnParallelLinear.adopt(getattr(self, name))

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """megatron-core's, without the object that names documents: it takes that for a packing
        whose tokens have no batch axis. Core attention gets it all the same."""
        if isinstance(packed_seq_params, CacheStep):
            # megatron-core makes the angles here, of positions from 0: these are of other ones.
            angles = self.rotary_pos_emb
            self.__dict__["rotary_pos_emb"] = packed_seq_params.angles_of(angles)
            try:
                return super().get_query_key_value_tensors(
                    hidden_states, key_value_states, position_ids, None, *args, **kwargs
                )
            finally:
                del self.__dict__["rotary_pos_emb"]
        if isinstance(packed_seq_params, Documents):
            packed_seq_params = None
        return super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, *args, **kwargs
        )

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [s, b, h] -> compressed queries, and [compressed | rotary] keys and values.

        The latter have all features (megatron-core would gather them itself, without the sum) and,
        with sequence parallelism, this rank's part of the tokens: gathering those is what sums.
        """
        queries, keys = super()._qkv_down_projection(hidden_states)
        group, latent = self.pg_collection.tp, self.config.kv_lora_rank
        if group.size() == 1:
            return queries, keys
        keys = mappings.gather_from_tensor_model_parallel_region(keys, group=group)
        if self.config.sequence_parallel:
            return queries, mappings.scatter_to_sequence_parallel_region(keys, group=group)
        rotary = mappings.copy_to_tensor_model_parallel_region(keys[..., latent:], group=group)
        return queries, torch.cat([keys[..., :latent], rotary], -1)


class SelfAttention(attention_layers.SelfAttention):
    """megatron-core's self attention; queries, keys and values are split and rotated in one op.

    megatron-core splits in one method and rotates later; here the first is told the angles. What
    the op has no form for stays upstream's: interleaved pairs, YaRN's factor, inference caches.
    """

    _angles: Tensor | None = None

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *args: Any,
        rotary_pos_emb: Any = None,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """See megatron-core's Attention. rotary_pos_emb: angles [s, 1, 1, rotary], or None."""
        skipped = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        own = (
            isinstance(rotary_pos_emb, Tensor)
            and not self.config.rotary_interleaved
            and self._yarn_concentration_factor == 1.0
            and inference_context is None
        )
        self._angles = rotary_pos_emb if own and not skipped else None
        try:
            return super().forward(
                hidden_states,
                attention_mask,
                *args,
                rotary_pos_emb=None if own else rotary_pos_emb,
                inference_context=inference_context,
                **kwargs,
            )
        finally:
            self._angles = None

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> Any:
        """[s, b, h] -> query [s, b, heads, d], key and value [s, b, groups, d], (gate)."""
        groups, heads = self.num_query_groups_per_partition, self.num_attention_heads_per_partition
        if output_gate or not split_qkv or self.config.num_query_groups < self.world_size:
            query, key, *others = super().get_query_key_value_tensors(
                hidden_states, key_value_states, output_gate, split_qkv
            )
            return (*self._rotated(query, key), *others)
        mixed, _ = self.linear_qkv(hidden_states)
        plain = self.q_layernorm is None and self.k_layernorm is None
        query, key, value = split_rope(
            mixed, self._angles if plain else None, heads // groups, self.key_hidden_size
        )
        if plain:
            return query, key, value
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return (*self._rotated(query, key), value)

    def _rotated(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        if self._angles is None:
            return query, key
        return rope(query, self._angles), rope(key, self._angles)
