# SPDX-License-Identifier: Apache-2.0
import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy

from fused_ops.errors import ConfigError
from models.generation.sampling import Sampling
from pretrain.data.config import DataConfig, SourceConfig
from pretrain.data.dataset import open_validation
from pretrain.data.loader import BatchOptions, ValidLoader
from pretrain.generation.opened import OpenedModel, find_tokenizer
from pretrain.history import read_metrics
from pretrain.initialize import shut_down
from tests.pretrain.generation_run import words_run
from tools.generate import main


def test_the_tokenizer_lies_beside_the_data(tmp_path):
    (tmp_path / "train").mkdir()
    source = SourceConfig(path=str(tmp_path / "train"))
    with pytest.raises(ConfigError, match=r"beside the run's data.*--tokenizer FILE"):
        find_tokenizer(tmp_path, DataConfig(train=[source]), None)
    with pytest.raises(ConfigError, match="must be readable"):
        find_tokenizer(tmp_path, DataConfig(train=str(tmp_path)), tmp_path / "none.json")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--tokens", "0", "--top-k", "-1", "--top-p", "0", "--prompts", "none.txt"],
            ("--tokens must be", "--top-k must not", "--top-p must", "--prompts must be a file"),
        ),
        ([], ("CKPT_DIR must hold a checkpoint",)),
    ],
)
def test_mistakes_are_said_at_once(tmp_path, capsys, words, said):
    assert main([str(tmp_path), *words]) == 2
    errors = capsys.readouterr().err
    assert all(text in errors for text in said)
    assert "Traceback" not in errors


def test_prompts_and_seeds_that_cannot_be_used(tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    words = [str(tmp_path), "--seed", "99999999999999999999", "--prompts", str(prompts)]
    for held, said in ((b"a \xff b\n", "in UTF-8; got"), (b"\n\n", "has only empty lines")):
        prompts.write_bytes(held)
        assert main(words) == 2
        errors = capsys.readouterr().err
        assert said in errors
        assert "--seed must be between -2^62 and 2^62" in errors
        assert "Traceback" not in errors
    assert main([str(tmp_path), "--prompt", "caf\udce9"]) == 2
    assert "--prompt must be text in UTF-8; got 'caf\\udce9'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of a few steps in NVFP4, with a tokenizer of 128 words beside its data."""
    return words_run(tmp_path_factory.mktemp("toy"), "M*-E", dtype="bf16", recipe="nvfp4")


def test_the_model_is_the_trained_one(trained):
    """Its loss on the validation batch is the one that the run ended with."""
    run = OpenedModel(trained)
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
    run = OpenedModel(trained)
    texts = []
    for seed in (0, 1, 2):
        pieces = run.continue_texts(["w5 w6"], 8, Sampling(1.0, 0, seed=seed))
        texts.append("".join(piece for _, piece in pieces))
    assert f"w5 w6{texts[0]}\n" == first, "the same seed gives the same text"
    assert all(text.startswith(" w") for text in texts if text), "a word apart from the prompt's"
    assert len(set(texts)) == 3, "another seed gives another text"
    shut_down()


def test_a_newer_checkpoint_is_not_passed_over_in_silence(trained, tmp_path, caplog):
    for step in (5, 6):
        shutil.copytree(trained / "step_00000005", tmp_path / f"step_{step:08d}")
    (tmp_path / "step_00000006" / "state.json").write_text("{")
    assert main([str(tmp_path), "--prompt", "w5", "--tokens", "1"]) == 0
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said.startswith("checkpoint passed over, step_00000005 is read: step_00000006/")
    assert "state.json has 1 bytes instead of" in said


def test_another_models_checkpoint_and_a_gpu_that_is_not_there(trained, capsys):
    words = [str(trained), "--prompt", "w1", "--tokens", "2"]
    assert main([*words, "model.pattern=M*E"]) == 2
    assert "weights that this model has no place for, such as decoder.layers.2.mlp" in (
        capsys.readouterr().err
    )
    if not torch.cuda.is_available():
        assert main([*words, "--device", "cuda"]) == 2
        assert "device cuda needs a GPU that torch can use" in capsys.readouterr().err


def test_several_prompts_go_together(trained, tmp_path, capsys):
    more = tmp_path / "prompts.txt"
    more.write_text("w9\n\nw3 w4 w5\n")
    words = ["--prompt", "w5 w6", "--prompts", str(more), "--tokens", "40", "--temperature", "0"]
    assert main([str(trained), *words, "--batch-invariant"]) == 2, "the run's nvfp4 has one amax"
    assert "shares an amax with others" in capsys.readouterr().err
    assert main([str(trained), "--prompt", "w9", "--tokens", "2", "--batch-invariant"]) == 2
    assert capsys.readouterr().out == "", "the prompt is no answer"
    assert main([str(trained), *words, "--tokens", "2"]) == 0
    assert "a text depends on the prompts beside it" in capsys.readouterr().err
    words += ["--batch-invariant", "precision.recipe=nvfp4_pow2"]
    assert main([str(trained), *words]) == 0
    printed = capsys.readouterr()
    assert "up to 44 tokens, and the model was trained on 32" in printed.err
    assert "beside it" not in printed.err
    texts = [text.partition("] ")[2] for text in printed.out.strip().split("\n\n")]
    assert len(texts) == 3
    for prompt, text in zip(("w5 w6", "w9", "w3 w4 w5"), texts):
        assert text.startswith(prompt)
        assert main([str(trained), "--prompt", prompt, *words[4:]]) == 0
        assert capsys.readouterr().out.strip() == text, "alone it says the same"


def carry(trained, folder, framed, **stated):
    """The checkpoint as an import would leave it: with the small files of a model folder."""
    step = folder / "step_00000005"
    shutil.copytree(trained / "step_00000005", step)
    words = {"<s>": 0, "</s>": 1} | {f"w{i}": i for i in range(2, 128)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    if framed:
        tokenizer.post_processor = TemplateProcessing(
            "<s> $A </s>", None, [("<s>", 0), ("</s>", 1)]
        )
    tokenizer.save(str(step / "hf.tokenizer.json"))
    (step / "hf.config.json").write_text(json.dumps(stated))
    return step


def test_the_tokenizer_of_a_converted_checkpoint_is_used(trained, tmp_path):
    step = carry(trained, tmp_path / "a", True, eos_token_id=[1, 9])
    found = find_tokenizer(step, DataConfig(train="-"), None)
    assert found.prompt("w5 w6") == [0, 5, 6], "its family begins with <s>"
    assert found.stop == {1, 9}, "config.json says what ends a text"
    run = OpenedModel(step)
    assert run.tokenizer.encoder.tokenizer.get_vocab()["</s>"] == 1
    shut_down()
    step = carry(trained, tmp_path / "b", False)
    found = find_tokenizer(step, DataConfig(train="-"), None)
    assert found.prompt("w5 w6") == [5, 6]
    assert found.prompt("") == [1], "something must come first"
    assert found.stop == {1}, "by its name"
