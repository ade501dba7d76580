# SPDX-License-Identifier: Apache-2.0
"""What is rendered from a run file, and the checks of runtimes, JobSets and batch scripts."""

import re
import socket
import subprocess

import pytest
import yaml

from fused_ops.errors import ConfigError
from tests.distributed import ROOT
from tools.launch.__main__ import main
from tools.launch.batch_script import render_slurm
from tools.launch.check import check_text
from tools.launch.command import read_command
from tools.launch.job import Options, label, read_job
from tools.launch.manifests import render_pytorch_job, render_train_job
from tools.launch.structure import as_number

EXAMPLES = ROOT / "examples" / "launch"
RUN = "examples/launch/run.yaml"


def errors(text: str) -> list[str]:
    return [finding.text for finding in check_text(text, "file") if finding.rank == 0]


def job(*overrides: str, run: str = str(ROOT / RUN), **options):
    return read_job(run, overrides, Options(**{"nodes": 16, "image": "r/nibble:1", **options}))


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_the_examples_are_what_render_writes(kind, capsys, monkeypatch):
    """So they cannot fall behind the code: render again when this fails."""
    monkeypatch.chdir(ROOT)
    words = ["--nodes=16", "--image=registry.example/nibble:0.1", "--cpus=64", "--memory=1000Gi"]
    if kind == "pytorchjob":
        words += ["--rdma", "rdma/ib", "--secret", "nibble-secrets"]
    assert main(["render", kind, RUN, *words]) == 0
    assert capsys.readouterr().out == (EXAMPLES / f"{kind}.yaml").read_text()


@pytest.mark.parametrize("render", [render_pytorch_job, render_train_job, render_slurm])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"nodes": 1},
        {"nodes": 2, "gpus_per_node": 0, "processes_per_node": 2},
        {"rdma": "nvidia.com/hostdev=4", "host_network": True, "memory": "900Gi"},
        {"name": "big", "namespace": "team", "data_claim": "d", "runs_claim": "r"},
        {"nodes": 768, "gpus_per_node": 1, "cpus": "500m", "memory": "100Gi", "time": "1-0"},
        {"nodes": 3, "gpus_per_node": 1, "restarts": 0, "shm_size": "1.5Gi"},
    ],
    ids=["plain", "one-node", "cpu", "fabric", "claims", "many", "odd"],
)
def test_whatever_is_rendered_passes_the_check(render, options):
    parallel = ["parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false"]
    text = render(job(*(parallel if "gpus_per_node" in options else []), **options))
    assert errors(text) == [], text


def test_numbers_come_from_the_options_and_stand_once():
    documents = list(yaml.safe_load_all(render_pytorch_job(job(nodes=6, gpus_per_node=4))))
    spec = documents[-1]["spec"]
    roles = spec["pytorchReplicaSpecs"]
    assert spec["nprocPerNode"] == "4"
    assert [roles[role]["replicas"] for role in ("Master", "Worker")] == [1, 5]
    for role in roles.values():
        (container,) = role["template"]["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
        assert container["command"] == ["torchrun"]
        assert not [word for word in container["args"] if "nnodes" in word or "nproc" in word]
    trainer = yaml.safe_load_all(render_train_job(job(nodes=6, gpus_per_node=4)))
    assert [d["spec"]["trainer"]["numNodes"] for d in trainer if d["kind"] == "TrainJob"] == [6]
    script = render_slurm(job(nodes=6, gpus_per_node=4))
    assert re.findall(r"\b6\b", script.split("\nset -euo")[1]) == []
    assert "#SBATCH --nodes=6\n" in script
    assert "#SBATCH --gpus-per-node=4\n" in script


def test_the_run_file_travels_whole():
    documents = list(yaml.safe_load_all(render_pytorch_job(job())))
    assert documents[0]["data"]["run.yaml"] == (ROOT / RUN).read_text()
    changed = list(yaml.safe_load_all(render_pytorch_job(job("optimizer.lr=1e-4"))))
    assert yaml.safe_load(changed[0]["data"]["run.yaml"])["optimizer"]["lr"] == 1e-4
    mounts = documents[-1]["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"][
        "containers"
    ][0]["volumeMounts"]
    assert [mount["mountPath"] for mount in mounts] == ["/dev/shm", "/cfg", "/runs", "/data/shards"]


@pytest.mark.parametrize(
    ("options", "overrides", "words"),
    [
        ({"nodes": 7}, [], "train.global_batch_size must be a multiple"),
        ({"nodes": 1, "gpus_per_node": 2}, [], "the number of processes must be a multiple of ten"),
        ({"nodes": 0}, [], "--nodes must be at least 1"),
        ({"name": "Big_Run"}, [], "--name big-run"),
        ({"image": "my image"}, [], "--image must be"),
        ({"shm_size": "64GB"}, [], "--shm-size must be a quantity"),
        ({"rdma": "ib"}, [], "such as rdma/ib=1"),
        ({"processes_per_node": 4}, [], "remove --processes-per-node"),
        ({}, ["data.train=s3://KEY:hunter2hunter2@store/x"], "holds a secret"),
        ({"image": "user:hunter2hunter2@registry/x"}, [], "--image must be"),
        ({"image": "Nibble:1"}, [], "in lower case"),
        ({"restarts": -1}, [], "--restarts must be at least 0"),
        ({"gpus_per_node": 0, "processes_per_node": -1}, [], "--processes-per-node must be at"),
        ({"cpus": "-4"}, [], "--cpus must be a quantity"),
        ({"memory": "0"}, [], "--memory must be a quantity"),
        ({"shm_size": "1Mi"}, [], "--shm-size must be at least 1Gi"),
        ({"rdma": "rdma/ib=0"}, [], "such as rdma/ib=1"),
        ({"namespace": "My NS"}, [], "--namespace names something in the cluster"),
        ({"secret": "A B"}, [], "--secret names something"),
        ({"data_claim": "Bad_Name"}, [], "--data-claim names something"),
        ({"partition": "a b;rm -rf x"}, [], "--partition must be a name"),
        ({"account": "$(id)"}, [], "--account must be a name"),
        ({"config_folder": "rel/x"}, [], "--config-folder must begin with /"),
        ({"config_folder": "/runs"}, [], "neither it nor /runs may hold"),
        ({"config_folder": "/data/shards/x"}, [], "neither it nor /data/shards may hold"),
        ({}, ["data.valid=/other/valid"], "must lie below one folder"),
        ({}, ["run.dir=/data/shards/runs"], "neither may hold the other"),
        ({}, ["optimizer.lr=-1"], "optimizer.lr must be positive"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_would_fail_on_the_cluster_fails_here(options, overrides, words):
    with pytest.raises(ConfigError) as failure:
        job(*overrides, **options)
    assert any(words in text for text in failure.value.problems), failure.value.problems


def test_what_the_check_would_refuse_is_not_rendered(capsys):
    words = ["--nodes=16", "--image=r/nibble:1", "--shm-size=2Ti", "--memory=1Ti"]
    assert main(["render", "pytorchjob", str(ROOT / RUN), *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "counts as the container's memory, whose limit is 1Ti" in said.err


def test_a_secret_of_the_environment_is_never_rendered(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_API_KEY", "abcdef0123456789")
    run = tmp_path / "run.yaml"
    run.write_text((ROOT / RUN).read_text() + "# key abcdef0123456789\n")
    with pytest.raises(ConfigError, match="holds a secret") as failure:
        job(run=str(run))
    assert "abcdef0123456789" not in str(failure.value.problems)


def test_mistakes_on_the_command_line(capsys, tmp_path):
    assert main(["render", "pytorchjob", RUN, "--nodes", "16", "train.stpes=1"]) == 2
    said = capsys.readouterr().err
    assert "--image must name" in said
    assert "did you mean train.steps" in said
    assert main(["check", str(tmp_path / "none.yaml")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--help"]) == 0
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert main(["check", str(tmp_path / "empty.yaml")]) == 2
    (tmp_path / "map.yaml").write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\n")
    assert main(["check", str(tmp_path / "map.yaml")]) == 1
    assert "starts nothing" in capsys.readouterr().out


RUNTIME = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata: {name: nibble}
spec:
  mlPolicy: {numNodes: 1, torch: {}}
  template:
    spec:
      replicatedJobs:
      - name: node
        template:
          metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}
          spec:
            template:
              spec:
                containers:
                - name: node
                  image: registry/trainer:tag
                  volumeMounts: [{name: shm, mountPath: /dev/shm}]
                volumes: [{name: shm, emptyDir: {medium: Memory}}]
"""
JOB_SET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: pretrain}
spec:
  network: {enableDNSHostnames: true}
  replicatedJobs:
  - name: node
    template:
      spec:
        parallelism: 2
        completions: 2
        completionMode: Indexed
        backoffLimit: 0
        template:
          spec:
            containers:
            - name: train
              image: registry/trainer:tag
              command: [torchrun]
              args: [--nproc_per_node=8, -m, pretrain, /cfg/run.yaml]
              env:
              - {name: PET_NNODES, value: "2"}
              - {name: PET_MASTER_ADDR, value: pretrain-node-0-0.pretrain}
              - name: PET_NODE_RANK
                valueFrom:
                  fieldRef:
                    fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
              resources: {limits: {nvidia.com/gpu: 8}}
              volumeMounts: [{name: shm, mountPath: /dev/shm}]
            volumes: [{name: shm, emptyDir: {medium: Memory}}]
"""


@pytest.mark.parametrize(
    ("text", "old", "new", "words"),
    [
        (RUNTIME, "", "", ""),
        (RUNTIME, "- name: node\n        t", "- name: worker\n        t", "called node"),
        (
            RUNTIME,
            "- name: node\n                  i",
            "- name: pytorch\n                  i",
            "node",
        ),
        (RUNTIME, "torch: {}", "torch: {numProcPerNode: 8}", "gone from mlPolicy.torch"),
        (RUNTIME, "medium: Memory", "", "must be memory"),
        (RUNTIME, "trainjob-ancestor-step: trainer", "step: trainer", "without the label"),
        (RUNTIME, "image: registry/trainer:tag", "tty: true", "must be set in every container"),
        (JOB_SET, "", "", ""),
        (JOB_SET, "completions: 2", "completions: 4", "must equal completions=4"),
        (JOB_SET, "PET_NNODES", "NNODES", "lacks --nnodes"),
        (JOB_SET, "PET_NODE_RANK", "NODE_RANK", "lacks --node_rank"),
        (JOB_SET, "nvidia.com/gpu: 8", "cpu: 8", "names no GPU"),
        (JOB_SET, "enableDNSHostnames: true", "publishNotReadyAddresses: false", "before they are"),
        (JOB_SET, "backoffLimit", "backofLimit", "did you mean backoffLimit"),
        (JOB_SET, "name: pretrain}", f"name: {'h' * 49}}}", "at most 48 characters"),
    ],
)
def test_runtimes_and_job_sets(text, old, new, words):
    assert old in text
    found = errors(text.replace(old, new, 1) if old else text)
    assert any(words in one for one in found) if words else found == [], found


def test_a_train_job_is_seen_together_with_its_runtime():
    train = """\
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata: {name: pretrain}
spec:
  runtimeRef: {name: nibble}
  trainer:
    numNodes: 4
    image: registry/trainer:tag
    command: [torchrun]
    args: [-m, pretrain, /cfg/run.yaml]
    resourcesPerNode: {limits: {nvidia.com/gpu: 8}}
"""
    assert errors(f"{train}---\n{RUNTIME}") == []
    bare = RUNTIME.replace("volumeMounts: [{name: shm, mountPath: /dev/shm}]", "tty: true")
    assert any("64 MiB" in text for text in errors(f"{train}---\n{bare}"))
    assert errors(train) == [], "the runtime may have the volume: it is not in the file"
    assert any(finding.rank == 1 for finding in check_text(train, "file"))


SCRIPT = (EXAMPLES / "slurm.sbatch").read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('--nnodes "$SLURM_NNODES"', "--nnodes 4", "stands in a second place"),
        ("$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}", "nibble", "must not share an id"),
        ("$head:$port", "$(hostname):29500", "another place on every node"),
        ("$head:$port", "localhost:29500", "another place on every node"),
        ("head=$(scontrol", "me=$(hostname --ip-address)\nhead=$(scontrol", "127.0.1.1"),
        ("$head:$port", "$SLURM_LAUNCH_NODE_IPADDR:29500", "the node that submitted"),
        ("srun torchrun", "torchrun", "on the first of 16 nodes only"),
        ("srun torchrun \\\n", "srun python -m pretrain a.yaml #", "a run of its own"),
        ("ntasks-per-node=1", "ntasks-per-node=8", "write 1"),
        ("#SBATCH --gpus-per-node=8\n", "", "asks for no GPU"),
        ("#SBATCH --nodes=16\n", "", "how many nodes"),
        ("--nodes=16", "--nodes=8-16", "a fixed number of nodes"),
        ('"$SLURM_GPUS_ON_NODE"', "4", "4 processes on 8 GPUs"),
        ("    --rdzv_backend c10d \\\n", "", "add --rdzv_backend c10d"),
        ("set -euo pipefail", "set -e\n#SBATCH --mem=0", "after the first command"),
        ("B:USR1@300", "USR1@300", "goes to torchrun, which dies"),
        ("trap 'soon", "echo 'soon", "nothing in the script traps"),
        ("ntasks-per-node=1", "task-per-node=1", "did you mean --ntasks-per-node"),
        ("#!/bin/bash\n", "", "must begin with #!"),
        ("srun torchrun", "srun echo", "starts nothing that trains"),
    ],
    ids=lambda value: value[:24],
)
def test_a_mistake_in_a_batch_script_is_found(old, new, words):
    assert old in SCRIPT
    found = errors(SCRIPT.replace(old, new, 1))
    assert any(words in text for text in found), found


def test_short_options_of_sbatch_are_read():
    text = SCRIPT.replace("--nodes=16", "-N 16").replace("--time=24:00:00", "-t 1:00 -p big")
    assert errors(text) == []


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_the_scripts_are_shell(script):
    subprocess.run(["bash", "-n", str(EXAMPLES / script)], check=True, timeout=20)
    assert errors((EXAMPLES / script).read_text()) == []


@pytest.mark.parametrize(
    ("words", "program", "flags", "rest"),
    [
        (["torchrun", "--nnodes=2", "--node-rank", "1", "a.py", "--nnodes=9"],
         "torchrun", {"nnodes": "2", "node_rank": "1"}, ["a.py", "--nnodes=9"]),
        (["python3", "-u", "-m", "torch.distributed.run", "-m", "pretrain", "c"],
         "torchrun", {}, ["pretrain", "c"]),
        (["python3.12", "-X", "dev", "train.py"], "python", {}, ["train.py"]),
        (["/bin/bash", "-lc", "A=1 exec torchrun --standalone \\\n a.py"],
         "torchrun", {"standalone": "true"}, ["a.py"]),
        (["bash", "start.sh"], "", {}, []),
        (["sh", "-c", "echo 'torchrun' # torchrun\npython x.py | tee log"], "python", {}, ["x.py"]),
        ([], "", {}, []),
    ],
)  # fmt: skip
def test_what_a_command_starts(words, program, flags, rest):
    start = read_command(words)
    assert (start.program, start.flags, start.rest) == (program, flags, rest)


@pytest.mark.parametrize(
    ("text", "number"),
    [("64Gi", 64 * 2**30), ("500m", 0.5), (8, 8.0), ("1.5k", 1500.0), ("2e3", 2000.0), ("x", None)],
)
def test_quantities(text, number):
    assert as_number(text) == number


def test_labels():
    assert label("Hybrid_8B.v2") == "hybrid-8b-v2"
    assert label("8b") == "run-8b"


def test_reaching_the_place_where_nodes_meet(capsys):
    me = socket.gethostname()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["reach", "127.0.0.1", port]) == 2
        assert f"{me}: port {port} is taken" in capsys.readouterr().err
    assert main(["reach", "127.0.0.1", port]) == 0
    assert main(["reach", "no-such-host.invalid", "29500"]) == 2
    said = capsys.readouterr().err
    assert f"{me}: the name no-such-host.invalid does not resolve" in said
    assert "/etc/hosts" in said
    assert main(["reach", "127.0.0.1", "http"]) == 2
    assert main(["reach", "192.0.2.1", "29500"]) == 0, "another machine's address is not bound here"
