# SPDX-License-Identifier: Apache-2.0
"""YAML and `key=value` into a dataclass, strictly: every problem at once, each with its remedy.

Values are YAML's core schema: `true` and `false` are the only booleans, `1e-3` is a number, and a
date is a string. A type is never converted into another, except that whole numbers are also
floating-point ones.
"""

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic
import yaml
from pydantic_core import ErrorDetails

from fused_ops.errors import ConfigError
from pretrain.redact import MASK, is_secret_name


class _Loader(yaml.SafeLoader):
    """Core-schema scalars, and no key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node; a key that appears twice is an error, not an override."""
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    f"the key {key!r} first appears on line {seen[key].line + 1}",
                    seen[key],
                    f"and again on line {key_node.start_mark.line + 1}; keep one",
                    key_node.start_mark,
                )
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep=deep)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float | int:
    value = float(node.value.replace("_", ""))
    whole = "e" in node.value.lower() and "." not in node.value and value.is_integer()
    return int(value) if whole else value  # 1e6 samples are whole, 1.0 is not meant to be


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F_]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?([0-9][0-9_]*(\.[0-9_]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.nan",
        list("-+0123456789."),
    ),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first
    )
_UNION_MEMBER = re.compile(
    r"^(str|int|float|bool|none|[A-Z]\w+|function-\w+\[.*|(dict|list|tuple|set|literal)\[.*)$"
)
_SPECIAL = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": -float("inf")}


def _float(loader: _Loader, node: yaml.ScalarNode) -> float | int:
    text = node.value.lower()
    if text == ".nan":
        return float("nan")
    return _SPECIAL[text] if text in _SPECIAL else _number(loader, node)


_Loader.add_constructor("tag:yaml.org,2002:float", _float)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. ConfigError, naming `where` and the line, when it is not YAML."""
    try:
        loader = _Loader(text)
        loader.name = where
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} must be YAML; {_plain(error)}") from None


def _plain(error: yaml.YAMLError) -> str:
    """PyYAML's message on one line, without its drawing of the place."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return " ".join(str(error).split())
    mark = error.problem_mark or error.context_mark
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return " ".join(filter(None, [error.context, error.problem])) + place


def read_yaml(path: Path | str) -> dict[str, Any]:
    """The mapping in a file. ConfigError when it is missing, unreadable, empty, or no mapping."""
    try:
        text = Path(path).read_bytes().decode()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"the config must be a readable file; got {path} ({reason})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the config must be UTF-8 text; got {path} (byte {error.start} is not)"
        ) from None
    return parse_sections(text, str(path))


def parse_sections(text: str, where: str) -> dict[str, Any]:
    """The mapping of a run file's text; `where` names it. ConfigError when it is none."""
    value = parse_yaml(text, where)
    if not isinstance(value, dict):
        found = "an empty file" if value is None else f"{type(value).__name__} {value!r:.60}"
        raise ConfigError(f"the config must be a mapping of sections; got {found} in {where}")
    return value


def parse_overrides(overrides: Sequence[str]) -> list[tuple[str, Any]]:
    """(dotted key, value) of each `key=value`; the value is YAML. ConfigError lists bad ones.

    A value that begins with `*`, which YAML takes for an alias, is a text: a pattern, or a glob.
    """
    parsed: list[tuple[str, Any]] = []
    problems: list[str] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            problems.append(
                f"an override must read section.key=value; got {text!r}; e.g. train.steps=100"
            )
            continue
        if value.startswith("*"):
            parsed.append((key.strip(), value))
            continue
        try:
            parsed.append((key.strip(), parse_yaml(value, f"the value of {key.strip()}")))
        except ConfigError as error:
            problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return parsed


def apply_overrides(data: dict[str, Any], overrides: Sequence[tuple[str, Any]]) -> None:
    """Sets each dotted key in `data`. A number indexes a list; a missing section is made.

    Raises ConfigError, naming all overrides that lead nowhere.
    """
    problems: list[str] = []
    for key, value in overrides:
        try:
            _set(data, key.split("."), value)
        except ConfigError as error:
            problems.extend(f"override {key}: {problem}" for problem in error.problems)
    if problems:
        raise ConfigError(problems)


def _set(place: Any, steps: list[str], value: Any) -> None:
    for position, step in enumerate(steps):
        last = position == len(steps) - 1
        if isinstance(place, list):
            if not step.isdecimal() or int(step) > len(place) - (not last):
                raise ConfigError(
                    f"{step!r} must be an index into a list of {len(place)}; use 0 to "
                    f"{len(place) - (not last)}"
                )
            index: Any = int(step)
            if index == len(place):
                place.append(None)
        elif isinstance(place, dict):
            index = step
        else:
            parent = ".".join(steps[:position])
            raise ConfigError(f"{parent} holds {place!r:.60}, which has no {step!r}; set {parent}")
        if last:
            place[index] = value
        else:
            if isinstance(place, dict) and place.get(index) is None:
                place[index] = {}
            place = place[index]


def decode[T](kind: type[T], data: Mapping[str, Any]) -> T:
    """An instance of the pydantic dataclass `kind`. Raises ConfigError with every problem."""
    value, problems, _ = decode_all(kind, data)
    if problems:
        raise ConfigError(problems)
    assert value is not None, "what has no problems was decoded"
    return value


def decode_all[T](kind: type[T], data: Mapping[str, Any]) -> tuple[T | None, list[str], list[str]]:
    """(instance, problems, names of the settings that have them).

    With problems the instance has defaults in their place, so that the rest can be checked too;
    None where that is not enough.
    """
    problems = _unprintable(data, "")
    if problems:
        return None, problems, []
    adapter, text = pydantic.TypeAdapter(kind), json.dumps(data)
    try:
        return adapter.validate_json(text, strict=True), [], []
    except pydantic.ValidationError as error:
        errors = error.errors(include_url=False)
    rest = json.loads(text)
    for detail in errors:
        problems.extend(_explain(kind, detail))
        _remove(rest, detail["loc"])
    wrong = [".".join(map(str, _path(detail["loc"]))) for detail in errors]
    try:
        return adapter.validate_json(json.dumps(rest), strict=True), problems, wrong
    except pydantic.ValidationError:
        return None, problems, wrong


def _path(loc: tuple[int | str, ...]) -> list[int | str]:
    """Where an error lies, without pydantic's names of the members of a union."""
    return [step for step in loc if isinstance(step, int) or not _UNION_MEMBER.match(step)]


def _remove(data: Any, loc: tuple[int | str, ...]) -> None:
    """Takes the setting at `loc` out; a list that holds it, or lacks it, is taken out whole."""
    place, steps = data, _path(loc)
    owner, key = data, steps[0] if steps else ""
    for number, step in enumerate(steps):
        known = step in place if isinstance(place, dict) else isinstance(place, list)
        if not known and number < len(steps) - 1:
            return  # taken out already, with another problem
        if not known or isinstance(place, list):
            break
        owner, key, place = place, step, place[step]
    owner.pop(key, None)


def encode(config: Any) -> dict[str, Any]:
    """The nested plain values of a dataclass: what `decode` takes and YAML holds."""
    return pydantic.TypeAdapter(type(config)).dump_python(config, mode="json")


def _unprintable(value: Any, where: str) -> list[str]:
    if isinstance(value, Mapping):
        problems = [
            f"keys are text; got {key!r} in {where or 'the config'}; put it in quotes"
            for key in value
            if not isinstance(key, str)
        ]
        parts = [(f"{where}.{key}".lstrip("."), part) for key, part in value.items()]
    elif isinstance(value, list):
        problems, parts = [], [(f"{where}.{i}", part) for i, part in enumerate(value)]
    else:
        return []
    return problems + [text for name, part in parts for text in _unprintable(part, name)]


def _explain(kind: Any, detail: ErrorDetails) -> list[str]:
    """One of pydantic's errors in this project's form: key, rule, value, remedy."""
    steps = [str(s) for s in _path(detail["loc"])]
    name, rule = ".".join(steps), detail["msg"]
    given = MASK if steps and is_secret_name(steps[-1]) else detail["input"]
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        valid = _field_names(kind, steps[:-1])
        near = _abbreviated(steps[-1], valid) or difflib.get_close_matches(
            steps[-1], valid, n=1, cutoff=0.0
        )
        prefix = "".join(f"{s}." for s in steps[:-1])
        also = _elsewhere(kind, steps[-1])
        hint = f"did you mean {prefix}{near[0]}" if near else "remove it"
        hint = f"did you mean {' or '.join(also)}" if also and not _close(steps[-1], near) else hint
        return [f"{name} is not a setting; got {given!r:.80}; {hint}"]
    if detail["type"] == "missing":
        return [f"{name} must be set; it has no default; add it to the file, or {name}=VALUE"]
    cause = (detail.get("ctx") or {}).get("error")
    if isinstance(cause, ConfigError):
        return [text if text.startswith(name) else f"{name}: {text}" for text in cause.problems]
    if isinstance(cause, Exception):
        return [str(cause) if str(cause).startswith(name) else f"{name}: {cause}"]
    rule = rule.removeprefix("Input should be ")
    return [f"{name} must be {rule}; got {given!r:.80}"]


def _close(word: str, near: list[str]) -> bool:
    return bool(near) and difflib.SequenceMatcher(None, word, near[0]).ratio() > 0.6


def _abbreviated(word: str, names: Sequence[str]) -> list[str]:
    """The first name that a word of a few letters stands for: tp, tensor_model_parallel_size."""
    for name in names:
        initials = iter([part[:1] for part in name.split("_")])
        if len(word) <= 4 and word[:1] == name[:1] and all(c in initials for c in word):
            return [name]
    return []


def _elsewhere(kind: Any, name: str) -> list[str]:
    """Where a setting of this name does exist: some section, or a mapping in one whose keys are
    known (`keys` of its field's metadata)."""
    named, keyed = [], []
    for section in _field_names(kind, []):
        for field in _section_fields(kind, [section]):
            keys = field.metadata.get("keys")
            if field.name == name:
                named.append(f"{section}.{name}")
            elif keys is not None and name in keys():
                keyed.append(f"{section}.{field.name}.{name}")
    return named or keyed


def _field_names(kind: Any, steps: Sequence[str]) -> list[str]:
    """Names of the settings at a place in nested dataclasses; list indexes and union tags pass."""
    return [field.name for field in _section_fields(kind, steps)]


def _section_fields(kind: Any, steps: Sequence[str]) -> list[dataclasses.Field[Any]]:
    kinds = [kind]
    for step in steps:
        kinds = [part for k in kinds for part in _member(k, step)] or kinds
    return [field for k in kinds if dataclasses.is_dataclass(k) for field in _fields(k)]


def _fields(kind: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _member(kind: Any, step: str) -> list[Any]:
    hints = typing.get_type_hints(kind)
    return _dataclasses_in(hints[step]) if step in hints else []


def _dataclasses_in(hint: Any) -> list[Any]:
    """Dataclasses in a type: itself, or inside of unions, lists and mappings."""
    if dataclasses.is_dataclass(hint):
        return [hint]
    parts: tuple[Any, ...] = typing.get_args(hint)
    if isinstance(hint, types.GenericAlias | types.UnionType) or parts:
        return [found for part in parts for found in _dataclasses_in(part)]
    return []
