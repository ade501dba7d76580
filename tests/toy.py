# SPDX-License-Identifier: Apache-2.0
"""Toy data that a model can learn, and run files that train on it in seconds."""

from pathlib import Path

import numpy as np

from pretrain.data.manifest import MANIFEST_NAME, Manifest
from pretrain.data.writer import write_shard

VOCAB = 128
EOD = 0
SEQ_LENGTH = 32

MODEL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 128,
    "qk_layernorm": True,
}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 32, "mamba_state_dim": 16, "mamba_num_groups": 2}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_router_load_balancing_type": "none",
}


def write_toy_data(folder: Path, documents: int = 120, seed: int = 0) -> Path:
    """A folder of token shards: documents count upwards by a step that their start decides."""
    rng = np.random.default_rng(seed)
    pieces = []
    for _ in range(documents):
        start, length = rng.integers(1, VOCAB), rng.integers(20, 90)
        stride = 1 + start % 5
        pieces.append((start - 1 + stride * np.arange(length)) % (VOCAB - 1) + 1)
        pieces[-1][-1] = EOD
    lengths = np.array([piece.size for piece in pieces], dtype=np.int32)
    folder.mkdir(parents=True, exist_ok=True)
    shard = write_shard(folder, "shard-000", np.concatenate(pieces).astype(np.uint16), lengths)
    manifest = Manifest(tokenizer_fingerprint=None, vocab_size=VOCAB, eod_id=EOD, shards=[shard])
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json())
    return folder


def megatron_of(pattern: str) -> dict:
    """Fields of the engine's config that the layers of a pattern need, at toy size."""
    found = dict(MODEL)
    if "M" in pattern:
        found |= MAMBA
    if "E" in pattern:
        found |= EXPERTS
    return found


def toy_config(folder: Path, pattern: str = "*-", **sections: dict) -> dict:
    """Plain values of a run in `folder`, which holds `train` and `valid`; sections are merged."""
    data = {
        "run": {"name": "toy", "dir": str(folder / "runs"), "seed": 7},
        "model": {
            "pattern": pattern,
            "seq_length": SEQ_LENGTH,
            "init_std": 0.05,
            "megatron": megatron_of(pattern),
        },
        "data": {"train": str(folder / "train"), "valid": str(folder / "valid")},
        "train": {"steps": 4, "global_batch_size": 8, "micro_batch_size": 4, "dtype": "fp32"},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "precision": {},
        "checkpoint": {"interval": 0},
        "log": {"progress": "none", "report": False},
    }
    for name, changes in sections.items():
        data[name] = {**data.get(name, {}), **changes}
    return data


def make_toy(folder: Path) -> Path:
    """`folder` with train and valid shards."""
    write_toy_data(folder / "train")
    write_toy_data(folder / "valid", documents=12, seed=1)
    return folder
