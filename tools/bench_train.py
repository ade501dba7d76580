# SPDX-License-Identifier: Apache-2.0
"""Time training of whole models on one GPU: a micro-batch, and an optimizer step.

    python -m tools.bench_train --model dense|hybrid|moe|paper12b
                                [--recipes bf16 nvfp4 nvfp4_fast:fp8 nvfp4+KEY=VALUE ...]
                                [--baseline bf16 fp8] [--graph] [--profile] [--step]
                                [--accumulate] [--limit SECONDS] [--set key=value ...]

A recipe may name how Hopper decodes it, after a colon, and settings of its own, each after a plus:
nvfp4+precision.communicate=packed beside nvfp4 shows what that one setting does. Times are medians
of forward and backward of one micro-batch of 8192 tokens, the quantization of the weights included;
`--step` adds the whole optimizer step. Ours is the first micro-batch of a step, which writes the
gradients of weights over the zeros in their FP32 sums (zeroing them, once a step, is in `--step`
alone); `--accumulate` times a later one, which adds to them. The baseline is megatron-core with
Transformer Engine, built in this process; all ratios are to its BF16. `--graph` measures every one
of them as a CUDA graph too, after all others; one that cannot be recorded says so on a line of its
own. A measurement that takes longer than `--limit` seconds ends the run. `--profile` prints the
time of each kernel. Under torchrun each process has one GPU, in the layout that `--set
parallel.KEY=VALUE` (or a recipe's own setting) gives; tokens/s are those of all, TFLOP/s of each. A
pipeline takes four micro-batches a stage, and its figures are a micro-batch's share; only a step
reduces gradients over data-parallel processes.
"""

import argparse
import gc
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from fused_ops.errors import ConfigError
from models.presets import get_preset
from pretrain.command_line import each_recipe, prepare, refused, run_program


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is timed."""

    pattern: str
    megatron: dict[str, Any]
    vocab: int = 32768
    position: str = "rope"


SHAPE = {
    "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
    "num_query_groups": 8, "kv_channels": 128,
}  # fmt: skip
_MAMBA = {
    "mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128,
}  # fmt: skip
_EXPERTS = {"num_moe_experts": 64, "moe_router_topk": 6, "moe_ffn_hidden_size": 1536}


def _preset(name: str) -> Model:
    found = get_preset(name)
    return Model(
        pattern=found["pattern"],
        megatron=found["megatron"],
        vocab=found["vocab_size"],
        position=found["position_embedding"],
    )


MODELS = {
    "dense": Model(pattern="*-" * 8, megatron=SHAPE),
    "hybrid": Model(pattern="M-M-M-*-M-M-M-*-", megatron=SHAPE | _MAMBA),
    "moe": Model(pattern="*E*E*E*E", megatron=SHAPE | _EXPERTS),
    "paper12b": _preset("nvfp4-paper-12b"),  # two H200s: parallel.tensor_model_parallel_size=2
}
LENGTH = 8192


def main(arguments: list[str] | None = None) -> int:
    parser = command_line()
    options = parser.parse_args(arguments)
    for name in ("iterations", "limit"):
        if getattr(options, name) <= 0:
            parser.error(f"--{name} must be greater than 0, got {getattr(options, name)}")
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed, and none was found: run it on a GPU machine")
    prepare()
    try:
        return Bench(options).run()
    except ConfigError as error:
        return refused(error)


def command_line() -> argparse.ArgumentParser:
    """What may be asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, default="dense")
    parser.add_argument(
        "--recipes", nargs="*", default=["bf16"], metavar="RECIPE[:DECODE][+KEY=VALUE...]"
    )
    parser.add_argument("--baseline", nargs="*", default=[], choices=("bf16", "fp8"))
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--graph", action="store_true", help="time CUDA graphs of it too")
    parser.add_argument("--profile", action="store_true", help="print the time of each kernel")
    parser.add_argument("--step", action="store_true", help="time the whole optimizer step too")
    parser.add_argument("--accumulate", action="store_true", help="time a later micro-batch")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one measurement")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="overrides")
    return parser


class Bench:
    """Everything that was asked for, one after the other.

    Args:
        options: of the command line. All recipes are read before anything is built.

    Raises:
        ConfigError: a recipe, a setting or a layout that cannot work.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        from models.flops import flops_per_token
        from models.precision import model_shape
        from pretrain.initialize import initialize

        self.options, self.iterations = options, options.iterations
        plain, self.configs = read_configs(options.model, options.recipes, options.overrides)
        self.parallel = plain.parallel
        self.world = initialize(self.parallel)
        torch.manual_seed(0)  # the same tokens on all ranks of a model
        shape = model_shape(plain.model)
        self.flops = sum(flops_per_token(shape).values()) * LENGTH
        self.base: float | None = None
        self.failed = 0
        names = ["megatron-core + TE, bf16", *map(label, options.recipes)]
        self.width = max(map(len, names)) + len(", optimizer step")
        self.say(
            f"{self.world.size} x {torch.cuda.get_device_name()}, torch {torch.__version__}; "
            f"{options.model}: {self.flops / 1e12:.1f} TFLOP a micro-batch"
        )

    def run(self) -> int:
        """Launched one by one first; graphs, whose failure may take the process along, last."""
        from pretrain.initialize import shut_down

        kinds = self.options.baseline
        for kind in kinds:
            self.attempt(f"megatron-core + TE, {kind}", self.time_baseline, kind)
        for name in self.configs:
            self.attempt(label(name), self.time_ours, name)
        if self.options.graph:
            for name in self.configs:
                self.attempt(label(name), self.time_ours, name, True)
            for kind in kinds:
                self.attempt(f"megatron-core + TE, {kind}", self.time_baseline, kind, True)
        shut_down()
        return 1 if self.failed else 0

    def say(self, text: str) -> None:
        """On one rank."""
        if self.world.is_main:
            print(text, flush=True)

    def attempt(self, name: str, what: Callable[..., None], *arguments: Any) -> None:
        """One measurement; the next one is made also where it fails (for want of memory, say).

        Where the other ranks wait for one that has failed there is no next one.
        """
        from pretrain.recording import NotRecordedError

        clock = threading.Timer(self.options.limit, self.give_up, [name])
        clock.daemon = True
        clock.start()
        try:
            what(*arguments)
        except NotRecordedError as error:
            self.failed += 1
            self.say(f"{name:{self.width}} graph: not captured: {error}")
        except (RuntimeError, ImportError) as error:
            self.failed += 1
            print(f"{name:{self.width}} FAILED: {str(error)[:300]}", flush=True)
        finally:
            clock.cancel()
        release()

    def give_up(self, name: str) -> None:
        """Ends the process, which waits for a device or a rank that does not answer."""
        print(
            f"{name:{self.width}} no result after {self.options.limit:g} s on rank "
            f"{self.world.rank}: a rank or its device does not answer; what was to come is left "
            "out",
            flush=True,
        )
        os._exit(1)

    def report(self, name: str, milliseconds: float, host: float, memory: float) -> None:
        """A line of what was measured; the layout is that of `self.world`."""
        from models.flops import peak_tflops

        replicas, peak = self.world.data_parallel_size, peak_tflops(torch.cuda.get_device_name())
        rate = self.flops * replicas / self.world.size / milliseconds / 1e9
        mfu = f"{rate / peak:6.1%}" if peak else "   n/a"
        ratio = f"{self.base / milliseconds:6.3f}" if self.base else "   n/a"
        self.say(
            f"{name:{self.width}} {milliseconds:7.1f} ms (host {host:6.1f}) "
            f"{LENGTH * replicas / milliseconds:6.1f} k tok/s "
            f"{rate:6.0f} TFLOP/s  MFU {mfu}  {memory:6.1f} GiB  {ratio} x baseline bf16"
        )

    def enter(self, parallel: Any) -> None:
        """The groups of a layout."""
        from pretrain.initialize import initialize

        if parallel != self.parallel:
            self.parallel, self.world = parallel, initialize(parallel)

    def time_baseline(self, kind: str, graph: bool = False) -> None:
        """megatron-core with Transformer Engine, in the layout of `--set`."""
        config = run_config(self.options.model, "bf16", self.options.overrides)
        self.enter(config.parallel)
        run, name = baseline(config, kind), f"megatron-core + TE, {kind}"
        if graph:
            self.report(f"{name}, graph", *measure(graphed(run), self.iterations))
            return
        measured = measure(run, self.iterations)
        self.base = measured[0] if kind == "bf16" else self.base
        self.report(name, *measured)
        if self.options.profile and kind == "bf16" and self.world.size == 1:
            profile(run)

    def time_ours(self, name: str, graph: bool = False) -> None:
        """This project's engine in one recipe."""
        self.enter(self.configs[name].parallel)
        runs = ours(self.configs[name], self.world, self.options.accumulate)
        text = label(name)
        kinds = [(text, runs.work), (f"{text}, optimizer step", runs.step)]
        if graph:
            kinds = [(f"{text}, graph", runs.graph)]
        for what, run in kinds if graph or self.options.step else kinds[:1]:
            milliseconds, host, memory = measure(run, self.iterations)
            each = runs.micro_batches
            self.report(what, milliseconds / each, host / each, memory)
        if self.options.profile and self.world.size == 1 and not graph:
            profile(runs.work)


def read_configs(
    model: str, recipes: Sequence[str], overrides: Sequence[str]
) -> tuple[Any, dict[str, Any]]:
    """The run of a model in bf16, and in each recipe by its text.

    Raises:
        ConfigError: all problems of `--set`, or else of the recipes.
    """
    plain = run_config(model, "bf16", overrides)
    return plain, each_recipe(
        recipes, lambda recipe, own: run_config(model, recipe, [*overrides, *own])
    )


def label(text: str) -> str:
    """A recipe and its settings as they are printed: keys without their sections."""
    named, *own = text.split("+")
    return " ".join([named, *(setting.rpartition(".")[2] for setting in own)])


def run_config(name: str, recipe: str, overrides: Sequence[str]) -> Any:
    """The run of a model in one recipe."""
    from pretrain.config import make_config
    from pretrain.config_file import apply_overrides, parse_overrides

    model = MODELS[name]
    data: dict[str, Any] = {
        "model": {
            "pattern": model.pattern, "seq_length": LENGTH, "vocab_size": model.vocab,
            "position_embedding": model.position, "megatron": dict(model.megatron),
        },
        "data": {"train": "none"},
        "train": {"steps": 1000, "global_batch_size": 1, "dtype": "bf16"},
        "precision": {"recipe": recipe},
    }  # fmt: skip
    apply_overrides(data, parse_overrides(overrides))
    return make_config(data)


def random_batch(vocab: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """One sequence of random tokens, on the device."""
    tokens = torch.randint(0, vocab, (1, length + 1), device="cuda")
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": torch.ones(1, length, device="cuda"),
        "position_ids": torch.arange(length, device="cuda").unsqueeze(0),
    }


@dataclass(frozen=True)
class Runs:
    """What can be timed of an engine."""

    micro_batches: int
    """In each of the others: one, or enough to fill a pipeline's stages."""
    work: Callable[[], None]
    """Forward and backward."""
    step: Callable[[], None]
    """A whole optimizer step."""
    graph: Callable[[], None]
    """Forward and backward as a CUDA graph."""


def ours(config: Any, world: Any, accumulate: bool = False) -> Runs:
    """Of our engine, in the layout of `config`.

    accumulate: whether the first micro-batch adds to the sums of gradients, as a step's others do.
    """
    from fused_ops.main_grad import mark_zeroed
    from pretrain.cuda_graph import leave_default_stream
    from pretrain.engine import build_engine
    from pretrain.train_step import forward_step, prepare, record_steps, run_schedule, train_step

    leave_default_stream()
    engine = build_engine(config, world, config.model.vocab_size)
    stages = config.parallel.pipeline_model_parallel_size
    batch = random_batch(config.model.vocab_size, config.model.seq_length)
    batches: list[dict[str, Any]] = [
        batch | {"index": i, "cu_seqlens": None} for i in range(4 * stages if stages > 1 else 1)
    ]
    own = prepare(engine, batches[0])
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()

    def begin() -> None:
        for chunk in engine.chunks:
            mark_zeroed(chunk.parameters(), not accumulate)

    def work() -> None:
        begin()
        engine.precision_state.weights_changed()
        if stages > 1:
            run_schedule(engine, batches, forward_only=False)
            return
        losses, reduce = forward_step(engine.precision_state, iter([own]), engine.chunks[0])
        reduce(losses)[0].backward()

    def step() -> None:
        train_step(engine, batches)

    def graph() -> None:
        if engine.graph is None:
            record_steps(engine)
            engine.config.finalize_model_grads_func = None  # a micro-batch, not a step
        begin()
        engine.precision_state.step += 1
        run_schedule(engine, batches, forward_only=False)

    return Runs(len(batches), work, step, graph)


def graphed(run: Callable[[], None]) -> Callable[[], None]:
    """The same launches, recorded once."""
    from pretrain.recording import record

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    release()
    with torch.cuda.stream(stream):
        graph, _ = record(run)
    return graph.replay


def baseline(run: Any, kind: str) -> Callable[[], None]:
    """A micro-batch of megatron-core's model with Transformer Engine's layers.

    Args:
        run: its model and its layout.
        kind: bf16 or fp8.

    Raises:
        RuntimeError: a package that it needs is not installed.
    """
    for package in ("transformer_engine", *(["mamba_ssm"] if "M" in run.model.pattern else [])):
        if find_spec(package) is None:
            raise RuntimeError(f"{package} is not installed, see requirements-gpu.txt")
    from megatron.core.activations import squared_relu
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    model, pattern, fields = run.model, run.model.pattern, dict(run.model.megatron)
    gated = fields.pop("gated_linear_unit", True)
    plain = fields.pop("activation_func", "silu") == "squared_relu"  # no fused op for it upstream
    layout = {
        name: getattr(run.parallel, name)
        for name in (
            "tensor_model_parallel_size", "expert_model_parallel_size", "context_parallel_size",
            "sequence_parallel",
        )
    }  # fmt: skip
    fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"} if kind == "fp8" else {}
    moe = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
    config = TransformerConfig(
        **fields, **fp8, **layout, **(moe if "E" in pattern else {}),
        num_layers=len(pattern), normalization="RMSNorm", add_bias_linear=False,
        gated_linear_unit=gated,
        activation_func=squared_relu if plain else torch.nn.functional.silu,
        hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, is_hybrid_model=True,
        apply_rope_fusion=model.position_embedding == "rope",
        bias_activation_fusion=not plain, bias_dropout_fusion=True, masked_softmax_fusion=True,
        cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te",
    )  # fmt: skip
    network = HybridModel(
        config, hybrid_stack_spec, model.vocab_size, LENGTH, hybrid_layer_pattern=pattern,
        position_embedding_type=model.position_embedding, share_embeddings_and_output_weights=False,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    ).cuda().bfloat16()  # fmt: skip
    batch = random_batch(model.vocab_size)

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
    run_program(main)
