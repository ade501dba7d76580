# SPDX-License-Identifier: Apache-2.0
"""megatron-core without what it imports and no start needs: every program is there sooner.

On a machine of two slow cores wandb takes 1.4 s, torch's compiler and its back end 5 s of the 10 s
from a command to its first word.
"""

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch


def install(compiled: bool) -> None:
    """From now on `megatron.core` is imported without wandb and TensorBoard.

    `megatron.core.timers` would import both to write its timers there, which no run asks for; a
    run that logs to one of them imports it itself.

    Args:
        compiled: whether functions under `jit_fuser`, which is `torch.compile`, are compiled. Its
            decorator loads the whole compiler: where it would compile nothing it is left out.
    """

    @contextlib.contextmanager
    def light() -> Iterator[None]:
        with contextlib.ExitStack() as held:
            for name in ("wandb", "torch.utils.tensorboard"):
                held.enter_context(_absent(name))
            if not compiled:
                held.enter_context(_not_compiled())
            yield

    import_within("megatron.core", light)


def import_within(name: str, context: Callable[[], AbstractContextManager[None]]) -> None:
    """When something imports the module `name`, that happens inside of `context()`."""
    if not any(isinstance(each, _Finder) and each.name == name for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, context))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, context: Callable[[], AbstractContextManager[None]]) -> None:
        self.name, self.context = name, context

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.context)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, context: Callable[[], AbstractContextManager[None]]) -> None:
        self._loader, self._context = loader, context

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        with self._context():
            self._loader.exec_module(module)


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
