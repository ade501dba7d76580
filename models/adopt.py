# SPDX-License-Identifier: Apache-2.0
"""Objects that megatron-core insists on building itself become ours."""

from typing import Any


def adopt[T](thing: Any, cls: type[T]) -> T:
    """`thing` as one of `cls`, whose last base is megatron-core's class that it is of."""
    assert type(thing) is cls.__bases__[-1], f"{cls.__name__} cannot adopt {type(thing)}"
    thing.__class__ = cls
    assert isinstance(thing, cls)
    return thing
