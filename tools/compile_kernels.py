# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels for a GPU that need not be there.

    python -m tools.compile_kernels --target sm_90|sm_100|sm_120 [--only NAME]

Prints registers, shared memory and the tensor-core instruction of each variant. Exits 0 only if
all kernels that list the target compile. What is only compiled has not run.
"""

import argparse
import importlib
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fused_ops.wide_variants import wide_variants

TARGETS = ("sm_90", "sm_100", "sm_120")
SHARED_MEMORY = {"sm_90": 232448, "sm_100": 232448, "sm_120": 101376}
"""Bytes that one block of threads may have (CUDA C++ programming guide, compute capabilities)."""
TENSOR_CORE = re.compile(r"\b(wgmma\.mma_async\S*|tcgen05\.mma\S*|mma\.sync\S*)")

_TYPES = {
    "x_ptr": "*i32",
    "amax_ptr": "*fp32",
    "signs_ptr": "*fp32",
    "key_ptr": "*i64",
    "codes_ptr": "*i64",
    "scales_ptr": "*u8",
    "used_ptr": "*fp32",
    "count_ptr": "*i32",
    "out_ptr": "*i32",
    "plain_ptr": "*i32",
    "flag_ptr": "*u8",
}
_ALIGNED = (
    "cols", "blocks", "stride", "words", "row_stride", "col_stride", "features", "size", "width",
    "span", "mixed_s", "mixed_b", "query_s", "query_b", "query_h", "key_s", "key_b", "key_h",
    "value_s", "value_b", "value_h", "n", "k", "m", "stride_a", "stride_b", "expert_b",
)  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time arguments."""

    kernel: str
    label: str
    constants: dict[str, Any]
    warps: int
    types: dict[str, str] = field(default_factory=dict)
    targets: tuple[str, ...] = TARGETS
    op: str = "quantize"
    stages: int = 3


def variants() -> list[Variant]:
    """What is launched in training, with the tiles in use."""
    wide = [Variant(**fields) for fields in wide_variants()]
    return quantizer_variants() + wide + grouped_variants() + _glue_variants()


def _glue_variants() -> list[Variant]:
    """The ops around the products."""
    from fused_ops.embedding.triton_backend import BLOCK, ROWS, WARPS

    types = _bf16("dy", ids_ptr="*i64", order_ptr="*i64", sum_ptr="*fp32")
    shape = {"ROWS": ROWS, "BLOCK": BLOCK}
    rows = Variant("add_rows", "embedding gradient", shape, WARPS, types, op="embedding")
    return [*activation_variants(), *norm_variants(), *loss_variants(), *rope_variants(), rows]


def rope_variants() -> list[Variant]:
    """Queries, keys and values of 4 query heads a group, and queries alone; heads of 128."""
    from fused_ops.rope.triton_backend import HEADS, WARPS

    types = _bf16("mixed", "query", "key", "value", cos_ptr="*fp32", sin_ptr="*fp32")
    shape = {"DIM": 128, "HEADS": HEADS, "BLOCK": 64, "REST": 64}
    kinds = {
        "split": {"QUERIES": 4, "PARTS": 3, "HALF": 64},
        "split, half rotated": {"QUERIES": 4, "PARTS": 3, "HALF": 32},
        "split, not rotated": {"QUERIES": 4, "PARTS": 3, "HALF": 0},
        "queries": {"QUERIES": 32, "PARTS": 1, "HALF": 64},
    }
    return [
        Variant(
            "rotate_heads", label + (" backward" if backward else ""),
            shape | kind | {"BACKWARD": backward}, WARPS, types, op="rope",
        )
        for label, kind in kinds.items()
        for backward in (False, True)
    ]  # fmt: skip


def _bf16(*names: str, **others: str) -> dict[str, str]:
    return {f"{name}_ptr": "*bf16" for name in names} | others


def activation_variants() -> list[Variant]:
    """SwiGLU and squared ReLU, with and without a factor for each row."""
    from fused_ops.activation.triton_backend import BLOCK, WARPS

    types = _bf16("x", "y", "dy", "dx", scale_ptr="*fp32", dscale_ptr="*fp32")
    return [
        Variant(
            kernel, ("swiglu" if gated else "squared relu") + (" scaled" if scaled else ""),
            {"GATED": gated, "SCALED": scaled, "BLOCK": BLOCK}, WARPS, types, op="activation",
        )
        for kernel in ("activation_forward", "activation_backward")
        for gated in (True, False)
        for scaled in (False, True)
    ]  # fmt: skip


def norm_variants() -> list[Variant]:
    """RMSNorm of 4096 features, and of heads of 128."""
    from fused_ops.rmsnorm.triton_backend import tile

    types = _bf16("x", "y", "dy", "dx", "weight", "more", eps="fp32")
    types |= {"rstd_ptr": "*fp32", "partial_ptr": "*fp32", "out_ptr": "*bf16"}
    found = []
    for size in (4096, 128):
        shape = tile(size)
        warps = shape.pop("warps")
        constants: dict[str, Any] = {"ZERO_CENTERED": False, **shape}
        more = constants | {"MORE": True}
        found.append(
            Variant("rmsnorm_forward", f"size {size}", constants, warps, types, op="rmsnorm")
        )
        found.append(Variant("rmsnorm_backward", f"size {size}", more, warps, types, op="rmsnorm"))
    small = {"ROWS": 32, "BLOCK": 32}
    return [*found, Variant("sum_partials", "dweight", small, 4, types, op="rmsnorm")]


def loss_variants() -> list[Variant]:
    """Cross entropy of whole and cut vocabularies."""
    from fused_ops.cross_entropy.triton_backend import BACKWARD_BLOCK, FORWARD_BLOCK, WARPS

    types = _bf16("logits", "out", labels_ptr="*i64")
    types |= {f"{n}_ptr": "*fp32" for n in ("peak", "total", "target", "log_norm", "dy")}
    found = [
        Variant(
            "cross_entropy_forward", label, {"WHOLE": whole, "BLOCK": FORWARD_BLOCK}, WARPS, types,
            op="cross_entropy",
        )
        for label, whole in (("whole vocabulary", True), ("a shard", False))
    ]  # fmt: skip
    block = {"BLOCK": BACKWARD_BLOCK}
    backward = Variant("cross_entropy_backward", "bf16", block, WARPS, types, op="cross_entropy")
    return [*found, backward]


def quantizer_variants() -> list[Variant]:
    """The quantizers in both directions, amaxes and the decoder."""
    from fused_ops.quantize.triton_launch import AMAX_TILE, COLUMN_TILE, ROW_TILE, ROW_TILE_2D

    base: dict[str, Any] = {
        "BF16": True, "POW2": False, "STOCHASTIC": False, "CHOICE": 0, "NUMERATOR": 2688.0,
        "HADAMARD": False, "TILE": False, "KEY_ON_DEVICE": False, "FORM": 0, "SHIFT": 0,
    }  # fmt: skip
    eden = {"STOCHASTIC": 2, "CHOICE": 3, "NUMERATOR": 1536.0, "HADAMARD": True}
    kinds: dict[str, dict[str, Any]] = {
        "1x16": {},
        "1x16 stochastic": {"STOCHASTIC": True},
        "1x16 hadamard stochastic": {"STOCHASTIC": True, "HADAMARD": True},
        "1x16 hadamard ms_eden": eden,
        "1x16 hadamard ms_eden to e4m3": eden | {"FORM": 1, "SHIFT": 2},
        "1x16 4over6": {"CHOICE": 1, "NUMERATOR": 1536.0},
        "16x16": {"TILE": True},
        "pow2 stochastic": {"POW2": True, "STOCHASTIC": True},
        "pow2 stochastic to e4m3": {"POW2": True, "STOCHASTIC": True, "FORM": 1, "SHIFT": 2},
        "1x16 4over6 to e4m3": {"CHOICE": 1, "NUMERATOR": 1536.0, "FORM": 1, "SHIFT": 2},
        "1x16 to bf16": {"FORM": 2},
        "pow2 better_of_two": {"POW2": True, "CHOICE": 1},
        "pow2 hadamard better_of_two": {"POW2": True, "CHOICE": 1, "HADAMARD": True},
    }
    column = {"BLOCKS": COLUMN_TILE["blocks"], "WORDS": COLUMN_TILE["words"], "EVEN": True}
    found = [
        Variant(
            "amax_flat", "bf16",
            {
                "BF16": True, "FLAG": True,
                "SIZE": AMAX_TILE["size"], "ITERS": AMAX_TILE["iters"],
            },
            AMAX_TILE["warps"],
        ),
        Variant(
            "amax_columns", "fp32 hadamard",
            column
            | {"BF16": False, "HADAMARD": True, "FINITE": False, "PLAIN": True, "FLAG": True},
            COLUMN_TILE["warps"],
        ),
        *_rotated_amaxes(),
        Variant(
            "decode_blocks", "e4m3", {"E4M3": True, "SHIFT": 3, "TILE": False, "SIZE": 256}, 4
        ),
        Variant(
            "decode_blocks", "bf16", {"E4M3": False, "SHIFT": 0, "TILE": False, "SIZE": 256}, 4,
            {"codes_ptr": "*i32"},
        ),
    ]  # fmt: skip
    found += _pairs()
    for label, changes in kinds.items():
        tile = ROW_TILE_2D if changes.get("TILE") else ROW_TILE
        row = {"ROWS": tile["rows"], "GROUPS": tile["groups"]}
        found.append(Variant("quantize_rows", label, base | changes | row, tile["warps"]))
        found.append(
            Variant("quantize_columns", label, base | changes | column, COLUMN_TILE["warps"])
        )
    return found


def _rotated_amaxes() -> list[Variant]:
    """Of columns alone, whole and ragged, and together with that of the matrix."""
    from fused_ops.quantize.triton_launch import ROTATED_AMAX_TILE

    tile = {name.upper(): value for name, value in ROTATED_AMAX_TILE.items()}
    warps = tile.pop("WARPS")
    return [
        Variant(
            "amax_rotated", label,
            tile | {"FINITE": finite, "PLAIN": both, "FLAG": both, "EVEN": even}, warps,
        )
        for label, finite, both, even in (
            ("both", False, True, True), ("both, ragged", False, True, False),
            ("columns", False, False, True), ("columns, finite blocks", True, False, True),
        )
    ]  # fmt: skip


_KEYS = ("R_KEY_ON_DEVICE", "C_KEY_ON_DEVICE")


def _pairs() -> list[Variant]:
    """Quantizers along both axes, and from codes: of nvfp4 and of nvfp4_fast."""
    from fused_ops.quantize.triton_launch import FP8_TILE, PAIR_TILE

    def side(prefix: str, **changes: Any) -> dict[str, Any]:
        base = {"POW2": False, "STOCHASTIC": False, "CHOICE": 0, "NUMERATOR": 2688.0}
        return {prefix + k: v for k, v in (base | {"FORM": 0, "SHIFT": 0} | changes).items()}

    four = {"CHOICE": 1, "NUMERATOR": 1536.0}
    grad = {"STOCHASTIC": True, "FORM": 2}
    fast = {"POW2": True, "STOCHASTIC": True, "FORM": 1, "SHIFT": 2}
    pairs = {
        "nvfp4 x": side("R_", FORM=2) | side("C_"),
        "nvfp4 dy": side("R_", **grad) | side("C_", **grad),
        "nvfp4_fast x": side("R_", FORM=1, SHIFT=2, **four) | side("C_", POW2=True, CHOICE=1),
        "nvfp4_fast dy": side("R_", **fast) | side("C_", **fast),
    }
    tile = {name.upper(): PAIR_TILE[name] for name in ("blocks", "words", "rows")}
    pointers = {
        f"{side}_{name}_ptr": kind
        for side in "rc"
        for name, kind in (
            ("amax", "*fp32"), ("codes", "*i64"), ("scales", "*u8"), ("used", "*fp32"),
            ("count", "*i32"), ("key", "*i64"),
        )
    }  # fmt: skip
    found = [
        Variant(
            "quantize_pair", label + (", key on the device" if on_device else ""),
            constants | tile | dict.fromkeys(_KEYS, on_device) | {"C_HADAMARD": True},
            PAIR_TILE["warps"], pointers,
        )
        for label, constants in pairs.items()
        for on_device in (False, True)
        if constants["R_STOCHASTIC"] or not on_device
    ]  # fmt: skip
    found.append(
        Variant(
            "cast_fp8", "both",
            {
                "E5M2": False, "LARGEST": 448.0, "POW2": False, "ROW": True, "COLUMN": True,
                "COUNT": False, "ROWS": FP8_TILE["rows"], "COLS": FP8_TILE["cols"],
            },
            FP8_TILE["warps"],
            {"x_ptr": "*bf16", "row_ptr": "*u8", "col_ptr": "*u8", "scale_ptr": "*fp32"},
        )
    )  # fmt: skip
    return found + _from_codes()


def _from_codes() -> list[Variant]:
    """Weights of dgrad, made of the codes of fprop's."""
    from fused_ops.quantize.triton_launch import REQUANTIZE_TILE

    requantized = {
        "POW2": True, "CHOICE": 1, "NUMERATOR": 2688.0, "Q_NUMERATOR": 1536.0, "Q_TILE": False,
        "FORM": 0, "SHIFT": 0, "EVEN": True,
        "BLOCKS": REQUANTIZE_TILE["blocks"], "WORDS": REQUANTIZE_TILE["words"],
    }  # fmt: skip
    types = {"q_ptr": "*i32", "q_scales_ptr": "*u8", "q_amax_ptr": "*fp32"}
    tile = {"SHIFT": 3, "BLOCKS": REQUANTIZE_TILE["blocks"], "WORDS": REQUANTIZE_TILE["words"]}
    pointers = {"codes_ptr": "*i32", "scales_ptr": "*u8", "out_ptr": "*i64"}
    warps = REQUANTIZE_TILE["warps"]
    found = [Variant("decode_columns", "nvfp4 w", tile, warps, pointers)]
    for label, form in _KEPT.items():
        found.append(Variant("requantize_columns", label, requantized | form, warps, types))
    return found


_KEPT = {"nvfp4_fast w": {}, "nvfp4_fast w, decoded": {"FORM": 1, "SHIFT": 2}}
"""Forms of a weight that is requantized: see fused_ops.weight_operands.decodes_once."""


_GROUP_TYPES = {"place_ptr": "*i32", "tile_ptr": "*i32", "rotated_ptr": "*i32"}


def grouped_variants() -> list[Variant]:
    """What runs once for all experts: quantizers, and products by descriptors and by pointers."""
    from dataclasses import replace

    from fused_ops.scaled_matmul.grouped import SMALL_TILE, TILES

    found = _grouped_quantizers()
    for (kind, cores), tile in TILES.items():
        for chosen in (tile, replace(tile, described=False), SMALL_TILE):
            found += _grouped_products(kind, cores, chosen)
    return found


def _grouped_products(kind: str, cores: str, tile: Any) -> list[Variant]:
    values = "*fp8e4nv" if cores == "fp8" else "*bf16"
    types = _GROUP_TYPES | {"a_ptr": values, "b_ptr": values, "out_ptr": "*bf16"}
    types |= {"a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32"}
    split = min(128, tile.k) if cores == "fp8" else 0
    base = {
        "SCALED": True, "FACTOR": 1e-7, "SPLIT": split, "DESCRIBED": tile.described,
        "M": tile.m, "N": tile.n, "K": tile.k,
    }  # fmt: skip
    how = f"{cores} {tile.m}x{tile.n}x{tile.k} {'descriptors' if tile.described else 'pointers'}"
    axes = (True,) if cores == "fp8" else (True, False)
    if kind == "rows":
        cases = [
            ("grouped_rows", {"B_BY_K": by_k, "EVEN_K": even, "LEVEL": 4}, types)
            for by_k in axes
            for even in ((True,) if tile.described else (True, False))
        ]
    else:
        cases = [
            (
                "grouped_inner", {"BY_K": by_k, "ACCUMULATE": accumulate},
                types | {"out_ptr": f"*{out}"},
            )
            for by_k in axes
            for accumulate, out in ((True, "fp32"), (False, "fp32"), (False, "bf16"))
        ]  # fmt: skip
    return [
        Variant(
            kernel, how + "".join(f" {n}" for n, value in changes.items() if value is True),
            base | changes, tile.warps, kinds, op="scaled_matmul", stages=tile.stages,
        )
        for kernel, changes, kinds in cases
    ]  # fmt: skip


def _grouped_quantizers() -> list[Variant]:
    from fused_ops.quantize.triton_grouped import CAST_COLUMNS
    from fused_ops.quantize.triton_launch import COLUMN_TILE, PAIR_TILE

    words = {"WORDS": COLUMN_TILE["words"]}
    turned = {"ROTATED": True, "FLAG": True}
    found = [Variant("grouped_amax", "both", words | turned, COLUMN_TILE["warps"], _GROUP_TYPES)]
    pointers = _GROUP_TYPES | {
        f"{side}_{name}_ptr": kind
        for side in "rc"
        for name, kind in (
            ("amax", "*fp32"), ("key", "*i32"), ("codes", "*i64"), ("scales", "*u8"),
            ("used", "*fp32"), ("count", "*i32"),
        )
    }  # fmt: skip
    for pair in _pairs():
        if pair.kernel != "quantize_pair" or pair.constants["R_KEY_ON_DEVICE"]:
            continue
        constants = {k: v for k, v in pair.constants.items() if k not in ("BLOCKS", *_KEYS)}
        constants |= {"ROW": True, "COLUMN": True, "TILE": False}
        found.append(Variant("grouped_quantize", pair.label, constants, pair.warps, pointers))
    tile = found[1].constants | {"TILE": True, "R_FORM": 0, "C_HADAMARD": False}
    found.append(Variant("grouped_quantize", "nvfp4 w", tile, PAIR_TILE["warps"], pointers))
    requantized = {
        "POW2": True, "CHOICE": 1, "NUMERATOR": 2688.0, "Q_NUMERATOR": 1536.0, "Q_TILE": False,
        "FORM": 0, "SHIFT": 0,
    }  # fmt: skip
    types = _GROUP_TYPES | {"q_ptr": "*i32", "q_scales_ptr": "*u8", "q_amax_ptr": "*fp32"}
    for label, form in _KEPT.items():
        constants = requantized | words | form
        found.append(Variant("grouped_requantize", label, constants, COLUMN_TILE["warps"], types))
    cast = {
        "E5M2": False, "LARGEST": 448.0, "POW2": False, "ROW": True, "COLUMN": True,
        "COLS": CAST_COLUMNS,
    }  # fmt: skip
    types = _GROUP_TYPES | {
        "x_ptr": "*bf16", "row_ptr": "*u8", "col_ptr": "*u8", "scale_ptr": "*fp32",
    }  # fmt: skip
    found.append(Variant("grouped_cast_fp8", "both", cast, 8, types))
    return found


def find_kernel(variant: Variant) -> Any:
    """The kernel in its op's files of kernels.

    Raises:
        AttributeError: there is none of that name.
    """
    package = importlib.import_module(f"fused_ops.{variant.op}")
    for path in sorted(Path(package.__path__[0]).glob("*_kernels.py")):
        module = importlib.import_module(f"{package.__name__}.{path.stem}")
        if hasattr(module, variant.kernel):
            return getattr(module, variant.kernel)
    raise AttributeError(f"fused_ops/{variant.op} has no kernel {variant.kernel}")


def compile_variant(variant: Variant, target: str) -> str:
    """Compile one; the line of the table that tells what came out."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = find_kernel(variant)
    names = kernel.arg_names
    types = _TYPES | variant.types
    signature = {n: "constexpr" if n in variant.constants else types.get(n, "i32") for n in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, n in enumerate(names)
        if signature[n].startswith("*") or (n in _ALIGNED and signature[n] == "i32")
    }
    compiled = triton.compile(
        ASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(names.index(n),): v for n, v in variant.constants.items()},
            attrs=attributes,
        ),
        target=GPUTarget("cuda", int(target.removeprefix("sm_")), 32),
        options={
            "num_warps": variant.warps,
            "num_stages": variant.stages,
            "enable_fp_fusion": False,
        },
    )
    core, shared = TENSOR_CORE.search(compiled.asm["ptx"]), compiled.metadata.shared
    if shared > SHARED_MEMORY[target]:
        raise ValueError(
            f"needs {shared} bytes of shared memory, and a program has {SHARED_MEMORY[target]} on "
            f"{target}: smaller tiles"
        )
    return (
        f"registers {registers(compiled.asm['cubin'])}, shared {shared} bytes, "
        f"tensor core {core.group(1) if core else 'none'}"
    )


def registers(cubin: bytes) -> str:
    """Registers a thread, from the resource usage of the machine code."""
    import triton.backends.nvidia as nvidia

    dump = Path(next(iter(nvidia.__path__))) / "bin" / "cuobjdump"
    if not dump.exists():
        return "unknown"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(dump), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.search(r"REG:(\d+)", text)
    return found.group(1) if found else "unknown"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: the number of failures, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--target", required=True, choices=TARGETS)
    parser.add_argument("--only", default="", help="kernels whose name or label contains this")
    options = parser.parse_args(arguments)
    chosen = [v for v in variants() if options.only in f"{v.kernel} {v.label}"]
    if not chosen:
        parser.error(f"no kernel contains {options.only!r}: leave --only out to see all")
    failed = 0
    for variant in chosen:
        if options.target not in variant.targets:
            line = "not for this target"
        else:
            try:
                line = compile_variant(variant, options.target)
            except Exception as error:
                failed, line = 1, f"FAILED: {type(error).__name__}: {str(error)[:300]}"
        print(f"{variant.kernel:22} {variant.label:32} {line}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
