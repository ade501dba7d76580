# SPDX-License-Identifier: Apache-2.0
"""What gathers of linear layers and the way to experts move, from the configuration alone.

Column layers gather X in the forward (and again in the backward where wgrad reads it as it is, or
where its column codes move), row layers dY in the backward. Counted are the bytes that a rank
receives for one micro-batch: (ranks - 1) parts of the tokens. Recomputation repeats those of the
forward; embedding, output layer, the reduce-scatters (BF16 sums) and amaxes (4 bytes) are left out.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fused_ops.codecs import roundup
from fused_ops.formats import OperandSpec
from fused_ops.linear import input_operands
from fused_ops.recipe import GemmRecipe
from models.dispatch import dispatch_reason
from models.gather import packing_reason, runs_along_tokens
from models.gemms import GemmShape
from models.memory import DUPLICATED, ROW_PARALLEL, is_expert
from models.precision_table import run_format

if TYPE_CHECKING:
    from models.precision_plan import PrecisionPlan


@dataclass(frozen=True, kw_only=True)
class Gathers:
    """Of all layers with sequence-parallel gathers."""

    high: int
    """Bytes if all gathers are in the dtype of the run."""
    packed: int
    """Bytes if codes move where they can."""
    reasons: dict[str, tuple[str, ...]]
    """Why gathers stay as they are: the modules of each reason."""

    @property
    def share(self) -> float:
        """Packed bytes of the others; 1 where nothing is gathered."""
        return self.packed / self.high if self.high else 1.0

    def lines(self, communicate: str, high: str) -> list[str]:
        """For a log: what a run moves, and which gathers stay in `high`, its dtype.

        Args:
            communicate: `precision.communicate`.
            high: name of the dtype of activations.
        """
        if not self.high:
            return []
        if communicate != "packed":
            return [
                f"sequence-parallel gathers of all layers bring a rank {_mib(self.high)} a "
                f"micro-batch in {high}; precision.communicate=packed would bring "
                f"{_mib(self.packed)}"
            ]
        found = [
            f"sequence-parallel gathers of all layers bring a rank {_mib(self.packed)} a "
            f"micro-batch, {self.share:.2f} of the {_mib(self.high)} in {high}"
        ]
        for reason, modules in self.reasons.items():
            found.append(
                f"precision.communicate packed: gathers of {len(modules)} modules stay in {high}: "
                f"{reason} (first {modules[0]})"
            )
        return found


def communication_lines(plan: "PrecisionPlan", micro_batch_size: int) -> list[str]:
    """For a log: what gathers and dispatch move, and what `communicate: packed` leaves as it is."""
    how, high = plan.config.communicate, run_format(plan.shape.config)
    found = plan_gathers(plan, micro_batch_size).lines(how, high)
    dispatch = _dispatch_lines(plan, micro_batch_size, high)
    if how == "packed" and not found and not dispatch:
        return [
            "precision.communicate packed changes nothing here: no tokens are gathered (tensor "
            "parallelism with parallel.sequence_parallel) or sent to experts of other ranks"
        ]
    return found + dispatch


def _dispatch_lines(plan: "PrecisionPlan", micro_batch_size: int, high: str) -> list[str]:
    """Tokens on their way to experts of other ranks, evenly loaded; nothing is said of BF16."""
    config, ranks = plan.shape.config, plan.shape.config.expert_model_parallel_size
    first = [m for m in plan.modules if m.name.endswith("experts.linear_fc1") and is_expert(m)]
    if ranks == 1 or plan.config.communicate != "packed":
        return []
    tokens = micro_batch_size * plan.shape.seq_length // config.context_parallel_size
    tokens //= config.tensor_model_parallel_size if config.sequence_parallel else 1
    before = after = 0.0
    reasons: dict[str, list[str]] = defaultdict(list)
    for module in first:
        reason = dispatch_reason(plan.recipe(module.name), module.k)
        if config.moe_token_dispatcher_type != "alltoall":
            reason = "model.megatron.moe_token_dispatcher_type is not alltoall"
        away = tokens * module.calls * module.k * (ranks - 1) / ranks
        before += away * config.params_dtype.itemsize
        after += away * (config.params_dtype.itemsize if reason else 0.5625)
        if reason:
            reasons[reason].append(module.name)
    return [
        f"tokens on their way to experts, all layers, evenly loaded: {_mib(after)} a micro-batch "
        f"and rank, {after / before:.2f} of the {_mib(before)} in {high}",
        *(
            f"precision.communicate packed: dispatch of {len(modules)} layers stays in {high}: "
            f"{reason} (first {modules[0]})"
            for reason, modules in reasons.items()
        ),
    ]


def _mib(size: float) -> str:
    return f"{size / 2.0**20:,.1f} MiB"


def plan_gathers(plan: "PrecisionPlan", micro_batch_size: int) -> Gathers:
    """What a micro-batch of `micro_batch_size` sequences moves in the plan's layout."""
    config = plan.shape.config
    tokens = micro_batch_size * plan.shape.seq_length // config.context_parallel_size
    if not config.sequence_parallel:
        return Gathers(high=0, packed=0, reasons={})
    return gathers(
        plan.modules,
        plan.recipes(),
        ranks=config.tensor_model_parallel_size,
        tokens=tokens,
        element_size=config.params_dtype.itemsize,
        reason="precision.check_finite looks at whole tensors" if plan.config.check_finite else "",
    )


def gathers(
    modules: Iterable[GemmShape],
    recipes: Mapping[str, GemmRecipe],
    *,
    ranks: int,
    tokens: int,
    element_size: int,
    reason: str = "",
) -> Gathers:
    """What a micro-batch moves.

    Args:
        modules: linear layers, with those that gather nothing.
        recipes: of each by global name.
        ranks: tensor-parallel ranks, with sequence parallelism.
        tokens: of a micro-batch on a context-parallel rank, before they are cut over `ranks`.
        element_size: bytes of an activation.
        reason: why no codes move at all, if that is so.
    """
    high = packed = 0
    part = tokens // ranks
    reasons: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        if is_expert(module) or module.name.endswith(DUPLICATED):
            continue
        recipe = recipes[module.name]
        rows = module.name.endswith(ROW_PARALLEL)
        features = module.n if rows else module.k
        plain = again = part * features * element_size
        names = ("dgrad.dy", "wgrad.dy") if rows else input_operands(recipe, backward=True)
        specs = {name: recipe.spec(*name.split(".")) for name in names}
        each = [packing_reason(name, spec, part) for name, spec in specs.items()]
        found = [text for text in (reason, *each) if text]
        if rows or not recipe.wgrad_x.is_high_precision or recipe.wgrad_x.source == "forward":
            again = 0
        codes = sum(message_bytes(name, spec, part, features) for name, spec in specs.items())
        if found:
            codes = plain
            reasons[found[0]].append(module.name)
        high += (plain + again) * module.calls * (ranks - 1)
        packed += (codes + again) * module.calls * (ranks - 1)
    return Gathers(high=high, packed=packed, reasons={k: tuple(v) for k, v in reasons.items()})


def message_bytes(name: str, spec: OperandSpec, tokens: int, features: int) -> int:
    """What a rank sends of its part [tokens, features] as the operand `name`."""
    along = runs_along_tokens(name)
    rows, cols = (features, tokens) if along else (tokens, features)
    cols = roundup(cols, spec.multiple)
    sizes = [rows * cols // (2 if spec.is_fp4 else 1)]
    if spec.block is not None:
        blocks = -(-rows // spec.block[0]) * (cols // spec.block[1])
        sizes.append(blocks * (4 if spec.scale == "fp32" or spec.format == "fp8_blockwise" else 1))
    if spec.row_scaled and not along:
        sizes.append(4 * rows)
    return sum(sizes)
