# SPDX-License-Identifier: Apache-2.0
"""What the manifests start trains: pods with a network of their own, and the losses of one."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from pretrain.__main__ import main
from tests.distributed import ROOT
from tests.pods import Cluster, Pod, no_namespaces, pytorch_job_pods, train_job_pods
from tests.toy import make_toy, toy_config
from tools.launch.batch_script import render_slurm
from tools.launch.check import check_text
from tools.launch.job import Options, read_job
from tools.launch.manifests import render_pytorch_job, render_train_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Toy data, and the losses of one process on it."""
    place = tmp_path_factory.mktemp("toy")
    make_toy(place / "data")
    (place / "run.yaml").write_text(yaml.safe_dump(run_config(place)))
    assert main([str(place / "run.yaml"), "run.name=one"]) == 0
    return place


def run_config(place: Path) -> dict:
    return toy_config(
        place / "data",
        "*-",
        run={"dir": str(place / "runs")},
        train={"steps": STEPS, "global_batch_size": 12, "micro_batch_size": 2},
        log={"progress": "lines", "interval": 1, "report": False},
    )


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


def job(place: Path, name: str, nodes: int, **options):
    return read_job(
        str(place / "run.yaml"),
        [f"run.name={name}"],
        Options(
            nodes=nodes,
            image="registry/nibble:1",
            gpus_per_node=0,
            processes_per_node=1,
            config_folder=str(place / f"cfg-{name}"),
            **options,
        ),
    )


def own_words(text: str) -> str:
    """Without torchrun's lines: its agents log the race of their own last barrier as a traceback,
    when the one that keeps the store is gone first."""
    lines = text.splitlines()
    return "\n".join(line for line in lines if "torch/distributed/elastic/" not in line[:90])


def isolated() -> bool:
    return no_namespaces() is None


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize(
    ("render", "pods"),
    [(render_pytorch_job, pytorch_job_pods), (render_train_job, train_job_pods)],
    ids=["pytorchjob", "trainjob"],
)
def test_pods_train_what_one_process_trains(folder, tmp_path, render, pods, nodes):
    if reason := no_namespaces():
        pytest.skip(f"{reason}; the variant on loopback addresses runs instead")
    name = f"{render.__name__.split('_')[1]}-{nodes}"
    text = render(job(folder, name, nodes))
    assert not [finding for finding in check_text(text, name) if finding.rank == 0]
    with Cluster(pods(text), tmp_path) as cluster:
        cluster.start()
        cluster.wait(900)
        hosts = {pod.name: pod.output() for pod in cluster.pods}
    assert losses(folder / "runs" / name) == pytest.approx(
        losses(folder / "runs" / "one"), rel=1e-5
    )
    assert all("Traceback" not in own_words(text) for text in hosts.values()), hosts
    environment = json.loads((folder / "runs" / name / "environment.json").read_text())
    assert environment["world_size"] == nodes
    assert environment["host"] == next(iter(hosts)).split(".")[0]


def test_pods_on_loopback_addresses(folder, tmp_path):
    """Without namespaces: the same command and environment, addresses instead of names."""
    text = render_pytorch_job(job(folder, "loopback", 2))
    with Cluster(pytorch_job_pods(text), tmp_path, isolated=False) as cluster:
        cluster.start()
        cluster.wait(900)
    assert losses(folder / "runs" / "loopback") == pytest.approx(
        losses(folder / "runs" / "one"), rel=1e-5
    )


def _stand_in(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


# srun starts its command once a node, forwards signals, and fails when a task does.
SRUN = """#!{python}
import os, signal, subprocess, sys
nodes = os.environ["SLURM_JOB_NODELIST"].split(",")
tasks, command = [], sys.argv[1:]
while command[0].startswith("--"):  # srun's own options
    command.pop(0)
for index, node in enumerate(nodes):
    env = dict(os.environ, SLURM_NODEID=str(index), SLURM_PROCID=str(index), SLURMD_NODENAME=node)
    enter = os.environ.get("ENTER_" + node.replace("-", "_"), "").split()
    tasks.append(subprocess.Popen(enter + command, env=env))
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda n, _: [t.send_signal(n) for t in tasks])
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then echo "$3" | tr , '\\n'; exit; fi
echo "$@" >> "$SCONTROL_LOG"
"""


def _slurm(folder: Path, tmp_path: Path, script: str, **more: str) -> dict[str, str]:
    """The environment of a batch script on two nodes, with stand-ins on PATH."""
    tools = tmp_path / "bin"
    tools.mkdir()
    _stand_in(tools / "srun", SRUN.format(python=ROOT / ".venv" / "bin" / "python"))
    _stand_in(tools / "scontrol", SCONTROL)
    (tmp_path / "job.sh").write_text(script)
    return {
        **os.environ,
        "PATH": f"{tools}:{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(4000 + os.getpid() % 5000),
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SCONTROL_LOG": str(tmp_path / "scontrol.log"),
        **more,
    }


@pytest.mark.parametrize("kind", ["rendered", "example"])
def test_the_batch_script_trains_on_two_nodes(folder, tmp_path, kind):
    """c10d rendezvous on the first node's name; tasks have networks of their own where possible."""
    name = f"slurm-{kind}"
    nodes = [Pod(f"node-{index}", [], {}) for index in range(2)]
    if kind == "rendered":
        script, arguments = render_slurm(job(folder, name, 2)), []
    else:
        script = (ROOT / "examples" / "launch" / "slurm.sbatch").read_text()
        arguments = [str(folder / "run.yaml"), "run.device=cpu"]
    alone = isolated()
    with Cluster(nodes, tmp_path / "net", isolated=alone) as cluster:
        names = [pod.name if alone else "127.0.0.1" for pod in nodes]
        env = _slurm(
            folder,
            tmp_path,
            script,
            SLURM_JOB_NODELIST=",".join(names),
            SLURM_JOB_NAME=name,
            RUN_DIR=str(folder / "runs"),
        )
        for pod in nodes if alone else []:
            env[f"ENTER_{pod.name.replace('-', '_')}"] = " ".join(cluster.entry(pod))
        done = subprocess.run(
            [*cluster.names(), "bash", str(tmp_path / "job.sh"), *arguments],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert losses(folder / "runs" / name) == pytest.approx(
        losses(folder / "runs" / "one"), rel=1e-5
    )
    assert not (tmp_path / "scontrol.log").exists(), "it ended, so nothing is queued again"
