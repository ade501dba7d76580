# SPDX-License-Identifier: Apache-2.0
"""The command around the parity matrix: what it prints and its exit status."""

import pytest

from pretrain.parity import matrix
from pretrain.parity.layouts import parse_layout
from pretrain.parity.matrix import FIGURES, Difference, Row
from pretrain.parity.toy import read_case
from tools import parity


def row(layout, loss, **changes):
    found = Difference(**dict.fromkeys(FIGURES, loss), worst="decoder.final_norm.weight")
    case = read_case("M-*E", "nvfp4", 3)
    bound = Difference(**dict.fromkeys(FIGURES, 1e-3))
    fields = {"difference": found, "bound": bound, "band": "orders"} | changes
    return Row(case=case, layout=parse_layout(layout), **fields)


@pytest.fixture
def answer(monkeypatch):
    def give(*rows):
        monkeypatch.setattr(matrix, "run", lambda plan: iter(rows))

    return give


def test_all_within_their_bounds(answer, capsys):
    answer(row("tp2sp", 2e-4), row("ep2", 5e-4))
    assert parity.main([]) == 0
    text = capsys.readouterr().out
    assert "tp2sp            M-*E       nvfp4            2.0e-04" in text
    assert "2 of 2 layouts agree with one process" in text


def test_out_of_bound_is_exit_status_1(answer, capsys):
    answer(row("tp2sp", 2e-4), row("ep2", 5e-2))
    assert parity.main([]) == 1
    text = capsys.readouterr().out
    assert "OUT OF BOUND: loss, grad_norm, weight, update (worst: decoder.final_norm" in text
    assert "no passing row: ep2" in text


def test_a_layout_with_one_row_out_of_bound_does_not_agree(answer, capsys):
    """And under the row stands what the layout cannot keep."""
    cut = "linear_qkv: dgrad contracts 128 over 2 ranks, no multiple of 128 each"
    answer(row("tp2sp", 2e-4), row("tp2sp", 5e-2, note=cut), row("dp2", 2e-4, note="unsaid"))
    assert parity.main([]) == 1
    text = capsys.readouterr().out
    assert "1 rows out of bound or failed: tp2sp\n1 of 2 layouts agree" in text
    assert f"\n{'':16} {cut}\n" in text
    assert "unsaid" not in text
    assert "no passing row" not in text


def test_a_failure_is_exit_status_1_and_its_reason_is_said_once(answer, capsys):
    failed = {"difference": None, "failed": "rank 0 of 2:\n  it broke"}
    answer(row("tp2sp", 0.0, **failed), row("ep2", 0.0, **failed))
    assert parity.main([]) == 1
    text = capsys.readouterr().out
    assert text.count("it broke") == 1
    assert text.count("FAILED") == 2


def test_a_layout_that_every_pattern_refuses_is_exit_status_1(answer, capsys):
    refused = {"difference": None, "refused": "no experts to cut"}
    answer(row("tp2sp", 2e-4), row("ep2", 0.0, **refused))
    assert parity.main([]) == 1
    assert "refused: no experts to cut" in capsys.readouterr().out


def test_the_recipe_with_the_narrow_band_is_always_there():
    assert parity.with_sharp(["fp32", "bf16"]) == ["fp32", "bf16"]
    assert parity.with_sharp(["nvfp4"]) == ["nvfp4", "nvfp4_fast:fp32"]
    assert parity.with_sharp(["nvfp4", "nvfp4:fp32"]) == ["nvfp4", "nvfp4:fp32"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layouts", "tp2,zz"], "a layout is made of"),
        (["--layouts", "tp2", "--recipes", "nvfp5"], "nvfp5"),
        (["--layouts", "tp2", "--patterns", "M-X"], "'X' is not a layer"),
        (["--layouts", "tp2", "--gpus", "9"], "--gpus 9 needs so many GPUs"),
    ],
)
def test_mistakes_are_exit_status_2(arguments, said, capsys):
    assert parity.main(arguments) == 2
    assert said in capsys.readouterr().err
