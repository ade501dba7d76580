# SPDX-License-Identifier: Apache-2.0
"""A model folder of transformers becomes a checkpoint that training starts from."""

import contextlib
import json
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fused_ops.errors import ConfigError
from models.config import ModelConfig
from models.conversion.expected import Expected, expected_tensors
from models.conversion.plan import Plan, ProofError, make_plan, to_ours, with_tied_head
from models.conversion.sections import engine_config, family_of, read_section, sizes_of
from models.pattern import parse_pattern
from pretrain.checkpoint.io import dump_json, file_entry, make_folder, remove_folder, write_durably
from pretrain.checkpoint.layout import COMPLETE, STATE, candidates, seal, step_folder
from pretrain.checkpoint.tensors import TensorReader, TensorWriter
from pretrain.config import make_config
from pretrain.config_file import encode
from pretrain.conversion.opened import CARRIED, process_groups, text_files
from pretrain.conversion.progress import Bar
from pretrain.conversion.verifying import Pair, Verdict, open_folder, verify_pair


@dataclass
class ImportOptions:
    """What the command line may say."""

    dtype: str | None = None
    """fp32, bf16 or fp16 of the checkpoint; None keeps the folder's."""
    decode: bool = False
    verify: bool = True
    show: bool = True


@dataclass
class Imported:
    """A checkpoint that was made."""

    path: Path
    section: ModelConfig
    notes: list[str]
    verdict: Verdict | None


def import_folder(folder: Path, checkpoints: Path, options: ImportOptions) -> Imported:
    """Write CHECKPOINTS/step_00000000 from a model folder, and prove it.

    The checkpoint gets its mark COMPLETE only after the proof; one that fails it is removed.
    ConfigError for folders that cannot be represented.
    """
    source, hf_config = open_folder(folder, options.decode)
    notes: list[str] = []
    section = _section(hf_config, source, notes)
    dtype = options.dtype or _dtype(hf_config, source)
    config = make_config(
        {
            "run": {"name": "imported"},
            "model": _plain(section),
            "data": {"train": "data/train"},
            "train": {"dtype": dtype},
        }
    )
    expected = expected_tensors(
        section, section.vocab_size or 0, config.train.torch_dtype, process_groups()
    )
    plan = _complete_plan(section, expected, hf_config, source)
    target = step_folder(checkpoints, 0)
    with fresh_folder(checkpoints, target):
        names = _write_tensors(plan, source, expected, target, options.show)
        names += carry_files(text_files(folder), target, CARRIED)
        about = {"step": 0, "imported_from": Path(folder).name}
        names.append(write_state(target, encode(config), about))
        verdict = None
        if options.verify:
            pair = Pair(section, TensorReader(target), expected.tensors, folder, source, hf_config)
            verdict = verify_pair(pair, show=options.show)
        if verdict is None or verdict.ok:
            seal(target, 0, {name: file_entry(target / name) for name in names})
    return Imported(target, section, notes, verdict)


def _section(hf_config: dict[str, Any], source: Any, notes: list[str]) -> ModelConfig:
    """The model section; prediction layers that are announced and absent are left out."""
    section, family = read_section(hf_config), family_of(hf_config)
    main, *mtp = section.pattern.split("/")
    if mtp:
        layers = len(main) // family.symbols_a_layer
        name = family.mtp_layer.format(m=layers, k=0) + family.mtp_first[0].theirs[0]
        if name not in source:
            notes.append(
                f"config.json announces {len(mtp)} prediction layer(s), the files hold none: the "
                "model is imported without"
            )
            section = replace(section, preset=None, pattern=main)
    return section


def _plain(section: ModelConfig) -> dict[str, Any]:
    """The section as a run file has it: only what differs from the defaults."""
    found = {k: v for k, v in encode(section).items() if v is not None and k != "preset"}
    return found


def _dtype(hf_config: dict[str, Any], source: Any) -> str:
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    said = hf_config.get("dtype") or hf_config.get("torch_dtype")
    if said in names:
        return names[said]
    stored = {source.spec(name).dtype for name in source if name.endswith("proj.weight")}
    stored = stored or {source.spec(name).dtype for name in source}
    if torch.bfloat16 in stored:
        return "bf16"
    return "fp16" if torch.float16 in stored else "fp32"


def _complete_plan(
    section: ModelConfig, expected: Expected, hf_config: dict[str, Any], source: Any
) -> Plan:
    """The plan, with every tensor of the folder used and every tensor of the model made."""
    sizes = sizes_of(section, engine_config(section), section.vocab_size or 0)
    plan = make_plan(family_of(hf_config), parse_pattern(section.pattern), expected.tensors, sizes)
    present = list(source)
    plan = with_tied_head(plan, present)
    if problems := plan.problems(present):
        raise ProofError(problems)
    return plan


@contextlib.contextmanager
def fresh_folder(checkpoints: Path, target: Path) -> Iterator[None]:
    """An empty folder for the checkpoint; removed again unless it was completed."""
    if others := [path.name for path in candidates(checkpoints) if (path / COMPLETE).exists()]:
        raise ConfigError(
            f"CKPT_DIR must be new; {checkpoints} holds {others[0]}, and a run starts from the "
            "newest that it finds; give another, or delete it"
        )
    checkpoints.mkdir(parents=True, exist_ok=True)
    if target.exists():
        remove_folder(target)
    make_folder(target)
    try:
        yield
    finally:
        if not (target / COMPLETE).exists():
            remove_folder(target)


def _write_tensors(
    plan: Plan, source: Any, expected: Expected, target: Path, show: bool
) -> list[str]:
    writer = TensorWriter(target)
    with Bar("import", len(plan.links), show=show) as bar:
        for link in plan.links:
            theirs = [source.read(piece.name, piece.index) for piece in link.theirs]
            for piece, tensor in to_ours(plan, link, theirs) if not link.copy else ():
                whole = plan.ours[piece.name].shape
                offsets = [0] * len(whole)
                if piece.index is not None:
                    offsets[0], tensor = piece.index, tensor.unsqueeze(0)
                writer.add(piece.name, tensor, whole, offsets)
            if link.copy:
                _check_copy(plan, link, theirs, source)
            bar.step()
    for name, value in expected.objects.items():
        writer.add_object(name, value)
    return writer.finish()


def _check_copy(plan: Plan, link: Any, theirs: list[Any], source: Any) -> None:
    """A tensor that must repeat another one does."""
    for other in plan.links:
        if other.ours == link.ours and not other.copy:
            original = source.read(other.theirs[0].name)
            if not torch.equal(original, theirs[0]):
                raise ProofError(
                    f"{link.theirs[0]} must equal {other.theirs[0]}, of which the model has one "
                    "copy (a tied head, or a prediction layer's), and differs; if it is a head of "
                    "its own, set tie_word_embeddings to false in config.json"
                )


def carry_files(paths: Iterable[Path], target: Path, prefix: str) -> list[str]:
    """Copy small files into a checkpoint, durably, with `prefix` before their names."""
    names = []
    for path in paths:
        name = prefix + path.name.removeprefix(prefix)
        write_durably(target / name, path.read_bytes())
        names.append(name)
    return names


def write_state(target: Path, config: dict[str, Any], about: dict[str, Any]) -> str:
    """state.json of a checkpoint of weights; `about` has at least its step."""
    state = {
        "parts": ["model"],
        "extra": {},
        "scheduler": None,
        "config": config,
        "fingerprints": {},
        "layout": json.dumps({"world_size": 1}),
        "written": {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        **about,
    }
    write_durably(target / STATE, dump_json(state))
    return STATE


def model_yaml(section: ModelConfig) -> dict[str, Any]:
    """The `model` section for a run file that continues from the import."""
    defaults = asdict(ModelConfig(pattern=section.pattern))
    return {k: v for k, v in _plain(section).items() if k == "pattern" or v != defaults.get(k)}
