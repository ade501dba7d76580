# SPDX-License-Identifier: Apache-2.0
"""Text from a checkpoint: `python -m tools.generate CKPT_DIR --prompt TEXT`.

CKPT_DIR is a run's checkpoints folder (its newest whole checkpoint is taken) or one step of it.
The model computes in the precision that it was trained in. Every new token is one forward pass
over the whole text so far; one process, any machine.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from pretrain import cpu_compat
from pretrain.data.tokenizer import TOKENIZER_NAME, TextEncoder, load_encoder


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: temperature 0 takes the likeliest; top_k 0 keeps all."""

    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0


def sample_tokens(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    count: int,
    sampling: Sampling,
    stop: int | None = None,
) -> Iterator[int]:
    """Yields up to `count` new token ids, ending before `stop`.

    Args:
        logits_of: int64 [1, n] ids -> [vocab_size] logits of the token that comes next.
        prompt: ids to continue; at least one.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = torch.tensor([list(prompt)], dtype=torch.int64)
    for _ in range(count):
        token = choose(logits_of(ids).float().cpu(), sampling, generator)
        if token == stop:
            return
        yield token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token id from fp32 [vocab_size] logits."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.numel():
        kept = logits.topk(sampling.top_k)
        picked = torch.multinomial(kept.values.softmax(-1), 1, generator=generator)
        return int(kept.indices[picked])
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def find_tokenizer(data: Any, given: Path | None) -> TextEncoder:
    """The tokenizer that was named, or the one beside the run's training data.

    Raises:
        ConfigError: there is none.
    """
    if given is not None:
        return load_encoder(given)
    first = Path(data.train if isinstance(data.train, str) else data.train[0].path)
    for folder in (first, first.parent):
        if (folder / TOKENIZER_NAME).is_file():
            return load_encoder(folder / TOKENIZER_NAME)
    raise ConfigError(
        f"a tokenizer must be beside the run's data; {first} and {first.parent} have no "
        f"{TOKENIZER_NAME}; name it with --tokenizer FILE"
    )


class Generator:
    """A checkpoint's model in one process, ready to continue text.

    Raises:
        ConfigError: no readable checkpoint, no tokenizer, or the two do not fit.
    """

    def __init__(self, checkpoint: Path, tokenizer: Path | None, device: str = "auto") -> None:
        from pretrain.checkpoint.io import load_json
        from pretrain.checkpoint.layout import STATE
        from pretrain.checkpoint.manager import find_latest
        from pretrain.config import make_config

        found = find_latest(checkpoint)
        if found is None:
            raise ConfigError(
                f"CKPT_DIR must hold a checkpoint; {checkpoint} holds none; give a run's "
                "checkpoints folder (runs/NAME/checkpoints) or one step of it"
            )
        self.path = found.path
        state = load_json(found.path / STATE)
        self.config = make_config(state["config"])
        self.encoder = find_tokenizer(self.config.data, tokenizer)
        self._build(state["extra"], device)

    def _build(self, extra: dict[str, Any], device: str) -> None:
        from megatron.core.transformer.module import Float16Module

        from models.config import ParallelConfig, transformer_config
        from models.hybrid_model import build_model
        from models.precision import PrecisionState, apply_precision
        from pretrain.checkpoint.state import load_sharded
        from pretrain.initialize import initialize

        config, layout = self.config, ParallelConfig()
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        world = initialize(layout, device=device, seed=config.run.seed)
        engine = transformer_config(config.model, layout, params_dtype=config.train.torch_dtype)
        vocab_size = config.model.vocab_size or self.encoder.vocab_size
        chunks = build_model(config.model, engine, world.groups, vocab_size)
        chunks = [chunk.to(world.device) for chunk in chunks]
        state = PrecisionState(seed=config.run.seed, device=world.device)
        samples = config.train.total_samples
        plan = apply_precision(chunks, config.precision, state, total_samples=samples)
        if "precision" in extra:
            plan.load_state_dict(extra["precision"])
        if config.train.dtype != "fp32":
            chunks = [Float16Module(engine, chunk) for chunk in chunks]
        load_sharded(self.path, chunks, None)
        state.weights_changed()
        # Weights that need no gradient spare every layer what it would keep for the backward pass.
        self.device, self.model = world.device, chunks[0].eval().requires_grad_(False)

    @torch.no_grad()
    def logits_of(self, ids: Tensor) -> Tensor:
        """int64 [1, n] -> [vocab_size] logits of the next token; the last seq_length ids count."""
        ids = ids[:, -self.config.model.seq_length :].to(self.device)
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        logits = self.model(ids, positions, None)
        return logits[0, -1, : self.encoder.vocab_size]

    def text(self, prompt: str, count: int, sampling: Sampling) -> Iterator[str]:
        """Yields pieces of text that continue `prompt`; an unfinished character waits."""
        tokenizer, end = self.encoder.tokenizer, self.encoder.eod_id
        ids = [end, *self.encoder.encode(prompt).tolist()]
        new: list[int] = []
        shown = ""
        for token in sample_tokens(self.logits_of, ids, count, sampling, stop=end):
            new.append(token)
            text = tokenizer.decode(new)
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CKPT_DIR")
    add("--prompt", default="The ", help="text to continue")
    add("--tokens", type=int, default=100, help="most tokens to add")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    add("--top-k", type=int, default=40, help="choose among the K likeliest; 0: all")
    add("--seed", type=int, default=0)
    add("--tokenizer", type=Path, metavar="FILE", help="default: the one beside the data")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    return parser


def _problems(options: argparse.Namespace) -> list[str]:
    rules = (
        (options.tokens >= 1, f"--tokens must be at least 1; got {options.tokens}"),
        (options.temperature >= 0, f"--temperature must not be negative; {options.temperature}"),
        (options.top_k >= 0, f"--top-k must not be negative; got {options.top_k}; 0 keeps all"),
    )
    return [text for holds, text in rules if not holds]


def main(arguments: list[str] | None = None) -> int:
    """Prints the prompt and what the model makes of it; returns the exit status."""
    options = _parser().parse_args(arguments)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    logging.getLogger("torch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    cpu_compat.enable()  # before megatron-core is imported
    from pretrain.checkpoint.manager import CheckpointError
    from pretrain.initialize import shut_down

    try:
        if problems := _problems(options):
            raise ConfigError(problems)
        generator = Generator(options.checkpoint, options.tokenizer, options.device)
        print(options.prompt, end="", flush=True)
        sampling = Sampling(options.temperature, options.top_k, options.seed)
        for piece in generator.text(options.prompt, options.tokens, sampling):
            print(piece, end="", flush=True)
        print()
    except (ConfigError, CheckpointError) as error:
        for problem in getattr(error, "problems", [str(error)]):
            print(f"error: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print()
        return 130
    finally:
        shut_down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
