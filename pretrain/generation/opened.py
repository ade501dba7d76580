# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's model in one process with its tokenizer, ready to continue or to score text."""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from models.config import ModelConfig, ParallelConfig, transformer_config
from models.generation.cached_model import CachedModel, shared_over_tokens
from models.generation.sampling import Request, Sampling, generate
from models.hybrid_model import build_model
from models.precision import PrecisionPlan, PrecisionState, apply_precision
from pretrain.checkpoint.config import require_latest
from pretrain.checkpoint.io import load_json
from pretrain.checkpoint.layout import STATE
from pretrain.checkpoint.state import load_sharded
from pretrain.config import PretrainConfig, make_config
from pretrain.config_file import apply_overrides, parse_overrides
from pretrain.conversion.opened import CARRIED, vocabulary_of_data
from pretrain.data.tokenizer import TOKENIZER_NAME, TextEncoder, load_encoder
from pretrain.initialize import initialize


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, how a text begins with it, and what ends one."""

    encoder: TextEncoder
    prefix: tuple[int, ...]
    """Ids before a text: the end of the document before it, or what its family begins with."""
    stop: frozenset[int]
    """Ids that end a text."""

    def prompt(self, text: str) -> list[int]:
        """Ids of a text that begins a document: at least one."""
        return [*self.prefix, *self.encoder.encode(text).tolist()] or [self.encoder.eod_id]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return self.encoder.tokenizer.decode(list(ids))


def find_tokenizer(checkpoint: Path, data: Any, given: Path | None) -> Tokenizer:
    """The tokenizer that was named, that the checkpoint carries, or that lies beside its data.

    A checkpoint that was imported from a model folder carries the folder's small files.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    carried = checkpoint / f"{CARRIED}{TOKENIZER_NAME}"
    if given is None and carried.is_file():
        return _carried_tokenizer(checkpoint, carried)
    if given is None:
        first = Path(data.train if isinstance(data.train, str) else data.train[0].path)
        places = [folder / TOKENIZER_NAME for folder in (first, first.parent)]
        given = next((place for place in places if place.is_file()), None)
        if given is None:
            raise ConfigError(
                f"a tokenizer must be in the checkpoint ({carried.name}) or beside the run's data; "
                f"{first} and {first.parent} have no {TOKENIZER_NAME}; name it with "
                "--tokenizer FILE"
            )
    encoder = load_encoder(given)
    return Tokenizer(encoder, (encoder.eod_id,), frozenset({encoder.eod_id}))


def _carried_tokenizer(checkpoint: Path, path: Path) -> Tokenizer:
    """Ends and beginnings as the model folder states them; else by names, as for our own."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        file = checkpoint / f"{CARRIED}{name}"
        if not ends and file.is_file():
            stated = json.loads(file.read_text()).get("eos_token_id")
            ends |= set(stated if isinstance(stated, list) else [stated]) - {None}
    encoder = load_encoder(path, eod_id=min(ends) if ends else None)
    # What the family puts before every text: <s>, or nothing.
    plain = encoder.tokenizer.encode("a", add_special_tokens=False).ids
    framed = encoder.tokenizer.encode("a", add_special_tokens=True).ids
    prefix = tuple(framed[: framed.index(plain[0])])
    return Tokenizer(encoder, prefix, frozenset(ends or {encoder.eod_id}))


def check_scales(plan: PrecisionPlan, path: Path) -> None:
    """ConfigError where fp8_delayed lacks the amaxes of earlier steps: nothing here notes any."""
    if lacking := plan.without_scales():
        raise ConfigError(
            f"fp8_delayed scales by amaxes of earlier steps; {path} has none of {len(lacking)} "
            f"layers, such as {lacking[0]}, which were trained in another precision; take "
            "fp8_tensorwise, which scales by each tensor's own amax"
        )


class OpenedModel:
    """The model of a checkpoint, whole in this process, in the precision that it was trained in.

    Args:
        checkpoint: a run's checkpoints folder (its newest whole checkpoint is taken) or one step.
        tokenizer: a tokenizer.json; None takes the one found by `find_tokenizer`.
        device: auto, cpu or cuda.
        overrides: `section.key=value` over the run's own, such as precision.recipe=nvfp4_pow2.
        needs_tokenizer: False where ids are enough; then there may be none.

    Raises:
        ConfigError: no readable checkpoint, no tokenizer, or the two do not fit.
        CheckpointError: a damaged checkpoint.
    """

    def __init__(
        self,
        checkpoint: Path,
        tokenizer: Path | None = None,
        device: str = "auto",
        *,
        overrides: Sequence[str] = (),
        needs_tokenizer: bool = True,
    ) -> None:
        found = require_latest(checkpoint)
        self.path = found.path
        state = load_json(found.path / STATE)
        self.overrides = tuple(overrides)
        apply_overrides(state["config"], parse_overrides(overrides))
        self.config: PretrainConfig = make_config(state["config"])
        self._tokenizer: Tokenizer | None = None
        if needs_tokenizer or tokenizer is not None:
            self._tokenizer = find_tokenizer(found.path, self.config.data, tokenizer)
        self.vocab_size = self._vocabulary(state["extra"])
        self._build(state["extra"], device)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ConfigError if none was found."""
        if self._tokenizer is None:
            self._tokenizer = find_tokenizer(self.path, self.config.data, None)
        return self._tokenizer

    @property
    def section(self) -> ModelConfig:
        """The `model` section in one process."""
        return self.config.model.unstaged

    def _vocabulary(self, extra: dict[str, Any]) -> int:
        """Entries without padding: ids from there on are never chosen."""
        size = self.config.model.vocab_size or extra.get("vocab_size")
        if self._tokenizer is None:
            remedy = "put model.vocab_size=N behind CKPT_DIR"
            return int(size or vocabulary_of_data(self.config, remedy))
        entries = self._tokenizer.encoder.vocab_size
        if size is not None and entries > size:
            raise ConfigError(
                f"a tokenizer must fit the model; it has ids up to {entries - 1}, the model "
                f"{size} entries; name the right one with --tokenizer FILE"
            )
        return int(entries)

    def _build(self, extra: dict[str, Any], device: str) -> None:
        from megatron.core.transformer.module import Float16Module

        config, layout = self.config, ParallelConfig()
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        world = initialize(layout, device=device, seed=config.run.seed)
        engine = transformer_config(self.section, layout, params_dtype=config.train.torch_dtype)
        vocab_size = config.model.vocab_size or extra.get("vocab_size") or self.vocab_size
        chunks: list[Any] = list(build_model(self.section, engine, world.groups, vocab_size))
        chunks = [chunk.to(world.device) for chunk in chunks]
        self.state = PrecisionState(seed=config.run.seed, device=world.device)
        self.plan: PrecisionPlan = apply_precision(
            chunks, config.precision, self.state, total_samples=config.train.total_samples
        )
        if "precision" in extra:
            self.plan.load_state_dict(extra["precision"])
        check_scales(self.plan, self.path)
        if config.train.dtype != "fp32":
            chunks = [Float16Module(engine, chunk) for chunk in chunks]
        load_sharded(self.path, chunks, None, whole=True)
        self.state.weights_changed()
        # Weights that need no gradient spare every layer what it would keep for the backward pass.
        self.device, self.model = world.device, chunks[0].eval().requires_grad_(False)

    def cached(self, slots: int, *, batch_invariant: bool = False) -> CachedModel:
        """The model with a cache for so many sequences."""
        return CachedModel(self.model, slots, batch_invariant=batch_invariant)

    @torch.no_grad()
    def full_logits(self, ids: Tensor) -> Tensor:
        """The training forward: int64 [batch, n] -> fp32 logits [batch, n, rows]."""
        ids = ids.to(self.device)
        positions = torch.arange(ids.shape[1], device=self.device).expand(len(ids), -1)
        return self.model(ids, positions.contiguous(), None).float()

    def continue_texts(
        self, prompts: Sequence[str], count: int, sampling: Sampling, *, invariant: bool = False
    ) -> Iterator[tuple[int, str]]:
        """Yields (which prompt, piece of text) as it comes; an unfinished character waits.

        A piece is what a token adds to the prompt's text: many tokenizers leave a space in front
        away where a text begins.
        """
        tokenizer = self.tokenizer
        request = Request(
            prompts=[tokenizer.prompt(text) for text in prompts],
            count=count,
            sampling=sampling,
            stop=tokenizer.stop,
            vocab_size=self.vocab_size,
        )
        whole = [list(prompt) for prompt in request.prompts]
        shown = [tokenizer.decode(ids) for ids in whole]
        model = self.cached(len(prompts), batch_invariant=invariant)
        for tokens in generate(model, request):
            for index, token in tokens:
                whole[index].append(token)
                text = tokenizer.decode(whole[index])
                if not text.endswith("\ufffd"):
                    yield index, text[len(shown[index]) :]
                    shown[index] = text

    def notes(self, prompts: Sequence[Collection[int]], count: int) -> list[str]:
        """What is allowed and may surprise."""
        found = []
        longest, trained = max(map(len, prompts)) + count, self.config.model.seq_length
        if longest > trained:
            found.append(
                f"texts of up to {longest} tokens, and the model was trained on {trained}: "
                "what it says behind that place may be poor"
            )
        if len(prompts) > 1 and (shared := shared_over_tokens(self.model)):
            found.append(
                f"{len(shared)} linear layers share an amax over the tokens of a batch: a text "
                "depends on the prompts beside it; ask for one a call, or set a recipe that "
                "--batch-invariant takes, such as nvfp4_pow2"
            )
        return found
