# SPDX-License-Identifier: Apache-2.0
"""Block-scaled products as a Blackwell GPU would be given them, without one.

The library's call is replaced by one that reads the same bytes: nibbles, and scales at the
addresses that the cuBLAS manual gives. Descriptors are made by the library itself, which needs no
GPU for that.
"""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from fused_ops.formats import OperandSpec
from fused_ops.keys import StreamKey
from fused_ops.linear import linear
from fused_ops.linear_call import LinearCall
from fused_ops.operands import operand_form
from fused_ops.quantize import quantize
from fused_ops.recipe import RECIPES
from fused_ops.scaled_matmul import blackwell, cublaslt, hopper
from fused_ops.scaled_matmul.api import scaled_matmul

NVFP4 = OperandSpec(format="nvfp4")
SPECS = {
    "1x16": NVFP4,
    "16x16": OperandSpec(format="nvfp4", block=(16, 16)),
    "4over6": OperandSpec(format="nvfp4", choice="4over6_mse"),
    "pow2": OperandSpec(format="nvfp4", scale="pow2"),
    "rows": OperandSpec(format="nvfp4", row_scaled=True),
    "mxfp8": OperandSpec(format="mxfp8"),
    "mxfp8 e5m2": OperandSpec(format="mxfp8", element="e5m2"),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _values(codes, scales, block):
    """fp64 [rows, K] of bytes and scales as they lie in memory."""
    raw = codes.view(torch.uint8)
    rows = raw.shape[0]
    if codes.dtype == torch.float4_e2m1fn_x2:
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
        values = torch.stack([table[(raw & 15).long()], table[(raw >> 4).long()]], 2)
        values = values.reshape(rows, -1)
    else:
        values = codes.double()
    blocks = values.shape[1] // block
    padded = -(-blocks // 4) * 4
    assert scales.numel() == -(-rows // 128) * 128 * padded, "whole tiles of 128 x 4"
    r, c = torch.arange(rows).unsqueeze(1), torch.arange(blocks)
    place = ((r // 128) * (padded // 4) + c // 4) * 512
    place = place + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    own = scales[place]
    if block == 16:
        factors = own.view(torch.float8_e4m3fn).double()
    else:
        factors = torch.exp2(own.double() - 127)
    return values * factors.repeat_interleave(block, 1)


@pytest.fixture
def library(monkeypatch):
    """The products that the library was asked for: (shape, dtype of the output, beta)."""
    asked = []

    def block_scaled_matmul(a, b, scales, alpha, *, scale_mode, out, accumulate=False):
        block = {cublaslt.VEC16_UE4M3: 16, cublaslt.VEC32_UE8M0: 32}[scale_mode]
        for x in (a, b):
            assert x.is_contiguous()
            assert x.shape[0] % 16 == 0
            assert x.shape[1] % 16 == 0, "bytes of a row"
        assert out.is_contiguous()
        assert alpha is None or (alpha.dtype == torch.float32 and alpha.dim() == 0)
        total = _values(a, scales[0], block) @ _values(b, scales[1], block).t()
        total = total * (1.0 if alpha is None else alpha.double())
        asked.append((tuple(total.shape), out.dtype, int(accumulate)))
        return out.copy_((out.double() + total if accumulate else total).to(out.dtype))

    monkeypatch.setattr(cublaslt, "block_scaled_matmul", block_scaled_matmul)
    monkeypatch.setattr(blackwell, "device_reason", lambda device: None)
    return asked


def _operands(name, shape, second=None):
    torch.manual_seed(1)
    m, n, k = shape
    a, b = torch.randn(m, k), torch.randn(n, k) * 0.1
    b[:, :16] = 0.0
    return quantize(a, SPECS[name]), quantize(b, SPECS[second or name])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(48, 32, 64), (70, 45, 90), (300, 200, 144)])
def test_products_are_those_of_the_definition(library, name, shape):
    """Ragged sizes, tiles, a scale a row, blocks of zeros; new outputs, sums and a bias."""
    second = "mxfp8" if name == "mxfp8 e5m2" else name
    a, b = _operands(name, shape, second)
    m, n, _ = shape
    exact = a.dequantize().double() @ b.dequantize().double().t()

    def check(found, wanted, dtype):
        assert found.shape == (m, n)
        assert found.dtype == dtype
        bound = {"rtol": 2**-8, "atol": 2e-3} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(
            found.double(), wanted, **(bound or {"rtol": 1e-5, "atol": 1e-5})
        )

    for dtype in (torch.bfloat16, torch.float32):
        found = scaled_matmul(a, b, out_dtype=dtype, implementation="blackwell")
        check(found, exact, dtype)
    bias = torch.randn(n)
    found = scaled_matmul(a, b, out_dtype=torch.float32, bias=bias, implementation="blackwell")
    check(found, exact + bias.double(), torch.float32)
    sums = torch.randn(m, n)
    before = sums.double()
    found = scaled_matmul(
        a, b, out_dtype=torch.float32, accumulate=sums, implementation="blackwell"
    )
    assert found is sums
    check(found, before + exact, torch.float32)
    padded = tuple(-(-size // 16) * 16 for size in (m, n))
    assert [shape for shape, _, _ in library] == [padded] * 4
    direct = padded == (m, n) and name != "rows"
    assert library[-1] == (padded, torch.float32, int(direct)), "added by the library where it can"


def test_the_library_is_handed_bf16_outputs_to_write(library):
    a, b = _operands("1x16", (48, 32, 64))
    scaled_matmul(a, b, out_dtype=torch.bfloat16, implementation="blackwell")
    assert library == [((48, 32), torch.bfloat16, 0)]


def test_a_sum_that_begins_anywhere_is_added_afterwards(library):
    a, b = _operands("1x16", (48, 32, 64))
    sums = torch.zeros(48 * 32 + 1)[1:].view(48, 32)
    assert sums.data_ptr() % 16
    scaled_matmul(a, b, out_dtype=torch.float32, accumulate=sums, implementation="blackwell")
    assert library == [((48, 32), torch.float32, 0)]
    exact = a.dequantize() @ b.dequantize().t()
    torch.testing.assert_close(sums, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("left", "right", "decode", "said"),
    [
        ("1x16", "mxfp8", "exact", "two operands in nvfp4, or two in mxfp8"),
        ("mxfp8 e5m2", "mxfp8 e5m2", "exact", "E5M2 is multiplied by E4M3"),
        ("1x16", "pow2", "fp8", "set decode exact"),
        ("pow2", "pow2", "fp8", None),
        ("1x16", "16x16", "exact", None),
    ],
)
def test_what_these_cores_do_not_take_is_said(library, left, right, decode, said):
    a, b = _operands(left, (16, 16, 64), right)
    reason = blackwell.supports(a, b, decode=decode)
    assert reason is None if said is None else said in reason
    assert "codes of both" in blackwell.supports(a, torch.zeros(16, 64))
    assert "empty" in blackwell.supports(a, quantize(torch.zeros(0, 64), NVFP4))


def test_a_cpu_is_no_such_device():
    a, b = _operands("1x16", (16, 16, 64))
    assert "on cpu" in blackwell.supports(a, b)


@pytest.mark.parametrize("broken", ["order", "scales", "alpha", "raises", None])
def test_the_first_product_on_a_device_is_held_against_its_definition(library, monkeypatch, broken):
    """What the library may be told wrongly, each seen: such a device decodes its operands."""
    sound = cublaslt.block_scaled_matmul

    def block_scaled_matmul(a, b, scales, alpha, **options):
        if broken == "raises":
            raise RuntimeError("cublasLtMatmul failed with cuBLAS status 15")
        if broken == "order":
            raw = a.view(torch.uint8)
            a = ((raw >> 4) | (raw << 4)).view(a.dtype)
        if broken == "scales":
            scales = (scales[0].roll(16), scales[1])
        if broken == "alpha" and alpha is not None:
            alpha = alpha * alpha
        return sound(a, b, scales, alpha, **options)

    monkeypatch.setattr(cublaslt, "block_scaled_matmul", block_scaled_matmul)
    problem = blackwell.first_product(torch.device("cpu"))
    if broken is None:
        assert problem is None
        assert [dtype for _, dtype, _ in library] == [torch.float32] * 2
    else:
        assert ("status 15" if broken == "raises" else "differs from its definition") in problem


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_pow2", "mxfp8"])
def test_a_linear_layer_goes_that_way(library, monkeypatch, recipe):
    """Forward and both gradients: three products on these cores, the same as the reference's."""
    torch.manual_seed(2)
    x, w = torch.randn(64, 96), torch.randn(48, 96)
    found = []
    for choice in ("reference", "blackwell"):
        x_, w_ = x.clone().requires_grad_(), w.clone().requires_grad_()
        call = LinearCall(recipe=RECIPES[recipe], key=StreamKey(seed=3, step=1, layer=2))
        call.implementation = None if choice == "blackwell" else "reference"
        y = linear(x_, w_, call=call)
        y.square().sum().backward()
        found.append((y.detach(), x_.grad, w_.grad))
    assert len(library) == 3
    for wanted, got in zip(*found):
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))


def test_operands_are_handed_over_as_codes(monkeypatch):
    """On Hopper they would be decoded as they are quantized."""
    from fused_ops import operands

    class Cuda(torch.Tensor):
        is_cuda = True

    x = torch.zeros(32, 64, dtype=torch.bfloat16).as_subclass(Cuda)
    monkeypatch.setattr(operands, "device_reason", lambda tensor: None)
    call = LinearCall(recipe=RECIPES["nvfp4"], key=StreamKey(seed=3, step=1, layer=2))
    assert operand_form(call, "fprop", x, (32, 32)) == "bf16"
    monkeypatch.setattr(blackwell, "device_reason", lambda device: None)
    assert operand_form(call, "fprop", x, (32, 32)) == "codes"


# ---- what the library itself can say without a GPU


def _header():
    for folder in Path(torch.__file__).parents[1].glob("nvidia/*/include"):
        if (folder / "cublasLt.h").is_file():
            return (folder / "cublasLt.h").read_text(), (folder / "library_types.h").read_text()
    return None


def test_numbers_are_those_of_the_librarys_header():
    found = _header()
    if found is None:
        pytest.skip("no cublasLt.h: it comes with the CUDA build of torch")
    text = "".join(found)
    for name, number in {
        "CUBLASLT_MATMUL_DESC_A_SCALE_POINTER": cublaslt._A_SCALE_POINTER,
        "CUBLASLT_MATMUL_DESC_B_SCALE_POINTER": cublaslt._B_SCALE_POINTER,
        "CUBLASLT_MATMUL_DESC_A_SCALE_MODE": cublaslt._A_SCALE_MODE,
        "CUBLASLT_MATMUL_DESC_B_SCALE_MODE": cublaslt._B_SCALE_MODE,
        "CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3": cublaslt.VEC16_UE4M3,
        "CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0": cublaslt.VEC32_UE8M0,
        "CUDA_R_4F_E2M1": cublaslt._DATA_TYPES[torch.float4_e2m1fn_x2],
        "CUDA_R_8F_E4M3": cublaslt._DATA_TYPES[torch.float8_e4m3fn],
    }.items():
        assert int(re.search(rf"\b{name}\s*=\s*(\d+)", text)[1]) == number, name


@pytest.mark.parametrize("mode", [cublaslt.VEC16_UE4M3, cublaslt.VEC32_UE8M0])
def test_the_library_takes_the_descriptors(mode):
    """The first of the library is our second: its columns are our rows."""
    if cublaslt.library() is None:
        pytest.skip("no cuBLASLt: it comes with the CUDA build of torch")
    operation = cublaslt._describe(True, False, mode)
    cublaslt._point_at_scales(operation, 512, 1024)

    def read(attribute, kind):
        value, written = kind(), ctypes.c_size_t()
        cublaslt._call(
            "cublasLtMatmulDescGetAttribute", operation, attribute, ctypes.byref(value),
            ctypes.c_size_t(ctypes.sizeof(kind)), ctypes.byref(written),
        )  # fmt: skip
        assert written.value == ctypes.sizeof(kind)
        return value.value

    assert read(cublaslt._A_SCALE_MODE, ctypes.c_int32) == mode
    assert read(cublaslt._B_SCALE_MODE, ctypes.c_int32) == mode
    assert read(cublaslt._A_SCALE_POINTER, ctypes.c_void_p) == 512
    assert read(cublaslt._B_SCALE_POINTER, ctypes.c_void_p) == 1024
    assert read(cublaslt._FAST_ACCUM, ctypes.c_int8) == 0
    assert cublaslt._layout(torch.float4_e2m1fn_x2, 64, 32, 64).value


def test_the_scales_of_each_side_go_to_its_codes(monkeypatch):
    """What is launched: our b is the library's first matrix, and its scales the first scales."""
    seen = {}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(cublaslt, "raw_stream", lambda device: 0)
    monkeypatch.setattr(cublaslt, "_plan", lambda *key: seen.update(key=key) or ("operation",))
    monkeypatch.setattr(cublaslt, "_point_at_scales", lambda operation, *at: seen.update(scales=at))
    monkeypatch.setattr(
        cublaslt, "_launch", lambda device, stream, plan, a, b, *rest: seen.update(codes=(b, a))
    )
    a, b = (torch.zeros(rows, 32, dtype=torch.uint8) for rows in (48, 16))
    scales = torch.zeros(512, dtype=torch.uint8), torch.zeros(512, dtype=torch.uint8)
    out = torch.empty(48, 16)
    cublaslt.block_scaled_matmul(
        a.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2), scales, None,
        scale_mode=cublaslt.VEC16_UE4M3, out=out,
    )  # fmt: skip
    assert seen["codes"] == (b.data_ptr(), a.data_ptr())
    assert seen["scales"] == (scales[1].data_ptr(), scales[0].data_ptr())
    _, shape, dtypes, by_columns, leading, mode = seen["key"]
    assert shape == (48, 16, 64)
    assert (dtypes[2], by_columns, leading, mode) == (torch.float32, (False, False), (64, 64), 1)


@pytest.mark.gpu
def test_hopper_is_not_asked_for_it():
    device = torch.device("cuda", torch.cuda.current_device())
    if torch.cuda.get_device_capability(device) >= (10, 0):
        assert blackwell.first_product(device) is None
        return
    assert "compute capability 10.0" in blackwell.device_reason(device)
    a, b = (quantize(torch.randn(rows, 64, device=device), NVFP4) for rows in (48, 32))
    assert hopper.supports(a, b, out_dtype=torch.float32) is None
