# SPDX-License-Identifier: Apache-2.0
"""Packed exports of runs whose ranks cut through blocks: their own codes, or said to be others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from models.config import transformer_config
from models.hybrid_model import build_model
from models.precision import PrecisionState, apply_precision
from pretrain.checkpoint.state import load_sharded
from pretrain.conversion.opened import open_checkpoint
from pretrain.conversion.packing import PackOptions, export_packed
from pretrain.initialize import initialize
from tests.distributed import run_distributed
from tests.toy import make_toy, toy_config

FILE = "model.safetensors"
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# On each of two ranks: 24 rows of gate and of up, 40 of queries, keys and values, 24 inputs of fc2.
FIELDS = {
    "moe_router_load_balancing_type": "none",
    "add_bias_linear": False,
    "ffn_hidden_size": 48,
    "moe_ffn_hidden_size": 48,
    "kv_channels": 20,
    "gated_linear_unit": True,
}
# 3 heads of Mamba on each rank: 3 rows of dt behind rows that are multiples of 16.
NEMOTRON = {
    "gated_linear_unit": False,
    "activation_func": "squared_relu",
    "qk_layernorm": False,
    "add_bias_linear": False,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ffn_hidden_size": 72,
}


def _codes_of_a_rank(run):
    """{linear layer: {expert: (codes, scales by row, tensor scale)}} of this rank's weights."""
    checkpoint = open_checkpoint(Path(run))
    config = checkpoint.config
    world = initialize(config.parallel, device="cpu", seed=1)
    engine = transformer_config(config.model, config.parallel, params_dtype=torch.bfloat16)
    chunks = list(build_model(config.model, engine, world.groups, checkpoint.vocab_size))
    state = PrecisionState(seed=1, device=world.device)
    apply_precision(chunks, config.precision, state, total_samples=config.train.total_samples)
    load_sharded(checkpoint.path, chunks, None)
    model = chunks[0].bfloat16().eval().requires_grad_(False)
    places = torch.arange(32)[None]
    model(places + 1, places, None)
    found = {}
    for module in model.modules():
        if getattr(module, "gemm_name", ""):
            entries = module.weight_codes._entries
            found[module.gemm_name] = {
                key[1]: (e.codes.codes, e.codes.row_scales(), e.codes.tensor_scale)
                for key, e in entries.items()
                if key[0] == "fprop.w"
            }
    return found


def train(folder, name, pattern, megatron, precision, **model):
    values = toy_config(
        folder,
        pattern,
        run={"name": name},
        train={"steps": 2, "dtype": "bf16", "global_batch_size": 4},
        precision=precision,
        parallel=TP,
    )
    values["model"]["megatron"] |= megatron
    values["model"] |= model
    config = folder / f"{name}.yaml"
    config.write_text(yaml.safe_dump(values))
    run_distributed(["-m", "pretrain", str(config)], 2, timeout=400)
    return folder / "runs" / name / "checkpoints"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


def export(checkpoints, place, **options):
    options = PackOptions(show=False, calibration_tokens=64, **options)
    return export_packed(open_checkpoint(checkpoints), place, options)


def whole(ranks, parts):
    """Rows of both ranks, each with its half of every part, in the order of the whole weight."""
    cut = [rows.split([part // 2 for part in parts]) for rows in ranks]
    return torch.cat([piece for part in zip(*cut) for piece in part])


def check(tensors, name, codes, scales, factor):
    assert torch.equal(tensors[f"{name}.weight"], codes), name
    assert torch.equal(tensors[f"{name}.weight_scale"].view(torch.uint8), scales), name
    assert tensors[f"{name}.weight_scale_2"] == factor, name


@pytest.mark.slow
def test_rows_cut_through_tiles_leave_as_the_ranks_have_them(folder, tmp_path):
    run = train(folder, "gated", "*-*E", FIELDS, {"recipe": "nvfp4"})
    done = export(run, tmp_path / "out")
    assert done.verdict.ok, done.verdict.problems
    first, second = run_distributed(_codes_of_a_rank, 2, timeout=400, args=(str(run),))
    tensors = load_file(tmp_path / "out" / FILE)
    for layer, index in (("layers.1.mlp", None), ("layers.3.mlp.experts", 3)):
        a, b = (r[f"{layer}.linear_fc1"][index or 0] for r in (first, second))
        at = "model.layers.0.mlp" if index is None else f"model.layers.1.mlp.experts.{index}"
        codes, scales = whole((a[0], b[0]), (48, 48)), whole((a[1], b[1]), (48, 48))
        assert a[2] == b[2]
        check(tensors, f"{at}.gate_proj", codes[:48], scales[:48], a[2])
        check(tensors, f"{at}.up_proj", codes[48:], scales[48:], a[2])
    a, b = (r["layers.2.self_attention.linear_qkv"][0] for r in (first, second))
    # A rank has one group: two queries, a key and a value of 20 features.
    value = torch.cat([a[0][60:], b[0][60:]])
    assert torch.equal(tensors["model.layers.1.self_attn.v_proj.weight"], value)
    # 24 inputs on each rank have blocks of their own, for which files have no place.
    assert any(
        "layers.1.mlp.linear_fc2" in note
        and "quantized again: each of the run's 2 tensor-parallel ranks has 24 of their 48" in note
        for note in done.notes
    ), done.notes
    assert not any("equal to the trainer's values" in note for note in done.verdict.notes)
    # One process would have made other codes: what is compared above can differ.
    opened = open_checkpoint(run)
    alone = replace(opened, config=replace(opened.config, parallel=type(opened.config.parallel)()))
    options = PackOptions(show=False, calibration_tokens=64, verify=False)
    export_packed(alone, tmp_path / "alone", options)
    other = load_file(tmp_path / "alone" / FILE)
    name = "model.layers.0.mlp.gate_proj.weight_scale"
    assert not torch.equal(other[name].view(torch.uint8), tensors[name].view(torch.uint8))


@pytest.mark.slow
def test_parts_of_a_mamba_projection(folder, tmp_path):
    run = train(folder, "hybrid", "M-*M", NEMOTRON, {"recipe": "nvfp4"}, position_embedding="none")
    done = export(run, tmp_path / "out")
    assert done.verdict.ok, done.verdict.problems
    first, second = run_distributed(_codes_of_a_rank, 2, timeout=400, args=(str(run),))
    tensors = load_file(tmp_path / "out" / FILE)
    a, b = (r["layers.0.mixer.in_proj"][0] for r in (first, second))
    parts = (96, 96, 32, 32, 6)
    name = "backbone.layers.0.mixer.in_proj"
    check(tensors, name, whole((a[0], b[0]), parts), whole((a[1], b[1]), parts), a[2])
    a, b = (r["layers.1.mlp.linear_fc1"][0] for r in (first, second))
    name = "backbone.layers.1.mixer.up_proj"
    check(tensors, name, torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]]), a[2])
