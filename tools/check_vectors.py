# SPDX-License-Identifier: Apache-2.0
"""Recompute stored quantization results and count the bytes that differ.

    python -m tools.check_vectors FILE.npz [--implementation NAME]

The file holds arrays `CASE.x` (bf16 bits as uint16, or fp32, fp16) and `CASE.TAG.codes`, `.scales`,
`.amax` for tags such as row_1x16, col_16x16, col_1x16_rht16, row_1x16_4over6_mse; and linear
layers `gemmJ.x`, `.w`, `.dy` with `.fprop`, `.dgrad_rne`, `.wgrad_rne` (fp32; x and dy 1x16, their
column forms rotated by Hadamard-16, w 16x16). Codes are two to a byte, the even column in the low
nibble; scales E4M3 bytes, unswizzled, repeated for the rows of a tile. Negative zero counts as
zero.

Prints a line for each case and tag. Status 0: all equal; 1: something differs; 2: unusable file.
"""

import argparse
import os
import re
import zipfile
import zlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fused_ops.codecs import pack_nibbles, roundup, unpack_nibbles
from fused_ops.errors import ConfigError
from fused_ops.formats import OperandSpec, QuantizedTensor
from fused_ops.quantize import QUANTIZE, quantize
from fused_ops.scaled_matmul import scaled_matmul
from fused_ops.scaled_matmul.implementations import SCALED_MATMUL
from fused_ops.testing import count_different, relative_error
from pretrain.command_line import refused, run_program

PARTS = ("codes", "scales", "amax")
GEMM_INPUTS = ("x", "w", "dy")
GEMM_OUTPUTS = ("fprop", "dgrad_rne", "wgrad_rne")
GEMM_BOUND = 1e-6

Arrays = dict[str, np.ndarray]


def parse_tag(tag: str) -> tuple[OperandSpec, bool]:
    """The operand and direction of a tag; ConfigError if a word of it is unknown."""
    found = re.fullmatch(
        r"(row|col)_(\d+x\d+)(?:_(row_?scaled))?(?:_(pow2))?(?:_rht(\d+))?"
        r"(?:_(4over6_mae|4over6_mse|better_of_two))?",
        tag,
    )
    if not found:
        raise ConfigError(
            f"tag {tag!r} is unknown: expected (row|col)_(1x16|16x16), then if it applies "
            "_row_scaled, _pow2, _rht16, _4over6_mae or _4over6_mse"
        )
    direction, block, row_scaled, pow2, size, choice = found.groups()
    try:
        spec = OperandSpec(
            format="nvfp4",
            block=block,  # type: ignore[arg-type]
            row_scaled=bool(row_scaled),
            scale=pow2,
            hadamard=int(size or 0),
            choice=choice,
        )
    except ConfigError as error:
        raise ConfigError([f"tag {tag!r}: {problem}" for problem in error.problems]) from None
    return spec, direction == "col"


def to_tensor(array: np.ndarray, name: str) -> Tensor:
    """A stored matrix as a tensor; uint16 holds the bits of bf16."""
    if array.ndim != 2 or array.dtype not in (np.uint16, np.float32, np.float16):
        raise ConfigError(
            f"{name} must be a matrix of uint16 (bf16 bits), float32 or float16; "
            f"got {array.dtype} {array.shape}"
        )
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def load(path: str) -> Arrays:
    """All arrays of the file, by name."""
    if not os.path.exists(path):
        raise ConfigError(f"{path} does not exist: give the path of an .npz file")
    if not zipfile.is_zipfile(path):
        raise ConfigError(f"{path} is not an .npz file, or an incomplete one: write it with savez")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read as plain arrays: {error}") from None
    if not arrays:
        raise ConfigError(f"{path} holds no arrays")
    return arrays


def group(arrays: Arrays) -> dict[str, dict[str, Arrays]]:
    """Case -> tag -> part -> array, with the inputs under the tag ""; checks every name."""
    cases: dict[str, dict[str, Arrays]] = {}
    problems = []
    for name, array in arrays.items():
        case, _, rest = name.partition(".")
        tags = cases.setdefault(case, {})
        if case.startswith("gemm"):
            if rest not in GEMM_INPUTS + GEMM_OUTPUTS:
                problems.append(f"{name}: a GEMM has {', '.join(GEMM_INPUTS + GEMM_OUTPUTS)}")
            tags.setdefault("" if rest in GEMM_INPUTS else rest, {})[rest] = array
            continue
        tag, _, part = rest.rpartition(".")
        if rest == "x":
            tags.setdefault("", {})["x"] = array
        elif part not in PARTS or not tag:
            problems.append(f"{name}: expected CASE.x or CASE.TAG.{'|'.join(PARTS)}")
        else:
            tags.setdefault(tag, {})[part] = array
            problems += _tag_problems(tag) if len(tags[tag]) == 1 else []
    problems += [p for name, array in arrays.items() for p in _result_problems(name, array)]
    for case, tags in cases.items():
        needed = GEMM_INPUTS if case.startswith("gemm") else ("x",)
        missing = [f"{case}.{name}" for name in needed if name not in tags.get("", {})]
        if missing and len(tags) > ("" in tags):
            problems.append(f"case {case} has results but no {', '.join(missing)}")
    if not any(len(tags) > ("" in tags) for tags in cases.values()):
        problems.append("there are inputs but no results to compare")
    if problems:
        raise ConfigError(problems)
    return cases


def _result_problems(name: str, array: np.ndarray) -> list[str]:
    """What a stored result may be: bytes, or fp32 in this machine's byte order."""
    part = name.rpartition(".")[2]
    wanted = "uint8" if part in ("codes", "scales") else "float32"
    if part not in (*PARTS, *GEMM_OUTPUTS) or array.dtype == wanted:
        return []
    return [f"{name}: results are stored as {wanted}, got {array.dtype}; convert it"]


def _tag_problems(tag: str) -> list[str]:
    try:
        parse_tag(tag)
    except ConfigError as error:
        return error.problems
    return []


def canonical_codes(packed: Tensor) -> Tensor:
    """Packed codes with negative zero (code 8) replaced by zero."""
    codes = unpack_nibbles(packed)
    return pack_nibbles(torch.where(codes == 8, torch.zeros_like(codes), codes))


def parts_of(q: QuantizedTensor) -> dict[str, Tensor]:
    """What the file stores, with the padding rows of tiles."""
    assert q.spec.block is not None
    height = q.spec.block[0]
    codes = canonical_codes(q.codes)
    codes = torch.nn.functional.pad(codes, (0, 0, 0, roundup(codes.shape[0], height) - len(codes)))
    return {
        "codes": codes,
        "scales": q.scales.repeat_interleave(height, dim=0),
        "amax": q.amax.reshape(-1),
    }


def crop(actual: Tensor, shape: torch.Size, smallest: tuple[int, int]) -> Tensor:
    """Leave out padding that the file does not store; never rows or columns of the matrix."""
    if actual.dim() != 2 or len(shape) != 2:
        return actual
    fits = all(low <= n <= high for low, n, high in zip(smallest, shape, actual.shape))
    return actual[: shape[0], : shape[1]] if fits else actual


def check_tag(x: Tensor, tag: str, stored: Arrays, implementation: str | None) -> tuple[bool, str]:
    """Recompute one tag. Returns whether all is equal, and what to print."""
    spec, columns = parse_tag(tag)
    q = quantize(x, spec, columns=columns, implementation=implementation)
    computed = parts_of(q)
    smallest = {"codes": (q.shape[0], q.shape[1] // 2), "scales": (q.shape[0], q.scales.shape[1])}
    words, equal = [], True
    for part in PARTS:
        if part not in stored:
            continue
        expected = torch.from_numpy(np.ascontiguousarray(stored[part]))
        expected = expected.reshape(-1) if part == "amax" else expected
        if part == "codes" and expected.dtype == torch.uint8:
            expected = canonical_codes(expected)
        actual = crop(computed[part], expected.shape, smallest.get(part, (0, 0)))
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            words.append(
                f"{part} {actual.dtype} {tuple(actual.shape)} is not "
                f"{expected.dtype} {tuple(expected.shape)}"
            )
            equal = False
            continue
        as_bytes = [t.contiguous().view(torch.uint8) for t in (actual, expected)]
        count = count_different(*as_bytes)
        words.append(f"{part} {count}/{as_bytes[1].numel()}")
        equal &= count == 0
    return equal, "differing bytes: " + ", ".join(words)


def check_gemm(
    inputs: dict[str, Tensor], name: str, stored: np.ndarray, implementation: str | None
) -> tuple[bool, str]:
    """Recompute one product of a linear layer with nearest rounding everywhere."""
    row, tile = OperandSpec(format="nvfp4"), OperandSpec(format="nvfp4", block=(16, 16))
    rotated = OperandSpec(format="nvfp4", hadamard=16)
    operands = {
        "fprop": (("x", row, False), ("w", tile, False)),
        "dgrad_rne": (("dy", row, False), ("w", tile, True)),
        "wgrad_rne": (("dy", rotated, True), ("x", rotated, True)),
    }[name]
    quantizer = implementation if implementation in QUANTIZE.names else None
    multiplier = implementation if implementation in SCALED_MATMUL.names else None
    a, b = (
        quantize(inputs[which], spec, columns=columns, implementation=quantizer)
        for which, spec, columns in operands
    )
    expected = torch.from_numpy(np.ascontiguousarray(stored))
    actual = scaled_matmul(a, b, out_dtype=torch.float32, implementation=multiplier)
    if actual.shape != expected.shape:
        return False, f"shape {tuple(actual.shape)} is not {tuple(expected.shape)}"
    error = relative_error(actual, expected)
    return error <= GEMM_BOUND, f"max|diff|/max|ref| {error:.1e} (bound {GEMM_BOUND:.0e})"


def check(arrays: Arrays, implementation: str | None) -> Iterator[tuple[bool, str]]:
    """(equal, line) for each case and tag of a file."""
    cases = group(arrays)
    inputs = {
        case: {name: to_tensor(array, f"{case}.{name}") for name, array in tags.get("", {}).items()}
        for case, tags in cases.items()
    }
    for case, tags in cases.items():
        for tag, stored in tags.items():
            if not tag:
                continue
            if case.startswith("gemm"):
                equal, text = check_gemm(inputs[case], tag, stored[tag], implementation)
            else:
                equal, text = check_tag(inputs[case]["x"], tag, stored, implementation)
            yield equal, f"{case}.{tag}: {text}: {'equal' if equal else 'DIFFERENT'}"


def main(arguments: list[str] | None = None) -> int:
    """Run the program; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.check_vectors", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("file", metavar="FILE.npz")
    known = list(dict.fromkeys(QUANTIZE.names + SCALED_MATMUL.names))
    parser.add_argument("--implementation", choices=known, help="force it; default: the best")
    options = parser.parse_args(arguments)
    results = []
    try:
        for equal, line in check(load(options.file), options.implementation):
            print(line, flush=True)
            results.append(equal)
    except ConfigError as error:
        return refused(error)
    wrong = results.count(False)
    print(f"{len(results)} compared, {wrong} different" if wrong else f"{len(results)} equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_program(main)
