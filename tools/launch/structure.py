# SPDX-License-Identifier: Apache-2.0
"""The structure of a manifest made strict: unknown keys and wrong types, each with its remedy.

A structure is plain data: a mapping of field names to structures (a name ending in `!` must be
there), `[S]` for a list, `{"*": S}` for a mapping with free keys, a tuple of strings for a choice,
or the name of a scalar: `str`, `int`, `int>=N`, `bool`, `quantity`, `int or str`, `any`.
"""

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from tools.launch.documents import Path

Report = Callable[[Path, str], None]
Structure = Any

_QUANTITY = re.compile(r"^[+-]?(\d+(\.\d*)?|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?$")


def shown(path: Path) -> str:
    """`spec.containers[0].name` of a path."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif text and re.search(r"[^\w-]", step):
            text += f"[{step!r}]"
        else:
            text += f".{step}" if text else step
    return text or "the document"


def check_structure(value: Any, structure: Structure, report: Report, path: Path = ()) -> None:
    """Reports every key that does not exist and every value of a wrong type below `path`."""
    if value is None or structure == "any":  # the API server takes an empty value for none
        return
    if isinstance(structure, Mapping):
        _check_mapping(value, structure, report, path)
    elif isinstance(structure, list):
        if not isinstance(value, list):
            report(path, f"must be a list; got {value!r:.60}; {_list_hint(value)}")
            return
        for index, item in enumerate(value):
            if item is None:
                report((*path, index), "must not be empty; fill it in, or remove the item")
            check_structure(item, structure[0], report, (*path, index))
    elif isinstance(structure, tuple):
        if value not in structure:
            near = _nearest(str(value), [str(one) for one in structure])
            report(path, f"must be one of {', '.join(structure)}; got {value!r:.60}; {near}")
    else:
        problem = _scalar(value, structure)
        if problem:
            report(path, problem)


def _check_mapping(value: Any, structure: Mapping[str, Any], report: Report, path: Path) -> None:
    if not isinstance(value, Mapping):
        report(path, f"must be a mapping; got {value!r:.60}; write `key: value` lines below it")
        return
    if "*" in structure:
        for key, part in value.items():
            if not isinstance(key, str):
                report(path, f'keys are text; got {key!r}; write "{key}"')
            check_structure(part, structure["*"], report, (*path, str(key)))
        return
    fields = {name.rstrip("!"): part for name, part in structure.items()}
    for key, part in value.items():
        if key in fields:
            check_structure(part, fields[key], report, (*path, key))
        else:
            hint = _nearest(str(key), list(fields))
            report(
                (*path, str(key)),
                f"is not a field here, and the API server drops it in silence; {hint}",
            )
    for name in structure:
        if name.endswith("!") and value.get(name[:-1]) is None:
            report((*path, name[:-1]), "must be set; add it")


def _nearest(word: str, valid: list[str]) -> str:
    folded = {name.lower().replace("_", ""): name for name in valid}
    near = difflib.get_close_matches(word.lower().replace("_", ""), folded, n=1, cutoff=0.6)
    if near:
        return f"did you mean {folded[near[0]]}"
    return f"remove it; the fields are {', '.join(valid)}" if len(valid) < 12 else "remove it"


def _list_hint(value: Any) -> str:
    if isinstance(value, str):
        words = value.split()
        return f"write {words!r}" if words else "write a list"
    return "put `- ` before each item"


def _scalar(value: Any, kind: str) -> str | None:
    if kind == "str":
        if isinstance(value, str):
            return None
        text = str(value).lower() if isinstance(value, bool) else value
        remedy = f'write "{text}", with quotes' if not isinstance(value, dict | list) else "fix it"
        return f"must be a string; got {value!r:.60}; {remedy}"
    if kind == "bool":
        if isinstance(value, bool):
            return None
        return f"must be true or false; got {value!r:.60}; write it without quotes"
    if kind == "quantity":
        return _quantity_problem(value)
    if kind == "int or str":
        good = isinstance(value, int | str) and not isinstance(value, bool)
        return None if good else f"must be a number or a string; got {value!r:.60}; write one"
    base, _, least = kind.partition(">=")
    assert base == "int", f"unknown kind of scalar {kind}"
    if not isinstance(value, int) or isinstance(value, bool):
        bare = isinstance(value, str) and value.isdecimal()
        remedy = f"write {value}, without quotes" if bare else "write a whole number"
        return f"must be a whole number; got {value!r:.60}; {remedy}"
    if least and value < int(least):
        return f"must be at least {least}; got {value}; raise it"
    return None


def _quantity_problem(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return f"must be a quantity; got {value!r:.60}; write 8, 500m or 64Gi"
    text = str(value)
    if _QUANTITY.match(text):
        return None
    unit = re.match(r"^(\d+(?:\.\d+)?)\s*([KMGTPE])i?[bB]$", text, re.IGNORECASE)
    remedy = f"write {unit[1]}{unit[2].upper()}i" if unit else "write 8, 500m or 64Gi"
    return f"must be a quantity; got {value!r:.60}; {remedy}"


def as_number(value: Any) -> float | None:
    """The amount of a quantity, or None when it is none."""
    if isinstance(value, bool) or _quantity_problem(value):
        return None
    match = re.match(r"^([+-]?[\d.]+)([KMGTPE]i|[numkMGTPE]?)$", str(value))
    if match is None:
        return float(str(value))
    powers = dict(zip("KMGTPE", range(1, 7)))
    number, unit = float(match[1]), match[2]
    if unit.endswith("i"):
        return number * 1024 ** powers[unit[0]]
    if unit in ("n", "u", "m"):
        return number * {"n": 1e-9, "u": 1e-6, "m": 1e-3}[unit]
    return number * 1000 ** powers[unit.upper()] if unit else number
