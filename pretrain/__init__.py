# SPDX-License-Identifier: Apache-2.0
"""The run: a config goes in, checkpoints and metrics come out."""

import importlib.util as _util
import os as _os
from pathlib import Path as _Path

# Rooms have common names, and nothing is installed: say so when another package would win.
for _room in ("models", "fused_ops", "tools"):
    _ours = _Path(__file__).resolve().parent.parent / _room / "__init__.py"
    _spec = _util.find_spec(_room)
    _found = _Path(_spec.origin).resolve() if _spec and _spec.origin else None
    if _found != _ours:
        raise ImportError(
            f"`import {_room}` would take {_found or 'nothing'} instead of {_ours}; "
            f"run from {_ours.parent.parent} with `python -m`, or uninstall the other {_room!r}"
        )

# Triton keeps what it tuned on disk: mamba-ssm's kernels would take a minute or more at every
# start, and another start could sum in another order. Read when mamba-ssm is imported.
_os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
