# SPDX-License-Identifier: Apache-2.0
"""The goals of a study: which rows count for them, of one model and of several together."""

from pathlib import Path

from pretrain.comparison.runs import Row, RunData
from pretrain.study.results import ModelResults, StudyRow
from pretrain.study.write_up import fill


def _ended(name, seed, gap):
    """A finished run of two steps, its loss `gap` per cent above 3 + seed / 10."""
    loss = (3.0 + seed / 10) * (1 + gap / 100)
    return RunData(
        path=Path(), name=f"{name}-s{seed}", seed=seed, steps=2, settings={},
        losses=[(1, loss), (2, loss)], validation={("own", ""): [(2, loss)]}, tokens={},
        tokens_per_s=None, memory_gib=None, four_bit_share=None, card="", commit="",
    )  # fmt: skip


def test_eight_bits_are_no_bf16_layer():
    """(a) is of recipes that multiply nothing in BF16; one with 8 bits says how much it has in 4.

    The lower gap of a row with a BF16 tail does not count, nor that of BF16 forwards.
    """
    losses = {
        "bf16": (0.0, 0.0), "nvfp4": (1.0, 1.0), "nvfp4_fast_x8": (0.5, 0.5), "late": (0.1, 0.1),
        "backward": (0.1, 0.1),
    }  # fmt: skip
    shares_of = {"nvfp4": (1.0, 1.0), "nvfp4_fast_x8": (2 / 3, 1.0), "late": (0.8, 1.0)}
    model = ModelResults(
        name="dense-30m", steps=2, tokens=2, data_tokens=None, tokens_per_parameter=1
    )
    late = {"from": 0.75, "gemms": ["fprop"], "recipe": "bf16"}
    for name, gaps in losses.items():
        row = Row(name, {seed: _ended(name, seed, gap) for seed, gap in enumerate(gaps, start=1)})
        four, low = shares_of.get(name, (2 / 3, 2 / 3))
        precision = {"schedule": [late]} if name == "late" else {}
        model.rows.append(StudyRow(row, precision, four, {}, low_bit=low))
    goals = fill("<!-- study:goals --><!-- /study:goals -->", "bf16", [model])
    wanted = (
        "dense-30m `nvfp4_fast_x8` 0.50 [0.50, 0.50], 0.67 of the linears' FLOPs in 4 bits: met."
    )
    assert wanted in goals.splitlines()[1]


def test_a_goal_of_models_together_says_their_least_share_of_four_bits():
    """Seed by seed (0.3 + 0.5) / (1 + 1) and (0.5 + 0.3) / (1 + 1): 0.4 without any scatter."""
    models = []
    for name, gaps, share in (("dense-30m", (0.3, 0.5), 0.7), ("hybrid-30m", (0.5, 0.3), 0.6)):
        model = ModelResults(name, steps=2, tokens=2, data_tokens=None, tokens_per_parameter=1)
        for label, own in (("bf16", (0, 0)), ("nvfp4", (1, 1)), ("nvfp4_fast_x8", gaps)):
            row = Row(label, {seed: _ended(label, seed, own[seed - 1]) for seed in (1, 2)})
            model.rows.append(StudyRow(row, {}, share, {}, low_bit=1.0))
        models.append(model)
    goals = fill("<!-- study:goals --><!-- /study:goals -->", "bf16", models)
    said = goals.splitlines()[1].split("; ")[-1]
    assert said == (
        "dense-30m and hybrid-30m together `nvfp4_fast_x8` 0.40 [0.40, 0.40], 0.60 of the "
        "linears' FLOPs in 4 bits: met."
    )
