# SPDX-License-Identifier: Apache-2.0
"""Every family there and back, proven by transformers; and what a conversion gets wrong is seen."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from fused_ops.errors import ConfigError
from models.config import ModelConfig
from models.conversion.plan import ProofError
from models.conversion.sections import architecture, choose_family, differences, read_section
from models.hf_mapping import FAMILIES
from pretrain.conversion.exporting import ExportOptions, export_checkpoint, make_pair
from pretrain.conversion.importing import ImportOptions, import_folder
from pretrain.conversion.opened import open_checkpoint
from pretrain.conversion.verifying import _equal, open_folder, verify_pair
from tests.models import hf_toys

FILE = "model.safetensors"


def verify(checkpoint, folder, **options):
    source, hf_config = open_folder(folder)
    pair = make_pair(open_checkpoint(checkpoint), folder, hf_config, source)
    return verify_pair(pair, show=False, **options)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """name -> (model folder, checkpoints), each made once."""
    made = {}

    def get(name, **changes):
        key = name + json.dumps(changes, sort_keys=True)
        if key not in made:
            base = tmp_path_factory.mktemp(name)
            folder = hf_toys.make_toy(name, base / "hf", **changes)
            imported = import_folder(folder, base / "checkpoints", ImportOptions(show=False))
            made[key] = folder, base / "checkpoints", imported
        return made[key]

    return get


@pytest.fixture
def copied(converted, tmp_path):
    """A copy of a model folder to be damaged, and the checkpoint of the undamaged one."""

    def get(name, **changes):
        folder, checkpoints, _ = converted(name, **changes)
        shutil.copytree(folder, tmp_path / "hf")
        return tmp_path / "hf", checkpoints

    return get


def edit(folder, change):
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / FILE, {"format": "pt"})


def test_every_family_has_a_toy():
    assert {kind for kind, _ in hf_toys.TOYS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", hf_toys.TOYS)
def test_there_and_back(name, converted, tmp_path):
    folder, checkpoints, imported = converted(name)
    assert imported.verdict.ok, imported.verdict.problems
    # From random values FP32 engines agree to 1e-5; the tolerance of the tool is 1e-4.
    assert imported.verdict.logits.logits_error < 2e-5
    layers = json.loads((folder / "config.json").read_text()).get("num_hidden_layers")
    if layers:  # each layer was compared, and the embedding
        assert len(imported.verdict.logits.layers) == layers + 1
    checkpoint = open_checkpoint(checkpoints)
    # The configuration that the model itself gives, not the one that came with the import.
    family, written = choose_family(checkpoint.section, checkpoint.vocab_size)
    assert not differences(architecture(checkpoint.section), architecture(read_section(written)))
    (checkpoint.path / "hf.config.json").rename(checkpoint.path / "kept.json")
    try:
        exported = export_checkpoint(checkpoint, tmp_path / "out", ExportOptions(show=False))
    finally:
        (checkpoint.path / "kept.json").rename(checkpoint.path / "hf.config.json")
    assert exported.verdict.ok, exported.verdict.problems
    before, after = load_file(folder / FILE), load_file(tmp_path / "out" / FILE)
    if family.name == hf_toys.TOYS[name][0]:
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            assert torch.equal(tensor, after[key]), key


def test_numbers_of_the_configuration_travel(converted):
    _, checkpoints, _ = converted("deepseek_v3")
    section = open_checkpoint(checkpoints).section
    fields = section.megatron
    assert section.pattern == "+-+E+E"
    assert (fields["moe_router_num_groups"], fields["moe_router_group_topk"]) == (4, 2)
    assert fields["moe_router_topk_scaling_factor"] == 2.5
    assert section.vocab_size == hf_toys.VOCAB
    assert open_checkpoint(checkpoints).reader.shape("output_layer.weight")[0] == 256
    _, checkpoints, _ = converted("nemotron_3_latent")
    section = open_checkpoint(checkpoints).section
    assert section.pattern == "ME*E"
    assert section.megatron["layernorm_epsilon"] == 1e-6
    assert section.megatron["moe_latent_size"] == 20


def swap_b_and_c(tensors):
    name = "backbone.layers.0.mixer.in_proj.weight"
    z, x, b, c, dt = tensors[name].split([48, 48, 32, 32, 6])
    tensors[name] = torch.cat([z, x, c, b, dt])


def transpose_expert(tensors):
    name = "backbone.layers.1.mixer.experts.11.up_proj.weight"
    tensors[name] = tensors[name].t()


def swap_experts(tensors):
    # the order in which names sort as text: 0, 1, 10, 11, 2, ...
    names = [f"backbone.layers.1.mixer.experts.{e}.up_proj.weight" for e in (2, 10)]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


def drop_bias(tensors):
    del tensors["model.layers.1.self_attn.k_proj.bias"]


def zero_bias(tensors):
    tensors["model.layers.1.self_attn.k_proj.bias"].zero_()
    tensors["model.layers.1.self_attn.v_proj.bias"].zero_()


def one_row_more(tensors):
    name = "model.embed_tokens.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])


def shift_rows(tensors):
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].roll(1, 0)


def swap_gate_and_up(tensors):
    names = [f"model.layers.0.block_sparse_moe.experts.3.w{i}.weight" for i in (1, 3)]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


def drop_router_bias(tensors):
    tensors["backbone.layers.1.mixer.gate.e_score_correction_bias"].zero_()


SQUARE = {"moe_intermediate_size": 32}
DAMAGE = {
    "B and C": ("nemotron_3", SQUARE, swap_b_and_c, "layer 0"),
    "expert transposed": ("nemotron_3", SQUARE, transpose_expert, "layer 1"),
    "expert order": ("nemotron_3", SQUARE, swap_experts, "layer 1"),
    "router bias": ("nemotron_3", SQUARE, drop_router_bias, "layer 1"),
    "bias dropped": ("qwen2", {}, drop_bias, None),
    "bias zeroed": ("qwen2", {}, zero_bias, "layer 1"),
    "vocabulary longer": ("llama", {}, one_row_more, None),
    "vocabulary shifted": ("llama", {}, shift_rows, "the embedding"),
    "gate and up": ("mixtral", {}, swap_gate_and_up, "layer 0"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_seen(damage, copied):
    name, changes, change, layer = DAMAGE[damage]
    folder, checkpoints = copied(name, **changes)
    edit(folder, change)
    verdict = verify(checkpoints, folder)
    assert not verdict.ok
    # Values, or the list of names, tell by themselves ...
    assert any("logits" not in problem for problem in verdict.problems)
    if layer is not None:  # ... and so do the logits, which share nothing with the tables.
        assert verdict.logits.diverged.name == layer
        assert verdict.logits.problem in verdict.problems


def test_no_number_and_infinity_equal_themselves_alone(copied):
    folder, checkpoints = copied("qwen2")
    name = "model.layers.1.self_attn.k_proj.bias"
    for bad in (float("nan"), float("inf")):
        edit(folder, lambda t, bad=bad: t[name].__setitem__(0, bad))
        verdict = verify(checkpoints, folder, logits=False)
        assert any(name in problem for problem in verdict.problems)
    stored = torch.tensor([float("nan"), float("inf"), 1.0])
    assert _equal(stored, stored.clone())
    assert not _equal(stored, torch.tensor([0.0, float("inf"), 1.0]))
    largest = torch.finfo(torch.float32).max
    assert not _equal(stored, torch.tensor([float("nan"), largest, 1.0]))


def test_a_changed_number_of_the_configuration_is_seen(copied):
    folder, checkpoints = copied("nemotron_3")
    hf_toys.edit_config(folder, routed_scaling_factor=1.0)
    verdict = verify(checkpoints, folder)
    assert any("moe_router_topk_scaling_factor" in problem for problem in verdict.problems)
    assert verdict.logits.diverged.name == "layer 1"
    hf_toys.edit_config(folder, routed_scaling_factor=2.5, vocab_size=hf_toys.VOCAB + 1)
    assert any("vocab_size" in problem for problem in verify(checkpoints, folder).problems)


def test_tensors_left_over_or_missing_stop_an_import(copied, tmp_path):
    folder, _ = copied("qwen3_moe")
    edit(folder, lambda t: t.update(stray=torch.ones(2)))
    with pytest.raises(ProofError, match="stray is in the model folder and used by no rule"):
        import_folder(folder, tmp_path / "new", ImportOptions(show=False))

    def lose(tensors):
        del tensors["stray"], tensors["model.layers.1.mlp.experts.10.down_proj.weight"]

    edit(folder, lose)
    with pytest.raises(ProofError, match=r"experts\.10\.down_proj.* needed and not in"):
        import_folder(folder, tmp_path / "new", ImportOptions(show=False))
    assert not list((tmp_path / "new").glob("step_*"))


def test_a_tied_head_is_tied_by_its_meaning(copied, tmp_path):
    folder, checkpoints = copied("qwen2")
    head = load_file(folder / FILE)["model.embed_tokens.weight"].clone()
    edit(folder, lambda t: t.update({"lm_head.weight": head}))
    assert verify(checkpoints, folder).ok
    done = import_folder(folder, tmp_path / "same", ImportOptions(show=False))
    assert done.verdict.ok
    edit(folder, lambda t: t.update({"lm_head.weight": head + 1}))
    assert not verify(checkpoints, folder, logits=False).ok
    with pytest.raises(ProofError, match=r"lm_head\.weight must equal model\.embed_tokens"):
        import_folder(folder, tmp_path / "other", ImportOptions(show=False))
    # Untied by the configuration, it is a tensor of its own.
    hf_toys.edit_config(folder, tie_word_embeddings=False)
    done = import_folder(folder, tmp_path / "untied", ImportOptions(show=False))
    assert done.verdict.ok
    assert "output_layer.weight" in open_checkpoint(tmp_path / "untied").reader


def test_a_family_does_not_lose_what_it_has_no_place_for():
    fields = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 48,
        "qk_layernorm": True,
        "add_qkv_bias": True,
    }
    section = ModelConfig(pattern="*-*-", vocab_size=200, megatron=fields)
    with pytest.raises(ConfigError, match="add_qkv_bias: True in the checkpoint, False"):
        choose_family(section, 200, "qwen3")
    plain = dataclasses.replace(section, megatron={**fields, "add_qkv_bias": False})
    assert choose_family(plain, 200)[0].name == "qwen3"
    with pytest.raises(ConfigError, match="did you mean qwen3"):
        choose_family(plain, 200, "qwen_3")
