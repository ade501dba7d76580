# SPDX-License-Identifier: Apache-2.0
"""The weights that a model multiplies with, as codes: taken out of one model, put into another."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.linear import LinearCall, LocalComm
from fused_ops.recipe import is_quantized
from fused_ops.weight_operands import give_weight_codes, weight_operand
from models.generation.cached_model import backend_problems, cache_problems
from models.parallel_linear import GemmModule
from models.precision import unwrap
from models.quantized_weight import weight_matrices

PARTS = ("codes", "scales", "amax")


def pack_weights(model: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All that a model needs to run forward, in the precision that it has now.

    Args:
        model: a whole model in one process, in any wrapper, with its precision applied.

    Returns:
        Tensors by name, on the CPU: the parts of codes under `NAME:codes`, `:scales` and `:amax`
        (NAME is a parameter's, for a stack of experts with `[e]`), other parameters and buffers
        under their own; and {NAME: its shape and format} of the codes, plain values.

    Raises:
        ConfigError: a model that is cut over processes.
    """
    inner = unwrap(model)
    if problems := cache_problems(inner) + backend_problems(inner, "a hand-over of codes"):
        raise ConfigError(problems)
    tensors: dict[str, Tensor] = {}
    formats: dict[str, Any] = {}
    packed = set()
    for parameter, name, weight, call, expert in _quantized(inner):
        codes = weight_operand(call, "fprop.w", weight.detach(), expert)
        assert isinstance(codes, QuantizedTensor), f"{name} is quantized"
        packed.add(parameter)
        formats[name] = {"shape": list(codes.shape), "spec": asdict(codes.spec)}
        tensors |= {f"{name}:{part}": getattr(codes, part) for part in PARTS}
    for name, tensor in _others(inner).items():
        if name not in packed:
            tensors[name] = tensor
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, formats


def weight_problems(
    model: Any, tensors: Mapping[str, Tensor], formats: Mapping[str, Any]
) -> list[str]:
    """Why packed weights do not fit a model in the precision that it has now."""
    inner = unwrap(model)
    problems = backend_problems(inner, "a hand-over of codes")
    wanted: set[str] = set()
    packed = set()
    for parameter, name, weight, call, _ in _quantized(inner):
        packed.add(parameter)
        wanted |= {f"{name}:{part}" for part in PARTS}
        if name not in formats:
            problems.append(f"{name} must be codes, and came without")
            continue
        spec, shape = OperandSpec(**formats[name]["spec"]), tuple(formats[name]["shape"])
        if spec != call.spec("fprop.w") or shape != tuple(weight.shape):
            problems.append(
                f"{name} must be {tuple(weight.shape)} in {call.spec('fprop.w').label!r}, and came "
                f"as {shape} in {spec.label!r}"
            )
    for name, tensor in _others(inner).items():
        if name in packed:
            continue
        wanted.add(name)
        found = tensors.get(name)
        if found is not None and (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            problems.append(
                f"{name} must be {tuple(tensor.shape)} {tensor.dtype}, and came as "
                f"{tuple(found.shape)} {found.dtype}"
            )
    problems += [f"{name} is missing" for name in sorted(wanted - set(tensors))]
    problems += [f"{name} is not of this model" for name in sorted(set(tensors) - wanted)]
    return problems


@torch.no_grad()
def install_weights(model: Any, tensors: Mapping[str, Tensor], formats: Mapping[str, Any]) -> None:
    """Multiply with these weights from now on, codes as they are: nothing is quantized again.

    A parameter whose codes are given takes what they decode to, rounded to its type.

    Raises:
        ConfigError: they do not fit; the model is then as it was.
    """
    inner = unwrap(model)
    if problems := weight_problems(inner, tensors, formats):
        raise ConfigError(problems[:8])
    for name, tensor in _others(inner).items():
        if name in tensors:
            tensor.copy_(tensors[name])
    found = list(_quantized(inner))
    codes = []
    for _, name, weight, call, _ in found:
        parts = {part: tensors[f"{name}:{part}"].to(weight.device) for part in PARTS}
        spec = OperandSpec(**formats[name]["spec"])
        codes.append(QuantizedTensor(shape=(weight.shape[0], weight.shape[1]), spec=spec, **parts))
        weight.copy_(codes[-1].dequantize(weight.dtype))
        assert call.weight_codes is not None, "layers keep codes"
    # Only now: experts share one parameter, whose version each copy has raised.
    for (_, _, weight, call, expert), each in zip(found, codes):
        give_weight_codes(call, weight, each, expert)


def release_weights(model: Any) -> None:
    """Quantize the model's own parameters again."""
    for module in unwrap(model).modules():
        if isinstance(module, GemmModule):
            module.weight_codes.release()


def _quantized(model: Any) -> Iterator[tuple[str, str, Tensor, LinearCall, int]]:
    """(parameter, name, weight [out, in], call, expert) of each weight that is made of codes."""
    for path, module in model.named_modules():
        if not isinstance(module, GemmModule) or not is_quantized(module.recipe.spec("fprop", "w")):
            continue
        name, stacked = f"{path}.weight", module.weight.dim() == 3
        for expert, weight, call in weight_matrices(module, LocalComm()):
            yield name, f"{name}[{expert}]" if stacked else name, weight, call, expert


def _others(model: Any) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name."""
    state = model.state_dict(keep_vars=True)
    return {name: t.data for name, t in state.items() if isinstance(t, Tensor)}
