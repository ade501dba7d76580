# SPDX-License-Identifier: Apache-2.0
"""The Triton scan of the mamba-ssm package, where it is installed and the tensors are on a GPU."""

import math
import sys
from functools import cache
from typing import Any

from torch import Tensor

CHUNK = 128


@cache
def _kernel() -> object | None:
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError:
        return None
    return mamba_chunk_scan_combined


def supports(x: Tensor) -> str | None:
    """Why these tensors cannot use mamba-ssm, or None when they can."""
    if not x.is_cuda:
        return "its kernels run on CUDA devices only"
    if _kernel() is None:
        return "the package mamba-ssm is not installed"
    return None


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    document_ids: Tensor | None,
) -> Tensor:
    """See `fused_ops.mamba2_scan.mamba2_scan`."""
    kernel = _kernel()
    assert callable(kernel), "supports() was not asked"
    seq_idx = None if document_ids is None else document_ids.int().contiguous()
    return kernel(x, dt, A, B, C, chunk_size=CHUNK, D=D, seq_idx=seq_idx)


def scan_from(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.mamba2_scan.mamba2_scan_from`."""
    kernel = _kernel()
    assert callable(kernel), "supports() was not asked"
    y, left = kernel(
        x, dt, A, B, C, chunk_size=CHUNK, D=D, initial_states=state, return_final_states=True
    )
    return y, left.float()


def fix_configurations() -> int:
    """Leaves each kernel of mamba-ssm one configuration; returns how many were tuned.

    Tuning takes what was fastest in this process, so that the order of sums differs from start to
    start, and it takes a minute or more. The one left has the smallest block times stages, which
    fits every GPU. mamba-ssm does the same where it is imported in its deterministic mode.
    """
    _kernel()
    tuners: list[Any] = []
    for name, module in list(sys.modules.items()):
        if name.startswith("mamba_ssm.ops.triton"):
            for kernel in vars(module).values():
                while kernel is not None and not isinstance(kernel, type):
                    if len(getattr(kernel, "configs", ())) > 1 and kernel not in tuners:
                        tuners.append(kernel)
                    kernel = getattr(kernel, "fn", None)
    for tuner in tuners:
        tuner.configs = [min(tuner.configs, key=_cost)]
    return len(tuners)


def _cost(config: Any) -> int:
    blocks = (size for name, size in config.kwargs.items() if name.startswith("BLOCK_SIZE"))
    return math.prod(blocks) * (config.num_stages or 1)
