# SPDX-License-Identifier: Apache-2.0
"""Tensors of a real training step, kept to be multiplied again: how far products on FP8 cores err.

A captured layer is {"x": [tokens, in], "w": [out, in], "dy": [tokens, out]}, as its GEMMs were
given them in one micro-batch of the step, before any quantization.
"""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from fused_ops.formats import Operand, OperandSpec, QuantizedTensor
from fused_ops.linear import LinearCall
from fused_ops.quantize import quantize
from fused_ops.recipe import GemmRecipe, get_recipe
from fused_ops.scaled_matmul import reference, scaled_matmul
from fused_ops.testing import relative_mse
from pretrain.callbacks import Callback, Row
from pretrain.training import Training

Layer = dict[str, Tensor]
_KEPT = {("fprop", "x"): "x", ("fprop", "w"): "w", ("dgrad", "dy"): "dy"}
_KEY = (0x12345678, 0x9ABCDEF0)


class _Keep:
    """An observer that copies what its layer's GEMMs are given in one micro-batch."""

    def __init__(self, layer: Layer, micro_batch: int) -> None:
        self.layer, self.micro_batch = layer, micro_batch

    def wants(self, micro_batch: int) -> bool:
        """Signature: `models.parallel_linear.ModuleObserver.wants`."""
        return micro_batch == self.micro_batch

    def observe(
        self, gemm: str, operand: str, tensor: Tensor, quantized: Operand, call: LinearCall
    ) -> None:
        """Signature: `fused_ops.linear.Observer.observe`. Waits for the device."""
        name = _KEPT.get((gemm, operand))
        if name is not None and name not in self.layer and tensor.numel():
            self.layer[name] = tensor.detach().cpu().clone()


class Capture(Callback):
    """Keeps the operands of some layers in one step, in `layers` by global name.

    Args:
        step: which step.
        micro_batch: which of the step's, from 0.
        patterns: of the names of layers, as in `precision.rules`; experts are not captured.
    """

    def __init__(self, step: int, micro_batch: int, patterns: Sequence[str]) -> None:
        self.step, self.micro_batch, self.patterns = step, micro_batch, patterns
        self.layers: dict[str, Layer] = {}
        self._modules: list[tuple[str, Any]] = []

    def before_step(self, trainer: Training, step: int) -> None:
        """Signature: `Callback.before_step`. ConfigError, before anything is trained, where the
        model or the step has not what is to be captured."""
        if not self._modules:
            self._modules = self._chosen(trainer, step)
        if step == self.step:
            for name, module in self._modules:
                module.observer = _Keep(self.layers.setdefault(name, {}), self.micro_batch)

    def after_step(self, trainer: Training, row: Row) -> None:
        """Signature: `Callback.after_step`."""
        for _, module in self._modules:
            module.observer = None

    def _chosen(self, trainer: Training, step: int) -> list[tuple[str, Any]]:
        """(global name, layer) of what is captured, asked before step `step`."""
        bound = trainer.engine.plan.bound
        plain = {name: module for name, module in bound if module.weight.dim() == 2}
        found = {pattern: fnmatch.filter(plain, pattern) for pattern in self.patterns}
        problems = [
            f"--layers must match linear layers; {pattern} matches none of {', '.join(plain)}; "
            "patterns may have *"
            for pattern, names in found.items()
            if not names
        ]
        train, consumed = trainer.config.train, trainer.state.consumed_samples
        for _ in range(step, self.step):
            consumed += train.batch_sizes.at(consumed)
        number = train.batch_sizes.at(consumed) // train.micro_batch_size
        if self.micro_batch >= number:
            problems.append(
                f"--micro-batch must be below {number}, as many as step {self.step} has; got "
                f"{self.micro_batch}"
            )
        if problems:
            raise ConfigError(problems)
        wanted = {name for names in found.values() for name in names}
        return [(name, module) for name, module in plain.items() if name in wanted]


def load_layers(path: Path) -> dict[str, Layer]:
    """What `tools.capture` has saved.

    Raises:
        ConfigError: a file that is missing or holds something else.
    """
    try:
        saved = torch.load(path, weights_only=True)
        layers: dict[str, Layer] = {n: dict(layer) for n, layer in saved["layers"].items()}
    except Exception as error:  # what another file makes the unpickler do is anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"OUT.pt must be a file of tools.capture; {path}: {reason}; make it with python -m "
            "tools.capture CONFIG OUT.pt"
        ) from None
    whole = {name: layer for name, layer in layers.items() if {"x", "w", "dy"} <= layer.keys()}
    if not whole:
        raise ConfigError(f"OUT.pt must hold x, w and dy of a layer; {path} has none that is whole")
    problems = [
        f"OUT.pt must hold x [..., in], w [out, in] and dy [..., out] of each layer; {name} of "
        f"{path} has others"
        for name, layer in whole.items()
        if not _fits(layer)
    ]
    if problems:
        raise ConfigError(problems)
    return whole


def _fits(layer: Layer) -> bool:
    """Whether these are the tensors of one layer's GEMMs."""
    tensors = [layer[name] for name in ("x", "w", "dy")]
    if not all(isinstance(t, Tensor) and t.is_floating_point() and t.numel() for t in tensors):
        return False
    x, w, dy = tensors
    shapes = (*x.shape[:-1], *w.shape), (*dy.shape[:-1], dy.shape[-1], x.shape[-1])
    return w.dim() == 2 and x.dim() > 1 and shapes[0] == shapes[1]


@dataclass(frozen=True)
class ProductError:
    """How far a product is from the exact one of the same codes; both in BF16."""

    layer: str
    gemm: str
    way: str
    identical: float
    """Share of outputs whose BF16 values are the same."""
    largest: float
    """max |difference| / max |exact|."""
    squared: float
    """Sum of squared differences / sum of squares of the exact product."""
    excess: float
    """Squared error against the product of what was captured, over that of the exact product of
    the exact codes, minus 1: what the way of multiplying adds to the error of 4 bits."""


WAYS = (
    ("nvfp4, exact", "nvfp4", "exact"),
    ("nvfp4_pow2", "nvfp4_pow2", "exact"),
    ("nvfp4_fast, decode fp8", "nvfp4_fast", "fp8"),
)
"""Name, recipe, decode."""


def gemm_tensors(layer: Mapping[str, Tensor], rows: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Left and right [M, K], [N, K] of each GEMM; M and N are cut to `rows`, K is whole."""
    x, w, dy = layer["x"], layer["w"], layer["dy"]
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    return {
        "fprop": (x[:rows], w[:rows]),
        "dgrad": (dy[:rows], w.t()[:rows]),
        "wgrad": (dy.t()[:rows], x.t()[:rows]),
    }


def product_errors(
    name: str, layer: Mapping[str, Tensor], rows: int, device: torch.device | str
) -> Iterator[ProductError]:
    """Of each way and GEMM of a captured layer, on `device`.

    Operands are quantized as the recipe says, from the cut matrices (amaxes are theirs).
    """
    for way, recipe_name, decode in WAYS:
        recipe = get_recipe(recipe_name)
        for gemm, tensors in gemm_tensors(layer, rows).items():
            left, right = (t.to(device).contiguous() for t in tensors)
            a, b = _quantized(recipe, gemm, left, right)
            exact = exact_product(a, b).bfloat16()
            got = scaled_matmul(a, b, out_dtype=torch.bfloat16, decode=decode)
            true = left.double() @ right.double().t()
            own, base = relative_mse(got, true), relative_mse(exact, true)
            difference = (got.double() - exact.double()).abs().max()
            yield ProductError(
                layer=name,
                gemm=gemm,
                way=way,
                identical=float((got == exact).double().mean()),
                largest=float(difference / exact.double().abs().max()),
                squared=relative_mse(got, exact),
                excess=own / base - 1 if base else 0.0,
            )


def exact_product(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """a . b^T in fp64: products of codes are exact, sums to 2^-53."""
    total = reference.values(a).double() @ reference.values(b).double().t()
    factor = reference.alpha(a, b)
    return total if factor is None else total * factor.double()


def _quantized(
    recipe: GemmRecipe, gemm: str, left: Tensor, right: Tensor
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Both operands, each from its tensor: to requantize a weight is no error of the product."""
    specs = [replace(spec, source="tensor") for spec in recipe.specs(gemm)]
    return _quantize(left, specs[0]), _quantize(right, specs[1])


def _quantize(x: Tensor, spec: OperandSpec) -> QuantizedTensor:
    return quantize(x, spec, key=_KEY if spec.is_random else None)


def tail(x: Tensor) -> str:
    """Shape, and how heavy its tail is: kurtosis (3 of a Gaussian) and amax over the rms."""
    values = x.double()
    rms = values.square().mean().sqrt()
    if not rms:
        return f"{tuple(x.shape)}, zeros"
    kurtosis = ((values - values.mean()) / values.std(correction=0)).pow(4).mean()
    return f"{tuple(x.shape)}, kurtosis {kurtosis:.1f}, amax {values.abs().max() / rms:.1f} rms"
