# SPDX-License-Identifier: Apache-2.0
"""Every case can be launched, and between them they reach every kernel that is compiled."""

import pytest
import torch

from tools import run_kernels


def test_every_case_runs():
    """On a CPU by the references: arguments fit."""
    torch.manual_seed(0)
    names = []
    for name, run in run_kernels.cases("cpu"):
        run()
        names.append(name)
    assert len(names) == len(set(names))
    text = " ".join(names)
    for word in ("rows nvfp4", "columns nvfp4", "experts nvfp4_fast", "16x16", "pair reference"):
        assert word in text, word


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without GPU says")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit):
        run_kernels.main([])
    assert "a CUDA device is needed" in capsys.readouterr().err


@pytest.mark.gpu
def test_every_case_runs_on_a_gpu(capsys):
    assert run_kernels.main([]) == 0
    text = capsys.readouterr().out
    for word in ("pair triton", "pair cuda", "pair fp8", "key on the device", "decode to e4m3"):
        assert word in text, word
