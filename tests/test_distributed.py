# SPDX-License-Identifier: Apache-2.0
"""The helper that starts ranks: results by rank, failures with logs, no orphans."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed


def _sum_of_ranks(offset):
    dist.init_process_group("gloo")
    value = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(value)
    return dist.get_rank(), float(value)


def _second_fails():
    if os.environ["RANK"] == "1":
        raise ValueError("the second rank says no")
    time.sleep(280)


def _sleeps():
    time.sleep(280)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo")
def test_results_come_back_by_rank():
    assert run_distributed(_sum_of_ranks, 2, timeout=240, args=(10,)) == [(0, 21.0), (1, 21.0)]


def test_a_failing_rank_ends_its_siblings_and_shows_its_log():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"\[rank 1\].*the second rank says no"):
        run_distributed(_second_fails, 2, timeout=240)
    assert time.monotonic() - start < 235


def test_the_time_limit_holds():
    with pytest.raises(RuntimeError, match=r"still run after 3"):
        run_distributed(_sleeps, 1, timeout=3)


def test_a_program_gives_its_output(tmp_path):
    script = tmp_path / "say.py"
    script.write_text("import os; print('I am', os.environ['RANK'])")
    assert run_distributed(script, 2, timeout=200) == ["I am 0\n", "I am 1\n"]
