# SPDX-License-Identifier: Apache-2.0
"""What tests of runs that are continued share."""

import shutil

import pytest


@pytest.fixture
def run(trained, request):
    """A copy of the finished run that a test may break, and the command that continues it.

    The file's own fixture `trained` gives (run file, folder of runs), with a run named whole.
    """
    config, runs = trained
    copy = runs / request.node.name.replace("[", "-").replace("]", "")
    shutil.copytree(runs / "whole", copy)
    return copy, [str(config), f"run.name={copy.name}"]
