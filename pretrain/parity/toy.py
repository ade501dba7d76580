# SPDX-License-Identifier: Apache-2.0
"""The toy of the parity matrix: its run section by section, and its samples."""

from dataclasses import dataclass
from typing import Any

import torch

from pretrain.config import PretrainConfig, make_config
from pretrain.parity.layouts import Layout

SEQ_LENGTH, VOCAB = 64, 256
MICRO_BATCH, SAMPLES = 2, 8
SEED = 11

_MODEL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 128,
    "qk_layernorm": True,
}
# Every part of the input projection is a multiple of 16 on each of two tensor-parallel ranks.
_MAMBA = {"mamba_num_heads": 32, "mamba_head_dim": 8, "mamba_state_dim": 16, "mamba_num_groups": 2}
_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_dtype": "fp32",
}
_SOFTMAX = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
    "moe_z_loss_coeff": 1e-3,
}
_SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-3,
    "moe_router_topk_scaling_factor": 2.5,
}
_LATENT_ATTENTION = {
    "q_lora_rank": 32,
    "kv_lora_rank": 48,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained."""

    pattern: str
    recipe: str
    """Of every GEMM."""
    dtype: str
    """Of parameters and activations: fp32 or bf16."""
    steps: int = 3

    @property
    def name(self) -> str:
        """As in tables and on the command line."""
        if self.recipe == "bf16":
            return self.dtype
        return self.recipe if self.dtype == "bf16" else f"{self.recipe}:{self.dtype}"


def read_case(pattern: str, text: str, steps: int) -> Case:
    """`fp32`, `bf16`, `RECIPE` or `RECIPE:fp32` (BF16 activations, or FP32 ones)."""
    if text in ("fp32", "bf16"):
        return Case(pattern=pattern, recipe="bf16", dtype=text, steps=steps)
    recipe, _, dtype = text.partition(":")
    return Case(pattern=pattern, recipe=recipe, dtype=dtype or "bf16", steps=steps)


def megatron_fields(pattern: str) -> dict[str, Any]:
    """`model.megatron` for a pattern: routers differ with the company that experts keep.

    Beside Mamba layers they are latent experts with squared ReLU, beside multi-latent attention
    they are chosen by groups, both with sigmoid scores and a bias; else with softmax.
    """
    fields: dict[str, Any] = dict(_MODEL)
    if "M" in pattern:
        fields |= _MAMBA
    if "+" in pattern:
        fields |= _LATENT_ATTENTION
        del fields["num_query_groups"], fields["kv_channels"]
    if "E" in pattern:
        fields |= _EXPERTS
        if "+" in pattern:
            fields |= _SIGMOID | {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
        elif "M" in pattern:
            fields |= _SIGMOID | {"moe_latent_size": 32, "gated_linear_unit": False}
            fields["activation_func"] = "squared_relu"
        else:
            fields |= _SOFTMAX
    return fields


def run_config(case: Case, layout: Layout) -> PretrainConfig:
    """The run of a case in a layout.

    Adam's eps is far above the rounding of gradients: with a tiny one an update is the sign of a
    gradient, which says nothing about one that is zero but for its rounding.

    Raises:
        ConfigError: the layout, or the recipe, does not fit.
    """
    parallel = {
        name: value for name, value in vars(layout.parallel).items() if not name.startswith("_")
    }
    stages = layout.parallel.pipeline_model_parallel_size * layout.parallel.virtual
    # A pattern with `|` is that of its pipeline; every other layout has the layers in one piece.
    pattern = case.pattern.replace("|", "") if stages == 1 else case.pattern
    return make_config(
        {
            "run": {"name": "parity", "seed": SEED},
            "model": {
                "pattern": pattern,
                "seq_length": SEQ_LENGTH,
                "vocab_size": VOCAB,
                "init_std": 0.05,
                "megatron": megatron_fields(case.pattern) | layout.megatron,
            },
            "data": {"train": "none"},
            "train": {
                "steps": 100,
                "global_batch_size": SAMPLES,
                "micro_batch_size": MICRO_BATCH,
                "dtype": case.dtype,
            },
            "optimizer": {"lr": 3e-3, "eps": 1e-3, "schedule": "constant"},
            "parallel": parallel,
            "precision": {"recipe": case.recipe, "communicate": layout.communicate},
        }
    )


def micro_batch(case: Case, step: int, index: int, order: tuple[int, ...]) -> dict[str, Any]:
    """Micro-batch `index` of a step, as the loader gives it.

    `order`: which sample of the step stands in which place of the global batch. Some labels do not
    count, and one sample of each step is half padding.
    """
    places = range(index * MICRO_BATCH, (index + 1) * MICRO_BATCH)
    rows, masks, starts = [], [], []
    for place in places:
        sample = order[place]
        generator = torch.Generator().manual_seed(100_003 * step + sample)
        rows.append(torch.randint(0, VOCAB, (SEQ_LENGTH + 1,), generator=generator))
        mask = (torch.rand(SEQ_LENGTH, generator=generator) < 0.9).float()
        if sample == step % SAMPLES:
            mask[SEQ_LENGTH // 2 :] = 0
        masks.append(mask)
        first = (place - places.start) * SEQ_LENGTH
        inside = torch.randint(1, SEQ_LENGTH, (2,), generator=generator).unique()
        starts += [first, *(first + inside).tolist()]
    tokens = torch.stack(rows)
    bounds = torch.tensor([*starts, MICRO_BATCH * SEQ_LENGTH], dtype=torch.int32)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.stack(masks),
        "position_ids": torch.arange(SEQ_LENGTH).expand(MICRO_BATCH, -1).contiguous(),
        "cu_seqlens": bounds,
        "index": index,
    }


def micro_batches(
    case: Case, step: int, rank: int, ranks: int, order: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Those of data-parallel rank `rank` of `ranks` in a step, as `pretrain.data.loader` deals."""
    return [micro_batch(case, step, i, order) for i in range(rank, SAMPLES // MICRO_BATCH, ranks)]
