# SPDX-License-Identifier: Apache-2.0
"""Trains the toy in this process, or in this rank of a layout, and keeps what it came to."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from fused_ops.mamba2_scan import prefer
from models.config import ParallelConfig
from pretrain.checkpoint.state import (
    data_parallel_group,
    load_sharded,
    sharded_state,
    unwrap,
)
from pretrain.checkpoint.write import ShardWriter
from pretrain.engine import Engine, build_engine
from pretrain.evaluate import gathered_parameters
from pretrain.initialize import World, initialize
from pretrain.parity.layouts import Layout, parse_layout
from pretrain.parity.toy import SAMPLES, SEED, VOCAB, Case, micro_batches, run_config
from pretrain.train_step import train_step

IN_ORDER = tuple(range(SAMPLES))
ONE_PROCESS = parse_layout("dp1")


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What a layout's training came to."""

    losses: list[float]
    grad_norms: list[float]

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def build(case: Case, layout: Layout, device: str) -> Engine:
    """The engine of this rank, as new."""
    config = run_config(case, layout)
    if device == "cuda":
        prefer("reference")  # kernels of the scan that processes tune by themselves do not agree
    world = _world(config.parallel, device)
    return build_engine(config, world, VOCAB)


_worlds: list[tuple[ParallelConfig, World]] = []


def _world(parallel: ParallelConfig, device: str) -> World:
    """Groups are kept while the layout stays: those of gloo have threads that are never freed."""
    if _worlds and _worlds[0][0] == parallel and _stands(_worlds[0][1]):
        return _worlds[0][1]
    world = initialize(parallel, device=device, seed=SEED)
    _worlds[:] = [(parallel, world)]
    return world


def _stands(world: World) -> bool:
    """Whether no other run of this process has put groups of its own in the place of these."""
    now = parallel_state.get_tensor_model_parallel_group(check_initialized=False)
    return now is world.groups.tp


def train(case: Case, engine: Engine, start: Path, order: tuple[int, ...] = IN_ORDER) -> Trajectory:
    """Some steps from the weights in `start`.

    Args:
        case: what is trained.
        engine: from `build`.
        start: a folder that `save_weights` wrote, in any layout.
        order: places of the samples in the global batch.
    """
    load_weights(engine, start)
    losses, norms = [], []
    world = engine.world
    for step in range(1, case.steps + 1):
        engine.plan.update((step - 1) * SAMPLES)
        engine.precision_state.set_step(step)
        own = micro_batches(case, step, world.data_parallel_rank, world.data_parallel_size, order)
        result = train_step(engine, own)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        assert result.updated, f"step {step} of {case.name} was skipped"
        assert math.isfinite(result.loss), f"step {step} of {case.name}: loss {result.loss}"
    return Trajectory(losses=losses, grad_norms=norms)


def save_weights(engine: Engine, folder: Path) -> None:
    """The model alone, in a form that every layout reads. A collective."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with gathered_parameters(engine):
        state = sharded_state(engine.chunks, None, loading=False)
        replicas = data_parallel_group(engine.chunks[0])
        ShardWriter(folder, state, forked=False, replicas=replicas).done(wait=True)


def load_weights(engine: Engine, folder: Path) -> None:
    """Into the model and the optimizer's masters; nothing else of the optimizer changes."""
    load_sharded(folder, engine.chunks, None)
    engine.optimizer.reload_model_params()
    engine.precision_state.weights_changed()


def weights_of(case: Case, engine: Engine, folder: Path) -> dict[str, torch.Tensor]:
    """fp32 copies on the CPU of what a layout saved, by name; `engine` is of one process.

    The routers' biases are among them in FP32 alone: their steps are signs, which rounding turns.
    """
    load_weights(engine, folder)
    (chunk,) = engine.chunks
    model = unwrap(chunk)
    named = [*model.named_parameters()]
    if case.name == "fp32":
        named += [(n, b) for n, b in model.named_buffers() if n.endswith("expert_bias")]
    return {name: tensor.detach().float().cpu().clone() for name, tensor in named}
