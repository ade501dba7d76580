# SPDX-License-Identifier: Apache-2.0
"""A model that takes new tokens of several sequences and remembers the ones before."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from fused_ops.errors import ConfigError
from models.generation.cache import Cache, CacheStep
from models.hybrid_model import HybridModel
from models.parallel_linear import GemmModule
from models.precision import unwrap

ROW_BLOCK = 16
"""Rows of one GEMM where outputs must not depend on the batch. A GEMM of few rows reads the weight
and little else, so that the rows which fill up a block cost next to nothing on a GPU."""


class CachedModel:
    """The forward pass of a built model, a piece of each sequence at a time.

    What it computes is the training forward of the sequences so far: the same layers with the same
    recipes, each token seen once. Multi-token prediction layers are left out. Two passes need not
    round alike: sums of attention and of Mamba's scan are taken in another order.

    Args:
        model: the chunk of a model in one process, in any wrapper; it is put into evaluation mode.
        slots: most sequences at a time.
        batch_invariant: compute so that a sequence's logits have the same bits whatever shares its
            batch: attention and scan of each sequence by itself, GEMMs in blocks of ROW_BLOCK rows
            (in the reference arithmetic on a GPU too, which is slow there).

    Raises:
        ConfigError: a model that cannot be run so; batch_invariant where operands share an amax
            over tokens (`shared_over_tokens`).
    """

    def __init__(self, model: Any, slots: int, *, batch_invariant: bool = False) -> None:
        self.model: HybridModel = unwrap(model)
        problems = cache_problems(self.model)
        if batch_invariant and (shared := shared_over_tokens(self.model)):
            problems.append(
                f"batch invariance needs operands whose codes depend on their own token: the input "
                f"of {len(shared)} linear layers ({shared[0]}, ...) shares an amax with others; "
                "choose a precision with row_scaled or pow2 operands (nvfp4_pow2), mxfp8, or bf16"
            )
        if batch_invariant:
            problems += backend_problems(self.model, "batch invariance")
        if problems:
            raise ConfigError(problems)
        self.model.eval()
        device = next(self.model.parameters()).device
        self.cache = Cache(slots, device)
        self.batch_invariant = batch_invariant
        self._gemms = [m for m in self.model.modules() if isinstance(m, GemmModule)]
        self._routers = [m.router for m in self.model.modules() if isinstance(m, MoELayer)]

    @torch.no_grad()
    def forward(
        self, tokens: Sequence[Tensor], slots: Sequence[int] | None = None, *, last: int = 0
    ) -> list[Tensor]:
        """Logits of the tokens that follow.

        Args:
            tokens: int64 [n] of each sequence, at least one; those after what its slot has had.
            slots: the place of each sequence in the cache; None for 0, 1, 2, ...
            last: only those after so many of each sequence's last tokens; 0 for all.

        Returns:
            fp32 [n, or at most `last`, vocabulary with padding] of each sequence.
        """
        slots = range(len(tokens)) if slots is None else slots
        counts = [len(piece) for piece in tokens]
        step = CacheStep(self.cache, slots, counts, alone=self.batch_invariant)
        ids = torch.cat(list(tokens)).to(self.cache.device)[None]
        model = self.model
        with self._arithmetic():
            hidden = model.embedding(input_ids=ids, position_ids=step.positions[None])
            rotary = None
            if model.position_embedding_type == "rope" and not model.config.multi_latent_attention:
                angles = step.angles_of(model.rotary_pos_emb)
                rotary = angles(angles.get_rotary_seq_len())
            hidden = model.decoder(
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=rotary,
                packed_seq_params=step,
            )
            if last:
                hidden = torch.cat([part[-last:] for part in hidden.split(counts)])
                counts = [min(count, last) for count in counts]
            logits = self._logits(hidden)
        step.finish()
        return list(logits[:, 0].float().split(counts))

    def _logits(self, hidden: Tensor) -> Tensor:
        """[tokens, 1, hidden] -> [tokens, 1, vocabulary]."""
        model = self.model
        shared = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if shared else None

        def product(rows: Tensor) -> Tensor:
            return model.output_layer(rows, weight=weight)[0]

        made = in_row_blocks(product, hidden) if self.batch_invariant else product(hidden)
        return model._scale_logits(made)

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """Inside, GEMMs are taken in blocks of rows if outputs must not depend on the batch."""
        states = {id(g.precision_state): g.precision_state for g in self._gemms}
        rows = ROW_BLOCK if self.batch_invariant else None
        before = {key: state.row_block for key, state in states.items() if state is not None}
        try:
            for state in states.values():
                if state is not None:
                    state.row_block = rows
            if rows is not None:
                for router in self._routers:
                    vars(router)["gating"] = _blocked(router.gating)
            yield
        finally:
            for key, state in states.items():
                if state is not None:
                    state.row_block = before[key]
            for router in self._routers:
                vars(router).pop("gating", None)


def _blocked(gating: Any) -> Any:
    def blocked(hidden: Tensor) -> Tensor:
        return in_row_blocks(gating, hidden)

    return blocked


def in_row_blocks(function: Any, x: Tensor, rows: int = ROW_BLOCK) -> Tensor:
    """`function` of x [tokens, ...] in pieces of `rows` tokens, the last filled up with zeros."""
    made = []
    for block in x.split(rows):
        missing = rows - block.shape[0]
        filled = torch.cat([block, block.new_zeros(missing, *block.shape[1:])])
        made.append(function(filled)[: block.shape[0]])
    return torch.cat(made)


def cache_problems(model: Any) -> list[str]:
    """Why a built model cannot be run piece by piece."""
    config, problems = model.config, []
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size",
                 "context_parallel_size", "expert_model_parallel_size"):  # fmt: skip
        if (size := getattr(config, name)) != 1:
            problems.append(
                f"generation runs in one process; this model is built with {name} {size}: build it "
                "with every size 1 (a checkpoint of any layout loads into it)"
            )
    if config.moe_expert_capacity_factor is not None:
        problems.append(
            "generation cannot keep moe_expert_capacity_factor "
            f"({config.moe_expert_capacity_factor}): which tokens an expert drops depends on all "
            "tokens of a batch; set it to null to generate without dropping"
        )
    return problems


def backend_problems(model: Any, what: str) -> list[str]:
    """Why something that this project's own GEMMs do cannot be had of a model."""
    modules = (m for m in unwrap(model).modules() if isinstance(m, GemmModule))
    others = {module.backend for module in modules} - {"fused_ops"}
    return [
        f"{what} needs the GEMMs of fused_ops, and the model has precision.backend {other}; set "
        "precision.backend=fused_ops"
        for other in sorted(others)
    ]


def shared_over_tokens(model: Any) -> list[str]:
    """The linear layers whose input shares an amax over its tokens, by global name.

    Their outputs depend on what shares the batch, and a cached pass differs from the training
    forward by what another amax makes of the codes.
    """
    return [
        module.gemm_name
        for module in unwrap(model).modules()
        if isinstance(module, GemmModule) and shares_tokens(module.recipe.spec("fprop", "x"))
    ]


def shares_tokens(spec: Any) -> bool:
    """Whether codes of one token depend on other tokens."""
    if spec.format == "fp8_delayed":
        return False  # its scale is of earlier steps
    return (
        (spec.needs_amax and not spec.row_scaled)
        or (spec.block or (1, 1))[0] > 1
        or (spec.is_random)
    )
