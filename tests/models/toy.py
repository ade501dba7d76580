# SPDX-License-Identifier: Apache-2.0
"""Small models for tests: process groups, building, one training step, gradients by name."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from fused_ops.main_grad import mark_zeroed
from models.config import ModelConfig, ParallelConfig, transformer_config
from models.hybrid_model import build_model
from pretrain.initialize import make_groups

SEQ, VOCAB, MICRO_BATCHES = 32, 200, 4
BASE = {"hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2, "ffn_hidden_size": 96}
MAMBA = {"mamba_num_groups": 2, "mamba_head_dim": 16, "mamba_state_dim": 16, "mamba_num_heads": 8}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}


def megatron_fields(pattern, **changes):
    """The fields that a toy of this pattern needs."""
    fields = dict(BASE)
    if "M" in pattern:
        fields |= MAMBA
    if "E" in pattern:
        fields |= EXPERTS
    if "+" in pattern:
        fields |= LATENT
        del fields["num_query_groups"]
    return fields | changes


def section(pattern, fields=None, **model):
    """The `model` section of a toy; `fields` are megatron-core's."""
    given = {"seq_length": SEQ, "vocab_size": VOCAB, "make_vocab_size_divisible_by": 8} | model
    return ModelConfig(
        pattern=pattern, megatron=megatron_fields(pattern, **(fields or {})), **given
    )


_layouts: list[ParallelConfig] = []
label_mask: torch.Tensor | None = None
"""Which labels count, [2, SEQ]; None for all."""


def init_groups(parallel=None):
    """Process groups for a layout, random states and megatron-core's global logs as new.

    The groups of the layout before are kept if it is the same one: each has threads of its own.
    """
    parallel = parallel or ParallelConfig()
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not (_layouts == [parallel] and parallel_state.is_initialized()):
        _initialize(parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    # megatron-core's logs of losses are process-global and sized by the first model.
    destroy_moe_metrics_tracker()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MTPLossLoggingHelper.tracker = {}
    return ProcessGroupCollection.use_mpu_process_groups()


def _initialize(parallel):
    make_groups(parallel, timeout_minutes=10)
    _layouts[:] = [parallel]


def make(pattern, *, parallel=None, dtype=torch.float32, model=None, vocab=VOCAB, **fields):
    """The chunks of a toy, and its config."""
    parallel = parallel or ParallelConfig()
    groups = init_groups(parallel)
    section = ModelConfig(
        pattern=pattern,
        seq_length=SEQ,
        make_vocab_size_divisible_by=8,
        megatron=megatron_fields(pattern, **fields),
        **(model or {}),
    )
    config = transformer_config(section, parallel, params_dtype=dtype)
    return build_model(section, config, groups, vocab), config


def batch(index, size=2):
    """Micro-batch number `index` of a fixed stream: tokens and labels [size, SEQ]."""
    generator = torch.Generator().manual_seed(1000 + index)
    tokens = torch.randint(0, VOCAB, (size, SEQ + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def positions(size=2):
    return torch.arange(SEQ).expand(size, -1).contiguous()


def loss_of(chunk, index=0, **extra):
    """Per-token loss [2, SEQ] of one micro-batch."""
    tokens, labels = batch(index)
    mask = torch.ones_like(tokens, dtype=torch.float32)
    return chunk(tokens, positions(), None, labels=labels, loss_mask=mask, **extra)


def _forward_step(iterator, model):
    tokens, labels = next(iterator)
    group = parallel_state.get_context_parallel_group()
    size, rank = group.size(), group.rank()
    place = positions()
    mask = torch.ones(tokens.shape) if label_mask is None else label_mask
    if size > 1:
        pick = [rank, 2 * size - 1 - rank]
        tokens, labels, place, mask = (
            torch.cat([t.chunk(2 * size, 1)[i] for i in pick], 1).contiguous()
            for t in (tokens, labels, place, mask)
        )
    output = model(tokens, place, None, labels=labels, loss_mask=mask)

    def loss(losses):
        total, count = (losses.float() * mask).sum(), mask.sum().to(torch.int)
        return total, count, {"loss": torch.stack([total.detach(), count.float()])}

    return output, loss


def step(chunks, config, written=False):
    """Forward and backward of MICRO_BATCHES micro-batches; the mean loss, gradients in main_grad.

    Data-parallel rank r of D takes the micro-batches r, r + D, ... `written`: the first gradient of
    a weight is written over the zeros of its sum.
    """
    rank = parallel_state.get_data_parallel_rank()
    ranks = parallel_state.get_data_parallel_world_size()
    config.calculate_per_token_loss = True
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    for chunk in wrapped:
        chunk.zero_grad_buffer()
        mark_zeroed(chunk.parameters(), written)
    mine = [batch(i) for i in range(rank, MICRO_BATCHES, ranks)]
    unset_num_microbatches_calculator()
    init_num_microbatches_calculator(0, None, 2 * MICRO_BATCHES, 2, ranks)
    data = [iter(list(mine)) for _ in wrapped]
    reports = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=data if len(data) > 1 else data[0],
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=len(mine),
        seq_length=SEQ,
        micro_batch_size=2,
        decoder_seq_length=SEQ,
        forward_only=False,
    )
    total = torch.zeros(2)
    for report in reports:
        total += report["loss"]
    dist.all_reduce(total)
    return float(total[0] / total[1])


def sharded(chunks):
    """The sharded state dict of all chunks."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = {}
    for i, chunk in enumerate(chunks):
        state[f"chunk{i}"] = chunk.sharded_state_dict(metadata={"dp_cp_group": group})
    return state


def save(chunks, folder):
    """A checkpoint of the weights."""
    if dist.get_rank() == 0:
        Path(folder).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(sharded(chunks), str(folder))


def load(chunks, folder):
    """Weights from a checkpoint of any layout."""
    state = dist_checkpointing.load(sharded(chunks), str(folder))
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"chunk{i}"])


def gradients_as_weights(chunks):
    """Put each gradient where its weight was, so that a checkpoint carries gradients."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
