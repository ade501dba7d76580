# SPDX-License-Identifier: Apache-2.0
"""Every operand of the linear layers, as a layout makes it, beside one process's quantizer.

Bands say how far rounding takes a training; this is exact. The tensors that a layout's ranks were
about to quantize are put together, one process quantizes the whole, and codes, scales and amaxes
of every rank must be those, bit for bit: a wrong amax, coordinate or sign, or a stale code of a
weight, shows in the one operand that has it, whatever rounding did before. Until a first code
differs from that of one process's own training, the tensors must agree to FP32 order, so that no
sum is missing; where it differs, the tensor lies on the other side of a tie, or of its dither.

Experts are left out (their tokens have no order that layouts share), and so are operands that are
not quantized. Whoever looks at operands sees whole ones: under `communicate: packed` the gathers
are in BF16, whose results must be the same.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.formats import Operand, QuantizedTensor
from fused_ops.keys import TRANSPOSED, StreamKey
from fused_ops.linear import LinearCall, Runs, linear
from fused_ops.linear_call import Run
from fused_ops.recipe import GemmRecipe
from models.parallel_linear import ColumnParallelLinear, DuplicatedLinear, RowParallelLinear
from pretrain.engine import Engine

_OWN = {"x": "fprop.x", "w": "fprop.w", "dy": "dgrad.dy"}
Event = tuple[int, int, str, str]
"""Step, micro-batch, layer and operand."""


@dataclass
class Piece:
    """One operand on one rank, in the layout of the tensor that it is made of."""

    tensor: Tensor
    values: Tensor | None
    """Codes times block scales, without the tensor scale; None: it is not quantized."""
    amax: Tensor | None
    rows: tuple[Run, ...]
    columns: tuple[Run, ...]


@dataclass
class Trace:
    """An observer of all linear layers: what it has seen, in order."""

    pieces: dict[Event, Piece] = field(default_factory=dict)
    calls: dict[Event, tuple[GemmRecipe, StreamKey]] = field(default_factory=dict)

    def attach(self, engine: Engine) -> None:
        """To every linear layer of the engine that is no expert."""
        kinds = (ColumnParallelLinear, RowParallelLinear, DuplicatedLinear)
        for chunk in engine.chunks:
            for module in chunk.modules():
                if isinstance(module, kinds):
                    module.observer = self

    def save(self, place: Path, rank: int) -> None:
        """For `read_pieces`."""
        place.mkdir(parents=True, exist_ok=True)
        torch.save(
            {event: vars(piece) for event, piece in self.pieces.items()}, place / f"{rank}.pt"
        )

    def wants(self, micro_batch: int) -> bool:
        """Every one."""
        return True

    def observe(
        self, gemm: str, operand: str, tensor: Tensor, quantized: Operand, call: LinearCall
    ) -> None:
        """See `fused_ops.linear_call.Observer`."""
        name = f"{gemm}.{operand}"
        event = (call.key.step, call.key.micro_batch, call.name, name)
        values = amax = None
        if isinstance(quantized, QuantizedTensor):
            values = quantized.unscaled(torch.float32)
            values = (values.t() if name in TRANSPOSED else values).cpu()
            amax = quantized.amax.cpu().clone()
        origin = call.comm.origin(name)
        if not isinstance(origin, Runs):
            origin = Runs(rows=((0, origin[0]),), columns=((0, origin[1]),))
        own = tensor.detach().cpu().clone()
        runs = origin.of_shape(*own.shape)
        piece = Piece(own, values, amax, runs.rows, runs.columns)
        before = self.pieces.setdefault(event, piece)
        assert before is piece or _equal(before.values, values), f"{event} is not the same again"
        self.calls[event] = call.recipe, call.key


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Of two operands, codes for codes."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def read_pieces(place: Path, ranks: int) -> list[dict[Event, Piece]]:
    """What each rank saved."""
    found = [torch.load(place / f"{rank}.pt") for rank in range(ranks)]
    return [{event: Piece(**fields) for event, fields in pieces.items()} for pieces in found]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a comparison of all operands came to."""

    operands: int
    """How many were compared."""
    first: str = ""
    """The first whose codes are not those that one process had, and how far its tensor lay off."""
    fault: str = ""
    """Where a layout quantizes otherwise than one process, or lacks a sum; nothing: nowhere."""


def check(one: Trace, ranks: list[dict[Event, Piece]], bound: float) -> Found:
    """The operands of a layout's ranks beside those of one process.

    Args:
        one: of one process.
        ranks: the pieces of each rank.
        bound: of the difference of tensors, relative to the largest value of each, as long as no
            code differs.
    """
    made: dict[Event, Piece] = {}
    count, first = 0, ""
    for event, expected in one.pieces.items():
        own = [(i, pieces[event]) for i, pieces in enumerate(ranks) if event in pieces]
        where = "step {}, micro-batch {}, {}, {}".format(*event)
        try:
            tensor = _whole([(piece.tensor, piece) for _, piece in own], expected.tensor)
            if event not in made:
                made |= _replayed(one, ranks, event)
            for rank, piece in own:
                _same(piece, made[event], event[3], rank)
            values = expected.values
            if values is not None:
                values = _whole([(piece.values, piece) for _, piece in own], values)
        except _Fault as fault:
            return Found(operands=count, first=first, fault=f"{where}: {fault}")
        count += expected.values is not None
        size = float(expected.tensor.abs().max()) or 1.0
        off = float((tensor.double() - expected.tensor.double()).abs().max()) / size
        if first:
            continue
        if not off <= bound:
            early = f"{where}: the tensor is off by {off:.1e} before any code is"
            return Found(operands=count, fault=early)
        if values is not None and expected.values is not None:
            other = int((values != expected.values).sum())
            said = f"{where}: {other} of {values.numel()} values, tensor off by {off:.1e}"
            first = said if other else ""
    return Found(operands=count, first=first)


class _Fault(Exception):
    """In words."""


def _whole(parts: list[tuple[Any, Piece]], like: Tensor) -> Tensor:
    """The global tensor, put together by where the ranks say that their parts lie."""
    full = torch.full(like.shape, torch.nan, dtype=like.dtype)
    for part, piece in parts:
        if part is None or part.shape != piece.tensor.shape:
            raise _Fault("blocks are cut, or codes are missing")
        rows, columns = _index(piece.rows, like.shape[0]), _index(piece.columns, like.shape[1])
        there = full[rows[:, None], columns]
        if not bool((there.isnan() | (there == part)).all()):
            raise _Fault("ranks name the same place of the tensor and hold other values there")
        full[rows[:, None], columns] = part.to(like.dtype)
    if bool(full.isnan().any()):
        raise _Fault("the ranks' parts, at the places they name, are not the whole tensor")
    return full


def _index(runs: tuple[Run, ...], size: int) -> Tensor:
    index = torch.cat([torch.arange(start, start + length) for length, start in runs])
    if len(index) and int(index.max()) >= size:
        raise _Fault(f"a part lies at {int(index.max())}, behind the tensor's end at {size}")
    return index


def _replayed(one: Trace, ranks: list[dict[Event, Piece]], event: Event) -> dict[Event, Piece]:
    """The operands of a layer's three GEMMs, made by one process from the layout's tensors."""
    tensors = []
    for name in _OWN.values():
        own = (*event[:3], name)
        pieces = [pieces[own] for pieces in ranks if own in pieces]
        try:
            tensors.append(_whole([(p.tensor, p) for p in pieces], one.pieces[own].tensor))
        except _Fault as fault:
            raise _Fault(f"{name}: {fault}") from None
    x, weight, dy = tensors
    recipe, key = one.calls[event]
    trace = Trace()
    call = LinearCall(recipe=recipe, key=key, observer=trace, name=event[2])
    with torch.enable_grad():
        linear(x.requires_grad_(), torch.nn.Parameter(weight), call=call).backward(dy)
    return trace.pieces


def _same(piece: Piece, whole: Piece, name: str, rank: int) -> None:
    """Fault if a rank's codes or amaxes are not the whole's in its place."""
    if piece.values is None or whole.values is None or piece.amax is None or whole.amax is None:
        if piece.values is not whole.values:
            raise _Fault(f"rank {rank} has codes of it, or one process has, and not both")
        return
    rows = _index(piece.rows, whole.values.shape[0])
    columns = _index(piece.columns, whole.values.shape[1])
    amax = whole.amax
    if amax.dim():
        amax = amax[columns if name in TRANSPOSED else rows]
    if not torch.equal(piece.amax, amax):
        raise _Fault(f"rank {rank} has another amax than one process takes of the same tensor")
    expected = whole.values[rows[:, None], columns]
    if piece.values.shape != expected.shape:
        raise _Fault("blocks are cut, or codes are missing")
    if not torch.equal(piece.values, expected):
        other = int((piece.values != expected).sum())
        raise _Fault(
            f"{other} of {expected.numel()} values on rank {rank} are not those that one process "
            "makes of the same tensor"
        )
