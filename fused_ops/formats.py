# SPDX-License-Identifier: Apache-2.0
"""What an operand of a GEMM is (`OperandSpec`) and what it becomes (`QuantizedTensor`).

An operand is a matrix [rows, cols] whose cols axis is contracted. The mathematics of every
format stands in fused_ops/README.md.
"""

import difflib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_ops.codecs import (
    decode_e2m1,
    decode_e8m0,
    decode_fp8,
    encode_fp8,
    pack_nibbles,
    pad_to,
    per_row,
    roundup,
    unpack_nibbles,
)
from fused_ops.errors import ConfigError

HIGH_PRECISION = ("fp32", "bf16", "fp16")
ROUNDINGS = ("nearest", "stochastic", "stochastic_exact", "ms_eden")
CHOICES = (None, "4over6_mae", "4over6_mse", "better_of_two")
HADAMARD_SIZES = (0, 16, 32, 64, 128)


@dataclass(frozen=True)
class _Format:
    """Per format: allowed elements, blocks and scales; the first of each is the default."""

    elements: tuple[str | None, ...]
    blocks: tuple[tuple[int, int] | None, ...]
    scales: tuple[str | None, ...]


FORMATS: dict[str, _Format] = {
    **{name: _Format((None,), (None,), (None,)) for name in HIGH_PRECISION},
    "fp8_tensorwise": _Format(("e4m3", "e5m2"), (None,), ("fp32", "pow2")),
    "fp8_delayed": _Format(("e4m3", "e5m2"), (None,), ("fp32",)),
    "fp8_blockwise": _Format(("e4m3", "e5m2"), ((1, 128), (128, 128)), ("pow2", "fp32")),
    "mxfp8": _Format(("e4m3", "e5m2"), ((1, 32), (32, 32)), ("e8m0",)),
    "mxfp4": _Format(("e2m1",), ((1, 32), (32, 32)), ("e8m0",)),
    "nvfp4": _Format(("e2m1",), ((1, 16), (16, 16)), ("e4m3", "pow2")),
}


def _parse_block(block: object) -> object:
    """Accept (1, 16), [1, 16] and "1x16"."""
    if isinstance(block, str) and block.count("x") == 1:
        rows, cols = block.split("x")
        if rows.isdigit() and cols.isdigit():
            return int(rows), int(cols)
    return tuple(block) if isinstance(block, list) else block


@dataclass(frozen=True, kw_only=True)
class OperandSpec:
    """How one operand of one GEMM is represented. Pure data; checks itself.

    A value left at None takes the format's default. Raises ConfigError, a ValueError that lists
    every problem with rule, value and remedy.
    """

    format: str = "bf16"
    """fp32, bf16, fp16 | fp8_tensorwise, fp8_delayed, fp8_blockwise | mxfp8, mxfp4 | nvfp4."""
    element: str | None = None
    """e2m1 (4-bit formats), e4m3 or e5m2 (8-bit formats)."""
    block: tuple[int, int] | None = None
    """(rows, cols) that share a scale; cols run along the contraction axis. None: whole tensor."""
    scale: str | None = None
    """nvfp4: e4m3 | pow2. fp8_blockwise: pow2 | fp32. fp8_tensorwise: fp32 | pow2. MX: e8m0."""
    row_scaled: bool = False
    """nvfp4: one amax, and so one fp32 scale, for each row instead of one for the tensor."""
    rounding: str = "nearest"
    """nearest (ties to even) | stochastic (8-bit dither) | stochastic_exact (24-bit) | ms_eden."""
    hadamard: int = 0
    """Size of the Hadamard rotation along the contraction axis, before the amax; 0 is none."""
    signs: str = "fixed"
    """fixed, or drawn again for every micro_batch | step; the caller passes the vector."""
    choice: str | None = None
    """Two candidate block scales, the better kept: 4over6_mae | 4over6_mse | better_of_two."""
    source: str = "tensor"
    """tensor, or forward: requantized from the dequantized operand of the forward GEMM."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            near = difflib.get_close_matches(str(self.format), FORMATS, n=1)
            hint = f"did you mean {near[0]}?" if near else "choose one of them"
            raise ConfigError(f"format is one of {', '.join(FORMATS)}; got {self.format!r}: {hint}")
        kind = FORMATS[self.format]
        for name, default in (
            ("element", kind.elements[0]),
            ("block", kind.blocks[0]),
            ("scale", kind.scales[0]),
        ):
            value = _parse_block(self.block) if name == "block" else getattr(self, name)
            object.__setattr__(self, name, default if value is None else value)
        problems = _format_problems(self, kind) + _combination_problems(self)
        if problems:
            raise ConfigError(problems)

    @property
    def is_high_precision(self) -> bool:
        """True for fp32, bf16, fp16: nothing is quantized."""
        return self.format in HIGH_PRECISION

    @property
    def is_fp4(self) -> bool:
        """True for 4-bit elements, two of which share a byte."""
        return self.element == "e2m1"

    @property
    def is_pow2(self) -> bool:
        """NVFP4 with power-of-two block scales."""
        return self.format == "nvfp4" and self.scale == "pow2"

    @property
    def needs_amax(self) -> bool:
        """True if codes depend on an amax beyond the block, which layouts must then share."""
        return self.format in ("nvfp4", "fp8_tensorwise") and not self.is_pow2

    @property
    def takes_own_amax(self) -> bool:
        """True if its amax must be taken of the operand: that of the matrix does not give it."""
        return self.row_scaled or (bool(self.hadamard) and not self.is_pow2)

    @property
    def is_random(self) -> bool:
        """True if quantize needs a key."""
        return self.rounding != "nearest"

    @property
    def numerator(self) -> float:
        """Value that amax is mapped to: largest element times largest block scale in use."""
        if self.format != "nvfp4":
            return 1.0
        small = self.rounding == "ms_eden" or (self.choice or "").startswith("4over6")
        return 6.0 * 256.0 if small else 6.0 * 448.0

    @property
    def fp8_shift(self) -> int:
        """The s of an NVFP4 tensor's FP8 operand, which is code * block scale * 2**-s in E4M3.

        The largest product is 6 * 448 with numerator 2688, and 6 * 256 with 1536 or power-of-two
        scales, so that it depends on the spec alone and never on data.
        """
        return 2 if self.is_pow2 or self.numerator == 1536.0 else 3

    @property
    def decoded_forms(self) -> tuple[str, ...]:
        """The DECODED_FORMS that lose nothing, or that are asked for: see DecodedTensor."""
        if self.format == "nvfp4":
            return DECODED_FORMS
        exact = self.format in ("mxfp4", "mxfp8") or (
            self.format == "fp8_blockwise" and self.scale == "pow2"
        )
        return ("bf16",) if exact else ()

    @property
    def multiple(self) -> int:
        """The contraction axis is zero-padded to a multiple of this."""
        return max(self.block[1] if self.block else 1, self.hadamard, 1)

    @property
    def label(self) -> str:
        """Short name for tables, such as "nvfp4 1x16 pow2 hadamard16 stochastic"."""
        words = [self.format]
        if self.block:
            words.append(f"{self.block[0]}x{self.block[1]}")
        kind = FORMATS[self.format]
        words += [str(self.element)] if self.element != kind.elements[0] else []
        words += [str(self.scale)] if self.scale != kind.scales[0] else []
        words += ["row_scaled"] if self.row_scaled else []
        words += [f"hadamard{self.hadamard}"] if self.hadamard else []
        words += [self.rounding] if self.is_random else []
        words += [self.choice] if self.choice else []
        words += ["from_forward"] if self.source == "forward" else []
        return " ".join(words)


def _format_problems(spec: OperandSpec, kind: _Format) -> list[str]:
    """Fields that must be one of a list."""
    fields = [
        ("element", kind.elements),
        ("block", kind.blocks),
        ("scale", kind.scales),
        ("rounding", ROUNDINGS),
        ("hadamard", HADAMARD_SIZES),
        ("signs", ("fixed", "micro_batch", "step")),
        ("choice", CHOICES),
        ("source", ("tensor", "forward")),
    ]
    problems = []
    for name, allowed in fields:
        value = getattr(spec, name)
        if value not in allowed:
            listed = ", ".join(map(str, allowed))
            problems.append(
                f"{spec.format}: {name} is one of {listed}; got {value!r}: "
                "change it, or leave it out for the default"
            )
    return problems


def _combination_problems(spec: OperandSpec) -> list[str]:
    """Fields that exclude each other."""
    full_nvfp4 = spec.format == "nvfp4" and spec.scale == "e4m3"
    four_over_six = (spec.choice or "").startswith("4over6")
    one_row = spec.block is None or spec.block[0] == 1
    rules = [
        (
            spec.is_high_precision and (spec.is_random or spec.hadamard or spec.choice),
            "a high-precision operand is not rotated or rounded: remove rounding, hadamard, choice",
        ),
        (
            spec.rounding.startswith("stochastic") and not spec.is_fp4,
            "stochastic rounding is for 4-bit elements: use rounding nearest",
        ),
        (
            spec.rounding == "ms_eden" and not (full_nvfp4 and spec.block == (1, 16)),
            "ms_eden needs nvfp4 with 1x16 blocks and e4m3 scales: change block or scale",
        ),
        (spec.row_scaled and not (full_nvfp4 and one_row), "row_scaled needs nvfp4 1x16 e4m3"),
        (four_over_six and not full_nvfp4, "4over6 needs nvfp4 with e4m3 scales"),
        (
            four_over_six and bool(spec.hadamard or spec.is_random),
            "4over6 goes with rounding nearest and no hadamard, as in TransformerEngine",
        ),
        (
            spec.choice == "better_of_two" and not (spec.is_pow2 and not spec.is_random),
            "better_of_two needs nvfp4 with pow2 scales and rounding nearest",
        ),
        (
            spec.signs != "fixed" and not spec.hadamard,
            f"signs {spec.signs} without a hadamard does nothing: set hadamard, or signs fixed",
        ),
    ]
    return [f"{spec.format}: {text}; got {spec.label!r}" for broken, text in rules if broken]


@dataclass
class QuantizedTensor:
    """A matrix in packed form. `decoded = code * block scale * tensor scale`.

    codes: uint8. 4-bit: [rows, padded cols / 2], the even column in the low nibble. 8-bit:
        [rows, padded cols]. Cols are padded to the block; padding decodes to zero.
    scales: decode factors of blocks, one a block and unswizzled: uint8 E4M3 or E8M0 bytes, or
        fp32; [rows, blocks], for tiles [row tiles, blocks], for FP8 of a whole tensor [1, 1].
    amax: fp32, what the tensor scale was made of: scalar, or [rows] if row_scaled. For pow2 it
        is 2688 * 2**shift ([rows] where rows have shifts of their own, for batch invariance), for
        MX and FP8 blockwise, which have no tensor scale, 1.
    shape: (rows, cols) before padding to blocks. With a Hadamard rotation cols is the size
        padded to the rotation, since rotated padding is not zero.
    out_of_range: int32 [2], values or blocks (above, below) the range of the shift (pow2) or of
        the given scale (fp8_delayed); None elsewhere.
    """

    codes: Tensor
    scales: Tensor
    amax: Tensor
    shape: tuple[int, int]
    spec: OperandSpec
    out_of_range: Tensor | None = None

    @property
    def tensor_scale(self) -> Tensor:
        """fp32 decode factor outside the block scales: scalar, or [rows, 1] with an amax a row."""
        if self.spec.format in ("fp8_tensorwise", "fp8_delayed"):
            return self.scales.view(())
        if self.spec.format == "nvfp4":
            # A tensor divisor: torch multiplies by the reciprocal of a Python number on GPUs.
            scale = self.amax / torch.full_like(self.amax, self.spec.numerator)
            return scale.view(-1, 1) if scale.dim() else scale
        return self.amax

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and amax."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.amax))

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Element codes as numbers, without any scale: [rows, padded cols], exact in bf16."""
        if self.spec.is_fp4:
            return decode_e2m1(self.codes, dtype)
        return decode_fp8(self.codes, str(self.spec.element), dtype)

    def block_scales(self) -> Tensor:
        """Block scales as fp32 numbers, in the shape of `scales`."""
        if self.scales.dtype == torch.float32:
            return self.scales
        if self.spec.format == "nvfp4":
            return decode_fp8(self.scales)
        return decode_e8m0(self.scales)

    def row_scales(self) -> Tensor:
        """`scales` with those of tiles repeated for each row: [rows, blocks]."""
        if self.spec.block is None:
            return self.scales
        return per_row(self.scales, self.spec.block, self.shape[0])

    def unscaled(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """code * block scale, without the tensor scale: [rows, cols].

        Exact in bf16, fp16 (NVFP4) and fp32 for NVFP4, MX and power-of-two FP8 scales; FP8 blocks
        with fp32 scales need dtype fp32.
        """
        rows, cols = self.shape
        values = self.values()
        if self.spec.block is not None:
            scales = per_row(self.block_scales(), self.spec.block, rows)
            blocked = values.view(rows, scales.shape[1], self.spec.block[1])
            values = blocked.mul_(scales.unsqueeze(-1)).view(values.shape)
        return values[:, :cols].to(dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decoded matrix [rows, cols]: (code * block scale) * tensor scale in fp32."""
        return (self.unscaled(torch.float32) * self.tensor_scale).to(dtype)

    def fp8_operand(self) -> tuple[Tensor, Tensor]:
        """Operand for FP8 tensor cores: (float8_e4m3fn [rows, cols], fp32 decode factor).

        NVFP4: code * block scale * 2**-2 (2**-3 where block scales reach 448), rounded to E4M3,
        nearest even. Power-of-two scales lose nothing; others drop up to two bits. The factor
        carries the shift, so value * factor decodes. FP8 of a whole tensor: its own codes.
        """
        if self.spec.block is None and self.spec.element == "e4m3":
            rows, cols = self.shape
            return self.codes[:rows, :cols].view(torch.float8_e4m3fn), self.tensor_scale
        if self.spec.format != "nvfp4":
            raise ValueError(
                "an FP8 operand needs nvfp4, or e4m3 with one scale a tensor; "
                f"got {self.spec.label!r}: multiply with decode exact"
            )
        shift = self.spec.fp8_shift
        # + 0: a code 6 or -6 under a scale that underflowed is a zero without a sign.
        codes = encode_fp8(self.unscaled(torch.float32).mul_(2.0**-shift).add_(0.0))
        return codes.view(torch.float8_e4m3fn), self.tensor_scale * 2.0**shift

    def decoded(self, form: str) -> "DecodedTensor":
        """As tensor cores multiply it: form "bf16" (exact), or "fp8" of NVFP4."""
        if form not in self.spec.decoded_forms:
            raise ValueError(
                f"{self.spec.label!r} has the decoded forms {self.spec.decoded_forms}; got "
                f"{form!r}: multiply the codes"
            )
        if form == "fp8":
            data = self.fp8_operand()[0]
        else:
            data = self.unscaled(torch.float32).add_(0.0).to(torch.bfloat16)
        pad = roundup(self.shape[1], self.spec.multiple)
        data = pad_to(data.view(torch.uint8), len(data), pad * data.itemsize).view(data.dtype)
        return DecodedTensor(data, self.amax, self.shape, self.spec, self.out_of_range)

    def transposed(self) -> "QuantizedTensor":
        """The transpose without rounding again; needs square blocks or one scale a tensor."""
        block = self.spec.block
        if block is not None and block[0] != block[1]:
            raise ValueError(
                f"blocks of {block[0]}x{block[1]} do not transpose: quantize with columns=True"
            )
        if self.spec.hadamard or self.spec.row_scaled:
            raise ValueError(f"{self.spec.label!r} has a direction: quantize with columns=True")
        rows, cols = self.shape
        codes = unpack_nibbles(self.codes) if self.spec.is_fp4 else self.codes
        codes = pad_to(codes[:, :cols].t(), cols, roundup(rows, self.spec.multiple)).contiguous()
        return replace(
            self,
            codes=pack_nibbles(codes) if self.spec.is_fp4 else codes,
            scales=self.scales.t().contiguous(),
            shape=(cols, rows),
        )


DECODED_FORMS = ("bf16", "fp8")
"""What a quantizer may write instead of codes: operands of BF16 and of FP8 tensor cores."""


@dataclass
class DecodedTensor:
    """A matrix of blocks as tensor cores multiply it, its codes not kept.

    data: [rows, padded cols], code * block scale: bf16, exact; or of NVFP4 E4M3 (float8_e4m3fn), of
        that times 2**-shift, nearest even. Zeros have no sign. bf16 may lie as its transpose.
    amax, shape, spec, out_of_range: as of the QuantizedTensor that it stands for.
    """

    data: Tensor
    amax: Tensor
    shape: tuple[int, int]
    spec: OperandSpec
    out_of_range: Tensor | None = None

    @property
    def shift(self) -> int:
        """data * 2**shift is code * block scale (rounded, if E4M3 cannot hold it)."""
        return self.spec.fp8_shift if self.data.dtype == torch.float8_e4m3fn else 0

    @property
    def nbytes(self) -> int:
        """Bytes of data and amax."""
        return self.data.numel() * self.data.element_size() + self.amax.numel() * 4


Operand = QuantizedTensor | DecodedTensor | Tensor
"""What a GEMM multiplies: codes, what codes decode to, or a high-precision tensor as it is."""
