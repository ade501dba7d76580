# SPDX-License-Identifier: Apache-2.0
"""The preflight report as text: one screen, whatever the number of ranks."""

from collections.abc import Iterable

from models.memory import stage_symbols
from models.precision_table import run_format
from models.throughput import LAUNCH
from pretrain.preflight import CONTEXT_BYTES, GIB, Preflight, micro_batches

_DAY = 86400.0


def render(found: Preflight) -> str:
    """Problems first; then ranks, sizes, memory and time where they could be worked out."""
    lines = [f"problem: {text}" for text in found.problems] or ["no problem found"]
    if found.shape is not None:
        for section in (_ranks, _sizes, _memory, _time):
            lines += ["", *section(found)]
    lines += [""] * bool(found.notes) + [f"note: {text}" for text in found.notes]
    return "\n".join(lines)


def _ranks(found: Preflight) -> Iterable[str]:
    """The order of ranks as megatron-core has it, and the groups of rank 0."""
    assert found.config is not None
    assert found.shape is not None
    parallel, world = found.config.parallel, found.world
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    pp, ep = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    etp = parallel.expert_tensor_parallel_size or tp
    dp, stage = parallel.data_parallel_size(world), world // pp
    yield (
        f"ranks    {world}: rank = tp + {tp} * (cp + {cp} * (dp + {dp} * pp)), "
        f"tp < {tp}, cp < {cp}, dp < {dp}, pp < {pp}"
    )
    groups = [
        ("tensor", range(0, tp)),
        ("context", range(0, tp * cp, tp)),
        ("data", range(0, stage, tp * cp)),
        ("pipeline", range(0, world, stage)),
    ]
    if "E" in found.shape.pattern:
        groups += [
            ("experts", range(0, etp * ep, etp)),
            ("same experts", range(0, stage, etp * ep)),
        ]
    shown = [f"{name} {_span(ranks)}" for name, ranks in groups if len(ranks) > 1]
    if shown:
        yield f"         with rank 0: {'; '.join(shown)}"
    for number in range(pp) if pp <= 8 else (0, 1, pp - 1):
        layers = "".join(symbol for _, symbol in stage_symbols(found.shape, parallel, number))
        memory = found.memory[number]
        yield (
            f"         stage {number}: ranks {number * stage}-{(number + 1) * stage - 1}, "
            f"{len(layers)} layers {_short(layers)}, {_count(memory.parameters)} weights a rank"
        )
    if pp > 8:
        yield f"         ... {pp - 3} more stages"
    sequences = found.config.train.batch_sizes.sizes[-1]
    yield (
        f"batch    {sequences} sequences of {found.config.model.seq_length} = "
        f"{found.tokens_per_step:,} tokens a step, "
        f"{micro_batches(found.config, world)} micro-batches on each of {dp} data-parallel ranks"
    )


def _span(ranks: range) -> str:
    if len(ranks) <= 4:
        return " ".join(map(str, ranks))
    return f"{ranks[0]} {ranks[1]} {ranks[2]} .. {ranks[-1]}"


def _short(layers: str) -> str:
    return layers if len(layers) <= 40 else f"{layers[:18]}..{layers[-18:]}"


def _sizes(found: Preflight) -> Iterable[str]:
    assert found.parameters is not None
    assert found.shape is not None
    count = found.parameters
    mtp = f", and {_count(count.mtp)} of multi-token prediction" if count.mtp else ""
    yield f"weights  {_count(count.without_mtp)}, {_count(count.active)} active{mtp}"
    parts = sorted(count.parts.items(), key=lambda item: -item[1])
    yield "         " + ", ".join(f"{name} {_count(size)}" for name, size in parts if size)
    yield f"compute  {found.flops / 1e9:,.2f} GFLOPs a token in {run_format(found.shape.config)}"


def _memory(found: Preflight) -> Iterable[str]:
    assert found.device is not None
    worst = max(found.memory, key=lambda memory: memory.total)
    room = found.device.memory
    yield (
        f"memory   {worst.total / GIB:.2f} GiB of {room:.0f} on the ranks of stage {worst.stage}"
        f" ({found.device.name}), of which"
    )
    for name, size in worst.parts.items():
        extra = f", {CONTEXT_BYTES / GIB:.1f} of it assumed" if name == "workspace" else ""
        yield f"         {size / GIB:9.3f}  {name}{extra}"
    if len(found.memory) > 1:
        totals = [memory.total / GIB for memory in found.memory]
        shown = totals if len(totals) <= 16 else [*totals[:8], *totals[-8:]]
        yield f"         by stage: {' '.join(f'{total:.1f}' for total in shown)} GiB"


_PRODUCTS = {
    "fp8": "products on FP8 cores",
    "fp4_exact": "products of blocks on BF16 cores",
    "nvfp4": "products of NVFP4 codes",
    "mxfp8": "products of MXFP8 codes",
}


def _time(found: Preflight) -> Iterable[str]:
    assert found.device is not None
    assert found.step is not None
    assert found.token is not None
    assert found.config is not None
    step, device, steps = found.step, found.device, found.config.train.steps
    rate = found.tokens_per_step / step.total
    used = rate * found.flops / found.world / 1e12
    seconds = found.total_tokens / rate
    yield (
        f"time     {step.total:.3f} s a step, {rate:,.0f} tokens/s, {used:.0f} TFLOP/s a GPU; an "
        "estimate from rates of single operations: micro-batches of one GPU were within 6 % of it, "
        "the one whole run measured, of 12B on two, took 1.4 times as long"
    )
    shares = sorted(step.parts.items(), key=lambda item: -item[1])
    yield "         " + ", ".join(f"{name} {part / step.total:.0%}" for name, part in shares)
    yield f"         limited by {step.limit}"
    yield (
        f"budget   {steps:,} steps = {_count(found.total_tokens)} tokens: "
        f"{_duration(seconds)}, {seconds / 3600 * found.world:,.1f} GPU-hours"
    )
    yield "rates    " + device.products["high"].text("TFLOP/s, BF16 products")
    for kind, name in _PRODUCTS.items():
        if kind in device.products:
            yield f"         {device.products[kind].text(f'TFLOP/s, {name}')}"
    if found.shape is not None and "E" in found.shape.pattern:
        names = {"rows": "experts", "rows_fp8": "experts in FP8", "weights": "their gradients"}
        for kind, name in names.items():
            yield f"         {device.experts[kind].text(f'TFLOP/s, {name}')}"
    if step.parts.get("attention"):
        yield f"         {device.attention.text('TFLOP/s, attention')}"
    if step.parts.get("scan"):
        yield f"         {device.scan.text('TFLOP/s, scan')}"
    yield f"         {device.quantize.text('GB/s, quantizers')}"
    yield f"         {device.elementwise.text('GB/s, elementwise and optimizer')}"
    if "launches" in step.parts:
        yield from (f"         {figure.text('ms')}" for figure in LAUNCH.values())
    if found.world > 1:
        yield f"         {device.node.text('GB/s')}; {device.network.text('GB/s')}"
    if found.token.one_by_one:
        yield (
            f"         {', '.join(found.token.one_by_one)}: experts are multiplied one by one, up "
            "to four times as slow as counted"
        )


def _count(number: float) -> str:
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.4g}{name}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    if seconds >= _DAY:
        return f"{seconds / _DAY:,.1f} days"
    return f"{seconds / 3600:.2f} hours" if seconds >= 3600 else f"{seconds:.0f} seconds"
