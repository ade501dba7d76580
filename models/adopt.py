# SPDX-License-Identifier: Apache-2.0
"""Modules that megatron-core insists on building itself become ours."""

import torch


def adopt[T: torch.nn.Module](module: torch.nn.Module, cls: type[T]) -> T:
    """`module` as one of `cls`, whose last base is megatron-core's class that the module is of."""
    assert type(module) is cls.__bases__[-1], f"{cls.__name__} cannot adopt {type(module)}"
    module.__class__ = cls
    assert isinstance(module, cls)
    return module
