# SPDX-License-Identifier: Apache-2.0
"""Linear layers of a stack of experts on a GPU, all experts in each launch.

The same codes as one expert after the other (`fused_ops.grouped_linear`, the definition), which
takes what this cannot. Nothing waits for the device, and no Python runs once an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_ops.formats import OperandSpec
from fused_ops.groups import Groups, groups_of, to_device
from fused_ops.keys import STREAMS, StreamKey, layer_words, signs
from fused_ops.linear import dummy_gradient
from fused_ops.linear_call import LinearCall, Runs
from fused_ops.main_grad import beta_of
from fused_ops.operands import has_shared_amax
from fused_ops.quantize import philox, triton_grouped
from fused_ops.quantize.hadamard import amax_from_plain
from fused_ops.quantize.triton_grouped import GroupedOperand, Request
from fused_ops.recipe import is_quantized
from fused_ops.scaled_matmul.cublaslt import aligned
from fused_ops.scaled_matmul.grouped import Alpha, inner_matmul, rows_matmul
from fused_ops.scaled_matmul.reference import fp32_reciprocal
from fused_ops.triton_support import device_reason
from fused_ops.weight_codes import WeightCodes
from fused_ops.weight_operands import decoded_bound, decodes_once, shares_codes, variant

ENABLED = True
"""Whether experts are taken together where they can be: False, to compare."""


def reason(x: Tensor, weight: Tensor, call: LinearCall) -> str | None:
    """Why the experts are taken one by one, or None. Never depends on how many tokens they have:
    ranks that share amaxes must all go the same way."""
    if not ENABLED:
        return "grouped_cuda.ENABLED is False"
    if call.weight_codes is not None and call.weight_codes.has_given:
        return "codes of single experts were handed over"
    found = device_reason(x)
    if found is not None:
        return found
    if call.observer is not None or call.check_finite or call.implementation is not None:
        return "operands are observed, checked at once, or of a forced implementation"
    if call.row_block is not None or call.key.table is not None:
        return "the product goes by blocks of rows, or keys are in device memory"
    if x.dtype != torch.bfloat16:
        return f"bf16 only, got {x.dtype}"
    if weight.shape[1] % 16 or weight.shape[2] % 16:
        return f"features that are multiples of 16, got {tuple(weight.shape)}"
    sums = getattr(weight, "main_grad", None) if call.main_grad else None
    kept = [weight] if sums is None else [weight, sums]
    if any(not t.is_contiguous() or t.data_ptr() % 16 for t in kept):
        return "the weight, or its main_grad, is not contiguous"
    return recipe_reason(call)


def recipe_reason(call: LinearCall) -> str | None:
    """Why a recipe, or where its operands lie, does not fit, or None."""
    for gemm in ("fprop", "dgrad", "wgrad"):
        left, right = call.recipe.specs(gemm)
        kinds = {_kind(left), _kind(right)}
        on_fp8_cores = "plain" not in kinds and _form(call, gemm) == "fp8"
        if "" in kinds or (len(kinds) == 2 and not on_fp8_cores):
            return f"{gemm} multiplies {left.label!r} by {right.label!r}"
        if right.element == "e5m2" or any(s.row_scaled or s.source != "tensor" for s in (left,)):
            return f"{gemm} has {left.label!r} and {right.label!r}"
    for name in ("fprop.x", "dgrad.dy", "wgrad.dy", "wgrad.x"):
        spec, origin = call.spec(name), call.comm.origin(name)
        if spec.format == "nvfp4":
            rotations = (0, 16) if name.startswith("wgrad") else (0,)
            if spec.block != (1, 16) or spec.hadamard not in rotations or spec.source != "tensor":
                return f"{name} is {spec.label!r}"
            if spec.rounding not in ("nearest", "stochastic") or spec.row_scaled:
                return f"{name} is {spec.label!r}"
        elif spec.source != "tensor":
            return f"{name} is {spec.label!r}"
        if spec.is_random and (isinstance(origin, Runs) or origin[0] % 16 or origin[1] % 16):
            return f"{name} lies at {origin}: dither of whole blocks in one piece is needed"
    return _weight_reason(call)


def _weight_reason(call: LinearCall) -> str | None:
    forward, own = call.spec("fprop.w"), call.spec("dgrad.w")
    for name, spec in (("fprop.w", forward), ("dgrad.w", own)):
        if spec.hadamard or spec.is_random or spec.row_scaled:
            return f"{name} is {spec.label!r}"
        if spec.block == (16, 16) and (spec.choice or spec.is_pow2):
            return f"{name} is {spec.label!r}"
    if own.source == "forward" and not (own.is_pow2 and _kind(forward) == "nvfp4"):
        return f"dgrad.w is {own.label!r}: only power-of-two scales are made from the forward's"
    pair = _kind(forward) == _kind(own) == "nvfp4" and own.source == "tensor"
    if pair and forward.block != own.block:
        return f"fprop.w is {forward.label!r}, dgrad.w {own.label!r}"
    return None


def _kind(spec: OperandSpec) -> str:
    """What products an operand takes part in; "" for none of these."""
    if not is_quantized(spec):
        return "plain"
    return spec.format if spec.format in ("nvfp4", "fp8_tensorwise") else ""


def _form(call: LinearCall, gemm: str) -> str:
    """On which cores the operands of a GEMM meet: "bf16" or "fp8"."""
    left, right = call.recipe.specs(gemm)
    return "fp8" if call.recipe.decode == "fp8" or (left.is_pow2 and right.is_pow2) else "bf16"


def expert_keys(
    key: StreamKey, names: Sequence[str], experts: int, device: torch.device
) -> list[Tensor]:
    """int32 [experts, 2] of each name: the bits of `key.with_expert(e).operand(name)`, in one copy.

    names: of operands of the tokens.
    """
    r0, r1, r2 = layer_words(key.seed, key.step, key.layer)
    stream = torch.tensor([STREAMS[name] for name in names]).view(-1, 1)
    expert = key.expert + torch.arange(experts).view(1, -1)
    first, last = (torch.tensor([[n]]) for n in (key.micro_batch, r2))
    words = philox.philox4x32((first, expert, stream, last), (r0, r1))
    return to_device(list(torch.stack(words[:2], -1)), device)


def _token_operands(
    call: LinearCall,
    groups: Groups,
    x: Tensor,
    names: tuple[str | None, str | None],
    forms: tuple[str, str],
) -> list[GroupedOperand | Tensor | None]:
    """Tokens [rows, features] as a row operand and as a column operand; None where unwanted."""
    wanted = [n if n is not None and is_quantized(call.spec(n)) else None for n in names]
    plain: list[GroupedOperand | Tensor | None] = [None if n is None else x for n in names]
    quantized = [n for n in wanted if n is not None]
    if not quantized:
        return plain
    column = None if wanted[1] is None else call.spec(wanted[1])
    sign = None if wanted[1] is None or column is None else signs(
        column, call.key, wanted[1].split(".")[0], x.device
    )  # fmt: skip
    rotated = column is not None and column.takes_own_amax
    own, turned = triton_grouped.amaxes(x, groups, rotated=rotated, signs=sign, flag=call.nonfinite)
    random = [n for n in quantized if call.spec(n).is_random]
    keys = dict(zip(random, expert_keys(call.key, random, len(groups), x.device))) if random else {}
    requests: list[Request | None] = []
    for i, name in enumerate(wanted):
        if name is None:
            requests.append(None)
            continue
        spec, origin = call.spec(name), (0, 0)
        amax = turned if i == 1 and rotated else amax_from_plain(spec, own)
        if has_shared_amax(spec):
            amax = call.comm.reduce_amax(name, amax)
        if name in keys:
            place = call.comm.origin(name)
            assert not isinstance(place, Runs), "see reason"
            origin = place[::-1] if i == 1 else place
        requests.append(Request(spec, forms[i], amax, keys.get(name), origin))
    made = _quantize(x, groups, requests, sign)
    return [p if m is None else m for p, m in zip(plain, made)]


def _quantize(
    x: Tensor, groups: Groups, requests: Sequence[Request | None], sign: Tensor | None
) -> tuple[GroupedOperand | None, GroupedOperand | None]:
    """The operands of both requests, in one launch where they are of one kind."""
    row, column = requests
    kinds = {_kind(r.spec) for r in requests if r is not None}
    if len(kinds) == 2 or (row and column and "nvfp4" not in kinds and row.spec != column.spec):
        first, second = (_quantize(x, groups, pair, sign) for pair in ((row, None), (None, column)))
        return first[0], second[1]
    if "nvfp4" in kinds:
        return triton_grouped.quantize(x, groups, row, column, sign)
    some = column if row is None else row
    assert some is not None, "asked for"
    return triton_grouped.cast_fp8(
        x, groups, some.spec, some.amax, row=row is not None, column=column is not None
    )


@dataclass
class StackCodes:
    """The weights of all experts as operands: of fprop, and of dgrad once it is wanted.

    No column where dgrad reads the row codes as their transpose (`weight_operands.shares_codes`).
    """

    row: GroupedOperand | None = None
    column: GroupedOperand | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(codes.nbytes for codes in (self.row, self.column) if codes is not None)


def _weight_codes(call: LinearCall, weight: Tensor, column: bool) -> StackCodes:
    """Codes of the stack, kept while the weight does not change; those of dgrad if `column`."""
    kept = call.weight_codes if call.weight_codes is not None else WeightCodes()
    form = "fp8" if decodes_once(call.recipe) else "codes"
    kinds = (*variant(call, "fprop.w"), *variant(call, "dgrad.w"), form)
    codes: Any = kept.get("experts", weight, call.weights_epoch, kinds, StackCodes)  # type: ignore[arg-type]
    forward, own = call.spec("fprop.w"), call.spec("dgrad.w")
    requantized = own.source == "forward" and is_quantized(own)
    row = is_quantized(forward) and codes.row is None
    column = column and is_quantized(own) and codes.column is None
    column = column and not shares_codes(forward, own)
    if row or (column and not requantized):
        made = _build(call, weight, row, column and not requantized)
        codes.row, codes.column = made[0] or codes.row, made[1] or codes.column
    if column and requantized:
        bound = decoded_bound(forward, codes.row.factor)
        codes.column = triton_grouped.requantize(
            codes.row, _weight_groups(weight), Request(own, form, bound)
        )
    return codes


def _weight_groups(weight: Tensor) -> Groups:
    return groups_of((weight.shape[1],) * weight.shape[0], weight.device)


def _build(
    call: LinearCall, weight: Tensor, row: bool, column: bool
) -> tuple[GroupedOperand | None, GroupedOperand | None]:
    flat, groups = weight.detach().view(-1, weight.shape[2]), _weight_groups(weight)
    plain, _ = triton_grouped.amaxes(flat, groups, flag=call.nonfinite)
    forward, own = call.spec("fprop.w"), call.spec("dgrad.w")
    requests: list[Request | None] = [None, None]
    amax = plain
    if row:
        if has_shared_amax(forward):
            amax = call.comm.reduce_amax("fprop.w", plain)
        requests[0] = Request(forward, "codes", amax)
    if column:
        if not (row and own == forward) and has_shared_amax(own):
            amax = call.comm.reduce_amax("dgrad.w", plain)
        requests[1] = Request(own, "codes", amax)
    return _quantize(flat, groups, requests, None)


def _matrix(operand: GroupedOperand | Tensor, form: str) -> tuple[Tensor, int]:
    return (operand, 0) if isinstance(operand, Tensor) else operand.matrix(form)


def _alpha(
    a: GroupedOperand | Tensor, b: GroupedOperand | Tensor | None, shift: int
) -> Alpha | None:
    if isinstance(a, Tensor) or not isinstance(b, GroupedOperand):
        return None
    numerators = a.spec.numerator * b.spec.numerator
    return Alpha(a.factor, b.factor, fp32_reciprocal(numerators) * 2.0**shift)


def _rows_product(
    call: LinearCall, gemm: str, a: GroupedOperand | Tensor, weight: Tensor, groups: Groups,
    rows: int, with_dgrad: bool,
) -> Tensor:  # fmt: skip
    """fprop or dgrad: bf16 [rows, out or in]."""
    form, experts = _form(call, gemm), weight.shape[0]
    codes: GroupedOperand | None = None
    if is_quantized(call.spec(f"{gemm}.w")):
        kept = _weight_codes(call, weight, with_dgrad)
        codes = kept.row if gemm == "fprop" or kept.column is None else kept.column
    left, shift = _matrix(a, form)
    if codes is None:
        right = weight.detach() if gemm == "fprop" else weight.detach().transpose(1, 2)
    else:
        turned = gemm == "dgrad" and shares_codes(*(call.spec(f"{g}.w") for g in ("fprop", gemm)))
        matrix, owed = codes.transposed(form) if turned else codes.matrix(form)
        shift += owed
        inputs, outputs = weight.shape[2], weight.shape[1]
        if gemm == "fprop":
            right = matrix.view(experts, outputs, inputs)
        elif matrix.is_contiguous():
            right = matrix.view(inputs, experts, outputs).transpose(0, 1)
        else:
            right = matrix.t().view(experts, outputs, inputs).transpose(1, 2)
    return rows_matmul(
        left, right, groups, rows=rows, dtype=torch.bfloat16, alpha=_alpha(a, codes, shift)
    )


def _inner_product(
    call: LinearCall, dy: GroupedOperand | Tensor, x: GroupedOperand | Tensor, groups: Groups,
    out: Tensor, accumulate: bool,
) -> None:  # fmt: skip
    """wgrad, into `out` or added to it: fp32 or bf16 [experts, out, in]."""
    if groups.rows == 0:
        if not accumulate:
            out.zero_()
        return
    form = _form(call, "wgrad")
    (left, shift), (right, owed) = _matrix(dy, form), _matrix(x, form)
    padded = not isinstance(dy, Tensor)
    if not padded:
        left, right = left.t(), right.t()
    inner_matmul(
        left, right, groups, out=out, padded=padded, accumulate=accumulate,
        alpha=_alpha(dy, x, shift + owed),
    )  # fmt: skip


class GroupedLinearTogether(torch.autograd.Function):
    """See fused_ops.grouped_linear."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int], call: LinearCall) -> Tensor:
        groups, tokens = groups_of(counts, x.device), aligned(x.detach())
        ctx.save_input = ctx.needs_input_grad[1]
        row, kept = _token_operands(
            call, groups, tokens, ("fprop.x", "wgrad.x" if ctx.save_input else None),
            (_form(call, "fprop"), "codes"),
        )  # fmt: skip
        assert row is not None, "asked for"
        y = _rows_product(call, "fprop", row, weight, groups, len(x), ctx.needs_input_grad[0])
        saved: list[Tensor | None] = [kept] if isinstance(kept, Tensor) else []
        if isinstance(kept, GroupedOperand):
            saved = [kept.data, kept.scales, kept.factor]
        ctx.save_for_backward(weight, *saved)
        ctx.call, ctx.groups, ctx.weight, ctx.rows = call, groups, weight, len(x)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call: LinearCall = ctx.call
        weight, *saved = ctx.saved_tensors
        row, column = _token_operands(
            call, ctx.groups, aligned(dy),
            ("dgrad.dy" if ctx.needs_input_grad[0] else None,
             "wgrad.dy" if ctx.save_input else None),
            (_form(call, "dgrad"), _form(call, "wgrad")),
        )  # fmt: skip
        dx = dw = None
        if row is not None:
            dx = _rows_product(call, "dgrad", row, weight, ctx.groups, ctx.rows, True)
        if column is not None:
            spec = call.spec("wgrad.x")
            x_t: Any = saved[0]
            if len(saved) > 1:
                x_t = GroupedOperand(saved[0], saved[1], saved[2], spec, "codes")
            out = ctx.weight.main_grad if call.main_grad else torch.empty_like(weight)
            accumulate = call.main_grad and beta_of(ctx.weight) == 1
            _inner_product(call, column, x_t, ctx.groups, out, accumulate)
            dw = dummy_gradient(ctx.weight) if call.main_grad else out
        return dx, dw, None, None
