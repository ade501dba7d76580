# SPDX-License-Identifier: Apache-2.0
"""The model of a checkpoint, run with one layer in memory at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factories,
    apply_factory_merges,
)
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from models.config import ModelConfig
from models.conversion.expected import factories_of
from models.conversion.sections import engine_config
from models.hybrid_model import stretch_rotary
from models.layer_specs import Stack, stack_spec
from models.pattern import parse_pattern


class Source(Protocol):
    """Where values come from: `pretrain.checkpoint.tensors.TensorReader` is one."""

    def read_region(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a tensor."""


class StreamedModel:
    """A checkpoint's model: `embed`, then `layer` for each position in order, then `head`.

    Computes in `dtype`, whatever the checkpoint's is. Needs the process groups of one process.
    """

    def __init__(
        self, section: ModelConfig, source: Source, groups: Any, dtype: torch.dtype = torch.float32
    ) -> None:
        self.section = section.unstaged
        self.pattern = parse_pattern(self.section.pattern)
        self.source, self.groups, self.dtype = source, groups, dtype
        self.config = engine_config(self.section, dtype)
        self.config.perform_initialization = False
        self._spec = stack_spec(self.config)
        self.rotary_pos_emb: RotaryEmbedding | None = None
        if section.position_embedding == "rope" and self.pattern.has("*"):
            self.rotary_pos_emb = RotaryEmbedding(
                kv_channels=self.config.kv_channels,
                rotary_percent=section.rotary_percent,
                rotary_base=section.rotary_base,  # type: ignore[arg-type]
                cp_group=groups.cp,
            )
            stretch_rotary(self, self.section)

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [batch, tokens] -> [tokens, batch, hidden]; reads the rows that occur."""
        hidden = self.config.hidden_size
        rows, place = ids.unique(return_inverse=True)
        table = torch.stack(
            [
                self.source.read_region("embedding.word_embeddings.weight", [row, 0], (1, hidden))[
                    0
                ]
                for row in rows.tolist()
            ]
        )
        return table.to(self.dtype)[place].transpose(0, 1).contiguous()

    @contextmanager
    def layer_module(self, position: int) -> Iterator[Stack]:
        """The layer at a position as a stack of one, with its weights."""
        stack = Stack(
            self.config,
            self._spec.submodules,
            pre_process=True,
            post_process=False,
            layer_type_list=[self.pattern.layers[position]],
            pp_layer_offset=position,
            pg_collection=self.groups,
        )
        self._fill(stack, "decoder.")
        stack.eval().requires_grad_(False)
        yield stack

    @torch.no_grad()
    def layer(
        self, position: int, hidden: Tensor, prepare: Callable[[Stack], None] | None = None
    ) -> Tensor:
        """[tokens, batch, hidden] -> the same, after the layer at `position`.

        `prepare` is called with the layer before it runs.
        """
        rotary = None if self.rotary_pos_emb is None else self.rotary_pos_emb(hidden.shape[0])
        with self.layer_module(position) as stack:
            if prepare is not None:
                prepare(stack)
            return stack(hidden, None, rotary_pos_emb=rotary)

    @torch.no_grad()
    def head(self, hidden: Tensor, vocab_size: int, rows: int = 8192) -> Tensor:
        """[tokens, batch, hidden] -> logits [batch, tokens, vocab_size], a slice of rows a time."""
        stack = Stack(
            self.config,
            self._spec.submodules,
            layer_type_list=[],
            pp_layer_offset=len(self.pattern.layers),
            pg_collection=self.groups,
        )
        self._fill(stack, "decoder.")
        hidden = stack.eval()(hidden, None).transpose(0, 1)
        name = "embedding.word_embeddings" if self.section.tie_embeddings else "output_layer"
        width = self.config.hidden_size
        parts = []
        for first in range(0, vocab_size, rows):
            count = min(rows, vocab_size - first)
            weight = self.source.read_region(f"{name}.weight", [first, 0], (count, width))
            parts.append(hidden @ weight.to(self.dtype).t())
        return torch.cat(parts, -1)

    def _fill(self, module: torch.nn.Module, prefix: str) -> None:
        """Weights of a module from the checkpoint, by its own sharded state dict."""
        metadata = {"dp_cp_group": self.groups.dp_cp}
        state = module.sharded_state_dict(  # type: ignore[operator]
            prefix=prefix, sharded_offsets=(), metadata=metadata
        )
        merges = factories_of(state)
        apply_factories(state)

        def value(entry: Any) -> Any:
            if isinstance(entry, ShardedTensor):
                shape = (1,) * entry.prepend_axis_num + tuple(entry.local_shape)
                read = self.source.read_region(entry.key, entry.global_offset, shape)
                return read.reshape(entry.local_shape).to(entry.dtype)
            return None if isinstance(entry, ShardedObject) else entry

        dict_list_map_inplace(value, state)
        state = apply_factory_merges(state, merges)
        plain = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        module.load_state_dict(plain)
