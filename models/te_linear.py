# SPDX-License-Identifier: Apache-2.0
"""precision.backend: transformer_engine: its GEMMs under this project's layers.

Weights, their sharding, communication and checkpoints stay what they are; each linear layer only
computes through a `transformer_engine.pytorch.Linear` that shares its weight, with the scaling that
the plan gives it. So a run may change its back end at a checkpoint, and the two can be compared.
What Transformer Engine decides by itself is then its own: amaxes of local shards, random numbers,
accumulation. Recipes with a state between steps (fp8_delayed) are left out, since checkpoints would
not hold it.
"""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from fused_ops.recipe import GemmRecipe

RECIPES = {
    "bf16": None,
    "fp8_tensorwise": "Float8CurrentScaling",
    "fp8_blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
"""Our recipes, and the classes of transformer_engine.common.recipe that mean the same."""

_AVAILABLE = {
    "fp8_tensorwise": "is_fp8_available",
    "fp8_blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


def recipe_problems(stages: Sequence[Mapping[str, GemmRecipe]], shapes: Sequence[Any]) -> list[str]:
    """What of a plan Transformer Engine has no way to compute, on any machine.

    Args:
        stages: the recipe of every linear layer, in every phase and stage of the plan.
        shapes: of these layers, a `models.gemms.GemmShape` each.
    """
    used = {(name, recipe.name) for stage in stages for name, recipe in stage.items()}
    unknown = sorted({recipe for _, recipe in used} - RECIPES.keys())
    found = [
        f"precision.backend transformer_engine computes {', '.join(RECIPES)}; the plan has "
        f"{name!r}; use fused_ops for it, or another recipe"
        for name in unknown
    ]
    quantized = {name for name, recipe in used if RECIPES.get(recipe) is not None}
    ragged = [s for s in shapes if s.name in quantized and (s.k % 16 or s.n % 16)]
    if ragged:
        first = ragged[0]
        found.append(
            "precision.backend transformer_engine quantizes layers whose features are multiples of "
            f"16; {first.name} has {first.k} to {first.n} ({len(ragged)} such layers); give them "
            "bf16 by a rule, or use fused_ops"
        )
    experts = [shape.name for shape in shapes if ".experts." in shape.name]
    if experts:
        found.append(
            "precision.backend transformer_engine has no experts here; the model has "
            f"{experts[0]}; use fused_ops"
        )
    return found


def machine_problems(recipes: Iterable[str]) -> list[str]:
    """What is missing on this machine: the package, a GPU, a generation of it."""
    what = "precision.backend transformer_engine needs"
    if importlib.util.find_spec("transformer_engine") is None:
        return [f"{what} the package transformer-engine, which is not installed; use fused_ops"]
    if not torch.cuda.is_available():
        return [f"{what} a GPU, and torch sees none here; use fused_ops"]
    import transformer_engine.pytorch as te

    found = []
    for name in sorted(set(recipes)):
        check = getattr(te, _AVAILABLE.get(name, ""), None)
        fits, reason = (True, "") if check is None else check(return_reason=True)
        if not fits:
            found.append(
                f"{what} another GPU for {name} ({str(reason).rstrip('.')}); use fused_ops, which "
                "computes the same format on this one"
            )
    return found


def scaling(name: str) -> Any:
    """The recipe object for one of RECIPES; None for bf16."""
    kind = RECIPES[name]
    if kind is None:
        return None
    from transformer_engine.common import recipe

    return getattr(recipe, kind)()


class TransformerEngineGemm:
    """One linear layer's GEMMs by Transformer Engine.

    Args:
        weight: the layer's own, [out, in].
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        import transformer_engine.pytorch as te

        self._autocast = te.autocast
        self._linear = te.Linear(
            weight.shape[1],
            weight.shape[0],
            bias=False,
            params_dtype=weight.dtype,
            device="meta",
            fuse_wgrad_accumulation=True,
        )
        self._linear.weight = weight
        self._scaling: dict[str, Any] = {}

    def __call__(
        self,
        x: Tensor,
        bias: Tensor | None,
        recipe: GemmRecipe,
        *,
        tp_group: Any = None,
        gather_tokens: bool = False,
        all_reduce_input_grad: bool = False,
    ) -> Tensor:
        """x [..., in] -> [..., out]; arguments as `models.comm.TensorParallelComm` has them.

        The weight is quantized in every micro-batch: told of a first one, Transformer Engine would
        overwrite the sum of gradients, which a weight that is used twice has two of.
        """
        if gather_tokens:
            x = gather_from_sequence_parallel_region(x, True, group=tp_group)
        elif all_reduce_input_grad:
            x = copy_to_tensor_model_parallel_region(x, group=tp_group)
        if recipe.name not in self._scaling:
            self._scaling[recipe.name] = scaling(recipe.name)
        kept = self._scaling[recipe.name]
        has_sum = getattr(self._linear.weight, "main_grad", None) is not None
        self._linear.fuse_wgrad_accumulation = has_sum
        with self._autocast(enabled=kept is not None, recipe=kept):
            y = self._linear(x)
        return y if bias is None else y + bias
