# SPDX-License-Identifier: Apache-2.0
"""Packed folders of other programs, decoded: against transformers' own decoders, and by hand."""

import re

import pytest
import torch
from safetensors.torch import save_file

from fused_ops.errors import ConfigError
from models.conversion.packed import DecodedFolder, decoded, packed_problem, packed_weights
from models.conversion.safetensors import SafetensorsFolder


def folder_of(place, **tensors):
    names = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(names, place / "model.safetensors")
    return SafetensorsFolder(place)


def test_mxfp4_experts_as_transformers_decodes_them(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 2, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(120, 134, (3, 8, 2), generator=generator).to(torch.uint8)
    source = folder_of(tmp_path, e__down_proj_blocks=blocks, e__down_proj_scales=scales)
    read = DecodedFolder(source)
    expected = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.bfloat16)
    assert read.spec("e.down_proj").shape == tuple(expected.shape) == (3, 64, 8)
    for expert in range(3):
        assert torch.equal(read.read("e.down_proj", expert), expected[expert])
    assert torch.equal(read.read("e.down_proj"), expected)
    assert list(read) == ["e.down_proj"]


def test_fp8_blocks_have_a_scale_for_each_128_rows_and_columns(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 260, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=generator) + 0.5
    source = folder_of(tmp_path, a__weight=weight, a__weight_scale_inv=scale)
    found = DecodedFolder(source, torch.float32).read("a.weight")
    for row, column in ((0, 0), (127, 127), (128, 127), (199, 259), (127, 256)):
        expected = weight[row, column].float() * scale[row // 128, column // 128]
        assert found[row, column] == expected


def test_fp8_with_one_scale_or_one_a_row(tmp_path):
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    rows = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    source = folder_of(
        tmp_path,
        a__weight=weight,
        a__weight_scale=torch.tensor(0.5),
        a__input_scale=torch.tensor(3.0),
        b__weight=weight.clone(),
        b__weight_scale=rows,
        c__bias=torch.ones(3),
    )
    read = DecodedFolder(source, torch.float32)
    assert sorted(read) == ["a.weight", "b.weight", "c.bias"]
    assert torch.equal(read.read("a.weight"), weight.float() * 0.5)
    assert torch.equal(read.read("b.weight"), weight.float() * rows)
    assert torch.equal(read.read("b.weight", 2), weight[2].float() * 4)


def test_mxfp8_scales_in_either_dtype(tmp_path):
    weight = torch.ones(2, 64).to(torch.float8_e4m3fn)
    scales = torch.tensor([[127, 128], [126, 130]], dtype=torch.uint8)
    names = {"a__weight": weight, "a__weight_scale": scales, "b__weight": weight.clone()}
    source = folder_of(tmp_path, **names, b__weight_scale=scales.clone().view(torch.float8_e8m0fnu))
    read = DecodedFolder(source, torch.float32)
    expected = torch.tensor([[1.0, 2.0], [0.5, 8.0]]).repeat_interleave(32, 1)
    assert torch.equal(read.read("a.weight"), expected)
    assert torch.equal(read.read("b.weight"), expected)


CODES, ONE = torch.zeros(256, 128, dtype=torch.uint8), torch.tensor(1.0)
FP8 = torch.ones(256, 256).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        # Of these two, decoded with blocks of 128 or groups of 32, the values would be other ones.
        ({"weight": FP8, "weight_scale_inv": torch.ones(4, 4)}, "(4, 4) for a weight of (256, 256"),
        ({"weight": FP8, "weight_scale": torch.ones(256, 16).byte()}, "must be of (256, 8)"),
        ({"weight": FP8, "weight_scale": torch.ones(1, 256)}, "of shape (1, 256)"),
        ({"weight": FP8}, "a.weight_scale is absent, which a.weight needs"),
        ({"weight": CODES, "weight_scale": FP8[:, :16]}, "a.weight_scale_2 is absent"),
        (
            {"weight": CODES, "weight_scale": FP8[:, :8], "weight_scale_2": ONE},
            "must be of (256, 16)",
        ),
        (
            {"weight": CODES, "weight_scale": FP8[:, :16], "weight_scale_2": torch.ones(2)},
            "a.weight_scale_2 must be one number",
        ),
        (
            {
                "weight_packed": CODES.int(),
                "weight_scale": torch.ones(256, 16),
                "weight_global_scale": ONE,
            },
            "a.weight_packed is torch.int32, and codes of nvfp4_inverse are torch.uint8",
        ),
    ],
)
def test_parts_that_are_not_those_of_their_kind_are_refused(tensors, says, tmp_path):
    named = {f"a__{name}": tensor.clone().contiguous() for name, tensor in tensors.items()}
    source = folder_of(tmp_path, **named)
    with pytest.raises(ConfigError, match=re.escape(says)):
        DecodedFolder(source)


@pytest.mark.parametrize("method", ["fp8", None])
def test_packed_folders_are_told_by_their_tensors(method, tmp_path):
    weight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    scale = torch.ones(())
    source = folder_of(tmp_path, a__weight=weight, a__weight_scale=scale)
    config = {"quantization_config": {"quant_method": method}} if method else {}
    assert list(packed_weights(source)) == ["a.weight"]
    problem = packed_problem(config, source)
    assert "1 are packed in 8 bits (a.weight is fp8)" in problem
    assert "--decode" in problem
    decoded(config, source)
    assert "quantization_config" not in config
    plain = tmp_path / "plain"
    plain.mkdir()
    assert packed_problem({}, folder_of(plain, a__weight=torch.ones(2, 2))) is None
    unknown = packed_problem({"quantization_config": {"quant_method": "gptq"}}, folder_of(plain))
    assert "'gptq', and its tensors are of no packed kind known here" in unknown
