# SPDX-License-Identifier: Apache-2.0
"""How far a sampler's log-probabilities are from the trainer's, on the same tokens and weights.

In reinforcement learning a sampler writes texts, token by token with caches and often in fewer
bits, and a trainer learns from them with another forward pass. rho = exp(p_t - p_s) of each token
is the weight that corrects the difference, so that the difference itself is what to watch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.generation.cached_model import CachedModel, shared_over_tokens
from models.generation.sampling import Request, Sampling, generate
from pretrain.generation.opened import OpenedModel

OUTSIDE = 2.0
"""rho counts as outside where it is not within [1 / OUTSIDE, OUTSIDE]."""


@dataclass(frozen=True)
class Mismatch:
    """Token level, natural logarithms; p_s of the sampler, p_t of the trainer."""

    tokens: int
    mean: float
    """Mean |p_t - p_s|."""
    largest: float
    """Largest |p_t - p_s|."""
    probability_error: float
    """Mean exp(|p_t - p_s|)."""
    k3: float
    """Mean rho - 1 - log rho: estimates KL(sampler || trainer) on tokens of the sampler."""
    k3_reverse: float
    """The same with 1 / rho: estimates KL(trainer || sampler) on tokens of the trainer."""
    kl: float
    """KL(sampler || trainer) of the whole distributions, mean over the places."""
    kl_reverse: float
    """KL(trainer || sampler) of the whole distributions."""
    outside: float
    """Share of tokens with rho outside [1/2, 2]."""
    sequence: float
    """Largest |sum of p_t - p_s| over a sequence."""


@dataclass(frozen=True)
class Scores:
    """Log-probabilities over the vocabulary at the places that are compared, fp32 on the CPU."""

    table: Tensor
    """[sequences, places, vocabulary]."""
    targets: Tensor
    """int64 [sequences, places]: the token that came there."""

    @property
    def of_targets(self) -> Tensor:
        """[sequences, places]."""
        return self.table.gather(-1, self.targets.unsqueeze(-1)).squeeze(-1)


def compare(sampler: Scores, trainer: Scores) -> Mismatch:
    """Both on the same tokens; sums in FP64."""
    assert torch.equal(sampler.targets, trainer.targets), "the tokens are the same"
    gap = trainer.of_targets.double() - sampler.of_targets.double()
    divergences = [_divergences(*pair) for pair in zip(sampler.table, trainer.table)]
    kl, kl_reverse = (sum(each) / len(divergences) for each in zip(*divergences))
    size = gap.abs()
    return Mismatch(
        tokens=gap.numel(),
        mean=float(size.mean()),
        largest=float(size.max()),
        probability_error=float(size.exp().mean()),
        k3=float((gap.exp() - 1 - gap).mean()),
        k3_reverse=float(((-gap).exp() - 1 + gap).mean()),
        kl=kl,
        kl_reverse=kl_reverse,
        outside=float((size > math.log(OUTSIDE)).double().mean()),
        sequence=float(gap.sum(-1).abs().max()),
    )


def _divergences(sampler: Tensor, trainer: Tensor) -> tuple[float, float]:
    """KL both ways, mean over the places of one sequence; FP64 of one sequence at a time, in which
    probabilities add up to 1."""
    s, t = sampler.double().log_softmax(-1), trainer.double().log_softmax(-1)
    gap = s - t
    return float((s.exp() * gap).sum(-1).mean()), float((t.exp() * -gap).sum(-1).mean())


@torch.no_grad()
def trainer_scores(opened: OpenedModel, tokens: Tensor, prompt: int) -> Scores:
    """The training forward of whole sequences: int64 [sequences, length] -> places from `prompt`.

    Dropout is off: it is no part of what is compared.
    """
    logits = opened.full_logits(tokens[:, :-1])[:, prompt - 1 :, : opened.vocab_size]
    return Scores(logits.float().log_softmax(-1).cpu(), tokens[:, prompt:])


def sampler_scores(
    opened: OpenedModel, tokens: Tensor, prompt: int, *, batch_invariant: bool = False
) -> Scores:
    """The same places through caches: a prompt at once, then the given tokens one by one."""
    model = opened.cached(len(tokens), batch_invariant=batch_invariant)
    rows = [_last(model, [each[:prompt] for each in tokens])]
    for place in range(prompt, tokens.shape[1] - 1):
        rows.append(_last(model, [each[place : place + 1] for each in tokens]))
    logits = torch.stack(rows, 1)[..., : opened.vocab_size]
    return Scores(logits.log_softmax(-1), tokens[:, prompt:])


def _last(model: CachedModel, pieces: Sequence[Tensor]) -> Tensor:
    return torch.stack([rows[-1] for rows in model.forward(pieces, last=1)]).cpu()


def sampled_tokens(opened: OpenedModel, tokens: Tensor, prompt: int, seed: int) -> Tensor:
    """The same prompts, continued by the model as it is now: temperature 1, all of the vocabulary.

    With these the k3 estimates are unbiased. Ends of documents do not end a sequence.
    """
    count = tokens.shape[1] - prompt
    request = Request(
        prompts=tokens[:, :prompt].tolist(),
        count=count,
        sampling=Sampling(temperature=1.0, top_k=0, seed=seed),
        vocab_size=opened.vocab_size,
    )
    written = tokens[:, :prompt].tolist()
    for pairs in generate(opened.cached(len(tokens)), request):
        for index, token in pairs:
            written[index].append(token)
    return torch.tensor(written)


@dataclass(frozen=True)
class Invariance:
    """Whether a sequence's logits have the same bits alone and beside others."""

    name: str
    shared: int
    """Linear layers whose operands share an amax over tokens; with any it cannot hold."""
    cached: float
    """Largest difference in the cached pass, with GEMMs in blocks of rows where that can help."""
    full: float
    """Largest difference in the training forward, whose GEMMs have as many rows as there are."""


@torch.no_grad()
def batch_invariance(opened: OpenedModel, name: str, tokens: Tensor, prompt: int) -> Invariance:
    """Every sequence alone and beside the others, in the precision that the model has now."""
    shared = shared_over_tokens(opened.model)

    def cached(part: Tensor) -> Tensor:
        return sampler_scores(opened, part, prompt, batch_invariant=not shared).table

    beside, whole = cached(tokens), opened.full_logits(tokens)
    gaps, others = [], []
    for index in range(len(tokens)):
        part = tokens[index : index + 1]
        gaps.append(_difference(cached(part)[0], beside[index]))
        others.append(_difference(opened.full_logits(part)[0], whole[index]))
    return Invariance(name, len(shared), max(gaps), max(others))


def _difference(a: Tensor, b: Tensor) -> float:
    """Largest |a - b|; 0 only for equal bits, infinite where one is not finite."""
    if torch.equal(a, b):
        return 0.0
    found = float((a - b).abs().max())
    return max(found, 1e-45) if math.isfinite(found) else math.inf
