# SPDX-License-Identifier: Apache-2.0
"""Manifests and batch scripts: what is rendered passes the check, and each mistake is found."""

import pytest
import yaml

from fused_ops.errors import ConfigError
from tests.distributed import ROOT
from tools.launch.__main__ import main
from tools.launch.check import check_text
from tools.launch.documents import write_documents

EXAMPLES = ROOT / "examples" / "launch"
# As LAUNCH facts have it: flow style, an alias, comments, volumes that the image may not need.
MINIMAL = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: pretrain}
spec:
  nprocPerNode: "8"
  runPolicy: {cleanPodPolicy: None, backoffLimit: 3}
  pytorchReplicaSpecs:
    Master: &node
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          containers:
          - name: pytorch
            image: registry/trainer:tag
            command: [torchrun]
            args: [-m, pretrain, /cfg/run.yaml]
            resources:
              limits: {nvidia.com/gpu: 8, rdma/ib: 1}
            securityContext: {capabilities: {add: [IPC_LOCK]}}
            volumeMounts: [{name: shm, mountPath: /dev/shm}]
          volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 64Gi}}]
    Worker: *node
"""


def errors(text: str) -> list[str]:
    return [finding.text for finding in check_text(text, "file") if finding.rank == 0]


def example(name: str) -> str:
    return (EXAMPLES / name).read_text()


@pytest.mark.parametrize("name", ["pytorchjob.yaml", "trainjob.yaml", "slurm.sbatch"])
def test_the_examples_have_no_mistake(name, capsys):
    assert main(["check", str(EXAMPLES / name)]) == 0
    assert capsys.readouterr().out.endswith(f"{name}: 0 errors\n")


def test_the_minimal_form_has_no_mistake():
    assert errors(MINIMAL) == []


# A change of the text of pytorchjob.yaml (what, by what), and words of the one error it makes.
TEXT_MISTAKES = {
    "container-name": ("name: pytorch\n", "name: trainer\n", "must be called pytorch"),
    "nproc-number": ('nprocPerNode: "8"\n', "nprocPerNode: 8\n", 'write "8", with quotes'),
    "nproc-word": ('nprocPerNode: "8"\n', 'nprocPerNode: "eight"\n', "auto, gpu or cpu"),
    "nproc-spelling": ("nprocPerNode:", "nproc_per_node:", "did you mean nprocPerNode"),
    "nproc-differs": ('nprocPerNode: "8"\n', 'nprocPerNode: "4"\n', "8 GPUs to 4 processes"),
    "masters": ("replicas: 1\n", "replicas: 2\n", "there is one Master"),
    "no-workers": ("replicas: 15\n", "replicas: 0\n", "must be at least 1; got 0"),
    "lower-case-role": ("    Master:\n", "    master:\n", "write Master"),
    "other-role": ("    Worker:\n", "    Launcher:\n", "roles are Master and Worker"),
    "restart-policy": ("restartPolicy: OnFailure", "restartPolicy: Sometimes", "Always, OnFail"),
    "api-version": ("kubeflow.org/v1\n", "kubeflow.org/v1beta1\n", "write kubeflow.org/v1"),
    "kind": ("kind: PyTorchJob", "kind: PytorchJob", "did you mean PyTorchJob"),
    "job-name": ("  name: hybrid-8b\nspec:", "  name: Hybrid_8B\nspec:", "write 'hybrid-8b'"),
    "long-name": ("  name: hybrid-8b\nspec:", f"  name: {'h' * 60}\nspec:", "shorten it"),
    "no-image": ("image: registry.example/nibble:0.1", 'image: ""', "must be set in every cont"),
    "python": ("- torchrun\n", "- python\n", "starts one process a pod"),
    "nnodes": ("- --max_restarts=3", "- --nnodes=16", "--nnodes overrides PET_NNODES"),
    "node-rank": ("- --max_restarts=3", "- --node-rank=$(RANK)", "overrides PET_NODE_RANK"),
    "nproc-flag": ("- --max_restarts=3", "- --nproc-per-node=8", "PET_NPROC_PER_NODE"),
    "master-addr": ("- --max_restarts=3", "- --master_addr=host", "PET_MASTER_ADDR"),
    "standalone": ("- --max_restarts=3", "- --standalone", "a run of its own"),
    "own-endpoint": ("--max_restarts=3", "--rdzv_endpoint=$(HOSTNAME):1", "another place on every"),
    "no-module-flag": ("                - -m\n", "", "put -m before it"),
    "shell-variable": ("/cfg/run.yaml\n", "${CONFIG}\n", "no shell expands"),
    "world-size": ("/cfg/run.yaml\n", "$(WORLD_SIZE)\n", "counts nodes outside of torchrun"),
    "gpu-name": ("nvidia.com/gpu: 8", "nvidia.com/gpus: 8", "write nvidia.com/gpu"),
    "gpu-bare": ("nvidia.com/gpu: 8", "gpu: 8", "no resource of Kubernetes"),
    "gpu-half": ("nvidia.com/gpu: 8", "nvidia.com/gpu: 7.5", "GPUs are whole"),
    "no-gpu": ("nvidia.com/gpu: 8", "cpu: 8", "must also stand under limits"),
    "shm-disk": ("medium: Memory\n", 'medium: ""\n', "must be memory"),
    "shm-small": ("sizeLimit: 64Gi", "sizeLimit: 64Mi", "at least 1Gi"),
    "shm-large": ("sizeLimit: 64Gi", "sizeLimit: 2000Gi", "counts as the container's memory"),
    "shm-place": ("mountPath: /dev/shm", "mountPath: /dev/shmem", "64 MiB without a volume"),
    "unit": ("memory: 1000Gi", "memory: 1000GB", "write 1000Gi"),
    "mount": ("- name: config\n                  mountPath", "- name: cfg\n                  "
              "mountPath", "mounts the volume 'cfg'"),
    "ipc-lock": ("- IPC_LOCK", "- SYS_ADMIN", "without IPC_LOCK"),
    "host-network": (
        "terminationGracePeriodSeconds: 60", "hostNetwork: true", "ClusterFirstWithHostNet"
    ),
    "annotation": ('inject: "false"', "inject: false", 'write "false", with quotes'),
    "clean-pods": ('cleanPodPolicy: None', "cleanPodPolicy: Some", "must be one of None"),
    "misspelt-volume": ("persistentVolumeClaim:", "persistentVolumeClaims:", "did you mean pers"),
    "misspelt-mount": ("readOnly: true", "readonly: true", "did you mean readOnly"),
    "two-sources": (
        "emptyDir:\n", "hostPath: {path: /x}\n              emptyDir:\n", "exactly one source"
    ),
    "tab": ("spec:\n  nproc", "spec:\n\tnproc", "must be YAML"),
    "twice": ('  nprocPerNode: "8"\n', '  nprocPerNode: "8"\n' * 2, "stands twice"),
    "command-text": ("command:\n                - torchrun", "command: torchrun", "must be a list"),
    "one-word": ("- torchrun\n", "- torchrun -m pretrain\n", "the first word is the program"),
    "secret": (
        "envFrom:",
        "env:\n                - name: WANDB_API_KEY\n                  value: 0123456789abcdef\n"
        "              envFrom:",
        "holds a secret in plain text",
    ),
    "injected": (
        "envFrom:",
        'env:\n                - name: WORLD_SIZE\n                  value: "128"\n'
        "              envFrom:",
        "WORLD_SIZE is set by the operator",
    ),
    "env-number": (
        "envFrom:",
        "env:\n                - name: OMP_NUM_THREADS\n                  value: 8\n"
        "              envFrom:",
        'write "8", with quotes',
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXT_MISTAKES)
def test_a_mistake_in_a_pytorch_job_is_found(name, tmp_path):
    old, new, words = TEXT_MISTAKES[name]
    text = example("pytorchjob.yaml")
    assert old in text, "the example has what is broken"
    broken = text.replace(old, new, 1)
    if name == "tab":
        with pytest.raises(ConfigError, match="must be YAML"):
            check_text(broken, "file")
        return
    found = errors(broken)
    assert any(words in text for text in found), found
    file = tmp_path / "job.yaml"
    file.write_text(broken)
    assert main(["check", str(file)]) == 1


def _structured(change) -> list[str]:
    documents = list(yaml.load_all(example("pytorchjob.yaml"), Loader=yaml.CSafeLoader))
    change(documents[-1]["spec"])
    return errors(write_documents(documents))


def _pod(spec, role="Master"):
    return spec["pytorchReplicaSpecs"][role]["template"]["spec"]


def _container(spec, role="Master"):
    return _pod(spec, role)["containers"][0]


def _both(spec, key, value):
    for role in ("Master", "Worker"):
        _container(spec, role)[key] = value


STRUCTURED_MISTAKES = {
    "worker-image": (lambda s: _container(s, "Worker").update(image="other:1"), "their image diff"),
    "worker-gpus": (
        lambda s: _container(s, "Worker")["resources"].update(
            limits={"nvidia.com/gpu": 4}, requests={}
        ),
        "Master has 8 GPUs and Worker 4",
    ),
    "no-master": (lambda s: s["pytorchReplicaSpecs"].pop("Master"), "without a Master"),
    "nothing": (lambda s: s["pytorchReplicaSpecs"].clear(), "must hold Master"),
    "no-specs": (lambda s: s.pop("pytorchReplicaSpecs"), "must be set"),
    "no-resources": (lambda s: _both(s, "resources", {}), "names no GPU"),
    "no-command": (lambda s: _both(s, "command", None), "the image decides what runs"),
    "no-shm": (lambda s: _both(s, "volumeMounts", []), "64 MiB without a volume"),
    "requests": (
        lambda s: _both(
            s,
            "resources",
            {"limits": {"nvidia.com/gpu": 8}, "requests": {"nvidia.com/gpu": 4}},
        ),
        "must equal its limit",
    ),
    "only-requests": (
        lambda s: _both(s, "resources", {"requests": {"nvidia.com/gpu": 8}}),
        "must also stand under limits",
    ),
    "shell-python": (
        lambda s: (
            _both(s, "command", ["bash", "-c"]),
            _both(s, "args", ["cd /x && python train.py"]),
        ),
        "starts one process a pod",
    ),
    "shell-nnodes": (
        lambda s: (
            _both(s, "command", ["/bin/sh", "-ec", "exec torchrun --nnodes 16 -m pretrain a.yaml"]),
            _both(s, "args", []),
        ),
        "overrides PET_NNODES",
    ),
    "shell-endpoint": (
        lambda s: (
            _both(s, "command", ["bash", "-c"]),
            _both(s, "args", ["torchrun --rdzv_endpoint=$HOSTNAME:29500 -m pretrain a.yaml"]),
        ),
        "another place on every node",
    ),
    "nothing-to-run": (lambda s: _both(s, "args", ["--max_restarts=3"]), "nothing to run"),
    "no-run-file": (lambda s: _both(s, "args", ["-m", "pretrain"]), "given no run file"),
    "module-file": (lambda s: _both(s, "args", ["-m", "train.py"]), "-m takes a module"),
    "elastic-both": (
        lambda s: s.update(elasticPolicy={"nProcPerNode": 8, "minReplicas": 1, "maxReplicas": 16}),
        "may not stand beside spec.nprocPerNode",
    ),
    "elastic-range": (
        lambda s: s.update(elasticPolicy={"minReplicas": 9, "maxReplicas": 4}),
        "may not exceed maxReplicas=4",
    ),
    "elastic-backend": (
        lambda s: s.update(elasticPolicy={"rdzvBackend": "gloo"}),
        "must be one of c10d, etcd",
    ),
    "elastic-repeat": (
        lambda s: (
            s.update(elasticPolicy={"minReplicas": 15, "maxReplicas": 15}),
            _both(s, "args", ["--rdzv_backend=c10d", "-m", "pretrain", "a.yaml"]),
        ),
        "overrides PET_RDZV_BACKEND",
    ),
    "moved": (lambda s: s.update(backoffLimit=3), "it belongs to spec.runPolicy"),
    "infiniband": (
        lambda s: _pod(s)["volumes"].append(
            {"name": "ib", "hostPath": {"path": "/dev/infiniband"}}
        ),
        "only when privileged",
    ),
    "volume-twice": (
        lambda s: _pod(s)["volumes"].append({"name": "shm", "emptyDir": {}}),
        "is there twice",
    ),
    "place-twice": (
        lambda s: _container(s)["volumeMounts"].append({"name": "shm", "mountPath": "/cfg/"}),
        "/cfg is mounted twice",
    ),
    "env-twice": (
        lambda s: _both(s, "env", [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]),
        "is set twice",
    ),
    "side-container": (
        lambda s: _pod(s)["containers"].append({"name": "log"}),
        "must be set in every container",
    ),
    "secret-argument": (
        lambda s: _both(
            s, "args", ["-m", "pretrain", "a.yaml", "x=https://me:hunter2hunter2@host/data"]
        ),
        "holds a secret in plain text",
    ),
    "empty-item": (lambda s: _both(s, "args", ["-m", "pretrain", None]), "must not be empty"),
    "null-pod": (
        lambda s: s["pytorchReplicaSpecs"]["Worker"].update(template=None),
        "add the pod's containers",
    ),
    "list-for-mapping": (lambda s: _pod(s).update(nodeSelector=["gpu"]), "must be a mapping"),
    "deep-typo": (
        lambda s: _pod(s).update(tolerations=[{"key": "gpu", "operater": "Exists"}]),
        "did you mean operator",
    ),
}


@pytest.mark.parametrize("name", STRUCTURED_MISTAKES)
def test_a_mistake_in_the_values_is_found(name):
    change, words = STRUCTURED_MISTAKES[name]
    found = _structured(change)
    assert any(words in text for text in found), found


CORRECT = {
    "scheduling": lambda s: _pod(s).update(
        nodeSelector={"gpu": "h100"},
        tolerations=[{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        priorityClassName="high",
        schedulerName="volcano",
        serviceAccountName="trainer",
        imagePullSecrets=[{"name": "pull"}],
        topologySpreadConstraints=[
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
    ),
    "affinity": lambda s: _pod(s).update(
        affinity={
            "podAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"labelSelector": {"matchLabels": {"a": "b"}}, "topologyKey": "rack"}
                ]
            }
        }
    ),
    "secret-reference": lambda s: _both(
        s,
        "env",
        [
            {
                "name": "WANDB_API_KEY",
                "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}},
            },
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
    ),
    "init-container": lambda s: _pod(s).update(
        initContainers=[
            {"name": "wait", "image": "busybox:1.36", "command": ["sh", "-c", "sleep 1"]}
        ]
    ),
    "host-network": lambda s: [
        _pod(s, role).update(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet")
        for role in ("Master", "Worker")
    ],
    "shell": lambda s: (
        _both(s, "command", ["bash", "-c"]),
        _both(s, "args", ["set -e\ncd /nibble\nexec torchrun -m pretrain /cfg/run.yaml a=$HOME"]),
    ),
    "probes": lambda s: _both(
        s, "livenessProbe", {"exec": {"command": ["true"]}, "periodSeconds": 60}
    ),
    "cpu": lambda s: (
        s.update(nprocPerNode="2"),
        _both(s, "resources", {}),
        _both(s, "args", ["-m", "pretrain", "/cfg/run.yaml", "run.device=cpu"]),
    ),
    "one-node": lambda s: s["pytorchReplicaSpecs"].pop("Worker"),
    "python-module": lambda s: (
        _both(s, "command", ["python", "-m", "torch.distributed.run"]),
        _both(s, "args", ["-m", "pretrain", "/cfg/run.yaml"]),
    ),
    "auto": lambda s: s.update(nprocPerNode="auto"),
    "policies": lambda s: s["runPolicy"].update(
        ttlSecondsAfterFinished=600,
        schedulingPolicy={"minAvailable": 16, "queue": "big", "minResources": {"cpu": "64"}},
    ),
}


@pytest.mark.parametrize("name", CORRECT)
def test_what_is_right_is_not_called_wrong(name):
    assert _structured(CORRECT[name]) == []


TRAIN_MISTAKES = {
    "no-runtime": (lambda j: j["spec"].pop("runtimeRef"), "must be set"),
    "reserved": (
        lambda j: j["spec"]["trainer"].update(env=[{"name": "PET_NNODES", "value": "2"}]),
        "PET_NNODES is set by the operator of a TrainJob",
    ),
    "processes-text": (
        lambda j: j["spec"]["trainer"].update(numProcPerNode="8"),
        "write 8, without quotes",
    ),
    "processes": (lambda j: j["spec"]["trainer"].update(numProcPerNode=4), "8 GPUs to 4 processes"),
    "no-nodes": (lambda j: j["spec"]["trainer"].update(numNodes=0), "must be at least 1"),
    "no-gpus": (lambda j: j["spec"]["trainer"].pop("resourcesPerNode"), "names no GPU"),
    "old-overrides": (
        lambda j: j["spec"].update(podTemplateOverrides=[]),
        "use spec.runtimePatches",
    ),
    "elastic": (lambda j: j["spec"].update(elasticPolicy={}), "elasticPolicy is gone"),
    "no-manager": (lambda j: j["spec"]["runtimePatches"][0].pop("manager"), "must be set"),
    "no-patch": (lambda j: j["spec"].pop("runtimePatches"), "64 MiB without a volume"),
    "python": (lambda j: j["spec"]["trainer"].update(command=["python"]), "starts one process"),
    "no-command": (
        lambda j: (j["spec"]["trainer"].pop("command"), j["spec"]["trainer"].pop("args")),
        "the image decides what runs",
    ),
    "no-image": (lambda j: j["spec"]["trainer"].pop("image"), "set trainer.image"),
    "repeat": (
        lambda j: j["spec"]["trainer"]["args"].insert(0, "--master_port=29500"),
        "overrides PET_MASTER_PORT",
    ),
    "name": (lambda j: j["metadata"].update(name="8b"), "starts with a letter"),
    "volumes-in-trainer": (
        lambda j: j["spec"]["trainer"].update(volumeMounts=[]),
        "is not a field here",
    ),
}


def _patched(job):
    jobs = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    return jobs["replicatedJobs"][0]


def _patched_pod(job):
    return _patched(job)["template"]["spec"]["template"]["spec"]


TRAIN_MISTAKES |= {
    "patched-env": (
        lambda j: _patched_pod(j)["containers"][0].update(env=[{"name": "A", "value": "1"}]),
        "put them into trainer.env",
    ),
    "patched-container": (
        lambda j: _patched_pod(j)["containers"][0].update(name="pytorch"),
        "is called node",
    ),
    "patched-image": (
        lambda j: _patched_pod(j)["containers"][0].update(image="x:1"),
        "is not a field here",
    ),
    "patched-job": (lambda j: _patched(j).update(name="worker"), "write node"),
    "patched-host-network": (
        lambda j: _patched_pod(j).update(hostNetwork=True),
        "is not a field here",
    ),
    "patched-mount": (
        lambda j: _patched_pod(j).update(volumes=_patched_pod(j)["volumes"][1:]),
        "mounts the volume 'shm'",
    ),
}


@pytest.mark.parametrize("name", TRAIN_MISTAKES)
def test_a_mistake_in_a_train_job_is_found(name):
    change, words = TRAIN_MISTAKES[name]
    documents = list(yaml.load_all(example("trainjob.yaml"), Loader=yaml.CSafeLoader))
    change(documents[-1])
    found = errors(write_documents(documents))
    assert any(words in text for text in found), found
