# SPDX-License-Identifier: Apache-2.0
"""Mistakes that only the whole file shows, files that are none, and scripts as users write them."""

import copy

import pytest
import yaml

from fused_ops.errors import ConfigError
from tests.distributed import ROOT
from tools.launch.batch_script import render_slurm
from tools.launch.check import check_text
from tools.launch.command import commands
from tools.launch.documents import write_documents
from tools.launch.job import Options, read_job

EXAMPLES = ROOT / "examples" / "launch"
PYTORCH = (EXAMPLES / "pytorchjob.yaml").read_text()
TRAIN = (EXAMPLES / "trainjob.yaml").read_text()
SCRIPT = (EXAMPLES / "slurm.sbatch").read_text()
CLAIM = "accessModes:\n    - ReadWriteMany"


def errors(text: str, where: str = "file") -> list[str]:
    return [finding.text for finding in check_text(text, where) if finding.rank == 0]


# (text, what, by what, words of an error)
FILES = {
    "other-map": (PYTORCH, "configMap:\n                name: hybrid-8b-config",
                  "configMap:\n                name: hybrid-config", "write hybrid-8b-config"),
    "other-claim": (PYTORCH, "claimName: hybrid-8b-runs", "claimName: hybrid-runs",
                    "nothing uses this file's 'hybrid-8b-runs'"),
    "one-node-claim": (PYTORCH, CLAIM, CLAIM.replace("Many", "Once"),
                       "16 nodes mount it, and ReadWriteOnce allows one"),
    "one-pod-claim": (TRAIN, CLAIM, CLAIM.replace("WriteMany", "WriteOncePod"), "ReadWriteMany"),
    "namespaces": (PYTORCH, "kind: PyTorchJob\nmetadata:\n",
                   "kind: PyTorchJob\nmetadata:\n  namespace: team\n", "write one namespace"),
    "twice": (PYTORCH, PYTORCH, PYTORCH + "---\n" + PYTORCH.split("---\n")[-1],
              "PyTorchJob 'hybrid-8b' stands twice in the file"),
    "run-file-place": (PYTORCH, "- /cfg/run.yaml", "- /config/run.yaml", "write /cfg/run.yaml"),
    "run-file-name": (TRAIN, "- /cfg/run.yaml", "- /cfg/runs.yaml", "which holds run.yaml"),
    "grace": (TRAIN, "GracePeriodSeconds: 60", "GracePeriodSeconds: 5", "time to save; got 5 s"),
    "accelerate": (PYTORCH, "- torchrun\n", "- accelerate\n                - launch\n",
                   "accelerate does not read what the operator of a PyTorchJob sets"),
    "mpirun": (TRAIN, "- torchrun\n", "- mpirun\n", "mpirun does not read"),
    "side-gpus": (PYTORCH, "            - name: pytorch\n",
                  "            - name: side\n              image: a:1\n              resources: "
                  "{limits: {nvidia.com/gpu: 8}}\n            - name: pytorch\n",
                  "takes 8 GPUs of its own"),
    "image-variable": (PYTORCH, "registry.example/nibble:0.1", "${IMAGE}", "nothing expands"),
    "image-capitals": (TRAIN, "registry.example/nibble:0.1", "Nibble:0.1", "in lower case"),
    "two-patches": (TRAIN, "    - manager: nibble.dev/launch\n",
                    "    - manager: nibble.dev/launch\n" * 2, "has two patches"),
    "train-nproc": (TRAIN, "- --max_restarts=3", "- --nproc-per-node=8",
                    "remove it and set numProcPerNode"),
    "nproc-superscript": (PYTORCH, 'PerNode: "8"', 'PerNode: "²"', "a number in quotes"),
    "shell-secret": (PYTORCH, "- torchrun\n", "- sh\n                - -c\n                - "
                     "export HF_TOKEN=abcdefgh && torchrun -m pretrain a.yaml\n", "holds a secret"),
    "pod-indent": (PYTORCH, "              volumeMounts:", "          volumeMounts:",
                   "did you mean volumes"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_mistake_of_a_file_is_found(name):
    text, old, new, words = FILES[name]
    assert old in text, "the example has what is broken"
    found = errors(text.replace(old, new))
    assert any(words in one for one in found), found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("claimName: hybrid-8b-runs", "claimName: another-that-is-there"),
        ("- /cfg/run.yaml", "- /nibble/examples/quickstart.yaml"),
        ("- /cfg/run.yaml", "- /runs/mine.yaml"),
        ("registry.example/nibble:0.1", "host.example:5000/a/b_c:V1.2@sha256:" + "0" * 64),
        ("- torchrun\n", "- sh\n                - -c\n                - export HF_TOKEN=$(cat "
         "/run/secrets/hf) && torchrun -m pretrain /cfg/run.yaml\n"),
        ("            - name: pytorch\n", "            - name: log\n              image: a:1\n"
         "            - name: pytorch\n"),
        ("\n", "\r\n"),
    ],
)  # fmt: skip
def test_what_may_be_right_is_no_error(old, new):
    """Claims and files that the cluster or the image has; references to secrets; DOS line ends."""
    assert old in PYTORCH
    assert errors(PYTORCH.replace(old, new)) == []


def test_a_worker_that_is_merged_from_the_master():
    documents = list(yaml.safe_load_all(PYTORCH))
    roles = documents[-1]["spec"].pop("pytorchReplicaSpecs")
    text = write_documents(documents)
    master = write_documents([{"Master": roles["Master"]}]).replace("Master:", "Master: &node")
    text += "  pytorchReplicaSpecs:\n" + "".join(f"    {one}\n" for one in master.splitlines())
    text += "    Worker:\n      <<: *node\n      replicas: 15\n"
    assert errors(text) == []
    assert any("must be at least 1" in one for one in errors(text.replace(": 15", ": 0")))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("metadata:\n  name: {{ .Release.Name }}\n", "helm template ... > FILE"),
        ("apiVersion: v1\nkind: &a [*a]\n", "an alias stands for what holds it"),
        ("a: &a [1, 2]\nb: *c\n", "undefined alias"),
        (
            "a0: &a0 [1, 2, 3]\n"
            + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)),
            "aliases make more than 100000 values",
        ),
        ("apiVersion: v1\n kind: Pod\n", "must be YAML"),
        ("\x00", "must be YAML"),
    ],
    ids=["template", "loop", "undefined", "laughs", "indentation", "binary"],
)
def test_what_is_no_manifest_is_said_so(text, words):
    with pytest.raises(ConfigError, match="file must be YAML") as failure:
        check_text(text, "file")
    assert words in str(failure.value)


ODD = (None, [], {}, "x", "", 3, -1, True, [None], ["x"], {"a": None}, {3: 4}, [{"name": None}])


def _places(value, path=()):
    yield path
    parts = value.items() if isinstance(value, dict) else ()
    for key, part in enumerate(value) if isinstance(value, list) else parts:
        yield from _places(part, (*path, key))


@pytest.mark.parametrize("text", [PYTORCH, TRAIN], ids=["pytorchjob", "trainjob"])
def test_no_odd_value_anywhere_breaks_the_check(text):
    """Every value of the job replaced by others: findings, or a message, but no stack trace."""
    job = list(yaml.safe_load_all(text))[-1]
    for number, path in enumerate(_places(job)):
        changed = copy.deepcopy(job)
        holder = changed
        for step in path[:-1]:
            holder = holder[step]
        if path:
            holder[path[-1]] = ODD[number % len(ODD)]
        else:
            changed = ODD[number % len(ODD)]
        if changed:  # an empty file is an error of the command line
            check_text(yaml.safe_dump(changed, sort_keys=False), "file")


SRUN = "srun torchrun"
MEET = '    --rdzv_backend c10d \\\n    --rdzv_endpoint "$head:$port" \\\n'
SCRIPTS = {
    "dos": ("\n", "\r\n", "line ends of DOS"),
    "space": ("#SBATCH --nodes", "# SBATCH --nodes", "is a comment to sbatch"),
    "lower": ("#SBATCH --nodes", "#sbatch --nodes", "is a comment to sbatch"),
    "variable": ("--output=%x", "--output=$HOME/%x", "sbatch expands no variable"),
    "time": ("--time=24:00:00", "--time=24h", "hours:minutes:seconds; got 24h"),
    "memory": ("--exclusive", "--mem=64GiB", "write 64G"),
    "all-gpus": ("--gpus-per-node=8", "--gpus=128", "write --gpus-per-node=8"),
    "array": ("--requeue", "--array=0-3", "would continue the same run"),
    "other-signal": ("B:USR1@300", "B:USR2@300", "traps USR2"),
    "foreground": ('"$@" &', '"$@"', "start srun with &"),
    "srun-nodes": (SRUN, "srun -N 2 torchrun", "srun --nodes 2 starts another number"),
    "srun-tasks": (SRUN, "srun --ntasks 128 torchrun", "srun --ntasks 128 starts"),
    "secret": ("set -euo", "export WANDB_API_KEY=0123456789abcdef\nset -euo", "holds a secret"),
    "list-as-host": ('head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
                     "head=$SLURM_JOB_NODELIST", "is a list such as node-[0-15]"),
    "no-rank": (MEET, '    --master_addr "$head" --master_port "$port" \\\n', "would be node 0"),
    "one-rank": (MEET, '    --node_rank "$SLURM_NODEID" --master_addr "$head" \\\n',
                 "is expanded once, on the first node"),
    "port": ("#SBATCH --exclusive\n", "", None),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_mistake_of_a_script_is_found(name):
    old, new, words = SCRIPTS[name]
    assert old in SCRIPT
    text = SCRIPT.replace(old, new)
    if words is None:  # the script's own port is each job's own; a fixed one is not
        assert errors(text) == []
        text, words = text.replace("port=$((20000 + SLURM_JOB_ID % 10000))", "port=29500"), "29500"
    found = errors(text)
    assert any(words in one for one in found), found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("set -euo", "export WANDB_API_KEY=$(cat ~/.wandb)\nset -euo"),
        ("#SBATCH --exclusive", "##SBATCH --exclusive"),
        ("set -euo", "cat <<END\ndon't\nEND\nset -euo"),
        ("--gpus-per-node=8", "--gres=gpu:h100:8"),
    ],
)
def test_scripts_that_are_right(old, new):
    assert old in SCRIPT
    assert errors(SCRIPT.replace(old, new)) == []


def test_a_script_is_one_without_its_first_line():
    assert any("starts nothing" in one for one in errors("echo a\n", "start.sh"))
    assert errors("torchrun --standalone -m pretrain a.yaml\n", "start.sh") == []


def test_commands_over_several_lines():
    text = "srun bash -c 'cd /x\ntorchrun \\\n --nnodes 2 a.py' &\nwait"
    assert commands(text) == [["srun", "bash", "-c", "cd /x\ntorchrun   --nnodes 2 a.py"], ["wait"]]
    assert commands("echo don't\ntorchrun a.py") == [["torchrun", "a.py"]]


@pytest.mark.parametrize(
    ("memory", "written"),
    [("900Gi", "900G"), ("1Ti", "1024G"), ("1536Mi", "1536M"), ("1G", "976563K"), (None, None)],
)
def test_memory_in_units_of_slurm(memory, written):
    run = str(EXAMPLES / "run.yaml")
    text = render_slurm(read_job(run, [], Options(nodes=16, image=None, memory=memory)))
    lines = [line for line in text.split("\n") if "--mem" in line]
    assert lines == ([f"#SBATCH --mem={written}"] if written else [])
