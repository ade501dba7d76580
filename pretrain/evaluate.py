# SPDX-License-Identifier: Apache-2.0
"""Validation loss: always over the same batches, and without a trace in the training run."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from pretrain.engine import Engine
from pretrain.train_step import MicroBatch, run_schedule


class StoppedError(Exception):
    """A run was asked to stop before its evaluation had ended."""


def any_rank(engine: Engine, flag: bool) -> bool:
    """Whether `flag` is set on any rank. Collective."""
    flags = torch.tensor(int(flag), device=engine.world.device)
    dist.all_reduce(flags)
    return bool(flags)


def unless_stopped(
    engine: Engine,
    batches: Iterable[Sequence[MicroBatch]],
    stop_requested: Callable[[], bool],
) -> Iterator[Sequence[MicroBatch]]:
    """The batches; before each the ranks agree whether to go on.

    Raises StoppedError on all ranks when `stop_requested` says so on one of them.
    """
    for micro_batches in batches:
        if any_rank(engine, stop_requested()):
            raise StoppedError
        yield micro_batches


def evaluate(engine: Engine, batches: Iterable[Sequence[MicroBatch]]) -> float:
    """Mean loss over the counted tokens of some global batches; the same on every rank.

    `batches`: of each global batch, this rank's micro-batches.
    """
    total = torch.zeros(2, dtype=torch.float64, device=engine.world.device)
    with evaluation_mode(engine):
        for micro_batches in batches:
            total += run_schedule(engine, micro_batches, forward_only=True)
    dist.all_reduce(total)
    loss_sum, tokens = total.tolist()
    return loss_sum / max(tokens, 1.0)


def evaluate_sets(
    engine: Engine,
    sets: Mapping[str, Callable[[], Iterable[Sequence[MicroBatch]]]],
    also_bf16: bool = False,
) -> dict[str, float]:
    """Row entries of named validation sets: `val_loss/NAME`; a single unnamed one: `val_loss`.

    Args:
        engine: what is trained.
        sets: by name, what gives the batches of the set, anew at each call.
        also_bf16: also `val_loss_bf16`, of the same batches with nothing quantized in the forward
            pass: GEMMs in the run's own dtype.
    """
    found = {}
    for name, batches in sets.items():
        suffix = f"/{name}" if name else ""
        found[f"val_loss{suffix}"] = evaluate(engine, batches())
        if not also_bf16:
            continue
        if not engine.plan.is_quantized:
            found[f"val_loss_bf16{suffix}"] = found[f"val_loss{suffix}"]
            continue
        with engine.plan.instead({}):
            found[f"val_loss_bf16{suffix}"] = evaluate(engine, batches())
    return found


@contextlib.contextmanager
def evaluation_mode(engine: Engine) -> Iterator[None]:
    """No dropout, no gradients, no router statistics; the generators end where they began."""
    with gathered_parameters(engine), generators_untouched(), torch.no_grad():
        flag = engine.precision_state.nonfinite.clone()
        for chunk in engine.chunks:
            chunk.eval()
        try:
            yield
        finally:
            for chunk in engine.chunks:
                chunk.train()
            engine.precision_state.nonfinite.copy_(flag)


@contextlib.contextmanager
def gathered_parameters(engine: Engine) -> Iterator[None]:
    """Whole parameters on every rank, also where their gather overlaps with the next forward."""
    overlapped = [c for c in engine.chunks if c.ddp_config.overlap_param_gather]
    for chunk in overlapped:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in overlapped:
            chunk.enable_forward_pre_hook()


@contextlib.contextmanager
def generators_untouched() -> Iterator[None]:
    """Random generators end where they began."""
    tracker = get_cuda_rng_tracker()
    states = torch.get_rng_state(), torch.cuda.get_rng_state(), tracker.get_states()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        torch.cuda.set_rng_state(states[1])
        tracker.set_states(states[2])
