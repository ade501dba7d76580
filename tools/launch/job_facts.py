# SPDX-License-Identifier: Apache-2.0
"""The fields of the kinds of manifests that start a run, and of what lies beside them in a file.

PyTorchJob is that of Training Operator v1 (branch release-1.9), the trainer's kinds are those of
August 2026, JobSet is v1alpha2. Notation: `structure.py`.
"""

from typing import Any

from tools.launch.pod_facts import (
    AFFINITY,
    CLAIM_SPEC,
    ENV,
    METADATA,
    POD_SECURITY_CONTEXT,
    POD_TEMPLATE,
    RESOURCES,
    SECURITY_CONTEXT,
    TEMPLATE_METADATA,
    TOLERATION,
    VOLUME,
    VOLUME_MOUNTS,
)

_PULL_SECRETS = [{"name": "str"}]
RESTART_POLICIES = ("Always", "OnFailure", "Never", "ExitCode")

_REPLICA = {
    "replicas": "int>=0",
    "restartPolicy": RESTART_POLICIES,
    "template": POD_TEMPLATE,
}
_PYTORCH_SPEC = {
    "nprocPerNode": "str",
    "pytorchReplicaSpecs!": {"*": _REPLICA},
    "runPolicy": {
        "activeDeadlineSeconds": "int>=1",
        "backoffLimit": "int>=0",
        "cleanPodPolicy": ("None", "Running", "All"),
        "managedBy": "str",
        "schedulingPolicy": {
            "minAvailable": "int",
            "minResources": {"*": "quantity"},
            "priorityClass": "str",
            "queue": "str",
            "scheduleTimeoutSeconds": "int",
        },
        "suspend": "bool",
        "ttlSecondsAfterFinished": "int>=0",
    },
    "elasticPolicy": {
        "minReplicas": "int>=1",
        "maxReplicas": "int>=1",
        "maxRestarts": "int>=0",
        "nProcPerNode": "int>=1",
        "rdzvBackend": ("c10d", "etcd", "etcd-v2"),
        "rdzvHost": "str",
        "rdzvPort": "int>=1",
        "rdzvId": "str",
        "rdzvConf": [{"key": "str", "value": "str"}],
        "standalone": "bool",
        "metrics": ["any"],
    },
}

_PATCHED_CONTAINER = {
    "name!": "str",
    "env": ENV,
    "volumeMounts": VOLUME_MOUNTS,
    "securityContext": SECURITY_CONTEXT,
}
_PATCHED_POD = {
    "affinity": AFFINITY,
    "containers": [_PATCHED_CONTAINER],
    "initContainers": [_PATCHED_CONTAINER],
    "imagePullSecrets": _PULL_SECRETS,
    "nodeSelector": {"*": "str"},
    "schedulingGates": [{"name!": "str"}],
    "securityContext": POD_SECURITY_CONTEXT,
    "serviceAccountName": "str",
    "terminationGracePeriodSeconds": "int>=0",
    "tolerations": [TOLERATION],
    "volumes": [VOLUME],
}
_PATCHED_JOBS = [
    {
        "name!": "str",
        "template": {
            "metadata": TEMPLATE_METADATA,
            "spec": {"template": {"metadata": TEMPLATE_METADATA, "spec": _PATCHED_POD}},
        },
    }
]
_INITIALIZER = {"env": ENV, "secretRef": {"name": "str"}, "storageUri": "str"}
_TRAIN_SPEC = {
    "activeDeadlineSeconds": "int>=1",
    "initializer": {"dataset": _INITIALIZER, "model": _INITIALIZER},
    "managedBy": "str",
    "runtimePatches": [
        {
            "manager!": "str",
            "time": "str",
            "trainingRuntimeSpec": {
                "template": {
                    "metadata": TEMPLATE_METADATA,
                    "spec": {"replicatedJobs": _PATCHED_JOBS},
                }
            },
        }
    ],
    "runtimeRef!": {
        "apiGroup": "str",
        "kind": ("ClusterTrainingRuntime", "TrainingRuntime"),
        "name!": "str",
    },
    "suspend": "bool",
    "trainer": {
        "args": ["str"],
        "command": ["str"],
        "env": ENV,
        "image": "str",
        "numNodes": "int>=1",
        "numProcPerNode": "int>=1",
        "resourcesPerNode": RESOURCES,
    },
}

_JOB_SPEC = {
    "activeDeadlineSeconds": "int",
    "backoffLimit": "int>=0",
    "backoffLimitPerIndex": "int>=0",
    "completionMode": ("Indexed", "NonIndexed"),
    "completions": "int>=0",
    "managedBy": "str",
    "manualSelector": "bool",
    "maxFailedIndexes": "int",
    "parallelism": "int>=0",
    "podFailurePolicy": {
        "rules!": [
            {
                "action!": ("FailJob", "FailIndex", "Ignore", "Count"),
                "onExitCodes": {
                    "containerName": "str",
                    "operator!": ("In", "NotIn"),
                    "values!": ["int"],
                },
                "onPodConditions": [{"status": "str", "type!": "str"}],
            }
        ]
    },
    "podReplacementPolicy": ("TerminatingOrFailed", "Failed"),
    "selector": "any",
    "successPolicy": "any",
    "suspend": "bool",
    "template!": POD_TEMPLATE,
    "ttlSecondsAfterFinished": "int>=0",
}
_JOB_SET_SPEC = {
    "coordinator": {"jobIndex": "int", "podIndex": "int", "replicatedJob!": "str"},
    "failurePolicy": {
        "maxRestarts": "int>=0",
        "restartStrategy": ("Recreate", "BlockingRecreate", "InPlaceRestart"),
        "rules": [
            {
                "action!": (
                    "FailJobSet",
                    "RestartJobSet",
                    "RestartJobSetAndIgnoreMaxRestarts",
                    "RestartJob",
                    "RestartJobAndIgnoreMaxRestarts",
                ),
                "name!": "str",
                "onJobFailureMessagePatterns": ["str"],
                "onJobFailureReasons": ["str"],
                "targetReplicatedJobs": ["str"],
            }
        ],
    },
    "managedBy": "str",
    "network": {
        "enableDNSHostnames": "bool",
        "publishNotReadyAddresses": "bool",
        "subdomain": "str",
    },
    "replicatedJobs": [
        {
            "name!": "str",
            "groupName": "str",
            "replicas": "int>=0",
            "dependsOn": [{"name!": "str", "status!": ("Ready", "Complete")}],
            "template!": {"metadata": TEMPLATE_METADATA, "spec": _JOB_SPEC},
        }
    ],
    "startupPolicy": {"startupPolicyOrder!": ("AnyOrder", "InOrder")},
    "successPolicy": {"operator!": ("All", "Any"), "targetReplicatedJobs": ["str"]},
    "suspend": "bool",
    "ttlSecondsAfterFinished": "int>=0",
    "volumeClaimPolicies": ["any"],
}
_RUNTIME_SPEC = {
    "mlPolicy": {
        "numNodes": "int>=1",
        "torch": {"envInjection": {"targets": [{"jobName!": "str", "containerNames!": ["str"]}]}},
        "mpi": {
            "mpiImplementation": ("OpenMPI", ""),
            "numProcPerNode": "int>=1",
            "runLauncherAsNode": "bool",
            "sshAuthMountPath": "str",
        },
        "flux": {"numProcPerNode": "int>=1"},
        "jax": "any",
        "xgboost": "any",
    },
    "podGroupPolicy": {
        "coscheduling": {"scheduleTimeoutSeconds": "int"},
        "volcano": {
            "networkTopology": {"highestTierAllowed": "int", "mode": ("hard", "soft")},
        },
    },
    "template!": {"metadata": TEMPLATE_METADATA, "spec": _JOB_SET_SPEC},
}


def _kind(spec: Any, **more: Any) -> dict[str, Any]:
    return {
        "apiVersion!": "str",
        "kind!": "str",
        "metadata!": METADATA,
        **({"spec!": spec} if spec is not None else {}),
        "status": "any",
        **more,
    }


TRAINER = "trainer.kubeflow.org/v1alpha1"
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "PyTorchJob": ("kubeflow.org/v1", _kind(_PYTORCH_SPEC)),
    "TrainJob": (TRAINER, _kind(_TRAIN_SPEC)),
    "TrainingRuntime": (TRAINER, _kind(_RUNTIME_SPEC)),
    "ClusterTrainingRuntime": (TRAINER, _kind(_RUNTIME_SPEC)),
    "JobSet": ("jobset.x-k8s.io/v1alpha2", _kind(_JOB_SET_SPEC)),
    "ConfigMap": (
        "v1",
        _kind(None, data={"*": "str"}, binaryData={"*": "str"}, immutable="bool"),
    ),
    "PersistentVolumeClaim": ("v1", _kind(CLAIM_SPEC)),
}
JOB_KINDS = ("PyTorchJob", "TrainJob", "TrainingRuntime", "ClusterTrainingRuntime", "JobSet")

MOVED: dict[tuple[str, str], str] = {
    ("TrainJob", "spec.elasticPolicy"): "elasticPolicy is gone from the trainer; set numNodes",
    ("TrainJob", "spec.podTemplateOverrides"): "it was replaced; use spec.runtimePatches",
    ("TrainJob", "spec.podSpecOverrides"): "it was replaced; use spec.runtimePatches",
    (
        "TrainJob",
        "spec.modelConfig",
    ): "it was replaced; use spec.initializer.model",
    (
        "TrainJob",
        "spec.datasetConfig",
    ): "it was replaced; use spec.initializer.dataset",
    ("PyTorchJob", "spec.cleanPodPolicy"): "it belongs to spec.runPolicy",
    ("PyTorchJob", "spec.backoffLimit"): "it belongs to spec.runPolicy",
    ("PyTorchJob", "spec.activeDeadlineSeconds"): "it belongs to spec.runPolicy",
    ("PyTorchJob", "spec.ttlSecondsAfterFinished"): "it belongs to spec.runPolicy",
    ("PyTorchJob", "spec.elasticPolicy.nprocPerNode"): "use spec.nprocPerNode",
    **{
        (kind, "spec.mlPolicy.torch.numProcPerNode"): (
            "it is gone from mlPolicy.torch; write `torch: {}` and set numProcPerNode in the "
            "TrainJob"
        )
        for kind in ("TrainingRuntime", "ClusterTrainingRuntime")
    },
}
"""What fields of earlier versions became."""
