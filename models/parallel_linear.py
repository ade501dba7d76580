# SPDX-License-Identifier: Apache-2.0
"""megatron-core's two parallel linear layers, with GEMMs whose operands a recipe describes.

Weights, initialization and sharded state dicts are megatron-core's. Only the GEMMs and what goes
around them are ours: `_forward_impl` is the one method that both classes call for them. A layer
receives its recipe (`PrecisionPlan.bind` gives it); without one it computes in its own dtype.
torch.compile leaves the GEMMs and what says how they compute out of its graphs.
"""

from typing import Any, Protocol

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from fused_ops.dispatch import outside_graph
from fused_ops.keys import StreamKey, stable_id
from fused_ops.linear import Comm, LinearCall, Observer, linear
from fused_ops.quantize import DelayedScaling
from fused_ops.recipe import RECIPES, GemmRecipe
from fused_ops.weight_codes import WeightCodes
from models import micro_batch
from models.adopt import adopt
from models.comm import TensorParallelComm, is_distributed, token_count
from models.precision_state import PrecisionState
from models.te_linear import TransformerEngineGemm

PLAIN = RECIPES["bf16"]
"""Nothing is quantized: products in the tensors' own dtype."""


class ModuleObserver(Observer, Protocol):
    """An observer of a module's GEMMs that chooses the micro-batches it sees."""

    def wants(self, micro_batch: int) -> bool:
        """Whether the GEMMs of this micro-batch, by its global number in the step, are shown."""
        ...


class GemmModule:
    """What every module with GEMMs carries; mixed into the linear layers.

    `PrecisionPlan.bind` sets `gemm_name` (global, as in the precision table), `precision_state`,
    `recipe`, and what the precision section says of all: `amax_scope`, `communicate`, `backend`.
    """

    training: bool
    weight: Tensor

    def init_gemm(self) -> None:
        """Start with the layer's own dtype and no name."""
        self.recipe: GemmRecipe = PLAIN
        self.gemm_name = ""
        self.precision_state: PrecisionState | None = None
        self.weight_codes = WeightCodes()
        self.amax_scope = "layout_invariant"
        self.communicate = "bf16"
        self.observer: ModuleObserver | None = None
        self.delayed: dict[str, DelayedScaling] = {}
        # megatron-core's schedules set it at the first micro-batch of a step: by then an optimizer
        # may have written the weight through the flat buffer behind it, which no counter shows.
        self.is_first_microbatch = True
        self.backend = "fused_ops"
        self._other: TransformerEngineGemm | None = None

    def other_backend(self, weight: Any) -> TransformerEngineGemm | None:
        """Who computes these GEMMs with `weight` instead of fused_ops; None: nobody."""
        if self.backend == "fused_ops":
            return None
        if self._other is None:
            self._other = TransformerEngineGemm(weight)
        return self._other

    def comm(self, **tokens: Any) -> TensorParallelComm:
        """How the operands of this layer are cut over ranks.

        Args:
            tokens: fields of it that say how many tokens there are, and how they move.
        """
        raise NotImplementedError

    def gemm_call(self, weight: Tensor, comm: Comm, first_expert: int = 0) -> LinearCall:
        """How the GEMMs of this forward pass, and of its backward pass, compute.

        Args:
            weight: of these GEMMs; its gradient goes to its `main_grad` if that is fp32.
            comm: how operands are cut over ranks.
            first_expert: global number of the first expert in a stack.
        """
        if self.is_first_microbatch:
            self.weight_codes.drop()
            self.is_first_microbatch = False
        state, number, observer = self.precision_state, micro_batch.current(), self.observer
        main_grad = getattr(weight, "main_grad", None)
        call = LinearCall(
            recipe=self.recipe,
            comm=comm,
            weight_codes=self.weight_codes,
            main_grad=main_grad is not None and main_grad.dtype is torch.float32,
            observer=observer if observer is not None and observer.wants(number) else None,
            name=self.gemm_name,
            delayed=self.delayed,
            note_amax=self.training,
        )
        if state is not None:
            call.key = StreamKey(
                seed=state.seed,
                step=state.step,
                micro_batch=number,
                layer=stable_id(self.gemm_name),
                expert=first_expert,
                table=state.key_table,
            )
            call.weights_epoch = state.weights_epoch
            call.nonfinite = state.nonfinite
            call.check_finite = state.check_finite
            call.row_block = state.row_block
        return call


class ColumnParallelLinear(GemmModule, layers.ColumnParallelLinear):
    """y = x W^T with W [out / ranks, in] cut along its rows."""

    def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        self.init_gemm()
        self.cp_group = _context_group(config)

    @classmethod
    def adopt(cls, module: layers.ColumnParallelLinear) -> "ColumnParallelLinear":
        """A layer that megatron-core has built, with what `__init__` adds."""
        adopted = adopt(module, cls)
        adopted.init_gemm()
        adopted.cp_group = _context_group(adopted.config)
        return adopted

    def comm(self, **tokens: Any) -> TensorParallelComm:
        """Signature: `GemmModule.comm`."""
        return TensorParallelComm(
            kind="column",
            recipe=self.recipe,
            tp_group=self.tp_group,
            cp_group=self.cp_group,
            amax_scope=self.amax_scope,
            weight_shape=(self.weight.shape[0], self.weight.shape[1]),
            segments=output_parts(self.weight),
            **tokens,
        )

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        **unused: Any,
    ) -> Tensor:
        if is_dynamo_compiling():
            return outside_graph(
                self._forward_impl, input, weight, bias, allreduce_dgrad, sequence_parallel
            )
        other = self.other_backend(weight)
        if other is not None:
            return other(
                input, bias, self.recipe, tp_group=self.tp_group, gather_tokens=sequence_parallel,
                all_reduce_input_grad=allreduce_dgrad,
            )  # fmt: skip
        comm = self.comm(
            gather_tokens=sequence_parallel,
            all_reduce_input_grad=allreduce_dgrad,
            packed=self.communicate == "packed",
            tokens=token_count(input, self.tp_group.size() if sequence_parallel else 1),
        )
        return linear(input, weight, bias, call=self.gemm_call(weight, comm))


class OutputLayer(layers.ColumnParallelLinear):
    """megatron-core's output layer, which always stays high; on a CPU its sums are taken in FP32.

    Products of BF16 values are exact in FP32 and the result is rounded once, as BF16 GEMMs do; a
    CPU without BF16 units multiplies BF16 matrices 3 to 30 times slower than FP32 ones. On a GPU
    the weight's gradient is added to its FP32 sum by the GEMM, unless the embedding shares it.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if is_dynamo_compiling():
            return outside_graph(self._forward_impl, input, weight, *args, **kwargs)
        if input.is_cuda:
            if self.adds_to_main_grad(weight):
                return self._into_main_grad(input, weight, *args, **kwargs)
            return super()._forward_impl(input, weight, *args, **kwargs)
        if input.dtype is torch.float32:
            return super()._forward_impl(input, weight, *args, **kwargs)
        out = super()._forward_impl(input.float(), weight.float(), *args, **kwargs)
        return out.to(input.dtype)

    def adds_to_main_grad(self, weight: Tensor) -> bool:
        """Whether the weight is this layer's alone and has an FP32 sum of its gradients."""
        main_grad = getattr(weight, "main_grad", None)
        return weight is self.weight and main_grad is not None and main_grad.dtype is torch.float32

    def _into_main_grad(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        **unused: Any,
    ) -> Tensor:
        comm = TensorParallelComm(
            kind="column",
            recipe=PLAIN,
            tp_group=self.tp_group,
            gather_tokens=sequence_parallel,
            all_reduce_input_grad=allreduce_dgrad,
            weight_shape=(weight.shape[0], weight.shape[1]),
            tokens=token_count(input, self.tp_group.size() if sequence_parallel else 1),
        )
        call = LinearCall(recipe=PLAIN, comm=comm, main_grad=True, name="output_layer")
        return linear(input, weight, bias, call=call)


class RowParallelLinear(GemmModule, layers.RowParallelLinear):
    """y = sum over ranks of x W^T, W [out, in / ranks] cut along columns; megatron-core sums.

    Where the gradient's codes are to move, the reduce-scatter is inside the layer instead: the same
    collective, and its backward is ours.
    """

    def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        self.init_gemm()
        self.cp_group = _context_group(config)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [s, ..., in / ranks] -> y [s, ..., out] (s / ranks if sequence parallel), and bias."""
        packed = self.communicate == "packed" and self.sequence_parallel
        if not packed or self.explicit_expert_comm or not is_distributed(self.tp_group):
            return super().forward(input_)
        y = self._forward_impl(input_, self.weight, scatter_tokens=True)
        if self.skip_bias_add or self.bias is None:
            return y, self.bias if self.skip_bias_add else None
        return y + self.bias, None

    def comm(self, **tokens: Any) -> TensorParallelComm:
        """Signature: `GemmModule.comm`."""
        return TensorParallelComm(
            kind="row",
            recipe=self.recipe,
            tp_group=self.tp_group,
            cp_group=self.cp_group,
            amax_scope=self.amax_scope,
            weight_shape=(self.weight.shape[0], self.weight.shape[1]),
            **tokens,
        )

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        scatter_tokens: bool = False,
        **unused: Any,
    ) -> Tensor:
        if is_dynamo_compiling():
            return outside_graph(self._forward_impl, input, weight, bias, scatter_tokens)
        other = self.other_backend(weight)
        if other is not None:
            return other(input, bias, self.recipe)
        assert bias is None or not scatter_tokens, "a bias is added to the sum"
        comm = self.comm(
            scatter_tokens=scatter_tokens, packed=scatter_tokens, tokens=token_count(input)
        )
        return linear(input, weight, bias, call=self.gemm_call(weight, comm))


class DuplicatedLinear(GemmModule, torch.nn.Module):
    """y = x W^T with the whole W on every rank; with sequence parallelism each has other tokens."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any) -> None:
        super().__init__()
        weight = torch.empty(
            output_size,
            input_size,
            dtype=config.params_dtype,
            device=torch.cuda.current_device(),
        )
        if config.perform_initialization:
            init_method(weight)  # from the default generator, which is the same on all these ranks
        self.weight = torch.nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.tp_group = layers.get_tensor_model_parallel_group_if_none(None)
        self.sequence_parallel = config.sequence_parallel
        self.init_gemm()
        self.cp_group = _context_group(config)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """x [..., in] -> [..., out]; the second value is megatron-core's bias."""
        if is_dynamo_compiling():
            return outside_graph(self.forward, x)
        other = self.other_backend(self.weight)
        if other is not None:
            return other(x, None, self.recipe), None
        comm = self.comm(tokens=token_count(x))
        return linear(x, self.weight, call=self.gemm_call(self.weight, comm)), None

    def comm(self, **tokens: Any) -> TensorParallelComm:
        """Signature: `GemmModule.comm`."""
        return TensorParallelComm(
            kind="duplicated",
            recipe=self.recipe,
            tp_group=self.tp_group if self.sequence_parallel else None,
            cp_group=self.cp_group,
            amax_scope=self.amax_scope,
            weight_shape=(self.weight.shape[0], self.weight.shape[1]),
            **tokens,
        )


def output_parts(weight: Tensor) -> tuple[int, ...]:
    """Local sizes of the parts of a weight's output features that are cut over ranks one by one.

    megatron-core marks them on the parameter: `partition_sizes` on the input projection of Mamba,
    `partition_stride` 2 where gate and up follow each other.
    """
    sizes = getattr(weight, "partition_sizes", None)
    if sizes is not None:
        return tuple(sizes)
    parts = getattr(weight, "partition_stride", 1)
    return (weight.shape[0] // parts,) * parts if parts > 1 else ()


def _context_group(config: Any) -> torch.distributed.ProcessGroup | None:
    """The ranks that share a sequence, or None if each has whole ones."""
    if config.context_parallel_size == 1:
        return None
    from megatron.core.process_groups_config import ProcessGroupCollection

    group = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"]).cp
    return group if is_distributed(group) else None
