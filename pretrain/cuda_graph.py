# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of all micro-batches of a step as one CUDA graph.

A quantized step launches many short kernels: where the model is small, the host needs longer to
launch them than the device to run them. A replayed graph takes one launch. megatron-core calls this
cuda_graph_impl "full_iteration"; what it does not know of is random rounding. Dither and resampled
signs are functions of the step, so a recorded launch reads its key from device memory
(`fused_ops.keys.KeyTable`), where each replay finds that of its own step: losses and weights are
bitwise those of a run without graphs.

What decides which launches are recorded is compared before each step: another number of
micro-batches or a switch of precision records anew.

Collectives are recorded with the rest (tensor, sequence and context parallelism), on communicators
that the steps before have made. Recording itself waits for no other rank, so one that cannot record
says so to the others, and none of them replays.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_ops.keys import KeyTable
from pretrain.engine import Engine, Work
from pretrain.recording import NotRecordedError, record

WARM_UP = 2
"""Steps before one is recorded: kernels are compiled and tuned in them, workspaces made."""


class StepGraph:
    """Records what `work` launches for the micro-batches of a step, and replays it.

    Args:
        engine: its `plan`, `precision_state` and `config` belong to what is recorded.
        work: see `Work`. What it gives is a tensor that each replay writes again.
    """

    def __init__(self, engine: Engine, work: Work) -> None:
        self.engine, self.work = engine, work
        self._signature: tuple[Any, ...] = ()
        self._warmed = 0
        self._recorded: torch.cuda.CUDAGraph | None = None
        self._batches: list[dict[str, Any]] = []
        self._sums: Tensor | None = None
        self._finish: Callable[[], None] | None = None
        self._table: KeyTable | None = None

    def __call__(self, batches: Sequence[dict[str, Any]]) -> Tensor:
        """float64 [2], as `work` gives them; gradients are complete afterwards."""
        signature = self._describe(batches)
        if signature != self._signature:
            self.forget()
            self._signature = signature
            self._table = KeyTable(self.engine.world.device)
        assert self._table is not None, "a table comes with the signature"
        state = self.engine.precision_state
        self._table.refresh(state.seed, state.step)
        if self._recorded is None and self._warmed < WARM_UP:
            self._warmed += 1
            return self._with_table(lambda: self.work(batches))
        if self._recorded is None:
            self._record(batches)
        assert self._recorded is not None
        assert self._sums is not None
        for kept, batch in zip(self._batches, batches):
            for name, tensor in _tensors(kept).items():
                tensor.copy_(batch[name], non_blocking=True)
        self._recorded.replay()
        if self._finish is not None:
            self._finish()
        return self._sums.clone()

    def forget(self) -> None:
        """Gives the memory of what was recorded back."""
        self._recorded, self._sums, self._finish = None, None, None
        self._batches, self._warmed, self._signature = [], 0, ()

    def _describe(self, batches: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
        plan = self.engine.plan
        shapes = [
            (batch["index"], [(k, tuple(v.shape), v.dtype) for k, v in _tensors(batch).items()])
            for batch in batches
        ]
        return plan.phase, plan.active_steps, str(shapes)

    def _with_table(self, call: Callable[[], Tensor]) -> Tensor:
        state = self.engine.precision_state
        state.key_table = self._table
        try:
            return call()
        finally:
            state.key_table = None

    def _record(self, batches: Sequence[dict[str, Any]]) -> None:
        """Records `work` without what finishes the gradients, which ranks do together."""
        self._batches = [
            batch | {name: tensor.clone() for name, tensor in _tensors(batch).items()}
            for batch in batches
        ]
        config, finish = self.engine.config, self.engine.config.finalize_model_grads_func

        def later(*args: Any, **kwargs: Any) -> None:
            assert finish is not None, "it stands in for what was there"
            self._finish = lambda: finish(*args, **kwargs)

        config.finalize_model_grads_func = None if finish is None else later
        try:
            # Codes of weights must be made within the graph, not found.
            self.engine.precision_state.weights_changed()
            self._recorded, self._sums = self._record_on_device()
        except NotRecordedError:
            self.engine.precision_state.weights_changed()  # what was not run has made no codes
            raise
        finally:
            config.finalize_model_grads_func = finish

    def _record_on_device(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        return record(lambda: self._with_table(lambda: self.work(self._batches)))


def leave_default_stream() -> None:
    """Goes on with a stream of its own, which can be recorded: before the engine is built.

    Autograd adds up a parameter's gradient on the stream on which its node was made, and
    megatron-core's DistributedDataParallel makes and keeps those nodes.
    """
    if torch.cuda.is_available() and torch.cuda.current_stream() == torch.cuda.default_stream():
        torch.cuda.set_stream(torch.cuda.Stream())


def _tensors(batch: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, Tensor)}
