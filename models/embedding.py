# SPDX-License-Identifier: Apache-2.0
"""megatron-core's token embedding, whose gradient on a GPU goes straight into its FP32 sum."""

from megatron.core.tensor_parallel import layers, mappings
from torch import Tensor

from fused_ops.embedding import embedding


class Embedding(layers.VocabParallelEmbedding):
    """Rows of the vocabulary that this rank holds; the output layer must not share the weight."""

    def forward(self, input_: Tensor) -> Tensor:
        """Token ids [b, s] -> [b, s, h], or [s of this rank, b, h] for sequence parallelism."""
        if input_.is_cuda and getattr(self.weight, "main_grad", None) is not None:
            return self.into_main_grad(input_)
        return super().forward(input_)

    def into_main_grad(self, ids: Tensor) -> Tensor:
        """As forward; the weight must have an FP32 main_grad."""
        ranks = self.tp_group.size()
        if ranks > 1:
            held = (ids >= self.vocab_start_index) & (ids < self.vocab_end_index)
            ids = (ids - self.vocab_start_index).masked_fill(~held, -1)
        out = embedding(ids, self.weight, gaps=ranks > 1)
        if self.reduce_scatter_embeddings:
            out = out.transpose(0, 1).contiguous()
            return mappings.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        if ranks > 1:
            return mappings.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        return out
