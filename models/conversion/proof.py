# SPDX-License-Identifier: Apache-2.0
"""The proof by logits: both engines run on the same random tokens, compared behind every layer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.conversion.judge import Judge
from models.conversion.streamed import StreamedModel

TOLERANCE = 1e-4
"""Largest error, relative to the largest value that a layer adds, or to the largest logit."""
_NOISE = 2e-6
"""What FP32 sums in another order may differ by, relative to the residual stream itself."""
_TIE = 1e-5
"""Router scores closer than this decide by rounding: such tokens prove nothing."""
_DRAWS = 5


@dataclass
class LayerError:
    """What was found behind one of their layers."""

    name: str
    error: float
    """Relative to the largest value that the layer added."""
    worst: Tensor
    """bool [batch, tokens]: which tokens differ."""
    undecided: Tensor
    """bool [batch, tokens]: which tokens a router chose experts for by rounding."""


@dataclass
class LogitsProof:
    """The outcome for one draw of tokens."""

    layers: list[LayerError] = field(default_factory=list)
    diverged: LayerError | None = None
    logits_error: float = 0.0
    tied: bool = False
    tokens: tuple[int, int] = (0, 0)

    @property
    def problem(self) -> str | None:
        """What is wrong, None when nothing is."""
        if self.diverged is not None:
            return (
                f"logits: {self.diverged.name} is the first to diverge from transformers: relative "
                f"error {self.diverged.error:.3g}, allowed {TOLERANCE:g}"
            )
        if not self.logits_error <= TOLERANCE:
            return (
                f"logits: head: relative error {self.logits_error:.3g}, allowed {TOLERANCE:g}, "
                "though every layer agrees"
            )
        return None


def prove_logits(
    ours: StreamedModel,
    judge: Judge,
    vocab_size: int,
    *,
    symbols_a_layer: int,
    tokens: int,
    step: Callable[[], None] = lambda: None,
) -> LogitsProof:
    """Compare on [2, tokens] random ids; drawn again where a router decided by rounding."""
    proof = LogitsProof()
    for draw in range(_DRAWS):
        generator = torch.Generator().manual_seed(1234 + draw)
        ids = torch.randint(0, vocab_size, (2, tokens), generator=generator)
        proof = _Comparison(ours, judge, symbols_a_layer, step).run(ids, vocab_size)
        if not proof.tied:
            break
    return proof


class _Comparison:
    """One draw of tokens through both engines."""

    def __init__(
        self, ours: StreamedModel, judge: Judge, symbols: int, step: Callable[[], None]
    ) -> None:
        self.ours, self.judge, self.symbols, self.step = ours, judge, symbols, step
        self.proof = LogitsProof()
        self.undecided = torch.zeros(0)

    def run(self, ids: Tensor, vocab_size: int) -> LogitsProof:
        """Both forward passes in step."""
        self.proof.tokens = (ids.shape[0], ids.shape[1])
        self.hidden = self.ours.embed(ids)
        self.undecided = torch.zeros(ids.shape, dtype=torch.bool)
        try:
            theirs = self.judge.run(ids, self._after)
        except _Diverged:
            return self.proof
        logits = self.ours.head(self.hidden, vocab_size)
        if logits.shape != theirs.shape:
            self.proof.logits_error = float("inf")
        else:
            self.proof.logits_error = _relative(logits, theirs)
        return self.proof

    def _after(self, number: int, theirs: Tensor) -> None:
        if number < 0:
            self._before, name = torch.zeros_like(theirs), "the embedding"
        else:
            name = f"layer {number}"
            first = number * self.symbols
            for position in range(first, first + self.symbols):
                self.hidden = self.ours.layer(position, self.hidden, self._watch_router)
        ours = self.hidden.transpose(0, 1)
        added = (theirs - self._before).abs().amax()
        gap = (ours - theirs).abs()
        allowed = TOLERANCE * added + _NOISE * theirs.abs().amax()
        worst = ~(gap.amax(-1) <= allowed)
        error = float(gap.amax() / added.clamp_min(torch.finfo(torch.float32).tiny))
        found = LayerError(name, error, worst, self.undecided.clone())
        self.proof.layers.append(found)
        if worst.any():
            # Behind a token whose experts rounding chose, attention and states differ too.
            reached = self.undecided.cummax(-1).values
            self.proof.tied = bool((worst & ~reached).sum() == 0)
            self.proof.diverged = found
            raise _Diverged
        self._before = theirs.clone()
        self.step()

    def _watch_router(self, stack: Any) -> None:
        for module in stack.modules():
            if hasattr(module, "gating") and hasattr(module, "topk"):
                module.register_forward_hook(self._note_ties)

    def _note_ties(self, router: Any, inputs: Any, output: Any) -> None:
        scores = router.gating(inputs[0]).float().flatten(0, -2)
        if router.score_function == "sigmoid":
            scores = scores.sigmoid()
        if router.expert_bias is not None:
            scores = scores + router.expert_bias.float()
        ordered = scores.sort(-1, descending=True).values
        if ordered.shape[-1] <= router.topk:
            return
        gap = ordered[:, router.topk - 1] - ordered[:, router.topk]
        close = gap <= _TIE * ordered.abs().amax(-1).clamp_min(1e-3)
        # Groups of experts are ranked by sums of scores: any two close ones may decide there.
        if router.config.moe_router_num_groups:
            close |= (ordered[:, :-1] - ordered[:, 1:]).amin(-1) <= _TIE * _TIE
        tokens, batch = inputs[0].shape[:2]
        self.undecided |= close.view(tokens, batch).t()


class _Diverged(Exception):
    """Stops the judge's forward pass."""


def _relative(ours: Tensor, theirs: Tensor) -> float:
    gap, scale = (ours - theirs).abs().amax(), theirs.abs().amax()
    return float(gap / scale.clamp_min(torch.finfo(torch.float32).tiny))
