# SPDX-License-Identifier: Apache-2.0
"""The loss of multi-token prediction, weighted alike in every layout.

A label that is further ahead counts in fewer places, and its loss is weighted up for that.
megatron-core takes both counts on each rank by itself, so under context parallelism the weight
depends on how the labels that count are spread. Here they are those of the whole micro-batch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.hybrid import hybrid_model
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, roll_tensor
from torch import Tensor


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
        labels, _ = roll_tensor(labels, cp_group=cp_group)
        mask, _ = roll_tensor(mask, cp_group=cp_group)
        logits, _ = output_layer(
            prediction, weight=output_weight, runtime_gather_output=runtime_gather_output
        )
        loss = compute_language_model_loss(labels, logits) * mask
        here = _count(mask, cp_group).clamp(min=1)
        share = counted / here if config.calculate_per_token_loss else 1.0 / here
        states = MTPLossAutoScaler.apply(states, scale * share * loss)
    return states


def _count(mask: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Labels that count, over the ranks that share the sequences."""
    count = mask.sum()
    if group is not None and group.size() > 1:
        dist.all_reduce(count, group=group)
    return count


@contextmanager
def own_prediction_loss() -> Iterator[None]:
    """Inside, megatron-core's model takes this loss for its predictions."""
    before = hybrid_model.process_mtp_loss
    hybrid_model.process_mtp_loss = prediction_loss
    try:
        yield
    finally:
        hybrid_model.process_mtp_loss = before
