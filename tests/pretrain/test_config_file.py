# SPDX-License-Identifier: Apache-2.0
"""YAML, overrides and strict decoding: what is read, and how what is wrong is said."""

import math
from dataclasses import field
from typing import Literal

import pytest
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fused_ops.errors import ConfigError
from pretrain.config_file import (
    apply_overrides,
    decode,
    decode_all,
    encode,
    parse_overrides,
    parse_yaml,
    read_yaml,
)

STRICT = ConfigDict(extra="forbid")


@dataclass(kw_only=True, config=STRICT)
class Inner:
    size: int = 1
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"
    names: list[str] = field(default_factory=list)

    def __post_init__(self):
        if self.size < 0:
            raise ConfigError(["size must be >= 0; got a negative one; raise it", "and more"])


@dataclass(kw_only=True, config=STRICT)
class Outer:
    first: Inner = field(default_factory=Inner)
    many: list[Inner] = field(default_factory=list)
    text: str | dict[str, str] = ""
    needed: int


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e6", 1_000_000),
        ("1.5e3", 1500.0),
        ("0x10", 16),
        ("1_000", 1000),
        ("-7", -7),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("null", None),
        ("2024-01-01", "2024-01-01"),
        ("1:30", "1:30"),
        ("'3'", "3"),
        ("[1, {a: b}]", [1, {"a": "b"}]),
    ],
)
def test_scalars_are_yaml_core(text, value):
    parsed = parse_yaml(text, "x")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: 1\nb: 2\na: 3\n", ["'a' first appears on line 1", "again on line 3"]),
        (b"a: [1, 2\n", ["must be YAML", "line 2"]),
        (b"a: b: c\n", ["must be YAML", "line 1"]),
        (b"\xff\xfe\x00", ["must be UTF-8"]),
        (b"", ["must be a mapping of sections", "an empty file"]),
        (b"# only a comment\n", ["an empty file"]),
        (b"- 1\n", ["must be a mapping of sections", "list"]),
        (b"a: !!python/object:os.system {}\n", ["must be YAML", "line 1"]),
        (b"a: \x00\n", ["must be YAML"]),
    ],
)
def test_corrupt_files(tmp_path, content, said):
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert len(error.value.problems) == 1
    assert "\n" not in error.value.problems[0]
    assert all(part in error.value.problems[0] for part in [*said, "c.yaml"])


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_yaml(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match="is a directory"):
        read_yaml(tmp_path)


def test_overrides_set_values_lists_and_new_sections():
    data = {"first": {"size": 1}, "many": [{"size": 1}, {"size": 2}]}
    words = ["first.size=3", "many.1.size=5", "many.2={size: 6}", "new.a.b=[1, 2]", "first.rate="]
    apply_overrides(data, parse_overrides(words))
    assert data == {
        "first": {"size": 3, "rate": None},
        "many": [{"size": 1}, {"size": 5}, {"size": 6}],
        "new": {"a": {"b": [1, 2]}},
    }


def test_bad_overrides_are_listed_together():
    with pytest.raises(ConfigError) as error:
        parse_overrides(["train.steps", "=3", "a..b=1", "ok=1", "x=[1"])
    assert len(error.value.problems) == 4
    with pytest.raises(ConfigError) as error:
        apply_overrides({"a": {"b": 1}, "l": [1]}, [("a.b.c", 1), ("l.7", 1), ("l.x", 1)])
    assert len(error.value.problems) == 3
    assert "a.b holds 1" in error.value.problems[0]
    assert "index into a list of 1; use 0 to 1" in error.value.problems[1]


def test_every_problem_at_once_with_rule_value_and_remedy():
    data = {
        "frist": {},
        "first": {"size": "3", "rate": True, "kind": "c", "naems": ["x"]},
        "many": [{"size": 1}, {"size": 1.5}],
        "size": 4,
        "text": 3,
    }
    with pytest.raises(ConfigError) as error:
        decode(Outer, data)
    text = "\n".join(error.value.problems)
    for part in (
        "frist is not a setting; got {}; did you mean first",
        "first.size must be a valid integer; got '3'",
        "first.rate must be a valid number; got True",
        "first.kind must be 'a' or 'b'; got 'c'",
        "first.naems is not a setting; got ['x']; did you mean first.names",
        "many.1.size must be a valid integer",
        "size is not a setting; got 4; did you mean first.size",
        "text must be a valid string; got 3",
        "needed must be set",
    ):
        assert part in text, f"{part!r} not in\n{text}"


def test_a_sections_own_problems_arrive_whole():
    with pytest.raises(ConfigError) as error:
        decode(Outer, {"needed": 1, "many": [{"size": -1}]})
    assert error.value.problems == [
        "many.0: size must be >= 0; got a negative one; raise it",
        "many.0: and more",
    ]


def test_with_problems_the_rest_is_still_there_to_be_checked():
    data = {"needed": 2, "first": {"size": "x", "rate": 0.25}, "many": [{"size": 1.5}], "b": 1}
    value, problems, wrong = decode_all(Outer, data)
    assert value == Outer(needed=2, first=Inner(rate=0.25))
    assert len(problems) == 3
    assert wrong == ["first.size", "many.0.size", "b"]


def test_keys_must_be_text():
    with pytest.raises(ConfigError, match="keys are text; got 1 in first"):
        decode(Outer, {"needed": 1, "first": {1: 2}})


def test_whole_numbers_are_floats_too_and_encoding_round_trips():
    value = decode(Outer, {"needed": 1, "first": {"rate": 2}, "text": {"a": "b"}})
    assert value.first.rate == 2.0
    assert decode(Outer, encode(value)) == value
