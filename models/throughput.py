# SPDX-License-Identifier: Apache-2.0
"""How long a step takes, from rates of single operations, each measured or said to be assumed.

Matrix products at the rate of their formats, quantization by the bytes that it reads and writes,
attention and the rest as shares. Communication is counted by its bytes at an assumed bandwidth.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fused_ops.recipe import GemmRecipe, is_quantized
from models.flops import ModelShape, fixed_parts, peak_tflops
from models.precision_config import GEMMS

BENCHMARK = "BENCHMARKS.md, one H200, 2026-11-30"


@dataclass(frozen=True)
class Figure:
    """A number and where it comes from."""

    value: float
    source: str
    measured: bool = True

    def text(self, unit: str) -> str:
        """For a report."""
        kind = "measured" if self.measured else "ASSUMED"
        return f"{self.value:,.0f} {unit} ({kind}: {self.source})"


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU: memory in GiB, rates in TFLOP/s, bandwidths in GB/s."""

    name: str
    memory: float
    products: Mapping[str, Figure]
    """By kind of product: high, fp4_exact, fp8 (also FP4 operands that E4M3 holds)."""
    quantize: Figure
    """Bytes read and written a second by quantizers."""
    node: Figure = Figure(300.0, "between the GPUs of a node", measured=False)
    network: Figure = Figure(40.0, "a GPU's share of the network", measured=False)


def _blackwell(name: str, memory: float) -> Device:
    peak = peak_tflops(name) or 0.0
    text = "a share of the data sheet's dense peak; never run here"
    return Device(
        name=name,
        memory=memory,
        products={
            "high": Figure(0.70 * peak, text, measured=False),
            "fp8": Figure(0.70 * 2 * peak, text, measured=False),
            "fp4_exact": Figure(0.55 * 4 * peak, text, measured=False),
        },
        quantize=Figure(4000.0, "half of the memory's bandwidth", measured=False),
    )


DEVICES = {
    "h200": Device(
        name="H200",
        memory=139.8,
        products={
            "high": Figure(690.0, f"BF16 8192 x 20480 x 5120 and transposed; {BENCHMARK}"),
            "fp8": Figure(1190.0, f"pow2 or decode fp8, 1.73 of BF16; {BENCHMARK}"),
            "fp4_exact": Figure(675.0, f"nvfp4 exact, 0.98 of BF16; {BENCHMARK}"),
        },
        quantize=Figure(2100.0, f"half of a copy, the middle of the kinds; {BENCHMARK}"),
    ),
    "b200": _blackwell("B200", 180.0),
    "gb300": _blackwell("GB300", 279.0),
}
ATTENTION_SHARE = Figure(50.0, "rate of attention, percent of a BF16 product's", measured=False)
LAUNCH = Figure(125.0, "microseconds of launches a linear layer, 25 of 5 us", measured=False)
REST_SHARE = Figure(25.0, "norms, activations, scan, optimizer: percent on top", measured=False)


def product_kind(recipe: GemmRecipe, gemm: str, decode: str) -> str:
    """high, fp8, fp4_exact, or reference: which of a device's rates a GEMM has."""
    pair = recipe.specs(gemm)
    if not all(map(is_quantized, pair)):
        return "high"
    formats = {spec.format for spec in pair}
    if formats <= {"fp8_tensorwise", "fp8_delayed"}:
        return "fp8"
    if formats == {"nvfp4"}:
        small = all(spec.is_pow2 for spec in pair) or "fp8" in (decode, recipe.decode)
        return "fp8" if small else "fp4_exact"
    return "reference"


@dataclass(frozen=True, kw_only=True)
class TokenTime:
    """Seconds of one GPU for a token of the whole model, forward and backward, by part."""

    parts: dict[str, float]
    unknown: tuple[str, ...]
    """Recipes whose products have no kernel: counted at the rate of high precision."""

    @property
    def total(self) -> float:
        """The sum."""
        return sum(self.parts.values())


def token_time(
    shape: ModelShape, recipes: Mapping[str, GemmRecipe], device: Device, decode: str
) -> TokenTime:
    """What a token costs without communication, as if one GPU held the model.

    Args:
        shape: the model.
        recipes: of each linear layer by global name.
        device: one of DEVICES.
        decode: of the run, for NVFP4 operands.
    """
    parts = {"products": 0.0, "quantization": 0.0, "attention": 0.0, "rest": 0.0}
    unknown: dict[str, None] = {}
    high = device.products["high"].value * 1e12
    plain = 0.0
    for module in shape.modules():
        recipe = recipes[module.name]
        plain += 3 * module.flops / high
        for gemm in GEMMS:
            kind = product_kind(recipe, gemm, decode)
            if kind == "reference":
                unknown[recipe.name], kind = None, "high"
            parts["products"] += module.flops / (device.products[kind].value * 1e12)
            # Each token's operand is read in BF16 and written in codes; weights' are kept.
            width = module.k if gemm == "fprop" else module.n
            width = module.k + module.n if gemm == "wgrad" else width
            if any(map(is_quantized, recipe.specs(gemm))):
                moved = width * module.calls * 2.56
                parts["quantization"] += moved / (device.quantize.value * 1e9)
    for part in fixed_parts(shape):
        slow = part.name.endswith("core_attention")
        rate = high * (ATTENTION_SHARE.value / 100 if slow else 1.0)
        parts["attention" if slow else "products"] += 3 * part.flops / rate
        plain += 3 * part.flops / high
    parts["rest"] = plain * REST_SHARE.value / 100
    return TokenTime(parts=parts, unknown=tuple(unknown))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by part, with what an even share of the work would take."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        """The sum."""
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda name: self.parts[name])


def step_time(shape: ModelShape, each: TokenTime, device: Device, sizes: Any) -> StepTime:
    """Of one optimizer step.

    Args:
        each: of a token.
        device: of every rank.
        sizes: with tokens (of a step), world, parallel, micro_batches (of a data-parallel rank),
            gradient_bytes and weight_bytes (of a rank), and gathered (the share of BF16's bytes
            that sequence-parallel gathers move).
    """
    parallel, world = sizes.parallel, sizes.world
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    work = {name: seconds * sizes.tokens / world for name, seconds in each.parts.items()}
    busy = sum(work.values())
    launches = len(shape.modules()) / pp * sizes.micro_batches * LAUNCH.value * 1e-6
    waiting = max(0.0, launches - busy)
    bubble = (pp - 1) / (max(sizes.micro_batches, 1) * parallel.virtual)
    parts = {**work, "launches": waiting, "pipeline bubble": (busy + waiting) * bubble}
    if tp > 1:
        layers = len(shape.modules()) / 2  # a gather or a reduction beside each linear layer
        # Two gathers, which may move codes, and two reductions.
        passes = 2 + 2 * sizes.gathered
        moved = passes * layers * sizes.tokens * tp / world * shape.config.hidden_size * 2
        parts["tensor-parallel communication"] = moved * (tp - 1) / tp / (device.node.value * 1e9)
    ep = parallel.expert_model_parallel_size
    if ep > 1:
        routed = shape.pattern.count("E") * shape.config.moe_router_topk
        width = shape.config.moe_latent_size or shape.config.hidden_size
        # Each token goes to its experts and comes back, forward and backward.
        moved = 4 * routed * sizes.tokens / world * width * 2 * (ep - 1) / ep
        wire = device.node if ep * tp <= 8 else device.network
        parts["expert-parallel communication"] = moved / (wire.value * 1e9)
    replicas = world // (tp * pp)
    if replicas > 1:
        wire = device.node if world <= 8 else device.network
        moved = (sizes.gradient_bytes + sizes.weight_bytes) * (replicas - 1) / replicas
        seconds = moved / (wire.value * 1e9)
        if parallel.overlap_grad_reduce:
            seconds = max(0.0, seconds - busy / 2)  # behind the backward pass of the last one
        parts["data-parallel communication"] = seconds
    return StepTime(parts={name: value for name, value in parts.items() if value})
