# SPDX-License-Identifier: Apache-2.0
"""The selective scan of Mamba-2 and its short causal convolution: shapes, checks, choice."""

import torch
from torch import Tensor

from fused_ops.mamba2_scan import mamba_ssm_backend, reference

IMPLEMENTATIONS = ("mamba_ssm", "reference")
_preferred: str | None = None


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    document_ids: Tensor | None = None,
    implementation: str | None = None,
) -> Tensor:
    """State space recurrence with a scalar decay per head (Dao and Gu, arXiv 2405.21060).

    Per head, with the state S of shape [head_dim, state]:
    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T,  y_t = S_t C_t + D x_t.

    Args:
        x: [batch, length, heads, head_dim], any float type.
        dt: [batch, length, heads], positive step sizes (bias and softplus already applied).
        A: [heads], negative.
        B, C: [batch, length, groups, state]; head i belongs to group i // (heads // groups).
        D: [heads], the skip weight, or None.
        document_ids: integer [batch, length]; the state is set to zero where it changes.
        implementation: "mamba_ssm", "reference", or None for the first that can.

    Returns:
        y: [batch, length, heads, head_dim], in x's type; sums are in FP32.

    Raises:
        ValueError: shapes that do not fit, or a forced implementation that cannot.
    """
    _check(x, dt, A, B, C, D, document_ids)
    if _choose(implementation, x) == "mamba_ssm":
        return mamba_ssm_backend.scan(x, dt, A, B, C, D, document_ids)
    return reference.scan(x, dt, A, B, C, D, document_ids)


def mamba2_scan_from(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    implementation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`mamba2_scan` of a piece of a sequence: from the state before it to the state after it.

    Args:
        state: fp32 [batch, heads, head_dim, state]; zero before the first token.
        x, dt, A, B, C, D, implementation: as `mamba2_scan`.

    Returns:
        y as `mamba2_scan`, and the new state. Pieces one after the other give what the whole
        sequence gives, up to the order of FP32 sums.

    Raises:
        ValueError: shapes that do not fit, or a forced implementation that cannot.
    """
    _check(x, dt, A, B, C, D, None)
    expected = (x.shape[0], x.shape[2], x.shape[3], B.shape[3])
    if tuple(state.shape) != expected or state.dtype is not torch.float32:
        raise ValueError(f"state must be fp32 {expected}, got {state.dtype} {tuple(state.shape)}")
    if _choose(implementation, x) == "mamba_ssm":
        return mamba_ssm_backend.scan_from(state, x, dt, A, B, C, D)
    return reference.scan_from(state, x, dt, A, B, C, D)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    document_ids: Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """Depthwise convolution that sees only the past: y_t = bias + sum_j weight_j x_{t-width+1+j}.

    Args:
        x: [batch, length, channels].
        weight: [channels, width].
        bias: [channels] or None.
        document_ids: integer [batch, length]; tokens of another document count as zero.
        before: [batch, width - 1, channels], the tokens before x; None for zeros.

    Returns:
        [batch, length, channels] in x's type.
    """
    if weight.dim() != 2 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"weight must be [channels, width] with {x.shape[-1]} channels, got "
            f"{tuple(weight.shape)}: drop the middle axis of a Conv1d weight"
        )
    if before is None:
        return reference.conv(x, weight, bias, document_ids)
    expected = (x.shape[0], weight.shape[1] - 1, x.shape[2])
    if tuple(before.shape) != expected or document_ids is not None:
        raise ValueError(
            f"before must be {expected} and goes without document_ids, got {tuple(before.shape)}"
        )
    return reference.conv(torch.cat([before, x], 1), weight, bias)[:, before.shape[1] :]


def prefer(implementation: str | None) -> None:
    """What this process takes where no call forces one; None: the first that can.

    For comparisons of processes: mamba-ssm's kernels are tuned by a clock, in each process anew,
    and sum in another order with other tiles.
    """
    global _preferred
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
    _preferred = implementation


def chosen(x: Tensor) -> str:
    """Name of the implementation that takes x where none is forced."""
    return _choose(None, x)


def _choose(implementation: str | None, x: Tensor) -> str:
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"implementation {implementation!r} is not one of {IMPLEMENTATIONS}")
    implementation = implementation or _preferred
    if implementation == "reference":
        return "reference"
    reason = mamba_ssm_backend.supports(x)
    if reason is None:
        return "mamba_ssm"
    if implementation == "mamba_ssm":
        raise ValueError(f"implementation 'mamba_ssm' was asked for, but {reason}")
    return "reference"


def _check(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    document_ids: Tensor | None,
) -> None:
    batch, length, heads, _ = x.shape
    expected = {
        "dt": (dt, (batch, length, heads)),
        "A": (A, (heads,)),
        "B": (B, (batch, length, *B.shape[2:])),
        "C": (C, tuple(B.shape)),
    }
    if D is not None:
        expected["D"] = (D, (heads,))
    if document_ids is not None:
        expected["document_ids"] = (document_ids, (batch, length))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if B.dim() != 4 or heads % B.shape[2]:
        raise ValueError(
            f"B must be [batch, length, groups, state] with groups dividing {heads} heads, got "
            f"{tuple(B.shape)}"
        )
