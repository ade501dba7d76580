# SPDX-License-Identifier: Apache-2.0
"""20 steps of three architectures give the losses that they have always given."""

import json

import pytest

from tests.integration.golden import GOLDEN, PATTERNS, PRECISIONS, STEPS, losses, tolerance


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_golden_losses(folder, precision, pattern):
    expected = json.loads(GOLDEN.read_text())[precision][pattern]
    found = losses(pattern, precision, folder)
    assert len(found) == len(expected) == STEPS
    for step, (loss, wanted) in enumerate(zip(found, expected), 1):
        assert abs(loss - wanted) <= tolerance(precision, pattern, step), (step, found, expected)
    assert found[-1] < found[0] - 0.3, "it learns"
