# SPDX-License-Identifier: Apache-2.0
"""May this run continue that checkpoint? Which settings may differ, and the overrides.

Three kinds of settings. FIXED ones make it another run: shapes, seed, order of the data. BOUND ones
change the training on purpose: they must be named in `checkpoint.override`. All others are free
(length, evaluation, logging, layout) and are only listed.
"""

import fnmatch
import json
from collections.abc import Iterable, Mapping
from typing import Any

from fused_ops.errors import ConfigError
from pretrain.config_file import apply_overrides, decode, encode

FIXED = ("model.*", "data.*", "run.seed", "optimizer.name", "train.dtype")
BOUND = ("optimizer.*", "precision.*", "train.*batch_size_schedule*", "train.global_batch_size")
# What may be overridden: nothing that a process is set up with before it looks for a checkpoint.
SECTIONS = ("optimizer", "precision", "train")
# Of the sections above, what changes neither the weights' shapes nor what is trained on. Where the
# data lies is free because its content has a fingerprint of its own. What is computed twice and how
# tokens travel to experts go with the layout. A vocabulary must have as many rows as the
# checkpoint, padded: loading holds it to that, and older runs had the data's whatever was set.
FREE = (
    "model.vocab_size",
    *("model.megatron.recompute_*", "model.megatron.moe_token_dispatcher_type"),
    *("data.train*", "data.valid*", "data.prefetch*", "data.cache*", "data.storage*"),
    *("data.on_change", "data.skip_samples"),
)
# Pipeline cuts (`|`) in it are part of the layout.
PATTERN = "model.pattern"
# Free with data.on_change=continue: the data goes on in windows of another length.
CUTS = ("model.seq_length", "data.chunk_tokens", "data.chunks_per_group")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"section.key": value} of a nested mapping; lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def _matches(key: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def kind_of(key: str) -> str:
    """ "fixed", "bound" or "free": what a resume makes of a change of this setting."""
    if _matches(key, FREE):
        return "free"
    if _matches(key, FIXED):
        return "fixed"
    return "bound" if _matches(key, BOUND) else "free"


def _layers(pattern: Any) -> str:
    """A pattern without its pipeline cuts."""
    return str(pattern).replace("|", "")


def _overridden(key: str, override: Mapping[str, Any]) -> bool:
    """Whether the override names a setting, what it is part of, or a part of it."""
    return any(f"{key}.".startswith(f"{n}.") or n.startswith(f"{key}.") for n in override)


def _flat_beside(config: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Flat settings, in which a section that is None in `other` stays one value."""
    flat = flatten(config)
    for key in [key for key, value in flatten(other).items() if value is None]:
        if parts := [name for name in flat if name.startswith(f"{key}.")]:
            section: dict[str, Any] = {}
            apply_overrides(section, [(n.removeprefix(f"{key}."), flat.pop(n)) for n in parts])
            flat[key] = section
    return flat


def _yaml(value: Any) -> str:
    """A value as a run file has it behind its key."""
    return repr(value) if isinstance(value, str) else json.dumps(value, default=str)


def compare(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    override: Mapping[str, Any],
    fingerprints: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {}),
) -> list[str]:
    """Notes on what changed between a checkpoint's config and this start's (overrides applied).

    `fingerprints`: of the checkpoint's and of this start's data and the like; where both have a
    name they must agree. Raises ConfigError listing every change that is not allowed.
    """
    old, new = _flat_beside(saved, now), _flat_beside(now, saved)
    problems, notes = [], []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if before == after or key.startswith("checkpoint."):
            continue
        change = f"{key}: {before!r} in the checkpoint, {after!r} now"
        kind = kind_of(key)
        if key == PATTERN and _layers(before) == _layers(after):
            kind = "free"
        if key in CUTS and new.get("data.on_change") == "continue":
            kind = "free"
        if kind == "fixed":
            way = ", set data.on_change=continue" if key in CUTS else ""
            problems.append(
                f"{change}; this makes it another run: set it back{way}, or start a new one"
            )
        elif kind == "bound" and _overridden(key, override):
            notes.append(f"override {key}: {before!r} -> {after!r}")
        elif kind == "bound":
            problems.append(
                f"{change}; if that is meant, add {key}: {_yaml(after)} to checkpoint.override"
            )
        else:
            notes.append(f"changed {key}: {before!r} -> {after!r}")
    was, is_now = fingerprints
    for name in sorted(was.keys() & is_now.keys()):
        if was[name] != is_now[name]:
            way = ", set data.on_change=continue" if name == "data" else ""
            problems.append(
                f"the {name} is not the checkpoint's (fingerprint {was[name]} there, {is_now[name]}"
                f" now): give back the same {name}{way}, or start a new run"
            )
    if problems:
        raise ConfigError(problems)
    return notes


def model_notes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Settings of the model that differ where weights alone are taken: allowed, but said."""
    old, new = (flatten({"model": dict(config.get("model") or {})}) for config in (saved, now))
    return [
        f"changed {key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
        and kind_of(key) == "fixed"
        and not (key == PATTERN and _layers(old.get(key)) == _layers(new.get(key)))
    ]


def rows_problem(checkpoint: str, theirs: int, own: int) -> str:
    """What to do where embedding or head of a checkpoint has `theirs` rows, and the model `own`."""
    return (
        f"{checkpoint} has a vocabulary of {theirs} rows, and this model of {own}: padded to a "
        "multiple of model.make_vocab_size_divisible_by they must be the same; leave "
        "model.vocab_size out (model.vocab_size=null) where the checkpoint has the data's "
        "vocabulary, or set it to what it was trained with"
    )


def override_config[T](config: T, override: Mapping[str, Any]) -> T:
    """`config` (nested pydantic dataclasses) with the dotted keys of `override` put in.

    Raises ConfigError for keys that do not exist, may not change in a run, or have a bad value.
    """
    flat = flatten(override)
    problems = [
        f"checkpoint.override cannot change {key}: it would make it another run; remove it"
        for key in flat
        if kind_of(key) == "fixed"
    ]
    problems += [
        "checkpoint.override holds only settings of optimizer, precision and train; "
        f"got {key}: set it in the run file or behind it"
        for key in flat
        if kind_of(key) != "fixed" and key.split(".")[0] not in SECTIONS
    ]
    if problems:
        raise ConfigError(problems)
    if not flat:
        return config
    data = encode(config)
    apply_overrides(data, list(flat.items()))
    return decode(type(config), data)
