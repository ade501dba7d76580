# SPDX-License-Identifier: Apache-2.0
"""A run's configuration: read, checked by the rules between sections, and saved.

A run is a YAML file plus `key=value`; nothing else is read, no environment variable. It is checked
once, after the overrides.
"""

import math
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from fused_ops.errors import ConfigError
from models import te_linear
from models.config import model_problems, transformer_config
from models.config_checks import above_and_below, size_problems
from models.precision import PrecisionPlan, plan_precision
from models.precision_rules import RecipeBook
from pretrain.checkpoint.compare import override_config
from pretrain.config_file import apply_overrides, decode_all, encode, parse_overrides, read_yaml
from pretrain.cuda_graph_rules import cuda_graph_problems
from pretrain.data.batch_sizes import check_batch_sizes
from pretrain.data.config import DataConfig
from pretrain.data.remote import Remote, open_manifest
from pretrain.metrics import log_config_problems
from pretrain.optimizer import MUON_MISSING, has_muon
from pretrain.oscillation_rules import oscillation_problems
from pretrain.pretrain_config import PretrainConfig
from pretrain.redact import mask_secrets

CONFIG_FILE = "config.yaml"
GROUP = "microbatch_group_size_per_vp_stage"


def load_config(
    path: Path | str, overrides: Sequence[str] = (), *, for_training: bool = False
) -> PretrainConfig:
    """The run in a YAML file, with `key=value` overrides. ConfigError holds every problem.

    `for_training`: also check what only this start can answer: the number of processes, the
    device, the packages, and that the data is there.
    """
    data = read_yaml(path)
    apply_overrides(data, parse_overrides(overrides))
    return make_config(data, for_training=for_training)


def make_config(data: Mapping[str, Any], *, for_training: bool = False) -> PretrainConfig:
    """The run in plain nested values, checked. ConfigError holds every problem."""
    config, problems, wrong = decode_all(PretrainConfig, data)
    if config is not None:
        found = _found_problems(config, for_training)
        found += _override_problems(config, found, for_training)
        # Where a setting could not be read its default stood in: say nothing about that.
        problems += [text for text in found if not any(name in text for name in wrong)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    assert config is not None, "a config without problems was decoded"
    return config


def _found_problems(config: PretrainConfig, for_training: bool) -> list[str]:
    found = section_problems(config)
    if for_training and not config.train.dry_run:
        found += start_problems(config, world_size())
    return found


def _override_problems(
    config: PretrainConfig, known: Sequence[str], for_training: bool
) -> list[str]:
    """What `checkpoint.override` would make wrong with the run, beside what is known."""
    try:
        then = override_config(config, config.checkpoint.override)
        found = [] if then is config else _found_problems(then, for_training)
    except ConfigError as error:
        found = error.problems
    prefix = "checkpoint.override"
    return [
        text if text.startswith(prefix) else f"{prefix}: {text}"
        for text in found
        if text not in known
    ]


def save_config(config: PretrainConfig, path: Path | str) -> None:
    """Writes the resolved config as YAML, secrets masked: to a temporary name, then renamed."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(yaml.safe_dump(mask_secrets(encode(config)), sort_keys=False, width=100))
    os.replace(temporary, path)


def world_size() -> int:
    """Processes of this run, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def section_problems(config: PretrainConfig) -> list[str]:
    """Problems between sections; the same on every machine."""
    found, train = [], config.train
    if Path(config.run.name).name != config.run.name or config.run.name in ("", ".", ".."):
        found.append(
            f"run.name must be a plain folder name; got {config.run.name!r}; a path goes to run.dir"
        )
    wrong = [step for step in train.profile_steps if not 1 <= step <= train.steps]
    if wrong:
        found.append(
            f"train.profile_steps must lie in 1 to train.steps={train.steps}; got {wrong}; steps "
            "count from 1"
        )
    if train.dtype == "fp16" and config.optimizer.name == "muon":
        found.append(
            "optimizer.name=muon does not run with train.dtype=fp16 (megatron-core refuses it); "
            "set train.dtype=bf16, or optimizer.name=adamw"
        )
    try:
        _ = train.batch_sizes
    except ConfigError as error:
        return [*found, *error.problems]
    if train.ema_decay > 0 and config.parallel.overlap_param_gather:
        found.append(
            f"train.ema_decay={train.ema_decay} needs whole weights after every update, which "
            "parallel.overlap_param_gather gives only later; set one of them to 0 or false"
        )
    problems = model_problems(config.model, config.parallel) or _engine_problems(config)
    return [
        *found,
        *cuda_graph_problems(config),
        *config.optimizer.problems(train.steps),
        *(problems + _recipe_problems(config) if problems else _precision_problems(config)),
    ]


def _engine_problems(config: PretrainConfig) -> list[str]:
    """What megatron-core itself refuses of a model and layout that pass our own checks."""
    try:
        transformer_config(
            config.model,
            config.parallel,
            params_dtype=config.train.torch_dtype,
            deterministic=config.train.deterministic,
        )
    except ConfigError as error:
        return error.problems
    return []


def precision_plan(config: PretrainConfig, vocab_size: int | None = None) -> PrecisionPlan:
    """The precision of every GEMM of the run, without building it. Raises ConfigError."""
    return plan_precision(
        config.model,
        config.precision,
        vocab_size=vocab_size,
        params_dtype=config.train.torch_dtype,
        total_samples=config.train.total_samples,
    )


def _recipe_problems(config: PretrainConfig) -> list[str]:
    """What is wrong with the precision section, whatever the model."""
    precision = config.precision
    book = RecipeBook(precision)
    found = list(book.problems)
    named = [("precision.recipe", precision.recipe or "bf16")]
    for section in ("rules", "schedule"):
        steps = enumerate(getattr(precision, section))
        named += [(f"precision.{section}.{i}", step.recipe) for i, step in steps]
    for source, name in named:
        book.get(name, source, found)
    return found


def _precision_problems(config: PretrainConfig) -> list[str]:
    try:
        plan = precision_plan(config)
    except ConfigError as error:
        return error.problems
    reset = config.optimizer.oscillation_reset
    if reset is None or reset.problems(config.train.steps):
        return []
    return oscillation_problems(config, plan)


def _recipe_names(config: PretrainConfig) -> set[str]:
    """Recipes in use, of a plan without problems."""
    try:
        return {recipe.name for recipe in precision_plan(config).recipes().values()}
    except ConfigError:
        return set()


def start_problems(config: PretrainConfig, world: int) -> list[str]:
    """What keeps the run from starting on this machine with `world` processes."""
    return [
        *layout_start_problems(config, world),
        *_machine_problems(config),
        *log_config_problems(config.log),
    ]


def layout_start_problems(config: PretrainConfig, world: int) -> list[str]:
    """Of the problems of a start, those that `world` processes have on any machines."""
    if problems := size_problems(config.parallel):
        return problems
    return [*_batch_problems(config, world), *_expert_problems(config, world)]


def _batch_problems(config: PretrainConfig, world: int) -> list[str]:
    parallel, train = config.parallel, config.train
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    cp = parallel.context_parallel_size
    if world % parallel.dense_ranks:
        return [
            "the number of processes must be a multiple of tensor_model_parallel_size * "
            f"pipeline_model_parallel_size * context_parallel_size = {tp} * {pp} * {cp} = "
            f"{parallel.dense_ranks}; got {world}; {_start_instead(config, world)}",
            *_micro_batch_problems(config),
        ]
    ranks, found = parallel.data_parallel_size(world), []
    interleaved = parallel.virtual > 1
    given = config.model.megatron.get(GROUP)
    group = given if isinstance(given, int) else pp  # of another type: said elsewhere
    if given is not None and not interleaved:
        found.append(
            f"model.megatron.{GROUP} needs parallel.virtual_pipeline_model_parallel_size of 2 or "
            "more; set both, or remove it"
        )
    for size in train.batch_sizes.sizes:
        try:
            micro_batches = check_batch_sizes(size, train.micro_batch_size, ranks)
        except ConfigError as error:
            found += error.problems
            continue
        if interleaved and micro_batches % pp:
            near = above_and_below(size, train.micro_batch_size * ranks * pp)
            found.append(
                "with virtual_pipeline_model_parallel_size the micro-batches of a step must be a "
                f"multiple of pipeline_model_parallel_size={pp}; got {micro_batches}; change "
                f"train.global_batch_size: the next one is {near}"
            )
        elif interleaved and not (
            pp <= group <= micro_batches
            and (micro_batches % group == 0 or micro_batches % group >= pp)
        ):
            found.append(
                f"model.megatron.{GROUP} {group} must lie between pipeline_model_parallel_size="
                f"{pp} and the {micro_batches} micro-batches of a step, and leave none or at least "
                f"{pp} of them over; set it to {pp}, or remove it"
            )
    return found


def _micro_batch_problems(config: PretrainConfig) -> list[str]:
    """What is wrong with batch sizes, whatever the number of data-parallel ranks."""
    size = config.train.micro_batch_size
    return [
        f"train.global_batch_size must be a multiple of train.micro_batch_size={size}; got {batch};"
        f" the next one is {above_and_below(batch, size)}"
        for batch in config.train.batch_sizes.sizes
        if size > 0 and batch % size
    ]


def _expert_unit(config: PretrainConfig) -> int:
    """Processes that hold one copy of all experts; 1 without experts."""
    return config.parallel.expert_ranks if "E" in config.model.pattern else 1


def _start_instead(config: PretrainConfig, world: int) -> str:
    """The nearest numbers of processes that dense layers and experts can both be laid over."""
    unit = math.lcm(config.parallel.dense_ranks, _expert_unit(config))
    near = above_and_below(world, unit)
    return f"start {near} with torchrun, or change parallel"


def _expert_problems(config: PretrainConfig, world: int) -> list[str]:
    unit = _expert_unit(config)
    if world % unit == 0:
        return []
    return [
        "the number of processes must be a multiple of expert_model_parallel_size * "
        f"expert_tensor_parallel_size * pipeline_model_parallel_size = {unit}; got {world}; "
        f"{_start_instead(config, world)}"
    ]


def _machine_problems(config: PretrainConfig) -> list[str]:
    found = []
    if config.run.device == "cuda" and not torch.cuda.is_available():
        found.append(
            f"run.device=cuda needs a GPU; torch sees none on {socket.gethostname()}; see that "
            "nvidia-smi lists some there and that torch is built for CUDA, or set run.device=auto"
        )
    on_cpu = config.run.device == "cpu" or not torch.cuda.is_available()
    if config.train.cuda_graph_impl != "none" and on_cpu:
        found.append(
            f"train.cuda_graph_impl={config.train.cuda_graph_impl} needs a GPU; this run computes "
            "on a CPU; set it to none"
        )
    if config.precision.backend == "transformer_engine":
        found += te_linear.machine_problems(_recipe_names(config))
    if config.optimizer.name == "muon" and not has_muon():
        found.append(MUON_MISSING)
    vocab, remote = config.model.vocab_size, Remote(config.data)
    for name, folder in data_folders(config.data):
        try:
            size = open_manifest(folder, remote).vocab_size
            if vocab is not None and size > vocab:
                found.append(
                    f"model.vocab_size must be at least the data's; it is {vocab} and {name} has "
                    f"{size}: set it to {size}, or leave it unset to take the data's"
                )
        except ConfigError as error:
            found.extend(f"{name}: {problem}" for problem in error.problems)
    return found


def data_folders(data: DataConfig) -> list[tuple[str, str]]:
    """(setting, folder) of all shards that a run reads."""
    train, valid = data.train, data.valid
    found = (
        [("data.train", train)]
        if isinstance(train, str)
        else [(f"data.train.{i}.path", source.path) for i, source in enumerate(train)]
    )
    if isinstance(valid, str):
        found.append(("data.valid", valid))
    elif valid:
        found.extend((f"data.valid.{name}", path) for name, path in valid.items())
    return found
