# SPDX-License-Identifier: Apache-2.0
"""One step: micro-batches through megatron-core's schedule, gradients finished, weights updated."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_batch_on_this_cp_rank

from fused_ops.main_grad import mark_zeroed
from models.precision import PrecisionState
from pretrain.cuda_graph import StepGraph
from pretrain.engine import Engine
from pretrain.optimizer import optimizer_parts, update
from pretrain.step_result import StepResult

MicroBatch = Mapping[str, Any]
_TENSORS = ("tokens", "labels", "loss_mask", "position_ids")


def train_step(
    engine: Engine,
    micro_batches: Sequence[MicroBatch],
    stop_requested: Callable[[], bool] = lambda: False,
    refuse: Callable[[float], bool] = lambda loss: False,
) -> StepResult:
    """Forward, backward and update over this rank's micro-batches of one global batch.

    The gradient is that of the mean loss over all counted tokens of the global batch, however it
    is cut into micro-batches and ranks. `stop_requested` is asked once
    the work is on its way, and its answer shared with the other ranks. `refuse` is asked with the
    loss before the update, and must answer the same on all of them.
    """
    state, optimizer, scheduler = engine.precision_state, engine.optimizer, engine.scheduler
    _zero_gradients(engine)
    sums = run_schedule(engine, micro_batches, forward_only=False)
    for chunk in engine.chunks:  # a replayed graph takes no marks away
        mark_zeroed(chunk.parameters(), False)
    engine.plan.end_step(engine.world.groups)

    flags = torch.stack([state.nonfinite.double().reshape(()), sums.new_tensor(stop_requested())])
    totals = torch.cat([sums, flags])
    dist.all_reduce(totals)
    loss_sum, tokens, nonfinite, stop = totals.tolist()
    loss = loss_sum / max(tokens, 1)
    scheduler.step(1)
    lr = learning_rate(optimizer)
    if refuse(loss):
        scheduler.step(-1)
        return StepResult(
            loss=loss,
            tokens=int(tokens),
            grad_norm=math.nan,
            lr=lr,
            updated=False,
            nonfinite_operand=bool(nonfinite),
            stop=bool(stop),
            refused=True,
        )

    if nonfinite:  # codes of such a tensor are finite: hand what it was on to the overflow check
        for chunk in engine.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                buffer.grad_data.fill_(math.inf)
    scale = loss_scale(optimizer)
    updated, grad_norm = update(optimizer, engine.clip_grad, engine.around_update())
    if updated:
        state.weights_changed()
    else:
        scheduler.step(-1)
    return StepResult(
        loss=loss,
        tokens=int(tokens),
        grad_norm=grad_norm,
        lr=lr,
        updated=updated,
        nonfinite_operand=bool(nonfinite),
        stop=bool(stop),
        overflow=not updated and scale is not None,
    )


def _zero_gradients(engine: Engine) -> None:
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
        mark_zeroed(chunk.parameters())
    engine.optimizer.zero_grad()
    engine.precision_state.nonfinite.zero_()


def run_schedule(
    engine: Engine,
    micro_batches: Sequence[MicroBatch],
    forward_only: bool,
    forward: Callable[..., Any] | None = None,
) -> torch.Tensor:
    """Drives megatron-core's pipeline schedule, interleaved or not; `forward` for `forward_step`.

    Returns float64 [2]: sum of losses and number of tokens of this rank's micro-batches. Summed
    over all ranks it is that of the global batch: each loss is counted once, on the last stage
    and the first of the tensor-parallel ranks.
    """
    batches = [prepare(engine, batch) for batch in micro_batches]
    plain = not forward_only and forward is None and not engine.plan.is_observed
    if engine.graph is not None and plain:
        return engine.graph(batches)
    return _through_schedule(engine, batches, forward_only, forward or forward_step)


def record_steps(engine: Engine) -> None:
    """From now on steps of the engine are one CUDA graph each, recorded when it is warm."""

    def work(batches: Sequence[dict[str, Any]]) -> torch.Tensor:
        return _through_schedule(engine, batches, False, forward_step)

    engine.graph = StepGraph(engine, work)


def _through_schedule(
    engine: Engine,
    micro_batches: Sequence[dict[str, Any]],
    forward_only: bool,
    forward: Callable[..., Any],
) -> torch.Tensor:
    iterators = [iter(micro_batches) for _ in engine.chunks]
    single = len(engine.chunks) == 1
    stored = get_forward_backward_func()(
        forward_step_func=partial(forward, engine.precision_state),
        data_iterator=iterators[0] if single else iterators,
        model=engine.chunks[0] if single else engine.chunks,
        num_microbatches=len(micro_batches),
        seq_length=engine.seq_length,
        micro_batch_size=engine.micro_batch_size,
        decoder_seq_length=engine.seq_length,
        forward_only=forward_only,
    )
    sums = torch.zeros(2, dtype=torch.float64, device=engine.world.device)
    if stored and engine.world.groups.tp.rank() == 0:
        sums += torch.stack([part["sums"] for part in stored]).sum(0)
    return sums


def prepare(engine: Engine, batch: MicroBatch) -> dict[str, Any]:
    """A micro-batch on the device, this context-parallel rank's part of it."""
    device = engine.world.device
    moved = {name: batch[name].to(device, non_blocking=True) for name in _TENSORS}
    if engine.world.groups.cp.size() > 1:
        moved = get_batch_on_this_cp_rank(
            moved, is_hybrid_cp=False, cp_group=engine.world.groups.cp
        )
    moved["index"] = batch["index"]
    moved["sample_ids"] = batch.get("sample_ids", [])
    cu_seqlens = batch.get("cu_seqlens")
    moved["packed"] = None if cu_seqlens is None else packed_sequence(cu_seqlens)
    return moved


def packed_sequence(cu_seqlens: torch.Tensor) -> PackedSeqParams:
    """megatron-core's description of documents that must not see each other.

    `cu_seqlens`: int32 [documents + 1], where each document starts in the flattened micro-batch; it
    stays on the CPU, where the model reads it without waiting for a device.
    """
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def forward_step(
    state: PrecisionState, batches: Iterator[dict[str, Any]], model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """One micro-batch through one chunk; what megatron-core's schedules call."""
    batch = next(batches)
    state.set_micro_batch(batch["index"])
    packed = {} if batch["packed"] is None else {"packed_seq_params": batch["packed"]}
    losses = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        **packed,
    )
    return losses, partial(loss_function, batch["loss_mask"])


def loss_function(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum of the losses that count, how many count, both as float64 to be summed over ranks).

    losses, loss_mask: [micro_batch, sequence].
    """
    counted = loss_mask.reshape(-1).float()
    total = (losses.reshape(-1).float() * counted).sum()
    tokens = counted.sum()
    sums = torch.stack([total.detach(), tokens]).double()
    return total, tokens.to(torch.int), {"sums": sums}


def learning_rate(optimizer: MegatronOptimizer) -> float:
    """The rate of groups that follow the schedule unchanged."""
    return float(next(g["lr"] for g in optimizer.param_groups if g.get("default_config", True)))


def loss_scale(optimizer: MegatronOptimizer) -> float | None:
    """The dynamic scale of an fp16 run that can still fall; None where none can."""
    for part in optimizer_parts(optimizer):
        scaler = getattr(part, "grad_scaler", None)
        lowest = getattr(scaler, "min_scale", None)
        if scaler is not None and lowest is not None:
            scale = float(scaler.scale)
            return scale if scale > float(lowest) else None
    return None
