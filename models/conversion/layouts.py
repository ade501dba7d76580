# SPDX-License-Identifier: Apache-2.0
"""How inference engines find packed weights: names, scales and configuration files.

`modelopt` is what TensorRT-LLM, vLLM and SGLang read beside hf_quant_config.json;
`compressed-tensors` is vLLM's own. They differ in names, and in that the latter stores the inverse
of NVFP4's tensor scales.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from models.conversion.quantized import Packed
from models.conversion.safetensors import TensorSpec

LAYOUTS = ("modelopt", "compressed-tensors")
SMALLEST_AMAX = 1e-4
"""Activations of a layer that calibration saw only zeros of are taken to reach this."""
_NVFP4_MAX, _FP8_MAX = 6.0 * 448.0, 448.0


def packed_tensors(
    layout: str, weight: str, packed: Packed, input_amax: float | None
) -> dict[str, Tensor]:
    """The tensors that stand for one weight `X.weight`, by name.

    Args:
        input_amax: largest input of the layer in calibration; None for formats that scale
            activations as they come.
    """
    base = weight.removesuffix(".weight")
    inverse = layout == "compressed-tensors"
    if packed.spec.format == "nvfp4":
        amax = max(input_amax or 0.0, SMALLEST_AMAX)
        scales = packed.scales.view(torch.float8_e4m3fn)
        if inverse:
            return {
                f"{base}.weight_packed": packed.codes,
                f"{base}.weight_scale": scales,
                f"{base}.weight_global_scale": (1.0 / packed.factor).view(1),
                f"{base}.input_global_scale": torch.tensor([_NVFP4_MAX / amax]),
            }
        return {
            f"{base}.weight": packed.codes,
            f"{base}.weight_scale": scales,
            f"{base}.weight_scale_2": packed.factor.view(()),
            f"{base}.input_scale": torch.tensor(amax / _NVFP4_MAX),
        }
    found = {f"{base}.weight": packed.codes.view(torch.float8_e4m3fn)}
    if packed.spec.format == "mxfp8":
        return found | {f"{base}.weight_scale": packed.scales}
    amax, shape = max(input_amax or 0.0, SMALLEST_AMAX), (1,) if inverse else ()
    return found | {
        f"{base}.weight_scale": packed.scales.reshape(shape),
        f"{base}.input_scale": torch.tensor(amax / _FP8_MAX).reshape(shape),
    }


def packed_specs(layout: str, weight: str, packed: Packed) -> dict[str, TensorSpec]:
    """Shapes and dtypes of `packed_tensors`."""
    made = packed_tensors(layout, weight, packed, 1.0)
    return {name: TensorSpec(tuple(t.shape), t.dtype) for name, t in made.items()}


def quantization_config(layout: str, wanted: str, high: Sequence[str]) -> dict[str, Any]:
    """The entry `quantization_config` of config.json.

    Args:
        wanted: nvfp4, mxfp8 or fp8.
        high: modules that keep their weights.
    """
    weights, inputs = _arguments(wanted)
    if layout == "compressed-tensors":
        kind = {"nvfp4": "nvfp4-pack-quantized", "mxfp8": "mxfp8-quantized"}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": inputs,
            "output_activations": None,
            "format": kind.get(wanted, "float-quantized"),
        }
        return {
            "quant_method": "compressed-tensors",
            "format": kind.get(wanted, "float-quantized"),
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(high),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }
    plain = ("num_bits", "type", "group_size", "dynamic")
    group = {
        "targets": ["Linear"],
        "weights": {k: v for k, v in weights.items() if k in plain and v is not None},
        "input_activations": {
            **{k: v for k, v in inputs.items() if k in plain and v is not None},
            "dynamic": wanted == "mxfp8",
        },
    }
    return {
        "quant_method": "modelopt",
        "quant_algo": wanted.upper(),
        "kv_cache_scheme": None,
        "producer": _PRODUCER,
        "config_groups": {"group_0": group},
        "ignore": list(high),
    }


_PRODUCER = {"name": "modelopt", "version": "0.41.0", "written_by": "nibble"}


def hf_quant_config(wanted: str, high: Sequence[str]) -> dict[str, Any]:
    """hf_quant_config.json, which the modelopt layout has beside config.json."""
    about: dict[str, Any] = {"quant_algo": wanted.upper(), "kv_cache_quant_algo": None}
    if wanted != "fp8":
        about["group_size"] = 16 if wanted == "nvfp4" else 32
    return {"producer": _PRODUCER, "quantization": {**about, "exclude_modules": list(high)}}


def _arguments(wanted: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and inputs in the words of compressed-tensors."""
    common = {"type": "float", "symmetric": True}
    if wanted == "nvfp4":
        both = {**common, "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
        both["scale_dtype"] = "torch.float8_e4m3fn"
        return {**both, "dynamic": False}, {**both, "dynamic": "local"}
    if wanted == "mxfp8":
        both = {**common, "num_bits": 8, "strategy": "group", "group_size": 32}
        both["scale_dtype"] = "torch.uint8"
        return {**both, "dynamic": False}, {**both, "dynamic": True}
    both = {**common, "num_bits": 8, "strategy": "tensor", "dynamic": False}
    return dict(both), dict(both)


def high_modules(theirs: Mapping[str, TensorSpec], quantized: Sequence[str]) -> list[str]:
    """Modules of the folder that keep their weights: matrices, and experts in one tensor."""
    packed = set(quantized)
    found = []
    for name, spec in theirs.items():
        if len(spec.shape) == 3 and ".experts." in name:
            module = name.rpartition(".")[0]
            if module not in found:
                found.append(module)
        if name in packed or not name.endswith(".weight") or len(spec.shape) != 2:
            continue
        if "embed" in name or "conv" in name:
            continue
        found.append(name.removesuffix(".weight"))
    if "lm_head" not in found:
        found.append("lm_head")  # tied, or stored under the embedding's name
    return found
