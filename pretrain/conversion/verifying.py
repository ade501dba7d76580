# SPDX-License-Identifier: Apache-2.0
"""Proof that a checkpoint and a model folder are one model: names, values, settings, logits."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from models.config import ModelConfig
from models.conversion.judge import Judge, chunk_of, judge_problem
from models.conversion.plan import Plan, make_plan, to_ours, with_tied_head
from models.conversion.proof import LogitsProof, prove_logits
from models.conversion.safetensors import SafetensorsFolder, TensorSpec
from models.conversion.sections import (
    architecture,
    differences,
    engine_config,
    family_of,
    read_section,
    sizes_of,
)
from models.conversion.streamed import StreamedModel
from models.hf_mapping.table import Family, Link
from models.pattern import parse_pattern
from pretrain.checkpoint.tensors import TensorReader
from pretrain.conversion.opened import process_groups
from pretrain.conversion.progress import Bar

_SHOWN = 8


@dataclass
class Pair:
    """A checkpoint's tensors and a model folder that shall be the same model."""

    section: ModelConfig
    reader: TensorReader
    tensors: Mapping[str, TensorSpec]
    """Of the checkpoint, as stored."""
    folder: Path
    source: Any
    """The folder's tensors: a SafetensorsFolder, or one that decodes."""
    hf_config: dict[str, Any]

    @property
    def family(self) -> Family:
        """By config.json."""
        return family_of(self.hf_config)

    def plan(self) -> Plan:
        """Which pieces are which."""
        assert self.section.vocab_size is not None, "the vocabulary is known here"
        config = engine_config(self.section)
        sizes = sizes_of(self.section, config, self.section.vocab_size)
        pattern = parse_pattern(self.section.pattern)
        plan = make_plan(self.family, pattern, self.tensors, sizes)
        return with_tied_head(plan, list(self.source))


@dataclass
class Verdict:
    """What a verification found."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    values: int = 0
    """Tensors of the model folder that were compared."""
    logits: LogitsProof | None = None

    @property
    def ok(self) -> bool:
        """Whether it is one model."""
        return not self.problems

    def lines(self) -> list[str]:
        """For a person to read."""
        found = [f"note: {note}" for note in self.notes]
        if self.values:
            found.append(f"{self.values} tensors of the model folder compared, value by value")
        if self.logits is not None and self.logits.problem is None:
            worst = max((layer.error for layer in self.logits.layers), default=0.0)
            found.append(
                f"logits of {self.logits.tokens[0]} x {self.logits.tokens[1]} random tokens in "
                f"FP32: {len(self.logits.layers) - 1} layers, largest relative error {worst:.2g}, "
                f"of the logits {self.logits.logits_error:.2g} (allowed 1e-4)"
            )
        return found + [f"FAILED: {problem}" for problem in self.problems]


def read_hf_config(folder: Path) -> dict[str, Any]:
    """config.json of a model folder. ConfigError."""
    path = Path(folder) / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"HF_DIR must hold config.json; {folder} has none") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold keys and values in braces; got {str(found)[:60]!r}")
    about = found.get("quantization_config")
    if about is None:
        found.pop("quantization_config", None)
    elif not isinstance(about, dict):
        raise ConfigError(f"{path}: quantization_config must be keys and values; got {about!r}")
    return found


def verify_pair(pair: Pair, *, logits: bool = True, show: bool = True) -> Verdict:
    """Everything that can be said about the two."""
    verdict = Verdict()
    theirs = read_section(pair.hf_config)
    found = differences(architecture(pair.section), architecture(_without_prediction(theirs, pair)))
    verdict.problems += [f"configuration: {line}" for line in found]
    try:
        plan = pair.plan()
    except ConfigError as error:
        verdict.problems += error.problems
        return verdict
    present = list(pair.source)
    verdict.problems += plan.problems(present)
    compare_values(pair, plan, verdict, show=show)
    if not logits:
        return verdict
    if (problem := judge_problem()) is not None:
        verdict.problems.append(problem)
        return verdict
    try:
        verdict.logits = _prove(pair, plan, verdict.notes, show)
    except ConfigError as error:
        verdict.problems += error.problems
    except (RuntimeError, KeyError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        verdict.problems.append(f"logits: transformers cannot run this folder: {reason}")
    if verdict.logits is not None and verdict.logits.problem:
        verdict.problems.append(verdict.logits.problem)
    if "/" in pair.section.pattern:
        verdict.notes.append(
            "multi-token prediction is compared value by value only: transformers does not build it"
        )
    return verdict


def _without_prediction(theirs: ModelConfig, pair: Pair) -> ModelConfig:
    """Folders may announce prediction layers in config.json and not hold them."""
    from dataclasses import replace

    if "/" in theirs.pattern and "/" not in pair.section.pattern:
        first = pair.family.mtp_first[0].theirs[0]
        layers = len(theirs.pattern.split("/")[0]) // pair.family.symbols_a_layer
        name = pair.family.mtp_layer.format(m=layers, k=0) + first
        if name not in pair.source:
            return replace(theirs, pattern=theirs.pattern.split("/")[0])
    return theirs


def compare_values(pair: Pair, plan: Plan, verdict: Verdict, *, show: bool) -> None:
    """Every tensor of the folder against the checkpoint's, bit by bit after rounding alike."""
    present, wrong = set(pair.source), []
    names: set[str] = set()
    broken: list[str] = []
    with Bar("values", len(plan.links), show=show) as bar:
        for link in plan.links:
            if all(piece.name in present for piece in link.theirs):
                theirs = [pair.source.read(piece.name, piece.index) for piece in link.theirs]
                broken += [str(p) for p, t in zip(link.theirs, theirs) if not is_finite(t)]
                problem = _compare_link(pair, plan, link, theirs)
                names.update(piece.name for piece in link.theirs)
                if problem:
                    wrong.append(problem)
            bar.step()
    verdict.values = len(names)
    verdict.problems += wrong[:_SHOWN]
    if len(wrong) > _SHOWN:
        verdict.problems.append(f"and {len(wrong) - _SHOWN} more tensors differ")
    if broken:
        more = f" and {len(broken) - _SHOWN} more" if len(broken) > _SHOWN else ""
        verdict.notes.append(
            f"{', '.join(broken[:_SHOWN])}{more} of the folder have values that are NaN or Inf, so "
            "logits that can be compared are not to be expected"
        )


def _compare_link(pair: Pair, plan: Plan, link: Link, theirs: list[Tensor]) -> str | None:
    ours = [pair.reader.read(piece.name, piece.index) for piece in link.ours]
    if link.copy:
        made = link.shape.to_theirs(ours, plan.sizes)
        pairs = list(zip(link.theirs, made, theirs))
    else:
        try:
            made = [tensor for _, tensor in to_ours(plan, link, theirs)]
        except ConfigError as error:
            return error.problems[0]
        pairs = list(zip(link.ours, made, ours))
    for piece, one, other in pairs:
        if one.shape != other.shape:
            return f"{piece}: shapes {tuple(one.shape)} and {tuple(other.shape)}"
        if _padding_aside(link, plan, one, other):
            continue
        back = link.shape.to_theirs(ours, plan.sizes)
        if all(_equal(a.to(b.dtype), b) for a, b in zip(back, theirs)):
            continue  # the folder has fewer bits
        gap = (one.float() - other.float()).abs().amax().item()
        named = ", ".join(map(str, link.theirs))
        return f"{named}: values differ from {piece} of the checkpoint, by up to {gap:.3g}"
    return None


def _padding_aside(link: Link, plan: Plan, made: Tensor, stored: Tensor) -> bool:
    """Equality; rows that pad a vocabulary are trained like others and belong to no side."""
    from models.hf_mapping.shapes import VOCABULARY

    if link.shape is VOCABULARY:
        made, stored = made[: plan.sizes.vocab_size], stored[: plan.sizes.vocab_size]
    return _equal(made, stored.to(made.dtype))


def is_finite(x: Tensor) -> bool:
    """Whether no value is NaN or Inf, of any dtype."""
    if not x.is_floating_point():
        return True
    known = x if x.itemsize > 1 else x.bfloat16()  # of FP8 itself torch does not know
    return bool(known.isfinite().all())


def _equal(a: Tensor, b: Tensor) -> bool:
    """Bit by bit; NaN equals NaN, whatever its payload."""
    if torch.equal(a, b):
        return True
    numbers = torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())
    return numbers and torch.equal(a.nan_to_num(), b.nan_to_num())


def _prove(pair: Pair, plan: Plan, notes: list[str], show: bool) -> LogitsProof:
    theirs: dict[str, torch.dtype] = {}
    ours: dict[str, torch.dtype] = {}
    for link in plan.links:
        dtype, other = plan.spec(link.ours[0]).dtype, pair.source.spec(link.theirs[0].name).dtype
        if dtype is not other:
            theirs |= {piece.name: dtype for piece in link.theirs}
            ours |= {piece.name: other for piece in link.ours}
    if theirs:
        name = next(iter(theirs))
        more = f" and {len(theirs) - 1} more" if len(theirs) > 1 else ""
        notes.append(
            f"{name}{more} of the model folder are {_dtype_name(pair.source.spec(name).dtype)}, "
            f"the checkpoint's tensors {_dtype_name(theirs[name])}: both engines start from values "
            "rounded to both"
        )
    judge = Judge(pair.folder, pair.source, theirs.get)
    notes += judge.notes
    model = StreamedModel(pair.section, _Rounded(pair.reader, ours), process_groups())
    return compare_logits(
        model, judge, pair.family, pair.hf_config, vocab_size=plan.sizes.vocab_size, show=show
    )


@dataclass(frozen=True)
class _Rounded:
    """A checkpoint's tensors as a folder of other dtypes holds them."""

    reader: TensorReader
    dtypes: Mapping[str, torch.dtype]

    def read_region(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a tensor."""
        tensor = self.reader.read_region(name, offsets, sizes)
        return tensor.to(self.dtypes.get(name, tensor.dtype)).to(tensor.dtype)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compare_logits(
    ours: StreamedModel,
    judge: Judge,
    family: Family,
    hf_config: dict[str, Any],
    *,
    vocab_size: int,
    show: bool,
) -> LogitsProof:
    """The logits of both engines on random tokens, more than a chunk of a Mamba model's scan."""
    tokens = 67
    if "M" in ours.section.pattern:
        tokens = max(tokens, chunk_of(hf_config) + 37)
    with Bar("logits, layers", len(judge.layers) + 1, show=show) as bar:
        return prove_logits(
            ours,
            judge,
            vocab_size,
            symbols_a_layer=family.symbols_a_layer,
            tokens=tokens,
            step=bar.step,
        )


def open_folder(folder: Path, decode: bool = False) -> tuple[Any, dict[str, Any]]:
    """(tensors, config.json) of a model folder; packed ones are decoded if asked, else refused."""
    from models.conversion.packed import decoded, packed_problem

    hf_config, source = read_hf_config(folder), SafetensorsFolder(folder)
    problem = packed_problem(hf_config, source)
    if problem is None:
        return source, hf_config
    if not decode:
        raise ConfigError(problem)
    return decoded(hf_config, source), hf_config
