# SPDX-License-Identifier: Apache-2.0
"""Brings a process up: device, torch.distributed, megatron-core's process groups, seeds."""

import datetime
import gc
import os
import random
import socket
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection

from fused_ops.errors import ConfigError
from fused_ops.mamba2_scan import mamba_ssm_backend
from models.config import ParallelConfig
from pretrain import cpu_compat
from pretrain.recording import free_graphs

# Read by cuBLAS when its handle is made: without it, sums may come in another order.
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# Read by NCCL when a CUDA graph records a collective: it would register the graph's memory with the
# other ranks, so that recording waited for them, and cannot where memory is in expandable segments.
_GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"


@dataclass(frozen=True)
class World:
    """Where this process stands among the processes of the run."""

    device: torch.device
    rank: int
    size: int
    groups: ProcessGroupCollection

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks, and writes what only one rank writes."""
        return self.rank == 0

    @property
    def data_parallel_rank(self) -> int:
        """Which share of a step's samples this rank reads."""
        return self.groups.dp.rank()

    @property
    def data_parallel_size(self) -> int:
        """Ranks that read different samples."""
        return self.groups.dp.size()


def choose_device(name: str) -> torch.device:
    """The device of this process: `auto`, `cpu` or `cuda`; its own GPU of the host."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        if torch.cuda.is_available():
            # megatron-core puts its buffers on the GPU wherever there is one.
            raise ConfigError(
                "run.device=cpu needs a machine, or a process, without GPUs; torch sees "
                f"{torch.cuda.device_count()} on {socket.gethostname()}; start with "
                "CUDA_VISIBLE_DEVICES= in front"
            )
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device {name} needs a GPU that torch can use; it finds none on "
            f"{socket.gethostname()}; take auto or cpu, or see why (nvidia-smi, torch.version.cuda)"
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"each process needs its own GPU; got LOCAL_RANK={device.index} with "
            f"{torch.cuda.device_count()} GPUs on {socket.gethostname()}; start fewer processes "
            "there, or see why it has lost some (nvidia-smi)"
        )
    torch.cuda.set_device(device)
    return device


def initialize(
    parallel: ParallelConfig,
    *,
    device: str = "auto",
    seed: int = 1234,
    timeout_minutes: float = 30.0,
    deterministic: bool = False,
    store: dist.Store | None = None,
) -> World:
    """Starts (or takes over) torch.distributed and makes the groups of the parallel layout.

    Without torchrun's environment this is a run of one process, and needs no network. May be
    called again in one process with another layout.

    `store`: where the processes of this start have met. torchrun's own outlives processes that it
    starts again, and gloo then finds addresses of dead ones there.
    """
    set_determinism(deterministic)
    place = choose_device(device)
    if place.type == "cpu":
        assert cpu_compat.is_enabled(), "cpu_compat.enable() runs before megatron-core is imported"
    os.environ.setdefault(_GRAPH_REGISTER, "0")
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        backend = "nccl" if place.type == "cuda" else "gloo"
        if store is not None:
            store.set_timeout(timeout)
            dist.init_process_group(
                backend,
                timeout=timeout,
                store=store,
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
            )
        elif "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(
                backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1
            )
    groups = make_groups(parallel, timeout_minutes)
    seed_everything(seed)
    return World(place, dist.get_rank(), dist.get_world_size(), groups)


_made: list[dist.ProcessGroup] = []


def _groups() -> list[dist.ProcessGroup]:
    """All groups of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def free_groups() -> None:
    """Leaves megatron-core's groups, and ends them: each gloo group has threads of its own.

    megatron-core only forgets them (one not even that), and a process that makes them again and
    again would drown. Graphs that were recorded with them end before. The threads of a group end
    with the last reference to it: models that are in use keep theirs.
    """
    free_graphs()
    parallel_state.destroy_model_parallel()
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    if dist.is_initialized():
        alive = set(_groups())
        for group in _made:
            if group in alive:
                dist.destroy_process_group(group)
    if _made:
        _made.clear()
        rotaries: tuple[Any, ...] = (RotaryEmbedding, YarnRotaryEmbedding)
        for rotary in rotaries:
            rotary.forward.cache_clear()  # its keys are the modules, which know their groups
        gc.collect()  # models that nobody uses hold groups, in cycles


def make_groups(parallel: ParallelConfig, timeout_minutes: float) -> ProcessGroupCollection:
    """megatron-core's process groups for a layout; earlier ones of this process are destroyed."""
    free_groups()
    kept = set(_groups())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline_model_parallel_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
        create_gloo_process_groups=False,
    )
    _made.extend(group for group in _groups() if group not in kept)
    return ProcessGroupCollection.use_mpu_process_groups()


def seed_everything(seed: int) -> None:
    """All generators of this process; those of megatron-core differ between model shards."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def set_determinism(deterministic: bool) -> None:
    """Sums in full precision always; with `deterministic` also in the same order every time."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    if deterministic:
        os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
        torch.backends.cudnn.benchmark = False
        mamba_ssm_backend.fix_configurations()
    torch.use_deterministic_algorithms(deterministic)


def shut_down() -> None:
    """Leaves the groups and torch.distributed. Idempotent."""
    free_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
