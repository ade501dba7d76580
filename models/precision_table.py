# SPDX-License-Identifier: Apache-2.0
"""The precision plan as rows, as text, and as shares of the GEMM FLOPs."""

from collections import defaultdict
from typing import Any

import torch

from fused_ops.formats import OperandSpec
from fused_ops.recipe import GemmRecipe, is_quantized
from models.flops import FixedPart, fixed_parts
from models.gemms import GemmShape, mamba_inner
from models.precision_config import GEMMS
from models.precision_stages import PrecisionStages

_OPERANDS = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def run_format(config: Any) -> str:
    """What a high-precision operand is: the dtype of the run's weights and activations."""
    return _DTYPES[config.params_dtype]


def operand_text(spec: OperandSpec, high: str) -> str:
    """An operand in a few words; `high` is what high precision means in this run."""
    return spec.label if is_quantized(spec) else high


def operand_formats(recipe: GemmRecipe, gemm: str, high: str) -> tuple[str, str]:
    """The bare formats of both operands of a GEMM."""
    left, right = (recipe.spec(gemm, operand) for operand in _OPERANDS[gemm])
    return (
        left.format if is_quantized(left) else high,
        right.format if is_quantized(right) else high,
    )


def table_rows(plan: PrecisionStages) -> list[dict[str, Any]]:
    """See `PrecisionPlan.table`."""
    total = _total_flops(plan)
    high = run_format(plan.shape.config)
    rules = plan.resolution().rules
    rows = []
    for module in plan.modules:
        recipe = plan.recipe(module.name)
        sources = dict.fromkeys(rules[module.name].values())
        row: dict[str, Any] = {
            "name": module.name,
            "layer": "mtp" if module.position is None else module.position,
            "shape": _shape_text(module),
            "recipe": recipe.name,
            "rule": ", ".join(sources),
            "flops_share": 3 * module.flops / total,
        }
        for gemm, operands in _OPERANDS.items():
            row[gemm] = {o: operand_text(recipe.spec(gemm, o), high) for o in operands}
        rows.append(row)
    return rows + [_fixed_row(part, high, total) for part in fixed_parts(plan.shape)]


def _shape_text(module: GemmShape) -> str:
    shape = f"{module.n} x {module.k}"
    return f"{module.copies} of {shape}" if module.copies > 1 else shape


def _fixed_row(part: FixedPart, high: str, total: float) -> dict[str, Any]:
    return {
        "name": part.name,
        "layer": "",
        "shape": "",
        "recipe": "always high",
        "reason": part.reason,
        "flops_share": 3 * part.flops / total if part.gemm else 0.0,
        **(_high_operands(high) if part.gemm and part.flops else {}),
    }


def _high_operands(high: str) -> dict[str, dict[str, str]]:
    return {gemm: dict.fromkeys(operands, high) for gemm, operands in _OPERANDS.items()}


def _total_flops(plan: PrecisionStages) -> float:
    fixed = sum(part.flops for part in fixed_parts(plan.shape) if part.gemm)
    return 3.0 * (sum(module.flops for module in plan.modules) + fixed)


def flops_share(plan: PrecisionStages) -> dict[str, float]:
    """See `PrecisionPlan.flops_share`."""
    high = run_format(plan.shape.config)
    shares: dict[str, float] = defaultdict(float)
    for module in plan.modules:
        recipe = plan.recipe(module.name)
        for gemm in GEMMS:
            left, right = operand_formats(recipe, gemm, high)
            shares[left if left == right else f"{left} x {right}"] += module.flops
    shares[high] += 3 * sum(part.flops for part in fixed_parts(plan.shape) if part.gemm)
    total = _total_flops(plan)
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    return {name: flops / total for name, flops in ordered if flops}


ROW_PARALLEL = ("linear_proj", "linear_fc2", "out_proj")


def dimension_notes(plan: PrecisionStages) -> list[str]:
    """Contraction axes that are padded, and shards whose blocks are not those of the whole."""
    config = plan.shape.config
    notes: dict[str, list[str]] = defaultdict(list)
    for module in plan.modules:
        recipe = plan.recipe(module.name)
        routed = ".mlp.experts." in module.name
        tp = config.expert_tensor_parallel_size if routed else config.tensor_model_parallel_size
        rows = module.name.endswith(ROW_PARALLEL)
        parts = [module.n] if rows else output_parts(module, config)
        axes = [("fprop", module.k, tp if rows else 1)]
        axes += [("dgrad", part, 1 if rows else tp) for part in parts]
        if tp == 1:  # parts are cut only where there are ranks
            axes = [*axes[:1], ("dgrad", module.n, 1)]
        for gemm, length, ranks in dict.fromkeys(axes):
            multiple = max(spec.multiple for spec in recipe.specs(gemm))
            if length % (ranks * multiple) == 0:
                continue
            kind = module.name.rsplit(".", 1)[-1]
            notes[_dimension_note(kind, gemm, (length, ranks, multiple), plan)].append(module.name)
    found = [f"{note} ({len(names)} modules, first {names[0]})" for note, names in notes.items()]
    return found + _sequence_notes(plan)


def _dimension_note(
    kind: str, gemm: str, sizes: tuple[int, int, int], plan: PrecisionStages
) -> str:
    length, ranks, multiple = sizes
    if length % multiple and ranks == 1:
        padded = -(-length // multiple) * multiple
        return f"{kind}: {gemm} contracts {length}, padded to {padded}"
    if plan.config.amax_scope == "layout_invariant":
        return (
            f"{kind}: {gemm} contracts {length} over {ranks} ranks, no multiple of {multiple} each:"
            " its blocks are not those of one process"
        )
    return f"{kind}: {gemm} contracts {length} over {ranks} ranks, padded on each"


def output_parts(module: GemmShape, config: Any) -> list[int]:
    """Sizes of the parts of the output that tensor parallelism cuts one by one, over all ranks."""
    if module.name.endswith("in_proj"):
        inner, heads = mamba_inner(config)
        states = config.mamba_num_groups * config.mamba_state_dim
        return [inner, inner, states, states, heads]
    if module.name.endswith("linear_fc1") and config.gated_linear_unit:
        return [module.n // 2, module.n // 2]
    return [module.n]


def _sequence_notes(plan: PrecisionStages) -> list[str]:
    """Context parallelism gives a rank two pieces of the sequence: wgrad contracts them."""
    ranks = plan.shape.config.context_parallel_size
    if ranks == 1 or plan.config.amax_scope != "layout_invariant":
        return []
    recipes = {plan.recipe(module.name) for module in plan.modules}
    multiple = max((s.multiple for r in recipes for s in r.specs("wgrad")), default=1)
    piece = plan.shape.seq_length // (2 * ranks)
    if piece % multiple == 0:
        return []
    return [
        f"wgrad contracts pieces of {piece} tokens a sequence on each of {ranks} context-parallel "
        f"ranks, no multiple of {multiple}: its blocks are not those of one process unless "
        f"train.micro_batch_size makes it one; model.seq_length "
        f"{-(-plan.shape.seq_length // (2 * ranks * multiple)) * 2 * ranks * multiple} would"
    ]


def dtype_notes(plan: PrecisionStages) -> list[str]:
    """High-precision recipes whose name is not the dtype that the run computes in."""
    high = run_format(plan.shape.config)
    other = {
        spec.format
        for recipe in plan.recipes().values()
        for gemm in GEMMS
        for spec in recipe.specs(gemm)
        if not is_quantized(spec) and spec.format != high
    }
    return [
        f"operands in {name} are computed in {high}, the type of weights and activations"
        for name in sorted(other)
    ]


def plan_notes(plan: PrecisionStages) -> list[str]:
    """See `PrecisionPlan.notes`."""
    notes = plan.resolution().notes + dimension_notes(plan) + dtype_notes(plan)
    if not plan.shape.vocab_size:
        notes.append("the vocabulary is the data's: shares leave the output layer out")
    return notes


def render(plan: PrecisionStages) -> str:
    """See `PrecisionPlan.render`."""
    rows = table_rows(plan)
    cells = [("module", "weight", "GEMM", "left operand", "right operand", "share", "decided by")]
    for row in rows:
        rule = row.get("rule") or row.get("reason", "")
        if not row.get("fprop"):
            cells.append((row["name"], "", "", "", "", "", f"always high: {rule}"))
        first = True
        for gemm in GEMMS if row.get("fprop") else ():
            left, right = row[gemm].values()
            share = f"{100 * row['flops_share'] / 3:.3f} %"
            text = f"always high: {rule}" if "reason" in row else rule
            names = (row["name"], row["shape"], text) if first else ("", "", "")
            cells.append((names[0], names[1], gemm, left, right, share, names[2]))
            first = False
    widths = [max(len(line[column]) for line in cells) for column in range(6)]
    lines = [
        "  ".join([cell.ljust(width) for cell, width in zip(line, widths)] + [line[6]]).rstrip()
        for line in cells
    ]
    return "\n".join([*lines, "", *_summary(plan)])


def _summary(plan: PrecisionStages) -> list[str]:
    config = plan.config
    lines = [
        "share of GEMM FLOPs: "
        + ", ".join(f"{name} {100 * share:.2f} %" for name, share in flops_share(plan).items()),
        f"backend {config.backend}, decode {config.decode}, amax scope {config.amax_scope}",
    ]
    for index, step in enumerate(config.schedule):
        at = f"sample {plan.boundaries[index]}" if plan.boundaries else f"{100 * step.from_:g} %"
        lines.append(
            f"from {at}: {', '.join(step.gemms)} of layers {step.layers}, modules {step.modules} "
            f"to {step.recipe}"
        )
    return lines + [f"note: {note}" for note in plan_notes(plan)]
