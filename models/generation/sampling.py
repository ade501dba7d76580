# SPDX-License-Identifier: Apache-2.0
"""Which token comes next, and the loop that asks for it."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from models.generation.cached_model import CachedModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: temperature 0 takes the likeliest; top_k 0, top_p 1 keep all.

    Sequence i of a batch draws from a generator of its own, of `seed` + i, so that its tokens do
    not depend on how many others there are.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 1.0
    seed: int = 0


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from fp32 [vocab_size] logits on the CPU."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    # Less the largest, so that a temperature next to zero is the likeliest token and no overflow.
    logits = (logits - logits.max()) / max(sampling.temperature, 1e-30)
    values, ids = logits, None
    if 0 < sampling.top_k < logits.numel():
        values, ids = logits.topk(sampling.top_k)
    shares = values.softmax(-1)
    if sampling.top_p < 1:
        # The likeliest ones that together reach top_p: a token stays if those before it do not.
        ordered, order = shares.sort(descending=True)
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        dropped[0] = False
        shares = shares.clone()
        shares[order[dropped]] = 0
    picked = torch.multinomial(shares, 1, generator=generator)
    return int(picked if ids is None else ids[picked])


@dataclass
class Request:
    """What is to be continued, and how."""

    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt, at least one."""
    count: int
    """Most new tokens a sequence."""
    sampling: Sampling = Sampling()
    stop: Collection[int] = ()
    """Ids that end a sequence; they are not given out."""
    vocab_size: int | None = None
    """Only ids below it are chosen; None for all rows of the output layer."""
    prefill_tokens: int = 2048
    """Most tokens of a sequence that go through the model at once."""
    ended: set[int] = field(default_factory=set)
    """Sequences that take no further token: whoever reads the tokens may add some."""
    _generators: list[torch.Generator] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        assert all(len(prompt) for prompt in self.prompts), "a prompt has at least one token"
        first = self.sampling.seed
        for index in range(len(self.prompts)):
            self._generators.append(torch.Generator().manual_seed(first + index))

    def next(self, index: int, logits: Tensor) -> int:
        """The token of sequence `index` that follows, from [rows] logits.

        Raises:
            ConfigError: logits that are not finite.
        """
        logits = logits[: self.vocab_size].float().cpu()
        if not bool(torch.isfinite(logits).all()):
            raise ConfigError(
                f"a model must give finite logits; those of sequence {index} hold Inf or NaN: its "
                "weights do, or an activation overflowed; take a checkpoint from before that"
            )
        return choose(logits, self.sampling, self._generators[index])


def generate(model: CachedModel, request: Request) -> Iterator[list[tuple[int, int]]]:
    """Continue every prompt; yields after each pass the (sequence, token id) pairs it gave.

    The prompts take slots 0, 1, ... of the model's cache, which is cleared first. A sequence that
    has ended takes no part in later passes.
    """
    model.cache.clear()
    ends = prefill(model, request.prompts, request.prefill_tokens)
    active, left = list(range(len(request.prompts))), request.count
    while active:
        found = [(index, request.next(index, ends[index])) for index in active]
        found = [(index, token) for index, token in found if token not in request.stop]
        if found:
            yield found
        left -= 1
        found = [pair for pair in found if left > 0 and pair[0] not in request.ended]
        active = [index for index, _ in found]
        if active:
            new = [torch.tensor([token]) for _, token in found]
            ends = dict(zip(active, [row[-1] for row in model.forward(new, active, last=1)]))


def prefill(model: CachedModel, prompts: Sequence[Sequence[int]], most: int) -> dict[int, Tensor]:
    """Put prompts into slots 0, 1, ..., `most` tokens of each at a time.

    Returns:
        {sequence: fp32 logits [rows] of the token that follows its prompt}.
    """
    ends: dict[int, Tensor] = {}
    for start in range(0, max(map(len, prompts)), most):
        rest = {i: list(p[start : start + most]) for i, p in enumerate(prompts) if len(p) > start}
        pieces = [torch.tensor(piece) for piece in rest.values()]
        logits = model.forward(pieces, list(rest), last=1)
        ends |= {index: rows[-1] for index, rows in zip(rest, logits)}
    return ends


def token_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """fp32 logits [n, rows], int64 targets [n] -> log-probability of each target, fp32 [n]."""
    picked = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return picked - logits.logsumexp(-1)
