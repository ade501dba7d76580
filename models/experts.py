# SPDX-License-Identifier: Apache-2.0
"""Experts as grouped GEMMs: one stacked weight [experts, out, in] a projection."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe import experts, moe_layer
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fused_ops.dispatch import outside_graph
from fused_ops.grouped_linear import grouped_linear
from fused_ops.groups import to_device
from models.comm import TensorParallelComm, token_count
from models.dispatch import TokenDispatcher
from models.mlp import fused_activation
from models.parallel_linear import DuplicatedLinear, GemmModule


class GroupedLinear(GemmModule, torch.nn.Module):
    """The linear layers of this rank's experts; fits megatron-core's grouped-linear builders.

    Always marked `allreduce = False`, so that its gradients and optimizer states belong to the
    expert data-parallel group whatever the expert-parallel size: a checkpoint then moves between
    sizes. `column` layers are cut over expert tensor-parallel ranks along `out`, others along `in`.
    """

    column = True

    def __init__(
        self,
        num_local_experts: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Any,
        is_expert: bool = True,
        tp_comm_buffer_name: str | None = None,
        name: str | None = None,
    ) -> None:
        """Signature: that of megatron-core's builders of grouped linear layers."""
        super().__init__()
        self.tp_group, self.ep_group = pg_collection.expt_tp, pg_collection.ep
        self.edp_group, self.skip_bias_add = pg_collection.expt_dp, skip_bias_add
        self.expert_group = _token_group(pg_collection)
        self.halves = 2 if self.column and config.gated_linear_unit else 1
        ranks = self.tp_group.size()
        if bias and ranks > 1:
            raise ValueError("biases of experts do not work with expert tensor parallelism")
        out_size, in_size = output_size, input_size
        if self.column:
            out_size //= ranks
        else:
            in_size //= ranks
        self.num_local_experts = num_local_experts
        self.weight = self._parameter(config, num_local_experts, out_size, in_size)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                for expert in self.weight.data:
                    init_method(expert)
        self.bias = self._parameter(config, num_local_experts, out_size) if bias else None
        if self.bias is not None:
            self.bias.data.zero_()
        self.init_gemm()

    def _parameter(self, config: Any, *shape: int) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(
            torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        axis = 1 if self.column or len(shape) == 2 else 2
        set_tensor_model_parallel_attributes(parameter, True, axis, 1)
        parameter.allreduce = False  # type: ignore[attr-defined]
        return parameter

    def forward(
        self, x: Tensor, tokens_per_expert: list[int]
    ) -> tuple[Tensor, list[Tensor] | None]:
        """x [tokens, in] sorted by expert -> [tokens, out], and biases that were not added."""
        if is_dynamo_compiling():
            return outside_graph(self.forward, x, tokens_per_expert)
        comm = self.comm(tokens=token_count(x))
        first = dist.get_rank(self.ep_group) * self.num_local_experts
        call = self.gemm_call(self.weight, comm, first_expert=first)
        y = grouped_linear(x, self.weight, tokens_per_expert, call=call)
        if self.bias is None:
            return y, None
        if self.skip_bias_add:
            return y, list(self.bias.unbind(0))
        (counts,) = to_device([torch.tensor(tokens_per_expert, device="cpu")], x.device)
        return y + self.bias.repeat_interleave(counts, 0, output_size=len(x)), None

    def comm(self, **tokens: Any) -> TensorParallelComm:
        """Signature: `GemmModule.comm`."""
        return TensorParallelComm(
            kind="column" if self.column else "row",
            recipe=self.recipe,
            tp_group=self.tp_group,
            expert_group=self.expert_group,
            amax_scope=self.amax_scope,
            weight_shape=(self.weight.shape[1], self.weight.shape[2]),
            segments=(self.weight.shape[1] // 2,) * 2 if self.halves == 2 else (),
            **tokens,
        )

    def backward_dw(self) -> None:
        """Nothing is delayed."""

    def sharded_parameters(
        self, prefix: str, sharded_offsets: tuple, halves: int
    ) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """The parameters for a checkpoint, as [all experts, whole out, whole in].

        Args:
            halves: 2 if `out` is [gate, up], each of which is cut over the ranks by itself.
        """
        sharded = {}
        for name, parameter in self.named_parameters():
            axis = parameter.partition_dim if self.column or name == "weight" else None  # type: ignore[attr-defined]
            cut = _Cut(
                key=prefix + name,
                offsets=tuple(sharded_offsets),
                expert=(self.ep_group.rank(), self.ep_group.size()),
                tensor=(self.tp_group.rank(), self.tp_group.size()),
                axis=axis,
                replica_id=(0, 0, self.edp_group.rank()),
            )
            sharded[prefix + name] = cut.factory(parameter) if halves == 2 else cut.whole(parameter)
        return sharded


_token_groups: dict[tuple[Any, ...], dist.ProcessGroup] = {}


def _token_group(pg_collection: Any) -> dist.ProcessGroup | None:
    """The ranks that have this rank's experts and other tokens of the same micro-batch.

    Ranks of one context- and tensor-parallel plane share a micro-batch, those of one expert
    data-parallel group have the same experts. None if this rank is alone.
    """
    plane = dist.get_process_group_ranks(pg_collection.tp_cp)
    ranks = tuple(sorted(set(plane) & set(dist.get_process_group_ranks(pg_collection.expt_dp))))
    if len(ranks) == 1:
        return None
    for group in (pg_collection.cp, pg_collection.tp, pg_collection.tp_cp):
        if tuple(sorted(dist.get_process_group_ranks(group))) == ranks:
            return group
    key = (dist.group.WORLD, *ranks)
    if key not in _token_groups:
        _token_groups[key] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _token_groups[key]


class RowGroupedLinear(GroupedLinear):
    """The second projection: `in` is cut over expert tensor-parallel ranks."""

    column = False


class _Cut:
    """Where one stacked parameter lies in the whole one."""

    def __init__(self, **place: Any) -> None:
        self.key, self.offsets, self.axis = place["key"], place["offsets"], place["axis"]
        self.expert, self.tensor = place["expert"], place["tensor"]
        self.replica_id = place["replica_id"]

    def part(self, tensor: Tensor, index: int, parts: int, replica_id: Any) -> ShardedTensor:
        """Part `index` of `parts` along the cut axis, for the rank's place in each of them."""
        ahead = len(self.offsets)
        rank, size = self.tensor
        places = [(ahead, *self.expert)]
        if self.axis is not None:
            places.append((ahead + self.axis, index * size + rank, parts * size))
        return ShardedTensor.from_rank_offsets(
            self.key,
            tensor,
            *self.offsets,
            *places,
            replica_id=replica_id,
            prepend_axis_num=ahead,
        )

    def whole(self, parameter: Tensor) -> ShardedTensor:
        """The parameter as one piece."""
        return self.part(parameter, 0, 1, self.replica_id)

    def factory(self, parameter: Tensor) -> ShardedTensorFactory:
        """The parameter as two pieces, gate and up, split when saved and joined when loaded."""

        @torch.no_grad()
        def build(key: str, tensor: Tensor, replica_id: Any, flattened_range: Any) -> list:
            assert flattened_range is None, "flattened ranges of experts are not supported"
            halves = tensor.chunk(2, 1)
            parts = [self.part(half, i, 2, replica_id) for i, half in enumerate(halves)]
            for part in parts:
                part.key = key
            return parts

        @torch.no_grad()
        def merge(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts, 1)

        return ShardedTensorFactory(self.key, parameter, build, merge, self.replica_id)


class GroupedMLP(experts.TEGroupedMLP):
    """megatron-core's grouped experts (its forward pass needs nothing of Transformer Engine)."""

    def forward(
        self, hidden: Tensor, tokens_per_expert: Tensor, probabilities: Tensor, *buffers: Any
    ) -> tuple[Tensor, None]:
        """Tokens [tokens, h] sorted by expert, and the router's share [tokens] of each."""
        activation = fused_activation(self.config)
        elsewhere = (
            self.activation_recompute
            or self.offload_expert_fc1
            or self.offload_moe_act
            or self.config.moe_apply_probs_on_input
        )
        if activation is None or elsewhere:
            return super().forward(hidden, tokens_per_expert, probabilities, *buffers)
        counts = tokens_per_expert.tolist()
        scale = probabilities.unsqueeze(-1)
        hidden, _ = self.linear_fc1(hidden, counts)
        out, bias = self.linear_fc2(activation(hidden, scale), counts)
        return self._apply_bias(out, bias, counts, scale), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Stacked weights of all experts; any expert-parallel and tensor-parallel size loads it."""
        gated = 2 if self.config.gated_linear_unit else 1
        return {
            **self.linear_fc1.sharded_parameters(f"{prefix}linear_fc1.", sharded_offsets, gated),
            **self.linear_fc2.sharded_parameters(f"{prefix}linear_fc2.", sharded_offsets, 1),
        }


@contextmanager
def _latent_projection() -> Iterator[None]:
    """Inside, megatron-core builds the projections of a latent MoE as our own linear layers."""

    def build(input_size: int, output_size: int, **kwargs: Any) -> DuplicatedLinear:
        if kwargs["bias"]:
            raise ValueError("latent projections have no bias; set add_bias_linear to false")
        return DuplicatedLinear(
            input_size, output_size, config=kwargs["config"], init_method=kwargs["init_method"]
        )

    before = {name: vars(moe_layer).get(name) for name in ("HAVE_TE", "TELinear")}
    vars(moe_layer).update(HAVE_TE=True, TELinear=build)
    try:
        yield
    finally:
        vars(moe_layer).update(before)


# Buffers of a router with a bias: FP32 in every run.
COUNTED = ("expert_bias", "local_tokens_per_expert")


class MoELayer(moe_layer.MoELayer):
    """Mixture of experts, with latent experts (moe_latent_size) without Transformer Engine."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        if config.moe_latent_size is None:
            super().__init__(config, *args, **kwargs)
        else:
            with _latent_projection():
                super().__init__(config, *args, **kwargs)
        TokenDispatcher.adopt(self.token_dispatcher, self.experts)

    def _apply(self, fn: Any, recurse: bool = True) -> "MoELayer":
        """Moves and casts of the model, without the casts of what the router counts: in BF16 the
        number of an expert's tokens stops at 256."""
        kept = {name: getattr(self.router, name, None) for name in COUNTED}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = getattr(self.router, name, None)
            if before is not None and after is not None and after.dtype is not torch.float32:
                setattr(self.router, name, before.to(device=after.device, dtype=torch.float32))
        return self
