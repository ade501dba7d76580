# SPDX-License-Identifier: Apache-2.0
"""The parity matrix: layouts by name, what its figures say, and a part of it run."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fused_ops import grouped_linear, linear
from fused_ops.errors import ConfigError
from models.config import ParallelConfig
from models.pattern import SYMBOLS
from pretrain.checkpoint.state import unwrap
from pretrain.parity import matrix, train
from pretrain.parity.layouts import (
    DEFAULT_LAYOUTS,
    parse_layout,
    shares_experts_over_samples,
)
from pretrain.parity.matrix import (
    FIGURES,
    FP32_BOUNDS,
    Difference,
    Plan,
    cut_blocks,
    refusal,
    run,
)
from pretrain.parity.orders import summed_in_halves
from pretrain.parity.toy import SAMPLES, micro_batches, read_case
from pretrain.parity.train import IN_ORDER, Trajectory


def test_layouts_by_name():
    both = parse_layout("tp2sp_cp2")
    assert both.parallel == ParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=True, context_parallel_size=2
    )
    assert both.processes == 4
    piped = parse_layout("pp2v2")
    assert piped.parallel.virtual_pipeline_model_parallel_size == 2
    sizes = {name: parse_layout(name).processes for name in DEFAULT_LAYOUTS}
    assert sizes["ep2"] == sizes["dp2"] == sizes["tp2sp_etp1_ep2"] == 2
    assert sizes["tp2pp2"] == sizes["pp2_ep2"] == 4
    assert parse_layout("tp2dp3").processes == 6
    assert parse_layout("dp2_overlap").parallel.overlap_param_gather
    assert parse_layout("tp2sp_recompute").megatron["recompute_granularity"] == "full"
    packed = parse_layout("tp2sp_packed")
    assert (packed.communicate, packed.parallel) == ("packed", parse_layout("tp2sp").parallel)


@pytest.mark.parametrize("name", ["", "tp", "tpx2", "tp2 sp", "zp2"])
def test_names_that_are_no_layout(name):
    with pytest.raises(ConfigError, match="layout"):
        parse_layout(name)


@pytest.mark.parametrize(
    ("name", "shares"),
    [
        ("tp2sp", False),
        ("pp2v2", False),
        ("dp2", False),
        ("tp2sp_etp1_ep2", False),
        ("ep2", True),
        ("tp2sp_ep2", True),
        ("tp2sp_etp1", True),
        ("cp2", True),
    ],
)
def test_which_layouts_mix_the_tokens_of_an_expert(name, shares):
    assert shares_experts_over_samples(parse_layout(name), "M-*E") is shares
    assert not shares_experts_over_samples(parse_layout(name), "M-*-")


def test_ranks_share_the_micro_batches_of_one_process():
    case = read_case("*-", "fp32", 1)
    whole = micro_batches(case, 3, 0, 1, IN_ORDER)
    parts = [micro_batches(case, 3, rank, 2, IN_ORDER) for rank in (0, 1)]
    assert [b["index"] for b in parts[0]] == [0, 2]
    assert [b["index"] for b in parts[1]] == [1, 3]
    for rank, part in enumerate(parts):
        for batch, expected in zip(part, whole[rank::2]):
            assert torch.equal(batch["tokens"], expected["tokens"])
            assert torch.equal(batch["loss_mask"], expected["loss_mask"])
    moved = micro_batches(case, 3, 0, 1, tuple((i + 1) % SAMPLES for i in range(SAMPLES)))
    assert torch.equal(moved[0]["tokens"][0], whole[0]["tokens"][1])
    masked = sum(float((1 - b["loss_mask"]).sum()) for b in whole)
    assert masked >= 32, "half of one sample is padding"


def test_halves_are_rounded_before_they_are_added():
    x, w = torch.randn(8, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    plain = linear.scaled_matmul(x, w, out_dtype=torch.bfloat16)
    before = linear.scaled_matmul
    with summed_in_halves(0):
        assert grouped_linear.scaled_matmul is linear.scaled_matmul is not before
        other = linear.scaled_matmul(x, w, out_dtype=torch.bfloat16)
        total = torch.zeros(8, 16)
        linear.scaled_matmul(x, w, out_dtype=torch.bfloat16, accumulate=total)
    assert linear.scaled_matmul is grouped_linear.scaled_matmul is before
    exact = x.double() @ w.double().t()
    assert not torch.equal(other, plain)
    torch.testing.assert_close(other.double(), exact, rtol=2**-7, atol=0.1)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_gradient_of_the_output_layer_is_summed_in_halves():
    """The same logits; what goes back through them has another rounding, and no other value."""
    case = read_case("*-", "fp32", 1)
    engine = train.build(case, train.ONE_PROCESS, "cpu")
    (chunk,) = engine.chunks
    layer = unwrap(chunk).output_layer
    states = torch.randn(64, 2, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    dy = torch.randn(64, 2, 256, generator=torch.Generator().manual_seed(2))
    plain, _ = layer(states)
    (expected,) = torch.autograd.grad(plain, states, dy)
    with summed_in_halves(0):
        halves, _ = layer(states)
        (found,) = torch.autograd.grad(halves, states, dy)
    assert torch.equal(layer(states)[0], plain)
    torch.testing.assert_close(halves, plain, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not torch.equal(found, expected)


def reference():
    start = {"a": torch.ones(4), "b": torch.zeros(2)}
    end = {"a": torch.tensor([1.0, 1.1, 1.0, 1.0]), "b": torch.tensor([0.3, -0.4])}
    trajectory = Trajectory(losses=[4.0, 2.0], grad_norms=[1.0, 1.0])
    return matrix._Reference(None, start, trajectory, end)


def test_figures_of_a_comparison():
    own = Trajectory(losses=[4.0, 2.2], grad_norms=[1.0, 0.5])
    weights = {"a": torch.tensor([1.0, 1.2, 1.0, 1.0]), "b": torch.tensor([0.3, -0.4])}
    found = matrix.compare(reference(), own, weights)
    assert found.loss == pytest.approx(0.1)
    assert found.grad_norm == pytest.approx(0.5)
    assert found.weight == pytest.approx(0.1 / 1.1)
    assert found.update == pytest.approx(0.5)  # all of a's change, nothing of b's
    assert found.worst == "a"
    bound = Difference(**dict.fromkeys(FIGURES, 0.4))
    assert found.exceeds(bound) == ["grad_norm", "update"]
    still = reference()
    still.weights["b"] = still.start_weights["b"]  # does not move: nothing to divide by
    again = matrix.compare(still, own, {**weights, "b": torch.tensor([0.0, 1e-3])})
    assert again.update == pytest.approx(1.0)
    assert again.weight == math.inf
    lost = replace(found, loss=math.nan)
    assert "loss" in lost.exceeds(Difference(**dict.fromkeys(FIGURES, math.inf)))


def test_refusals_come_before_anything_starts():
    dense, experts = read_case("M-*-", "fp32", 1), read_case("M-*E", "fp32", 1)
    assert "no experts to cut" in refusal(dense, parse_layout("ep2"), 0)
    assert "sequence_parallel" in refusal(experts, parse_layout("tp2"), 0)
    assert "needs 4 GPUs, and 2 are given" in refusal(dense, parse_layout("tp2pp2"), 2)
    assert "pipeline stages" in refusal(dense, parse_layout("pp3"), 0)
    assert refusal(experts, parse_layout("tp2sp"), 0) == ""
    with pytest.raises(ConfigError, match="nvfp4"):
        list(run(Plan(layouts=["tp2"], patterns=["*-"], recipes=["nvfp5"])))


def test_blocks_that_a_layout_cuts_are_named():
    """128 rows of the toy's queries, keys and values are one block of FP8, and not two."""
    blocks = read_case("*-", "fp8_blockwise:fp32", 1)
    assert "linear_qkv: dgrad contracts 128 over 2 ranks" in cut_blocks(blocks, parse_layout("tp2"))
    assert cut_blocks(blocks, parse_layout("pp2")) == ""
    assert cut_blocks(read_case("*-", "nvfp4", 1), parse_layout("tp2")) == ""
    wide = read_case("*-", "nvfp4_v2:fp32", 1)
    assert "pieces of 16 tokens a sequence" in cut_blocks(wide, parse_layout("cp2"))


def test_what_did_not_come_in_time_is_said(tmp_path):
    """No report of the ranks, and a report of a case whose reference was not begun."""
    case, plan = read_case("M-*-", "fp32", 1), Plan(layouts=[], patterns=[], recipes=[], timeout=7)
    late, lost = parse_layout("tp2sp"), parse_layout("pp2")
    place = tmp_path / "ranks2" / f"{matrix._key(case)}-tp2sp.json"
    place.parent.mkdir()
    place.write_text('{"losses": [1.0], "grad_norms": [1.0]}')
    rows = list(matrix._rows([(case, late), (case, lost)], {}, tmp_path, plan, "rank 1 hangs"))
    assert [row.failed for row in rows] == [
        "its reference was not begun within 7 s",
        "rank 1 hangs",
    ]
    assert not any(row.passes for row in rows)


def check(plan):
    rows = list(run(plan))
    wrong = [
        f"{row.layout.name} {row.case.pattern} {row.case.name}: {row.failed or row.difference} "
        f"against {row.bound}"
        for row in rows
        if not row.passes and not row.refused
    ]
    assert not wrong, "\n".join(wrong)
    assert {row.layout.name for row in rows if row.passes} == set(plan.layouts)
    return rows


def test_a_part_of_the_matrix():
    """Dither, signs and amaxes are those of one process: differences are of FP32's rounding."""
    rows = check(
        Plan(
            layouts=("tp2sp", "pp2v2"),
            patterns=("M-*-",),
            recipes=("fp32", "nvfp4_fast:fp32"),
            steps=1,
            draws=1,
            timeout=240,
        )
    )
    for row in rows:
        for name in FIGURES:
            assert getattr(row.difference, name) <= FP32_BOUNDS[name], (row.layout.name, name)


MATRIX = ("M-*-", "M-*E", "*E*E", "+-+E", "*-*E/*E", "M-M|*M-E")


def test_the_readme_names_what_the_matrix_trains():
    """Every layout of its table, and every pattern, is one of `test_the_matrix`, and none less."""
    text = (Path(__file__).resolve().parent.parent.parent / "README.md").read_text()
    section = text[text.index("## Parallelism") : text.index("All lie within their bounds")]
    table = section[section.index("| layouts |") :]
    assert set(re.findall(r"`(\w+)`", table)) == set(DEFAULT_LAYOUTS)
    sentence = re.search(r"`make test-slow` runs the matrix with (.*)\.\n", text)
    assert sentence is not None
    assert set(re.findall(r"`([^`]+)`", sentence[1])) == set(MATRIX)
    trained = {
        name
        for pattern in MATRIX
        for name in DEFAULT_LAYOUTS
        if not refusal(read_case(pattern, "fp32", 1), parse_layout(name), 0)
    }
    assert trained == set(DEFAULT_LAYOUTS)
    assert set("".join(MATRIX)) == {*SYMBOLS, "|", "/"}, "every kind of layer"


@pytest.mark.slow
@pytest.mark.parametrize("pattern", MATRIX)
def test_the_matrix(pattern):
    layouts = [
        name
        for name in DEFAULT_LAYOUTS
        if not refusal(read_case(pattern, "fp32", 1), parse_layout(name), 0)
    ]
    recipes = ("fp32", "bf16", "nvfp4", "nvfp4_fast", "nvfp4_fast:fp32")
    check(Plan(layouts=layouts, patterns=(pattern,), recipes=recipes, timeout=1800))
