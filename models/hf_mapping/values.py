# SPDX-License-Identifier: Apache-2.0
"""Reading a config.json strictly, and what the families' configurations have in common."""

from collections.abc import Iterable
from typing import Any

from fused_ops.errors import ConfigError

SWIGLU = {"gated_linear_unit": True, "activation_func": "silu"}
_ROPE_KEYS = {
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "truncate",
}


class ConfigValues:
    """The values of a config.json; problems are collected and raised together by `finish`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.problems: list[str] = []

    def get(self, name: str, default: Any = None) -> Any:
        """A value; the default where it is absent or null."""
        value = self.values.get(name)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """A value that must be there."""
        value = self.values.get(name)
        if value is None:
            self.problems.append(f"config.json must say {name}, and does not; add it")
            return 0
        return value

    def only(self, name: str, allowed: Iterable[Any], why: str) -> None:
        """A value that, where it is given, can only be one of these."""
        value, allowed = self.values.get(name), list(allowed)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            self.problems.append(f"config.json: {name} must be {wanted}, got {value!r}: {why}")

    def finish(self, section: dict[str, Any]) -> dict[str, Any]:
        """The section, unless there were problems."""
        if self.problems:
            raise ConfigError(self.problems)
        return section


def rope_values(values: ConfigValues) -> dict[str, Any]:
    """rotary_base, rotary_percent and rope_scaling, from any of the spellings in use."""
    given = values.get("rope_parameters") or values.get("rope_scaling") or {}
    base = given.get("rope_theta") or values.get("rope_theta", 10000.0)
    share = given.get("partial_rotary_factor") or values.get("partial_rotary_factor", 1.0)
    found: dict[str, Any] = {"rotary_base": float(base), "rotary_percent": float(share)}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        if given and not {"rope_theta", "rope_type", "partial_rotary_factor", "type"} >= set(given):
            values.problems.append(
                f"config.json: rope_parameters {given} are not one set for all layers, which is "
                "what can be represented; give one"
            )
        return found
    if kind not in ("linear", "llama3", "yarn"):
        values.problems.append(
            f"config.json: rope_type must be default, linear, llama3 or yarn, got {kind!r}: others "
            "are not built here"
        )
        return found
    if kind == "yarn":
        plain = [k for k in ("attention_factor", "mscale", "mscale_all_dim") if given.get(k)]
        if plain:
            values.problems.append(
                f"config.json: rope_parameters.{plain[0]} must be absent (the factor follows from "
                f"`factor`), got {given[plain[0]]}"
            )
    scaling = {k: v for k, v in given.items() if k in _ROPE_KEYS and v is not None}
    if kind == "yarn":
        scaling.setdefault(
            "original_max_position_embeddings", values.need("max_position_embeddings")
        )
    found["rope_scaling"] = {"type": kind, **scaling}
    return found


def written_rope(section: Any) -> dict[str, Any]:
    """The inverse of `rope_values`, in the spelling of transformers 5."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": section.rotary_base}
    if section.rotary_percent != 1.0:
        parameters["partial_rotary_factor"] = section.rotary_percent
    scaling = section.rope_scaling
    if scaling is not None:
        used = {
            "linear": (),
            "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
            "yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"),
        }[scaling.type]
        parameters |= {"rope_type": scaling.type, "factor": scaling.factor}
        parameters |= {key: getattr(scaling, key) for key in used}
    return {"rope_parameters": parameters, "rope_theta": section.rotary_base}


def common_values(values: ConfigValues, epsilon: str = "rms_norm_eps") -> dict[str, Any]:
    """What every family's section has: everything but pattern, position and sizes of layers."""
    return {
        "seq_length": values.get("max_position_embeddings", 4096),
        "vocab_size": values.need("vocab_size"),
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
        "megatron": {
            "hidden_size": values.need("hidden_size"),
            "layernorm_epsilon": values.get(epsilon, 1e-6),
        },
    }


def attention_values(values: ConfigValues) -> dict[str, Any]:
    """Heads, key-value heads and the size of a head."""
    heads = values.need("num_attention_heads") or 1
    return {
        "num_attention_heads": heads,
        "num_query_groups": values.get("num_key_value_heads", heads),
        "kv_channels": values.get("head_dim", values.need("hidden_size") // heads),
    }


def window_values(values: ConfigValues, windowed: list[bool], symbols: int = 2) -> dict[str, Any]:
    """Sliding windows: which of their layers have one; `sliding_window` counts the query itself."""
    width = values.get("sliding_window")
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
