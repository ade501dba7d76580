# SPDX-License-Identifier: Apache-2.0
"""Every layout computes the loss and the gradients of one process (FP32, to 1e-5)."""

import dataclasses

import pytest
import torch

from models.config import ParallelConfig
from tests.distributed import run_distributed
from tests.models import toy

PATTERN = "M-*E"
LAYOUTS = {
    "tp2sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp2sp_etp1_ep2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 2,
    },
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2_virtual2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
}
QUICK = ("tp2sp", "pp2_virtual2", "ep2")
DENSE = {"tp2": {"tensor_model_parallel_size": 2}}


def _run(weights, folder, pattern, layouts, fields):
    """In each of two ranks: load the weights, one step, save the gradients; losses by layout."""
    losses = {}
    for name, layout in layouts.items():
        parallel = ParallelConfig(**layout)
        chunks, config = toy.make(pattern, parallel=parallel, **fields)
        toy.load(chunks, weights)
        losses[name] = toy.step(chunks, config, written=True)
        toy.gradients_as_weights(chunks)
        toy.save(chunks, f"{folder}/{name}")
    return losses


def _check(tmp_path, pattern, layouts, fields):
    chunks, config = toy.make(pattern, **fields)
    toy.save(chunks, tmp_path / "weights")
    loss = toy.step(chunks, config)
    expected = {name: p.main_grad.clone() for name, p in chunks[0].named_parameters()}
    args = (str(tmp_path / "weights"), str(tmp_path), pattern, layouts, fields)
    results = run_distributed(_run, 2, timeout=800, args=args)
    for result in results:
        assert result == pytest.approx(dict.fromkeys(layouts, loss), abs=1e-5)
    wrong = []
    for name in layouts:
        toy.load(chunks, tmp_path / name)
        for parameter, weight in chunks[0].named_parameters():
            gradient, scale = expected[parameter], expected[parameter].abs().max()
            assert scale > 0, f"{parameter}: no gradient to compare"
            difference = (weight.data - gradient).abs().max() / scale
            if difference > 1e-5:
                wrong.append(f"{name}: {parameter} is off by {difference:.1e}")
    assert not wrong, "\n".join(wrong)


def test_hybrid_layouts(tmp_path):
    layouts = {name: LAYOUTS[name] for name in QUICK}
    _check(tmp_path, PATTERN, layouts, {"qk_layernorm": True})


def test_norms_over_all_heads(tmp_path):
    """Their weight is used in parts by tensor-parallel ranks; each keeps the gradient of all."""
    fields = {"qk_layernorm": True, "model": {"qk_norm_over": "all_heads"}}
    _check(tmp_path, "*-", {**DENSE, "tp2sp": LAYOUTS["tp2sp"]}, fields)


@pytest.mark.slow
def test_more_hybrid_layouts(tmp_path):
    layouts = {name: layout for name, layout in LAYOUTS.items() if name not in QUICK}
    _check(tmp_path, PATTERN, layouts, {"qk_layernorm": True})


@pytest.mark.slow
def test_dense_tensor_parallel_without_sequence_parallel(tmp_path):
    _check(tmp_path, "M-*-", DENSE, {"qk_layernorm": True})


@pytest.mark.slow
def test_latent_attention_and_prediction(tmp_path):
    layouts = {name: LAYOUTS[name] for name in ("tp2sp", "ep2")}
    fields = {"moe_shared_expert_intermediate_size": 32, "moe_latent_size": 32}
    _check(tmp_path, "+E+-/+E", layouts, fields)


@pytest.mark.slow
def test_latent_attention_tensor_parallel_without_sequence_parallel(tmp_path):
    _check(tmp_path, "+-", DENSE, {})


def test_every_layout_is_a_parallel_config():
    names = {f.name for f in dataclasses.fields(ParallelConfig)}
    assert all(set(layout) <= names for layout in {**LAYOUTS, **DENSE}.values())
    assert torch.distributed.is_available()
