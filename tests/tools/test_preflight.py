# SPDX-License-Identifier: Apache-2.0
"""The preflight command: exit status and where its words go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import free_port
from tools import preflight

ROOT = Path(__file__).resolve().parent.parent.parent
RUN = """
model: {preset: llama3-8b}
data: {train: nowhere}
train: {global_batch_size: 8}
"""


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return str(path)


def test_a_run_without_problems(run_file, capsys):
    arguments = [run_file, "--world-size", "8", "train.steps=10", "--gpu", "b200"]
    assert preflight.main(arguments) == 0
    text = capsys.readouterr().out
    assert "no problem found" in text
    assert "8.03B" in text
    assert "10 steps" in text
    assert "(B200)" in text


def test_problems_are_exit_status_2(run_file, capsys):
    assert preflight.main([run_file, "parallel.tensor_model_parallel_size=3"]) == 2
    assert "problem: num_attention_heads (32)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h900"], "--gpu is one of h200, b200, gb300; got 'h900'"),
        (["--world-size", "0"], "--world-size must be at least 1; got 0"),
        (["--world-size", "0", "--gpu", "h900"], "got 'h900'\nerror: --world-size must be"),
        (["model.presets=x"], "did you mean"),
        (["model.pattern=*-*X"], "'X' is not a layer"),
    ],
)
def test_mistakes(run_file, arguments, said, capsys):
    assert preflight.main([run_file, *arguments]) == 2
    both = capsys.readouterr()
    assert said in both.out + both.err


def test_a_missing_file(capsys):
    assert preflight.main(["nowhere.yaml"]) == 2
    assert "nowhere.yaml" in capsys.readouterr().err


def test_a_start_says_the_same_on_one_rank(run_file):
    """All reasons at once, before any process group: on rank 0 alone."""
    wrong = [run_file, "parallel.tensor_model_parallel_size=3", "train.global_batch_size=7"]
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "pretrain", *wrong],
            cwd=ROOT,
            env={**shared, "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    texts = [process.communicate(timeout=300)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2], texts
    said = [[x for x in text.splitlines() if x.startswith("error")] for text in texts]
    assert said[1] == []
    for piece in ("num_attention_heads (32)", "number of processes must be a mult", "no nowhere"):
        assert any(piece in line for line in said[0]), piece
