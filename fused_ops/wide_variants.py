# SPDX-License-Identifier: Apache-2.0
"""What is launched of MX, FP8 blocks, MS-EDEN, long rotations and decoders, to compile ahead."""

from typing import Any

Variant = dict[str, Any]
"""One kernel with its compile-time arguments: fields of tools.compile_kernels.Variant."""


def _variant(
    kernel: str,
    label: str,
    constants: dict[str, Any],
    warps: int,
    types: dict[str, str],
    **rest: Any,
) -> Variant:
    names = {"kernel": kernel, "label": label, "constants": constants, "warps": warps}
    return names | {"types": types} | rest


def wide_variants() -> list[Variant]:
    """Quantizers of long pieces along both axes, as the named recipes use them."""
    from fused_ops.quantize.triton_launch import WIDE_TILE

    lanes, warps = WIDE_TILE["lanes"], WIDE_TILE["warps"]
    base: dict[str, Any] = {
        "BF16": True, "ROTATION": 0, "SIZE": 32, "KIND": 1, "ELEMENT": 0, "NUMERATOR": 1 / 6,
        "CAP": 3.3895313892515355e38, "POW2": False, "EDEN": False, "STOCHASTIC": False,
        "ROW_SCALED": False, "TILE": 1, "FORM": 0, "SHIFT": 0, "KEY_ON_DEVICE": True,
        "LANES": lanes,
    }  # fmt: skip
    v2 = {"KIND": 0, "SIZE": 128, "ROTATION": 128}
    fp8 = {"KIND": 2, "SIZE": 128, "ELEMENT": 1, "NUMERATOR": 448.0}
    kinds: dict[str, dict[str, Any]] = {
        "mxfp8": {"ELEMENT": 1, "NUMERATOR": 1 / 448},
        "mxfp4": {},
        "mxfp4 32x32": {"TILE": 32},
        "mxfp4 hadamard32 stochastic": {"ROTATION": 32, "STOCHASTIC": True},
        "fp8 1x128 pow2": fp8 | {"POW2": True},
        "fp8 128x128": fp8 | {"TILE": 128},
        "hadamard128 of fp32": v2 | {"NUMERATOR": 2688.0, "BF16": False},
        "hadamard128 to bf16": v2 | {"NUMERATOR": 2688.0, "FORM": 2},
        "ms_eden hadamard128": v2 | {"NUMERATOR": 1536.0, "EDEN": True},
        "ms_eden hadamard128 to bf16": v2 | {"NUMERATOR": 1536.0, "EDEN": True, "FORM": 2},
        "row scaled": {"KIND": 0, "SIZE": 16, "NUMERATOR": 2688.0, "ROW_SCALED": True},
    }
    found = []
    for columns in (False, True):
        side = " columns" if columns else " rows"
        types = {"x_ptr": "*i16", "codes_ptr": "*u8"}
        for label, changes in kinds.items():
            flat = {"COLUMNS": columns, "FLAT": not columns and "TILE" not in changes}
            kind = types | ({"scales_ptr": "*fp32"} if changes.get("KIND") == 2 else {})
            found.append(
                _variant("quantize_wide", label + side, base | changes | flat, warps, kind)
            )
        turned = {"BF16": True, "COLUMNS": columns, "ROTATION": 128, "SIZE": 128, "LANES": lanes}
        turned["FLAT"] = not columns
        found.append(_variant("wide_amax", "hadamard128" + side, turned, warps, types))
    return found + _decoders() + _products()


def _products() -> list[Variant]:
    """FP8 blocks with fp32 scales: by a weight's tiles, and into the fp32 gradient."""
    from fused_ops.scaled_matmul.blockwise import TILE

    types = {"a_ptr": "*u8", "b_ptr": "*u8", "a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32"}
    base: dict[str, Any] = {"A_E5M2": False, "B_E5M2": False, "A_TILE": 1, "CORES": True}
    base |= {"M": TILE["m"], "N": TILE["n"]}
    return [
        _variant(
            "blockwise_matmul", label, base | changes, TILE["warps"], types | {"out_ptr": out},
            op="scaled_matmul", stages=TILE["stages"],
        )
        for label, changes, out in (
            ("128x128 to bf16", {"B_TILE": 128, "ACCUMULATE": False}, "*bf16"),
            ("1x128 into fp32", {"B_TILE": 1, "ACCUMULATE": True}, "*fp32"),
        )
    ]  # fmt: skip


def _decoders() -> list[Variant]:
    """Codes of block formats to operands of BF16 cores, and a weight's to fp32."""
    from fused_ops.quantize.triton_launch import DECODE_TILE

    tile = {"ROWS": DECODE_TILE["rows"], "COLS": DECODE_TILE["cols"], "ROW_SCALED": False}
    kinds: dict[str, tuple[dict[str, Any], str]] = {
        "nvfp4 to fp32": ({"BLOCK": 16, "NUMERATOR": 1536.0}, "*u8"),
        "mxfp4 32x32": ({"SCALE": 1, "TILE": 32}, "*u8"),
        "mxfp8": ({"ELEMENT": 1, "SCALE": 1}, "*u8"),
        "fp8 128x128": ({"ELEMENT": 1, "SCALE": 2, "BLOCK": 128, "TILE": 128}, "*fp32"),
    }
    base = {"ELEMENT": 0, "SCALE": 0, "BLOCK": 32, "TILE": 1, "NUMERATOR": 0.0}
    return [
        _variant(
            "decode_codes", label, base | tile | changes, DECODE_TILE["warps"],
            {
                "codes_ptr": "*u8", "scales_ptr": scales,
                "out_ptr": "*fp32" if "fp32" in label else "*bf16",
            },
        )
        for label, (changes, scales) in kinds.items()
    ]  # fmt: skip
