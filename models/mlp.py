# SPDX-License-Identifier: Apache-2.0
"""Feed-forward layers whose activation is one fused op; other activations stay megatron-core's."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from megatron.core.activations import squared_relu as upstream_squared_relu
from megatron.core.transformer import mlp
from megatron.core.transformer.moe import shared_experts
from torch import Tensor

from fused_ops.activation import squared_relu, swiglu

Activation = Callable[[Tensor, Tensor | None], Tensor]


def fused_activation(config: Any) -> Activation | None:
    """The op for a configuration's activation, or None if there is none."""
    if config.use_te_activation_func or config.bias_activation_fusion:
        return None
    if config.gated_linear_unit:
        plain = config.activation_func_clamp_value is None and config.glu_linear_offset == 0.0
        return swiglu if config.activation_func is F.silu and plain else None
    return squared_relu if config.activation_func is upstream_squared_relu else None


class MLP(mlp.MLP):
    """megatron-core's MLP with a fused activation."""

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, h] -> [s, b, h], and a bias that was not added.

        per_token_scale: [s, b], multiplied to the activations and the bias.
        """
        activation = fused_activation(self.config)
        if activation is None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        hidden, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            hidden = hidden + bias
        scale = None if per_token_scale is None else per_token_scale.unsqueeze(-1)
        out, bias = self.linear_fc2(activation(hidden, scale))
        if scale is not None and bias is not None:
            out, bias = out + bias * scale, None
        return out, bias


class SharedExpertMLP(shared_experts.SharedExpertMLP, MLP):
    """The experts that see every token; its forward pass is MLP's."""
