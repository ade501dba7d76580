# SPDX-License-Identifier: Apache-2.0
"""Sums of rows on NVIDIA GPUs through Triton: which calls it takes, and how it is launched."""

from typing import Any

import torch
from torch import Tensor

from fused_ops.triton_support import float_reason, launch, power_of_two

BLOCK, WARPS = 2048, 4
"""Features of a program: at most four times 16 bytes a thread."""


def supports(y: Tensor, places: Any) -> str | None:
    """None, or why not."""
    return "there are no rows" if places.rows == 0 else float_reason(y)


def sum_rows(y: Tensor, places: Any) -> Tensor:
    """See `fused_ops.gather.sum_rows`."""
    from fused_ops.gather import triton_kernels as kernels

    y, features = y.contiguous(), y.shape[1]
    out = torch.empty((places.rows, features), dtype=y.dtype, device=y.device)
    block = min(BLOCK, power_of_two(features))
    launch(
        kernels.sum_rows, (places.rows, -(-features // block)), y, places.order, places.starts,
        out, features, BLOCK=block, on=y.device, warps=WARPS,
    )  # fmt: skip
    return out
