# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE tokenizers: train, load with an end-of-document id, encode long text in slices."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fused_ops.errors import ConfigError
from pretrain.data.manifest import DataError, Manifest

TOKENIZER_NAME = "tokenizer.json"
EOD_TOKEN = "<|endoftext|>"
_EOD_NAMES = (EOD_TOKEN, "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "[SEP]")

# 256 bytes and the end of a document.
_MIN_VOCAB = 257

# Longer text is encoded in slices of about this many characters, so that memory stays bounded.
_SLICE = 1 << 19

# A trainer takes time that grows with the square of a run of one character ("xxxx..."), so that a
# line of megabytes would never end: in training a word is at most twice this long.
_TRAIN_SLICE = 2048

# Where GPT-like pre-tokenizers always cut: before a space that follows a letter or a digit.
_CUT = re.compile(r"(?<=[^\W_]) ")


@dataclass(frozen=True)
class TextEncoder:
    """A tokenizer with its end-of-document id.

    Attributes:
        vocab_size: highest id + 1.
        fingerprint: 'sha256:' and the digest of the tokenizer file.
    """

    tokenizer: Tokenizer
    eod_id: int
    vocab_size: int
    fingerprint: str
    sliced: bool

    def encode(self, text: str) -> np.ndarray:
        """int32[n] ids of a document without the final end-of-document id.

        Names of special tokens that occur in the text are encoded as ordinary text.
        """
        pieces = slices(text) if self.sliced else [text]
        # One slice at a time: the library's encodings take about a hundred bytes a token.
        ids = [self._ids(piece) for piece in pieces]
        return np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32)

    def _ids(self, text: str) -> np.ndarray:
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)


def slices(text: str, size: int = _SLICE) -> Iterator[str]:
    """Cuts text where the ids do not depend on it; a run without such a place is cut anyway."""
    start = 0
    while len(text) - start > size:
        cut = _CUT.search(text, start + size, start + 2 * size)
        stop = cut.start() if cut else min(start + 2 * size, len(text))
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def load_encoder(path: Path, eod_id: int | None = None) -> TextEncoder:
    """Reads a tokenizer file of the `tokenizers` library.

    Raises:
        DataError: missing or broken file, or no end-of-document id.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"a tokenizer must be readable; {path}: {error.strerror}") from None
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:
        raise DataError(
            f"a tokenizer must be a tokenizer.json of the `tokenizers` library; {path}: {error}"
        ) from None
    # A text may hold the characters of a special token; it is not one.
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    vocab_size = max(vocab.values()) + 1
    return TextEncoder(
        tokenizer=tokenizer,
        eod_id=_find_eod(path, vocab, vocab_size, eod_id),
        vocab_size=vocab_size,
        fingerprint="sha256:" + hashlib.sha256(content).hexdigest(),
        sliced=_is_byte_level(json.loads(content)),
    )


def _find_eod(path: Path, vocab: dict[str, int], vocab_size: int, eod_id: int | None) -> int:
    if eod_id is not None:
        if not 0 <= eod_id < vocab_size:
            raise DataError(
                f"--eod-id must be an id of the tokenizer, in [0, {vocab_size}); got {eod_id}"
            )
        return eod_id
    for name in _EOD_NAMES:
        if name in vocab:
            return vocab[name]
    raise DataError(
        f"a tokenizer must have an end-of-document token; {path} has none of "
        f"{', '.join(_EOD_NAMES)}: name its id with --eod-id"
    )


def _is_byte_level(description: dict) -> bool:
    """Slices are safe without a normalizer and without a space put before the text."""
    steps = description.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    level = [step for step in steps if step.get("type") == "ByteLevel"]
    return bool(
        level
        and not any(step.get("add_prefix_space") for step in level)
        and description.get("normalizer") is None
    )


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, show_progress: bool) -> str:
    """Trains a byte-level BPE with `<|endoftext|>` = 0; returns the content of its file."""
    if vocab_size < _MIN_VOCAB:
        raise ConfigError(
            f"--tokenizer train:VOCAB must be at least {_MIN_VOCAB} (256 bytes and the end of a "
            f"document); got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
    )
    pieces = (piece for text in texts for piece in slices(text, _TRAIN_SLICE))
    tokenizer.train_from_iterator(pieces, trainer)
    return str(tokenizer.to_str(pretty=True))


def check_tokenizer(path: Path, manifest: Manifest) -> None:
    """The file is the one that the manifest's shards were made with, or DataError."""
    try:
        found = "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise DataError(f"a tokenizer must be readable; {path}: {error.strerror}") from None
    if manifest.tokenizer_fingerprint and found != manifest.tokenizer_fingerprint:
        raise DataError(
            "a tokenizer must be the one the shards were made with, "
            f"{manifest.tokenizer_fingerprint}; {path} is {found}"
        )
