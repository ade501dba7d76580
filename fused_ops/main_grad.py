# SPDX-License-Identifier: Apache-2.0
"""The FP32 sum of a parameter's gradients, `weight.main_grad`: zeroed once a step, then added to.

The first gradient after that need not be added: written over the zeros (beta = 0 instead of 1) it
gives the same values without reading them, except that -0 stays -0 (0 + -0 is +0). Whoever has
zeroed sums says so (`mark_zeroed`); whoever adds to one takes the mark away (`note_added`). Without
a mark gradients are added, which is right always.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_MARK = "main_grad_is_zero"


@dataclass(frozen=True)
class Zeros:
    """A sum that holds nothing but zeros: a product that is to be added is written, beta = 0."""

    tensor: Tensor


def mark_zeroed(parameters: Iterable[Tensor], zeroed: bool = True) -> None:
    """Says that every `main_grad` of these holds zeros and nothing else; not `zeroed`: it may not.

    For sums that nobody adds to behind our back before we do: those of a weight whose gradients
    all come from layers of `fused_ops`, or come through a hook at the end of the backward pass.
    """
    for parameter in parameters:
        main_grad = getattr(parameter, "main_grad", None)
        if main_grad is not None and main_grad.dtype is torch.float32:
            parameter.main_grad_is_zero = zeroed  # type: ignore[attr-defined]


def beta_of(weight: Tensor) -> int:
    """What of `weight.main_grad` a product that is added to it keeps: 0 nothing, since it is zero,
    or 1."""
    return 0 if getattr(weight, _MARK, False) else 1


def sum_of(weight: Tensor) -> Tensor | Zeros:
    """`weight.main_grad`, and whether it is zero."""
    main_grad: Tensor = weight.main_grad  # type: ignore[attr-defined]
    return main_grad if beta_of(weight) else Zeros(main_grad)


def note_added(weight: Tensor) -> None:
    """Something has been added to `weight.main_grad`."""
    if hasattr(weight, _MARK):
        weight.main_grad_is_zero = False  # type: ignore[attr-defined]
