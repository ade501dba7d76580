# SPDX-License-Identifier: Apache-2.0
"""The loss of multi-token prediction, weighted alike in every layout, and within documents.

A label that is further ahead counts in fewer places, and its loss is weighted up for that.
megatron-core takes both counts on each rank by itself, so under context parallelism the weight
depends on how the labels that count are spread. Here they are those of the whole micro-batch.

With document boundaries a token looks ahead as far as its document goes: what would come from the
next one is zero, and does not count. megatron-core can do so for its own packing alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid import hybrid_model
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from torch import Tensor

from models.attention import zigzag_positions
from models.documents import Documents


def prediction_loss(
    hidden_states: Tensor,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    output_layer: Callable[..., tuple[Tensor, Any]],
    output_weight: Tensor | None,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    config: Any,
    cp_group: dist.ProcessGroup | None = None,
    packed_seq_params: Documents | None = None,
    **unused: Any,
) -> Tensor:
    """The main hidden states, which pass the gradient of the predictions' losses on.

    Args:
        hidden_states: [(1 + depths) * s, b, h], those of the main model first.
        labels, loss_mask: [b, s] of the main model; mask None: all count.
        output_layer, output_weight, runtime_gather_output: what turns states into logits.
        compute_language_model_loss: labels and logits -> loss [b, s].
        config: with mtp_num_layers, mtp_loss_scaling_factor, mtp_detach_heads and
            calculate_per_token_loss.
        cp_group: ranks that share the sequences.
        packed_seq_params: the documents, which a label must not come from another of.
        unused: what megatron-core's function of this signature: takes besides.
    """
    states, *predictions = hidden_states.chunk(1 + config.mtp_num_layers)
    if labels is None:
        return states
    mask = torch.ones_like(labels) if loss_mask is None else loss_mask
    if config.mtp_detach_heads:
        weight = output_layer.weight if output_weight is None else output_weight  # type: ignore[attr-defined]
        output_weight = weight.detach()
    counted = _count(mask, cp_group)
    scale = config.mtp_loss_scaling_factor / config.mtp_num_layers
    for prediction in predictions:
        labels = one_ahead(labels, packed_seq_params, cp_group)
        mask = one_ahead(mask, packed_seq_params, cp_group)
        logits, _ = output_layer(
            prediction, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        loss = compute_language_model_loss(labels, logits) * mask
        here = _count(mask, cp_group).clamp(min=1)
        share = counted / here if config.calculate_per_token_loss else 1.0 / here
        states = MTPLossAutoScaler.apply(states, scale * share * loss)
    return states


def one_ahead(
    tensor: Tensor, documents: Documents | None, cp_group: dist.ProcessGroup | None
) -> Tensor:
    """[b, s] of this rank -> what the next token has; 0 where a sequence or a document ends."""
    moved, _ = roll_tensor(tensor, cp_group=cp_group)
    if documents is None:
        return moved
    ids = documents.bounds.ids
    goes_on = torch.zeros_like(ids, dtype=torch.bool)
    goes_on[:, :-1] = ids[:, 1:] == ids[:, :-1]
    if cp_group is not None and cp_group.size() > 1:
        own = zigzag_positions(tensor.shape[1], cp_group.size(), cp_group.rank(), ids.device)
        goes_on = goes_on[:, own]
    return torch.where(goes_on, moved, torch.zeros_like(moved))


def _one_ahead_in_layers(
    tensor: Tensor,
    shifts: int,
    dims: int,
    packed_seq_params: Documents,
    cp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """In place of megatron-core's roll of packed sequences, which prediction layers take."""
    assert (shifts, dims) == (-1, -1), "tokens are looked up one ahead, along the sequence"
    moved = one_ahead(tensor, packed_seq_params, cp_group)
    return moved, moved.sum()


def _count(mask: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Labels that count, over the ranks that share the sequences."""
    count = mask.sum()
    if group is not None and group.size() > 1:
        dist.all_reduce(count, group=group)
    return count


@contextmanager
def own_prediction_loss() -> Iterator[None]:
    """Inside, megatron-core's model takes this loss, and these documents, for its predictions."""
    before = hybrid_model.process_mtp_loss, multi_token_prediction._roll_tensor_packed_seq
    hybrid_model.process_mtp_loss = prediction_loss
    multi_token_prediction._roll_tensor_packed_seq = _one_ahead_in_layers
    try:
        yield
    finally:
        hybrid_model.process_mtp_loss = before[0]
        multi_token_prediction._roll_tensor_packed_seq = before[1]
