# SPDX-License-Identifier: Apache-2.0
"""What the documents of one file must agree on: names, namespaces, and volumes of many nodes."""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tools.launch.documents import Document, Path
from tools.launch.findings import Findings, at
from tools.launch.job_facts import JOB_KINDS

# What a volume names, by the key of its source.
_NAMED = {
    "configMap": ("ConfigMap", "name"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}


@dataclass(frozen=True)
class _Use:
    """A volume of a job in this file that names a document."""

    document: Document
    path: Path
    kind: str
    name: str
    optional: bool


def check_together(documents: Sequence[Document], findings: Sequence[Findings]) -> None:
    """Rules over several documents of a file; `findings` has one place for each."""
    places = {id(document): found for document, found in zip(documents, findings)}
    named: dict[tuple[str, str], Document] = {}
    seen: set[tuple[str, str, str]] = set()
    for document in documents:
        value = document.value
        kind, name = at(value, "kind", kind=str), at(value, "metadata", "name", kind=str)
        if name and (kind, name, _namespace(value)) in seen:
            places[id(document)].error(
                ("metadata", "name"),
                f"{kind} {name!r} stands twice in the file, and the second replaces the first; "
                "rename or remove one",
            )
        seen.add((kind, name, _namespace(value)))
        if name:
            named[kind, name] = document
    uses = [use for document in documents for use in _uses(document)]
    for use in uses:
        _check_use(use, named, {u.name for u in uses if u.kind == use.kind}, places)


def _namespace(value: Any) -> str:
    return at(value, "metadata", "namespace", kind=str) or "default"


def _uses(document: Document) -> Iterator[_Use]:
    if at(document.value, "kind", kind=str) in JOB_KINDS:
        yield from _volumes(document, document.value, ())


def _volumes(document: Document, value: Any, path: Path) -> Iterator[_Use]:
    if isinstance(value, dict):
        for key, part in value.items():
            here = (*path, str(key))
            if key == "volumes" and isinstance(part, list):
                for index, volume in enumerate(part):
                    for source, (kind, field) in _NAMED.items():
                        name = at(volume, source, field, kind=str)
                        if name:
                            optional = at(volume, source).get("optional") is True
                            yield _Use(document, (*here, index), kind, name, optional)
            else:
                yield from _volumes(document, part, here)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _volumes(document, part, (*path, index))


def _check_use(
    use: _Use,
    named: dict[tuple[str, str], Document],
    used: set[str],
    places: dict[int, Findings],
) -> None:
    found = places[id(use.document)]
    target = named.get((use.kind, use.name))
    if target is None:
        unused = [name for kind, name in named if kind == use.kind and name not in used]
        near = difflib.get_close_matches(use.name, unused, n=1, cutoff=0.6)
        if near and not use.optional:
            found.error(
                use.path,
                f"names the {use.kind} {use.name!r}, and nothing uses this file's {near[0]!r}; "
                f"write {near[0]}",
            )
        return
    spaces = _namespace(use.document.value), _namespace(target.value)
    cluster_wide = at(use.document.value, "kind", kind=str) == "ClusterTrainingRuntime"
    if spaces[0] != spaces[1] and not cluster_wide:
        found.error(
            use.path,
            f"the {use.kind} {use.name!r} is in the namespace {spaces[1]} and its pods in "
            f"{spaces[0]}, where they do not see it; write one namespace",
        )
    modes = at(target.value, "spec", "accessModes", kind=list)
    nodes = node_count(use.document.value)
    shared = not modes or {"ReadWriteMany", "ReadOnlyMany"} & {str(mode) for mode in modes}
    if nodes > 1 and not shared:
        places[id(target)].error(
            ("spec", "accessModes"),
            f"{nodes} nodes mount it, and {', '.join(map(str, modes))} allows one, so that the "
            "others' pods never start; write ReadWriteMany",
        )


def node_count(job: Any) -> int:
    """Pods that train together, as far as the manifest says."""
    roles = at(job, "spec", "pytorchReplicaSpecs").values()
    counts = [one.get("replicas", 1) if isinstance(one, dict) else 1 for one in roles]
    counts += [at(job, "spec", "trainer", "numNodes", kind=int)]
    counts += [at(job, "spec", "mlPolicy", "numNodes", kind=int)]
    for one in at(job, "spec", "replicatedJobs", kind=list):
        counts.append(at(one, "template", "spec", "parallelism", kind=int))
    return sum(count for count in counts if isinstance(count, int))
