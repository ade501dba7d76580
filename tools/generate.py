# SPDX-License-Identifier: Apache-2.0
"""Text from a checkpoint: `python -m tools.generate CKPT_DIR --prompt TEXT`.

CKPT_DIR is a run's checkpoints folder (its newest whole checkpoint is taken), one step of it, or
what `tools.convert import` wrote. The model computes in the precision that it was trained in, and
keeps keys, values and Mamba states, so that a new token costs one token. `--prompt` may be given
several times: they go together, each to its end of document. One process, any machine.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fused_ops.errors import ConfigError
from pretrain.command_line import prepare, refused, run_program, seed_problems

if TYPE_CHECKING:
    from models.generation.sampling import Sampling
    from pretrain.generation.opened import OpenedModel


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CKPT_DIR")
    add("overrides", nargs="*", metavar="section.key=value", help="over the run's own settings")
    add("--prompt", action="append", help="text to continue; may be repeated (default: 'The ')")
    add("--prompts", type=Path, metavar="FILE", help="more of them, one a line")
    add("--tokens", type=int, default=100, help="most tokens to add to each")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    add("--top-k", type=int, default=40, help="choose among the K likeliest; 0: all")
    add("--top-p", type=float, default=1.0, help="of them those that reach this share; 1: all")
    add("--seed", type=int, default=0, help="prompt i draws with seed + i")
    add("--tokenizer", type=Path, metavar="FILE", help="default: the checkpoint's or its data's")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add(
        "--batch-invariant",
        action="store_true",
        help="the same bits for a prompt whatever the others are; slow on a GPU, and refused where "
        "operands share an amax over tokens",
    )
    return parser


def _problems(options: argparse.Namespace) -> list[str]:
    rules = (
        (options.tokens >= 1, f"--tokens must be at least 1; got {options.tokens}"),
        (
            options.temperature >= 0,
            f"--temperature must not be negative; got {options.temperature}",
        ),
        (options.top_k >= 0, f"--top-k must not be negative; got {options.top_k}; 0 keeps all"),
        (0 < options.top_p <= 1, f"--top-p must be in (0, 1]; got {options.top_p}; 1 keeps all"),
    )
    found = [text for holds, text in rules if not holds] + seed_problems(options.seed)
    found += [
        f"--prompt must be text in UTF-8; got {prompt!r}"
        for prompt in options.prompt or []
        if not _is_text(prompt)
    ]
    try:
        if options.prompts is not None and not _lines(options.prompts):
            found.append(f"--prompts must hold a prompt; {options.prompts} has only empty lines")
    except (OSError, UnicodeDecodeError) as error:
        found.append(
            "--prompts must be a file of one prompt a line, in UTF-8; "
            f"got {options.prompts}: {error}"
        )
    return found


def _is_text(argument: str) -> bool:
    """Whether it came in UTF-8: Python keeps other bytes of a command line as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in argument)


def _lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line]


def _prompts(options: argparse.Namespace) -> list[str]:
    found = list(options.prompt or [])
    if options.prompts is not None:
        found += _lines(options.prompts)
    return found or ["The "]


def _print_texts(
    opened: "OpenedModel", prompts: list[str], options: argparse.Namespace, sampling: "Sampling"
) -> None:
    """One prompt as it grows; several each in a paragraph, when all are done."""
    pieces = opened.continue_texts(
        prompts, options.tokens, sampling, invariant=options.batch_invariant
    )
    if len(prompts) == 1:
        first = [piece for _, piece in itertools.islice(pieces, 1)]  # a refusal comes before text
        print(prompts[0], *first, sep="", end="", flush=True)
        for _, piece in pieces:
            print(piece, end="", flush=True)
        print()
        return
    texts = list(prompts)
    for index, piece in pieces:
        texts[index] += piece
    print("\n\n".join(f"[{index}] {text}" for index, text in enumerate(texts)))


def main(arguments: list[str] | None = None) -> int:
    """Prints the prompts and what the model makes of them; returns the exit status."""
    options = _parser().parse_intermixed_args(arguments)
    prepare()
    from models.generation.sampling import Sampling
    from pretrain.checkpoint.manager import CheckpointError
    from pretrain.generation.opened import OpenedModel
    from pretrain.initialize import shut_down

    try:
        if problems := _problems(options):
            raise ConfigError(problems)
        opened = OpenedModel(
            options.checkpoint, options.tokenizer, options.device, overrides=options.overrides
        )
        prompts = _prompts(options)
        ids = [opened.tokenizer.prompt(prompt) for prompt in prompts]
        for note in opened.notes(ids, options.tokens):
            print(f"note: {note}", file=sys.stderr)
        sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
        _print_texts(opened, prompts, options, sampling)
    except (ConfigError, CheckpointError) as error:
        return refused(error)
    except KeyboardInterrupt:
        print()
        return 130
    finally:
        shut_down()
    return 0


if __name__ == "__main__":
    run_program(main)
