# SPDX-License-Identifier: Apache-2.0
"""Keeps secrets out of everything a run writes: configs, logs, reports, environment records."""

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_SECRET_NAME = re.compile(
    r"(api_?key|access_?key|private_?key|secret|passw(or)?d|passphrase|credential|"
    r"(^|[_.-])(auth|token|pat|sas)$|auth_?token|bearer)",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][\w.-]*)(?P<sign>=|:\s)(?P<value>\S+)")
_SHORTEST_SECRET = 8


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: `wandb_api_key` does, `tokens` does not."""
    return bool(_SECRET_NAME.search(name))


def secret_values(environ: Mapping[str, str] | None = None) -> list[str]:
    """Values of secret-looking environment variables, longest first."""
    environ = os.environ if environ is None else environ
    values = {v for k, v in environ.items() if is_secret_name(k) and len(v) >= _SHORTEST_SECRET}
    return sorted(values, key=len, reverse=True)


def mask_text(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without the values of secret environment variables, URL passwords, `key=secret`."""
    for value in secret_values(environ):
        text = text.replace(value, MASK)
    text = _URL_USER.sub(MASK, text)
    return _ASSIGNMENT.sub(_mask_assignment, text)


def mask_secrets(value: Any, environ: Mapping[str, str] | None = None) -> Any:
    """A copy of nested dicts and lists with every secret replaced by `***`.

    A secret is the value of a key that `is_secret_name` knows, or text that `mask_text` changes.
    """
    if isinstance(value, Mapping):
        return {
            k: MASK if is_secret_name(str(k)) and v not in (None, "") else mask_secrets(v, environ)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [mask_secrets(v, environ) for v in value]
    return mask_text(value, environ) if isinstance(value, str) else value


def _mask_assignment(match: re.Match[str]) -> str:
    if not is_secret_name(match["name"]):
        return match[0]
    return f"{match['name']}{match['sign']}{MASK}"
