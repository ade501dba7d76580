# SPDX-License-Identifier: Apache-2.0
"""Small folders of shards for tests."""

from pathlib import Path

import numpy as np

from pretrain.data.manifest import Manifest, save_manifest
from pretrain.data.writer import write_shard

EOD = 0
VOCAB = 1000


def documents(count: int, seed: int = 0, longest: int = 60, vocab: int = VOCAB) -> list[np.ndarray]:
    """Documents of 1..longest random ids in [1, vocab), each ending with EOD."""
    random = np.random.default_rng(seed)
    return [
        np.append(random.integers(1, vocab, random.integers(1, longest + 1)), EOD)
        for _ in range(count)
    ]


def write_folder(
    folder: Path,
    texts: list[np.ndarray],
    num_shards: int = 3,
    vocab: int = VOCAB,
    dtype: str = "uint16",
) -> Manifest:
    """Writes the documents to shards of about equal document counts, and the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    infos = []
    for number, part in enumerate(np.array_split(np.arange(len(texts)), num_shards)):
        lengths = np.array([texts[i].size for i in part])
        tokens = np.concatenate([texts[i] for i in part]).astype(dtype)
        infos.append(write_shard(folder, f"shard_{number:05d}", tokens, lengths))
    manifest = Manifest(tokenizer_fingerprint=None, vocab_size=vocab, eod_id=EOD, shards=infos)
    save_manifest(folder, manifest)
    return manifest
