# SPDX-License-Identifier: Apache-2.0
"""Text or token arrays -> token shards.

    python -m tools.preprocess --input PATH... --output DIR --tokenizer FILE|train:VOCAB
    python -m tools.preprocess index DIR

The first writes DIR/tokenizer.json and DIR/train and DIR/valid, each with megatron-core's
`.bin/.idx` shards and a manifest.json. Documents are shuffled, and held out by their content. An
interrupted run goes on where it stopped when it is started again; a finished one is kept. The
second writes a manifest for `.bin/.idx` files that exist.
"""

import argparse
import hashlib
import json
import os
import shutil
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from fused_ops.errors import ConfigError
from pretrain.command_line import refused, run_program
from pretrain.data.documents import InputFile, find_inputs, records, text_of
from pretrain.data.encode import EncodeOptions, encode_inputs
from pretrain.data.manifest import (
    MANIFEST_NAME,
    DataError,
    Manifest,
    load_manifest,
    save_manifest,
    write_atomic,
)
from pretrain.data.pieces import SPLITS, PieceStore
from pretrain.data.shards import check_sizes
from pretrain.data.tokenizer import TOKENIZER_NAME, TextEncoder, load_encoder, train_tokenizer
from pretrain.data.writer import describe_folder, token_dtype

_WORK = ".work"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, folders or globs")
    add("--output", type=Path, required=True, metavar="DIR")
    add("--tokenizer", required=True, metavar="FILE|train:VOCAB")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes that encode")
    add("--eod-id", type=int, help="id that ends a document (default: the tokenizer's)")
    add("--valid-fraction", type=float, default=0.01, help="share of documents held out")
    add("--text-key", default="text", help="key of the text in JSON lines")
    add("--shard-tokens", type=int, default=1 << 26, help="tokens of a shard, about")
    add("--piece-tokens", type=int, default=1 << 23, help="tokens between two points of resume")
    add("--train-bytes", type=int, default=1 << 28, help="text that the tokenizer is trained on")
    return parser


def _index_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.preprocess index",
        description="Writes a manifest for existing .bin/.idx files.",
    )
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR")
    add("--tokenizer", type=Path, metavar="FILE", help="gives vocabulary size and fingerprint")
    add("--vocab-size", type=int, help="default: the tokenizer's, or the highest id + 1")
    add("--eod-id", type=int, help="default: the id that ends every document, if there is one")
    return parser


def _check_options(options: argparse.Namespace) -> None:
    problems = []
    if not 0 <= options.valid_fraction < 1:
        problems.append(f"--valid-fraction must be in [0, 1); got {options.valid_fraction}")
    for name in ("workers", "shard_tokens", "piece_tokens", "train_bytes"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            problems.append(f"{flag} must be at least 1; got {getattr(options, name)}")
    spec = options.tokenizer
    if spec.startswith("train:") and not spec.removeprefix("train:").isdecimal():
        problems.append(f"--tokenizer train:VOCAB needs a number, as train:4096; got {spec}")
    if problems:
        raise ConfigError(problems)


def _plan(files: list[InputFile], options: argparse.Namespace) -> str:
    """Fingerprint of the inputs and of the settings that decide the shards."""
    tokenizer = options.tokenizer
    if not tokenizer.startswith("train:"):
        path = Path(tokenizer)
        if not path.is_file():
            raise DataError(f"--tokenizer must name a file or be train:VOCAB; there is no {path}")
        tokenizer = load_encoder(path, options.eod_id).fingerprint
    inputs = [(f.path.name, f.kind, f.size, f.path.stat().st_mtime_ns) for f in files]
    settings = (options.eod_id, options.valid_fraction, options.text_key, options.shard_tokens)
    plan = json.dumps([1, inputs, tokenizer, settings, options.train_bytes])
    return "sha256:" + hashlib.sha256(plan.encode()).hexdigest()


def _is_done(output: Path, plan: str, valid_fraction: float) -> bool:
    """All manifests are there, of this plan, and their files are whole in size."""
    splits = SPLITS if valid_fraction > 0 else SPLITS[:1]
    paths = [output / split / MANIFEST_NAME for split in splits]
    if not all(path.exists() for path in paths):
        return False
    for split in splits:
        manifest = load_manifest(output / split)
        if manifest.origin != plan:
            raise DataError(
                f"{output} holds shards of other inputs or settings; name another --output, or "
                f"remove {output} to make them again"
            )
        for info in manifest.shards:
            check_sizes(output / split / info.name, info)
    return True


def _prepare_work(output: Path, plan: str) -> Path:
    """The work folder, new or of this plan."""
    work = output / _WORK
    if work.exists():
        mark = work / "plan"
        same = mark.exists() and mark.read_text() == plan
        if not same and any(work.glob("piece_*.json")):
            raise DataError(
                f"{work} holds an interrupted run with other inputs or settings; finish that one, "
                f"or remove {work} to start anew"
            )
        if same:
            return work
        shutil.rmtree(work)
    elif output.exists() and any(output.iterdir()):
        known = {TOKENIZER_NAME, *SPLITS}
        others = sorted(path.name for path in output.iterdir() if path.name not in known)
        if others:
            raise DataError(
                f"--output must be a new folder or one of this tool; {output} holds {others[0]}"
            )
    work.mkdir(parents=True, exist_ok=True)
    (output / TOKENIZER_NAME).unlink(missing_ok=True)
    write_atomic(work / "plan", plan.encode())
    return work


def _sampled_texts(files: list[InputFile], options: argparse.Namespace) -> Iterator[str]:
    """Texts to train a tokenizer on: all, or an even sample of about --train-bytes."""
    total = sum(file.size for file in files)
    limit = min(1.0, options.train_bytes / max(1, total)) * 2**32
    taken = 0
    with tqdm(total=total, unit="B", unit_scale=True, desc="read text") as bar:
        for file in files:
            progress = [0]
            for record in records(file, progress, options.text_key):
                bar.update(progress[0])
                progress[0] = 0
                if zlib.crc32(record.content) >= limit or taken >= 2 * options.train_bytes:
                    continue
                text = text_of(record, options.text_key, Counter())
                if text is not None:
                    taken += len(text)
                    yield text


def _make_tokenizer(files: list[InputFile], options: argparse.Namespace) -> TextEncoder:
    """DIR/tokenizer.json: trained, or a copy of the file that was named."""
    path = options.output / TOKENIZER_NAME
    if path.exists():
        return load_encoder(path, options.eod_id)
    if options.tokenizer.startswith("train:"):
        text_files = [file for file in files if file.kind != "tokens"]
        if not text_files:
            raise DataError("--tokenizer train:VOCAB needs text; the inputs are token arrays")
        vocab_size = int(options.tokenizer.removeprefix("train:"))
        texts = _sampled_texts(text_files, options)
        content = train_tokenizer(texts, vocab_size, show_progress=sys.stderr.isatty())
    else:
        load_encoder(Path(options.tokenizer), options.eod_id)
        content = Path(options.tokenizer).read_text()
    write_atomic(path, content.encode())
    return load_encoder(path, options.eod_id)


def _encode(files: list[InputFile], store: PieceStore, encode: EncodeOptions, workers: int) -> None:
    progress = [0]
    kept = store.records
    total = sum(file.size for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="encode") as bar:
        for documents in encode_inputs(files, encode, workers, kept, progress):
            store.add(documents)
            bar.update(progress[0])
            progress[0] = 0
    store.flush()


def preprocess(options: argparse.Namespace) -> None:
    """Runs all stages that are not done yet. Raises ConfigError for what the user can mend."""
    _check_options(options)
    skipped: Counter[str] = Counter()
    files = find_inputs(options.input, skipped)
    output, plan = options.output, _plan(files, options)
    if _is_done(output, plan, options.valid_fraction):
        print(f"{output}: done before and whole, kept")
        shutil.rmtree(output / _WORK, ignore_errors=True)
        return
    work = _prepare_work(output, plan)
    empty = sum(file.size == 0 for file in files)
    encoder = _make_tokenizer([file for file in files if file.size], options)
    dtype = token_dtype(encoder.vocab_size)
    store = PieceStore(work, dtype, options.valid_fraction, options.piece_tokens)
    if store.pieces:
        print(f"{output}: goes on after {store.records} records of an interrupted run")
    encode = EncodeOptions(
        tokenizer=output / TOKENIZER_NAME,
        eod_id=options.eod_id,
        text_key=options.text_key,
        dtype=dtype,
    )
    _encode([file for file in files if file.size], store, encode, options.workers)
    counts = store.counts + skipped
    counts["empty files, skipped"] += empty
    _check_splits(store, options.valid_fraction, work)
    for split in SPLITS if options.valid_fraction > 0 else SPLITS[:1]:
        manifest = Manifest(
            tokenizer_fingerprint=encoder.fingerprint,
            vocab_size=encoder.vocab_size,
            eod_id=encoder.eod_id,
            origin=plan,
            counts=dict(sorted((+counts).items())),
            shards=store.write_shards(split, output / split, options.shard_tokens),
        )
        save_manifest(output / split, manifest)
        print(
            f"{output / split}: {manifest.tokens} tokens, {manifest.documents} documents, "
            f"{len(manifest.shards)} shards of {dtype}"
        )
    print(f"vocabulary {encoder.vocab_size}, end-of-document id {encoder.eod_id}")
    for name, count in sorted((+counts).items()):
        print(f"{count} {name}")
    shutil.rmtree(work)


def _check_splits(store: PieceStore, valid_fraction: float, work: Path) -> None:
    """Each split has documents, or DataError; then no piece is worth keeping."""
    total = store.documents("train") + store.documents("valid")
    splits = SPLITS if valid_fraction > 0 else SPLITS[:1]
    if any(store.documents(split) == 0 for split in splits):
        shutil.rmtree(work)
    if total == 0:
        shown = ", ".join(f"{count} {name}" for name, count in sorted(store.counts.items()))
        raise DataError(f"the inputs must hold at least one document; they hold none ({shown})")
    for split in splits:
        if store.documents(split) == 0:
            raise DataError(
                f"--valid-fraction must leave documents for both splits; of {total} documents "
                f"{valid_fraction} leaves none for {split}: change it, or set it to 0"
            )


def index(options: argparse.Namespace) -> None:
    """Writes the manifest of a folder of existing shards."""
    vocab_size, fingerprint, eod_id = options.vocab_size, None, options.eod_id
    if options.tokenizer is not None:
        encoder = load_encoder(options.tokenizer, options.eod_id)
        fingerprint, eod_id = encoder.fingerprint, encoder.eod_id
        vocab_size = vocab_size or encoder.vocab_size
    names = sorted(
        {
            path.relative_to(options.directory).with_suffix("").as_posix()
            for suffix in (".idx", ".bin")
            for path in options.directory.rglob("*" + suffix)
        }
    )
    if not names:
        raise DataError(f"a folder to index must hold .idx files; {options.directory} has none")
    infos, highest, common_end = describe_folder(
        options.directory, tqdm(names, unit="shard", desc="index"), vocab_size
    )
    manifest = Manifest(
        tokenizer_fingerprint=fingerprint,
        vocab_size=vocab_size or highest + 1,
        eod_id=common_end if eod_id is None else eod_id,
        shards=infos,
    )
    if not manifest.tokens:
        raise DataError(
            f"a folder of shards must hold at least one token; the {len(infos)} of "
            f"{options.directory} hold none"
        )
    save_manifest(options.directory, manifest)
    print(
        f"{options.directory}: {manifest.tokens} tokens, {manifest.documents} documents, "
        f"{len(infos)} shards, vocabulary {manifest.vocab_size}, "
        f"end-of-document id {manifest.eod_id}"
    )


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments[:1] == ["index"]:
            index(_index_parser().parse_args(arguments[1:]))
        else:
            preprocess(_parser().parse_args(arguments))
    except ConfigError as error:
        return refused(error)
    except OSError as error:
        print(
            f"error: files must be readable and writable; {error.filename}: {error.strerror}; "
            "what is finished is kept, run the same command again",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("interrupted: finished pieces are kept, run the same command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_program(main)
