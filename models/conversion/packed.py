# SPDX-License-Identifier: Apache-2.0
"""Model folders whose weights are packed: recognized by name and dtype, refused or decoded.

NVFP4, ModelOpt            X.weight (U8), X.weight_scale (E4M3), X.weight_scale_2
NVFP4, compressed-tensors  X.weight_packed (U8), X.weight_scale (E4M3), X.weight_global_scale
MXFP8                      X.weight (E4M3), X.weight_scale (U8, E8M0, one for 32 columns)
FP8                        X.weight (E4M3), X.weight_scale (one, or one a row)
FP8 in blocks              X.weight (E4M3), X.weight_scale_inv (one for 128 x 128)
MXFP4 of GPT-OSS           X_blocks (U8), X_scales (U8), stacked over experts
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_ops.codecs import decode_e2m1, decode_e8m0, decode_fp8
from fused_ops.errors import ConfigError
from models.conversion.safetensors import SafetensorsFolder, TensorSpec

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_CODES = dict.fromkeys(("fp8", "fp8_blocks", "mxfp8"), _FP8)
# Scales that belong to activations or caches; decoded weights do not need them.
_ACTIVATION = ("*.input_scale", "*.input_global_scale", "*.k_scale", "*.v_scale")


@dataclass(frozen=True)
class _Packed:
    """One packed weight: its kind and the names of its parts."""

    kind: str
    parts: tuple[str, ...]
    spec: TensorSpec

    def problem(self, source: SafetensorsFolder) -> str | None:
        """A part that is absent, or of a shape or dtype that its kind does not have."""
        absent = [part for part in self.parts if part not in source]
        if absent:
            return f"{absent[0]} is absent, which {self.parts[0]} needs to be decoded"
        codes, scale = (source.spec(part) for part in self.parts[:2])
        *stack, rows, columns = self.spec.shape
        kinds: dict[str, list[tuple[int, ...]]] = {
            "nvfp4": [(*stack, rows, columns // 16)],
            "nvfp4_inverse": [(*stack, rows, columns // 16)],
            "mxfp8": [(*stack, rows, -(-columns // 32))],
            "fp8": [(), (1,), (1, 1), (rows,), (rows, 1)],
            "fp8_blocks": [(-(-rows // 128), -(-columns // 128))],
            "mxfp4_experts": [codes.shape[:-1]],
        }
        shapes = kinds[self.kind]
        if scale.shape not in shapes:
            return (
                f"{self.parts[1]} is of shape {scale.shape} for a weight of {self.spec.shape} in "
                f"{self.kind}, and must be of {' or '.join(map(str, shapes))}"
            )
        if len(self.parts) == 3 and source.spec(self.parts[2]).shape not in ((), (1,)):
            return f"{self.parts[2]} must be one number, and is {source.spec(self.parts[2]).shape}"
        wanted = _CODES.get(self.kind, (torch.uint8,))
        if codes.dtype not in wanted:
            return f"{self.parts[0]} is {codes.dtype}, and codes of {self.kind} are {wanted[0]}"
        return None


def packed_weights(source: SafetensorsFolder) -> dict[str, _Packed]:
    """{name of the weight: how it is packed}."""
    found: dict[str, _Packed] = {}
    parts: tuple[str, ...]
    for name in source:
        spec = source.spec(name)
        if len(spec.shape) < 2:
            continue
        if name.endswith(".weight_packed"):
            base = name.removesuffix("_packed")
            parts = (name, f"{base}_scale", f"{base}_global_scale")
            kind, shape = "nvfp4_inverse", (*spec.shape[:-1], 2 * spec.shape[-1])
        elif (
            name.endswith("_blocks")
            and len(spec.shape) == 4
            and name.removesuffix("_blocks") + "_scales" in source
        ):
            base = name.removesuffix("_blocks")
            parts = (name, f"{base}_scales")
            experts, rows, blocks, width = spec.shape
            kind, shape = "mxfp4_experts", (experts, blocks * width * 2, rows)
        elif name.endswith(".weight") and spec.dtype is torch.uint8:
            base, kind, shape = name, "nvfp4", (*spec.shape[:-1], 2 * spec.shape[-1])
            parts = (name, f"{name}_scale", f"{name}_scale_2")
        elif spec.dtype in _FP8 and not name.endswith("_scale"):
            base, shape = name, spec.shape
            blocks = f"{name}_scale_inv" in source
            parts = (name, f"{name}_scale_inv" if blocks else f"{name}_scale")
            kind = "fp8_blocks" if blocks else "fp8"
            if not blocks and parts[1] in source and source.spec(parts[1]).dtype in _E8M0:
                kind = "mxfp8"
        else:
            continue
        found[base] = _Packed(kind, parts, TensorSpec(tuple(shape), torch.bfloat16))
    return found


def packed_problem(hf_config: Mapping[str, Any], source: SafetensorsFolder) -> str | None:
    """Why a folder is not taken as it is; None when its weights are plain."""
    weights = packed_weights(source)
    method = (hf_config.get("quantization_config") or {}).get("quant_method")
    if not weights and not method:
        return None
    if not weights:
        return (
            f"HF_DIR says quantization_config {method!r}, and its tensors are of no packed kind "
            "known here; take the model's unquantized folder"
        )
    name, packed = next(iter(weights.items()))
    bits = "4 bits" if "4" in packed.kind else "8 bits"
    return (
        f"HF_DIR must hold plain weights; {len(weights)} are packed in {bits} ({name} is "
        f"{packed.kind}), and decoding them gives weights that were rounded once already: take the "
        "unquantized folder, or pass --decode if that is meant"
    )


class DecodedFolder:
    """A packed folder that gives its weights decoded (to BF16), one at a time.

    ConfigError where the parts of a weight are not those of its kind.
    """

    def __init__(self, source: SafetensorsFolder, dtype: torch.dtype = torch.bfloat16) -> None:
        self._source, self._packed, self._dtype = source, packed_weights(source), dtype
        problems = [p for packed in self._packed.values() if (p := packed.problem(source))]
        if problems:
            more = [f"and {len(problems) - 6} more"] if len(problems) > 6 else []
            raise ConfigError([*problems[:6], *more])
        parts = {part for packed in self._packed.values() for part in packed.parts}
        self._plain = [
            name
            for name in source
            if name not in parts and not any(fnmatch.fnmatch(name, p) for p in _ACTIVATION)
        ]

    def __iter__(self) -> Iterator[str]:
        yield from self._plain
        yield from self._packed

    def __contains__(self, name: str) -> bool:
        return name in self._packed or name in self._plain

    def spec(self, name: str) -> TensorSpec:
        """Of the decoded tensor."""
        packed = self._packed.get(name)
        if packed is None:
            return self._source.spec(name)
        return replace(packed.spec, dtype=self._dtype)

    def read(self, name: str, index: int | None = None) -> Tensor:
        """The decoded tensor, or entry `index` of its first axis."""
        packed = self._packed.get(name)
        if packed is None:
            return self._source.read(name, index)
        if packed.kind == "mxfp4_experts":
            parts = [self._source.read(part, index) for part in packed.parts]
        else:
            parts = [self._source.read(part) for part in packed.parts]
        whole = _DECODERS[packed.kind](*parts).to(self._dtype)
        return whole if index is None or packed.kind == "mxfp4_experts" else whole[index]


def decoded(hf_config: dict[str, Any], source: SafetensorsFolder) -> DecodedFolder:
    """The folder's weights decoded; its config.json no longer says that they are packed."""
    hf_config.pop("quantization_config", None)
    return DecodedFolder(source)


def decode_nvfp4(codes: Tensor, scales: Tensor, tensor_scale: Tensor) -> Tensor:
    """Codes [rows, cols / 2], E4M3 scales [rows, cols / 16], fp32 factor -> fp32 [rows, cols]."""
    values = decode_e2m1(codes)
    blocks = decode_fp8(scales.view(torch.uint8)).repeat_interleave(16, -1)
    return (values * blocks) * tensor_scale.float()


def _fp8(codes: Tensor, scale: Tensor) -> Tensor:
    scale = scale.float()
    return codes.float() * (scale.view(-1, 1) if scale.numel() > 1 else scale)


def _fp8_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    rows, cols = codes.shape
    whole = scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return codes.float() * whole


def _mxfp8(codes: Tensor, scale: Tensor) -> Tensor:
    blocks = decode_e8m0(scale.view(torch.uint8)).repeat_interleave(32, -1)
    return codes.float() * blocks[:, : codes.shape[-1]]


def _mxfp4_experts(blocks: Tensor, scales: Tensor) -> Tensor:
    values = decode_e2m1(blocks.flatten(0, -2)).view(*blocks.shape[:-1], 32)
    return (values * decode_e8m0(scales).unsqueeze(-1)).flatten(-2).transpose(-1, -2)


_DECODERS: dict[str, Callable[..., Tensor]] = {
    "nvfp4": decode_nvfp4,
    "nvfp4_inverse": lambda codes, scales, factor: decode_nvfp4(codes, scales, 1 / factor.float()),
    "fp8": _fp8,
    "fp8_blocks": _fp8_blocks,
    "mxfp8": _mxfp8,
    "mxfp4_experts": _mxfp4_experts,
}
