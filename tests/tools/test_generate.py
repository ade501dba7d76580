# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.functional import cross_entropy

from fused_ops.errors import ConfigError
from pretrain.__main__ import main as pretrain
from pretrain.data.config import DataConfig, SourceConfig
from pretrain.data.dataset import open_validation
from pretrain.data.loader import BatchOptions, ValidLoader
from pretrain.history import read_metrics
from pretrain.initialize import shut_down
from tests.toy import make_toy, toy_config
from tools.generate import Generator, Sampling, choose, find_tokenizer, main, sample_tokens

LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0])


def draws(sampling: Sampling, count: int = 2000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sampling.seed)
    picked = [choose(LOGITS, sampling, generator) for _ in range(count)]
    return torch.bincount(torch.tensor(picked), minlength=4) / count


def test_temperature_zero_takes_the_likeliest():
    assert draws(Sampling(temperature=0), 20).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_scales_the_logits(temperature):
    expected = (LOGITS / temperature).softmax(0)
    # Four standard deviations of a share of 2000 draws.
    bound = 4 * math.sqrt(0.25 / 2000)
    found = draws(Sampling(temperature=temperature, top_k=0, seed=1))
    assert (found - expected).abs().max() < bound


def test_top_k_leaves_the_others_out():
    found = draws(Sampling(temperature=1.0, top_k=2))
    assert found[0] == found[3] == 0
    assert abs(found[1] - torch.tensor([3.0, 2.0]).softmax(0)[0]) < 0.04


def test_tokens_follow_their_text_and_end_at_the_end_of_document():
    seen = []

    def counting(ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids.tolist()[0])
        return torch.nn.functional.one_hot(ids[0, -1] + 1, 10).float()

    greedy = Sampling(temperature=0)
    assert list(sample_tokens(counting, [3], 3, greedy)) == [4, 5, 6]
    assert seen == [[3], [3, 4], [3, 4, 5]]
    assert list(sample_tokens(counting, [3], 9, greedy, stop=6)) == [4, 5]


def test_the_tokenizer_lies_beside_the_data(tmp_path):
    (tmp_path / "train").mkdir()
    source = SourceConfig(path=str(tmp_path / "train"))
    with pytest.raises(ConfigError, match=r"beside the run's data.*--tokenizer FILE"):
        find_tokenizer(DataConfig(train=[source]), None)
    with pytest.raises(ConfigError, match="must be readable"):
        find_tokenizer(DataConfig(train=str(tmp_path)), tmp_path / "none.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "0", "--top-k", "-1"], ("--tokens must be", "--top-k must not")),
        ([], ("CKPT_DIR must hold a checkpoint",)),
    ],
)
def test_mistakes_are_said_at_once(tmp_path, capsys, words, said):
    assert main([str(tmp_path), *words]) == 2
    errors = capsys.readouterr().err
    assert all(text in errors for text in said)
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of a few steps in NVFP4, with a tokenizer of 128 words beside its data."""
    folder = make_toy(tmp_path_factory.mktemp("toy"))
    words = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, 128)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    sections = {
        "run": {"name": "words"},
        "train": {"steps": 5, "dtype": "bf16", "eval_batches": 1},
        "precision": {"recipe": "nvfp4"},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(toy_config(folder, "M*-E", **sections)))
    assert pretrain([str(path)]) == 0
    return folder / "runs" / "words" / "checkpoints"


def test_the_model_is_the_trained_one(trained):
    """Its loss on the validation batch is the one that the run ended with."""
    run = Generator(trained, None)
    data, length = run.config.data, run.config.model.seq_length
    sizes = {"global_batch_size": 8, "micro_batch_size": 4, "dp_rank": 0, "dp_size": 1}
    valid = open_validation(data, length, 128)[""]
    loader = ValidLoader(valid, options=BatchOptions.of(data), **sizes)
    losses = []
    with torch.no_grad():
        for batch in next(iter(loader.batches(1))):
            logits = run.model(batch["tokens"], batch["position_ids"], None).float()
            losses.append(cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
    rows = read_metrics(trained.parent / "metrics.jsonl")
    expected = next(row["val_loss"] for row in reversed(rows) if "val_loss" in row)
    assert torch.stack(losses).mean().item() == pytest.approx(expected, abs=1e-5)
    shut_down()


def test_text_from_a_run_and_from_one_step(trained, capsys):
    words = ["--prompt", "w5 w6", "--tokens", "8", "--temperature", "1", "--top-k", "0"]
    assert main([str(trained / "step_00000005"), *words]) == 0
    first = capsys.readouterr().out
    assert first.startswith("w5 w6")
    assert 2 < len(first.split()) <= 10
    assert all(word[0] == "w" for word in first.split())
    run = Generator(trained, None)
    texts = ["".join(run.text("w5 w6", 8, Sampling(1.0, 0, seed))) for seed in (0, 1, 2)]
    assert f"w5 w6{texts[0]}\n" == first, "the same seed gives the same text"
    assert len(set(texts)) == 3, "another seed gives another text"
    shut_down()
