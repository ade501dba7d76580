# SPDX-License-Identifier: Apache-2.0
"""Time training of whole models on one GPU: a micro-batch, and an optimizer step.

    python -m tools.bench_train --model dense|hybrid|moe [--recipes bf16 nvfp4 nvfp4_fast:fp8 ...]
                                [--baseline bf16 fp8] [--graph] [--profile] [--step]
                                [--accumulate] [--set key=value ...]

A recipe may name how Hopper decodes it, after a colon. Times are medians of forward and backward of
one micro-batch of 8192 tokens, the quantization of the weights included; `--step` adds the whole
optimizer step. Ours is the first micro-batch of a step, which writes the gradients of weights over
the zeros in their FP32 sums (zeroing them, once a step, is in `--step` alone); `--accumulate` times
a later one, which adds to them. The baseline is megatron-core with Transformer Engine, built in
this process; all ratios are to its BF16. `--graph` measures every one of them as a CUDA graph too.
`--profile` prints the time of each kernel. Under torchrun each process has one GPU, in the layout
that `--set parallel.KEY=VALUE` gives; tokens/s are those of all, TFLOP/s of each.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pretrain import cpu_compat

SHAPE = {
    "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
    "num_query_groups": 8, "kv_channels": 128,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("*-" * 8, {}),
    "hybrid": (
        "M-M-M-*-M-M-M-*-",
        {
            "mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_num_groups": 8,
            "mamba_state_dim": 128,
        },
    ),
    "moe": (
        "*E*E*E*E",
        {"num_moe_experts": 64, "moe_router_topk": 6, "moe_ffn_hidden_size": 1536},
    ),
}  # fmt: skip
VOCAB, LENGTH = 32768, 8192


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument("--recipes", nargs="*", default=["bf16"], metavar="RECIPE[:DECODE]")
    parser.add_argument("--baseline", nargs="*", default=[], choices=("bf16", "fp8"))
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--graph", action="store_true", help="time CUDA graphs of it too")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    parser.add_argument("--step", action="store_true", help="time the whole optimizer step too")
    parser.add_argument("--accumulate", action="store_true", help="time a later micro-batch")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="overrides")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed, and none was found: run it on a GPU machine")
    cpu_compat.enable()
    bench(options)
    return 0


def bench(options: argparse.Namespace) -> None:
    """Everything that was asked for, one after the other."""
    from models.flops import flops_per_token, peak_tflops
    from models.precision import model_shape
    from pretrain.initialize import initialize, shut_down

    parallel = run_config(options.model, "bf16", options.overrides).parallel
    world = initialize(parallel)
    torch.manual_seed(0)  # the same tokens on all ranks of a model
    replicas = world.data_parallel_size
    device = torch.cuda.get_device_name()
    shape = run_config(options.model, "bf16", []).model
    whole = sum(flops_per_token(model_shape(shape)).values()) * LENGTH
    flops = whole * replicas / world.size
    if world.is_main:
        print(
            f"{world.size} x {device}, torch {torch.__version__}; {options.model}: "
            f"{whole / 1e12:.1f} TFLOP a micro-batch"
        )
    base, peak = None, peak_tflops(device)

    def report(name: str, milliseconds: float, host: float, memory: float) -> None:
        rate = flops / milliseconds / 1e9
        mfu = f"{rate / peak:6.1%}" if peak else "   n/a"
        ratio = f"{base / milliseconds:6.3f}" if base else "   n/a"
        if not world.is_main:
            return
        print(
            f"{name:28} {milliseconds:7.1f} ms (host {host:6.1f}) "
            f"{LENGTH * replicas / milliseconds:6.1f} k tok/s "
            f"{rate:6.0f} TFLOP/s  MFU {mfu}  {memory:6.1f} GiB  {ratio} x baseline bf16",
            flush=True,
        )

    for kind in options.baseline:
        run = baseline(options.model, kind, parallel)
        measured = measure(run, options.iterations)
        base = measured[0] if kind == "bf16" else base
        report(f"megatron-core + TE, {kind}", *measured)
        if options.graph:
            report(f"megatron-core + TE, {kind}, graph", *measure(graphed(run), options.iterations))
        if options.profile and kind == "bf16" and world.size == 1:
            profile(run)
        del run
        release()
    for name in options.recipes:
        recipe, _, decode = name.partition(":")
        overrides = [*options.overrides, *([f"precision.decode={decode}"] if decode else [])]
        config = run_config(options.model, recipe, overrides)
        run, step, graph = ours(config, world, options.accumulate)
        report(name, *measure(run, options.iterations))
        if options.graph:
            report(f"{name}, graph", *measure(graph, options.iterations))
        if options.step:
            report(f"{name}, optimizer step", *measure(step, options.iterations))
        if options.profile and world.size == 1:
            profile(run)
        del run, step, graph
        release()
    shut_down()


def run_config(model: str, recipe: str, overrides: Sequence[str]) -> Any:
    """The run of a model in one recipe."""
    from pretrain.config import make_config
    from pretrain.config_file import apply_overrides, parse_overrides

    pattern, changes = MODELS[model]
    data: dict[str, Any] = {
        "model": {
            "pattern": pattern, "seq_length": LENGTH, "vocab_size": VOCAB,
            "position_embedding": "rope", "megatron": SHAPE | changes,
        },
        "data": {"train": "none"},
        "train": {"steps": 1000, "global_batch_size": 1, "dtype": "bf16"},
        "precision": {"recipe": recipe},
    }  # fmt: skip
    apply_overrides(data, parse_overrides(overrides))
    return make_config(data)


def random_batch() -> dict[str, torch.Tensor]:
    """One sequence of random tokens, on the device."""
    tokens = torch.randint(0, VOCAB, (1, LENGTH + 1), device="cuda")
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(1, LENGTH, device="cuda"),
        "position_ids": torch.arange(LENGTH, device="cuda").unsqueeze(0),
    }


def ours(
    config: Any, world: Any, accumulate: bool = False
) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
    """A micro-batch, an optimizer step, and a micro-batch as a CUDA graph, of our engine.

    accumulate: whether a micro-batch adds to the sums of gradients, as all but a step's first do.
    """
    from fused_ops.main_grad import mark_zeroed
    from pretrain.cuda_graph import leave_default_stream
    from pretrain.engine import build_engine
    from pretrain.train_step import forward_step, record_steps, run_schedule, train_step

    leave_default_stream()
    engine = build_engine(config, world, VOCAB)
    batch: dict[str, Any] = random_batch() | {"index": 0}
    engine.chunks[0].zero_grad_buffer()

    def micro_batch() -> None:
        mark_zeroed(engine.chunks[0].parameters(), not accumulate)
        engine.precision_state.weights_changed()
        prepared = iter([batch | {"packed": None}])
        losses, reduce = forward_step(engine.precision_state, prepared, engine.chunks[0])
        reduce(losses)[0].backward()

    def step() -> None:
        train_step(engine, [batch | {"cu_seqlens": None}])

    def graph() -> None:
        if engine.graph is None:
            record_steps(engine)
            engine.config.finalize_model_grads_func = None  # a micro-batch, not a step
        mark_zeroed(engine.chunks[0].parameters(), not accumulate)
        engine.precision_state.step += 1
        run_schedule(engine, [batch | {"cu_seqlens": None}], forward_only=False)

    return micro_batch, step, graph


def graphed(run: Callable[[], None]) -> Callable[[], None]:
    """The same launches, recorded once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    release()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def baseline(model: str, kind: str, parallel: Any) -> Callable[[], None]:
    """A micro-batch of megatron-core's model with Transformer Engine's layers."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    pattern, changes = MODELS[model]
    layout = {
        name: getattr(parallel, name)
        for name in (
            "tensor_model_parallel_size", "expert_model_parallel_size", "context_parallel_size",
            "sequence_parallel",
        )
    }  # fmt: skip
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"} if kind == "fp8" else {}
    moe = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
    config = TransformerConfig(
        **SHAPE, **changes, **fp8, **layout, **(moe if "E" in pattern else {}),
        num_layers=len(pattern), normalization="RMSNorm", add_bias_linear=False,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, is_hybrid_model=True, apply_rope_fusion=True,
        bias_activation_fusion=True, bias_dropout_fusion=True, masked_softmax_fusion=True,
        cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te",
    )  # fmt: skip
    network = HybridModel(
        config, hybrid_stack_spec, VOCAB, LENGTH, hybrid_layer_pattern=pattern,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).cuda().bfloat16()  # fmt: skip
    batch = random_batch()

    def micro_batch() -> None:
        for parameter in network.parameters():
            parameter.grad = None
        losses = network(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        (losses.float() * batch["loss_mask"]).sum().backward()

    return micro_batch


def measure(run: Callable[[], None], iterations: int) -> tuple[float, float, float]:
    """Median milliseconds of a call, of its host part alone, and the peak GiB of device memory."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times, host = [], []
    for _ in range(iterations):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begun = time.perf_counter()
        run()
        host.append(1e3 * (time.perf_counter() - begun))
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    memory = torch.cuda.max_memory_allocated() / 2**30
    return statistics.median(times), statistics.median(host), memory


def profile(run: Callable[[], None], calls: int = 2, shown: int = 45) -> None:
    """Prints the device time of each kernel in one call, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    times: dict[str, tuple[float, int]] = {}
    for event in recorded.key_averages():
        spent, count = times.get(event.key, (0.0, 0))
        times[event.key] = (spent + event.self_device_time_total, count + event.count)
    total = sum(spent for spent, _ in times.values())
    print(f"    kernels: {total / calls / 1e3:.2f} ms of device time")
    ordered = sorted(times.items(), key=lambda item: -item[1][0])
    for name, (spent, count) in ordered[:shown]:
        print(f"    {spent / calls / 1e3:8.3f} ms {count / calls:6.0f} x  {name[:110]}")
    rest = sum(spent for _, (spent, _) in ordered[shown:])
    print(f"    {rest / calls / 1e3:8.3f} ms         the {max(0, len(ordered) - shown)} others")


def release() -> None:
    """Gives the memory of a model back before the next is built."""
    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
