# SPDX-License-Identifier: Apache-2.0
"""The weight as an operand: codes kept while it does not change; dgrad's made of the forward's."""

from typing import Any

from torch import Tensor

from fused_ops.formats import DecodedTensor, Operand, OperandSpec, QuantizedTensor
from fused_ops.keys import sign_key
from fused_ops.linear_call import LinearCall
from fused_ops.operands import operand_form, quantize_operand
from fused_ops.quantize import dequantize, requantize_columns, triton_backend
from fused_ops.recipe import GemmRecipe, is_quantized
from fused_ops.scaled_matmul.hopper import decoded_form
from fused_ops.weight_codes import WeightCodes


def weight_operand(call: LinearCall, name: str, weight: Tensor, expert: int = 0) -> Operand:
    """The weight as the operand "fprop.w" [out, in], or transposed as "dgrad.w" [in, out].

    The codes are kept in `call.weight_codes` while the weight does not change.

    Args:
        name: "fprop.w" or "dgrad.w".
        weight: [out, in].
        expert: which of a stack it is, for the name under which its codes are kept.
    """
    spec = call.spec(name)
    if is_quantized(spec):
        return _weight_codes(call, name, weight, expert)
    if spec.source == "forward":
        weight = dequantize(_forward_codes(call, weight, expert), weight.dtype)
    return weight if name == "fprop.w" else weight.t()


def transposed_weight(
    call: LinearCall, weight: Tensor, dy: Tensor, tokens: int, expert: int = 0
) -> DecodedTensor | None:
    """The weight as "dgrad.w", decoded from the forward's codes for one product; None where codes
    of the transpose are needed.

    Args:
        dy: the gradient of the output, for its dtype and device.
        tokens: rows of the product.
    """
    outputs, inputs = weight.shape
    if not shares_codes(call.spec("fprop.w"), call.spec("dgrad.w")) or outputs % 16 or inputs % 16:
        return None
    form = operand_form(call, "dgrad", dy, (tokens, inputs))
    if form == "codes":
        return None
    codes = _forward_codes(call, weight, expert)
    data = triton_backend.decode_columns(codes, form)
    return DecodedTensor(data, codes.amax, (inputs, outputs), codes.spec)


def variant(call: LinearCall, name: str) -> tuple[Any, ...]:
    """What codes depend on besides the weight; those of dgrad may be made from the forward's."""
    found: list[Any] = []
    for each in dict.fromkeys((name, "fprop.w")):
        spec = call.spec(each)
        dither = call.key.words(each) if spec.is_random else ()
        found += [spec, sign_key(spec, call.key, each.split(".")[0]), dither]
    return tuple(found)


def _weight_codes(
    call: LinearCall, name: str, weight: Tensor, expert: int
) -> QuantizedTensor | DecodedTensor:
    kept = call.weight_codes if call.weight_codes is not None else WeightCodes()
    form = _kept_form(call, name, weight)
    kind = variant(call, name) + ((form,) if form != "codes" else ())

    def build() -> QuantizedTensor | DecodedTensor:
        return _build(call, name, weight.detach(), expert, form)

    return kept.get((name, expert), weight, call.weights_epoch, kind, build)


def _forward_codes(call: LinearCall, weight: Tensor, expert: int) -> QuantizedTensor:
    codes = _weight_codes(call, "fprop.w", weight, expert)
    assert isinstance(codes, QuantizedTensor), "those of dgrad alone are decoded"
    return codes


def _kept_form(call: LinearCall, name: str, weight: Tensor) -> str:
    """The form in which codes of a weight are kept: decoded where that is exact and FP8 cores take
    it (`decodes_once`), unless someone wants to see codes."""
    if name != "dgrad.w" or not decodes_once(call.recipe):
        return "codes"
    found = operand_form(call, "dgrad", weight, (16, weight.shape[1]))
    return "fp8" if found == "fp8" else "codes"


def decodes_once(recipe: GemmRecipe) -> bool:
    """Whether a GPU keeps dgrad's weight as FP8 cores take it, 1 byte an element, instead of as
    codes: where it is requantized to power-of-two scales. It is written so at once, and no
    micro-batch has to decode it."""
    own, forward = recipe.dgrad_w, recipe.fprop_w
    if own.source != "forward" or not own.is_pow2:
        return False
    if forward.format != "nvfp4" or forward.row_scaled:
        return False
    return decoded_form(recipe.dgrad_dy, own, (16, 16), recipe.decode) == "fp8"


def give_weight_codes(
    call: LinearCall, weight: Tensor, codes: QuantizedTensor, expert: int = 0
) -> None:
    """Multiply with these codes of the weight as "fprop.w", and never build others of it.

    Raises:
        ValueError: codes of another shape, or in another format than the call's recipe says.
    """
    spec = call.spec("fprop.w")
    if tuple(codes.shape) != tuple(weight.shape) or codes.spec != spec:
        raise ValueError(
            f"{call.name or 'a linear layer'}: codes must be {tuple(weight.shape)} in "
            f"{spec.label!r}, got {tuple(codes.shape)} in {codes.spec.label!r}; give the layer the "
            "recipe that they were made with"
        )
    assert call.weight_codes is not None, "codes are kept by the layer"
    kind = variant(call, "fprop.w")
    call.weight_codes.give(("fprop.w", expert), weight, call.weights_epoch, kind, codes)


def _build(
    call: LinearCall, name: str, weight: Tensor, expert: int, form: str
) -> QuantizedTensor | DecodedTensor:
    """The codes `name` of a weight: of the forward's codes where the recipe says so, or where the
    transpose of these is the same; else of the weight."""
    forward, own = call.spec("fprop.w"), call.spec(name)
    source, columns = weight, name == "dgrad.w"
    if columns and own == forward and is_symmetric(own):
        codes = _forward_codes(call, weight, expert)
        if not weight.is_cuda or own.format not in ("nvfp4", "mxfp4", "fp8_tensorwise"):
            return codes.transposed()
        # The same codes as the transposed ones, and faster there than moving nibbles.
        operand = quantize_operand(call, name, weight, columns=True, amax=codes.amax)
        assert isinstance(operand, QuantizedTensor)
        return operand
    if own.source == "forward":
        codes = _forward_codes(call, weight, expert)
        if own.is_pow2 and codes.spec.format == "nvfp4" and not codes.spec.row_scaled:
            bound = decoded_bound(forward, codes.amax)
            return requantize_columns(
                codes, own, bound, form=form, implementation=call.implementation
            )
        source = dequantize(codes)
    operand = quantize_operand(call, name, source, columns=columns)
    assert isinstance(operand, QuantizedTensor), f"{name}: an empty weight {tuple(weight.shape)}"
    return operand


def decoded_bound(spec: OperandSpec, amax: Tensor) -> Tensor:
    """No decoded value of NVFP4 codes is larger; fp32, from the amax that all ranks share already.

    E4M3 rounds a scale up by a sixteenth at most. Of pow2 scales `amax` is 2688 times the largest
    unit, and decoded values reach 1536 times it.
    """
    return amax * (0.5 if spec.is_pow2 else 1.125)


def follows_weight(spec: OperandSpec) -> bool:
    """Whether codes of a weight follow from its values of now alone, in its own axes: neither
    dithered, nor rotated, nor scaled by the amax of earlier steps."""
    is_own = not (spec.is_random or spec.hadamard or spec.format == "fp8_delayed")
    return is_quantized(spec) and is_own


def is_symmetric(spec: OperandSpec) -> bool:
    """Whether the codes of the transpose are the transposed codes."""
    square = spec.block is None or spec.block[0] == spec.block[1]
    return square and not (spec.hadamard or spec.is_random or spec.row_scaled)


def shares_codes(forward: OperandSpec, own: OperandSpec) -> bool:
    """Whether a kernel can read codes of the weight in fprop as those of its transpose in dgrad."""
    return own == forward and own.format == "nvfp4" and is_symmetric(own)
