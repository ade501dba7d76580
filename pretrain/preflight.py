# SPDX-License-Identifier: Apache-2.0
"""What a run would be, before it is started and without a GPU: problems, ranks, memory, time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fused_ops.errors import ConfigError
from fused_ops.recipe import GemmRecipe
from models.config import ParallelConfig, padded_vocab_size, transformer_config
from models.flops import ModelShape, ParameterCount, count_parameters, flops_per_token
from models.gather_bytes import communication_lines, plan_gathers
from models.memory import (
    Sharing,
    code_bytes,
    path_bytes,
    rank_parameters,
    sharing,
    stage_symbols,
    state_bytes,
)
from models.pattern import parse_pattern, staged_pattern
from models.precision_plan import PrecisionPlan
from models.saved import Layout, saved_bytes
from models.throughput import Device, StepSizes, StepTime, TokenTime, step_time, token_time
from pretrain.checkpoint.compare import compare, override_config, rows_problem
from pretrain.checkpoint.config import Found, find_latest, never_problems
from pretrain.checkpoint.io import CheckpointError, load_json
from pretrain.checkpoint.layout import STATE, scan
from pretrain.checkpoint.safe import read_index
from pretrain.config import (
    PretrainConfig,
    data_folders,
    layout_start_problems,
    make_config,
    section_problems,
    world_size,
)
from pretrain.config_file import apply_overrides, decode_all, encode, parse_overrides, read_yaml
from pretrain.data.manifest import load_manifest
from pretrain.data.remote import is_url
from pretrain.layout_notes import layout_notes

GIB = 2.0**30
# What a process takes beside torch's own allocations: context, libraries, NCCL. Assumed.
CONTEXT_BYTES = 1.5 * GIB


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes by part on the ranks of one pipeline stage."""

    stage: int
    layers: str
    parameters: int
    parts: dict[str, float]

    @property
    def total(self) -> float:
        """The sum."""
        return sum(self.parts.values())


@dataclass(kw_only=True)
class Preflight:
    """Everything that `tools.preflight` shows. Where there are problems the rest may be missing."""

    problems: list[str]
    notes: list[str] = field(default_factory=list)
    config: PretrainConfig | None = None
    world: int = 1
    shape: ModelShape | None = None
    parameters: ParameterCount | None = None
    memory: list[RankMemory] = field(default_factory=list)
    flops: float = 0.0
    """Of a token, forward and backward."""
    device: Device | None = None
    token: TokenTime | None = None
    step: StepTime | None = None

    @property
    def tokens_per_step(self) -> int:
        """Of the global batch, the last one where it grows."""
        assert self.config is not None
        return self.config.train.batch_sizes.sizes[-1] * self.config.model.seq_length

    @property
    def total_tokens(self) -> int:
        """Of the whole run."""
        assert self.config is not None
        return self.config.train.total_samples * self.config.model.seq_length


def preflight(
    path: Path | str, overrides: Sequence[str], device: Device, world: int | None = None
) -> Preflight:
    """Everything that can be said of a run file.

    Args:
        path: the run file.
        overrides: `section.key=value`.
        device: the GPU that it would run on.
        world: processes; None takes torchrun's, or as few as the layout needs.
    """
    data = read_yaml(path)
    apply_overrides(data, parse_overrides(overrides))
    problems: list[str] = []
    wrong: list[str] = []
    try:
        config = make_config(data)
    except ConfigError as error:
        problems = list(error.problems)
        relaxed, _, wrong = decode_all(PretrainConfig, data)  # although sections contradict
        if relaxed is None:
            return Preflight(problems=problems)
        config = relaxed
    world = world or (world_size() if world_size() > 1 else fewest_processes(config.parallel))
    vocab, found, notes = _vocabulary(config)
    # Where a setting could not be read its default stands in: nothing is said about that.
    started = _start_problems(config, world)
    problems += [text for text in started if not any(name in text for name in wrong)]
    problems += found
    changed, text = _checkpoint(config, vocab)
    problems, notes = [*problems, *changed], [*notes, *text]
    result = Preflight(
        problems=list(dict.fromkeys(problems)),
        notes=notes,
        config=config,
        world=world,
        device=device,
    )
    if not problems or not _broken_layout(config, world):
        _estimate(result, vocab)
    return result


def _broken_layout(config: PretrainConfig, world: int) -> bool:
    return bool(section_problems(config) or _start_problems(config, world))


def _start_problems(config: PretrainConfig, world: int) -> list[str]:
    try:
        return layout_start_problems(config, world)
    except ConfigError as error:  # batch sizes that cannot be read
        return error.problems


def fewest_processes(parallel: ParallelConfig) -> int:
    """The smallest number of processes that hold a layout."""
    return math.lcm(parallel.dense_ranks, parallel.expert_ranks)


def _vocabulary(config: PretrainConfig) -> tuple[int | None, list[str], list[str]]:
    """(entries, problems, notes) from the model section and the data that is here."""
    own, problems, notes = config.model.vocab_size, [], []
    sizes: dict[str, int] = {}
    for name, folder in data_folders(config.data):
        if is_url(folder):
            notes.append(f"{name} is not checked: {folder} is elsewhere, and nothing is fetched")
            continue
        try:
            sizes[folder] = load_manifest(folder).vocab_size
        except ConfigError as error:
            notes.append(f"{name} is not checked: {'; '.join(error.problems)}")
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{folder} {size}" for folder, size in sizes.items())
        problems.append(f"data of one run must have one vocabulary; got {listed}")
    largest = max(sizes.values(), default=None)
    if own is not None and largest is not None and largest > own:
        problems.append(
            f"model.vocab_size must be at least the data's; got {own} and {largest}; set it to "
            f"{largest}, or leave it out"
        )
    if own is None and largest is None:
        notes.append(
            "the vocabulary is the data's, which is not here: sizes leave out embedding and head; "
            "add model.vocab_size=N"
        )
    return own or largest, problems, notes


def _checkpoint(config: PretrainConfig, vocab: int | None) -> tuple[list[str], list[str]]:
    """(problems, notes) of continuing the checkpoint that a start would find."""
    own, settings = config.run.path / "checkpoints", config.checkpoint
    place = own
    try:
        if problems := never_problems(settings, own, scan(own)):
            return problems, []
        found = find_latest(own)
        if found is None and settings.load is not None:
            place = Path(settings.load)
            found = find_latest(place)
    except (CheckpointError, OSError) as error:
        return [f"the checkpoint in {place} cannot be read: {error}"], []
    if found is not None:
        return _continued(config, vocab, found, fresh=place != own)
    if settings.load is not None:
        return [], [f"checkpoint.load is not checked: no whole checkpoint is in {place}"]
    if settings.resume == "must":
        return [], [f"checkpoint.resume=must: no whole checkpoint is in {own}; a start needs one"]
    return [], []


def _continued(
    config: PretrainConfig, vocab: int | None, found: Found, *, fresh: bool
) -> tuple[list[str], list[str]]:
    """(problems, notes) of going on from a checkpoint; `fresh`: that of another run."""
    try:
        saved = load_json(found.path / STATE)["config"]
        rows = _rows(found.path)
    except (CheckpointError, OSError, KeyError) as error:
        return [f"the checkpoint {found.path} cannot be read: {error}"], []
    if fresh and config.checkpoint.load_parts == "model":
        shapes = {"model": saved.get("model")}, {"model": encode(config)["model"]}
    else:
        shapes = saved, encode(override_config(config, config.checkpoint.override))
    own, problems = padded_vocab_size(config.model, vocab or 0), []
    if own and rows and rows != own:
        problems.append(rows_problem(f"step {found.step} of {found.path.parent}", rows, own))
    try:
        notes = compare(*shapes, config.checkpoint.override)
    except ConfigError as error:
        problems += [f"step {found.step} of {found.path.parent}: {t}" for t in error.problems]
    if problems:
        return problems, []
    return [], [f"continues step {found.step} of {found.path.parent}", *notes]


def _rows(checkpoint: Path) -> int | None:
    """Rows of a checkpoint's embedding, where its index is there."""
    if not (checkpoint / ".metadata").exists():
        return None
    held = read_index(checkpoint).state_dict_metadata.get("embedding.word_embeddings.weight")
    return getattr(held, "size", [None])[0]


def _estimate(result: Preflight, vocab: int | None) -> None:
    config, device, world = result.config, result.device, result.world
    assert config is not None, "an estimate needs a run"
    assert device is not None, "an estimate needs a GPU"
    parallel, train = config.parallel, config.train
    plan = plan_of(config, vocab)
    shape = plan.shape
    result.shape, result.parameters = shape, count_parameters(shape)
    result.flops = sum(flops_per_token(shape).values())
    result.notes += plan.notes() + _isolation_notes(config, plan) + layout_notes(config, world)
    moved, how = plan_gathers(plan, train.micro_batch_size), config.precision.communicate
    result.notes += communication_lines(plan, train.micro_batch_size)
    recipes = plan.recipes()
    result.memory = [
        rank_memory(config, shape, recipes, world, stage)
        for stage in range(parallel.pipeline_model_parallel_size)
    ]
    result.token = token_time(shape, recipes, device, config.precision.decode)
    worst = max(result.memory, key=lambda memory: memory.parts["gradients"])
    sizes = StepSizes(
        tokens=result.tokens_per_step,
        world=world,
        parallel=parallel,
        micro_batches=micro_batches(config, world),
        gradient_bytes=worst.parts["gradients"],
        weight_bytes=worst.parts["weights"],
        gathered=moved.share if how == "packed" else 1.0,
        graph=train.cuda_graph_impl != "none",
    )
    result.step = step_time(shape, recipes, result.token, device, sizes)
    largest = max(memory.total for memory in result.memory)
    if largest > device.memory * GIB:
        result.problems.append(
            f"a rank needs {largest / GIB:.1f} GiB and a {device.name} has {device.memory:.0f}; "
            + _smaller(config)
        )


def plan_of(config: PretrainConfig, vocab: int | None) -> PrecisionPlan:
    """The precision of every GEMM of the run, in its layout; None: without embedding and head."""
    shape = ModelShape(
        pattern=parse_text(config),
        config=transformer_config(
            config.model, config.parallel, params_dtype=config.train.torch_dtype
        ),
        vocab_size=padded_vocab_size(config.model, vocab or 0),
        seq_length=config.model.seq_length,
        tie_embeddings=config.model.tie_embeddings,
    )
    return PrecisionPlan(config.precision, shape, config.train.total_samples)


def _smaller(config: PretrainConfig) -> str:
    """What makes a rank smaller, the cheapest first."""
    ways = []
    if config.train.micro_batch_size > 1:
        ways.append("train.micro_batch_size=1")
    if not config.parallel.use_distributed_optimizer:
        ways.append("parallel.use_distributed_optimizer=true")
    if not config.model.megatron.get("recompute_granularity"):
        ways.append(
            "model.megatron.recompute_granularity=full with recompute_method=uniform and "
            "recompute_num_layers=1"
        )
    ways.append("more tensor- or pipeline-parallel processes, or more processes in all")
    return "try " + ", ".join(ways)


def _isolation_notes(config: PretrainConfig, plan: PrecisionPlan) -> list[str]:
    if not config.data.isolate_documents:
        return []
    coupled = sorted(
        {
            recipe.name
            for recipe in plan.recipes().values()
            if recipe.fprop_x.needs_amax and not recipe.fprop_x.row_scaled
        }
    )
    if not coupled:
        return []
    return [
        f"data.isolate_documents: {', '.join(coupled)} scale activations by the largest of all "
        "tokens, so a document's codes depend on its neighbours (attention, Mamba states and the "
        "convolution do not); bf16, mxfp8, row-scaled NVFP4, and nvfp4_pow2 while no block lies "
        "2^14 below the largest of its tensor, keep them apart bitwise"
    ]


def parse_text(config: PretrainConfig) -> str:
    """The pattern, cut into the stages of the layout."""
    parallel = config.parallel
    pattern = parse_pattern(config.model.pattern)
    return staged_pattern(pattern, parallel.pipeline_model_parallel_size, parallel.virtual)


def micro_batches(config: PretrainConfig, world: int) -> int:
    """Micro-batches of a step on each data-parallel rank."""
    train, ranks = config.train, config.parallel.data_parallel_size(world)
    return train.batch_sizes.sizes[-1] // (train.micro_batch_size * max(ranks, 1))


def rank_memory(
    config: PretrainConfig,
    shape: ModelShape,
    recipes: Mapping[str, GemmRecipe],
    world: int,
    stage: int,
) -> RankMemory:
    """Memory of the ranks that hold pipeline stage `stage`, at the end of the last forward pass."""
    parallel, train = config.parallel, config.train
    size = torch.empty((), dtype=train.torch_dtype).element_size()
    shared: Sharing = sharing(parallel, world)
    parameters = rank_parameters(shape, parallel, stage)
    own = stage_symbols(shape, parallel, stage)
    positions = {position for position, _ in own}
    last = stage == parallel.pipeline_model_parallel_size - 1
    pattern = parse_pattern(shape.pattern)
    modules = [
        m for m in shape.modules() if m.position in positions or (m.position is None and last)
    ]
    symbols = [symbol for _, symbol in own]
    symbols += [*"/", *pattern.mtp] * pattern.mtp_depths if last else []
    layout = Layout.of(parallel, size, config.precision.communicate)
    again = _recomputed_layers(shape.config, len(own), parallel.virtual)
    left = {position for position, _ in own[:again]}
    kept = [m for m in modules if m.position is None or m.position not in left]
    each = saved_bytes(kept, symbols[again:], shape, recipes, layout)
    tokens = train.micro_batch_size * shape.seq_length // parallel.context_parallel_size
    each = _recomputed(each, len(symbols), again, shape, layout)
    flying = in_flight(parallel, stage, micro_batches(config, world))
    parts = state_bytes(parameters, shared, element_size=size)
    parts["weight codes"] = code_bytes(modules, parallel, recipes)
    if config.optimizer.oscillation_reset is not None:
        parts["paths of weights"] = path_bytes(modules, parallel, shared, recipes)
    for name, amount in each.items():
        parts[f"kept, {name}"] = amount * tokens * flying
    if last:
        heads = 1 + pattern.mtp_depths
        hidden = shape.config.hidden_size / layout.tokens
        parts["logits"] = heads * tokens * size * (shape.vocab_size / layout.tp + 2 * hidden)
    widest = max((m.k + m.n for m in modules), default=0) / layout.tp
    parts["workspace"] = 2.0 * tokens * widest * size + CONTEXT_BYTES
    return RankMemory(
        stage=stage,
        layers="".join(symbols),
        parameters=parameters.total,
        parts={name: amount for name, amount in parts.items() if amount or name in _ALWAYS},
    )


_ALWAYS = ("weights", "gradients", "optimizer")


def _recomputed_layers(config: Any, layers: int, virtual: int) -> int:
    """How many layers of a rank, the first ones, keep their inputs alone (method block)."""
    if config.recompute_granularity != "full" or config.recompute_method != "block":
        return 0
    return min(config.recompute_num_layers * virtual, layers)


def _recomputed(
    each: dict[str, float], layers: int, again: int, shape: ModelShape, layout: Layout
) -> dict[str, float]:
    """What is kept of a token when activations are recomputed.

    Args:
        each: of the layers that are not among the first ones of method block.
        layers: of the rank.
        again: how many those are. Method uniform keeps the inputs of groups, and one group.
        shape: the model.
        layout: how it is cut.
    """
    if shape.config.recompute_granularity != "full" or not layers:
        return each
    input_bytes = shape.config.hidden_size / layout.tokens * layout.element_size
    if shape.config.recompute_method == "block":
        return {"inputs of layers": input_bytes * again} | each
    group = shape.config.recompute_num_layers or 1
    return {"inputs of layers": input_bytes * layers / group} | {
        name: amount * min(group / layers, 1.0) for name, amount in each.items()
    }


def in_flight(parallel: ParallelConfig, stage: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage holds at most, of all of its layers."""
    pipeline, virtual = parallel.pipeline_model_parallel_size, parallel.virtual
    if virtual == 1:
        return float(min(pipeline - stage, max(micro_batches, 1)))
    chunks = 2 * (pipeline - stage - 1) + (virtual - 1) * pipeline + 1
    return min(chunks, virtual * max(micro_batches, 1)) / virtual
