# SPDX-License-Identifier: Apache-2.0
"""Normalization layers that know sequence parallelism."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from fused_ops.rmsnorm import rmsnorm, rmsnorm_and_input


class Norm(torch.nn.Module):
    """RMSNorm or LayerNorm, as `config.normalization` says.

    Under sequence parallelism each rank sees a part of the tokens; the mark `sequence_parallel` on
    a parameter makes megatron-core sum its gradient over the tensor-parallel ranks.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = self._parameter(config, hidden_size, 0.0 if self.zero_centered else 1.0)
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = self._parameter(config, hidden_size, 0.0)
        elif config.normalization != "RMSNorm":
            raise ValueError(
                f"normalization must be RMSNorm or LayerNorm, got {config.normalization!r}"
            )

    @staticmethod
    def _parameter(config: Any, size: int, value: float) -> torch.nn.Parameter:
        device = torch.cuda.current_device()
        parameter = torch.nn.Parameter(
            torch.full((size,), value, dtype=config.params_dtype, device=device)
        )
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return parameter

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and type; statistics in FP32."""
        if self.bias is None:
            return rmsnorm(x, self.weight, eps=self.eps, zero_centered=self.zero_centered)
        gain = self.weight.float() + 1.0 if self.zero_centered else self.weight.float()
        return F.layer_norm(x.float(), gain.shape, gain, self.bias.float(), self.eps).to(x.dtype)


class ResidualNorm(Norm):
    """The norm that starts a residual branch: it hands the residual on with its output.

    megatron-core's transformer layers accept such a pair. (Its recomputation of norms would not: it
    would free the residual with the output. `models.megatron_fields` refuses it.)
    """

    def forward(self, x: Tensor) -> Any:
        """[..., hidden_size] -> (normalized, x); LayerNorm gives only the first."""
        if self.bias is not None:
            return super().forward(x)
        return rmsnorm_and_input(x, self.weight, eps=self.eps, zero_centered=self.zero_centered)


class _SumOverRanks(torch.autograd.Function):
    """The sum over ranks whose results are used on each of them: its gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        total = dy.clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class AllHeadsNorm(torch.nn.Module):
    """RMSNorm of queries or keys over all heads of a token together, as OLMo's models have it.

    Heads are cut over the tensor-parallel ranks; the mean is taken over all of them. Each rank has
    the whole weight and uses its part: megatron-core adds up the gradients of `q_layernorm` and
    `k_layernorm` over these ranks, by their names.
    """

    def __init__(
        self, config: Any, hidden_size: int, eps: float = 1e-5, heads: int = 1, **unused: Any
    ) -> None:
        super().__init__()
        self.eps, self.features = eps, heads * hidden_size
        self.tp_group = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"]).tp
        weight = torch.ones(
            self.features, dtype=config.params_dtype, device=torch.cuda.current_device()
        )
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., heads of this rank, features of a head] -> the same; statistics in FP32."""
        total = x.float().square().sum((-1, -2), keepdim=True)
        if self.tp_group.size() > 1:
            total = _SumOverRanks.apply(total, self.tp_group)
        scale = torch.rsqrt(total / self.features + self.eps)
        weight = self.weight.float().chunk(self.tp_group.size())[self.tp_group.rank()]
        return (x.float() * scale * weight.view(x.shape[-2:])).to(x.dtype)


class GroupNorm(torch.nn.Module):
    """RMSNorm of each group of features; the output norm of a Mamba-2 mixer.

    Its features are cut over the tensor-parallel ranks by whole groups. The signature is the one
    that megatron-core's mixer calls.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert not norm_before_gate, "the gate is applied before this norm"
        self.eps, self.group_size = eps, group_size
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.tp_group: Any = None  # until megatron-core gives one

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same shape and type."""
        return rmsnorm(x, self.weight, eps=self.eps, group_size=self.group_size)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The weight, cut over the tensor-parallel ranks."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
