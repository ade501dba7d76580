# SPDX-License-Identifier: Apache-2.0
"""A run of a few steps with a tokenizer of 128 words beside its data, for tests of generation."""

from pathlib import Path

import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from pretrain.__main__ import main as pretrain
from tests.toy import make_toy, toy_config


def words_run(folder: Path, pattern: str, *, dtype: str = "fp32", **precision: object) -> Path:
    """Trains; the run's checkpoints folder."""
    make_toy(folder)
    words = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, 128)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    sections = {
        "run": {"name": "words"},
        "train": {"steps": 5, "dtype": dtype, "eval_batches": 1},
        "precision": precision,
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(toy_config(folder, pattern, **sections)))
    assert pretrain([str(path)]) == 0
    return folder / "runs" / "words" / "checkpoints"
