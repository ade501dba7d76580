# SPDX-License-Identifier: Apache-2.0
"""What the precision section may ask for in this version and on this machine."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from fused_ops.formats import OperandSpec
from fused_ops.quantize import quantize
from fused_ops.quantize.implementations import QUANTIZE
from fused_ops.recipe import GemmRecipe, is_quantized
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.scaled_matmul.implementations import SCALED_MATMUL
from models import te_linear
from models.gemms import GemmShape
from models.precision_config import GEMMS, PrecisionConfig

# Implementations that define or model the arithmetic, and are not meant for speed.
REFERENCES = ("reference", "blackwell_model")


def backend_problems(
    config: PrecisionConfig,
    stages: Sequence[Mapping[str, GemmRecipe]],
    shapes: Sequence[GemmShape],
) -> list[str]:
    """What the back end has no way to compute, whatever the machine."""
    if config.backend == "fused_ops":
        return []
    found = te_linear.recipe_problems(stages, shapes)
    if config.communicate != "bf16":
        found.append(
            f"precision.communicate={config.communicate} moves this project's codes, which "
            "precision.backend transformer_engine does not make; set it to bf16"
        )
    return found


def reference_problems(
    config: PrecisionConfig, recipes: Iterable[GemmRecipe], device: torch.device | str
) -> list[str]:
    """Quantized GEMMs that would run in the reference although it is forbidden.

    Args:
        config: with `allow_reference`.
        recipes: those in use.
        device: where the run computes.
    """
    if config.allow_reference:
        return []
    pairs = {
        recipe.specs(gemm)
        for recipe in recipes
        for gemm in GEMMS
        if all(map(is_quantized, recipe.specs(gemm)))
    }
    where = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "a CPU"
    found = []
    for left, right in sorted(pairs, key=str):
        reason = _no_kernel(left, right, config.decode, device)
        if reason is not None:
            found.append(
                f"precision.allow_reference is false, but {left.label} with {right.label} has no "
                f"kernel on {where} ({reason}); allow the reference, or choose another recipe"
            )
    return found


def _no_kernel(
    left: OperandSpec, right: OperandSpec, decode: str, device: torch.device | str
) -> str | None:
    """Why a GEMM of these operands cannot avoid the reference; None if it can."""
    kernels = {op.name: [n for n in op.names if n not in REFERENCES] for op in _OPS}
    missing = [name for name, names in kernels.items() if not names]
    if missing:
        return f"no implementation but the reference of {' and '.join(missing)}"
    try:
        operands = []
        for spec in (left, right):
            sample = torch.ones(128, 128, dtype=torch.bfloat16, device=device)
            key = (0, 0) if spec.is_random else None
            amax = torch.ones((), device=device)
            amax = amax.expand(128) if spec.row_scaled else amax
            choice = kernels[QUANTIZE.name]
            operands.append(quantize(sample, spec, amax=amax, key=key, implementation=choice))
        choice = kernels[SCALED_MATMUL.name]
        scaled_matmul(*operands, out_dtype=torch.bfloat16, decode=decode, implementation=choice)
    except ValueError as error:
        return str(error).replace("\n", "; ")
    return None


_OPS = (QUANTIZE, SCALED_MATMUL)
