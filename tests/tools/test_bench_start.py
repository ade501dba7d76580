# SPDX-License-Identifier: Apache-2.0
"""The measurement of a start: it sees the first step, and says so when there is none."""

import re

import pytest

from tools import bench_start


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_start_is_measured(capsys):
    """One process; no limit on the time: the machine may be busy."""
    assert bench_start.main(["--processes", "1", "--repeats", "1"]) == 0
    said = capsys.readouterr().out
    found = re.search(r"1 processes, .* median ([\d.]+) s .* processes ([\d.]+) s; load", said)
    assert found, said
    assert float(found[1]) > 0
    assert float(found[2]) > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_that_does_not_start_is_shown(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text("model: {pattern: X}\n")
    assert bench_start.main([str(config), "--processes", "1", "--repeats", "1"]) == 1
    assert "error: " in capsys.readouterr().err
