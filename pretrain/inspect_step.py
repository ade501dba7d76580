# SPDX-License-Identifier: Apache-2.0
"""Computes a bad step a second time, with an eye on every GEMM: where did it go wrong?

The step's own forward and backward run again with observers on all linear layers; then generators,
buffers, scales and gradients are put back, so that the run goes on as if nothing had been looked
at. What does not appear the second time was transient: a fault of a machine rather than of data or
weights.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops.formats import Operand, QuantizedTensor
from fused_ops.linear import LinearCall
from models.precision import unwrap
from pretrain.engine import Engine
from pretrain.evaluate import gathered_parameters, generators_untouched
from pretrain.train_step import MicroBatch, forward_step, loss_function, run_schedule

_MOST_ROWS = 60
_MOST_SAMPLES = 16
_MOST_BYTES = 64 * 1024


@dataclass(frozen=True)
class Finding:
    """An operand of a GEMM that holds Inf, NaN or values beyond its format's range."""

    layer: str
    gemm: str
    operand: str
    nonfinite: int
    """Values that are Inf or NaN."""
    saturated: int
    """Values or blocks above the range of the operand's scale."""
    values: int
    amax: float
    """Largest finite magnitude."""
    rank: int

    @property
    def where(self) -> str:
        """`layers.3.mlp.linear_fc1, fprop.x: 12 of 4096 values are Inf or NaN`."""
        what = f"{self.nonfinite} of {self.values} values are Inf or NaN"
        if not self.nonfinite:
            what = f"{self.saturated} values or blocks saturate"
        return f"{self.layer}, {self.gemm}.{self.operand}: {what}"


class _Watch:
    """An observer of one layer; all layers of a rank share the list of what was seen, in order."""

    def __init__(self, layer: str, seen: list[Finding], rank: int) -> None:
        self.layer, self.seen, self.rank = layer, seen, rank

    def wants(self, micro_batch: int) -> bool:
        """All of them."""
        return True

    def observe(
        self, gemm: str, operand: str, tensor: Tensor, quantized: Operand, call: LinearCall
    ) -> None:
        """Signature: `fused_ops.linear.Observer.observe`. Waits for the device."""
        values = tensor.detach()
        finite = torch.isfinite(values)
        magnitude = values.abs().float().masked_fill(~finite, 0.0)
        saturated = 0
        if isinstance(quantized, QuantizedTensor) and quantized.out_of_range is not None:
            saturated = int(quantized.out_of_range.reshape(-1)[0])
        self.seen.append(
            Finding(
                self.layer,
                gemm,
                operand,
                nonfinite=int((~finite).sum()),
                saturated=saturated,
                values=values.numel(),
                amax=float(magnitude.max()) if values.numel() else 0.0,
                rank=self.rank,
            )
        )


@dataclass(frozen=True)
class Inspection:
    """What looking again has shown; the same on every rank."""

    first: Finding | None
    """In the order of computation; None where every operand was finite and in range."""
    samples: list[dict[str, Any]]
    """{"sample", "loss"}, those that are not finite first, then the largest loss first."""
    operands: list[Finding]
    """Of rank 0: those that are not finite, saturated, or largest."""
    reproduced: bool
    """Whether an operand or a loss was not finite again."""

    def line(self) -> str:
        """One line for the log."""
        worst = self.samples[0] if self.samples else None
        sample = f"; worst sample {worst['sample']} (loss {worst['loss']})" if worst else ""
        if self.first is not None:
            return f"first in {self.first.where} (rank {self.first.rank}){sample}"
        return f"no operand of a GEMM was out of range when the step was computed again{sample}"


def inspect_step(engine: Engine, micro_batches: Sequence[MicroBatch]) -> Inspection:
    """Computes the step again on all ranks, without an update. Collective."""
    seen: list[Finding] = []
    rows: list[tuple[int, float, float]] = []
    with _untouched(engine), gathered_parameters(engine), generators_untouched():
        for name, module in engine.plan.bound:
            module.observer = _Watch(name, seen, engine.world.rank)
        step = partial(forward_step_by_sample, rows)
        run_schedule(engine, micro_batches, forward_only=False, forward=step)
    own = next((index for index, one in enumerate(seen) if one.nonfinite), None)
    if own is None:
        own = next((index for index, one in enumerate(seen) if one.saturated), None)
    boxes: list[Any] = [None] * engine.world.size
    dist.all_gather_object(boxes, (own, seen[own] if own is not None else None, rows, seen[:0]))
    firsts = [(one.nonfinite == 0, _order(one), index, one) for index, one, *_ in boxes if one]
    first = min(firsts, key=lambda part: part[:3])[3] if firsts else None
    samples = _samples([row for box in boxes for row in box[2]])
    bad_loss = any(not math.isfinite(float(one["loss"])) for one in samples)
    return Inspection(
        first=first,
        samples=samples[:_MOST_SAMPLES],
        operands=sorted(seen, key=lambda one: (-one.nonfinite, -one.saturated, -one.amax))[
            :_MOST_ROWS
        ],
        reproduced=bad_loss or (first is not None and first.nonfinite > 0),
    )


def write_dump(folder: Path, step: int, about: dict[str, Any], inspection: Inspection) -> Path:
    """Writes RUN/bad_steps/step_NNNNNNNN.json, at most 64 KiB; returns its path."""
    operands = [asdict(one) for one in inspection.operands]
    path = folder / f"step_{step:08d}.json"
    while True:
        content = {
            **about,
            "reproduced": inspection.reproduced,
            "first": asdict(inspection.first) if inspection.first else None,
            "samples": inspection.samples,
            "operands": operands,
        }
        data = (json.dumps(content, indent=1, default=str) + "\n").encode()
        if len(data) <= _MOST_BYTES or not operands:
            break
        operands = operands[: len(operands) // 2]
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)
    return path


def _order(finding: Finding) -> tuple[int, int]:
    """Forward before backward; with the flow of computation through the layers."""
    digits = "".join(c if c.isdigit() else " " for c in finding.layer).split()
    layer = int(digits[0]) if digits else 0
    layer += 10**6 * finding.layer.startswith("mtp")
    forward = finding.gemm == "fprop" or (finding.gemm, finding.operand) == ("wgrad", "x")
    return (0, layer) if forward else (1, -layer)


def forward_step_by_sample(
    rows: list[tuple[int, float, float]], state: Any, batches: Iterator[dict[str, Any]], model: Any
) -> tuple[Tensor, Any]:
    """`forward_step` that also notes each sample's loss: (id, sum, counted tokens). Waits."""
    batch = next(batches)
    losses, _ = forward_step(state, iter([batch]), model)

    def loss(losses: Tensor) -> Any:
        mask = batch["loss_mask"].float()
        sums = (losses.detach().float() * mask).sum(-1).tolist()
        rows.extend(zip(batch["sample_ids"], sums, mask.sum(-1).tolist()))
        return loss_function(batch["loss_mask"], losses)

    return losses, loss


def _samples(rows: Sequence[tuple[int, float, float]]) -> list[dict[str, Any]]:
    totals: dict[int, list[float]] = {}
    for sample, loss, count in set(rows):  # tensor-parallel ranks say the same
        total = totals.setdefault(sample, [0.0, 0.0])
        total[0] += loss
        total[1] += count
    means = [(sample, loss / max(count, 1.0)) for sample, (loss, count) in totals.items()]
    means.sort()  # by sample, so that ranks agree where losses tie
    means.sort(key=lambda one: (math.isfinite(one[1]), -one[1] if math.isfinite(one[1]) else 0))
    return [
        {"sample": sample, "loss": mean if math.isfinite(mean) else str(mean)}
        for sample, mean in means
    ]


@contextlib.contextmanager
def _untouched(engine: Engine) -> Iterator[None]:
    """Everything that a forward and a backward change, put back at the end."""
    config, state = engine.config, engine.precision_state
    functions = config.finalize_model_grads_func, config.no_sync_func
    buffers = [b for chunk in engine.chunks for b in unwrap(chunk).buffers()]
    kept = [buffer.clone() for buffer in buffers]
    modules = engine.plan.bound
    flags = state.nonfinite.clone(), state.check_finite
    observers = [module.observer for _, module in modules]
    config.finalize_model_grads_func, config.no_sync_func = None, contextlib.nullcontext
    state.check_finite = False
    with contextlib.ExitStack() as stack:
        stack.enter_context(engine.plan.scales_kept())
        for chunk in engine.chunks:
            chunk.zero_grad_buffer()
            stack.enter_context(chunk.no_sync())
        try:
            yield
        finally:
            for (_, module), observer in zip(modules, observers):
                module.observer = observer
    for buffer, value in zip(buffers, kept):
        buffer.copy_(value)
    config.finalize_model_grads_func, config.no_sync_func = functions
    state.nonfinite.copy_(flags[0])
    state.check_finite = flags[1]
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
