# SPDX-License-Identifier: Apache-2.0
"""What can go wrong while ranks meet: each a message with the host and the remedy, soon."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import yaml

from fused_ops.errors import ConfigError
from pretrain import __main__ as program, start
from pretrain.config import load_config
from pretrain.start import Record, disagreements, environment_problems
from tests.distributed import ROOT, free_port
from tests.toy import make_toy, toy_config

SAME = {
    "settings": {"optimizer.lr": "0.1"},
    "code": "abc",
    "packages": {"torch": "2.11.0"},
    "device": "cuda",
}


def record(rank: int, **changes) -> Record:
    return replace(Record(rank=rank, host=f"node-{rank}", **SAME), **changes)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({}, None),
        (
            {"settings": {"optimizer.lr": "0.2"}},
            [
                "setting optimizer.lr",
                "rank 1 (node-1) has 0.2",
                "rank 0 (node-0) 0.1",
                "one run file",
            ],
        ),
        ({"code": "abd"}, ["same code", "rank 1 (node-1) has abd", "on node-1"]),
        (
            {"packages": {"torch": "2.10.0"}},
            ["package torch", "node-1) has 2.10.0", "install the same"],
        ),
        ({"problems": ["no GPU here; buy one"]}, ["rank 1 (node-1): no GPU here; buy one"]),
        (
            {"device": "cpu"},
            ["rank 1 (node-1): torch sees no GPU there", "nvidia-smi on node-1"],
        ),
        (
            {"loopback": True, "settings": {"optimizer.lr": "0.1", "run.device": '"cpu"'}},
            ["setting run.device"],
        ),
    ],
)
def test_records_that_differ(second, words):
    found = disagreements([record(0), record(1, **second), record(2)])
    if words is None:
        assert found == []
    else:
        for word in words:
            assert word in found[0], found


def test_what_all_have_is_said_without_a_host():
    bad = [record(rank, problems=["data.train: no such folder"]) for rank in range(3)]
    assert disagreements(bad) == ["data.train: no such folder"]
    bad[2].problems.append("no GPU")
    assert disagreements(bad) == ["data.train: no such folder", "rank 2 (node-2): no GPU"]


def test_all_ranks_on_the_cpu_are_right():
    assert disagreements([record(rank, device="cpu") for rank in range(2)]) == []


@pytest.mark.parametrize(
    ("rank", "local_rank", "said"),
    [("0", "0", "error: no such folder\n"), ("1", "1", ""), ("8", "0", "error: rank 8 (")],
)
def test_the_first_rank_of_every_host_speaks(monkeypatch, capsys, rank, local_rank, said):
    """Its pod's log may be all that its user looks at; others of the host repeat nothing."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setattr(start, "said_by_first", lambda rank, texts: set(texts))
    assert program._say(["no such folder"]) == 2
    written = capsys.readouterr().err
    assert written.startswith(said)
    assert ("no such folder" in written) == bool(said)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_missing_gpu_is_said_with_its_host(tmp_path):
    make_toy(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(toy_config(tmp_path, run={"device": "cuda"})))
    with pytest.raises(ConfigError) as failure:
        load_config(tmp_path / "run.yaml", (), for_training=True)
    (text,) = failure.value.problems
    assert f"torch sees none on {socket.gethostname()}" in text
    assert "nvidia-smi" in text


def test_a_host_that_calls_itself_loopback(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    settings = {"run.device": '"cpu"'}
    records = [record(rank, settings=settings, loopback=rank == 1) for rank in range(2)]
    (found,) = disagreements(records)
    assert "rank 1 (node-1): the name node-1 leads to the host itself" in found
    assert "/etc/hosts" in found
    one_host = [replace(r, host="node") for r in records]
    assert disagreements(one_host) == []


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, None),
        ({"SLURM_STEP_NUM_TASKS": "1"}, None),
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun started 4 tasks"),
        ({"SLURM_STEP_NUM_TASKS": "2", "RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR, MASTER_PORT, LOCAL_RANK"),
    ],
)
def test_environments_that_launchers_leave(environ, words):
    found = environment_problems(environ)
    assert found == [] if words is None else words in found[0]


def _reach(monkeypatch, rank: int, **environ: str) -> str:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(start, "START_SECONDS", 2.0)
    began = time.monotonic()
    with pytest.raises(ConfigError) as failure:
        start._reach(rank, 2)
    assert time.monotonic() - began < 15
    (text,) = failure.value.problems
    assert text.startswith(f"rank {rank} ({socket.gethostname()}): ")
    return text


def test_a_name_that_does_not_resolve(monkeypatch):
    text = _reach(monkeypatch, 1, MASTER_ADDR="no-such-host.invalid", MASTER_PORT="29500")
    assert "no-such-host.invalid" in text
    assert "/etc/hosts" in text


def test_a_port_that_is_taken(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        text = _reach(monkeypatch, 0, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        assert f"port {port} of {socket.gethostname()} is taken" in text
        text = _reach(monkeypatch, 1, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        assert "is no other program" in text


def test_a_rank_0_that_is_not_there(monkeypatch):
    text = _reach(monkeypatch, 1, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert "rank 0 does not answer" in text
    assert "NetworkPolicy" in text


def start_two(folder, settings, words=((), ())):
    """What two processes say that start one run file, each with its own words; statuses 2."""
    make_toy(folder)
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(toy_config(folder, **settings)))
    port, ranks = str(free_port()), []
    for rank in range(2):
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": port}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "pretrain", str(config), *words[rank]],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", **env},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [process.communicate(timeout=900)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2], said
    assert not any("Traceback" in text for text in said)
    return said


def test_a_layout_that_cannot_work_is_said_once_with_all_reasons(tmp_path):
    """On rank 0's log alone: nothing was built, and nobody waits for anybody."""
    broken = {
        "model": {"pattern": "*-" * 15, "seq_length": 33},
        "parallel": {"pipeline_model_parallel_size": 4, "context_parallel_size": 2},
    }
    first, second = start_two(tmp_path, broken)
    for reason in (
        "model.pattern has 30 layers, which 4 pipeline stages do not divide",
        "model.seq_length 33 must be a multiple of 4",
        "context_parallel_size = 1 * 4 * 2 = 8; got 2; start 8",
    ):
        assert first.count(reason) == 1, first
    assert second == ""


@pytest.mark.slow
def test_ranks_with_different_configs_all_say_so(tmp_path):
    """Each with status 2, naming rank, host and setting. (How soon: BENCHMARKS, Starting.)"""
    said = start_two(tmp_path, {}, [["optimizer.lr=0.001"], ["optimizer.lr=0.002"]])
    assert "the setting optimizer.lr must be the same on all ranks" in said[0]
    for text in said:
        assert socket.gethostname() in text
