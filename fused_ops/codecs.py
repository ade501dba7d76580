# SPDX-License-Identifier: Apache-2.0
"""Bits of the small number formats: E2M1, E4M3, E5M2, E8M0, nibble packing, scale layout.

Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0), OCP 8-bit floating point v1.0 (E4M3, E5M2),
the cuBLASLt manual (128 x 4 scale tiles). All casts saturate and round to nearest even.
"""

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E5M2_MAX = 57344.0
FLT_MAX = torch.finfo(torch.float32).max
ELEMENT_MAX = {"e2m1": E2M1_MAX, "e4m3": E4M3_MAX, "e5m2": E5M2_MAX}
FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

_TABLES: dict[tuple[str, torch.device, torch.dtype], Tensor] = {}


def e2m1_split_(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split fp32 x into (position, offset, sign): code = integer(position) + offset, and the sign.

    E2M1 has step 2**(e-1) in the binade e = 0, 1, 2 (and 0.5 below 1), two codes a binade. In
    units of its own step a magnitude is `position`, exact, and the codes of that binade start at
    offset = 2 e. Rounding `position` to an integer, by whatever rule, rounds to a code.

    Overwrites x. Returns position fp32 (the memory of x), offset int8, sign int8 (-1 or 0).
    """
    work = x.view(torch.int32) >> 31
    sign = work.to(torch.int8)
    x.abs_().clamp_(max=8.0)
    torch.bitwise_right_shift(x.view(torch.int32), 23, out=work).clamp_(127, 129)
    offset = work.to(torch.int8).sub_(127).mul_(2)
    inverse_step = work.neg_().add_(255).bitwise_left_shift_(23).view(torch.float32)
    return x.mul_(inverse_step), offset, sign


def e2m1_join(integer: Tensor, offset: Tensor, sign: Tensor) -> Tensor:
    """E2M1 codes (uint8, 0..15) of integer positions (int8), saturating; no negative zero."""
    code = integer.add_(offset).clamp_(0, 7)
    return code.bitwise_or_(sign.bitwise_and_(8).mul_(code.clamp(max=1))).view(torch.uint8)


def _anchor(x: Tensor) -> Tensor:
    """1.5 * 2**23 times the E2M1 step at |x| <= 6, as bits (int32).

    Adding it to x leaves x rounded to a multiple of the step, ties to even, in the low bits.
    """
    binade = x.view(torch.int32).bitwise_and(0x7F800000).clamp_(127 << 23, 129 << 23)
    return binade.add_((22 << 23) + (1 << 22))


def encode_e2m1_(x: Tensor) -> Tensor:
    """Round fp32 to E2M1 codes (uint8, 0..15), ties to the even code, |x| > 6 to 6.

    Overwrites x. NaN has no code and gets any: its block scale is NaN, so it decodes to NaN all
    the same. A negative value that rounds to zero gets code 0: we write no negative zero.
    """
    anchor = _anchor(x.clamp_(-E2M1_MAX, E2M1_MAX))
    steps = x.add_(anchor.view(torch.float32)).view(torch.int32).sub_(anchor).to(torch.int8)
    # Two codes a binade: those of the binade e = 0, 1, 2 start at 2 e.
    offset = anchor.bitwise_right_shift_(23).to(torch.int8).sub_(127 + 22).mul_(2)
    negative = (steps >> 7).bitwise_and_(8)
    return steps.abs_().add_(offset).clamp_(max=7).bitwise_or_(negative).view(torch.uint8)


def encode_e2m1(x: Tensor) -> Tensor:
    """`encode_e2m1_` that leaves x alone."""
    return encode_e2m1_(x.clone())


def nearest_e2m1_(x: Tensor) -> Tensor:
    """fp32 x becomes the nearest value on the E2M1 grid: `encode_e2m1_`, decoded. Returns x."""
    anchor = _anchor(x.clamp_(-E2M1_MAX, E2M1_MAX)).view(torch.float32)
    return x.add_(anchor).sub_(anchor)


def _table(name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Lookup table of all 256 bytes of an encoding, made once for a device and dtype."""
    key = (name, device, dtype)
    if key not in _TABLES:
        codes = torch.arange(256, dtype=torch.uint8)
        if name == "e2m1_pair":
            half = torch.tensor(E2M1_VALUES)
            values = torch.cat([half, -half])
            low, high = values[(codes & 15).long()], values[(codes >> 4).long()]
            pairs = torch.stack([low, high], dim=-1).to(dtype)
            table = pairs.view(torch.int64 if pairs.element_size() == 4 else torch.int32).squeeze(
                -1
            )
        elif name == "e8m0":
            bits = codes.to(torch.int32) << 23
            bits[0], bits[255] = 1 << 22, 0x7FC00000
            table = bits.view(torch.float32).to(dtype)
        else:
            table = codes.view(FP8_DTYPES[name]).to(torch.float32).to(dtype)
        _TABLES[key] = table.to(device)
    return _TABLES[key]


def _lookup(name: str, codes: Tensor, dtype: torch.dtype) -> Tensor:
    flat = codes.reshape(-1).to(torch.int32)
    return _table(name, codes.device, dtype).index_select(0, flat)


def decode_e2m1(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of packed E2M1 codes: uint8 [..., n] -> dtype (4 or 2 bytes wide) [..., 2 n]."""
    values = _lookup("e2m1_pair", packed, dtype).view(dtype)
    return values.view(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [..., 2 n] -> uint8 [..., n], the even column in the low nibble."""
    if codes.numel() == 0:
        return codes.new_zeros((*codes.shape[:-1], codes.shape[-1] // 2))
    # Flat first: a matrix of one row may have any stride between its rows.
    pairs = codes.contiguous().view(-1).view(torch.int16).view(*codes.shape[:-1], -1)
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 codes 0..15 [..., 2 n]; inverse of `pack_nibbles`."""
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1)
    return pairs.view(*packed.shape[:-1], 2 * packed.shape[-1])


def encode_fp8(x: Tensor, element: str = "e4m3") -> Tensor:
    """Round fp32 to E4M3 or E5M2 bytes, saturating. NaN stays NaN.

    torch's own CPU cast makes NaN of E4M3 values above 464 and Inf of E5M2 values above 61439.
    """
    limit = ELEMENT_MAX[element]
    return x.clamp(-limit, limit).to(FP8_DTYPES[element]).view(torch.uint8)


def decode_fp8(codes: Tensor, element: str = "e4m3", dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of E4M3 or E5M2 bytes, exact in fp32 and bf16."""
    return _lookup(element, codes, dtype).view(codes.shape)


def encode_e8m0_up(x: Tensor) -> Tensor:
    """Smallest power of two that is not below x (fp32, x >= 0), as biased exponent bytes.

    0 -> 0x00, (0, 2**-127] -> 0x00, above 2**127 and Inf -> 0xFE, NaN -> 0xFF. Done on the bits:
    torch's own cast rounds to the nearest power of two. Source: TransformerEngine's MXFP8 cast.
    """
    bits = x.contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    above_smallest = (exponent > 0) | (mantissa > 0x400000)
    up = (mantissa > 0) & above_smallest
    code = (exponent + up.to(torch.int32)).clamp(max=254)
    code = torch.where(torch.isnan(x), torch.full_like(code, 255), code)
    return code.to(torch.uint8)


def decode_e8m0(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2**(code - 127) for codes 0..254, NaN for 255; exact in fp32 and bf16."""
    return _lookup("e8m0", codes, dtype).view(codes.shape)


def roundup(size: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


def pad_to(x: Tensor, rows: int, cols: int) -> Tensor:
    """Zero-pad a matrix at its lower and right edge; the same tensor if nothing is to add."""
    add_rows, add_cols = rows - x.shape[0], cols - x.shape[1]
    if add_rows == 0 and add_cols == 0:
        return x
    return torch.nn.functional.pad(x, (0, add_cols, 0, add_rows))


def per_row(factors: Tensor, block: tuple[int, int], rows: int) -> Tensor:
    """Factors of blocks (r, c), those of tiles repeated for each of their rows.

    [ceil(rows / r), blocks] -> [rows, blocks].
    """
    if block[0] == 1:
        return factors
    return factors.repeat_interleave(block[0], dim=0)[:rows]


def swizzle_scales(scales: Tensor) -> Tensor:
    """Block scales [rows, blocks] -> flat bytes in the 128 x 4 tiles that cuBLASLt reads.

    Padded with zero bytes to [roundup(rows, 128), roundup(blocks, 4)]. The scale (r, c), with C
    padded columns, lands at ((r // 128) * (C // 4) + c // 4) * 512 + (r % 32) * 16
    + ((r % 128) // 32) * 4 + c % 4.
    """
    padded = pad_to(scales, roundup(scales.shape[0], 128), roundup(scales.shape[1], 4))
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_scales(flat: Tensor, rows: int, blocks: int) -> Tensor:
    """Inverse of `swizzle_scales`: flat bytes -> [rows, blocks]."""
    padded_rows, padded_blocks = roundup(rows, 128), roundup(blocks, 4)
    if flat.numel() != padded_rows * padded_blocks:
        raise ValueError(
            f"swizzled scales of [{rows}, {blocks}] have {padded_rows * padded_blocks} bytes, "
            f"got {flat.numel()}: pass the whole padded buffer"
        )
    tiles = flat.view(padded_rows // 128, padded_blocks // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(padded_rows, padded_blocks)[:rows, :blocks].contiguous()
