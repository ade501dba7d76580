# SPDX-License-Identifier: Apache-2.0
"""The fields of a pod, of core/v1 as of Kubernetes 1.34: names, types, which must be there.

Notation: `structure.py`. Known fields only; deprecated volume kinds included, since the API server
still takes them.
"""

from typing import Any

_LABELS = {"*": "str"}
_SECRET_REF = {"name": "str"}

METADATA: dict[str, Any] = {
    "name": "str",
    "generateName": "str",
    "namespace": "str",
    "labels": _LABELS,
    "annotations": {"*": "str"},
    "finalizers": ["str"],
    "ownerReferences": ["any"],
}
TEMPLATE_METADATA: dict[str, Any] = METADATA

_SELECTOR = {
    "matchLabels": _LABELS,
    "matchExpressions": [
        {
            "key!": "str",
            "operator!": ("In", "NotIn", "Exists", "DoesNotExist"),
            "values": ["str"],
        }
    ],
}
_NODE_EXPRESSIONS = [
    {
        "key!": "str",
        "operator!": ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
        "values": ["str"],
    }
]
_NODE_TERM = {"matchExpressions": _NODE_EXPRESSIONS, "matchFields": _NODE_EXPRESSIONS}
_POD_TERM = {
    "labelSelector": _SELECTOR,
    "matchLabelKeys": ["str"],
    "mismatchLabelKeys": ["str"],
    "namespaceSelector": _SELECTOR,
    "namespaces": ["str"],
    "topologyKey!": "str",
}
_POD_AFFINITY = {
    "requiredDuringSchedulingIgnoredDuringExecution": [_POD_TERM],
    "preferredDuringSchedulingIgnoredDuringExecution": [
        {"weight!": "int>=1", "podAffinityTerm!": _POD_TERM}
    ],
}
AFFINITY: dict[str, Any] = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms!": [_NODE_TERM]},
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight!": "int>=1", "preference!": _NODE_TERM}
        ],
    },
    "podAffinity": _POD_AFFINITY,
    "podAntiAffinity": _POD_AFFINITY,
}

_FIELD_REF = {"apiVersion": "str", "fieldPath!": "str"}
_RESOURCE_REF = {"containerName": "str", "resource!": "str", "divisor": "quantity"}
_KEY_REF = {"name": "str", "key!": "str", "optional": "bool"}
ENV: list[Any] = [
    {
        "name!": "str",
        "value": "str",
        "valueFrom": {
            "fieldRef": _FIELD_REF,
            "resourceFieldRef": _RESOURCE_REF,
            "configMapKeyRef": _KEY_REF,
            "secretKeyRef": _KEY_REF,
            "fileKeyRef": {
                "key!": "str",
                "path!": "str",
                "volumeName!": "str",
                "optional": "bool",
            },
        },
    }
]
_ENV_FROM = [
    {
        "prefix": "str",
        "configMapRef": {"name": "str", "optional": "bool"},
        "secretRef": {"name": "str", "optional": "bool"},
    }
]
RESOURCES: dict[str, Any] = {
    "limits": {"*": "quantity"},
    "requests": {"*": "quantity"},
    "claims": [{"name!": "str", "request": "str"}],
}
_HTTP_GET = {
    "host": "str",
    "httpHeaders": [{"name!": "str", "value!": "str"}],
    "path": "str",
    "port!": "int or str",
    "scheme": ("HTTP", "HTTPS"),
}
_TCP = {"host": "str", "port!": "int or str"}
_EXEC = {"command": ["str"]}
_PROBE = {
    "exec": _EXEC,
    "httpGet": _HTTP_GET,
    "tcpSocket": _TCP,
    "grpc": {"port!": "int", "service": "str"},
    "initialDelaySeconds": "int",
    "periodSeconds": "int",
    "timeoutSeconds": "int",
    "successThreshold": "int",
    "failureThreshold": "int",
    "terminationGracePeriodSeconds": "int",
}
_HOOK = {"exec": _EXEC, "httpGet": _HTTP_GET, "tcpSocket": _TCP, "sleep": {"seconds!": "int"}}
_SE_LINUX = {"level": "str", "role": "str", "type": "str", "user": "str"}
_PROFILE = {"type!": ("RuntimeDefault", "Localhost", "Unconfined"), "localhostProfile": "str"}
_WINDOWS = {
    "gmsaCredentialSpec": "str",
    "gmsaCredentialSpecName": "str",
    "hostProcess": "bool",
    "runAsUserName": "str",
}
_RUN_AS = {
    "runAsUser": "int",
    "runAsGroup": "int",
    "runAsNonRoot": "bool",
    "seLinuxOptions": _SE_LINUX,
    "seccompProfile": _PROFILE,
    "appArmorProfile": _PROFILE,
    "windowsOptions": _WINDOWS,
}
SECURITY_CONTEXT: dict[str, Any] = {
    **_RUN_AS,
    "capabilities": {"add": ["str"], "drop": ["str"]},
    "privileged": "bool",
    "allowPrivilegeEscalation": "bool",
    "readOnlyRootFilesystem": "bool",
    "procMount": "str",
}
POD_SECURITY_CONTEXT: dict[str, Any] = {
    **_RUN_AS,
    "fsGroup": "int",
    "fsGroupChangePolicy": ("OnRootMismatch", "Always"),
    "supplementalGroups": ["int"],
    "supplementalGroupsPolicy": ("Merge", "Strict"),
    "seLinuxChangePolicy": ("MountOption", "Recursive"),
    "sysctls": [{"name!": "str", "value!": "str"}],
}
VOLUME_MOUNTS: list[Any] = [
    {
        "name!": "str",
        "mountPath!": "str",
        "subPath": "str",
        "subPathExpr": "str",
        "readOnly": "bool",
        "recursiveReadOnly": "str",
        "mountPropagation": ("None", "HostToContainer", "Bidirectional"),
    }
]
CONTAINER: dict[str, Any] = {
    "name!": "str",
    "image": "str",
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    "command": ["str"],
    "args": ["str"],
    "workingDir": "str",
    "env": ENV,
    "envFrom": _ENV_FROM,
    "ports": [
        {
            "containerPort!": "int>=1",
            "hostIP": "str",
            "hostPort": "int",
            "name": "str",
            "protocol": ("TCP", "UDP", "SCTP"),
        }
    ],
    "resources": RESOURCES,
    "resizePolicy": [{"resourceName!": "str", "restartPolicy!": "str"}],
    "restartPolicy": "str",
    "restartPolicyRules": ["any"],
    "volumeMounts": VOLUME_MOUNTS,
    "volumeDevices": [{"name!": "str", "devicePath!": "str"}],
    "securityContext": SECURITY_CONTEXT,
    "livenessProbe": _PROBE,
    "readinessProbe": _PROBE,
    "startupProbe": _PROBE,
    "lifecycle": {"postStart": _HOOK, "preStop": _HOOK, "stopSignal": "str"},
    "terminationMessagePath": "str",
    "terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    "stdin": "bool",
    "stdinOnce": "bool",
    "tty": "bool",
}

_ITEMS = [{"key!": "str", "path!": "str", "mode": "int"}]
_DOWNWARD = [
    {
        "path!": "str",
        "fieldRef": _FIELD_REF,
        "resourceFieldRef": _RESOURCE_REF,
        "mode": "int",
    }
]
CLAIM_SPEC: dict[str, Any] = {
    "accessModes": [("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")],
    "resources": {"limits": {"*": "quantity"}, "requests": {"*": "quantity"}},
    "storageClassName": "str",
    "selector": _SELECTOR,
    "volumeName": "str",
    "volumeMode": ("Filesystem", "Block"),
    "volumeAttributesClassName": "str",
    "dataSource": {"apiGroup": "str", "kind!": "str", "name!": "str"},
    "dataSourceRef": {"apiGroup": "str", "kind!": "str", "name!": "str", "namespace": "str"},
}
_OTHER_SOURCES = """
awsElasticBlockStore azureDisk azureFile cinder fc flexVolume flocker gcePersistentDisk gitRepo
glusterfs iscsi photonPersistentDisk portworxVolume quobyte rbd scaleIO storageos vsphereVolume
"""
VOLUME_SOURCES: dict[str, Any] = {
    "emptyDir": {"medium": "str", "sizeLimit": "quantity"},
    "persistentVolumeClaim": {"claimName!": "str", "readOnly": "bool"},
    "configMap": {"name": "str", "items": _ITEMS, "defaultMode": "int", "optional": "bool"},
    "secret": {"secretName": "str", "items": _ITEMS, "defaultMode": "int", "optional": "bool"},
    "hostPath": {
        "path!": "str",
        "type": (
            "",
            "DirectoryOrCreate",
            "Directory",
            "FileOrCreate",
            "File",
            "Socket",
            "CharDevice",
            "BlockDevice",
        ),
    },
    "nfs": {"server!": "str", "path!": "str", "readOnly": "bool"},
    "csi": {
        "driver!": "str",
        "fsType": "str",
        "nodePublishSecretRef": _SECRET_REF,
        "readOnly": "bool",
        "volumeAttributes": {"*": "str"},
    },
    "ephemeral": {"volumeClaimTemplate": {"metadata": METADATA, "spec!": CLAIM_SPEC}},
    "image": {"reference": "str", "pullPolicy": ("Always", "IfNotPresent", "Never")},
    "downwardAPI": {"items": _DOWNWARD, "defaultMode": "int"},
    "projected": {
        "defaultMode": "int",
        "sources": [
            {
                "configMap": {"name": "str", "items": _ITEMS, "optional": "bool"},
                "secret": {"name": "str", "items": _ITEMS, "optional": "bool"},
                "downwardAPI": {"items": _DOWNWARD},
                "serviceAccountToken": {
                    "path!": "str",
                    "audience": "str",
                    "expirationSeconds": "int",
                },
                "clusterTrustBundle": "any",
                "podCertificate": "any",
            }
        ],
    },
    "cephfs": {
        "monitors!": ["str"],
        "path": "str",
        "readOnly": "bool",
        "secretFile": "str",
        "secretRef": _SECRET_REF,
        "user": "str",
    },
    **dict.fromkeys(_OTHER_SOURCES.split(), "any"),
}
VOLUME: dict[str, Any] = {"name!": "str", **VOLUME_SOURCES}
TOLERATION: dict[str, Any] = {
    "key": "str",
    "operator": ("Exists", "Equal", "Lt", "Gt"),
    "value": "str",
    "effect": ("", "NoSchedule", "PreferNoSchedule", "NoExecute"),
    "tolerationSeconds": "int",
}
POD_SPEC: dict[str, Any] = {
    "containers!": [CONTAINER],
    "initContainers": [CONTAINER],
    "ephemeralContainers": ["any"],
    "volumes": [VOLUME],
    "restartPolicy": ("Always", "OnFailure", "Never"),
    "terminationGracePeriodSeconds": "int>=0",
    "activeDeadlineSeconds": "int>=1",
    "nodeSelector": _LABELS,
    "nodeName": "str",
    "affinity": AFFINITY,
    "tolerations": [TOLERATION],
    "topologySpreadConstraints": [
        {
            "labelSelector": _SELECTOR,
            "matchLabelKeys": ["str"],
            "maxSkew!": "int>=1",
            "minDomains": "int",
            "nodeAffinityPolicy": "str",
            "nodeTaintsPolicy": "str",
            "topologyKey!": "str",
            "whenUnsatisfiable!": ("DoNotSchedule", "ScheduleAnyway"),
        }
    ],
    "hostNetwork": "bool",
    "hostPID": "bool",
    "hostIPC": "bool",
    "hostUsers": "bool",
    "hostname": "str",
    "hostnameOverride": "str",
    "subdomain": "str",
    "setHostnameAsFQDN": "bool",
    "hostAliases": [{"ip!": "str", "hostnames": ["str"]}],
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "dnsConfig": {
        "nameservers": ["str"],
        "searches": ["str"],
        "options": [{"name": "str", "value": "str"}],
    },
    "securityContext": POD_SECURITY_CONTEXT,
    "serviceAccountName": "str",
    "serviceAccount": "str",
    "automountServiceAccountToken": "bool",
    "imagePullSecrets": [_SECRET_REF],
    "schedulerName": "str",
    "schedulingGates": [{"name!": "str"}],
    "schedulingGroup": "any",
    "priorityClassName": "str",
    "priority": "int",
    "preemptionPolicy": ("PreemptLowerPriority", "Never"),
    "runtimeClassName": "str",
    "overhead": {"*": "quantity"},
    "enableServiceLinks": "bool",
    "shareProcessNamespace": "bool",
    "readinessGates": [{"conditionType!": "str"}],
    "resourceClaims": [
        {"name!": "str", "resourceClaimName": "str", "resourceClaimTemplateName": "str"}
    ],
    "resources": RESOURCES,
    "os": {"name!": "str"},
}
POD_TEMPLATE: dict[str, Any] = {"metadata": TEMPLATE_METADATA, "spec": POD_SPEC}
