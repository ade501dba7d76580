# SPDX-License-Identifier: Apache-2.0
"""What a step leaves to be recorded and judged."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepResult:
    """What a step leaves to be recorded; the same on every rank."""

    loss: float
    """Mean over the tokens of the global batch that count."""
    tokens: int
    """How many those are."""
    grad_norm: float
    """Before clipping; inf or nan where the step was skipped."""
    lr: float
    updated: bool
    """False: an overflow, or an operand or gradient that is not finite; weights are as before."""
    nonfinite_operand: bool
    """Whether a quantized GEMM met Inf or NaN."""
    stop: bool
    """Whether any rank asked to stop."""
    overflow: bool = False
    """The step was skipped because the fp16 loss scale was too high; it is lower now."""
    refused: bool = False
    """The loss alone forbade the update."""
