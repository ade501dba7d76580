# SPDX-License-Identifier: Apache-2.0
"""Export in 4 or 8 bits: the trainer's codes and scales, as inference engines read them, proven."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from models.conversion.cuts import weight_cuts
from models.conversion.judge import Judge
from models.conversion.layouts import (
    hf_quant_config,
    high_modules,
    packed_specs,
    packed_tensors,
    quantization_config,
)
from models.conversion.packed import DecodedFolder
from models.conversion.plan import Plan
from models.conversion.quantized import Choice, Origin, choose, dequantized_ours, quantize_link
from models.conversion.reader import read_independently, reader_problem
from models.conversion.safetensors import SafetensorsFolder, SafetensorsWriter, TensorSpec
from models.conversion.sections import architecture, differences, read_section
from models.conversion.streamed import StreamedModel
from models.hf_mapping.table import Family, Link
from models.precision_config import PrecisionConfig
from pretrain.config import precision_plan
from pretrain.conversion.calibration import calibration_tokens, input_amaxes
from pretrain.conversion.exporting import (
    Exported,
    ExportOptions,
    begin_folder,
    export_config,
    export_plan,
    finish_folder,
    write_small_files,
)
from pretrain.conversion.opened import OpenCheckpoint, process_groups
from pretrain.conversion.progress import Bar
from pretrain.conversion.verifying import Verdict, compare_logits


@dataclass
class PackOptions(ExportOptions):
    """What the command line may say, beyond an export."""

    format: str = "nvfp4"
    layout: str = "modelopt"
    recipe: str | None = None
    """Quantize every linear layer by this recipe instead of as the run did."""
    calibrate: Path | None = None
    calibration_tokens: int = 32768


def export_packed(checkpoint: OpenCheckpoint, folder: Path, options: PackOptions) -> Exported:
    """Write a packed model folder and prove it; see `exporting.export_checkpoint`."""
    family, hf_config = export_config(checkpoint, options.family)
    plan = export_plan(checkpoint, family)
    choice = chosen(checkpoint, plan, options)
    amaxes: Mapping[str, Sequence[float]] = {}
    if options.format != "mxfp8":
        tokens = calibration_tokens(checkpoint, options.calibrate, options.calibration_tokens)
        amaxes = input_amaxes(checkpoint, tokens, show=options.show)
        choice.notes.append(f"scales of activations: from {tokens.numel()} tokens of validation")
    part = begin_folder(folder)
    try:
        hf_config = _write(checkpoint, plan, choice, amaxes, part, hf_config, options)
        notes = choice.notes + write_small_files(checkpoint, part, hf_config, options.tokenizer)
        verdict = None
        if options.verify:
            packing = Packing(checkpoint, family, plan, choice, options.layout, options.format)
            verdict = packing.verify(part, hf_config, show=options.show)
    except BaseException:
        shutil.rmtree(part)
        raise
    return Exported(finish_folder(part, verdict), family.name, notes, verdict)


def chosen(checkpoint: OpenCheckpoint, plan: Plan, options: PackOptions) -> Choice:
    """Which weights leave in codes, by the recipes of the run or the one asked for."""
    config, stated = checkpoint.config, checkpoint.state["extra"].get("precision")
    section = config.precision
    if options.recipe is not None:
        section = PrecisionConfig(recipe=options.recipe)
    asked = replace(config, model=checkpoint.section, precision=section)
    precision = precision_plan(asked, checkpoint.vocab_size)
    if stated is not None and options.recipe is None:
        precision.load_state_dict(stated)
    origin = Origin()
    if options.recipe is None:
        parallel = config.parallel
        tensor = parallel.tensor_model_parallel_size
        experts = parallel.expert_tensor_parallel_size or tensor
        origin = Origin(
            scope=section.amax_scope,
            cuts=weight_cuts(precision.modules, plan.sizes.config, tensor, experts),
            others=None if section.backend == "fused_ops" else section.backend,
        )
    choice = choose(plan, precision.recipes(), options.format, origin)
    if not choice.specs:
        raise ConfigError(
            f"no linear layer of this run multiplies with a weight in {options.format}; export in "
            "the format that it trained in, or name a recipe to quantize by, such as --recipe "
            f"{'fp8_tensorwise' if options.format == 'fp8' else options.format}"
        )
    if options.recipe is not None:
        choice.notes.append(f"quantized by the recipe {options.recipe}, not as the run trained")
    return choice


def _write(
    checkpoint: OpenCheckpoint,
    plan: Plan,
    choice: Choice,
    amaxes: Mapping[str, Sequence[float]],
    folder: Path,
    hf_config: dict[str, Any],
    options: PackOptions,
) -> dict[str, Any]:
    """Tensors and configuration; config.json's new values."""
    plain = plan.theirs()
    specs, names = _specs(plan, choice, plain, options.layout)
    writer = SafetensorsWriter(folder, specs, max_file_bytes=options.max_file_bytes)
    with Bar("export", len(plan.links), show=options.show) as bar:
        for link in plan.links:
            ours = [checkpoint.reader.read(piece.name, piece.index) for piece in link.ours]
            if link not in choice.specs:
                for piece, tensor in zip(link.theirs, link.shape.to_theirs(ours, plan.sizes)):
                    writer.write(piece.name, tensor, piece.index)
                bar.step()
                continue
            amax = _input_amax(link, choice, amaxes)
            packed = quantize_link(plan, link, ours, choice.specs[link], choice.cuts.get(link))
            for piece, weight in zip(link.theirs, packed):
                made = packed_tensors(options.layout, piece.name, weight, amax)
                for name, tensor in made.items():
                    writer.write(name, tensor)
            bar.step()
    writer.finish()
    high = high_modules(plain, names)
    if options.layout == "modelopt":
        about = json.dumps(hf_quant_config(options.format, high), indent=2) + "\n"
        (folder / "hf_quant_config.json").write_text(about)
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    return {
        **hf_config,
        "dtype": dtype[checkpoint.config.train.dtype],
        "quantization_config": quantization_config(options.layout, options.format, high),
    }


def _specs(
    plan: Plan, choice: Choice, plain: Mapping[str, TensorSpec], layout: str
) -> tuple[dict[str, TensorSpec], list[str]]:
    """(all tensors of the folder, names of the weights that are packed)."""
    specs, names = {}, []
    for link in plan.links:
        if link not in choice.specs:
            specs.update({piece.name: plain[piece.name] for piece in link.theirs})
            continue
        rows = [
            torch.zeros(plan.spec(piece).shape[0], plan.spec(piece).shape[-1])[:, :32]
            for piece in link.ours
        ]
        empty = quantize_link(plan, link, rows, choice.specs[link])
        for piece, weight in zip(link.theirs, empty):
            columns = plain[piece.name].shape[1]
            names.append(piece.name)
            for name, spec in packed_specs(layout, piece.name, weight).items():
                shape = spec.shape
                if len(shape) == 2:  # made of 32 columns
                    shape = (shape[0], shape[1] * columns // min(32, columns))
                specs[name] = replace(spec, shape=shape)
    return specs, names


def _input_amax(link: Link, choice: Choice, amaxes: Mapping[str, Sequence[float]]) -> float | None:
    found = amaxes.get(choice.gemms[link])
    if found is None:  # prediction layers are not run; formats without a scale ask for none
        return max((max(values) for values in amaxes.values()), default=None)
    index = link.ours[0].index
    return found[index] if index is not None and len(found) > 1 else max(found)


class QuantizedSource:
    """A checkpoint's tensors with those values in place that the trainer multiplies with."""

    def __init__(self, checkpoint: OpenCheckpoint, choice: Choice) -> None:
        self._reader = checkpoint.reader
        self._links: dict[tuple[str, int | None], Link] = {}
        self._specs, self._cuts = choice.specs, choice.cuts
        for link in choice.specs:
            for piece in link.ours:
                self._links[piece.name, piece.index] = link

    def read_region(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of a tensor, as `TensorReader.read_region`."""
        if (name, None) in self._links:
            whole = self._whole(name, None)
        elif (name, int(offsets[0])) in self._links:
            experts = range(int(offsets[0]), int(offsets[0]) + int(sizes[0]))
            whole = torch.stack([self._whole(name, expert) for expert in experts])
            offsets = [0, *offsets[1:]]
        else:
            return self._reader.read_region(name, offsets, sizes)
        for axis, (start, size) in enumerate(zip(offsets, sizes)):
            whole = whole.narrow(axis, start, size)
        return whole

    def _whole(self, name: str, index: int | None) -> Tensor:
        link = self._links[name, index]
        ours = [self._reader.read(piece.name, piece.index) for piece in link.ours]
        values = dequantized_ours(ours, self._specs[link], self._cuts.get(link))
        return values[[piece.name for piece in link.ours].index(name)]


def _without_order(value: Any) -> Any:
    """Plain data whose lists of names compare as sets, and without who wrote it."""
    if isinstance(value, dict):
        return {k: _without_order(v) for k, v in value.items() if k != "producer"}
    return sorted(value) if isinstance(value, list) else value


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


@dataclass
class Packing:
    """A packed folder and what it was made from, for the proof."""

    checkpoint: OpenCheckpoint
    family: Family
    plan: Plan
    choice: Choice
    layout: str
    format: str

    def verify(self, folder: Path, hf_config: dict[str, Any], *, show: bool = True) -> Verdict:
        """Names, codes, what an independent reader makes of them, and logits."""
        verdict, source = Verdict(), SafetensorsFolder(folder)
        plain = self.plan.theirs()
        wanted, names = _specs(self.plan, self.choice, plain, self.layout)
        ours, theirs = self.checkpoint.section, read_section(hf_config)
        found = differences(architecture(ours), architecture(theirs))
        verdict.problems += [f"configuration: {line}" for line in found]
        verdict.problems += self._quantization(folder, hf_config, high_modules(plain, names))
        verdict.problems += [f"{n} is missing" for n in sorted(set(wanted) - set(source))[:6]]
        verdict.problems += [f"{n} is left over" for n in sorted(set(source) - set(wanted))[:6]]
        if not verdict.problems:
            self._compare(source, verdict, show)
            verdict.values = len(wanted)
        if not verdict.problems:
            again = sum(name in self.choice.again for name in self.choice.gemms.values())
            verdict.notes.append(
                f"{len(names)} weights are in codes, read back by compressed-tensors and equal to "
                + ("the trainer's values" if not again else "what quantizing them again gives")
            )
            self._prove(folder, source, hf_config, verdict, show)
        return verdict

    def _quantization(
        self, folder: Path, hf_config: dict[str, Any], high: Sequence[str]
    ) -> list[str]:
        """What engines are told of the weights, where it is not what the files hold."""
        told = {"config.json": hf_config.get("quantization_config")}
        wanted: dict[str, Any] = {
            "config.json": quantization_config(self.layout, self.format, high)
        }
        if self.layout == "modelopt":
            name, path = "hf_quant_config.json", folder / "hf_quant_config.json"
            told[name] = json.loads(path.read_bytes()) if path.is_file() else None
            wanted[name] = hf_quant_config(self.format, high)
        return [
            f"{name}: its description of quantized layers is not that of the tensors; export again"
            for name in wanted
            if _without_order(told[name]) != _without_order(wanted[name])
        ]

    def _compare(self, source: SafetensorsFolder, verdict: Verdict, show: bool) -> None:
        if (problem := reader_problem()) is not None:
            verdict.problems.append(problem)
            return
        with Bar("values", len(self.plan.links), show=show) as bar:
            for link in self.plan.links:
                ours = [self.checkpoint.reader.read(p.name, p.index) for p in link.ours]
                if link in self.choice.specs:
                    verdict.problems += self._compare_packed(link, ours, source)
                else:
                    made = link.shape.to_theirs(ours, self.plan.sizes)
                    verdict.problems += [
                        f"{piece}: values differ from the checkpoint's"
                        for piece, tensor in zip(link.theirs, made)
                        if not torch.equal(tensor, source.read(piece.name, piece.index))
                    ]
                bar.step()

    def _compare_packed(
        self, link: Link, ours: list[Tensor], source: SafetensorsFolder
    ) -> list[str]:
        problems, spec = [], self.choice.specs[link]
        packed = quantize_link(self.plan, link, ours, spec, self.choice.cuts.get(link))
        for piece, weight in zip(link.theirs, packed):
            for name, tensor in packed_tensors(self.layout, piece.name, weight, 1.0).items():
                stored = source.read(name)
                if name.endswith(("input_scale", "input_global_scale")):
                    if not (bool(torch.isfinite(stored).all()) and bool((stored > 0).all())):
                        problems.append(f"{name} is {stored.tolist()}, and must be positive")
                elif not _same_bytes(tensor, stored):
                    problems.append(f"{name}: not the trainer's codes or scales")
            read = read_independently(self.layout, piece.name, source, weight.spec.format)
            values = weight.values()
            # The reader multiplies in another order: two FP32 roundings on either side.
            if not torch.allclose(read, values, rtol=2**-21, atol=0):
                gap = (read - values).abs().amax().item()
                problems.append(f"{piece}: compressed-tensors reads other values, by {gap:.3g}")
        return problems

    def _prove(
        self,
        folder: Path,
        source: SafetensorsFolder,
        hf_config: dict[str, Any],
        verdict: Verdict,
        show: bool,
    ) -> None:
        judge = Judge(folder, DecodedFolder(source, torch.float32))  # type: ignore[arg-type]
        quantized = QuantizedSource(self.checkpoint, self.choice)
        ours = StreamedModel(self.checkpoint.section, quantized, process_groups())
        verdict.logits = compare_logits(
            ours,
            judge,
            self.family,
            hf_config,
            vocab_size=self.checkpoint.vocab_size,
            show=show,
        )
        if verdict.logits.problem:
            verdict.problems.append(verdict.logits.problem)


def open_packing(
    checkpoint: OpenCheckpoint, folder: Path, hf_config: dict[str, Any], options: PackOptions
) -> Packing:
    """A packed folder beside the checkpoint it is said to come from. ConfigError."""
    about = hf_config["quantization_config"]
    method = about.get("quant_method")
    options.layout = "compressed-tensors" if method == "compressed-tensors" else "modelopt"
    kinds = {(4, 16): "nvfp4", (8, 32): "mxfp8", (8, None): "fp8"}
    try:
        weights = about["config_groups"]["group_0"]["weights"]
        options.format = kinds[weights["num_bits"], weights.get("group_size")]
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(
            "quantization_config is not that of an export of ours in nvfp4, mxfp8 or fp8, which "
            f"has one group of layers; got {about.get('config_groups')}; pass --decode to compare "
            "decoded values"
        ) from None
    family, _ = export_config(checkpoint, hf_config.get("model_type"))
    plan = export_plan(checkpoint, family)
    choice = chosen(checkpoint, plan, options)
    return Packing(checkpoint, family, plan, choice, options.layout, options.format)
