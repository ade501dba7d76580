# SPDX-License-Identifier: Apache-2.0
"""What fused_ops/README.md says: its examples are run, its tables are those of the code."""

import doctest
import re
from pathlib import Path

import pytest

from fused_ops.errors import ConfigError
from fused_ops.formats import FORMATS, HIGH_PRECISION, OperandSpec
from fused_ops.recipe import RECIPES

README = Path(__file__).resolve().parents[2] / "fused_ops" / "README.md"


def rows(heading):
    """The cells of each row of the table below a heading, without its head."""
    section = README.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.split("\n") if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def takes(**fields):
    try:
        return bool(OperandSpec(**fields))
    except ConfigError:
        return False


def test_examples_give_what_they_show():
    text = README.read_text()
    result = doctest.testfile(str(README), module_relative=False)
    assert result.failed == 0
    assert result.attempted == text.count("\n>>> ") == 18


def test_every_recipe_has_a_row():
    names = [name for row in rows("Recipes") for name in quoted(row[0])]
    assert sorted(names) == sorted(RECIPES)


def test_every_format_has_a_row():
    names = {quoted(row[0])[0] for row in rows("Formats")} | set(quoted(rows("Formats")[-1][0]))
    assert names == set(FORMATS)


@pytest.mark.parametrize("row", rows("Formats"), ids=lambda row: row[0])
def test_rows_of_formats_list_what_is_allowed(row):
    name, *options = quoted(row[0])
    if name in HIGH_PRECISION:
        assert row[1:5] == ["-"] * 4
        return
    kind = FORMATS[name]
    fields = {}
    for option in options:
        key, _, values = option.partition(": ")
        fields[key] = values.split(", ")[0] or True
    assert tuple(element.lower() for element in row[1].split(", ")) == kind.elements
    if row[2] == "tensor":
        assert kind.blocks == (None,)
        return
    allowed = [f"{r}x{c}" for r, c in kind.blocks if takes(format=name, block=(r, c), **fields)]
    assert row[2].split(", ") == allowed
