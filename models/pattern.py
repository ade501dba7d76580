# SPDX-License-Identifier: Apache-2.0
"""The pattern string that describes an architecture, read and checked without building anything.

One symbol is one layer: `M` Mamba-2, `*` attention, `+` multi-latent attention, `-` MLP, `E`
mixture of experts. `|` cuts pipeline stages; after `/` follows what each multi-token prediction
depth is made of, once a depth: `M-M*E/*E/*E` predicts two more tokens.
"""

from dataclasses import dataclass

from fused_ops.errors import ConfigError

SYMBOLS = {
    "M": "Mamba-2",
    "*": "attention",
    "+": "multi-latent attention",
    "-": "MLP",
    "E": "mixture of experts",
}
# Symbols that megatron-core knows and this project builds no layer for.
NOT_BUILT = {"G": "gated delta net", "D": "sparse attention"}


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern."""

    stages: tuple[str, ...]
    """The main layers as `|` cuts them; one entry when there is no cut."""
    mtp: str
    """Layers of one multi-token prediction depth; empty without prediction."""
    mtp_depths: int
    """How many more tokens are predicted."""

    @property
    def layers(self) -> str:
        """The main layers, one symbol a position."""
        return "".join(self.stages)

    def has(self, symbol: str) -> bool:
        """Whether a main or prediction layer is of this kind."""
        return symbol in self.layers or symbol in self.mtp


def parse_pattern(text: str) -> Pattern:
    """Read a pattern.

    Raises:
        ConfigError: every problem of the string at once.
    """
    pattern, problems = _parse(text)
    if problems:
        raise ConfigError(problems)
    return pattern


def pattern_problems(text: str) -> list[str]:
    """What is wrong with the string by itself; empty when nothing is."""
    return _parse(text)[1]


def stage_problems(pattern: Pattern, pipeline: int, virtual: int) -> list[str]:
    """What keeps the pattern from being laid over pipeline x virtual stages."""
    stages, wanted, layers = len(pattern.stages), pipeline * virtual, len(pattern.layers)
    if stages == 1:
        if layers < wanted:
            return [
                f"model.pattern has {layers} layers, too few for {wanted} pipeline stages "
                f"(pipeline_model_parallel_size {pipeline} x "
                f"virtual_pipeline_model_parallel_size {virtual}), which need one each; use at "
                f"most {layers} stages, or {wanted} layers"
            ]
        if layers % wanted:
            low, high = layers - layers % wanted, layers + -layers % wanted
            return [
                f"model.pattern has {layers} layers, which {wanted} pipeline stages do not divide;"
                f" place {wanted - 1} '|' in it where the stages shall be cut, such as "
                f"{cut_evenly(pattern.layers, wanted)}; {low} or {high} layers could be cut equally"
            ]
        return []
    if stages != wanted:
        return [
            f"model.pattern is cut into {stages} stages by '|', but pipeline_model_parallel_size "
            f"{pipeline} x virtual_pipeline_model_parallel_size {virtual} is {wanted}; use "
            f"{wanted - 1} '|'" + (", or none for equal stages" if layers % wanted == 0 else "")
        ]
    return []


def cut_evenly(layers: str, stages: int) -> str:
    """The layers with a `|` between stages whose lengths differ by one at most; earlier ones are
    longer. There are as many layers as stages, or more."""
    size, longer = divmod(len(layers), stages)
    cuts, start = [], 0
    for stage in range(stages):
        end = start + size + (stage < longer)
        cuts.append(layers[start:end])
        start = end
    return "|".join(cuts)


def staged_pattern(pattern: Pattern, pipeline: int = 1, virtual: int = 1) -> str:
    """The string that megatron-core is given: cut once for each stage, equally unless cut before.

    Raises:
        ConfigError: the stages do not fit (`stage_problems`).
    """
    problems = stage_problems(pattern, pipeline, virtual)
    if problems:
        raise ConfigError(problems)
    stages = pattern.stages
    if len(stages) == 1:
        size = len(pattern.layers) // (pipeline * virtual)
        stages = tuple(pattern.layers[i : i + size] for i in range(0, len(pattern.layers), size))
    return "/".join(["|".join(stages)] + [pattern.mtp] * pattern.mtp_depths)


def _parse(text: str) -> tuple[Pattern, list[str]]:
    main, *mtp = text.split("/")
    stages = main.split("|")
    problems = []
    for symbol in dict.fromkeys("".join([*stages, *mtp]).replace("|", "")):
        if symbol in NOT_BUILT:
            problems.append(
                f"model.pattern: '{symbol}' ({NOT_BUILT[symbol]}) is a layer of megatron-core that "
                f"is not built here; use one of {_legend()}"
            )
        elif symbol not in SYMBOLS:
            problems.append(
                f"model.pattern: {symbol!r} is not a layer; use {_legend()}, '|' between pipeline "
                "stages and '/' before multi-token prediction"
            )
    if not main.strip("|"):
        problems.append(f"model.pattern needs at least one layer before '/', got {text!r}")
    elif "" in stages:
        problems.append(
            f"model.pattern: a pipeline stage without layers in {main!r}; move a '|' so that every "
            "stage has one"
        )
    if mtp and (not all(mtp) or len(set(mtp)) > 1 or "|" in "".join(mtp)):
        problems.append(
            f"model.pattern: after '/' comes the same layers for each predicted token, without "
            f"'|', such as '{main}/*-/*-'; got {'/'.join(mtp)!r}"
        )
    if "*" in text and "+" in text:
        problems.append(
            "model.pattern: '*' and '+' do not mix, megatron-core has one kind of attention a "
            "model; choose one"
        )
    return Pattern(tuple(stages), mtp[0] if mtp else "", len(mtp)), problems


def _legend() -> str:
    return ", ".join(f"'{symbol}' {name}" for symbol, name in SYMBOLS.items())
