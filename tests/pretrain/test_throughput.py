# SPDX-License-Identifier: Apache-2.0
"""A run that becomes slower is flagged once, and the rank that all wait for is named."""

import time

import pytest
import torch

from pretrain.throughput import OwnTime, Regression, stragglers
from tests.distributed import run_distributed


def test_a_regression_is_flagged_once_and_its_end_too():
    judge = Regression(window=10)
    said = [judge.note(1.0) for _ in range(30)]
    said += [judge.note(1.2) for _ in range(20)]
    assert said == [None] * 50, "a fifth more is within noise"
    said = [judge.note(1.5) for _ in range(30)]
    assert [one for one in said if one] == [{"seconds": 1.5, "best": 1.0, "times": 1.5}]
    said = [judge.note(1.0) for _ in range(20)]
    assert [one for one in said if one] == [{"seconds": 1.0, "best": 1.0, "times": 1.0}]
    spiky = [judge.note(9.0 if step % 3 == 0 else 1.0) for step in range(60)]
    assert spiky == [None] * 60, "single slow steps (a save, say) move no median"


def test_own_time_ends_where_waiting_begins():
    own, waited = OwnTime(torch.device("cpu")), []
    finalize = own.wrap(lambda value: waited.append(value) or time.sleep(0.2))
    own.begin()
    time.sleep(0.05)
    finalize(3)
    finalize(4)
    assert waited == [3, 4]
    assert 0.045 < own.take() < 0.15
    assert own.take() == 0.0


def _slow_rank() -> list[dict]:
    rank = int(__import__("os").environ["RANK"])
    torch.distributed.init_process_group("gloo")
    return stragglers(0.4 if rank == 2 else 0.1)


@pytest.mark.slow
def test_stragglers_are_named_on_every_rank():
    results = run_distributed(_slow_rank, 3, timeout=900)
    assert results[0] == results[1] == results[2]
    (found,) = results[0]
    assert (found["rank"], found["times"], found["seconds"]) == (2, 4.0, 0.4)
    assert found["host"]
