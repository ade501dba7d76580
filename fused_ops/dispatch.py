# SPDX-License-Identifier: Apache-2.0
"""Which implementation of an op runs: the first that supports the call, or the one asked for.

An implementation says why it cannot take a call instead of failing inside; a forced one never
falls back, since a benchmark or a test would then measure something else.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from fused_ops.errors import ConfigError

Choice = str | Sequence[str] | None
"""None: all in order of registration. A name: that one or an error. Names: first of these."""


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# As torch.compiler.disable, which would load torch._dynamo (seconds) here and not at a first call.
outside_graph = torch._disable_dynamo(_call)
"""outside_graph(function, ...) is function(...); torch.compile breaks its graph and traces none."""


def _refuse(problem: str) -> NoReturn:
    raise ConfigError(problem)


def refuse(problem: str) -> NoReturn:
    """Raises ConfigError; from a graph too, where torch.compile cannot trace such a raise."""
    if is_dynamo_compiling():
        outside_graph(_refuse, problem)
    raise ConfigError(problem)


class UnsupportedError(ConfigError):
    """No allowed implementation takes the call; `problems` holds every reason."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    supports: takes the arguments of the call; None, or the reason why not.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[..., str | None]


def always(*_args: object, **_kwargs: object) -> None:
    """The `supports` of a reference."""
    return None


class Op:
    """An op with its implementations, the preferred first; the reference is the last."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._implementations: dict[str, Implementation] = {}

    @property
    def names(self) -> list[str]:
        """Names of the implementations, in order of preference."""
        return list(self._implementations)

    def register(self, implementation: Implementation, *, first: bool = False) -> None:
        """Add an implementation, at the end or (first) before the others."""
        name = implementation.name
        assert name not in self._implementations, f"{self.name} has two implementations {name!r}"
        new = {name: implementation}
        old = self._implementations
        self._implementations = new | old if first else old | new

    def choose(self, choice: Choice, *args: Any, **kwargs: Any) -> Implementation:
        """The implementation that takes this call.

        Raises:
            UnsupportedError: none of the allowed ones does; all reasons are listed.
        """
        names = self.names if choice is None else [choice] if isinstance(choice, str) else choice
        reasons = []
        for name in names:
            if name not in self._implementations:
                near = difflib.get_close_matches(name, self.names, n=1) or self.names
                reasons.append(
                    f"{self.name} has no implementation {name!r}: "
                    f"choose {' or '.join(near)} (there are: {', '.join(self.names)})"
                )
                continue
            implementation = self._implementations[name]
            reason = implementation.supports(*args, **kwargs)
            if reason is None:
                return implementation
            reasons.append(f"{self.name}, {name}: {reason}")
        if not reasons:
            reasons.append(f"{self.name}: no implementation is allowed; name at least one")
        raise UnsupportedError(reasons)

    def __call__(self, *args: Any, implementation: Choice = None, **kwargs: Any) -> Any:
        """Choose and run; under torch.compile between graphs, whatever is chosen."""
        if is_dynamo_compiling():
            return outside_graph(self._run, args, implementation, kwargs)
        return self.choose(implementation, *args, **kwargs).run(*args, **kwargs)

    def _run(self, args: Any, implementation: Choice, kwargs: Any) -> Any:
        return self.choose(implementation, *args, **kwargs).run(*args, **kwargs)
