# SPDX-License-Identifier: Apache-2.0
"""YAML documents with the line of every value, read as a Kubernetes client reads them."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from fused_ops.errors import ConfigError

Path = tuple[str | int, ...]

# Aliases of aliases can make billions of values of a few lines; manifests have hundreds.
_MOST_VALUES = 100_000


@dataclass
class Document:
    """One YAML document.

    Attributes:
        value: plain values.
        lines: line, counted from 1, of what stands at each path.
        repeated: (path, line) of keys that a mapping holds twice; the last one won.
    """

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    repeated: list[tuple[Path, int]] = field(default_factory=list)

    def line(self, path: Path) -> int:
        """The line of `path`, or of the nearest thing around it."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML 1.1 as Kubernetes clients have it: `yes` is a boolean, a date is a string."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own way to change a loader)
        first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith(":timestamp")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class _Dumper(yaml.SafeDumper):
    """Block style, lists indented below their key, no anchors, texts of many lines as they are."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        """Write everything out: readers of a manifest should not look for anchors."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    if "\n" in value:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|")
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", value, style='"' if _looks_otherwise(value) else None
    )


def _looks_otherwise(value: str) -> bool:
    """Whether some reader of YAML, of this version or that, would take a plain text for no text."""
    try:
        float(value.replace("_", ""))
    except ValueError:
        return value.lower() in (
            "",
            "~",
            "null",
            "true",
            "false",
            "yes",
            "no",
            "on",
            "off",
            "y",
            "n",
        )
    return True


_Dumper.add_representer(str, _text)


def read_documents(text: str, where: str) -> list[Document]:
    """The documents of a YAML text; empty ones are left out.

    Raises:
        ConfigError: it is not YAML.
    """
    try:
        loader = _Loader(text)
        found = []
        while loader.check_node():
            node = loader.get_node()
            document = Document(None)
            _note(node, (), document, frozenset())
            document.value = loader.construct_document(node)
            if document.value is not None:
                found.append(document)
        return found
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ConfigError(f"{where} must be YAML: {problem}{place}") from None


def write_documents(documents: list[Mapping[str, Any]]) -> str:
    """YAML text of documents, in block style."""
    parts = [
        yaml.dump(dict(part), Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
        for part in documents
    ]
    return "---\n".join(parts)


def _note(node: Any, path: Path, document: Document, above: frozenset[int]) -> None:
    """Notes the lines of a node and of all below it; `above` are the nodes that hold it."""
    if id(node) in above:
        raise _refused("an alias stands for what holds it; write it out", node)
    if len(document.lines) > _MOST_VALUES:
        raise _refused(f"its aliases make more than {_MOST_VALUES} values; write them out", node)
    above |= {id(node)}
    document.lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _note(item, (*path, index), document, above)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[Hashable] = set()
    for key_node, value in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise _refused(
                "a key is a list or a mapping; a template ({{ ... }}) is checked once it is "
                "rendered: helm template ... > FILE",
                key_node,
            )
        key = key_node.value
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        if key in seen:
            document.repeated.append(((*path, key), key_node.start_mark.line + 1))
        seen.add(key)
        document.lines[(*path, key)] = key_node.start_mark.line + 1
        _note(value, (*path, key), document, above)


def _refused(problem: str, node: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
