# SPDX-License-Identifier: Apache-2.0
"""megatron-core without what the checks of a start do not need: a mistake is said sooner.

On a machine of two slow cores wandb takes 1.4 s, torch's compiler and its back end 3 s of the 7 s
from the command to the first word about a mistake in a run file.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pretrain import cpu_compat


def import_megatron() -> None:
    """Imports `megatron.core`: without wandb and TensorBoard, and on a CPU not compiled.

    `megatron.core.timers` would import both to write its timers there, which no run asks for; a
    run that logs to one of them imports it itself. `jit_fuser` is `torch.compile`, whose decorator
    loads all of it; under `cpu_compat`, which must have been enabled, nothing is compiled anyway.
    """
    with contextlib.ExitStack() as held:
        for name in ("wandb", "torch.utils.tensorboard"):
            held.enter_context(_absent(name))
        if cpu_compat.is_enabled():
            held.enter_context(_not_compiled())
        import megatron.core  # noqa: F401


@contextlib.contextmanager
def _absent(name: str) -> Iterator[None]:
    """Importing `name` fails meanwhile, if nobody has imported it before."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


@contextlib.contextmanager
def _not_compiled() -> Iterator[None]:
    """`torch.compile`, as a decorator with or without arguments, gives functions as they are."""
    compile_, torch.compile = torch.compile, _as_it_is  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_


def _as_it_is(model: Callable[..., Any] | None = None, **options: object) -> Any:
    return (lambda function: function) if model is None else model
