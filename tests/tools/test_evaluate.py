# SPDX-License-Identifier: Apache-2.0
"""Scores and answers against full forward passes; the harness itself where it is installed."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml

from fused_ops.errors import ConfigError
from pretrain.generation.harness import HarnessAnswers, _generation
from pretrain.generation.opened import OpenedModel
from pretrain.generation.scoring import Scorer, windows
from pretrain.initialize import shut_down
from tests.pretrain.generation_run import words_run
from tools.evaluate import main

LENGTH = 32  # of the toy's samples


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return words_run(tmp_path_factory.mktemp("toy"), "M*-E", recipe="nvfp4_pow2")


@pytest.fixture(scope="module")
def opened(trained):
    yield OpenedModel(trained)
    shut_down()


def request(*arguments):
    return SimpleNamespace(args=arguments)


def log_probs(opened, ids):
    """Of every id but the first, from one full pass, FP64; and which id was the likeliest."""
    logits = opened.full_logits(torch.tensor([ids]))[0, :, : opened.vocab_size].double()
    table = logits.log_softmax(-1)[:-1]
    return table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], table.argmax(-1).tolist()


def test_likelihoods_are_those_of_full_passes(opened):
    answers = HarnessAnswers(Scorer(opened, batch_size=2))
    pairs = [("w5 w6 w7", " w8"), ("", "w9 w10"), ("w3 ", "w4"), ("w20 w24 w28 w32", " w36 w40")]
    texts = [[0, 5, 6, 7, 8], [0, 9, 10], [0, 3, 4], [0, 20, 24, 28, 32, 36, 40]]
    found = answers.loglikelihood([request(*pair) for pair in pairs])
    for (score, greedy), ids, targets in zip(found, texts, (1, 2, 1, 2)):
        each, likeliest = log_probs(opened, ids)
        assert score == pytest.approx(float(each[-targets:].sum()), rel=1e-5)
        assert greedy == (likeliest[-targets:] == ids[-targets:])
    best = log_probs(opened, [0, 5, 6, 7])[1]
    follows = opened.full_logits(torch.tensor([[0, 5, 6, 7]]))[0, -1, :128].argmax()
    assert answers.loglikelihood([request("w5 w6 w7", f" w{int(follows)}")])[0][1]
    assert len(best) == 3


def test_a_tokenizer_without_a_beginning(opened, monkeypatch):
    """As Qwen's: only what has nothing before it gets the end of another document."""
    scorer = Scorer(opened)
    monkeypatch.setattr(scorer, "tokenizer", replace(opened.tokenizer, prefix=()))
    assert scorer.encode_pair("", "w9 w10") == ([0], [9, 10])
    assert scorer.encode_pair("w5 w6", " w7") == ([5, 6], [7])
    found = scorer.text_log_likelihoods(["w5 w6"])
    assert found[0] == pytest.approx(float(log_probs(opened, [0, 5, 6])[0].sum()), rel=1e-5)


def test_long_inputs_lose_their_beginning_and_are_counted(opened):
    scorer = Scorer(opened, batch_size=2)
    ids = [1 + i % 100 for i in range(60)]
    text = " ".join(f"w{i}" for i in ids)
    (score, _), _ = HarnessAnswers(scorer).loglikelihood(
        [request(text, " w7 w9"), request("w1", " w2")]
    )
    each, _ = log_probs(opened, [*ids, 7, 9][-LENGTH - 1 :])
    assert score == pytest.approx(float(each[-2:].sum()), rel=1e-5)
    assert "1 inputs were longer than 32 tokens" in scorer.notes()[0]


def test_windows_are_the_harness_example():
    pieces = windows([-1, *range(10)], 4)
    assert [(c + t[:-1], t) for c, t in pieces] == [
        ([-1, 0, 1, 2], [0, 1, 2, 3]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([5, 6, 7, 8], [8, 9]),
    ]
    assert windows([-1, 3], 4) == [([-1], [3])]


def test_texts_are_scored_token_by_token_once(opened):
    ids = [1 + 3 * i % 100 for i in range(75)]
    answers = HarnessAnswers(Scorer(opened, batch_size=2))
    text = " ".join(f"w{i}" for i in ids)
    found = answers.loglikelihood_rolling([request(text), request("w5"), request("")])
    whole = [0, *ids]
    expected = log_probs(opened, whole[:33])[0].sum()
    expected += log_probs(opened, whole[32:65])[0].sum()
    expected += log_probs(opened, whole[43:76])[0][-11:].sum()
    assert found[0] == pytest.approx(float(expected), rel=1e-5)
    assert found[1] == pytest.approx(float(log_probs(opened, [0, 5])[0]), rel=1e-5)
    assert found[2] == 0.0


def greedy_text(opened, ids, count):
    for _ in range(count):
        ids = [*ids, int(opened.full_logits(torch.tensor([ids]))[0, -1, :128].argmax())]
    return ids


def test_answers_end_at_the_first_stop(opened):
    answers = HarnessAnswers(Scorer(opened, batch_size=3))
    expected = {}
    for text, ids in (("w5 w6", [0, 5, 6]), ("w9", [0, 9]), ("w50 w52 w54", [0, 50, 52, 54])):
        new = greedy_text(opened, ids, 8)[len(ids) :]
        new = new[: new.index(0)] if 0 in new else new
        expected[text] = opened.tokenizer.decode(new)
    settings = {"until": [], "max_gen_toks": 8, "do_sample": False, "num_beams": 1}
    found = answers.generate_until([request(text, settings) for text in expected])
    assert found == list(expected.values())
    stop = expected["w9"].split()[3]
    cut = {"until": [stop], "max_gen_toks": 8}
    mixed = [request("w5 w6", settings), request("w9", cut), request("w50 w52 w54", cut)]
    found = answers.generate_until(mixed)
    assert found[0] == expected["w5 w6"]
    assert found[1] == expected["w9"].split(stop)[0]
    sampled = {"max_gen_toks": 8, "do_sample": True, "temperature": 5.0}
    assert answers.generate_until([request("w9", sampled)]) != [expected["w9"]]
    empty = {"until": ["", stop], "max_gen_toks": 8}
    assert answers.generate_until([request("w9", empty)]) == [expected["w9"].split(stop)[0]]


def test_how_tokens_are_chosen_as_a_task_says():
    chosen = [
        _generation(settings)["sampling"].temperature
        for settings in (
            {"do_sample": True},
            {"do_sample": True, "temperature": 0.0},
            {"temperature": 0.5},
            {"do_sample": False, "temperature": 0.5},
            {},
        )
    ]
    assert chosen == [1.0, 0.0, 0.5, 0.0, 0.0]


def test_mistakes_of_tasks_are_said(opened):
    answers = HarnessAnswers(Scorer(opened))
    with pytest.raises(ConfigError, match="num_beams: take them out"):
        answers.generate_until([request("w1", {"num_beams": 4})])
    with pytest.raises(ConfigError, match="256 new tokens of at most 32"):
        answers.generate_until([request("w1", {})])
    for wrong in ({"do_sample": True, "temperature": -1}, {"max_gen_toks": -3}, {"top_p": 2.0}):
        with pytest.raises(ConfigError, match="at least one new token; got"):
            answers.generate_until([request("w1", wrong)])
    with pytest.raises(ConfigError, match="batch size of at least 1"):
        Scorer(opened, batch_size=0)
    with pytest.raises(ConfigError, match="must have tokens"):
        answers.loglikelihood([request("w1", "")])


def test_scores_that_depend_on_the_batch_are_noted(trained):
    scorer = Scorer(OpenedModel(trained, overrides=["precision.recipe=nvfp4"]), batch_size=2)
    assert "share an amax over the tokens of a batch" in scorer.notes()[0]
    shut_down()


def test_the_missing_package_is_named_with_its_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([str(tmp_path), "--tasks", "arc_easy"]) == 2
    assert "python -m pip install lm_eval==0.4.13" in capsys.readouterr().err
    assert main([str(tmp_path), "--tasks", "x", "--limit", "0", "--num-fewshot", "-1"]) == 2
    assert capsys.readouterr().err.count("error: --") == 2
    assert main([str(tmp_path), "--tasks", "x", "--limit", "1.5"]) == 2, "not one question"
    assert "--limit must be a whole number of questions, or a share below 1; got 1.5" in (
        capsys.readouterr().err
    )


def local_tasks(folder):
    """A multiple choice, a perplexity and an answer, from JSON lines of this folder."""
    rows = [
        {"text": f"w{i} w{i + 1} w{i + 2}", "choices": [f"w{i + 3}", "w90"], "gold": 0}
        for i in range(5, 12)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    tasks = {
        "toy_choice": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{gold}}",
            "metric_list": [{"metric": "acc"}],
        },
        "toy_rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        "toy_answer": {
            "output_type": "generate_until",
            "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": [" "], "max_gen_toks": 4},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **task}))
    return rows


def test_the_harness_runs_tasks_of_local_files(trained, tmp_path, capsys, monkeypatch):
    pytest.importorskip(
        "lm_eval",
        reason="lm_eval is not among the test requirements (it brings 0.7 GB of pandas, scipy, "
        "scikit-learn and pyarrow); the adapter's own functions are tested above",
    )
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    rows, output = local_tasks(tmp_path), tmp_path / "results.json"
    tasks = f"toy_choice,{tmp_path / 'toy_rolling.yaml'},toy_answer"
    words = ["--tasks", tasks, "--include", str(tmp_path), "--output", str(output)]
    assert main([str(trained), *words]) == 0
    assert "toy_rolling" in capsys.readouterr().out
    results = json.loads(output.read_text())["results"]
    run = OpenedModel(trained)
    right, total = 0, 0.0
    for row in rows:
        ids = [0, *(int(word[1:]) for word in row["text"].split())]
        scores = [log_probs(run, [*ids, int(c[1:])])[0][-1] for c in row["choices"]]
        right += int(scores[0] > scores[1])
        total += float(log_probs(run, ids)[0].sum())
    assert results["toy_choice"]["acc,none"] == pytest.approx(right / len(rows))
    expected = float(torch.tensor(-total / (3 * len(rows)), dtype=torch.float64).exp())
    assert results["toy_rolling"]["word_perplexity,none"] == pytest.approx(expected, rel=1e-4)
    shut_down()
    assert main([str(trained), "--tasks", "no_such_task,none.yaml"]) == 2
    assert "no_such_task" in capsys.readouterr().err
    (tmp_path / "rows.jsonl").write_text("")
    (tmp_path / "torn.yaml").write_text("task: [")
    for name, said in (("toy_choice", "its data is empty"), ("torn", "ParserError: while parsing")):
        assert main([str(trained), "--tasks", str(tmp_path / f"{name}.yaml")]) == 2
        assert f"a task, or its data, cannot be used ({said}" in capsys.readouterr().err.replace(
            "StopIteration: ", ""
        )
    local_tasks(tmp_path)
    words = [str(trained), "--include", str(tmp_path), "--limit", "1", "--tasks"]
    assert main([*words, "toy_ch*"]) == 0, "wildcards, as the harness has them"
    assert "toy_choice" in capsys.readouterr().out
    shut_down()
    assert main([*words, "toy_choice", "--num-fewshot", "50"]) == 2
    assert "cannot be used (ValueError: Sample larger" in capsys.readouterr().err
    shut_down()
    monkeypatch.setattr(Scorer, "log_likelihoods", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main([*words, "toy_choice"])
