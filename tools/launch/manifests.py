# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests of a job: PyTorchJob, TrainJob, and the ConfigMap and claim beside them."""

from typing import Any

from tools.launch.documents import write_documents
from tools.launch.job import Job
from tools.launch.job_facts import TRAINER

Manifest = dict[str, Any]

# A save that SIGTERM asks for must end before this; torchrun itself allows its workers 30 s.
_GRACE_SECONDS = 60


def render_pytorch_job(job: Job) -> str:
    """The YAML text of a PyTorchJob and what it needs."""
    specs: Manifest = {"Master": _replica(job, 1)}
    if job.options.nodes > 1:
        specs["Worker"] = _replica(job, job.options.nodes - 1)
    manifest = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": _metadata(job, job.name),
        "spec": {
            "nprocPerNode": str(job.processes),
            "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": job.options.restarts},
            "pytorchReplicaSpecs": specs,
        },
    }
    return _header(job, "pytorchjob") + write_documents([*_needs(job), manifest])


def render_train_job(job: Job) -> str:
    """The YAML text of a TrainJob and what it needs."""
    resources = _resources(job)
    trainer: Manifest = {
        "numNodes": job.options.nodes,
        **({"numProcPerNode": job.processes} if job.cpu else {}),
        "image": job.options.image,
        "command": ["torchrun"],
        "args": job.arguments(),
        **({"env": _variables()} if _variables() else {}),
        "resourcesPerNode": resources,
    }
    pod: Manifest = {
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "volumes": _volumes(job),
        "containers": [
            {"name": "node", **_security(job), "volumeMounts": _mounts(job)},
        ],
    }
    inner = {"metadata": {"annotations": _annotations()}, "spec": pod}
    manifest = {
        "apiVersion": TRAINER,
        "kind": "TrainJob",
        "metadata": _metadata(job, job.name),
        "spec": {
            "runtimeRef": {"name": job.options.runtime},
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": "nibble.dev/launch",
                    "trainingRuntimeSpec": {
                        "template": {
                            "spec": {
                                "replicatedJobs": [
                                    {"name": "node", "template": {"spec": {"template": inner}}}
                                ]
                            }
                        }
                    },
                }
            ],
        },
    }
    return _header(job, "trainjob") + write_documents([*_needs(job), manifest])


def _header(job: Job, kind: str) -> str:
    world = job.options.nodes * job.processes
    lines = [
        f"# {job.options.nodes} nodes x {job.processes} processes = {world} ranks. Written by",
        f"# python -m tools.launch render {kind} {job.config_path} ...",
        "# Check it: python -m tools.launch check FILE; start it: kubectl apply -f FILE",
    ]
    if job.data_mount:
        lines.append(
            f"# The claim {job.options.data_claim or 'data'} holds what the run file reads below "
            f"{job.data_mount}."
        )
    return "\n".join(lines) + "\n"


def _needs(job: Job) -> list[Manifest]:
    config_map: Manifest = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, f"{job.name}-config"),
        "data": {"run.yaml": job.config_text},
    }
    if job.options.runs_claim:
        return [config_map]
    claim: Manifest = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": _metadata(job, job.runs_claim),
        "spec": {
            "accessModes": ["ReadWriteMany"],
            **(
                {"storageClassName": job.options.storage_class} if job.options.storage_class else {}
            ),
            "resources": {"requests": {"storage": job.options.storage}},
        },
    }
    return [config_map, claim]


def _metadata(job: Job, name: str) -> Manifest:
    space = {"namespace": job.options.namespace} if job.options.namespace else {}
    return {"name": name, **space}


def _replica(job: Job, replicas: int) -> Manifest:
    container: Manifest = {
        "name": "pytorch",
        "image": job.options.image,
        "command": ["torchrun"],
        "args": job.arguments(),
    }
    if _variables():
        container["env"] = _variables()
    if job.options.secret:
        container["envFrom"] = [{"secretRef": {"name": job.options.secret}}]
    container |= {"resources": _resources(job), **_security(job), "volumeMounts": _mounts(job)}
    pod: Manifest = {"terminationGracePeriodSeconds": _GRACE_SECONDS}
    if job.options.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    pod |= {"containers": [container], "volumes": _volumes(job)}
    return {
        "replicas": replicas,
        "restartPolicy": "OnFailure",
        "template": {"metadata": {"annotations": _annotations()}, "spec": pod},
    }


def _annotations() -> dict[str, str]:
    return {"sidecar.istio.io/inject": "false"}


def _variables() -> list[Manifest]:
    """None: whatever the program must know stands in its run file."""
    return []


def _resources(job: Job) -> Manifest:
    options, limits = job.options, {}
    if options.gpus_per_node:
        limits["nvidia.com/gpu"] = options.gpus_per_node
    if options.rdma:
        name, _, count = options.rdma.partition("=")
        limits[name] = int(count or 1)
    own = {"cpu": options.cpus, "memory": options.memory}
    requests = {**{k: v for k, v in own.items() if v}, **limits}
    if options.memory:
        limits["memory"] = options.memory  # type: ignore[assignment]
    return {name: part for name, part in (("limits", limits), ("requests", requests)) if part}


def _security(job: Job) -> Manifest:
    return {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if job.options.rdma else {}


def _volumes(job: Job) -> list[Manifest]:
    claim = job.options.data_claim or "data"
    found: list[Manifest] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.options.shm_size}},
        {"name": "config", "configMap": {"name": f"{job.name}-config"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": job.runs_claim}},
    ]
    if job.data_mount:
        found.append({"name": "data", "persistentVolumeClaim": {"claimName": claim}})
    return found


def _mounts(job: Job) -> list[Manifest]:
    found: list[Manifest] = [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "config", "mountPath": job.options.config_folder},
        {"name": "runs", "mountPath": job.runs_mount},
    ]
    if job.data_mount:
        found.append({"name": "data", "mountPath": job.data_mount, "readOnly": True})
    return found
