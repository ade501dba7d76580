# SPDX-License-Identifier: Apache-2.0
"""Tokens to their experts and back, on megatron-core's dispatcher.

Copies of a token are summed in FP32 and rounded once, in the order of its experts, forward and
backward (`fused_ops.gather`). Where one rank has all experts nothing is sorted a second time.

With `precision.communicate: packed` and power-of-two scales tokens go to other ranks in codes: a
block of NVFP4 with a power-of-two scale is its own: its codes depend on no other token, so a
sender can quantize what the expert would. What the codes decode to is exact in BF16, and quantizing
it again gives the same values (its blocks lie on the grid already): the forward computes the same
bits. wgrad reads X along the tokens, which are not together before they have arrived: it must be
made of the forward's operand (`wgrad_x` with source forward), as it is then with BF16 dispatch too.
Gradients, and what comes back from the experts, stay as they are.

The equality holds while no block lies outside the 15 binades of the range below the largest value:
senders share the amax of the group, experts have their own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.gather import Places, sum_rows, take_rows
from fused_ops.quantize import operand_amax, quantize
from fused_ops.recipe import GemmRecipe

Splits = Sequence[int] | None


def dispatch_reason(recipe: GemmRecipe, features: int) -> str | None:
    """Why tokens of so many features do not go to experts of this recipe in codes, or None."""
    spec = recipe.fprop_x
    if not spec.is_pow2 or spec.block != (1, 16) or spec.is_random or spec.hadamard:
        return "fprop.x is not nvfp4 1x16 with pow2 scales"
    if recipe.wgrad_x.source != "forward":
        return "wgrad.x is not made of the forward's operand (source: forward)"
    if features % spec.multiple:
        return f"{features} features are no multiple of {spec.multiple}"
    return None


class TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """megatron-core's all-to-all dispatcher with our sums, and our exchange where it is packed.

    `experts` is set by the layer that owns both.
    """

    experts: Any
    tokens_per_expert: Any
    places: Places

    @classmethod
    def adopt(cls, dispatcher: Any, experts: Any) -> None:
        """Turn the dispatcher that megatron-core's layer has built into one of these.

        One of another kind is left as it is: its tokens move in the dtype of the run.
        """
        if type(dispatcher) is MoEAlltoAllTokenDispatcher:
            dispatcher.__class__ = cls
            dispatcher.experts = experts

    @property
    def _is_elsewhere(self) -> bool:
        """Whether megatron-core's own permutation is needed: copies that are padded or cut."""
        config = self.config
        padded = config.moe_router_padding_for_quantization or self.drop_and_pad
        return bool(padded or config.moe_permute_fusion)

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens [s, b, h] -> copies [n, h] in the order of experts, and their probabilities."""
        if self._is_elsewhere:
            found: tuple[Tensor, Tensor] = super().dispatch_preprocess(
                hidden_states, routing_map, probs
            )
            return found
        self.hidden_shape, self.routing_map, self.probs = hidden_states.shape, routing_map, probs
        tokens = hidden_states.view(-1, self.hidden_shape[-1])
        self.tokens_per_expert = self.preprocess(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_permutation_1", self.tokens_per_expert
        )
        by_expert = routing_map.T.reshape(-1).argsort(descending=True, stable=True)
        by_expert = by_expert[: self.num_out_tokens]
        self.places = Places(by_expert % len(tokens), len(tokens))
        return take_rows(tokens, self.places), probs.T.reshape(-1)[by_expert]

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Any, Tensor]:
        """Copies as they have arrived -> in the order of this rank's experts, with their counts."""
        if self.ep_size * self.tp_size > 1:
            found: tuple[Tensor, Any, Tensor] = super().dispatch_postprocess(tokens, probs)
            return found
        counts = self.tokens_per_expert
        for point in ("before_permutation_2", "before_finish"):
            counts = self._maybe_dtoh_and_synchronize(point, counts)
        self.tokens_per_expert = None
        return tokens, counts, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Results in the order of this rank's experts -> in that in which copies arrived."""
        if self.ep_size * self.tp_size > 1:
            hidden_states = super().combine_preprocess(hidden_states)
        return hidden_states

    def combine_postprocess(self, copies: Tensor) -> Tensor:
        """Results of all copies [n, h] -> their sum for each token [s, b, h]."""
        if self._is_elsewhere:
            whole: Tensor = super().combine_postprocess(copies)
            return whole
        total = sum_rows(copies, self.places).view(self.hidden_shape)
        if self.shared_experts is not None:
            total = total + self.shared_experts.get_output()
        return total

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [n, h] and probabilities in the order of experts -> those of this rank's."""
        layer: Any = getattr(self.experts, "linear_fc1", None)
        packed = getattr(layer, "communicate", "bf16") == "packed" and self.ep_size > 1
        if not packed or dispatch_reason(layer.recipe, tokens.shape[-1]) is not None:
            found: tuple[Tensor, Tensor] = super().token_dispatch(tokens, probs)
            return found
        if self.shared_experts is not None:
            self.shared_experts.wait_current_stream()
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize(
            "before_ep_alltoall", self.tokens_per_expert
        )
        splits = self.output_splits, self.input_splits
        tokens = codes_to_all(tokens, layer.recipe.fprop_x, self.ep_group, splits)
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(tokens)
        options = {"use_nccl_stream": self.use_nccl_stream}
        return tokens, all_to_all(self.ep_group, probs, *splits, **options)


def codes_to_all(
    x: Tensor, spec: OperandSpec, group: dist.ProcessGroup, splits: tuple[Splits, Splits]
) -> Tensor:
    """x [n, h], sent to the ranks as the operand `spec` and decoded there: exact in bf16.

    Args:
        splits: how many rows come from each rank, and go to each; None: as many each.
    """
    out, own = (None if s is None else [int(n) for n in s] for s in splits)
    return _CodesToAll.apply(x, spec, group, out, own)


class _CodesToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, spec: OperandSpec, group: dist.ProcessGroup, out: Splits, own: Splits
    ) -> Tensor:
        ctx.group, ctx.out, ctx.own, ctx.rows = group, out, own, len(x)
        some = x if len(x) else x.new_zeros(1, x.shape[1])  # a rank may have nothing to send
        amax = operand_amax(some, spec)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
        codes = quantize(some.contiguous(), spec, amax=amax)
        message = torch.cat([codes.codes, codes.scales], 1)[: len(x)]
        found = _exchange(message, group, out, own)
        return _decode(codes, found, x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(dy.contiguous(), ctx.group, ctx.own, ctx.out), None, None, None, None


def _exchange(x: Tensor, group: dist.ProcessGroup, out: Splits, own: Splits) -> Tensor:
    rows = len(x) if out is None else sum(out)
    found = x.new_empty(rows, x.shape[1])
    dist.all_to_all_single(found, x, out, own, group=group)
    return found


def _decode(like: QuantizedTensor, message: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of codes and scales that came beside each other; the tensor's scale is shared."""
    if not len(message):
        return torch.empty(0, like.shape[1], dtype=dtype, device=message.device)
    codes, scales = message.split([like.codes.shape[1], like.scales.shape[1]], 1)
    found = replace(
        like,
        codes=codes.contiguous(),
        scales=scales.contiguous(),
        shape=(len(message), like.shape[1]),
        out_of_range=None,
    )
    return found.dequantize(dtype)
