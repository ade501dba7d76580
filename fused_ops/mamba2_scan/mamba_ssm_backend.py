# SPDX-License-Identifier: Apache-2.0
"""The Triton scan of the mamba-ssm package, where it is installed and the tensors are on a GPU."""

from functools import cache

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
