# SPDX-License-Identifier: Apache-2.0
"""The list of presets as a user sees it."""

import os
import signal
import subprocess
import sys

from tools import presets


def test_all_presets_with_sizes_and_flops(capsys):
    assert presets.main([]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert lines["llama3-8b"][1:7] == ["64", "4096", "8192", "128256", "8.03B", "8.03B"]
    assert lines["moe-30m"][4] == "data"
    assert lines["qwen3-30b-a3b"][5:7] == ["30.53B", "3.35B"]


def test_a_reader_that_leaves_is_no_crash():
    """`... | head -1`: who reads the list has gone before all of it is written."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tools.presets"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_one_preset_with_its_parts(capsys):
    assert presets.main(["deepseek-v3"]) == 0
    out = capsys.readouterr().out
    assert "671.03B parameters, 37.55B active, and 11.61B of multi-token prediction" in out
    assert "num_moe_experts: 256" in out


def test_an_unknown_name_is_one_line_and_status_2(capsys):
    assert presets.main(["llama8b"]) == 2
    captured = capsys.readouterr()
    assert "nearest: llama3-8b" in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
