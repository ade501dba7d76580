# SPDX-License-Identifier: Apache-2.0
"""What an evaluation asks of a model: likelihoods of continuations and of texts, and answers."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fused_ops.errors import ConfigError
from models.generation.cached_model import shared_over_tokens
from models.generation.sampling import Request, Sampling, generate, token_log_probs
from pretrain.generation.opened import OpenedModel

Scored = tuple[list[int], list[int]]
"""Context and continuation, as ids."""


@dataclass
class Scorer:
    """A model that scores and answers in batches.

    Inputs longer than `max_length` lose their beginning, and are counted in `cut`.
    """

    opened: OpenedModel
    batch_size: int = 8
    max_length: int | None = None
    """Most tokens of context and continuation together; None for the model's seq_length."""
    cut: int = field(default=0, init=False)
    """Inputs that were shortened so far."""

    def __post_init__(self) -> None:
        if self.max_length is None:
            self.max_length = self.opened.config.model.seq_length
        if self.batch_size < 1 or self.max_length < 2:
            raise ConfigError(
                "an evaluation needs a batch size of at least 1 and at least 2 tokens, got "
                f"{self.batch_size} and {self.max_length}"
            )
        self.tokenizer = self.opened.tokenizer
        self._model = self.opened.cached(self.batch_size)

    @property
    def length(self) -> int:
        """Most tokens of an input."""
        assert self.max_length is not None, "set in __post_init__"
        return self.max_length

    def notes(self) -> list[str]:
        """What is right but may surprise."""
        found = []
        shared = shared_over_tokens(self.opened.model)
        if shared and self.batch_size > 1:
            found.append(
                f"{len(shared)} linear layers share an amax over the tokens of a batch: scores "
                "depend a little on --batch-size, and 1 scores each input by itself"
            )
        if self.cut:
            found.append(f"{self.cut} inputs were longer than {self.length} tokens: cut in front")
        return found

    def encode_pair(self, context: str, continuation: str) -> Scored:
        """Ids of both, as they come of the whole text; spaces between them go to the second."""
        text = context.rstrip()
        continuation = context[len(text) :] + continuation
        # Without a token that begins a text, the end of another stands before the first word.
        prefix = list(self.tokenizer.prefix)
        if not text and not prefix:
            prefix = [self.tokenizer.encoder.eod_id]
        first = [*prefix, *self.tokenizer.encoder.encode(text).tolist()]
        whole = [*prefix, *self.tokenizer.encoder.encode(text + continuation).tolist()]
        if whole == first:
            raise ConfigError(f"a continuation must have tokens; {continuation!r} has none")
        # Where the texts merge into one token, it counts for the continuation.
        cut = min(len(first), len(whole) - 1)
        return whole[:cut], whole[cut:]

    def log_likelihoods(self, pairs: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Of each continuation after its context: the sum in nats, and whether greedy takes it."""
        results: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            for index, result in zip(batch, self._score([pairs[i] for i in batch])):
                results[index] = result
        return results

    def _score(self, pairs: Sequence[Scored]) -> Iterator[tuple[float, bool]]:
        # The last token is only predicted, so that one more fits.
        inputs = [(context + target)[-self.length - 1 :] for context, target in pairs]
        self.cut += sum(len(i) < len(c) + len(t) for i, (c, t) in zip(inputs, pairs))
        targets = [target[-(len(ids) - 1) :] for ids, (_, target) in zip(inputs, pairs)]
        self._model.cache.clear()
        logits = self._model.forward(
            [torch.tensor(ids[:-1]) for ids in inputs], last=max(map(len, targets))
        )
        for rows, target in zip(logits, targets):
            rows = rows[-len(target) :, : self.opened.vocab_size].cpu()
            wanted = torch.tensor(target)
            greedy = bool((rows.argmax(-1) == wanted).all())
            yield float(token_log_probs(rows, wanted).double().sum()), greedy

    def text_log_likelihoods(self, texts: Sequence[str]) -> list[float]:
        """Of whole texts, in nats: each token once, with as much context as fits before it."""
        pieces = [windows(self._document(text), self.length) for text in texts]
        scores = iter(self.log_likelihoods([piece for each in pieces for piece in each]))
        return [sum(next(scores)[0] for _ in each) for each in pieces]

    def _document(self, text: str) -> list[int]:
        """Ids with at least one before the first that is predicted."""
        ids = self.tokenizer.prompt(text)
        return ids if self.tokenizer.prefix else [self.tokenizer.encoder.eod_id, *ids]

    def answers(
        self, contexts: Sequence[str], *, until: Sequence[str], count: int, sampling: Sampling
    ) -> list[str]:
        """Continue each text by up to `count` tokens, to the first of `until` or its end."""
        results = [""] * len(contexts)
        order = sorted(range(len(contexts)), key=lambda i: -len(contexts[i]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            request = self._request([contexts[i] for i in batch], count, sampling, start)
            for place, text in enumerate(self._answer(request, until)):
                results[batch[place]] = text
        return results

    def _request(
        self, contexts: Sequence[str], count: int, sampling: Sampling, start: int
    ) -> Request:
        room = self.length - count
        if room < 1:
            raise ConfigError(
                f"an answer must leave room for its question: {count} new tokens of at most "
                f"{self.length}; lower max_gen_toks of the task, or raise --max-length"
            )
        prompts = [self.tokenizer.prompt(text) for text in contexts]
        self.cut += sum(len(prompt) > room for prompt in prompts)
        seeded = Sampling(
            sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed + start
        )
        return Request(
            prompts=[prompt[-room:] for prompt in prompts],
            count=count,
            sampling=seeded,
            stop=self.tokenizer.stop,
            vocab_size=self.opened.vocab_size,
        )

    def _answer(self, request: Request, until: Sequence[str]) -> list[str]:
        ids: list[list[int]] = [[] for _ in request.prompts]
        ends = re.compile("|".join(map(re.escape, until))) if until else None
        for tokens in generate(self._model, request):
            for index, token in tokens:
                ids[index].append(token)
                if ends is not None and ends.search(self.tokenizer.decode(ids[index])):
                    request.ended.add(index)
        texts = [self.tokenizer.decode(each) for each in ids]
        return [ends.split(text, maxsplit=1)[0] if ends else text for text in texts]


def windows(ids: Sequence[int], length: int) -> list[Scored]:
    """A document (its first id is only context) as inputs of at most `length` tokens.

    Each further id is predicted once. The first window predicts `length` of them; a later one up
    to `length` more, and the last reaches back so far that its input is full too.
    """
    pieces, done = [], 1
    while done < len(ids):
        end = min(done + length, len(ids))
        first = max(0, end - 1 - length)
        pieces.append((list(ids[first:done]), list(ids[done:end])))
        done = end
    return pieces
