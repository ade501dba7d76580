# SPDX-License-Identifier: Apache-2.0
"""One stack for every architecture: which module each symbol of the pattern stands for."""

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from models.attention import MLASelfAttention, SelfAttention
from models.experts import MoELayer
from models.mamba import MambaMixer
from models.mlp import MLP, SharedExpertMLP
from models.norm import AllHeadsNorm, Norm, ResidualNorm
from models.spec_provider import SpecProvider


class Stack(HybridStack):
    """megatron-core's stack of layers, whose final norm is fixed to Transformer Engine's."""

    def __init__(self, *args: Any, post_layer_norm: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = Norm(
                self.config, self.config.hidden_size, eps=self.config.layernorm_epsilon
            )


def stack_spec(config: Any) -> ModuleSpec:
    """The stack for a TransformerConfig: a module for each symbol, and multi-token prediction."""
    provider = SpecProvider()
    column, row = provider.column_parallel_linear(), provider.row_parallel_linear()
    return ModuleSpec(
        module=Stack,
        submodules=HybridStackSubmodules(
            mamba_layer=_mamba(column, row),
            attention_layer=_attention(_self_attention(config, provider)),
            mla_layer=_attention(_latent_attention(config, provider)),
            mlp_layer=_feed_forward(
                MLPLayer,
                partial(
                    MLP.as_mlp_submodule,
                    submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row),
                ),
            ),
            moe_layer=_feed_forward(MoETransformerLayer, _experts(provider)),
            mtp_block_spec=_prediction(column),
        ),
    )


def _mamba(column: type, row: type) -> ModuleSpec:
    mixer = ModuleSpec(
        module=MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row)
    )
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(norm=Norm, mixer=mixer, mamba_bda=get_bias_dropout_add),
    )


def _attention(attention: ModuleSpec) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=ResidualNorm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
        ),
    )


def _self_attention(config: Any, provider: SpecProvider) -> ModuleSpec:
    norms = _head_norms(config)
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=norms[0],
            k_layernorm=norms[1],
        ),
    )


def _head_norms(config: Any) -> tuple[Any, Any]:
    """The norms of queries and keys."""
    if not config.qk_layernorm:
        return None, None
    if getattr(config, "qk_norm_over", "head") == "head":
        return Norm, Norm
    groups = config.num_query_groups or config.num_attention_heads
    counts = (config.num_attention_heads, groups)
    norms = [ModuleSpec(module=AllHeadsNorm, params={"heads": count}) for count in counts]
    return norms[0], norms[1]


def _latent_attention(config: Any, provider: SpecProvider) -> ModuleSpec:
    column = provider.column_parallel_linear()
    latent_norm = Norm if config.qk_layernorm else None
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            # Only its own class is accepted here; MLASelfAttention adopts what is built.
            linear_q_down_proj=layers.ColumnParallelLinear,
            linear_q_up_proj=column,
            linear_kv_down_proj=layers.ColumnParallelLinear,
            linear_kv_up_proj=column,
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=latent_norm if getattr(config, "q_lora_rank", None) is not None else None,
            kv_layernorm=latent_norm,
        ),
    )


def _feed_forward(layer: type, mlp: Any) -> ModuleSpec:
    return ModuleSpec(
        module=layer,
        submodules=TransformerLayerSubmodules(
            pre_mlp_layernorm=ResidualNorm, mlp=mlp, mlp_bda=get_bias_dropout_add
        ),
    )


def _experts(provider: SpecProvider) -> Any:
    projections = MLPSubmodules(
        linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear()
    )
    return partial(
        MoELayer,
        submodules=MoESubmodules(
            experts=provider.grouped_mlp_modules(True),
            shared_experts=partial(SharedExpertMLP, submodules=projections),
        ),
    )


def _prediction(column: type) -> ModuleSpec:
    layer = ModuleSpec(
        module=MultiTokenPredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=Norm, hnorm=Norm, layer_norm=Norm, eh_proj=column, mtp_model_layer=None
        ),
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )
