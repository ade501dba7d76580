# SPDX-License-Identifier: Apache-2.0
"""Recipes: what each of the six operands of a linear layer's three GEMMs is, as data.

    fprop   Y  = X  . W^T      contraction over the input features
    dgrad   dX = dY . W        contraction over the output features
    wgrad   dW = dY^T . X      contraction over the tokens

A recipe says how an operand is quantized along the contraction axis of its GEMM. Which layer gets
which recipe is decided elsewhere. `RECIPES` holds the named ones; `recipe_from_dict` reads a new
one, operand by operand.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from fused_ops.errors import ConfigError
from fused_ops.formats import HIGH_PRECISION, OperandSpec
from fused_ops.keys import GEMMS, OPERANDS

DECODES = ("exact", "fp8")
OPERAND_FIELDS = tuple(name.replace(".", "_") for name in OPERANDS)
"""Operands as fields of a recipe and as keys in YAML; the left one of a GEMM comes first."""

_BF16 = OperandSpec()


def bits(spec: OperandSpec) -> int:
    """Bits of one element: the order of precision (a schedule never goes to fewer)."""
    return {"fp32": 32, "e2m1": 4, "e4m3": 8, "e5m2": 8}.get(spec.element or spec.format, 16)


def is_quantized(spec: OperandSpec) -> bool:
    """Whether the operand is made of codes; otherwise it keeps the tensor's own dtype."""
    return not spec.is_high_precision


@dataclass(frozen=True, kw_only=True)
class GemmRecipe:
    """The six operands of a linear layer; a high-precision one keeps the dtype of its tensor."""

    name: str
    fprop_x: OperandSpec = _BF16
    fprop_w: OperandSpec = _BF16
    dgrad_dy: OperandSpec = _BF16
    dgrad_w: OperandSpec = _BF16
    wgrad_dy: OperandSpec = _BF16
    wgrad_x: OperandSpec = _BF16
    decode: str = "exact"
    """How a full-precision NVFP4 block scale reaches the cores: "exact" (code times scale in BF16)
    or "fp8" (the product rounded to E4M3, for FP8 cores); and on which cores FP8 blocks meet."""

    def __post_init__(self) -> None:
        problems = list(_recipe_problems(self))
        if problems:
            raise ConfigError(problems)

    def spec(self, gemm: str, operand: str) -> OperandSpec:
        """The operand ("x", "w" or "dy") of a GEMM ("fprop", "dgrad" or "wgrad")."""
        name = f"{gemm}_{operand}"
        assert name in OPERAND_FIELDS, f"no operand {operand!r} in GEMM {gemm!r}"
        return getattr(self, name)

    def specs(self, gemm: str) -> tuple[OperandSpec, OperandSpec]:
        """Both operands of a GEMM, the left one first."""
        left, right = [name for name in OPERAND_FIELDS if name.startswith(gemm)]
        return getattr(self, left), getattr(self, right)

    def gemm_formats(self, gemm: str) -> tuple[str, str]:
        """The formats of both operands of a GEMM, the left one first."""
        left, right = self.specs(gemm)
        return left.format, right.format

    def with_gemm(self, gemm: str, other: "GemmRecipe") -> "GemmRecipe":
        """This recipe with one GEMM as in `other`; an operand that was to be requantized from a
        forward operand which no longer is quantized is taken from the tensor itself."""
        names = [name for name in OPERAND_FIELDS if name.startswith(gemm)]
        assert names, f"no GEMM {gemm!r}"
        changed: dict[str, Any] = {name: getattr(other, name) for name in names}
        for name, forward in _FORWARD_OPERAND.items():
            spec = changed.get(name, getattr(self, name))
            if spec.source == "forward" and not is_quantized(
                changed.get(forward, getattr(self, forward))
            ):
                changed[name] = replace(spec, source="tensor")
        return replace(self, name=f"{self.name}+{gemm}:{other.name}", **changed)


_FORWARD_OPERAND = {"dgrad_w": "fprop_w", "wgrad_x": "fprop_x"}


def _recipe_problems(recipe: GemmRecipe) -> Iterable[str]:
    if recipe.decode not in DECODES:
        yield f"recipe {recipe.name}: decode must be one of {DECODES}, got {recipe.decode!r}" + (
            _nearest(recipe.decode, DECODES)
        )
    for gemm in GEMMS:
        left, right = recipe.specs(gemm)
        if (left.hadamard, left.signs) != (right.hadamard, right.signs):
            yield (
                f"recipe {recipe.name}: both operands of {gemm} must be rotated alike, or the "
                f"rotation does not cancel; got hadamard {left.hadamard} ({left.signs} signs) and "
                f"{right.hadamard} ({right.signs} signs); set both alike"
            )
    for name in OPERAND_FIELDS:
        if getattr(recipe, name).source != "forward":
            continue
        forward = _FORWARD_OPERAND.get(name)
        if forward is None:
            yield (
                f"recipe {recipe.name}: {name} has no forward operand to be requantized from; "
                "source 'forward' is for dgrad_w and wgrad_x: use source 'tensor'"
            )
        elif not is_quantized(getattr(recipe, forward)):
            yield (
                f"recipe {recipe.name}: {name} has source 'forward' but {forward} is "
                f"{getattr(recipe, forward).format}; quantize {forward} or use source 'tensor'"
            )


def _symmetric(name: str, spec: OperandSpec, **changes: OperandSpec) -> GemmRecipe:
    operands: dict[str, Any] = dict.fromkeys(OPERAND_FIELDS, spec)
    return GemmRecipe(name=name, **(operands | changes))


def _nvfp4(**options: Any) -> OperandSpec:
    return OperandSpec(format="nvfp4", **options)


def _high_and_fp8_recipes() -> Iterable[GemmRecipe]:
    for name in HIGH_PRECISION:
        yield _symmetric(name, OperandSpec(format=name))
    for name in ("fp8_tensorwise", "fp8_delayed"):
        # The HYBRID choice of Transformer Engine: gradients need E5M2's range.
        grad = OperandSpec(format=name, element="e5m2")
        yield _symmetric(name, OperandSpec(format=name), dgrad_dy=grad, wgrad_dy=grad)
    tile = OperandSpec(format="fp8_blockwise", block=(128, 128))
    yield _symmetric(
        "fp8_blockwise", OperandSpec(format="fp8_blockwise"), fprop_w=tile, dgrad_w=tile
    )
    raw = OperandSpec(format="fp8_blockwise", scale="fp32")
    raw_tile = replace(tile, scale="fp32")
    yield _symmetric("fp8_blockwise_fp32", raw, fprop_w=raw_tile, dgrad_w=raw_tile)
    yield _symmetric("mxfp8", OperandSpec(format="mxfp8"))


def _mxfp4_recipes() -> Iterable[GemmRecipe]:
    plain = OperandSpec(format="mxfp4")
    tile = OperandSpec(format="mxfp4", block=(32, 32))
    grad = OperandSpec(format="mxfp4", rounding="stochastic")
    base = _symmetric("mxfp4", plain, fprop_w=tile, dgrad_w=tile, dgrad_dy=grad, wgrad_dy=grad)
    yield base
    yield replace(
        base,
        name="mxfp4_hadamard",
        wgrad_dy=replace(grad, hadamard=32),
        wgrad_x=replace(plain, hadamard=32),
    )


def _nvfp4_recipes() -> Iterable[GemmRecipe]:
    plain, tile = _nvfp4(), _nvfp4(block=(16, 16))
    grad = _nvfp4(rounding="stochastic")
    # NVFP4 paper (arXiv 2509.25149), section 4.
    paper = GemmRecipe(
        name="nvfp4",
        fprop_x=plain,
        fprop_w=tile,
        dgrad_dy=grad,
        dgrad_w=tile,
        wgrad_dy=replace(grad, hadamard=16),
        wgrad_x=replace(plain, hadamard=16),
    )
    # torchao's V1_REQUANT: finer weight blocks, and dgrad still sees the forward's weight.
    requant = replace(
        paper, name="nvfp4_requant", fprop_w=plain, dgrad_w=replace(plain, source="forward")
    )
    # torchao's V2, the Quartet II family (arXiv 2601.22813).
    per_step: dict[str, Any] = {"hadamard": 128, "signs": "step"}
    per_micro_batch: dict[str, Any] = {"hadamard": 128, "signs": "micro_batch"}
    v2 = GemmRecipe(
        name="nvfp4_v2",
        fprop_x=plain,
        fprop_w=plain,
        dgrad_dy=_nvfp4(rounding="ms_eden", **per_step),
        dgrad_w=_nvfp4(source="forward", **per_step),
        wgrad_dy=_nvfp4(rounding="ms_eden", **per_micro_batch),
        wgrad_x=_nvfp4(**per_micro_batch),
    )
    for recipe in (paper, requant, v2):
        yield recipe
        x = replace(recipe.fprop_x, choice="4over6_mse")
        w = replace(recipe.fprop_w, choice="4over6_mse")
        # With square tiles dgrad multiplies by the forward's own codes, transposed.
        dgrad_w = w if recipe.dgrad_w == recipe.fprop_w else recipe.dgrad_w
        yield replace(recipe, name=f"{recipe.name}_4over6", fprop_x=x, fprop_w=w, dgrad_w=dgrad_w)


def _pow2_recipes() -> Iterable[GemmRecipe]:
    """Power-of-two block scales: exact on FP8 cores, and stochastic rounding never saturates."""
    best = _nvfp4(scale="pow2", choice="better_of_two")
    grad = _nvfp4(scale="pow2", rounding="stochastic")
    pow2 = GemmRecipe(
        name="nvfp4_pow2",
        fprop_x=best,
        fprop_w=best,
        dgrad_dy=grad,
        dgrad_w=replace(best, source="forward"),
        wgrad_dy=replace(grad, hadamard=16),
        wgrad_x=replace(best, hadamard=16),
    )
    yield pow2
    # For tokens that arrive in codes: nothing else of X is there for wgrad.
    codes = replace(pow2.wgrad_x, source="forward")
    yield replace(pow2, name="nvfp4_pow2_from_codes", wgrad_x=codes)
    four = _nvfp4(choice="4over6_mse")
    fast = replace(pow2, name="nvfp4_fast", fprop_x=four, fprop_w=four)
    yield fast
    # FP8 cores multiply E4M3 as fast as decoded NVFP4: the forward's X keeps all of its bits.
    yield replace(fast, name="nvfp4_fast_a8", fprop_x=OperandSpec(format="fp8_tensorwise"))


def _mixed_recipes(named: Mapping[str, GemmRecipe]) -> Iterable[GemmRecipe]:
    """One format forward and another backward, after Transformer Engine's quantizer factories."""
    mxfp8, nvfp4 = named["mxfp8"], named["nvfp4"]
    yield replace(
        nvfp4,
        name="mxfp8_fwd_nvfp4_bwd",
        fprop_x=mxfp8.fprop_x,
        fprop_w=mxfp8.fprop_w,
        dgrad_w=_nvfp4(source="forward"),
    )
    yield replace(
        mxfp8, name="nvfp4_fwd_mxfp8_bwd", fprop_x=_nvfp4(row_scaled=True), fprop_w=_nvfp4()
    )


def _named_recipes() -> dict[str, GemmRecipe]:
    named: dict[str, GemmRecipe] = {}
    for family in (_high_and_fp8_recipes, _mxfp4_recipes, _nvfp4_recipes, _pow2_recipes):
        named |= {recipe.name: recipe for recipe in family()}
    return named | {recipe.name: recipe for recipe in _mixed_recipes(named)}


RECIPES: dict[str, GemmRecipe] = _named_recipes()


def get_recipe(name: str) -> GemmRecipe:
    """The named recipe; ConfigError with the nearest name if there is none."""
    if name in RECIPES:
        return RECIPES[name]
    raise ConfigError(
        f"a recipe must be one of {sorted(RECIPES)}, got {name!r}" + _nearest(name, RECIPES)
    )


def split_label(text: str) -> tuple[str, str | None]:
    """A recipe as command lines name it, RECIPE or RECIPE:DECODE -> (recipe, decode or None).

    Whether there is such a recipe depends on the run, which may have recipes of its own.

    Raises:
        ConfigError: no name, or a decode that there is not.
    """
    name, colon, decode = text.partition(":")
    if not name:
        raise ConfigError(f"a recipe must have a name, as in nvfp4 or nvfp4_fast:fp8; got {text!r}")
    if colon and decode not in DECODES:
        raise ConfigError(
            f"behind a recipe and a colon stands how it is decoded, one of {DECODES}; got {text!r}"
            + _nearest(decode, DECODES)
        )
    return name, decode if colon else None


def recipe_from_dict(data: Mapping[str, Any]) -> GemmRecipe:
    """A recipe written operand by operand, as in YAML.

    Keys: `name`; optionally `base` (a named recipe to start from; default bf16), `decode`, and any
    of fprop_x, fprop_w, dgrad_dy, dgrad_w, wgrad_dy, wgrad_x. An operand is the name of a format or
    a mapping of OperandSpec's fields; it replaces the base's operand as a whole.

    Raises:
        ConfigError: with every problem found: unknown keys and formats name the nearest valid one.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(f"a recipe must be a mapping of operands, got {type(data).__name__}")
    keys = ("name", "base", "decode", *OPERAND_FIELDS)
    problems = [
        f"a recipe has no key {key!r}{_nearest(str(key), keys)}" for key in data if key not in keys
    ]
    name = data.get("name", "custom")
    if not isinstance(name, str):
        problems.append(f"a recipe's name must be a string, got {name!r}")
    base = RECIPES["bf16"]
    try:
        base = get_recipe(str(data.get("base", "bf16")))
    except ConfigError as error:
        problems += [f"base: {problem}" for problem in error.problems]
    changes: dict[str, Any] = {}
    for key in OPERAND_FIELDS:
        if key in data:
            try:
                changes[key] = _operand_from_data(data[key])
            except ConfigError as error:
                problems += [f"{key}: {problem}" for problem in error.problems]
    if "decode" in data:
        changes["decode"] = data["decode"]
    try:
        recipe = replace(base, name=str(name), **changes)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return recipe


def _operand_from_data(data: Any) -> OperandSpec:
    if isinstance(data, str):
        data = {"format": data}
    if not isinstance(data, Mapping):
        raise ConfigError(f"an operand must be a format name or a mapping, got {data!r}")
    names = [field.name for field in fields(OperandSpec)]
    unknown = [
        f"an operand has no field {key!r}{_nearest(str(key), names)}"
        for key in data
        if key not in names
    ]
    try:
        spec = OperandSpec(**{key: value for key, value in data.items() if key in names})
    except ConfigError as error:
        raise ConfigError(unknown + error.problems) from None
    if unknown:
        raise ConfigError(unknown)
    return spec


def _nearest(name: Any, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), list(valid), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else f"; valid: {', '.join(valid)}"
