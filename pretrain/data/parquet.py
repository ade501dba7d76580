# SPDX-License-Identifier: Apache-2.0
"""Texts of a column of a Parquet file, some rows at a time; needs pyarrow, which is optional."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.data.manifest import DataError

# Rows that are decoded together; a row group of a file may hold millions.
_ROWS = 1024


def parquet_texts(path: Path, column: str) -> Iterator[tuple[list[bytes], float]]:
    """(texts of some rows as bytes, share of the file's rows that is done), in the file's order.

    A missing value is an empty text. Raises DataError without pyarrow, for a file that is not
    Parquet or is damaged, and for a column that is absent or does not hold text.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"Parquet input needs the package pyarrow, which is not installed ({path}): install it "
            "with `pip install pyarrow`, or convert the file to JSON lines"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow, column)
            rows, done = max(1, file.metadata.num_rows), 0
            for batch in file.iter_batches(_ROWS, columns=[column]):
                done += batch.num_rows
                values = batch.column(0)
                if arrow.types.is_dictionary(values.type):
                    values = values.dictionary_decode()
                # As bytes: text that is not UTF-8 is repaired and counted as in other inputs.
                texts = values.cast(arrow.large_binary()).to_pylist()
                yield [text or b"" for text in texts], done / rows
    except (arrow.ArrowException, OSError) as error:
        said = str(error).split("\n", maxsplit=1)[0]
        raise DataError(f"an input must be readable to its end; {path}: {said}") from None


def _check_column(path: Path, schema: Any, column: str) -> None:
    import pyarrow.types as types

    if column not in schema.names:
        raise DataError(
            f"a Parquet file must have a column {column!r}; {path} has {', '.join(schema.names)}: "
            "name another column with --text-key"
        )
    kind = schema.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    text = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    if not any(check(kind) for check in text):
        raise DataError(
            f"a Parquet column must hold strings; {path} has {column} of type {kind}: name another "
            "column with --text-key"
        )
