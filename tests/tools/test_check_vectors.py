# SPDX-License-Identifier: Apache-2.0
"""The vector checker finds every wrong byte, and says what is wrong with a file."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fused_ops.cases import make_input
from fused_ops.formats import OperandSpec
from fused_ops.quantize import quantize
from tools.check_vectors import main

SMALL = Path(__file__).parents[1] / "data" / "nvfp4_vectors_small.npz"


def stored(**extra):
    with np.load(SMALL) as file:
        return {name: file[name] for name in file.files} | extra


def save(path, arrays):
    target = path / "vectors.npz"
    np.savez(target, **arrays)
    return str(target)


def test_the_stored_vectors_are_equal(capsys):
    assert main([str(SMALL)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "12.row_1x16: differing bytes: codes 0/128, scales 0/16, amax 0/4: equal" in lines
    assert any(line.startswith("gemm1.wgrad_rne: max|diff|/max|ref| ") for line in lines)
    assert lines[-1] == f"{len(lines) - 1} equal"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("12.row_1x16.codes", "codes 1/128, scales 0/16, amax 0/4: DIFFERENT"),
        ("12.row_1x16.scales", "codes 0/128, scales 1/16, amax 0/4: DIFFERENT"),
        ("12.row_1x16.amax", "codes 0/128, scales 0/16, amax 1/4: DIFFERENT"),
        ("gemm1.dgrad_rne", "gemm1.dgrad_rne: max|diff|/max|ref|"),
    ],
)
def test_one_changed_byte_is_found(tmp_path, capsys, name, line):
    arrays = stored()
    arrays[name] = arrays[name].copy()
    if name.startswith("gemm"):
        arrays[name].flat[5] += 1e-4 * np.abs(arrays[name]).max()
    else:
        arrays[name].view(np.uint8).flat[3] ^= 1
    assert main([save(tmp_path, arrays)]) == 1
    out = capsys.readouterr().out
    assert line in out
    assert out.splitlines()[-1].endswith("compared, 1 different")


def test_negative_zero_counts_as_zero(tmp_path):
    arrays = stored()
    codes = arrays["12.row_1x16.codes"].copy()
    place = tuple(np.argwhere(codes & 15 == 0)[0])
    codes[place] |= 8
    assert main([save(tmp_path, arrays | {"12.row_1x16.codes": codes})]) == 0


def test_a_subset_of_parts_and_ragged_shapes(tmp_path, capsys):
    arrays = {}
    for case, shape in {"a": (19, 30), "b": (1, 48)}.items():
        x = make_input("student_t3", shape, seed=7)
        arrays[f"{case}.x"] = x.view(torch.int16).numpy().view(np.uint16)
        tile = quantize(x, OperandSpec(format="nvfp4", block=(16, 16)))
        # TransformerEngine's reference keeps the scales of padding rows and cuts the codes.
        arrays[f"{case}.row_16x16.scales"] = tile.scales.repeat_interleave(16, 0).numpy()
        arrays[f"{case}.row_16x16.codes"] = tile.codes[:, : shape[1] // 2].numpy()
        row = quantize(x, OperandSpec(format="nvfp4", row_scaled=True))
        arrays[f"{case}.row_1x16_row_scaled.amax"] = row.amax.numpy()
    assert main([save(tmp_path, arrays)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 equal"


def test_a_wrong_shape_is_a_difference(tmp_path, capsys):
    arrays = stored()
    arrays["12.row_1x16.codes"] = arrays["12.row_1x16.codes"][:8]
    assert main([save(tmp_path, arrays)]) == 1
    assert "codes torch.uint8 (16, 8) is not torch.uint8 (8, 8)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"0.y_1x16.codes": np.zeros((1, 8), np.uint8)}, "tag 'y_1x16' is unknown"),
        ({"0.row_1x32.codes": np.zeros((1, 8), np.uint8)}, "block is one of"),
        ({"0.row_1x16.bytes": np.zeros((1, 8), np.uint8)}, "expected CASE.x or CASE.TAG."),
        ({"1.row_1x16.codes": np.zeros((1, 8), np.uint8)}, "has results but no 1.x"),
        ({"gemm0.fprop": np.zeros((1, 8), np.float32)}, "no gemm0.x, gemm0.w, gemm0.dy"),
        ({"gemm0.out": np.zeros((1, 8), np.float32)}, "a GEMM has x, w, dy"),
        ({"0.row_1x16.codes": np.zeros(3, np.uint8), "0.x": np.zeros((2, 2))}, "got float64"),
        ({}, "no results"),
    ],
)
def test_unusable_contents_end_with_2(tmp_path, capsys, arrays, words):
    arrays = {"0.x": np.zeros((1, 16), np.uint16)} | arrays
    assert main([save(tmp_path, arrays)]) == 2
    assert words in capsys.readouterr().err


def test_unusable_files_end_with_2(tmp_path, capsys):
    assert main([str(tmp_path / "none.npz")]) == 2
    (tmp_path / "text.npz").write_text("not an archive")
    assert main([str(tmp_path / "text.npz")]) == 2
    np.save(tmp_path / "one.npy", np.zeros(3))
    assert main([str(tmp_path / "one.npy")]) == 2
    (tmp_path / "cut.npz").write_bytes(SMALL.read_bytes()[:5000])
    assert main([str(tmp_path / "cut.npz")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    assert "does not exist" in lines[0]
    assert all(line.startswith("error: ") and ".np" in line for line in lines)


def test_implementation_is_forced_and_must_exist(capsys):
    assert main([str(SMALL), "--implementation", "reference"]) == 0
    with pytest.raises(SystemExit) as error:
        main([str(SMALL), "--implementation", "cuda"])
    assert error.value.code == 2
    assert "invalid choice: 'cuda'" in capsys.readouterr().err
