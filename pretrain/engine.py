# SPDX-License-Identifier: Apache-2.0
"""Builds what a run trains: model, its precision, gradient buffers, optimizer, schedule."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor

from fused_ops.errors import ConfigError
from fused_ops.mamba2_scan.self_check import LENGTH, scan_problem
from models.config import transformer_config
from models.gemms import mamba_inner
from models.hybrid_model import build_model
from models.precision import PrecisionPlan, PrecisionState, apply_precision
from pretrain.checkpoint.agree import on_all
from pretrain.initialize import World, seed_everything
from pretrain.optimizer import OptimizerSetting, build_optimizer, build_scheduler
from pretrain.oscillation import Oscillation
from pretrain.pretrain_config import PretrainConfig

Work = Callable[[Sequence[dict[str, Any]]], Tensor]
"""Forward and backward of prepared micro-batches; gives the sums of losses and tokens."""


@dataclass
class Engine:
    """A model that can be trained: what a step needs, and nothing of the run around it."""

    world: World
    chunks: list[Any]
    """Model chunks of this rank, wrapped in CollectableDDP; one per virtual stage."""
    config: TransformerConfig
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    precision_state: PrecisionState
    plan: PrecisionPlan
    clip_grad: float
    seq_length: int
    micro_batch_size: int
    oscillation: Oscillation | None = None
    """Resets weights that oscillate; None: the run does not ask for it."""
    graph: Work | None = None
    """How steps are recorded and replayed; None: they are launched one by one."""

    def __post_init__(self) -> None:
        # The gradient is of the mean over the tokens of the global batch, in every layout.
        self.config.calculate_per_token_loss = True
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        if self.chunks[0].ddp_config.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync

    def around_update(self) -> AbstractContextManager[None]:
        """What an update of the weights is to be made in."""
        return nullcontext() if self.oscillation is None else self.oscillation.around_update()


def build_engine(config: PretrainConfig, world: World, vocab_size: int) -> Engine:
    """The engine of a run, at step 0. `vocab_size` is the data's, where the config names none."""
    train, parallel = config.train, config.parallel
    _forget_losses()
    seed_everything(config.run.seed)
    engine_config = transformer_config(
        config.model,
        parallel,
        params_dtype=train.torch_dtype,
        deterministic=train.deterministic,
    )
    _check_scan(config, engine_config, world)
    # DistributedDataParallel decides by this how it scales gradients: set before it is built.
    engine_config.calculate_per_token_loss = True
    vocab_size = config.model.vocab_size or vocab_size
    chunks: list[Any] = build_model(config.model, engine_config, world.groups, vocab_size)
    chunks = [chunk.to(world.device) for chunk in chunks]
    precision_state = PrecisionState(seed=config.run.seed, device=world.device)
    plan = apply_precision(
        chunks,
        config.precision,
        precision_state,
        total_samples=train.total_samples,
    )
    if train.dtype != "fp32":
        chunks = [Float16Module(engine_config, chunk) for chunk in chunks]
    chunks = _wrap(config, engine_config, chunks, world)
    optimizer = build_optimizer(
        config.optimizer,
        OptimizerSetting(
            steps=train.steps,
            params_dtype=train.torch_dtype,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
            overlap_param_gather=parallel.overlap_param_gather,
        ),
        chunks,
        world.groups,
    )
    reset, oscillation = config.optimizer.oscillation_reset, None
    if reset is not None:
        oscillation = Oscillation(reset, train.steps, optimizer, plan, precision_state)
    return Engine(
        world=world,
        chunks=chunks,
        config=engine_config,
        optimizer=optimizer,
        scheduler=build_scheduler(config.optimizer, train.steps, optimizer),
        precision_state=precision_state,
        plan=plan,
        clip_grad=config.optimizer.clip_grad,
        seq_length=config.model.seq_length,
        micro_batch_size=train.micro_batch_size,
        oscillation=oscillation,
    )


def _forget_losses() -> None:
    """megatron-core's logs of auxiliary losses are of the process, and as long as its first model
    is deep: a deeper one after it would write beyond their end."""
    destroy_moe_metrics_tracker()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    MTPLossLoggingHelper.tracker = {}


def _check_scan(config: PretrainConfig, engine_config: TransformerConfig, world: World) -> None:
    """ConfigError on all ranks if the scan kernel computes something else on one of them."""
    if world.device.type != "cuda" or "M" not in config.model.pattern:
        return
    head_dim, groups = engine_config.mamba_head_dim, engine_config.mamba_num_groups
    heads = mamba_inner(engine_config)[1] // config.parallel.tensor_model_parallel_size
    groups = max(1, groups // config.parallel.tensor_model_parallel_size)
    group_heads = heads // groups
    groups = max(1, min(groups, 32 // group_heads))  # up to 32 heads: enough to occupy a GPU

    def check() -> None:
        problem = scan_problem(
            world.device,
            config.train.torch_dtype,
            head_dim=head_dim,
            state=engine_config.mamba_state_dim,
            heads=groups * group_heads,
            groups=groups,
            length=max(LENGTH, min(config.model.seq_length, 2048) - 84),
            documents=(config.data.isolate_documents,),
        )
        if problem is not None:
            raise ConfigError(problem)

    on_all(check)


class CollectableDDP(DistributedDataParallel):
    """megatron-core's wrapper, freed with its process groups once nobody uses it.

    megatron-core's own hooks hold the wrapper, and hang at nodes of autograd's graph that the
    distributed optimizer keeps alive: it takes FP32 weights by views with a history. Python's
    collector does not see references that pass through such nodes, and model, optimizer and groups
    would live as long as the process.
    """

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Any:
        seen = weakref.ref(self)
        made = DistributedDataParallel._make_backward_post_hook

        def hook(*gradients: Any) -> None:
            wrapper = seen()
            if wrapper is not None:
                made(wrapper, param)(*gradients)

        return hook


def _wrap(
    config: PretrainConfig, engine_config: TransformerConfig, chunks: list[Any], world: World
) -> list[Any]:
    """Gradient buffers in FP32, reduced over the data-parallel ranks."""
    parallel = config.parallel
    distributed = parallel.use_distributed_optimizer and config.optimizer.name == "adamw"
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather and distributed,
    )
    wrapped = [
        CollectableDDP(
            engine_config,
            ddp_config,
            chunk,
            disable_bucketing=number > 0,  # later virtual stages finish while earlier ones run
            pg_collection=world.groups,
        )
        for number, chunk in enumerate(chunks)
    ]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped
