# SPDX-License-Identifier: Apache-2.0
"""From run folders to rows, the base among them, and how long their training was for its model."""

from collections.abc import Sequence
from pathlib import Path

from fused_ops.errors import ConfigError
from models.flops import count_parameters
from models.precision import model_shape
from pretrain.comparison.runs import Row, find_runs, group_runs, read_run
from pretrain.config import CONFIG_FILE, load_config


def load_rows(folders: Sequence[str | Path]) -> list[Row]:
    """The rows in the folders. Raises ConfigError with everything that cannot be read."""
    runs, problems = [], []
    for folder in find_runs(folders):
        try:
            runs.append(read_run(folder))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return group_runs(runs)


def base_row(rows: Sequence[Row], label: str | None) -> Row:
    """The row of this label, or the first one. Raises ConfigError naming those there are."""
    if label is None:
        return rows[0]
    for row in rows:
        if row.label == label:
            return row
    raise ConfigError(
        f"--base and --ratio-to must name a row; got {label!r}; there are "
        f"{', '.join(row.label for row in rows)}"
    )


def tokens_per_parameter(row: Row) -> float:
    """Tokens at the end over parameters without embedding and output layer."""
    run = next(iter(row.runs.values()))
    config = load_config(run.path / CONFIG_FILE)
    shape = model_shape(config.model, params_dtype=config.train.torch_dtype)
    count = count_parameters(shape)
    tokens = config.train.total_samples * config.model.seq_length
    return tokens / max(1, sum(module.parameters for module in shape.modules()) or count.total)
