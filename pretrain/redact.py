# SPDX-License-Identifier: Apache-2.0
"""Keeps secrets out of everything a run writes: configs, logs, reports, environment records."""

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"

_SECRET_NAME = re.compile(
    r"(api_?key|access_?key|account_?key|private_?key|encryption_?key|secret|passw(or)?d|"
    r"passphrase|credential|connection_string|(^|[_.-])(auth|token|pat|sas|sig)$|auth_?token|"
    r"bearer|authorization|signature$)",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(?<=://)([^/\s:@]*:[^/\s@]+|[^/\s:@]{20,})(?=@)")
# name=value, name: value, "name": "value"; a quoted value with all that is in the quotes.
_ASSIGNMENT = re.compile(
    r"(?<![\w.-])(?P<name>[A-Za-z_-][\w.-]*)(?P<sign>[\"']?(?:=|:\s+|:(?=[\"'])))"
    r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|(?:(?:Bearer|Basic)\s+)?[^\s&]+)"
)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.+/=~-]{8,}")
# What issuers begin their keys with, wherever they stand.
_KNOWN = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|"
    r"sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|"
    r"eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)|"
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
)
_SHORTEST_SECRET = 8
# `export NAME=$(cat FILE)`, `NAME=$OTHER`: a shell's way to have a secret without showing it.
_REFERENCE = re.compile(
    r"(?<![\w.-])[A-Za-z_][\w.-]*(=|:\s+)[\"']?\$(\([^)\n]*\)|\{[^}\n]*\}|\w+)[\"']?"
)


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: `wandb_api_key` does, `tokens` does not."""
    return bool(_SECRET_NAME.search(name))


def secret_values(environ: Mapping[str, str] | None = None) -> list[str]:
    """Values of secret-looking environment variables, longest first."""
    environ = os.environ if environ is None else environ
    values = {v for k, v in environ.items() if is_secret_name(k) and len(v) >= _SHORTEST_SECRET}
    return sorted(values, key=len, reverse=True)


def mask_text(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` without secrets.

    Those are values of secret environment variables, users and passwords of URLs, `key=secret`,
    `key: secret`, signatures of URLs, bearer tokens, and keys known by their beginning.
    """
    for value in secret_values(environ):
        text = text.replace(value, MASK)
    text = _URL_USER.sub(MASK, text)
    text = _KNOWN.sub(MASK, text)
    text = _ASSIGNMENT.sub(_mask_assignment, text)
    return _BEARER.sub(rf"\1 {MASK}", text)


def holds_secret(text: str) -> bool:
    """Whether a secret stands in a text that others will read; a shell's reference is none."""
    text = _REFERENCE.sub("", text)
    return mask_text(text) != text


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
    name, sign, value = match["name"], match["sign"], match["value"]
    if not is_secret_name(name):
        return f"{name}{sign}{_ASSIGNMENT.sub(_mask_assignment, value)}"
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{sign}{quote}{MASK}{quote}"
