# SPDX-License-Identifier: Apache-2.0
"""What a family's table is made of, and how it becomes the list of all tensors of a model.

A rule pairs names: `{n}` stands for their layer, `{e}` for an expert. One table serves both
directions, and every tensor of either side must be named by exactly one rule.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from models.hf_mapping.shapes import SAME, Shape
from models.pattern import Pattern


@dataclass(frozen=True)
class Rule:
    """Which tensors of a checkpoint are which tensors of a model folder."""

    ours: tuple[str, ...]
    """Below the layer's prefix (or whole names, for what is in no layer)."""
    theirs: tuple[str, ...]
    """Below their layer's prefix."""
    shape: Shape = SAME
    experts: Literal["none", "split", "stacked"] = "none"
    """split: ours is stacked over experts, theirs is one tensor each (`{e}`). stacked: both are."""
    copy: bool = False
    """Theirs repeats a tensor that another rule makes: compared on import, written on export."""


def rule(ours: str | tuple[str, ...], theirs: str | tuple[str, ...], *args: Any, **kw: Any) -> Rule:
    """A Rule, with single names allowed."""

    def names(given: str | tuple[str, ...]) -> tuple[str, ...]:
        return (given,) if isinstance(given, str) else given

    return Rule(names(ours), names(theirs), *args, **kw)


@dataclass(frozen=True)
class Piece:
    """A tensor, or one entry of its first axis."""

    name: str
    index: int | None = None

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"


@dataclass(frozen=True)
class Link:
    """The smallest unit of a conversion: these pieces become those."""

    ours: tuple[Piece, ...]
    theirs: tuple[Piece, ...]
    shape: Shape
    copy: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of model folder: names, shapes, configuration."""

    name: str
    """`model_type` of its config.json."""
    architecture: str
    """The class that transformers builds."""
    layer: str = "model.layers.{n}."
    """Prefix of a layer's tensors."""
    symbols_a_layer: int = 2
    """Pattern symbols in one of their layers: attention and feed-forward, or each by itself."""
    top: tuple[Rule, ...] = ()
    """Embedding, final norm, head."""
    layers: Mapping[str, tuple[Rule, ...]] = field(default_factory=dict)
    """For each pattern symbol its rules."""
    mtp_layer: str = ""
    """Prefix of prediction layers: `{m}` counts depths after the last layer, `{k}` layers."""
    mtp_first: tuple[Rule, ...] = ()
    """Of a prediction depth, found at its first layer."""
    mtp_last: tuple[Rule, ...] = ()
    """Of a prediction depth, found at its last layer."""
    stores_tied_head: bool = False
    """Whether a tied head is on disk beside the embedding: transformers does not tie the two."""
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)
    """Tensors of old folders that hold no weights."""
    read: Callable[[dict[str, Any]], dict[str, Any]]
    """config.json -> the `model` section; ConfigError for what cannot be represented."""
    write: Callable[[Any, Any], dict[str, Any]]
    """(model section, TransformerConfig) -> config.json without vocabulary, dtype and names."""


def links(
    family: Family, pattern: Pattern, experts: int, ours: Collection[str]
) -> tuple[list[Link], list[str]]:
    """All links of a model, and the tensors of `ours` (names) that no rule makes.

    A rule counts where all of its names are among `ours`, so that biases and the like need no
    condition of their own.
    """
    found: list[Link] = []
    for rules, (our_prefix, their_prefix) in _places(family, pattern):
        for rule in rules:
            prefix = "" if rule.copy else our_prefix  # a copy's own names are whole ones
            if all(prefix + name in ours for name in rule.ours):
                found += _expand(rule, prefix, their_prefix, experts)
    made = {piece.name for link in found if not link.copy for piece in link.ours}
    return found, sorted(set(ours) - made)


def _places(family: Family, pattern: Pattern) -> Iterator[tuple[tuple[Rule, ...], tuple[str, str]]]:
    """(rules, (our prefix, their prefix)) in the order of the model."""
    yield family.top, ("", "")
    for position, symbol in enumerate(pattern.layers):
        theirs = family.layer.format(n=position // family.symbols_a_layer)
        yield family.layers.get(symbol, ()), (f"decoder.layers.{position}.", theirs)
    layers = -(-len(pattern.layers) // family.symbols_a_layer)
    length = len(pattern.mtp)
    for depth in range(pattern.mtp_depths):
        ours = f"mtp.layers.{depth}."

        def theirs_at(index: int, depth: int = depth) -> str:
            return family.mtp_layer.format(m=layers + depth, k=depth * length + index)

        yield family.mtp_first, (ours, theirs_at(0))
        for index, symbol in enumerate(pattern.mtp):
            inner = f"{ours}mtp_model_layer.layers.{index}."
            yield family.layers.get(symbol, ()), (inner, theirs_at(index))
        yield family.mtp_last, (ours, theirs_at(length - 1))


def _expand(rule: Rule, ours: str, theirs: str, experts: int) -> Iterable[Link]:
    if rule.experts == "none":
        yield Link(
            tuple(Piece(ours + name) for name in rule.ours),
            tuple(Piece(theirs + name) for name in rule.theirs),
            rule.shape,
            rule.copy,
        )
        return
    for expert in range(experts):
        index = expert if rule.experts == "stacked" else None
        yield Link(
            tuple(Piece(ours + name, expert) for name in rule.ours),
            tuple(Piece(theirs + name.replace("{e}", str(expert)), index) for name in rule.theirs),
            rule.shape,
            rule.copy,
        )


def made_twice(pieces: Iterable[Piece]) -> list[str]:
    """Pieces that occur more than once."""
    return [str(piece) for piece, count in Counter(pieces).items() if count > 1]
