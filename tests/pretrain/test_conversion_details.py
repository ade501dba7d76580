# SPDX-License-Identifier: Apache-2.0
"""Conversions where others go wrong: prediction layers, spellings, dtypes, a start from step 0."""

import json
from dataclasses import replace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from fused_ops.errors import ConfigError
from models.conversion.expected import expected_tensors
from models.conversion.plan import ProofError, make_plan
from models.conversion.safetensors import SafetensorsFolder
from models.conversion.sections import architecture, engine_config, read_section, sizes_of
from models.hf_mapping import FAMILIES
from models.pattern import parse_pattern
from pretrain.__main__ import main as pretrain
from pretrain.conversion.exporting import ExportOptions, export_checkpoint
from pretrain.conversion.importing import ImportOptions, import_folder, model_yaml
from pretrain.conversion.opened import open_checkpoint, process_groups
from pretrain.conversion.verifying import read_hf_config
from tests.models import hf_toys
from tests.toy import make_toy, toy_config

FILE = "model.safetensors"
QUIET = ImportOptions(show=False)


def with_prediction(name, folder, mtp, **config):
    """A toy whose folder also has prediction layers, which transformers neither makes nor reads."""
    hf_toys.make_toy(name, folder)
    hf_toys.edit_config(folder, **config)
    hf_config = read_hf_config(folder)
    section = read_section(hf_config)
    assert section.pattern.endswith(mtp)
    vocab = hf_toys.VOCAB
    expected = expected_tensors(section, vocab, torch.float32, process_groups())
    sizes = sizes_of(section, engine_config(section), vocab)
    family = FAMILIES[hf_config["model_type"]]
    plan = make_plan(family, parse_pattern(section.pattern), expected.tensors, sizes)
    tensors = load_file(folder / FILE)
    generator = torch.Generator().manual_seed(5)
    for key, spec in plan.theirs().items():
        if key not in tensors:
            tensors[key] = torch.randn(spec.shape, generator=generator) * 0.1
    return tensors


def test_prediction_layers_of_nemotron(tmp_path):
    folder = tmp_path / "hf"
    kinds = ["attention", "moe"]
    config = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": kinds}
    tensors = with_prediction("nemotron_3", folder, "/*E", **config)
    added = {name for name in tensors if name.startswith("mtp.")}
    assert {
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.norm.weight",
        "mtp.layers.0.mixer.q_proj.weight",
        "mtp.layers.1.mixer.experts.11.up_proj.weight",
        "mtp.layers.1.mixer.gate.e_score_correction_bias",
        "mtp.layers.1.final_layernorm.weight",
    } <= added
    check_prediction(folder, tensors, tmp_path)
    # Announced and absent: imported without, and said.
    save_file({k: v for k, v in tensors.items() if k not in added}, folder / FILE)
    done = import_folder(folder, tmp_path / "without", QUIET)
    assert "the files hold none" in done.notes[0]
    assert done.section.pattern == "ME*EM"
    assert done.verdict.ok


def test_prediction_layers_of_deepseek(tmp_path):
    folder = tmp_path / "hf"
    tensors = with_prediction("deepseek_v3", folder, "/+E", num_nextn_predict_layers=1)
    names = ("eh_proj", "enorm", "hnorm", "shared_head.norm", "self_attn.q_a_proj")
    assert all(f"model.layers.3.{name}.weight" in tensors for name in names)
    # The embedding and head of that layer repeat the model's.
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    check_prediction(folder, tensors, tmp_path)
    tensors["model.layers.3.embed_tokens.weight"][7, 7] += 1
    save_file(tensors, folder / FILE)
    with pytest.raises(ProofError, match=r"layers\.3\.embed_tokens.* must equal"):
        import_folder(folder, tmp_path / "other", QUIET)


def check_prediction(folder, tensors, tmp_path):
    """They travel both ways, value by value, and the rest is proven by logits."""
    save_file(tensors, folder / FILE)
    done = import_folder(folder, tmp_path / "c", QUIET)
    assert done.verdict.ok, done.verdict.problems
    assert any("multi-token prediction is compared value by value" in n for n in done.verdict.notes)
    checkpoint = open_checkpoint(tmp_path / "c")
    assert "mtp.layers.0.eh_proj.weight" in checkpoint.reader
    out = export_checkpoint(checkpoint, tmp_path / "out", ExportOptions(show=False))
    assert out.verdict.ok, out.verdict.problems
    after = load_file(tmp_path / "out" / FILE)
    assert after.keys() == tensors.keys()
    assert all(torch.equal(after[key], tensors[key]) for key in tensors)


SPELLINGS = {
    "llama": (
        {
            "rope_parameters": None,
            "rope_theta": 500000.0,
            "rope_scaling": {k: v for k, v in hf_toys.LLAMA3_ROPE.items() if k != "rope_theta"},
            "dtype": None,
            "torch_dtype": "float32",
        },
        "rotary",
    ),
    "nemotron_3": ({"layers_block_type": None, "hybrid_override_pattern": "ME*EM"}, "pattern"),
    "nemotron_h": (
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mamba"]},
        "pattern",
    ),
    "qwen3_moe": ({"num_local_experts": None, "num_experts": 12}, "num_moe_experts"),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_older_spellings_of_a_configuration(name, tmp_path):
    folder = hf_toys.make_toy(name, tmp_path / "hf")
    new = architecture(read_section(read_hf_config(folder)))
    changes, key = SPELLINGS[name]
    hf_toys.edit_config(folder, **changes)
    old = architecture(read_section(read_hf_config(folder)))
    assert old == new
    assert old[key] is not None
    if name == "llama":
        assert old["rotary"][0] == 500000.0
        assert old["rotary"][2].type == "llama3"


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("nemotron_3", {"conv_kernel": 3}, "conv_kernel must be 4, got 3"),
        ("nemotron_3", {"norm_topk_prob": False}, "norm_topk_prob must be True"),
        ("nemotron_3", {"time_step_limit": [0.01, 0.1]}, "time_step_limit must be"),
        ("deepseek_v3", {"num_experts_per_tok": 3, "topk_group": 3}, "topk_group must be 2"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_type"),
        ("llama", {"attention_bias": True, "mlp_bias": False}, "mlp_bias must be True"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha must be 1.702"),
    ],
)
def test_what_cannot_be_represented_is_refused(name, changes, says, tmp_path):
    folder = hf_toys.make_toy(name, tmp_path / "hf")
    hf_toys.edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=says):
        import_folder(folder, tmp_path / "c", QUIET)


def test_dtypes_stay(tmp_path):
    """BF16 weights, FP32 where decays and biases of routers need it, on either side."""
    folder = hf_toys.make_toy("nemotron_3", tmp_path / "hf", dtype="bfloat16")
    tensors = load_file(folder / FILE)
    high = [k for k in tensors if k.endswith(("A_log", "mixer.D", "dt_bias", "correction_bias"))]
    tensors |= {key: tensors[key].float() + 1e-4 for key in high}
    save_file(tensors, folder / FILE)
    done = import_folder(folder, tmp_path / "c", QUIET)
    assert done.verdict.ok, done.verdict.problems
    checkpoint = open_checkpoint(tmp_path / "c")
    assert checkpoint.dtype is torch.bfloat16
    at = "decoder.layers.0.mixer"
    assert checkpoint.reader.dtype(f"{at}.A_log") is torch.float32
    assert checkpoint.reader.dtype(f"{at}.in_proj.weight.x") is torch.bfloat16
    assert checkpoint.reader.dtype("decoder.layers.1.mlp.router.expert_bias") is torch.float32
    export_checkpoint(checkpoint, tmp_path / "out", ExportOptions(show=False, verify=False))
    after = load_file(tmp_path / "out" / FILE)
    gate = "backbone.layers.1.mixer.gate.weight"  # megatron-core's router has the model's dtype
    for key in tensors:
        stored = tensors[key].bfloat16() if key.endswith("gate.weight") else tensors[key]
        assert torch.equal(after[key], stored), key
    assert tensors[gate].dtype is torch.float32
    assert any(f"{gate} and 1 more" in note for note in done.verdict.notes), done.verdict.notes
    # Fewer bits on request; both engines then start from the rounded values.
    wide = hf_toys.make_toy("qwen3", tmp_path / "wide")
    done = import_folder(wide, tmp_path / "narrow", replace(QUIET, dtype="bf16"))
    assert done.verdict.ok, done.verdict.problems
    assert done.verdict.logits.logits_error < 2e-5
    narrow = open_checkpoint(tmp_path / "narrow")
    name = "decoder.layers.0.self_attention.linear_proj.weight"
    value = load_file(wide / FILE)["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(narrow.reader.read(name), value.bfloat16())


def test_fewer_bits_on_either_side(tmp_path):
    """Both engines start from the rounded values; values that are no numbers are no weights."""
    wide = hf_toys.make_toy("qwen3", tmp_path / "wide")
    import_folder(wide, tmp_path / "c", replace(QUIET, verify=False))
    options = ExportOptions(show=False, dtype="bf16")
    done = export_checkpoint(open_checkpoint(tmp_path / "c"), tmp_path / "narrow", options)
    assert done.verdict.ok, done.verdict.problems
    assert done.verdict.logits.logits_error < 2e-5
    assert "are bfloat16, the checkpoint's tensors float32" in done.verdict.notes[0]
    before, after = load_file(wide / FILE), load_file(tmp_path / "narrow" / FILE)
    assert all(torch.equal(before[key].bfloat16(), after[key]) for key in before)
    # config.json says BF16, the file has FP16.
    save_file({key: tensor.half() for key, tensor in before.items()}, tmp_path / "narrow" / FILE)
    done = import_folder(tmp_path / "narrow", tmp_path / "other", QUIET)
    assert done.verdict.ok, done.verdict.problems
    assert "are float16, the checkpoint's tensors bfloat16" in done.verdict.notes[0]
    before["model.norm.weight"] = before["model.norm.weight"].to(torch.int8)
    save_file(before, wide / FILE)
    with pytest.raises(ProofError, match=r"norm\.weight must be of floating-point numbers"):
        import_folder(wide, tmp_path / "codes", QUIET)


def test_weights_that_are_no_numbers_are_named(tmp_path):
    """They are the same on both sides, so that only the logits fail."""
    folder = hf_toys.make_toy("qwen3", tmp_path / "hf")
    tensors = load_file(folder / FILE)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / FILE)
    verdict = import_folder(folder, tmp_path / "c", QUIET).verdict
    assert not verdict.ok
    notes = [note for note in verdict.notes if "NaN or Inf" in note]
    assert [note.split(" of the folder")[0] for note in notes] == [
        "model.layers.1.mlp.up_proj.weight"
    ]


def test_training_starts_from_an_import(tmp_path):
    """Step 0, weights alone, an optimizer of its own; and the run can be exported again."""
    folder = hf_toys.make_toy("qwen3", tmp_path / "hf", vocab_size=128)
    done = import_folder(folder, tmp_path / "start", QUIET)
    data = make_toy(tmp_path / "toy")
    values = toy_config(data, train={"steps": 1, "dtype": "fp32", "global_batch_size": 4})
    values["model"] = {**model_yaml(done.section), "seq_length": 32}
    values["optimizer"] = {"lr": 1e-20, "schedule": "constant"}
    values["checkpoint"] = {"load": str(tmp_path / "start"), "load_parts": "model"}
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(values))
    assert pretrain([str(config)]) == 0
    run = data / "runs" / "toy"
    loss = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert 3.0 < loss < 8.0
    done = export_checkpoint(open_checkpoint(run), tmp_path / "out", ExportOptions(show=False))
    assert done.verdict.ok
    before, after = load_file(folder / FILE), load_file(tmp_path / "out" / FILE)
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", ["mamba2", "nemotron_3"])
def test_the_judge_does_not_depend_on_its_chunk(name, tmp_path):
    """50 tokens in chunks of 8 and of 64: some versions of transformers summed another axis on a
    CPU where a sequence had more than one chunk, and would have judged a right conversion wrong."""
    from transformers import AutoModelForCausalLM

    logits = []
    for size in (8, 64):
        folder = hf_toys.make_toy(name, tmp_path / str(size), chunk_size=size)
        judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokens = torch.randint(0, 100, (1, 50), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits.append(judge(tokens).logits)
    assert logits[0].std() > 0.01
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-5)


def _file(**tensors):
    """A safetensors file of 16 bytes of data with this header."""
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(16))


def _two(first, second):
    return {
        name: {"dtype": "F32", "shape": [2], "data_offsets": place}
        for name, place in (("a", first), ("b", second))
    }


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (_two([0, 8], [4, 12]), "b does not fit"),
        (_two([-8, 0], [0, 8]), "a does not fit"),
        (_two([0, 8], [12, 20]), "b does not fit"),
        ({"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}, "a does not fit"),
        ({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}}, "a does not fit"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "no readable header"),
        ({"a": [1]}, "no readable header"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, tensors, says):
    (tmp_path / "model.safetensors").write_bytes(_file(**tensors))
    with pytest.raises(ConfigError, match=says):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("index", [[1], {"weight_map": {"a": 1}}, {"weight_map": ["a"]}])
def test_an_index_that_is_none_is_refused(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="is not an index of safetensors files"):
        SafetensorsFolder(tmp_path)


def test_a_whole_file_beside_an_index_of_others_is_refused(tmp_path):
    """transformers would read the file, the index names another."""
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(_file(**_two([0, 8], [8, 16])))
    index = {"weight_map": dict.fromkeys("ab", "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(SafetensorsFolder(tmp_path)) == ["a", "b"]
    (tmp_path / "model.safetensors").write_bytes(_file(**_two([0, 8], [8, 16])))
    with pytest.raises(ConfigError, match="must hold one model"):
        SafetensorsFolder(tmp_path)
