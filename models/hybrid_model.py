# SPDX-License-Identifier: Apache-2.0
"""The one model class, and how its pipeline stages are built."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid import hybrid_model
from torch import Tensor

from fused_ops.cross_entropy import VocabShard, cross_entropy
from models import micro_batch
from models.adopt import adopt
from models.config import ModelConfig, padded_vocab_size
from models.documents import document_boundaries
from models.embedding import Embedding
from models.layer_specs import stack_spec
from models.parallel_linear import GemmModule, OutputLayer
from models.pattern import parse_pattern, staged_pattern
from models.prediction import own_prediction_loss
from models.rotary import scaled_frequencies


class HybridModel(hybrid_model.HybridModel):
    """megatron-core's HybridModel with document boundaries and a cross entropy of less memory."""

    def forward(self, *args: Any, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Tensor:
        """See megatron-core's HybridModel: loss [b, s] if labels are given, else logits.

        Args:
            cu_seqlens: bounds of the documents in the flattened micro-batch, over whole sequences
                (context parallelism does not cut it); layers then do not look across them.
                megatron-core's `packed_seq_params` may carry them instead, as `cu_seqlens_q`.
        """
        if self._gemms and self._gemms[0].precision_state is not None:
            micro_batch.remember(self._gemms[0].precision_state.micro_batch)
        packed = kwargs.pop("packed_seq_params", None)
        cu_seqlens = packed.cu_seqlens_q if packed is not None else cu_seqlens
        if cu_seqlens is not None:
            ids = args[0] if args else kwargs["input_ids"]
            length = ids.shape[1] * self.pg_collection.cp.size()
            kwargs["packed_seq_params"] = document_boundaries(
                cu_seqlens, ids.shape[0], length, ids.device
            )
        with own_prediction_loss():
            return super().forward(*args, **kwargs)

    @property
    def _gemms(self) -> list[GemmModule]:
        found = self.__dict__.get("_gemm_modules")
        if found is None:
            found = [module for module in self.modules() if isinstance(module, GemmModule)]
            self.__dict__["_gemm_modules"] = found
        return found

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """labels [b, s], logits [s, b, vocabulary of this rank] -> FP32 loss [b, s]."""
        loss = cross_entropy(
            logits,
            labels.transpose(0, 1).contiguous(),
            shard=self._vocab_shard(logits.shape[-1]),
            overwrite=True,  # nothing reads the logits after the loss
        )
        return loss.transpose(0, 1).contiguous()

    def _vocab_shard(self, width: int) -> VocabShard | None:
        group = self.tp_group
        if group.size() == 1:
            return None

        def reduce_max(tensor: Tensor) -> None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)

        def reduce_sum(tensor: Tensor) -> None:
            dist.all_reduce(tensor, group=group)

        return VocabShard(group.rank() * width, reduce_max, reduce_sum)


def build_model(
    model: ModelConfig, config: Any, pg_collection: Any, vocab_size: int
) -> list[HybridModel]:
    """This rank's part of the model: one chunk for each virtual pipeline stage, all in BF16.

    Args:
        model: section of the run file.
        config: from `models.config.transformer_config`.
        pg_collection: megatron-core's ProcessGroupCollection.
        vocab_size: of the data; the embedding is padded (`padded_vocab_size`).
    """
    virtual = config.virtual_pipeline_model_parallel_size or 1
    pattern = staged_pattern(
        parse_pattern(model.pattern), config.pipeline_model_parallel_size, virtual
    )
    pipeline = pg_collection.pp
    chunks = []
    for stage in range(virtual):
        first = pipeline.rank() == 0 and stage == 0
        last = pipeline.rank() == pipeline.size() - 1 and stage == virtual - 1
        chunk = HybridModel(
            config,
            stack_spec(config),
            padded_vocab_size(model, vocab_size),
            model.seq_length,
            hybrid_layer_pattern=pattern,
            position_embedding_type="none" if "+" in pattern else model.position_embedding,
            rotary_base=model.rotary_base,
            rotary_percent=model.rotary_percent,
            share_embeddings_and_output_weights=model.tie_embeddings,
            pre_process=first,
            post_process=last,
            pg_collection=pg_collection,
            vp_stage=stage if virtual > 1 else None,
        )
        if last:
            adopt(chunk.output_layer, OutputLayer)
        if hasattr(chunk, "embedding") and not model.tie_embeddings:
            adopt(chunk.embedding.word_embeddings, Embedding)
        stretch_rotary(chunk, model)
        chunks.append(chunk)
    return chunks


def stretch_rotary(owner: Any, model: ModelConfig) -> None:
    """Apply `model.rope_scaling` to the frequencies of `owner.rotary_pos_emb`, where there are."""
    rotary = getattr(owner, "rotary_pos_emb", None)
    if rotary is not None and model.rope_scaling is not None:
        rotary.inv_freq = scaled_frequencies(rotary.inv_freq, model.rope_scaling, model.rotary_base)


def sizes(chunks: list[HybridModel]) -> dict[torch.dtype, int]:
    """Parameters of these chunks by dtype."""
    count: dict[torch.dtype, int] = {}
    for parameter in {id(p): p for chunk in chunks for p in chunk.parameters()}.values():
        count[parameter.dtype] = count.get(parameter.dtype, 0) + parameter.numel()
    return count
