# SPDX-License-Identifier: Apache-2.0
"""A checkpoint becomes a model folder that transformers, vLLM, SGLang and TensorRT-LLM read."""

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fused_ops.errors import ConfigError
from models.conversion.plan import Plan, make_plan
from models.conversion.safetensors import SafetensorsFolder, SafetensorsWriter, TensorSpec
from models.conversion.sections import (
    architecture,
    choose_family,
    engine_config,
    read_section,
    sizes_of,
)
from models.hf_mapping import FAMILIES
from models.hf_mapping.table import Family
from models.pattern import parse_pattern
from pretrain.conversion.opened import OpenCheckpoint, text_files
from pretrain.conversion.progress import Bar
from pretrain.conversion.verifying import Pair, Verdict, verify_pair
from pretrain.pretrain_config import DTYPES

_DTYPE_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass
class ExportOptions:
    """What the command line may say."""

    family: str | None = None
    dtype: str | None = None
    """fp32, bf16 or fp16 of the folder; None keeps the checkpoint's."""
    tokenizer: Path | None = None
    """A tokenizer.json, or a folder with tokenizer files."""
    verify: bool = True
    show: bool = True
    max_file_bytes: int = 5 * 10**9


@dataclass
class Exported:
    """A folder that was made."""

    path: Path
    family: str
    notes: list[str]
    verdict: Verdict | None


def export_checkpoint(checkpoint: OpenCheckpoint, folder: Path, options: ExportOptions) -> Exported:
    """Write a model folder and prove it. It gets its name only after the proof.

    One that fails is left as FOLDER.failed, to look at. ConfigError for models that no family can
    represent.
    """
    family, hf_config = export_config(checkpoint, options.family)
    notes: list[str] = []
    part = begin_folder(folder)
    try:
        plan = export_plan(checkpoint, family)
        specs = _specs(plan, options.dtype)
        writer = SafetensorsWriter(part, specs, max_file_bytes=options.max_file_bytes)
        _write_tensors(checkpoint, plan, specs, writer, options.show)
        writer.finish()
        hf_config["dtype"] = _DTYPE_NAMES[options.dtype or checkpoint.config.train.dtype]
        notes += write_small_files(checkpoint, part, hf_config, options.tokenizer)
        verdict = None
        if options.verify:
            verdict = verify_pair(make_pair(checkpoint, part, hf_config), show=options.show)
    except BaseException:
        shutil.rmtree(part)
        raise
    return Exported(finish_folder(part, verdict), family.name, notes, verdict)


def make_pair(
    checkpoint: OpenCheckpoint, folder: Path, hf_config: dict[str, Any], source: Any = None
) -> Pair:
    """A checkpoint and a folder, to be compared."""
    return Pair(
        checkpoint.section,
        checkpoint.reader,
        checkpoint.tensors(),
        folder,
        source or SafetensorsFolder(folder),
        hf_config,
    )


def export_config(checkpoint: OpenCheckpoint, name: str | None) -> tuple[Family, dict[str, Any]]:
    """The family and config.json: the one that came with an import where it is still true."""
    section, carried = checkpoint.section, checkpoint.carried().get("config.json")
    stored = json.loads(carried.read_bytes()) if carried is not None else {}
    kind = stored.get("model_type")
    if name is None and kind in FAMILIES:
        name = kind
    family, written = choose_family(section, checkpoint.vocab_size, name)
    stored = stored if kind == family.name else {}
    try:
        same = bool(stored) and architecture(read_section(stored)) == architecture(section)
    except ConfigError:
        same = False
    found = dict(stored) if same else {**stored, **written}
    # Of other weights, or of Python files, which do not travel.
    for name in ("torch_dtype", "quantization_config", "auto_map"):
        found.pop(name, None)
    return family, found


def export_plan(checkpoint: OpenCheckpoint, family: Family) -> Plan:
    """Which tensors of the checkpoint become which of the folder; all of them do."""
    unused = checkpoint.unused()
    if unused:
        raise ConfigError(f"{unused[0]} is in the checkpoint and no tensor of its model")
    section = checkpoint.section
    sizes = sizes_of(section, engine_config(section), checkpoint.vocab_size)
    return make_plan(family, parse_pattern(section.pattern), checkpoint.tensors(), sizes)


def _specs(plan: Plan, dtype: str | None) -> dict[str, TensorSpec]:
    """Tensors of the folder; what the checkpoint keeps in FP32 among lesser stays so."""
    specs = plan.theirs()
    if dtype is None:
        return specs
    wanted, stored = DTYPES[dtype], {spec.dtype for spec in specs.values()}
    kept = {torch.float32} if len(stored) > 1 else set()
    return {
        name: spec if spec.dtype in kept else replace(spec, dtype=wanted)
        for name, spec in specs.items()
    }


def _write_tensors(
    checkpoint: OpenCheckpoint,
    plan: Plan,
    specs: dict[str, TensorSpec],
    writer: SafetensorsWriter,
    show: bool,
) -> None:
    with Bar("export", len(plan.links), show=show) as bar:
        for link in plan.links:
            ours = [checkpoint.reader.read(piece.name, piece.index) for piece in link.ours]
            for piece, tensor in zip(link.theirs, link.shape.to_theirs(ours, plan.sizes)):
                writer.write(piece.name, tensor.to(specs[piece.name].dtype), piece.index)
            bar.step()


def begin_folder(folder: Path) -> Path:
    """FOLDER.part, empty. ConfigError when FOLDER is no new or empty folder."""
    place = Path(folder).resolve()
    if place.exists() and not place.is_dir():
        raise ConfigError(f"HF_DIR must be a folder; {folder} is a file; give another")
    if place.is_dir() and any(place.iterdir()):
        raise ConfigError(f"HF_DIR must be new or empty; {folder} holds files; give another")
    if place.is_mount() or place == Path.cwd():
        raise ConfigError(
            f"HF_DIR cannot be a disk's own folder or the one you are in; got {folder}; give one "
            "within it"
        )
    part = place.with_name(place.name + ".part")
    for former in (part, place.with_name(place.name + ".failed")):
        if former.exists() and any(former.iterdir()) and not any(former.glob("*.safetensors*")):
            raise ConfigError(
                f"an export to {folder} would delete {former}, which is no former export: move it, "
                "or give another HF_DIR"
            )
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    return part


def finish_folder(part: Path, verdict: Verdict | None) -> Path:
    """`begin_folder`'s under the name asked for, or as FOLDER.failed if the proof failed."""
    target = part.with_suffix("")
    if verdict is not None and not verdict.ok:
        target = part.with_suffix(".failed")
        if target.exists():
            shutil.rmtree(target)
    elif target.is_dir():
        target.rmdir()
    os.replace(part, target)
    return target


def write_small_files(
    checkpoint: OpenCheckpoint, folder: Path, hf_config: dict[str, Any], tokenizer: Path | None
) -> list[str]:
    """config.json, tokenizer, generation config; notes on what there is not."""
    carried = checkpoint.carried()
    for name, path in carried.items():
        if name != "config.json":
            shutil.copyfile(path, folder / name)
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2) + "\n")
    if "generation_config.json" not in carried:
        ids = {
            k: hf_config[k]
            for k in ("bos_token_id", "eos_token_id", "pad_token_id")
            if hf_config.get(k) is not None
        }
        text = json.dumps({"_from_model_config": True, **ids}, indent=2) + "\n"
        (folder / "generation_config.json").write_text(text)
    if tokenizer is not None or not any(name.startswith("tokenizer") for name in carried):
        return _write_tokenizer(checkpoint, folder, tokenizer)
    return []


def _write_tokenizer(checkpoint: OpenCheckpoint, folder: Path, given: Path | None) -> list[str]:
    from pretrain.data.tokenizer import TOKENIZER_NAME

    if given is not None and given.is_dir():
        for path in text_files(given):
            if path.name not in ("config.json", "generation_config.json"):
                shutil.copyfile(path, folder / path.name)
        return []
    if given is None:
        train = checkpoint.config.data.train
        first = Path(train if isinstance(train, str) else train[0].path)
        places = [place / TOKENIZER_NAME for place in (first, first.parent)]
        given = next((place for place in places if place.is_file()), None)
    if given is None:
        return ["no tokenizer came with the checkpoint or lies beside its data: none is written"]
    if not given.is_file():
        raise ConfigError(f"--tokenizer must be a file or folder; {given} does not exist")
    shutil.copyfile(given, folder / "tokenizer.json")
    about = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if not (folder / "tokenizer_config.json").exists():
        (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
    return []
