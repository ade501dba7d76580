# SPDX-License-Identifier: Apache-2.0
"""Reading a config.json strictly, and what the families' configurations have in common."""

from collections.abc import Iterable
from typing import Any

from fused_ops.errors import ConfigError

SWIGLU = {"gated_linear_unit": True, "activation_func": "silu"}
_OLD = "original_max_position_embeddings"
_PLAIN_ROPE = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
# What each kind of scaling takes besides its factor, and which of that may be left out.
_USED = {
    "linear": (),
    "llama3": (_OLD, "low_freq_factor", "high_freq_factor"),
    "yarn": (_OLD, "beta_fast", "beta_slow", "truncate"),
}
_OPTIONAL = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


# type of a default: (types of values, in words)
_KINDS: dict[type, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    float: ((int, float), "a number"),
    list: (list, "a list"),
    dict: (dict, "a table of keys and values"),
    str: (str, "a text"),
}


class ConfigValues:
    """The values of a config.json; problems are collected and raised together by `finish`."""

    def __init__(self, values: dict[str, Any], absent: dict[str, Any] | None = None) -> None:
        """`absent`: what transformers takes for keys that are not there (null is another thing)."""
        self.values = {**(absent or {}), **values}
        self.problems: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """A value of the default's kind; the default where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return default
        kind, wanted = _KINDS.get(type(default), (object, ""))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            self.problems.append(f"config.json: {name} must be {wanted}, got {value!r}")
            return default
        return value

    def count(self, name: str, default: Any = None, least: int = 1) -> Any:
        """A whole number; the default where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.problems.append(
                f"config.json: {name} must be a whole number of at least {least}, got {value!r}"
            )
            return least if default is None else default
        return value

    def need(self, name: str) -> Any:
        """A whole number that must be there."""
        if self.values.get(name) is None:
            self.problems.append(f"config.json must say {name}, and does not; add it")
            return 1
        return self.count(name)

    def only(self, name: str, allowed: Iterable[Any], why: str) -> None:
        """A value that, where it is given, can only be one of these."""
        value, allowed = self.values.get(name), list(allowed)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(repr, allowed)) or "absent"
            self.problems.append(f"config.json: {name} must be {wanted}, got {value!r}: {why}")

    def finish(self, section: dict[str, Any]) -> dict[str, Any]:
        """The section, unless there were problems."""
        if self.problems:
            raise ConfigError(self.problems)
        return section


def rope_given(values: ConfigValues) -> tuple[str, ConfigValues]:
    """(rope_type, the settings of rotary embeddings), from any of the spellings in use.

    Where a file has several, they count as in transformers. The settings share their problems.
    """
    given = values.get("rope_scaling", {}) or values.get("rope_parameters", {})
    rope = ConfigValues(given, {"rope_theta": values.get("rope_theta", 10000.0)})
    rope.problems = values.problems
    share = rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0))
    if share != 1:
        values.problems.append(
            f"config.json: partial_rotary_factor must be 1, got {share}: transformers rotates all "
            "of each head in this family"
        )
    kind = rope.get("rope_type", "") or rope.get("type", "default")
    if kind in _USED:
        length = values.count(_OLD) or rope.count(_OLD)
        rope.values[_OLD] = length or values.need("max_position_embeddings")
        for key in ("factor", *_USED[kind]):
            if key not in _OPTIONAL and not rope.get(key, 0.0):
                values.problems.append(
                    f"config.json: {kind} rotary embeddings must say {key}, and do not; add it"
                )
    if kind == "yarn" and rope.values.get("attention_factor"):
        rope.only("attention_factor", [], "it follows from `factor`")
    return kind, rope


def rope_values(values: ConfigValues) -> dict[str, Any]:
    """rotary_base and rope_scaling."""
    kind, rope = rope_given(values)
    given = {k: v for k, v in rope.values.items() if k not in _PLAIN_ROPE}
    found: dict[str, Any] = {"rotary_base": float(rope.get("rope_theta", 10000.0))}
    if kind == "default":
        if given:
            values.problems.append(
                f"config.json: rope_parameters {given} are not one set for all layers, which is "
                "what can be represented; give one"
            )
        return found
    if kind not in _USED:
        values.problems.append(
            f"config.json: rope_type must be default, linear, llama3 or yarn, got {kind!r}: others "
            "are not built here"
        )
        return found
    plain = [k for k in ("mscale", "mscale_all_dim") if given.get(k)]
    if kind == "yarn" and plain:
        values.problems.append(
            f"config.json: rope_parameters.{plain[0]} must be absent (the factor follows from "
            f"`factor`), got {given[plain[0]]}"
        )
    scaling = {key: rope.get(key, _OPTIONAL.get(key, 0.0)) for key in ("factor", *_USED[kind])}
    return {**found, "rope_scaling": {"type": kind, **scaling}}


def written_rope(section: Any) -> dict[str, Any]:
    """The inverse of `rope_values`, in the spelling of transformers 5."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": section.rotary_base}
    if section.rotary_percent != 1.0:
        parameters["partial_rotary_factor"] = section.rotary_percent
    scaling = section.rope_scaling
    if scaling is not None:
        parameters |= {"rope_type": scaling.type, "factor": scaling.factor}
        parameters |= {key: getattr(scaling, key) for key in _USED[scaling.type]}
    return {"rope_parameters": parameters, "rope_theta": section.rotary_base}


def common_values(values: ConfigValues, epsilon: str = "rms_norm_eps") -> dict[str, Any]:
    """What every family's section has: everything but pattern, position and sizes of layers."""
    return {
        "seq_length": values.count("max_position_embeddings", 4096),
        "vocab_size": values.need("vocab_size"),
        "tie_embeddings": values.get("tie_word_embeddings", False),
        "megatron": {
            "hidden_size": values.need("hidden_size"),
            "layernorm_epsilon": values.get(epsilon, 1e-6),
        },
    }


def attention_values(values: ConfigValues) -> dict[str, Any]:
    """Heads, key-value heads and the size of a head."""
    heads = values.need("num_attention_heads")
    return {
        "num_attention_heads": heads,
        "num_query_groups": values.count("num_key_value_heads", heads),
        "kv_channels": values.count("head_dim", values.need("hidden_size") // heads),
    }


def window_values(values: ConfigValues, windowed: list[bool], symbols: int = 2) -> dict[str, Any]:
    """Sliding windows: which of their layers have one; `sliding_window` counts the query itself."""
    width = values.count("sliding_window")
    if not width or not any(windowed):
        return {}
    found: dict[str, Any] = {"window_size": [width - 1, 0]}
    if not all(windowed):
        found["window_attn_skip_freq"] = [int(w) for w in windowed for _ in range(symbols)]
    return found


def written_windows(config: Any, layers: int, symbols: int = 2) -> tuple[int | None, list[bool]]:
    """(sliding_window, which of their layers have it)."""
    from megatron.core.transformer.utils import is_layer_window_attention

    if config.window_size is None:
        return None, [False] * layers
    windowed = [
        is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer * symbols + 1
        )
        for layer in range(layers)
    ]
    return config.window_size[0] + 1, windowed


def written_common(section: Any, config: Any, epsilon: str = "rms_norm_eps") -> dict[str, Any]:
    """The inverse of `common_values` and `attention_values`."""
    return {
        "hidden_size": config.hidden_size,
        "max_position_embeddings": section.seq_length,
        "tie_word_embeddings": section.tie_embeddings,
        epsilon: config.layernorm_epsilon,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups or config.num_attention_heads,
        "head_dim": config.kv_channels,
        "initializer_range": config.init_method_std,
    }
