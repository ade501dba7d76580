# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint or a model folder holds: tensors, layout, configuration; is it whole?"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml

from fused_ops.errors import ConfigError
from models.conversion.packed import packed_weights
from models.conversion.plan import make_plan, with_tied_head
from models.conversion.safetensors import SafetensorsFolder
from models.conversion.sections import engine_config, family_of, read_section, sizes_of
from models.pattern import parse_pattern
from pretrain.checkpoint.io import CheckpointError, load_json
from pretrain.checkpoint.layout import STATE, candidates, check_contents
from pretrain.checkpoint.tensors import TensorReader
from pretrain.conversion.opened import CARRIED, open_checkpoint, process_groups
from pretrain.conversion.progress import Bar
from pretrain.conversion.verifying import is_finite, read_hf_config

_NAMES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}


def inspect(folder: Path, *, check: bool = False, show: bool = True) -> tuple[list[str], list[str]]:
    """(lines to print, problems found). ConfigError when it is neither kind.

    `check` reads every byte: checksums, pieces without gaps, values that are numbers, and the
    tensors against those that the configuration asks for.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        return _inspect_folder(folder, check, show)
    steps = candidates(folder)
    if not steps:
        raise ConfigError(
            f"DIR must be a checkpoint (a run, its checkpoints folder or one step) or a model "
            f"folder with config.json; {folder} is neither"
        )
    return _inspect_checkpoint(folder, steps, check, show)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    raise AssertionError("the loop returns")


def _dtype(dtype: torch.dtype) -> str:
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _table(rows: Iterable[tuple[str, tuple[int, ...], torch.dtype, int, str]]) -> list[str]:
    rows = list(rows)
    width = max((len(row[0]) for row in rows), default=4)
    lines = [f"{'tensor':{width}}  {'shape':22} {'dtype':10} {'bytes':>14}  where"]
    lines += [
        f"{name:{width}}  {list(shape)!s:22} {_dtype(dtype):10} {size:14,d}  {where}"
        for name, shape, dtype, size, where in rows
    ]
    count: dict[str, list[int]] = {}
    for _, shape, dtype, size, _ in rows:
        entry = count.setdefault(_dtype(dtype), [0, 0, 0])
        entry[0] += 1
        entry[1] += torch.Size(shape).numel()
        entry[2] += size
    lines += [
        f"{tensors} tensors of {kind}: {elements:,d} elements, {_size(size)}"
        for kind, (tensors, elements, size) in count.items()
    ]
    return lines


def _inspect_checkpoint(
    folder: Path, steps: list[Path], check: bool, show: bool
) -> tuple[list[str], list[str]]:
    problems = []
    if len(steps) > 1:
        lines = [f"{folder}: {len(steps)} checkpoints, {', '.join(p.name for p in steps)}"]
    else:
        lines = []
    newest = next((path for path in steps if check_contents(path) is None), None)
    if check:
        problems += [str(reason) for path in steps if (reason := check_contents(path))]
    if newest is None:
        raise CheckpointError("\n".join(str(check_contents(path)) for path in steps))
    state, reader = load_json(newest / STATE), TensorReader(newest)
    lines += [
        f"checkpoint {newest}",
        f"step        {state['step']}, holds {' and '.join(state['parts'])}",
        f"written     {state['written']['time']} by torch {state['written']['torch']}",
        f"layout      saved under {state['layout']}; any layout loads it",
        _precision_line(state["config"]),
    ]
    if carried := sorted(p.name.removeprefix(CARRIED) for p in newest.glob(CARRIED + "*")):
        lines.append(f"carries     {', '.join(carried)}")
    config = yaml.safe_dump({"model": state["config"]["model"]}, sort_keys=False, width=100)
    lines += ["", config.rstrip(), ""]
    lines += _table(
        (
            name,
            reader.shape(name),
            reader.dtype(name),
            reader.nbytes(name),
            _where(reader.pieces(name)),
        )
        for name in reader
    )
    if check:
        problems += _check_tensors(newest, reader, show)
    return lines, problems


def _precision_line(config: dict[str, Any]) -> str:
    """What weights are stored as, and what was computed in: codes are never stored."""
    section = config.get("precision") or {}
    recipe = section.get("recipe") or section.get("plan") or "bf16"
    stored = config.get("train", {}).get("dtype", "bf16")
    return f"precision   weights are stored in {stored}; trained with {recipe}, no codes are stored"


def _where(pieces: list[tuple[tuple[int, ...], tuple[int, ...], str]]) -> str:
    files = sorted({file for *_, file in pieces})
    return f"{len(pieces)} piece(s) in {', '.join(files[:3])}" + (" ..." if len(files) > 3 else "")


def _check_tensors(path: Path, reader: TensorReader, show: bool) -> list[str]:
    problems = []
    names = list(reader)
    with Bar("reading", len(names), show=show) as bar:
        for name in names:
            for offsets, sizes, _ in reader.pieces(name):
                try:
                    part = reader.read_region(name, offsets, sizes)
                except CheckpointError as error:
                    problems.append(str(error))
                    continue
                if not is_finite(part):
                    count = int((~torch.isfinite(part)).sum())
                    problems.append(f"{name} holds {count} values that are NaN or Inf")
            whole = torch.Size(reader.shape(name)).numel()
            covered = sum(torch.Size(sizes).numel() for _, sizes, _ in reader.pieces(name))
            if covered != whole:
                problems.append(f"{name}: its pieces hold {covered} of {whole} elements")
            bar.step()
    try:
        opened = open_checkpoint(path)
        opened.tensors()
        problems += [f"{name} is no tensor of the model" for name in opened.unused()]
    except ConfigError as error:
        problems += error.problems
    return problems


def _inspect_folder(folder: Path, check: bool, show: bool) -> tuple[list[str], list[str]]:
    hf_config, source = read_hf_config(folder), SafetensorsFolder(folder)
    others = sorted(p.name for p in folder.iterdir() if p.is_file() and p.suffix != ".safetensors")
    quantization = hf_config.get("quantization_config") or {}
    classes = ", ".join(hf_config.get("architectures") or [])
    lines = [
        f"model folder {folder}",
        f"family      {hf_config.get('model_type')} ({classes})",
        f"packed      {quantization.get('quant_method', 'no')}",
        f"files       {', '.join(others)}",
        "",
        json.dumps(hf_config, indent=1),
        "",
    ]
    lines += _table(
        (
            name,
            source.spec(name).shape,
            source.spec(name).dtype,
            source.spec(name).nbytes,
            source.file_of(name),
        )
        for name in source
    )
    return lines, _check_folder(hf_config, source, show) if check else []


def _check_folder(hf_config: dict[str, Any], source: SafetensorsFolder, show: bool) -> list[str]:
    problems = []
    names = list(source)
    with Bar("reading", len(names), show=show) as bar:
        for name in names:
            if not is_finite(source.read(name)):
                problems.append(f"{name} holds values that are NaN or Inf")
            bar.step()
    if packed_weights(source):
        return problems
    from models.conversion.expected import expected_tensors

    try:
        section, family = read_section(hf_config), family_of(hf_config)
        vocab = section.vocab_size or 0
        expected = expected_tensors(section, vocab, torch.float32, process_groups())
        sizes = sizes_of(section, engine_config(section), vocab)
        plan = make_plan(family, parse_pattern(section.pattern), expected.tensors, sizes)
        problems += with_tied_head(plan, names).problems(names)
        for name, spec in plan.theirs().items():
            if name in source and source.spec(name).shape != spec.shape:
                problems.append(
                    f"{name} is {source.spec(name).shape}, and {spec.shape} by config.json"
                )
    except ConfigError as error:
        problems += error.problems
    return problems
