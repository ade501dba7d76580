# SPDX-License-Identifier: Apache-2.0
"""Packed folders of other programs, decoded: against transformers' own decoders, and by hand."""

import pytest
import torch
from safetensors.torch import save_file

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
