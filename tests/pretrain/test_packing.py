# SPDX-License-Identifier: Apache-2.0
"""Exports in 4 and 8 bits: the bytes are those that training multiplies with."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from fused_ops.errors import ConfigError
from fused_ops.formats import QuantizedTensor
from pretrain.__main__ import main as pretrain
from pretrain.conversion.exporting import export_config, export_plan
from pretrain.conversion.importing import ImportOptions, import_folder
from pretrain.conversion.opened import open_checkpoint
from pretrain.conversion.packing import PackOptions, chosen, export_packed, open_packing
from pretrain.generation.opened import OpenedModel
from tests.toy import make_toy, toy_config
from tools import convert

FILE = "model.safetensors"
MOE = {"moe_router_load_balancing_type": "none", "add_bias_linear": False}
NEMOTRON = {
    "gated_linear_unit": False,
    "activation_func": "squared_relu",
    "qk_layernorm": False,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 64,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


def train(folder, name, pattern, precision, megatron=None, **model):
    values = toy_config(
        folder,
        pattern,
        run={"name": name},
        train={"steps": 2, "dtype": "bf16", "global_batch_size": 4},
        precision=precision,
    )
    values["model"]["megatron"] |= megatron or {}
    values["model"] |= model
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(values))
    assert pretrain([str(config)]) == 0
    return folder / "runs" / name / "checkpoints"


@pytest.fixture(scope="module")
def transformer(folder):
    rules = [{"layers": "0", "recipe": "bf16"}]
    precision = {"recipe": "nvfp4", "rules": rules}
    return train(folder, "transformer", "*-*E", precision, MOE)


@pytest.fixture(scope="module")
def hybrid(folder):
    precision = {"recipe": "nvfp4_pow2"}
    return train(folder, "hybrid", "ME*-", precision, NEMOTRON, position_embedding="none")


def export(checkpoints, place, **options):
    options = PackOptions(show=False, calibration_tokens=64, **options)
    return export_packed(open_checkpoint(checkpoints), place, options)


def trainers_codes(checkpoints, folder):
    """{linear layer: codes of fprop.w by expert}, from a model that computes as in training."""
    opened = OpenedModel(checkpoints, write_tokenizer(folder))
    opened.full_logits(torch.arange(1, 31)[None])
    found = {}
    for module in opened.model.modules():
        if getattr(module, "gemm_name", ""):
            entries = module.weight_codes._entries
            codes = {key[1]: e.codes for key, e in entries.items() if key[0] == "fprop.w"}
            found[module.gemm_name] = codes
    return found


def write_tokenizer(folder):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from pretrain.data.tokenizer import EOD_TOKEN

    words = {EOD_TOKEN: 0, **{f"w{i}": i for i in range(1, 128)}}
    path = folder / "words.json"
    Tokenizer(WordLevel(words, unk_token=EOD_TOKEN)).save(str(path))
    return path


def rows_of(quantized: QuantizedTensor):
    return quantized.codes, quantized.row_scales(), quantized.tensor_scale


def test_the_codes_are_those_of_training(transformer, folder, tmp_path):
    done = export(transformer, tmp_path / "out")
    assert done.verdict.ok, done.verdict.problems
    assert done.family == "qwen3_moe"
    tensors = load_file(tmp_path / "out" / FILE)
    trained = trainers_codes(transformer, folder)
    codes, scales, factor = rows_of(trained["layers.2.self_attention.linear_qkv"][0])
    # Two groups of two queries, a key and a value, 16 features each.
    grouped = codes.view(2, 4, 16, -1)
    at = "model.layers.1.self_attn"
    for name, part in (("q", grouped[:, :2]), ("k", grouped[:, 2:3]), ("v", grouped[:, 3:])):
        assert torch.equal(tensors[f"{at}.{name}_proj.weight"], part.reshape(-1, codes.shape[1]))
        assert tensors[f"{at}.{name}_proj.weight_scale_2"] == factor
    value = scales.view(2, 4, 16, -1)[:, 3:].reshape(-1, scales.shape[1])
    assert torch.equal(tensors[f"{at}.v_proj.weight_scale"].view(torch.uint8), value)
    for expert, quantized in trained["layers.3.mlp.experts.linear_fc1"].items():
        codes, scales, factor = rows_of(quantized)
        name = f"model.layers.1.mlp.experts.{expert}"
        gate, up = tensors[f"{name}.gate_proj.weight"], tensors[f"{name}.up_proj.weight"]
        assert torch.equal(torch.cat([gate, up]), codes)
        # what engines fuse has one scale
        assert tensors[f"{name}.gate_proj.weight_scale_2"] == factor
        assert tensors[f"{name}.up_proj.weight_scale_2"] == factor
    # the first layer was trained high and stays so, as do router, head and norms
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype is torch.bfloat16
    assert tensors["model.layers.1.mlp.gate.weight"].dtype is torch.bfloat16
    about = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert (about["quant_algo"], about["group_size"]) == ("NVFP4", 16)
    assert "model.layers.0.self_attn.q_proj" in about["exclude_modules"]
    assert {"lm_head", "model.layers.1.mlp.gate"} <= set(about["exclude_modules"])
    assert "model.layers.1.self_attn.q_proj" not in about["exclude_modules"]


def test_compressed_tensors_and_powers_of_two(hybrid, folder, tmp_path):
    done = export(hybrid, tmp_path / "out", layout="compressed-tensors")
    assert done.verdict.ok, done.verdict.problems
    assert done.family == "nemotron_h"
    tensors = load_file(tmp_path / "out" / FILE)
    trained = trainers_codes(hybrid, folder)
    codes, scales, factor = rows_of(trained["layers.0.mixer.in_proj"][0])
    name = "backbone.layers.0.mixer.in_proj"
    assert torch.equal(tensors[f"{name}.weight_packed"], codes)
    assert torch.equal(tensors[f"{name}.weight_scale"].view(torch.uint8), scales)
    assert tensors[f"{name}.weight_global_scale"] == 1 / factor
    assert float(tensors[f"{name}.input_global_scale"]) > 0
    assert tensors["backbone.layers.0.mixer.A_log"].dtype is torch.float32
    about = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert about["format"] == "nvfp4-pack-quantized"
    from compressed_tensors.quantization import QuantizationConfig

    read = QuantizationConfig.model_validate(about)
    assert read.config_groups["group_0"].weights.group_size == 16


def test_input_scales_come_from_validation(transformer, tmp_path):
    export(transformer, tmp_path / "out", verify=False)
    tensors = load_file(tmp_path / "out" / FILE)
    at = "model.layers.1.self_attn"
    scales = [float(tensors[f"{at}.{x}_proj.input_scale"]) for x in "qkv"]
    assert scales[0] == scales[1] == scales[2] > 0
    # The normed input of attention: a few standard deviations, 2688 of the format.
    assert 1.0 < scales[0] * 2688 < 8.0


def test_other_formats(folder, tmp_path):
    run = train(folder, "mxfp8", "*-", {"recipe": "mxfp8"}, MOE)
    done = export(run, tmp_path / "mx", format="mxfp8", layout="compressed-tensors")
    assert done.verdict.ok, done.verdict.problems
    with pytest.raises(ConfigError, match="no linear layer of this run multiplies with a weight"):
        export(run, tmp_path / "no")
    run = train(folder, "fp8", "*-", {"recipe": "fp8_tensorwise"}, MOE)
    for layout in ("modelopt", "compressed-tensors"):
        done = export(run, tmp_path / f"fp8_{layout}", format="fp8", layout=layout)
        assert done.verdict.ok, done.verdict.problems
    done = export(run, tmp_path / "again", recipe="nvfp4")
    assert done.verdict.ok
    assert "quantized by the recipe nvfp4, not as the run trained" in done.notes


def test_local_amaxes_are_said(folder, tmp_path):
    precision = {"recipe": "nvfp4", "amax_scope": "shard"}
    run = train(folder, "shard", "*-", precision, MOE)
    done = export(run, tmp_path / "out")
    assert any("quantized again: the run took amaxes over local shards" in n for n in done.notes)
    assert not any("equal to the trainer's values" in note for note in done.verdict.notes)
    # The same of a run whose codes are not this project's.
    opened = open_checkpoint(run)
    for backend in ("transformer_engine", "fused_ops"):
        precision = {"backend": backend, "amax_scope": "layout_invariant"}
        config = replace(opened.config, precision=replace(opened.config.precision, **precision))
        other = replace(opened, config=config)
        plan = export_plan(other, export_config(other, None)[0])
        choice = chosen(other, plan, PackOptions())
        again = set(choice.gemms.values()) if backend == "transformer_engine" else set()
        assert choice.again == again
        said = any("again: transformer_engine made the run's" in note for note in choice.notes)
        assert said == bool(again)


def test_damage_is_seen_and_verify_reads_folders(transformer, tmp_path, capsys):
    assert export(transformer, tmp_path / "out").verdict.ok
    words = ["verify", str(transformer), str(tmp_path / "out")]
    assert convert.main(words) == 0
    assert "read back by compressed-tensors" in capsys.readouterr().out
    tensors = load_file(tmp_path / "out" / FILE)
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] ^= 1
    save_file(tensors, tmp_path / "out" / FILE)
    assert convert.main(words) == 1
    assert "o_proj.weight: not the trainer's codes or scales" in capsys.readouterr().out
    tensors["model.layers.1.self_attn.o_proj.weight"][0, 0] ^= 1
    tensors["model.layers.1.self_attn.o_proj.input_scale"].zero_()
    save_file(tensors, tmp_path / "out" / FILE)
    assert convert.main(words) == 1
    assert "input_scale is 0.0, and must be positive" in capsys.readouterr().out


def test_what_engines_are_told_is_verified(transformer, tmp_path, capsys):
    """A layer that engines would look for codes of, or another number of the architecture."""
    assert export(transformer, tmp_path / "out", verify=False)
    words = ["verify", str(transformer), str(tmp_path / "out")]
    for name, place in (("config.json", "quantization_config"), ("hf_quant_config.json", None)):
        path = tmp_path / "out" / name
        text = path.read_text()
        about = json.loads(text)
        listed = about[place]["ignore"] if place else about["quantization"]["exclude_modules"]
        listed.remove("model.layers.1.mlp.gate")
        path.write_text(json.dumps(about))
        assert convert.main(words) == 1
        assert f"FAILED: {name}: its description of quantized" in capsys.readouterr().out
        path.write_text(text)
    path = tmp_path / "out" / "config.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "vocab_size": about["vocab_size"] + 1}))
    assert convert.main(words) == 1
    assert "FAILED: configuration: vocab_size" in capsys.readouterr().out


def test_packed_folders_are_refused_unless_decoded(transformer, tmp_path):
    checkpoint = open_checkpoint(transformer)
    for layout in ("modelopt", "compressed-tensors"):
        place = tmp_path / layout
        export(transformer, place, layout=layout, verify=False)
        with pytest.raises(ConfigError, match="are packed in 4 bits"):
            import_folder(place, tmp_path / "c", ImportOptions(show=False))
        done = import_folder(
            place, tmp_path / f"c_{layout}", ImportOptions(show=False, decode=True)
        )
        assert done.verdict.ok, done.verdict.problems
        read = open_checkpoint(tmp_path / f"c_{layout}").reader
        name = "decoder.layers.2.self_attention.linear_proj.weight"
        gap = (read.read(name).float() - checkpoint.reader.read(name).float()).abs()
        # Half a step of E2M1 between 4 and 6, of the largest block scale.
        assert 0 < gap.max() <= checkpoint.reader.read(name).abs().max() / 6
    config = json.loads((tmp_path / "modelopt" / "config.json").read_text())
    assert open_packing(checkpoint, place, config, PackOptions()).layout == "modelopt"
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
