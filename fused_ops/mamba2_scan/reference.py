# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 in PyTorch, chunk by chunk (the state space dual form, arXiv 2405.21060, section 6).

Inside a chunk the recurrence is a masked matrix product, between chunks a short loop over
states. Heads of one group share B and C, so those products are made once a group and never
copied per head. Everything is FP32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

# The result does not depend on it. 32 to 64 is fastest on a CPU: the masks cost length * CHUNK.
CHUNK = 64


def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """See `fused_ops.mamba2_scan.mamba2_scan`; `chunk` is the number of tokens of a block."""
    return _scan((x, dt, A, B, C, D), document_ids, None, chunk)[0]


def scan_from(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """See `fused_ops.mamba2_scan.mamba2_scan_from`."""
    groups = B.shape[2]
    start = state.float().unflatten(1, (groups, -1)).permute(0, 1, 4, 2, 3)  # b g n r p
    y, left = _scan((x, dt, A, B, C, D), None, start, chunk)
    return y, left.permute(0, 1, 3, 4, 2).flatten(1, 2).contiguous()


def _scan(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None],
    document_ids: Tensor | None,
    start: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """y, and the state [b, g, n, r, p] after the last token; `start` is that before the first."""
    x, dt, A, B, C, D = inputs
    length, groups = x.shape[1], B.shape[2]
    chunk = min(chunk, length)
    xc, dtc, Bc, Cc = (_chunks(t.float(), chunk) for t in (x, dt, B, C))
    docs = None if document_ids is None else _chunks(document_ids, chunk, fill="last")

    # [b, c, g, r, q]: g groups of r heads; q and k are positions in a chunk.
    log_decay = (dtc * A.float()).unflatten(-1, (groups, -1)).permute(0, 1, 3, 4, 2)
    since_start = _cumulative(log_decay, docs)
    x_dt = (xc * dtc.unsqueeze(-1)).unflatten(3, (groups, -1)).transpose(2, 3)  # b c g q r p
    Bc, Cc = Bc.transpose(2, 3), Cc.transpose(2, 3)  # b c g q n

    seen, left = _across(since_start, x_dt, Bc, Cc, docs, start)
    y = _within(since_start, x_dt, Bc, Cc, docs) + seen
    y = y.transpose(2, 3).flatten(3, 4).flatten(1, 2)[:, :length]
    if D is not None:
        y = y + x.float() * D.float().unsqueeze(-1)
    return y.to(x.dtype), left


def _chunks(t: Tensor, chunk: int, fill: str = "zero") -> Tensor:
    """[b, l, ...] -> [b, l / chunk, chunk, ...], the tail filled with zeros or the last value."""
    pad = -t.shape[1] % chunk
    if pad:
        tail = t[:, -1:].expand(-1, pad, *t.shape[2:])
        t = torch.cat([t, tail if fill == "last" else torch.zeros_like(tail)], 1)
    return t.unflatten(1, (-1, chunk))


def _past(size: int, docs: Tensor | None, device: torch.device) -> Tensor:
    """[q, k] or [b, c, 1, 1, q, k]: may position q see position k?"""
    causal = torch.ones(size, size, dtype=torch.bool, device=device).tril()
    if docs is None:
        return causal
    return (causal & (docs.unsqueeze(-1) == docs.unsqueeze(-2)))[:, :, None, None]


def _cumulative(log_decay: Tensor, docs: Tensor | None) -> Tensor:
    """Sum of log_decay from the start of the chunk, or of the document in it, through q.

    With documents the sum is a masked product: a running sum would carry the rounding of an
    earlier document into the next.
    """
    if docs is None:
        return log_decay.cumsum(-1)
    past = _past(log_decay.shape[-1], docs, log_decay.device)
    return (past * log_decay.unsqueeze(-2)).sum(-1)


def _within(
    since_start: Tensor, x_dt: Tensor, Bc: Tensor, Cc: Tensor, docs: Tensor | None
) -> Tensor:
    """What tokens of a chunk take from earlier tokens of it: [b, c, g, q, r, p]."""
    past = _past(since_start.shape[-1], docs, since_start.device)
    gap = since_start.unsqueeze(-1) - since_start.unsqueeze(-2)
    decay = gap.masked_fill(~past, float("-inf")).exp_()  # b c g r q k
    weights = decay * (Cc @ Bc.transpose(-1, -2)).unsqueeze(3)
    return (weights @ x_dt.transpose(3, 4)).transpose(3, 4)


def _across(
    since_start: Tensor,
    x_dt: Tensor,
    Bc: Tensor,
    Cc: Tensor,
    docs: Tensor | None,
    start: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """What tokens of a chunk take from the state that earlier chunks left: [b, c, g, q, r, p].

    Also the state [b, g, n, r, p] that the last chunk leaves where there is a `start`: padding
    has dt 0, which changes no state.
    """
    to_end = since_start[..., -1:] - since_start  # b c g r q
    carried = since_start.exp()
    whole = carried[..., -1]  # b c g r
    if docs is not None:
        last = docs[:, :, -1:]
        before = torch.cat([docs[:, :1, :1], last[:, :-1]], 1)
        to_end = to_end.masked_fill((docs != last)[:, :, None, None], float("-inf"))
        carried = carried * (docs == before)[:, :, None, None]
        whole = whole * (last == before)[:, :, None]
    to_end = to_end.exp()
    left = Bc.transpose(-1, -2) @ (x_dt * to_end.transpose(-1, -2).unsqueeze(-1)).flatten(-2)
    left = left.unflatten(-1, (-1, x_dt.shape[-1]))  # b c g n r p
    state, states = torch.zeros_like(left[:, 0]) if start is None else start, []
    for i in range(left.shape[1]):
        states.append(state)
        if i + 1 < left.shape[1] or start is not None:
            state = state * whole[:, i, :, None, :, None] + left[:, i]
    seen = (Cc @ torch.stack(states, 1).flatten(-2)).unflatten(-1, (-1, x_dt.shape[-1]))
    return seen * carried.transpose(-1, -2).unsqueeze(-1), state


def conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None = None
) -> Tensor:
    """See `fused_ops.mamba2_scan.causal_conv1d`: one multiply-add for each tap, in FP32."""
    width, dtype = weight.shape[1], x.dtype
    x, weight = x.float(), weight.float()
    y = x * weight[:, -1]
    for back in range(1, min(width, x.shape[1] + 1)):
        tap = x[:, :-back] * weight[:, width - 1 - back]
        if document_ids is not None:
            same = document_ids[:, back:] == document_ids[:, :-back]
            tap = tap.masked_fill(~same.unsqueeze(-1), 0.0)
        y = y + F.pad(tap, (0, 0, back, 0))
    return (y if bias is None else y + bias.float()).to(dtype)
