# SPDX-License-Identifier: Apache-2.0
"""Figures of the mismatch against their definitions; precision of each side; the whole tool."""

import json
import math

import pytest
import torch

from pretrain.generation.mismatch import (
    Scores,
    _difference,
    compare,
    sampled_tokens,
    sampler_scores,
    trainer_scores,
)
from pretrain.generation.mismatch_report import Sides
from pretrain.generation.opened import OpenedModel
from pretrain.initialize import shut_down
from tests.pretrain.generation_run import words_run
from tests.toy import write_toy_data
from tools.mismatch import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return words_run(tmp_path_factory.mktemp("toy"), "M*-E", recipe="nvfp4_pow2")


@pytest.fixture
def opened(trained):
    yield OpenedModel(trained, needs_tokenizer=False)
    shut_down()


def test_figures_are_their_definitions():
    """Two sequences of two places over three tokens, by hand."""
    s = torch.tensor([[[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], [[0.1, 0.1, 0.8], [0.3, 0.3, 0.4]]])
    t = torch.tensor([[[0.4, 0.35, 0.25], [0.2, 0.5, 0.3]], [[0.1, 0.1, 0.8], [0.1, 0.1, 0.8]]])
    targets = torch.tensor([[0, 1], [2, 0]])
    found = compare(Scores(s.log(), targets), Scores(t.log(), targets))
    rho = [0.4 / 0.5, 0.5 / 0.2, 1.0, 0.1 / 0.3]
    logs = [math.log(r) for r in rho]
    assert found.tokens == 4
    assert found.mean == pytest.approx(sum(map(abs, logs)) / 4, rel=1e-6)
    assert found.largest == pytest.approx(math.log(3), rel=1e-6)
    assert found.probability_error == pytest.approx((1.25 + 2.5 + 1 + 3) / 4, rel=1e-6)
    assert found.k3 == pytest.approx(sum(r - 1 - x for r, x in zip(rho, logs)) / 4, rel=1e-6)
    back = sum(1 / r - 1 + x for r, x in zip(rho, logs)) / 4
    assert found.k3_reverse == pytest.approx(back, rel=1e-6)
    assert found.outside == 0.5
    assert found.sequence == pytest.approx(math.log(3), rel=1e-6)
    s, t = s.double(), t.double()
    assert found.kl == pytest.approx(float((s * (s / t).log()).sum(-1).mean()), rel=1e-5)
    assert found.kl_reverse == pytest.approx(float((t * (t / s).log()).sum(-1).mean()), rel=1e-5)


def test_a_divergence_of_nearly_equal_distributions_is_not_negative():
    """FP32 log-probabilities do not add up to 1: what is missing is no divergence."""
    logits = 3 * torch.randn(4, 6, 50, generator=torch.Generator().manual_seed(0))
    near = logits + 1e-6 * torch.rand(logits.shape, generator=torch.Generator().manual_seed(1))
    targets = torch.zeros(4, 6, dtype=torch.int64)
    for index in range(4):
        pair = [
            Scores(table[index : index + 1].log_softmax(-1), targets[index : index + 1])
            for table in (logits, near)
        ]
        found = compare(*pair)
        assert 0 < found.kl < 1e-11
        assert 0 < found.kl_reverse < 1e-11


def test_k3_is_an_unbiased_estimate_of_kl_on_sampled_tokens():
    generator = torch.Generator().manual_seed(0)
    s = torch.rand(8, generator=generator).softmax(-1)
    t = (s.log() + 0.3 * torch.randn(8, generator=generator)).softmax(-1)
    draws = torch.multinomial(s, 200_000, replacement=True, generator=generator)[None]
    tables = [p.log().expand(1, draws.shape[1], 8) for p in (s, t)]
    found = compare(*(Scores(table, draws) for table in tables))
    # Four standard deviations of the mean.
    rho = t / s
    deviation = float((s * (rho - 1 - rho.log() - found.kl).square()).sum().sqrt())
    assert found.k3 == pytest.approx(found.kl, abs=4 * deviation / math.sqrt(draws.numel()))


def test_logits_that_are_no_numbers_are_no_invariance():
    """max over sequences loses NaN, so that none may come out."""
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])
    assert _difference(a, a.clone()) == 0
    assert max(_difference(a, a), _difference(a, b), _difference(b, b)) == math.inf
    assert _difference(a, torch.tensor([1.0, 2.5])) == 0.5


def test_one_precision_on_both_sides_differs_by_sums_alone(opened):
    tokens = torch.randint(1, 128, (3, 30), generator=torch.Generator().manual_seed(1))
    for recipe in ("bf16", "nvfp4_pow2", "nvfp4_fwd_mxfp8_bwd"):
        sides = Sides(opened, recipe, recipe)
        sides.take("sampler")
        found = compare(sampler_scores(opened, tokens, 5), trainer_scores(opened, tokens, 5))
        assert found.tokens == 3 * 25
        assert found.largest < 1e-4, recipe
        assert found.outside == 0


def test_two_precisions_differ_and_the_phases_of_the_run_are_taken(opened, trained):
    tokens = torch.randint(1, 128, (3, 30), generator=torch.Generator().manual_seed(1))

    def gap(sides):
        sides.take("trainer")
        trainer = trainer_scores(sides.opened, tokens, 5)
        sides.take("sampler")
        return compare(sampler_scores(sides.opened, tokens, 5), trainer).mean

    far = gap(Sides(opened, "nvfp4_pow2", "bf16"))
    assert far > 1e-3
    assert gap(Sides(opened, None, "bf16")) == pytest.approx(far, rel=1e-3), "the run has pow2"
    phased = OpenedModel(
        trained,
        needs_tokenizer=False,
        overrides=[
            "precision.recipe=null",
            "precision.plan=nvfp4_paper",
            "precision.phases.sampler=inkling2",
        ],
    )
    sides = Sides(phased)
    assert sides.describe("sampler") == "phase sampler"
    assert sides.describe("trainer") == "as trained"
    qkv = phased.model.decoder.layers[1].self_attention.linear_qkv
    sides.take("trainer")
    before = qkv.recipe.name
    sides.take("sampler")
    assert (before, qkv.recipe.name) == ("bf16", "bf16"), "both keep attention and the last 8 high"
    experts = phased.model.decoder.layers[3].mlp.experts.linear_fc1
    assert experts.recipe.name == "mxfp8", "inkling2: the last sixth"


def test_a_side_is_spelled_as_recipes_of_other_tools_are(opened):
    """RECIPE:DECODE, a plan with a setting of its own; a name without one takes the run's."""
    sides = Sides(opened, "nvfp4:fp8", "nvfp4_paper+precision.amax_scope=shard")
    assert sides.describe("sampler") == "nvfp4:fp8"

    def layers(side):
        sides.take(side)
        found = [module for module in opened.model.modules() if hasattr(module, "recipe")]
        return {(m.recipe.name, m.recipe.decode, m.amax_scope) for m in found}

    assert layers("sampler") == {("nvfp4", "fp8", "layout_invariant")}
    assert {scope for *_, scope in layers("trainer")} == {"shard"}
    sides = Sides(opened, "nvfp4", "nvfp4:fp8")
    assert layers("sampler") == {("nvfp4", "exact", "layout_invariant")}
    assert layers("trainer") == {("nvfp4", "fp8", "layout_invariant")}


def test_the_tool_prints_figures_and_batch_invariance(trained, tmp_path, capsys):
    output = tmp_path / "report.json"
    words = ["--sampler", "nvfp4", "--trainer", "bf16", "--length", "16", "--prompt", "6"]
    words += ["--sequences", "3", "--sample", "--handoff", str(tmp_path / "weights")]
    assert main([str(trained), *words, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert "30 tokens; d = log p of the trainer" in printed
    assert "the sampler had version 1 of the weights" in printed
    assert "row-scaled NVFP4: cached yes" in printed
    assert "pow2 NVFP4: cached yes" in printed
    assert "sampler nvfp4 (8 layers share an amax over tokens): cached no" in printed
    report = json.loads(output.read_text())
    assert report["baseline"]["largest"] < 1e-4 < report["mismatch"]["mean"]
    assert 0 < report["mismatch"]["k3"] < 1
    assert report["version"] == 1


def test_batch_invariance_is_tried_beside_others_or_not_at_all(trained, tmp_path, capsys):
    """Of one sequence that is compared, too: alone it is equal to itself in every precision."""
    words = [str(trained), "--length", "14", "--prompt", "6", "--sequences", "1"]
    assert main([*words, "--sampler", "nvfp4"]) == 0
    said = capsys.readouterr().out
    assert "8 tokens; d =" in said
    assert "sampler nvfp4 (8 layers share an amax over tokens): cached no" in said
    short = write_toy_data(tmp_path / "short", documents=1, seed=3)  # 25 tokens
    assert main([*words, "--sampler", "nvfp4", "--data", str(short)]) == 0
    said = capsys.readouterr().out
    assert "batch invariance was not tried: the data holds one sequence of 14 tokens" in said
    assert "cached" not in said


def test_sampled_tokens_are_the_samplers(opened):
    prompts = torch.randint(1, 128, (2, 10), generator=torch.Generator().manual_seed(1))
    found = sampled_tokens(opened, prompts, 4, seed=7)
    assert found.shape == prompts.shape
    assert torch.equal(found[:, :4], prompts[:, :4])
    for index, ids in enumerate(found):
        generator = torch.Generator().manual_seed(7 + index)
        for place in range(4, 10):
            shares = opened.full_logits(ids[None, :place])[0, -1, :128].softmax(-1)
            assert int(torch.multinomial(shares, 1, generator=generator)) == int(ids[place])


def test_a_folder_or_file_that_cannot_be_written_and_too_little_data(trained, tmp_path, capsys):
    """What is written at the end is tried before the work, and all mistakes are said together."""
    few = [str(trained), "--length", "12", "--prompt", "8"]
    file = tmp_path / "file"
    file.write_text("")
    words = ["--output", str(tmp_path), "--sequences", "0", "--seed", str(2**70)]
    for folder in (file, file / "below"):
        assert main([*few, *words, "--handoff", str(folder)]) == 2
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 4
        assert f"--handoff must be a folder that can be written to; got {folder} (" in said
    assert main([*few, "--sequences", "99"]) == 0
    said = capsys.readouterr()
    assert "of the 99 sequences that were asked for" in said.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sequences", "0", "--prompt", "0"], ["--sequences must be", "--prompt must be"]),
        (["--length", "8", "--prompt", "8"], ["--length must be above --prompt 8"]),
        (["--length", "64"], ["at most model.seq_length 32; got 64"]),
        (["--prompt", "40"], ["below the length of a sequence, 32"]),
        (
            ["--sampler", "nvfp5", "--trainer", "nvfp4:fp7"],
            [
                "--sampler nvfp5: a side must begin with the name of a plan or a recipe: bf16, ",
                "--trainer nvfp4:fp7: behind a recipe and a colon stands how it is decoded",
            ],
        ),
        (
            ["--sampler", "nvfp4+train.steps=3", "--trainer", "nvfp4_paper+precision.dekode=fp8"],
            [
                "--sampler nvfp4+train.steps=3: a side's own settings must be of section precision",
                "--trainer nvfp4_paper+precision.dekode=fp8: precision.dekode is not a setting",
            ],
        ),
        (["--sampler", "fp8_delayed"], ["has none of 8 layers, such as layers.", "fp8_tensorwise"]),
        (["precision.recipe=fp8_delayed"], ["fp8_delayed scales by amaxes of earlier steps"]),
    ],
)
def test_mistakes_are_said(trained, capsys, words, said):
    assert main([str(trained), *words]) == 2
    errors = capsys.readouterr().err
    assert all(text in errors for text in said), errors
    assert "Traceback" not in errors


def test_delayed_scales_of_the_run_are_taken(tmp_path, capsys):
    """Experts, too; a checkpoint of fp8_delayed has them, and one side may be something else."""
    checkpoints = words_run(tmp_path, "*E", recipe="fp8_delayed")
    few = ["--length", "12", "--prompt", "6", "--sequences", "2"]
    assert main([str(checkpoints), *few, "--trainer", "bf16"]) == 0
    assert "as trained" in capsys.readouterr().out
    assert main([str(checkpoints), *few, "--sampler", "fp8_delayed"]) == 0
