# SPDX-License-Identifier: Apache-2.0
"""Scripts and manifests as users write them: sound ones pass, and what loses a run is found."""

import pytest
import yaml

from fused_ops.errors import ConfigError
from tests.distributed import ROOT
from tools.launch.__main__ import main
from tools.launch.batch_script import render_slurm
from tools.launch.check import check_text
from tools.launch.command import read_command, statements
from tools.launch.documents import write_documents
from tools.launch.job import Options, read_job

EXAMPLES = ROOT / "examples" / "launch"
HEAD = """\
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
set -e
module load cuda
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
"""
QUIET = HEAD.replace("#SBATCH --signal=B:USR1@300\n", "")
TRAP = "trap 'touch runs/x/stop' USR1\n"
NODES = '--nnodes "$SLURM_NNODES" --nproc_per_node "$SLURM_GPUS_ON_NODE" '
MEET = '--rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head:$port"'
TRAIN = f"torchrun {NODES}{MEET} -m pretrain c.yaml"
BARE = "--nproc_per_node 8 --nnodes $SLURM_NNODES --rdzv_id $SLURM_JOB_ID --rdzv_backend c10d "
BARE += "--rdzv_endpoint $head:$port"
WAIT = " &\nwait\n"
SCRIPT = f"{HEAD}{TRAP}srun {TRAIN}{WAIT}"
DIRECTIVE = "#SBATCH --exclusive\n"


def changed(old: str, new: str, text: str = SCRIPT) -> str:
    assert old in text
    return text.replace(old, new)


def found(text: str, rank: int = 0, where: str = "file") -> list[str]:
    return [finding.text for finding in check_text(text, where) if finding.rank == rank]


SOUND = {
    "plain": SCRIPT,
    "exit-trap": f"{QUIET}trap 'rm -rf /tmp/x' EXIT\nsrun {TRAIN}\n",
    "trap-comment": changed("USR1\nsrun", "USR1  # soon over\nsrun"),
    "trap-lines": changed("'touch runs/x/stop'", "'\n  echo soon\n  touch runs/x/stop\n'"),
    "trap-number": changed("stop' USR1", "stop' 10"),
    "trap-lower-case": changed("stop' USR1", "stop' usr1"),
    "signal-letters": changed("B:USR1@", "RB:USR1@"),
    "wait-same-line": changed(WAIT, " & wait $!\n"),
    "wait-behind": changed(WAIT, " &\npid=$!; wait $pid\n"),
    "wait-loop": changed(WAIT, " &\nwhile ! wait $!; do sleep 1; done\n"),
    "function": f"{HEAD}{TRAP}train() {{\n  srun {TRAIN}\n}}\ntrain &\nwait $!\n",
    "group": f"{HEAD}{TRAP}{{ srun {TRAIN}; }} &\nwait\n",
    "quoted-lines": f"{HEAD}{TRAP}srun bash -c '\nsource env\ntorchrun {BARE} -m pretrain c.yaml\n"
                    "' &\nwait\n",
    "redirected": changed(WAIT, " > log 2>&1 &\nwait\n"),
    "chain": changed(DIRECTIVE, f"{DIRECTIVE}#SBATCH --array=1-10%1\n"),
    "quotes": changed(DIRECTIVE, f'{DIRECTIVE}#SBATCH -J "my run" --comment="8B -N 2 test"\n'),
    "quoted-numbers": changed("--nodes=4", '--nodes="4"  # four'),
    "time-word": changed("24:00:00", "unlimited"),
    "gres-list": changed("--gpus-per-node=8", "--gres=gpu:h100:8(S:0-1),nvme:1",
                         changed('"$SLURM_GPUS_ON_NODE"', "8")),
    "srun-tasks": changed("SBATCH --ntasks-per-node=1", "SBATCH --ntasks-per-node=8",
                          changed("srun ", 'srun -n "$SLURM_NNODES" --ntasks-per-node=1 ')),
    "nnodes-same": changed('"$SLURM_NNODES"', "4"),
    "one-node": changed("nodes=4", "nodes=1", changed('"$SLURM_NNODES"', "1")),
    "one-task": changed("#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1", "#SBATCH --ntasks=1",
                        f"{HEAD}{TRAP}torchrun --standalone --nproc_per_node 8 a.py{WAIT}"),
    "condition": f"{QUIET}if ! srun {TRAIN}; then exit 3; fi\n",
    "label-python": changed("torchrun ", "-l python -u -m torch.distributed.run "),
    "long-option": changed("torchrun ", "--cpu-bind none python -m torch.distributed.run "),
    "apptainer": changed("torchrun ", "apptainer exec --nv x.sif python -m torch.distributed.run "),
    "numactl": changed("torchrun ", "numactl -N 0 torchrun "),
    "command-variable": f'{HEAD}{TRAP}CMD="torchrun {BARE} -m pretrain c.yaml"\nsrun $CMD{WAIT}',
    "launcher": f'{HEAD}{TRAP}export LAUNCHER="python -u -m torch.distributed.run \\\n {BARE} "\n'
                f"export CMD=\"-m pretrain c.yaml\"\nsrun bash -c '$LAUNCHER $CMD' 2>&1{WAIT}",
    "arguments": f"{HEAD}{TRAP}ARGS=(\n  {BARE}\n)\nARGS+=(--max_restarts 3)\n"
                 f'srun torchrun "${{ARGS[@]}}" -m pretrain c.yaml{WAIT}',
    "substitutions": f"{HEAD}{TRAP}ARGS=(\n  --nnodes $SLURM_NNODES  # all\n  --nproc_per_node "
                     "$(nvidia-smi -L | wc -l)\n)\nsrun torchrun ${ARGS[@]} --rdzv_id "
                     "$(echo $(date +%s) | tail -c 5) --rdzv_backend c10d --rdzv_endpoint "
                     f"$head:$((20000 + SLURM_JOB_ID % 9999)) -m pretrain c.yaml{WAIT}",
    "hidden-arguments": f"{HEAD}{TRAP}. ./args.sh\nsrun torchrun $ARGS -m pretrain c.yaml{WAIT}",
    "told-ranks": changed("ntasks-per-node=1", "ntasks-per-node=8", HEAD) + TRAP + "srun bash -c "
                  f"'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID python -m pretrain a.yaml'{WAIT}",
    "other-part": changed(DIRECTIVE, f"{DIRECTIVE}#SBATCH hetjob\n#SBATCH --nodes=1\n"),
    "export": changed(DIRECTIVE, f"{DIRECTIVE}#SBATCH --export=NONE\n",
                      changed("set -e", "unset SLURM_EXPORT_ENV\nset -e")),
    "wrapper": f"{QUIET}srun bash launch.sh\n",
    "written-wrapper": f"{QUIET}cat > launch.sh <<'EOF'\n{TRAIN}\nEOF\nsrun ./launch.sh c.yaml\n",
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_script_is_not_called_wrong(name):
    assert found(SOUND[name]) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (changed("torchrun ", "torchrun --standalone "), "a run of its own; remove it"),
        (changed(DIRECTIVE, f"{DIRECTIVE}#SBATCH --export=NONE\n"), "srun --export=ALL"),
        (changed("@300", "@5"), "got 5 s; write B:USR1@300"),
        (changed("--gpus-per-node=8", "--gres=tmpfs:200G"), "asks for no GPU"),
        (changed("ntasks-per-node=1", "ntasks-per-gpu=1"), "not one a GPU"),
        (changed('"$SLURM_NNODES"', "8"), "out of step with --nodes=4"),
        (changed("-m pretrain c.yaml", "pretrain c.yaml"), "put -m before it"),
        (changed("c.yaml", ""), "given no run file"),
        (f"{HEAD}{TRAP}./watch.sh &\nsrun {TRAIN}\nwait\n", "start srun with &"),
        (f"{HEAD}{TRAP}ARGS=(--nproc_per_node 4)\nsrun torchrun ${{ARGS[@]}} -m pretrain c.yaml"
         f"{WAIT}", "starts 4 processes on 8 GPUs"),
    ],
)  # fmt: skip
def test_a_script_that_loses_the_run_is_found(text, words):
    texts = found(text)
    assert any(words in one for one in texts), texts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SOUND["wrapper"], "what trains is started by launch.sh"),
        (SOUND["nnodes-same"], "stands in a second place"),
        (changed('"$SLURM_NNODES"', "1:4"), "may begin without the nodes that are late"),
        (changed(DIRECTIVE, ""), "asks for no CPUs"),
        (f"{changed('set -e', 'set -u', QUIET)}srun {TRAIN} | tee log\n", "set -o pipefail"),
    ],
)
def test_advice_about_a_script(text, words):
    assert found(text) == []
    assert any(words in one for one in found(text, 1))


STATIC = "torchrun --nnodes=2 --master_addr=10.0.0.1 -m pretrain a.yaml\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torchrun --nnodes=1:4 --rdzv-backend=c10d --rdzv-endpoint=a:1 -m pretrain a.yaml\n", ""),
        (STATIC.replace("--nnodes", "--node_rank=$1 --nnodes"), ""),
        ('ARGS="--nnodes 2 --node_rank $1 --master_addr a"\ntorchrun $ARGS a.py\n', ""),
        ("for h in a b; do ssh $h 'cd x && ./run.sh' & done; wait\n", ""),
        (STATIC, "every node would be node 0"),
        (STATIC.replace("master_addr", "rdzv_endpoint"), "every node would be node 0"),
        ("torchrun --standalone --nnodes=2 --rdzv_endpoint=a:1 a.py\n", "a run of its own"),
        ("torchrun --standalone pretrain a.yaml\n", "put -m before it"),
    ],
)
def test_torchrun_by_hand(text, words):
    texts = found(text, where="start.sh")
    assert any(words in one for one in texts) if words else texts == [], texts


def test_statements_and_what_ends_them():
    text = "A='-x 1'\na $A 2>&1 | b\nif ! c; then { d; } & fi\ncat <<E > f\ntorchrun\nE\ne"
    steps = [(" ".join(words), end) for words, end in statements(text)]
    assert steps == [("a -x 1 2>1", "|"), ("b", ";"), ("c", ";"), ("d", "&"), ("cat > f", ";"),
                     ("e", ";")]  # fmt: skip
    assert statements("a x=b#1 ${#c} # d")[0][0] == ["a", "x=b#1", "${#c}"]
    assert statements('a "$(b "c" | d)" x$((1 + 2)); e')[0][0] == [
        "a",
        '$(b "c" | d)',
        "x$((1 + 2))",
    ]
    assert read_command(["uv", "run", "--frozen", "torchrun", "a.py"]).rest == ["a.py"]


def _job(kind: str, change) -> str:
    documents = list(yaml.load_all((EXAMPLES / kind).read_text(), Loader=yaml.CSafeLoader))
    change(documents)
    return write_documents(documents)


def _pods(change):
    def all_roles(documents):
        for role in documents[-1]["spec"]["pytorchReplicaSpecs"].values():
            pod = role["template"]["spec"]
            change(pod, pod["containers"][0])

    return all_roles


def _shell(text, shell="bash"):
    return _pods(lambda pod, one: one.update(command=[shell, "-c"], args=[text]))


def _volume(name, **source):
    def change(pod, _):
        index = next(i for i, v in enumerate(pod["volumes"]) if v["name"] == name)
        pod["volumes"][index] = {"name": name, **source}

    return _pods(change)


def _run(**settings):
    def change(documents):
        run = yaml.safe_load(documents[0]["data"]["run.yaml"])
        for section, values in settings.items():
            run[section] = run.get(section, {}) | values
        documents[0]["data"]["run.yaml"] = yaml.safe_dump(run)

    return change


def _without_rdma(one):
    for amounts in one["resources"].values():
        amounts.pop("rdma/ib")


HOOK = {"preStop": {"exec": {"command": ["sh", "-c", "sleep 45"]}}}
GPUS = {"limits": {"nvidia.com/gpu": 8}}
RUN = "torchrun -m pretrain /cfg/run.yaml"
SOUND_JOBS = {
    "host-shm": _volume("shm", hostPath={"path": "/dev/shm"}),
    "init-gpus": _pods(lambda pod, _: pod.update(
        initContainers=[{"name": "preflight", "image": "a:1", "resources": GPUS}])),
    "generated-name": lambda ds: ds[-1].update(metadata={"generateName": "hybrid-"}),
    "privileged": _pods(lambda _, one: (_without_rdma(one), one.update(
        securityContext={"privileged": True}, env=[{"name": "NCCL_IB_HCA", "value": "mlx5"}]))),
    "other-device": _pods(lambda _, one: (_without_rdma(one), one["resources"]["limits"].update(
        {"nvidia.com/mlnxnics": 8}), one.update(env=[{"name": "NCCL_IB_HCA", "value": "mlx5"}]))),
    "shell-arguments": _shell('A=(--max_restarts 3)\nexec torchrun "${A[@]}" -m pretrain a.yaml'),
    "shared-runs": _volume("runs", nfs={"server": "a", "path": "/b"}),
    "other-runs": lambda ds: _pods(lambda _, one: one["args"].append("run.dir=$(X)"))(ds),
    "pipe": _shell(f"set -eo pipefail; {RUN} | tee log"),
    "short-hook": _pods(lambda pod, one: (one.update(lifecycle=HOOK), pod.update(
        terminationGracePeriodSeconds=90))),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND_JOBS)
def test_a_sound_job_is_not_called_wrong(name):
    assert found(_job("pytorchjob.yaml", SOUND_JOBS[name])) == []


LOST_JOBS = {
    "runs-empty": (_volume("runs", emptyDir={}), "run.dir=/runs lies in an emptyDir"),
    "runs-ephemeral": (_volume("runs", ephemeral={"volumeClaimTemplate": {"spec": {}}}),
                       "lies in an ephemeral"),
    "runs-nowhere": (_pods(lambda _, one: one["args"].append("run.dir=/tmp/x")),
                     "run.dir=/tmp/x lies on no volume, so that checkpoints go with the pod"),
    "runs-read-only": (_pods(lambda _, one: one["volumeMounts"][2].update(readOnly=True)),
                       "on a volume that is readOnly"),
    "world": (lambda ds: ds[-1]["spec"]["pytorchReplicaSpecs"]["Worker"].update(replicas=6),
              "train.global_batch_size must be a multiple"),
    "layout": (_run(parallel={"tensor_model_parallel_size": 3}), "would not start: "),
    "setting": (_run(train={"stpes": 3}), "did you mean train.steps"),
    "override": (_pods(lambda _, one: one["args"].append("train.stpes=1")), "did you mean train"),
    "no-yaml": (lambda ds: ds[0]["data"].update({"run.yaml": "a: [1"}), "would not start: "),
    "tee": (_shell(f"{RUN} 2>&1 | tee /runs/log"), "a failed run counts as done"),
    "or-true": (_shell(f"set -e; {RUN} || true"), "a failed run counts as done"),
    "echo": (_shell(f"cd /nibble\n{RUN}\necho done"), "a failed run counts as done"),
    "hook": (_pods(lambda _, one: one.update(lifecycle=HOOK)), "less the 45 s of preStop"),
    "no-grace": (_pods(lambda pod, one: (pod.pop("terminationGracePeriodSeconds"), one.update(
        lifecycle={"preStop": {"sleep": {"seconds": 5}}}))), "write at least 35"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST_JOBS)
def test_a_job_that_loses_the_run_is_found(name):
    change, words = LOST_JOBS[name]
    texts = found(_job("pytorchjob.yaml", change))
    assert any(words in one for one in texts), texts


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ds: ds[-1]["metadata"].update(name="h" * 48), "at most 47 characters"),
        (lambda ds: ds[-1]["spec"]["trainer"].update(numNodes=7), "must be a multiple"),
    ],
)
def test_a_train_job_that_cannot_start_is_found(change, words):
    texts = found(_job("trainjob.yaml", change))
    assert any(words in one for one in texts), texts


@pytest.mark.parametrize(
    ("text", "shell", "kept"),
    [
        (RUN, "sh", False),
        (f"cd /x && exec {RUN}", "sh", False),
        (f"cd /x && {RUN}", "bash", False),
        (f"cd /x && {RUN}", "sh", True),
        (f"set -o pipefail; {RUN} | tee log", "bash", True),
    ],
)
def test_whether_a_shell_keeps_the_signal_to_itself(text, shell, kept):
    """Seen in a container: bash replaces itself by its last simple command, dash by an only one."""
    advice = found(_job("pytorchjob.yaml", _shell(text, shell)), 1)
    assert any("keeps SIGTERM to itself" in one for one in advice) == kept


def test_a_restart_that_never_comes():
    def change(documents):
        for role in documents[-1]["spec"]["pytorchReplicaSpecs"].values():
            role["restartPolicy"] = "ExitCode"

    assert any("torchrun ends with 1" in one for one in found(_job("pytorchjob.yaml", change), 1))


@pytest.mark.parametrize(
    ("image", "written"),
    [
        ("registry.example:5000/a/nibble:0.1", "'registry.example:5000#a/nibble:0.1'"),
        ("nvidia/pytorch:1", "nvidia/pytorch:1"),
        ("/images/nibble.sqsh", "/images/nibble.sqsh"),
    ],
)
def test_a_container_of_slurm_has_what_the_run_names(image, written):
    """enroot's way to name a registry; data, runs and the run file are the same on both sides."""
    run = str(EXAMPLES / "run.yaml")
    overrides = ["data.valid=/data/shards/more/valid"]
    text = render_slurm(read_job(run, overrides, Options(nodes=16, image=image)))
    mounts = f'"$PWD:$PWD",/data/shards:/data/shards,/runs:/runs,{EXAMPLES}:{EXAMPLES}'
    folders = ",".join(sorted(mounts.split(",")[1:]))
    assert f'--container-image={written} --container-mounts="$PWD:$PWD",{folders} ' in text
    assert 'mkdir -p "$RUN_DIR"\n' in text
    assert "tools.launch reach" not in text, "it is in the image, not on the host"
    assert found(text) == []


def test_a_digest_is_nothing_that_enroot_reads():
    job = read_job(
        str(EXAMPLES / "run.yaml"), [], Options(nodes=16, image=f"a/b@sha256:{'0' * 64}")
    )
    with pytest.raises(ConfigError, match="must name a tag"):
        render_slurm(job)


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        ("trainjob", ["--secret", "a"], "--secret has no place in what starts a trainjob"),
        ("trainjob", ["--host-network"], "only in that of a pytorchjob; remove it"),
        ("slurm", ["--rdma", "rdma/ib"], "only in that of a pytorchjob or trainjob"),
        ("pytorchjob", ["--partition", "big"], "--partition has no place"),
    ],
)
def test_an_option_that_would_be_dropped_is_refused(kind, words, said, capsys):
    run = str(EXAMPLES / "run.yaml")
    assert main(["render", kind, run, "--nodes=16", "--image=r/nibble:1", *words]) == 2
    assert said in capsys.readouterr().err
