# SPDX-License-Identifier: Apache-2.0
"""Why a row is where it is: what the monitor of numerics saw in one of its runs, in a few numbers.

    {"step", "modules": [names],
     "errors": {"fprop" | "dgrad" | "wgrad": [relative error of the product, a module]},
     "means": {"fprop.x snr_db": ..., "dgrad.dy slope": ..., "zero_gradients": ...}}

The step is the last monitored one before the final fifth of the run, so that schedules that raise
the precision late have not yet begun. The relative error of a product follows from its cosine with
the exact one and its signed error: |p - y|^2 / |y|^2 = (1 + s)^2 / cos^2 - 2 (1 + s) + 1.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fused_ops.keys import GEMMS, OPERANDS
from pretrain.history import NUMERICS_FILE, read_metrics

_FIGURES = ("snr_db", "slope", "slope_max", "flushed")


def evidence(folder: Path, steps: int) -> dict[str, Any]:
    """Of the run in `folder`; {} where nothing was monitored."""
    path = folder / NUMERICS_FILE
    rows = [row for row in (read_metrics(path) if path.exists() else []) if "module" in row]
    seen = sorted({row["step"] for row in rows})
    if not seen:
        return {}
    step = max((one for one in seen if one <= 0.8 * steps), default=seen[0])
    rows = [row for row in rows if row["step"] == step]
    means = {
        f"{operand} {name}": _mean([row.get(operand, {}).get(name) for row in rows])
        for operand in OPERANDS
        for name in _FIGURES
    }
    means |= {f"{gemm} signed": _mean([_of(row, gemm, "signed") for row in rows]) for gemm in GEMMS}
    means["zero_gradients"] = _mean([row.get("zero_gradients") for row in rows])
    return {
        "step": step,
        "modules": [row["module"] for row in rows],
        "errors": {gemm: [_error(row, gemm) for row in rows] for gemm in GEMMS},
        "means": {name: value for name, value in means.items() if value is not None},
    }


def _of(row: Mapping[str, Any], gemm: str, name: str) -> float | None:
    value = row.get(gemm)
    return value.get(name) if isinstance(value, Mapping) else None


def _error(row: Mapping[str, Any], gemm: str) -> float | None:
    """The relative error of a product; None where nothing of it was quantized."""
    cosine, signed = _of(row, gemm, "cosine"), _of(row, gemm, "signed")
    if not cosine or signed is None:
        return None
    length = 1.0 + signed
    return round(math.sqrt(max((length / cosine) ** 2 - 2.0 * length + 1.0, 0.0)), 5)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{statistics.fmean(known):.5g}") if known else None
