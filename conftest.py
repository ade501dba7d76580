# SPDX-License-Identifier: Apache-2.0
"""Test session set-up: one thread, CPU compatibility before megatron-core, seeds."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

from pretrain import cpu_compat  # noqa: E402  (before any import of megatron.core)

cpu_compat.enable()

# A machine that is busy is no failure.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")


def pytest_collection_modifyitems(items):
    """Skip tests marked gpu where there is no CUDA device, with the reason."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device; run `make test-gpu` on a GPU machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish(session):
    """What the imports made stays: a full garbage collection, of which a test of runs has dozens,
    would walk through half a million of these objects each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seed():
    """Every test starts from the same random state."""
    torch.manual_seed(1234)
