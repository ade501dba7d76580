# SPDX-License-Identifier: Apache-2.0
"""What the precision of a process changes with from call to call."""

import torch

from fused_ops.keys import KeyTable
from models.precision_rules import PRETRAINING


class PrecisionState:
    """What changes from call to call: one object a process, referenced by every linear layer.

    Attributes:
        seed: of all dither and resampled signs.
        step: number of the optimizer step that is computed.
        micro_batch: global number, within the step, of the micro-batch that goes forward.
        phase: pretraining, sampler or rl_trainer.
        weights_epoch: changes when weights change in a way that no version counter shows.
        nonfinite: bool tensor on the device, raised by a quantized GEMM that meets Inf or NaN.
        check_finite: raise at once instead.
        row_block: rows of the forward GEMMs' blocks where outputs must not depend on what shares a
            batch (`models.generation`); None: one GEMM for all rows.
        key_table: where keys of random numbers lie while launches are recorded; None: as numbers.
    """

    def __init__(
        self,
        seed: int = 0,
        device: torch.device | str = "cpu",
        check_finite: bool = False,
    ) -> None:
        self.seed = seed
        self.step = 0
        self.micro_batch = 0
        self.phase = PRETRAINING
        self.weights_epoch = 0
        self.nonfinite = torch.zeros((), dtype=torch.bool, device=device)
        self.check_finite = check_finite
        self.row_block: int | None = None
        self.key_table: KeyTable | None = None

    def set_step(self, step: int) -> None:
        """Begin the computation of optimizer step `step`."""
        self.step = step
        self.micro_batch = 0

    def set_micro_batch(self, micro_batch: int) -> None:
        """Begin the forward of a micro-batch, by its global number within the step."""
        self.micro_batch = micro_batch

    def weights_changed(self) -> None:
        """Make every linear layer quantize its weight anew."""
        self.weights_epoch += 1
