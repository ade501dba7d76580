# SPDX-License-Identifier: Apache-2.0
"""New checkpoints from old ones: a dense model becomes experts; several become their average."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from models.config import ModelConfig
from models.conversion.expected import Expected, expected_tensors
from models.conversion.plan import ProofError
from models.conversion.proof import TOLERANCE
from models.conversion.sections import architecture, differences
from models.conversion.streamed import StreamedModel
from models.pattern import parse_pattern
from pretrain.checkpoint.io import file_entry, remove_folder
from pretrain.checkpoint.layout import COMPLETE, seal, step_folder
from pretrain.checkpoint.tensors import TensorReader, TensorWriter
from pretrain.config import make_config
from pretrain.config_file import encode
from pretrain.conversion.importing import carry_files, fresh_folder, write_state
from pretrain.conversion.opened import CARRIED, OpenCheckpoint, process_groups
from pretrain.conversion.progress import Bar

_MLP = ".mlp."


def average(checkpoints: Sequence[OpenCheckpoint], target: Path, *, show: bool = True) -> Path:
    """The mean of the weights of several checkpoints of one model, as a checkpoint of weights.

    Sums are taken in FP32, one piece of a tensor at a time. The step is the newest one's.
    """
    if len(checkpoints) < 2:
        raise ConfigError(f"an average is of at least 2 checkpoints; got {len(checkpoints)}")
    first = max(checkpoints, key=lambda checkpoint: checkpoint.step)
    ours = architecture(first.section)
    for other in checkpoints:
        if lines := differences(ours, architecture(other.section)):
            raise ConfigError([f"{other.path} is another model: {line}" for line in lines])
        other.tensors()
    share = 1.0 / len(checkpoints)

    def value(name: str, index: int | None) -> Tensor:
        total = torch.zeros(())
        for checkpoint in checkpoints:
            total = total + share * checkpoint.reader.read(name, index).float()
        return total

    about = {"averaged": [str(checkpoint.path) for checkpoint in checkpoints]}
    return _write(first, first.section, first.step, value, target, about, show)


def upcycle(
    dense: OpenCheckpoint,
    target: Path,
    *,
    experts: int,
    topk: int,
    pattern: str | None = None,
    show: bool = True,
) -> tuple[Path, float]:
    """A dense model's MLPs become layers of equal experts: its logits stay, in any top-k.

    Args:
        pattern: the new one, with `E` where a `-` shall be experts; None: everywhere.

    Returns:
        The checkpoint (step 0, weights alone), and the largest relative difference of FP32 logits.
    """
    section = _with_experts(dense.section, experts, topk, pattern)
    changed = [
        position
        for position, (a, b) in enumerate(
            zip(parse_pattern(dense.section.pattern).layers, parse_pattern(section.pattern).layers)
        )
        if a != b
    ]
    std = section.init_std or 0.02
    places = {f"decoder.layers.{position}{_MLP}" for position in changed}

    def value(name: str, index: int | None) -> Tensor:
        place = next((p for p in places if name.startswith(p)), None)
        if place is None:
            return dense.reader.read(name, index)
        rest = name.removeprefix(place)
        if rest.startswith("experts."):
            return dense.reader.read(place + rest.removeprefix("experts."))
        if rest == "router.weight":  # what it says does not change the sum of equal experts
            generator = torch.Generator().manual_seed(int(place.split(".")[2]))
            return torch.randn(experts, section.megatron["hidden_size"], generator=generator) * std
        return torch.zeros(experts)  # biases of the router

    path = _write(dense, section, 0, value, target, {"upcycled": str(dense.path)}, show)
    gap = _logits_gap(dense, section, path)
    if not gap <= TOLERANCE:
        remove_folder(path, COMPLETE)
        raise ProofError(
            f"logits differ from the dense model's by {gap:.3g}, allowed {TOLERANCE:g}"
        )
    return path, gap


def _with_experts(
    section: ModelConfig, experts: int, topk: int, pattern: str | None
) -> ModelConfig:
    old = section.pattern.replace("|", "")
    new = pattern.replace("|", "") if pattern is not None else old.replace("-", "E")
    problems = []
    if len(new) != len(old) or any(b != a and (a, b) != ("-", "E") for a, b in zip(old, new)):
        problems.append(
            f"--pattern must equal the model's {old!r} but for '-' that become 'E'; got {new!r}"
        )
    elif new == old:
        problems.append(f"the model's pattern {old!r} has no '-' to become experts")
    if "E" in old or "/" in old:
        problems.append(f"only a dense model without prediction becomes experts; it is {old!r}")
    if experts < 2:
        problems.append(f"--experts must be at least 2; got {experts}")
    elif not 2 <= topk <= experts:
        problems.append(
            f"--topk must lie in 2 to --experts={experts} (the weights of one expert alone do not "
            f"add up to 1); got {topk}"
        )
    if not section.megatron.get("ffn_hidden_size"):
        problems.append("the model does not say ffn_hidden_size, the width of its experts")
    if problems:
        raise ConfigError(problems)
    fields = {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": section.megatron["ffn_hidden_size"],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,  # weights of the chosen add up to 1
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-3,
        "moe_router_dtype": "fp32",
    }
    return replace(section, preset=None, pattern=new, megatron={**section.megatron, **fields})


def _write(
    source: OpenCheckpoint,
    section: ModelConfig,
    step: int,
    value: Callable[[str, int | None], Tensor],
    target: Path,
    about: dict[str, Any],
    show: bool,
) -> Path:
    """A checkpoint of weights whose tensors `value` gives, an entry at a time where stacked."""
    values = encode(source.config)
    model = {k: v for k, v in encode(section).items() if k != "preset" and v is not None}
    # Precision is the new run's to say: its rules name layers.
    config = make_config(
        {"run": values["run"], "model": model, "data": values["data"], "train": values["train"]}
    )
    expected = expected_tensors(
        section, source.vocab_size, config.train.torch_dtype, process_groups()
    )
    folder = step_folder(Path(target), step)
    with fresh_folder(Path(target), folder):
        writer = TensorWriter(folder)
        with Bar("writing", len(expected.tensors), show=show) as bar:
            for name in expected.tensors:
                for index, tensor, offsets in _pieces(name, expected, value):
                    del index
                    writer.add(name, tensor, expected.tensors[name].shape, offsets)
                bar.step()
        for name, thing in expected.objects.items():
            writer.add_object(name, thing)
        names = writer.finish()
        files = source.carried()
        if "upcycled" in about:  # config.json is of another model now
            files.pop("config.json", None)
        names += carry_files(files.values(), folder, CARRIED)
        names.append(write_state(folder, encode(config), {"step": step, **about}))
        seal(folder, step, {name: file_entry(folder / name) for name in names})
    return folder


def _pieces(
    name: str, expected: Expected, value: Callable[[str, int | None], Tensor]
) -> Iterator[tuple[int | None, Tensor, list[int]]]:
    spec = expected.tensors[name]
    offsets = [0] * len(spec.shape)
    if ".experts." not in name or len(spec.shape) < 2:
        yield None, value(name, None).to(spec.dtype), offsets
        return
    for index in range(spec.shape[0]):
        yield index, value(name, index).to(spec.dtype).unsqueeze(0), [index, *offsets[1:]]


def _logits_gap(dense: OpenCheckpoint, section: ModelConfig, path: Path) -> float:
    """Largest relative difference of FP32 logits of random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, dense.vocab_size, (2, 48), generator=generator)
    models = (
        StreamedModel(dense.section, dense.reader, process_groups()),
        StreamedModel(section, TensorReader(path), process_groups()),
    )
    logits = []
    for model in models:
        hidden = model.embed(ids)
        for position in range(len(model.pattern.layers)):
            hidden = model.layer(position, hidden)
        logits.append(model.head(hidden, dense.vocab_size))
    gap = (logits[0] - logits[1]).abs().amax() / logits[0].abs().amax()
    return float(gap)
