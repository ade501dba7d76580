# SPDX-License-Identifier: Apache-2.0
"""Faults of machines and networks: pods that die, cables that are pulled, a scheduler's end."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.distributed import ROOT
from tests.pods import Cluster, Pod, no_namespaces, pytorch_job_pods
from tests.toy import make_toy, toy_config
from tools.launch.batch_script import render_slurm
from tools.launch.job import Options, read_job
from tools.launch.manifests import render_pytorch_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS = 40
# Only a hang reaches it, also on a machine that other work keeps busy.
LIMIT = 900.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Toy data, and an undisturbed run of two pods."""
    if reason := no_namespaces():
        pytest.skip(f"pods need networks of their own here: {reason}")
    place = tmp_path_factory.mktemp("toy")
    make_toy(place / "data")
    config = toy_config(
        place / "data",
        "*-",
        run={"dir": str(place / "runs"), "hang_seconds": 20.0},
        train={"steps": STEPS},
        checkpoint={"interval": 10},
        log={"progress": "lines", "interval": 1, "report": False},
    )
    (place / "run.yaml").write_text(yaml.safe_dump(config))
    with cluster(place, "whole") as pods:
        pods.start()
        pods.wait(LIMIT)
    return place


def options(place: Path, name: str, **more) -> Options:
    return Options(
        nodes=2,
        image="registry/nibble:1",
        gpus_per_node=0,
        processes_per_node=1,
        config_folder=str(place / f"cfg-{name}"),
        **more,
    )


def cluster(place: Path, name: str, *overrides: str) -> Cluster:
    words = [f"run.name={name}", *overrides]
    text = render_pytorch_job(read_job(str(place / "run.yaml"), words, options(place, name)))
    return Cluster(pytorch_job_pods(text), place / f"net-{name}")


def losses(place: Path, name: str) -> dict[int, float]:
    path = place / "runs" / name / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def step_of(place: Path, name: str) -> int:
    try:
        return json.loads((place / "runs" / name / "heartbeat.json").read_text())["step"]
    except (OSError, ValueError):
        return 0


@pytest.mark.parametrize("index", [0, 1], ids=["master", "worker"])
def test_a_whole_node_dies_and_comes_back(folder, index):
    """SIGKILL to everything in a pod; the kubelets start both pods again (OnFailure)."""
    name = f"node-{index}"
    with cluster(folder, name) as pods:
        pods.start()
        pods.until(lambda: step_of(folder, name) >= 15, LIMIT)
        pods.kill(pods.pods[index])
        pods.wait(LIMIT, restarts=4)
        assert pods.pods[index].starts >= 2
    assert losses(folder, name) == losses(folder, "whole"), "bitwise"


def test_a_short_cut_of_the_network_is_waited_for(folder):
    """The cable is out for less than hang_seconds: nothing fails, nothing is lost."""
    with cluster(folder, "cut") as pods:
        pods.start()
        pods.until(lambda: step_of(folder, "cut") >= 5, LIMIT)
        pods.cut(pods.pods[1])
        time.sleep(4)
        stood = step_of(folder, "cut")
        time.sleep(1)
        assert step_of(folder, "cut") == stood, "the ranks wait for each other"
        pods.cut(pods.pods[1], whole=True)
        pods.wait(LIMIT)
        assert [pod.starts for pod in pods.pods] == [1, 1]
        assert not any("watchdog" in pod.output() for pod in pods.pods)
    assert losses(folder, "cut") == losses(folder, "whole"), "bitwise"


def test_a_long_cut_ends_the_ranks_and_they_start_again(folder):
    with cluster(folder, "long") as pods:
        pods.start()
        pods.until(lambda: step_of(folder, "long") >= 15, LIMIT)
        pods.cut(pods.pods[1])
        end = time.monotonic() + LIMIT
        while not all("watchdog: " in pod.output() for pod in pods.pods):
            assert time.monotonic() < end, pods.report()
            time.sleep(0.2)
        pods.cut(pods.pods[1], whole=True)
        pods.wait(LIMIT, restarts=6)
        said = "".join(pod.output() for pod in pods.pods)
    assert "cannot be asked (the network is cut" in said or "it does not answer" in said
    assert losses(folder, "long") == losses(folder, "whole"), "bitwise"


SRUN = """#!{python}
import os, signal, subprocess, sys
tasks, command = [], sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
for index, node in enumerate(os.environ["SLURM_JOB_NODELIST"].split(",")):
    env = dict(os.environ, SLURM_NODEID=str(index), SLURM_PROCID=str(index))
    enter = os.environ["ENTER_" + node.replace("-", "_")].split()
    tasks.append(subprocess.Popen(enter + command, env=env))
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then echo "$3" | tr , '\\n'; exit; fi
echo "$@" >> "$SCONTROL_LOG"
"""


def test_a_batch_job_saves_before_its_end_and_is_queued_again(folder, tmp_path):
    """USR1, as --signal=B:USR1@300 sends it: saved, requeued; the second start goes to the end."""
    job = read_job(
        str(folder / "run.yaml"),
        ["run.name=batch", "checkpoint.interval=0", "run.max_failures=0"],
        options(folder, "batch"),
    )
    script = tmp_path / "job.sh"
    script.write_text(render_slurm(job))
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.format(python=ROOT / ".venv" / "bin" / "python"))
        path.chmod(0o755)
    nodes = [Pod(f"node-{index}", [], {}) for index in range(2)]
    with Cluster(nodes, tmp_path / "net") as pods:
        env = {
            **os.environ,
            "PATH": f"{tmp_path / 'bin'}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "SLURM_JOB_ID": str(4000 + os.getpid() % 5000),
            "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "node-0,node-1",
            "SCONTROL_LOG": str(tmp_path / "scontrol.log"),
            **{f"ENTER_node_{i}": " ".join(pods.entry(pod)) for i, pod in enumerate(nodes)},
        }
        log = tmp_path / "job.log"
        with log.open("wb") as out:
            first = subprocess.Popen(
                [*pods.names(), "bash", str(script)],
                cwd=ROOT,
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + LIMIT
        while step_of(folder, "batch") < 8:
            assert first.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        first.send_signal(signal.SIGUSR1)
        assert first.wait(timeout=LIMIT) == 0, log.read_text()
        assert (tmp_path / "scontrol.log").read_text() == f"requeue {env['SLURM_JOB_ID']}\n"
        reached = max(losses(folder, "batch"))
        assert reached < STEPS
        env["SLURM_RESTART_COUNT"] = "1"
        again = subprocess.run(
            [*pods.names(), "bash", str(script)],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert again.returncode == 0, again.stderr[-4000:]
    assert losses(folder, "batch") == losses(folder, "whole"), "bitwise"
