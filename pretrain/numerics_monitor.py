# SPDX-License-Identifier: Apache-2.0
"""Every N steps: what 4 bits do to each operand and product of each GEMM, layer by layer.

The figures go to RUN/numerics.jsonl, one row a linear layer and one a router, to TensorBoard and
wandb, and onto report.html as layers by steps. `fused_ops.operand_error` defines them. A monitored
step computes what it would compute anyway, bit by bit. Each looks at one of a rank's micro-batches,
the first looks at the first, the next at the second: what goes stale within a step shows.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fused_ops.keys import GEMMS, OPERANDS
from fused_ops.operand_error import operand_figures, product_figures
from pretrain.callbacks import Callback
from pretrain.data.batch_sizes import check_batch_sizes
from pretrain.engine import Engine
from pretrain.history import NUMERICS_FILE, JsonlSink, Row
from pretrain.monitor_config import MonitorConfig
from pretrain.numerics_watch import NumericsWatch
from pretrain.training import Training


class NumericsMonitor(Callback):
    """Watches every `interval`-th step and writes what was seen.

    Args:
        config: the monitor section.
        engine: what is trained.
        run_dir: where numerics.jsonl lies.
        resumed_step: as of `MetricsLogger`.
        show: takes the same figures as one flat row, on the rank that writes; None: other ranks.
    """

    def __init__(
        self,
        config: MonitorConfig,
        engine: Engine,
        run_dir: Path,
        resumed_step: int | None,
        show: Callable[[Row], None] | None,
    ) -> None:
        self.config, self.engine, self.show = config, engine, show
        self.sink = JsonlSink(run_dir / NUMERICS_FILE, resumed_step) if show is not None else None
        self._watch: NumericsWatch | None = None
        self._attached = contextlib.ExitStack()

    def before_step(self, trainer: Training, step: int) -> None:
        """Signature: `Callback.before_step`. Collective in models with experts."""
        if step % self.config.interval:
            return
        train, ranks = trainer.config.train, self.engine.world.data_parallel_size
        size = train.batch_sizes.at(trainer.state.consumed_samples)
        count = check_batch_sizes(size, train.micro_batch_size, ranks)
        turn = (step // self.config.interval - 1) % count
        limits = self.config.rows, self.config.columns
        self._watch = NumericsWatch(self.engine, limits, self.config.experts, turn)
        self._attached.enter_context(self._watch.attached())

    def after_compute(self, trainer: Training, step: int) -> None:
        """Signature: `Callback.after_compute`. Collective after a monitored step."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        self._attached.close()
        sums = watch.reduced()
        if self.sink is None or self.show is None:
            return
        recipes = {name: recipe.name for name, recipe in self.engine.plan.recipes().items()}
        rows = numerics_rows(step, watch, sums, recipes)
        for one in rows:
            self.sink.write(one)
        self.show({"step": step, **flat_figures(rows)})

    def on_rollback(self, trainer: Training, step: int) -> None:
        """Signature: `Callback.on_rollback`."""
        if self.sink is not None:
            self.sink.rewind(step)

    def close(self, trainer: Training) -> None:
        """Signature: `Callback.close`."""
        self._attached.close()
        if self.sink is not None:
            self.sink.close()


def numerics_rows(
    step: int, watch: NumericsWatch, sums: Mapping[str, list[Any]], recipes: Mapping[str, str]
) -> list[Row]:
    """One row a linear layer, then one a router.

    All: step, and micro_batch, which of a rank's the figures are of, from 0.
    A layer's: module, recipe; for each operand ("fprop.x", ...) its `operand_figures` and
    amax, before any rotation; for each GEMM with a quantized operand its `product_figures`; and
    zero_gradients, the share of exact zeros in the step's whole gradient of the weight.
    A router's: router, entropy (of its shares, over that of equal ones), load (each expert's
    tokens over the mean), max_load, idle (share of experts without a token).
    """
    rows = []
    when: Row = {"step": step, "micro_batch": watch.micro_batch}
    for i, name in enumerate(watch.names):
        row: Row = {**when, "module": name, "recipe": recipes.get(name, "")}
        for j, operand in enumerate(OPERANDS):
            if sums["amax"][i][j] or sums["operands"][i][j][0]:
                figures = operand_figures(sums["operands"][i][j])
                row[operand] = _rounded({"amax": sums["amax"][i][j], **figures})
        for j, gemm in enumerate(GEMMS):
            figures = product_figures(sums["products"][i][j])
            if gemm != "wgrad":
                figures = {k: v for k, v in figures.items() if k in ("cosine", "signed")}
            if figures:
                row[gemm] = _rounded(figures)
        zeros, values = sums["gradients"][i]
        if values:
            row["zero_gradients"] = zeros / values
        if len(row) > 4:
            rows.append(row)
    for name, numbers in zip(watch.router_names, sums["routers"]):
        tokens, entropy, *load = numbers
        if tokens:
            mean = sum(load) / len(load) or 1.0
            shares = [round(count / mean, 4) for count in load]
            rows.append(
                {
                    **when,
                    "router": name,
                    "entropy": entropy / tokens / math.log(max(len(load), 2)),
                    "max_load": max(shares),
                    "idle": sum(count == 0 for count in load) / len(load),
                    "load": shares,
                }
            )
    return rows


def flat_figures(rows: list[Row]) -> dict[str, float]:
    """{"numerics/layers.0.mlp.linear_fc1/fprop.x/snr_db": ...} of rows of one step."""
    found: dict[str, float] = {}
    for row in rows:
        prefix = f"numerics/{row.get('module') or row.get('router')}"
        for key, value in row.items():
            if isinstance(value, Mapping):
                found |= {f"{prefix}/{key}/{name}": number for name, number in value.items()}
            elif isinstance(value, float):
                found[f"{prefix}/{key}"] = value
    return found


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.6g}") for name, value in figures.items()}
