# SPDX-License-Identifier: Apache-2.0
"""The `parallel` section of a run file: how a model is laid over processes."""

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass


@dataclass(kw_only=True, frozen=True, config=ConfigDict(extra="forbid"))
class ParallelConfig:
    """How the model is laid over processes. A layout changes speed, never the training."""

    tensor_model_parallel_size: int = 1
    """Processes that share each matrix."""
    pipeline_model_parallel_size: int = 1
    """Processes in a row of layers."""
    virtual_pipeline_model_parallel_size: int | None = None
    """Stages that each process of the row holds (interleaved schedule); None for one."""
    context_parallel_size: int = 1
    """Processes that share each sequence."""
    expert_model_parallel_size: int = 1
    """Processes that share the experts of a layer."""
    expert_tensor_parallel_size: int | None = None
    """Processes that share each expert's matrices; None for tensor_model_parallel_size."""
    sequence_parallel: bool = False
    """Cut activations between matrices along the sequence (with tensor parallelism)."""
    use_distributed_optimizer: bool = True
    """Each data-parallel process keeps a part of the optimizer's state."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather parameters while the forward pass goes on."""

    @property
    def virtual(self) -> int:
        """Stages a process holds."""
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def dense_ranks(self) -> int:
        """Processes that hold one copy of all layers but experts."""
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        return tp * pp * self.context_parallel_size

    @property
    def expert_ranks(self) -> int:
        """Processes that hold one copy of all experts."""
        etp = self.expert_tensor_parallel_size or self.tensor_model_parallel_size
        return etp * self.expert_model_parallel_size * self.pipeline_model_parallel_size

    def data_parallel_size(self, world: int) -> int:
        """Of `world` processes, those that read different samples."""
        return world // self.dense_ranks
