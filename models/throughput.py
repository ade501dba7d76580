# SPDX-License-Identifier: Apache-2.0
"""How long a step takes, from rates of single operations, each measured or said to be assumed.

Matrix products at the rate of their formats, attention and Mamba's scan at theirs, quantization and
elementwise work by the bytes that they read and write. Communication is counted by its bytes at an
assumed bandwidth. `tests/tools/test_forecast.py` holds it to the steps that were measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fused_ops.grouped_cuda import recipe_reason
from fused_ops.linear_call import LinearCall
from fused_ops.recipe import GemmRecipe, is_quantized
from fused_ops.scaled_matmul.blackwell import spec_reason as block_scaled_reason
from fused_ops.scaled_matmul.hopper import fits_fp8_cores
from fused_ops.weight_operands import shares_codes
from models.flops import ModelShape, fixed_parts, peak_tflops
from models.memory import is_expert
from models.parallel_config import ParallelConfig
from models.pattern import parse_pattern
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
        return f"{self.value:,.4g} {unit} ({kind}: {self.source})"


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU: memory in GiB, rates in TFLOP/s, bandwidths in GB/s."""

    name: str
    memory: float
    products: Mapping[str, Figure]
    """By `product_kind`; those of codes are of devices with block-scaled tensor cores alone."""
    experts: Mapping[str, Figure]
    """Rates of products of all experts in one launch: rows (fprop and dgrad) in BF16 and in FP8,
    weights (wgrad) in either."""
    attention: Figure
    """TFLOP/s of the products around softmax, forward and backward."""
    scan: Figure
    """TFLOP/s of the recurrence that `models.flops` counts for Mamba layers."""
    quantize: Figure
    """Bytes read and written a second by quantizers, their amaxes and rotations included."""
    elementwise: Figure
    """Bytes read and written a second by norms, activations and optimizer."""
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
            "fp4_exact": Figure(0.70 * peak, text, measured=False),
            "nvfp4": Figure(0.55 * 4 * peak, text, measured=False),
            "mxfp8": Figure(0.70 * 2 * peak, text, measured=False),
        },
        experts={
            "rows": Figure(0.55 * peak, text, measured=False),
            "rows_fp8": Figure(0.50 * 2 * peak, text, measured=False),
            "weights": Figure(0.35 * peak, text, measured=False),
        },
        attention=Figure(0.40 * peak, text, measured=False),
        scan=Figure(50.0, "an H200's by bandwidth", measured=False),
        quantize=Figure(2200.0, "an H200's by bandwidth", measured=False),
        elementwise=Figure(6500.0, "an H200's by bandwidth", measured=False),
    )


DEVICES = {
    "h200": Device(
        name="H200",
        memory=139.8,
        products={
            "high": Figure(690.0, f"BF16 8192 x 20480 x 5120 and transposed; {BENCHMARK}"),
            "fp8": Figure(1250.0, f"pow2 or decode fp8, in a step of the dense model; {BENCHMARK}"),
            "fp4_exact": Figure(740.0, f"nvfp4 with its decoding, the same step; {BENCHMARK}"),
        },
        experts={
            "rows": Figure(545.0, f"64 experts, 49152 rows, BF16; {BENCHMARK}"),
            "rows_fp8": Figure(810.0, f"the same, FP8; {BENCHMARK}"),
            "weights": Figure(355.0, f"the same, wgrad into FP32; {BENCHMARK}"),
        },
        attention=Figure(400.0, f"33 ms of the dense step; {BENCHMARK}"),
        scan=Figure(30.0, f"what the hybrid's BF16 step has beside its other parts; {BENCHMARK}"),
        quantize=Figure(1300.0, f"X, dY and weights with amaxes, dense step; {BENCHMARK}"),
        elementwise=Figure(4000.0, f"SwiGLU and norms of the dense step; {BENCHMARK}"),
    ),
    "b200": _blackwell("B200", 180.0),
    "gb300": _blackwell("GB300", 279.0),
}
LAUNCH = {
    False: Figure(2.0, f"host of a linear layer in high precision, 1.7 to 2.6; {BENCHMARK}"),
    True: Figure(3.8, f"host of a quantized one, 3.3 to 5.2; {BENCHMARK}"),
}
"""Milliseconds of a host that launches a micro-batch, forward and backward, for each linear layer
with what surrounds it. A step that is one CUDA graph has none."""
# FP32 gradient zeroed, read for its norm and for the update; masters and two moments read and
# written; the weight written: bytes a parameter.
_OPTIMIZER_BYTES = 12 + 24 + 2


def product_kind(recipe: GemmRecipe, gemm: str, decode: str, codes: bool = False) -> str:
    """Which rate of a device a GEMM has: high, fp8 (also FP4 operands that E4M3 holds), fp4_exact
    (BF16 cores, values decoded), or nvfp4 and mxfp8, on tensor cores that multiply codes."""
    first, second = pair = recipe.specs(gemm)
    if not all(map(is_quantized, pair)):
        return "high"
    decode = "fp8" if "fp8" in (decode, recipe.decode) else decode
    if codes and block_scaled_reason(first, second, decode) is None:
        return first.format
    blocks = decode == "fp8" and all(spec.format == "fp8_blockwise" for spec in pair)
    narrow = all(fits_fp8_cores(spec, decode) for spec in pair)
    return "fp8" if blocks or narrow else "fp4_exact"


@dataclass(frozen=True, kw_only=True)
class TokenTime:
    """Seconds of one GPU for a token of the whole model, forward and backward, by part."""

    parts: dict[str, float]
    one_by_one: tuple[str, ...]
    """Recipes of experts that do not go together in one launch, and are slower than counted."""

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
    parts = dict.fromkeys(("products", "row scales", "quantization", "attention", "scan"), 0.0)
    one_by_one: dict[str, None] = {}
    for module in shape.modules():
        recipe = recipes[module.name]
        if is_expert(module):
            decoded = replace(recipe, decode=decode) if decode == "fp8" else recipe
            if recipe_reason(LinearCall(recipe=decoded)) is not None:
                one_by_one[recipe.name] = None
        for gemm in GEMMS:
            codes = "nvfp4" in device.products and not is_expert(module)
            kind = product_kind(recipe, gemm, decode, codes)
            rate = _expert_rate(device, gemm, kind) if is_expert(module) else device.products[kind]
            parts["products"] += module.flops / (rate.value * 1e12)
            # Each token's operand is read in BF16 and written in codes.
            width = module.k if gemm == "fprop" else module.n
            width = module.k + module.n if gemm == "wgrad" else width
            if any(map(is_quantized, recipe.specs(gemm))):
                moved = width * module.calls * _QUANTIZED_BYTES
                parts["quantization"] += moved / (device.quantize.value * 1e9)
            # Rows of wgrad's product are not a token's.
            outputs = {"fprop": module.n, "dgrad": module.k}.get(gemm, 0) * module.calls
            passes = sum(spec.row_scaled for spec in recipe.specs(gemm))
            moved = passes * outputs * _ROW_SCALED_BYTES
            parts["row scales"] += moved / (device.elementwise.value * 1e9)
    rates = {"attention": device.attention, "scan": device.scan}
    for part in fixed_parts(shape):
        name = {"core_attention": "attention", "scan": "scan"}.get(part.name.split(".")[-1])
        rate = rates[name] if name else device.products["high"]
        parts[name or "products"] += 3 * part.flops / (rate.value * 1e12)
    parts["elementwise"] = elementwise_bytes(shape) / (device.elementwise.value * 1e9)
    return TokenTime(parts=parts, one_by_one=tuple(one_by_one))


_QUANTIZED_BYTES = 2.56  # a BF16 value read, a code and its share of a scale written
# Scales of rows come after the product: its sums are written in FP32 instead of BF16, read, scaled
# and written, read and rounded. Those of both operands are first multiplied, to as many bytes.
_ROW_SCALED_BYTES = 2 + 8 + 6


def _expert_rate(device: Device, gemm: str, kind: str) -> Figure:
    if gemm == "wgrad":
        return device.experts["weights"]
    return device.experts["rows_fp8" if kind == "fp8" else "rows"]


def elementwise_bytes(shape: ModelShape) -> float:
    """Bytes that norms, activations, rotations and copies of tokens move for a token, in BF16.

    A norm reads and writes the residual stream forward, and reads input and gradient and writes
    backward, with the residual's gradient: six widths. A gated activation reads two and writes one,
    then reads three and writes two: eight (five without a gate). Queries, keys and values are split
    and rotated: four. A token's copies for its experts are written and summed, twice. Logits are
    read, and read and written again.
    """
    config, parsed = shape.config, parse_pattern(shape.pattern)
    symbols = parsed.layers + parsed.mtp * parsed.mtp_depths
    hidden, gate = config.hidden_size, 8 if config.gated_linear_unit else 5
    width = 6.0 * hidden * (len(symbols) + 1) + 3 * shape.vocab_size * (1 + parsed.mtp_depths)
    if heads := symbols.count("*"):
        mixed = (config.num_attention_heads + 2 * config.num_query_groups) * config.kv_channels
        width += 4 * mixed * heads
    if latent := symbols.count("+"):
        each = config.qk_head_dim + config.qk_pos_emb_head_dim
        width += 8 * config.num_attention_heads * each * latent
    width += gate * config.ffn_hidden_size * symbols.count("-")
    if experts := symbols.count("E"):
        each = gate * config.moe_ffn_hidden_size + 8 * (config.moe_latent_size or hidden)
        shared = gate * (config.moe_shared_expert_intermediate_size or 0)
        width += (config.moe_router_topk * each + shared) * experts
    return 2 * width


def weight_seconds(
    shape: ModelShape, recipes: Mapping[str, GemmRecipe], device: Device
) -> tuple[float, float]:
    """(quantizing all weights, updating them): seconds of one GPU that held the model, a step."""
    elements = updated = 0.0
    for module in shape.modules():
        recipe, size = recipes[module.name], module.k * module.n * module.copies
        updated += module.parameters
        elements += size * is_quantized(recipe.fprop_w)
        if not shares_codes(recipe.fprop_w, recipe.dgrad_w):
            elements += size * is_quantized(recipe.dgrad_w)
    quantized = elements * _QUANTIZED_BYTES / (device.quantize.value * 1e9)
    table = shape.vocab_size * shape.config.hidden_size
    updated += table if shape.tie_embeddings else 2 * table
    return quantized, updated * _OPTIMIZER_BYTES / (device.elementwise.value * 1e9)


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


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """What a step's time depends on beside its model, its precision and its device."""

    tokens: int
    """Of a step, over all ranks."""
    world: int
    """Ranks."""
    parallel: ParallelConfig
    micro_batches: int
    """That each data-parallel rank takes in a step."""
    gradient_bytes: float
    """Of a rank."""
    weight_bytes: float
    """Of a rank."""
    gathered: float = 1.0
    """Share of BF16's bytes that sequence-parallel gathers move."""
    graph: bool = False
    """Whether forward and backward of a step are one CUDA graph."""


def step_time(
    shape: ModelShape,
    recipes: Mapping[str, GemmRecipe],
    each: TokenTime,
    device: Device,
    sizes: StepSizes,
) -> StepTime:
    """Of one optimizer step; `shape` and `recipes` as in `token_time`, whose result is `each`."""
    parallel, world = sizes.parallel, sizes.world
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    work = {name: seconds * sizes.tokens / world for name, seconds in each.parts.items()}
    busy = sum(work.values())
    hosts = [LAUNCH[is_quantized(recipes[m.name].fprop_x)].value for m in shape.modules()]
    launches = 0.0 if sizes.graph else sum(hosts) / pp * sizes.micro_batches * 1e-3
    waiting = max(0.0, launches - busy)
    bubble = (pp - 1) / (max(sizes.micro_batches, 1) * parallel.virtual)
    parts = {**work, "launches": waiting, "pipeline bubble": (busy + waiting) * bubble}
    quantized, updated = weight_seconds(shape, recipes, device)
    parts["quantization"] += quantized / (tp * pp)
    parallel_weights = world if parallel.use_distributed_optimizer else tp * pp
    parts["optimizer"] = updated / parallel_weights
    parts |= _communication(shape, device, sizes, busy)
    return StepTime(parts={name: value for name, value in parts.items() if value})


def _communication(
    shape: ModelShape, device: Device, sizes: StepSizes, busy: float
) -> dict[str, float]:
    """Seconds of a step by kind of parallelism, not overlapped except where the run says so.

    `busy`: seconds in which a rank computes. Activations and gradients of them have 2 bytes.
    """
    parallel, world = sizes.parallel, sizes.world
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    parts = {}
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
    return parts
