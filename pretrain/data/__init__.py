# SPDX-License-Identifier: Apache-2.0
"""Token shards in, micro-batches out: the sequence of samples is a function of one integer.

`order.py` and `blend.py` say which tokens sample i is, from (seed, i, manifest) alone;
`shards.py` reads them from megatron-core's `.bin/.idx` files; `loader.py` makes the batches of a
step. Names are loaded when first used, so that the tools that only write shards do not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pretrain.data.config import DataConfig, SourceConfig
    from pretrain.data.dataset import Dataset, open_dataset, open_validation
    from pretrain.data.loader import MicroBatch, TrainLoader, ValidLoader
    from pretrain.data.manifest import DataError

__all__ = [
    "DataConfig",
    "DataError",
    "Dataset",
    "MicroBatch",
    "SourceConfig",
    "TrainLoader",
    "ValidLoader",
    "open_dataset",
    "open_validation",
]

_HOMES = {
    "DataConfig": "config",
    "SourceConfig": "config",
    "DataError": "manifest",
    "Dataset": "dataset",
    "open_dataset": "dataset",
    "open_validation": "dataset",
    "MicroBatch": "loader",
    "TrainLoader": "loader",
    "ValidLoader": "loader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
