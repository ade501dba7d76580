# SPDX-License-Identifier: Apache-2.0
"""What the tools' command lines share: quiet packages, and refusals in words."""

import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from fused_ops.errors import ConfigError


def prepare() -> None:
    """Lets megatron-core be imported after this, and keeps other packages' notices back."""
    for name in ("megatron", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    from pretrain import cpu_compat  # only now: it takes seconds to import

    cpu_compat.enable()


def recipe_settings(text: str) -> tuple[str, list[str]]:
    """RECIPE[:DECODE][+KEY=VALUE...] -> the recipe, and `section.key=value` of its own.

    Raises ConfigError for a label that does not read so; recipes and keys are the run's to check.
    """
    from fused_ops.recipe import split_label  # torch comes with it

    named, *own = text.split("+")
    recipe, decode = split_label(named)
    return recipe, [*([f"precision.decode={decode}"] if decode else []), *own]


def each_recipe[Result](
    labels: Sequence[str], make: Callable[[str, list[str]], Result], option: str = "--recipes"
) -> dict[str, Result]:
    """{label: make(recipe, its settings)} of what `option` names, as `recipe_settings` reads it.

    Raises ConfigError: the problems of all of them, each behind its label.
    """
    found: dict[str, Result] = {}
    problems: list[str] = []
    for label in labels:
        try:
            found[label] = make(*recipe_settings(label))
        except ConfigError as error:
            problems += [f"{option} {label}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return found


def output_problems(option: str, path: Path | None) -> list[str]:
    """Why a file that is written at the end cannot be: asked before the work. Makes its folder."""

    def try_file(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        path.open("a").close()
        if not there:
            path.unlink()

    return _tried(f"{option} must be a file that can be written", path, try_file)


def folder_problems(option: str, path: Path | None) -> list[str]:
    """Why a folder that is written into at the end cannot be: asked before the work. Makes it."""

    def try_folder(path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass

    return _tried(f"{option} must be a folder that can be written to", path, try_folder)


def _tried(rule: str, path: Path | None, attempt: Callable[[Path], None]) -> list[str]:
    """The problem with a path for which `attempt` fails; none where there is no path."""
    if path is None:
        return []
    try:
        attempt(path)
    except OSError as error:
        return [f"{rule}; got {path} ({(error.strerror or str(error)).lower()})"]
    return []


def seed_problems(seed: int) -> list[str]:
    """What is wrong with a seed of torch's generators, from which other ones are counted."""
    if -(2**62) <= seed < 2**62:
        return []
    return [f"--seed must be between -2^62 and 2^62; got {seed}; choose a smaller number"]


def run_program(main: Callable[[], int]) -> NoReturn:
    """Ends the program with `main`'s exit status; quietly where who reads its output has gone
    (`... | head`), as other programs end then."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more
        status = 128 + signal.SIGPIPE
    sys.exit(status)


def refused(error: Exception) -> int:
    """Says every problem of an error that the user can mend; gives the exit status of one."""
    for problem in getattr(error, "problems", [str(error)]):
        print(f"error: {problem}", file=sys.stderr)
    return 2
