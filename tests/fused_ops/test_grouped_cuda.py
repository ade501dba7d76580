# SPDX-License-Identifier: Apache-2.0
"""All experts in each launch: the bytes and results of one expert after the other.

On a GPU, and on a CPU with the kernels in Triton's interpreter (see ptx.py), whose products are the
reference's, since it has no bf16 ones.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from fused_ops import grouped_cuda
from fused_ops.grouped_linear import _experts, grouped_linear
from fused_ops.groups import groups_of
from fused_ops.keys import KeyTable, StreamKey
from fused_ops.linear_call import LinearCall, LocalComm, Runs
from fused_ops.operands import quantize_operand
from fused_ops.recipe import RECIPES, is_quantized
from fused_ops.scaled_matmul import grouped
from fused_ops.testing import assert_bitwise_equal, assert_close
from fused_ops.weight_codes import WeightCodes
from fused_ops.weight_operands import decodes_once, shares_codes, weight_operand
from tests.fused_ops.ptx import emulate

KEY = StreamKey(seed=5, step=17, micro_batch=2, layer=99, expert=8)
FAST = {
    "bf16": RECIPES["bf16"],
    "nvfp4": RECIPES["nvfp4"],
    "nvfp4_fast": RECIPES["nvfp4_fast"],
    "nvfp4_fast:fp8": replace(RECIPES["nvfp4_fast"], decode="fp8"),
    "nvfp4_fast_a8:fp8": replace(RECIPES["nvfp4_fast_a8"], decode="fp8"),
    "nvfp4:fp8": replace(RECIPES["nvfp4"], decode="fp8"),
    "nvfp4_pow2": RECIPES["nvfp4_pow2"],
    "fp8_tensorwise": RECIPES["fp8_tensorwise"],
    "bf16 forward": RECIPES["nvfp4"].with_gemm("fprop", RECIPES["bf16"]),
    "fp8 forward": RECIPES["nvfp4"].with_gemm("fprop", RECIPES["fp8_tensorwise"]),
    "nvfp4 wgrad": RECIPES["bf16"].with_gemm("wgrad", RECIPES["nvfp4"]),
}
SLOW = {"nvfp4_v2", "nvfp4_requant", "nvfp4_4over6", "mxfp8", "fp8_delayed", "mxfp4_hadamard"}
COUNTS = {
    "ragged": [0, 1, 15, 16, 17, 0, 130],
    "one expert": [0, 0, 90, 0],
    "none": [0, 0],
    "whole": [64, 128],
}
# The interpreter is slow: what a tile of rows and an empty group show.
FEW = {"ragged": [17, 0, 3], "none": [0, 0]}
each_counts = pytest.mark.parametrize("counts", COUNTS)
each_recipe = pytest.mark.parametrize("name", FAST)
SLOW_IN_THE_INTERPRETER = ("nvfp4", "nvfp4_fast:fp8", "nvfp4_fast_a8:fp8")
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture
def place(device, monkeypatch):
    """The device; new tensors hold NaN bytes on it, and a CPU passes for one with kernels."""
    empty = torch.empty

    def full(*args, **kwargs):
        out = empty(*args, **kwargs)
        if out.numel() and not out.is_pinned():
            out.view(torch.uint8).fill_(0xFF) if out.dim() else out.fill_(float("nan"))
        return out

    if device == "cpu":
        emulate(monkeypatch)
        monkeypatch.setattr(grouped_cuda, "device_reason", lambda x: None)
        for name in ("rows_matmul", "inner_matmul"):
            product = partial(getattr(grouped, name), implementation="reference")
            monkeypatch.setattr(grouped_cuda, name, product)
    monkeypatch.setattr(torch, "empty", full)
    return torch.device(device)


def data(counts, device, width=48, out=64):
    """Experts of very different magnitude: an amax of the wrong one is off by powers of ten."""
    size = 10.0 ** (torch.arange(len(counts)) % 5).sub(2).float()
    rows = torch.cat([s.expand(n) for s, n in zip(size, counts)]).unsqueeze(1)
    x = torch.randn(sum(counts), width) * rows
    w = torch.randn(len(counts), out, width) * 0.1 / size.view(-1, 1, 1)
    dy = torch.randn(sum(counts), out) * rows
    return [t.bfloat16().to(device) for t in (x, w, dy)]


def assert_operand(got, want, rows, columns, what):
    """A group's part of an operand against that of its rows alone; rows, columns: where it lies."""
    codes = got.data[rows, columns]
    if got.form == "codes" and got.spec.format != "nvfp4":
        assert_bitwise_equal(codes[:, : want.codes.shape[1]].cpu(), want.codes, f"{what} bytes")
        assert not codes[:, want.codes.shape[1] :].any(), f"{what}: padding is not zero"
        return want.tensor_scale
    if got.form == "codes":
        assert_bitwise_equal(codes.cpu().contiguous(), want.codes, f"{what} codes")
        return want.amax
    values = want.decoded(got.form).data
    assert_bitwise_equal(codes.cpu().contiguous(), values, f"{what} values")
    return want.amax


def assert_scales(got, want, rows, columns, what):
    if got.scales is not None:
        part = got.scales[rows, columns].cpu().contiguous()
        assert_bitwise_equal(part, want.scales, f"{what} scales")


def check_tokens(call, x, counts, names, forms):
    """Row and column operands of all groups, each against the reference of its rows on a CPU."""
    groups = groups_of(counts, x.device)
    made = grouped_cuda._token_operands(call, groups, x, names, forms)
    place = groups.place.tolist()
    for e, part in enumerate(x.cpu().split(counts)):
        start, count, block = place[e][:3]
        if not count:
            continue
        own = replace(_experts(call, len(counts))[e], nonfinite=None)
        for index, (name, got) in enumerate(zip(names, made)):
            if isinstance(got, torch.Tensor):
                continue
            want = quantize_operand(own, name, part, columns=bool(index))
            width = 8 if got.form == "codes" and got.spec.format == "nvfp4" else 16
            last = block + -(-count // 16)
            rows, columns = slice(start, start + count), slice(None)
            if index:
                rows, columns = slice(None), slice(width * block, width * last)
            what = f"{name} of expert {e}, {count} tokens"
            scale = assert_operand(got, want, rows, columns, what)
            assert_bitwise_equal(got.factor[e].cpu(), scale.view(()), f"{what} factor")
            columns = slice(block, last) if index else columns
            assert_scales(got, want, rows, columns, what)


def check_bytes(name, counts, device):
    flag = torch.zeros((), dtype=torch.bool, device=device)
    call = LinearCall(recipe=FAST[name], key=KEY, nonfinite=flag)
    x, w, dy = data(counts, device)
    for tokens, names, form in (
        (x, ("fprop.x", "wgrad.x"), ("fprop", "codes")),
        (dy, ("dgrad.dy", "wgrad.dy"), ("dgrad", "wgrad")),
    ):
        forms = tuple(f if f == "codes" else grouped_cuda._form(call, f) for f in form)
        check_tokens(call, tokens, counts, names, forms)
    check_weights(call, w)
    assert not flag


def check_weights(call, w):
    """The stack's codes against those of each expert."""
    codes = grouped_cuda._weight_codes(call, w, True)
    experts, out, _ = w.shape
    shared = shares_codes(call.spec("fprop.w"), call.spec("dgrad.w"))
    assert (codes.column is None) is (shared or not is_quantized(call.spec("dgrad.w")))
    assert not decodes_once(call.recipe) or codes.column.form == "fp8"
    if shared:
        check_transposed(call, w, codes.row)
    for e, own in enumerate(_experts(call, experts)):
        own = replace(own, nonfinite=None)
        for operand, got in (("fprop.w", codes.row), ("dgrad.w", codes.column)):
            if got is None:
                continue
            want, what = weight_operand(own, operand, w[e].cpu(), e), f"{operand} of expert {e}"
            width = 2 if got.spec.format == "nvfp4" else 1
            tile = 16 if got.spec.block == (16, 16) else 1
            rows, columns = slice(e * out, (e + 1) * out), slice(None)
            scale_rows, scale_columns = slice(e * out // tile, (e + 1) * out // tile), columns
            if operand == "dgrad.w":
                width = width if got.form == "codes" else 1
                rows, columns = slice(None), slice(e * out // width, (e + 1) * out // width)
                scale_rows, scale_columns = rows, slice(e * out // 16, (e + 1) * out // 16)
            scale = assert_operand(got, want, rows, columns, what)
            assert_bitwise_equal(got.factor[e].cpu(), scale.view(()), f"{what} factor")
            assert_scales(got, want, scale_rows, scale_columns, what)


def check_transposed(call, w, codes):
    """Row codes decoded as their transpose: the values of codes of each expert's transpose."""
    out = w.shape[1]
    for form in ("bf16", "fp8"):
        got, shift = codes.transposed(form)
        assert got.stride() == ((1, got.shape[0]) if form == "bf16" else (got.shape[1], 1))
        for e, own in enumerate(_experts(call, len(w))):
            own = replace(own, nonfinite=None)
            codes_of_transpose = weight_operand(own, "dgrad.w", w[e].cpu(), e)
            want = codes_of_transpose.decoded(form)
            assert want.shift == shift
            part = got[:, e * out : (e + 1) * out].cpu().contiguous()
            assert_bitwise_equal(part, want.data, f"{form} of the transpose of expert {e}")


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_fast"])
def test_interpreted_weights(name, place):
    """Of dgrad: the row codes read as their transpose, and what FP8 cores take, decoded once."""
    check_weights(LinearCall(recipe=RECIPES[name], key=KEY), data([0, 0], place, 32, 48)[1])


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@each_counts
@each_recipe
def test_bytes_are_those_of_each_expert(name, counts, place):
    check_bytes(name, COUNTS[counts], place)


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_IN_THE_INTERPRETER),
        "fp8_tensorwise",
    ],
)
def test_interpreted_bytes_are_those_of_each_expert(name, place):
    check_bytes(name, FEW["ragged"], place)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_fast:fp8", "fp8_tensorwise"])
def test_bytes_of_real_sizes(name, place):
    """Several tiles along every axis, features that no tile divides."""
    call = LinearCall(recipe=FAST[name], key=KEY)
    counts = [700, 3, 0, 129, 64]
    x, w, dy = data(counts, place, width=784, out=528)
    forms = tuple(grouped_cuda._form(call, gemm) for gemm in ("fprop", "dgrad", "wgrad"))
    check_tokens(call, x, counts, ("fprop.x", "wgrad.x"), (forms[0], "codes"))
    check_tokens(call, dy, counts, ("dgrad.dy", "wgrad.dy"), forms[1:])
    check_weights(call, w)


class Far(LocalComm):
    """Another rank's tokens and features."""

    def origin(self, name):
        return 3 << 24, 4096


@pytest.mark.parametrize("device", [GPU])
def test_dither_counts_from_where_the_rank_begins(place):
    call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY, comm=Far())
    _, _, dy = data(COUNTS["ragged"], place)
    check_tokens(call, dy, COUNTS["ragged"], ("dgrad.dy", "wgrad.dy"), ("codes", "codes"))


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_flag_is_raised_by_tokens_of_an_expert_alone(value, place):
    counts = COUNTS["ragged"]
    x = data(counts, place)[0]
    for row, expected in ((-1, True), (len(x) + 2, False)):
        longer = torch.cat([x, x[:4]])
        longer[row if row >= 0 else len(x) - 1, 5] = value
        flag = torch.zeros((), dtype=torch.bool, device=place)
        call = LinearCall(recipe=RECIPES["nvfp4"], key=KEY, nonfinite=flag)
        grouped_cuda._token_operands(
            call, groups_of(counts, place), longer, ("fprop.x", None), ("codes", "codes")
        )
        assert bool(flag) is expected, (value, row)


def run(name, tensors, counts, together, monkeypatch, main_grad=True, **options):
    """y, dx, dw of two micro-batches, with a tail of tokens that belong to no expert."""
    monkeypatch.setattr(grouped_cuda, "ENABLED", together)
    x, w, dy = tensors
    tail = torch.full((7, x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    grad_tail = torch.full((7, dy.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    weight = torch.nn.Parameter(w.clone())
    weight.main_grad = torch.full(w.shape, 0.25, device=x.device)
    weight.grad_added_to_main_grad = False
    codes = WeightCodes()
    for m in range(2):
        leaf = torch.cat([x, tail]).requires_grad_()
        call = LinearCall(
            recipe=FAST[name], key=replace(KEY, micro_batch=m), main_grad=main_grad,
            weight_codes=codes, **options,
        )  # fmt: skip
        refused = grouped_cuda.reason(leaf, weight, call)
        assert (refused is None) is together, refused
        if not main_grad:
            weight.grad = None
        y = grouped_linear(leaf, weight, counts, call=call)
        y.backward(torch.cat([dy, grad_tail]))
    assert len(y) == len(x) + 7
    for part in (y, leaf.grad):
        assert not part[len(x) :].any(), "rows of no expert are zero"
    dw = weight.main_grad - 0.25 if main_grad else weight.grad
    return y.detach()[: len(x)], leaf.grad[: len(x)], dw


def check_results(name, counts, device, monkeypatch, main_grad):
    tensors = data(counts, device)
    got, want = (
        run(name, tensors, counts, together, monkeypatch, main_grad) for together in (True, False)
    )
    for what, a, b in zip(("y", "dx"), got, want):
        for e, (p, q) in enumerate(zip(a.split(counts), b.split(counts))):
            assert bool(torch.isfinite(p).all()), f"{what} of expert {e} is not finite"
            assert_close(p, q, "bf16_output", f"{what} of expert {e}")
    # Sums on FP8 cores keep fewer bits; both add to 0.25 in fp32.
    for e, (p, q) in enumerate(zip(got[2], want[2])):
        if not counts[e]:
            assert not p.any(), f"dw of expert {e} without tokens"
        else:
            bound = "fp8_core_full" if main_grad else "bf16_output"
            assert_close(p, q, bound, f"dw of expert {e}")


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("main_grad", [True, False])
@each_counts
@each_recipe
def test_results_are_those_of_one_by_one(name, counts, main_grad, place, monkeypatch):
    check_results(name, COUNTS[counts], place, monkeypatch, main_grad)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("counts", FEW)
@each_recipe
def test_interpreted_results(name, counts, place, monkeypatch):
    check_results(name, FEW[counts], place, monkeypatch, True)


@pytest.mark.parametrize("device", ["cpu"])
def test_interpreted_bf16_results(place, monkeypatch):
    for main_grad in (True, False):
        check_results("bf16", COUNTS["ragged"], place, monkeypatch, main_grad)


PRODUCTS = {
    "bf16": (torch.bfloat16, torch.bfloat16, "bf16_core_sum"),
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn, "fp8_core_full"),
    "e5m2": (torch.float8_e5m2, torch.float8_e4m3fn, "fp8_core_full"),
}
# n and k that tiles do not divide, and a k below one tile.
SIZES = [(400, 336), (48, 16), (256, 512)]


def tiles_of(kind, cores):
    found = grouped.TILES[kind, cores]
    return [found, replace(found, described=False), replace(found, n=128, described=False)]


@pytest.mark.gpu
@pytest.mark.parametrize("variant", range(3), ids=["descriptors", "pointers", "small"])
@pytest.mark.parametrize("kind", PRODUCTS)
@each_counts
def test_products_of_ragged_rows(counts, kind, variant):
    left, right, tolerance = PRODUCTS[kind]
    groups = groups_of(COUNTS[counts], torch.device("cuda"))
    tile = tiles_of("rows", "bf16" if kind == "bf16" else "fp8")[variant]
    for n, k in SIZES:
        a = torch.randn(groups.rows + 5, k, device="cuda").to(left)
        b = torch.randn(len(groups), n, k, device="cuda").to(right)
        scale = torch.rand(len(groups), device="cuda") + 0.5
        turned = [b.transpose(1, 2).contiguous().transpose(1, 2)] if kind == "bf16" else []
        side = b.transpose(0, 1).contiguous().transpose(0, 1)  # as columns of a stack lie
        for dtype, bound in ((torch.float32, tolerance), (torch.bfloat16, "bf16_output")):
            options = {
                "rows": groups.rows + 5, "dtype": dtype,
                "alpha": grouped.Alpha(scale, scale, 0.125),
            }  # fmt: skip
            want = grouped.rows_matmul(a, b, groups, implementation="reference", **options)
            for each in (b, side, *turned):
                got = grouped.rows_matmul(
                    a, each, groups, implementation="triton", tile=tile, **options
                )
                what = f"{kind} {n}x{k} strides {each.stride()} {dtype}"
                assert bool(torch.isfinite(got).all()), what
                assert_close(got, want, bound, what)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", range(4), ids=["descriptors", "pointers", "small", "library"])
@pytest.mark.parametrize("kind", PRODUCTS)
@each_counts
def test_products_along_ragged_tokens(counts, kind, variant):
    left, right, tolerance = PRODUCTS[kind]
    groups = groups_of(COUNTS[counts], torch.device("cuda"))
    way = {"implementation": "cublaslt"}
    if variant < 3:
        tile = tiles_of("inner", "bf16" if kind == "bf16" else "fp8")[variant]
        way = {"implementation": "triton", "tile": tile}
    for m, n in SIZES:
        for padded in (True, False) if kind == "bf16" else (True,):
            tokens = 16 * groups.blocks if padded else groups.rows
            a, b = (torch.randn(s, tokens, device="cuda") for s in (m, n))
            a, b = a.to(left), b.to(right)
            if not padded:
                a, b = (x.t().contiguous().t() for x in (a, b))
            scale = torch.rand(len(groups), device="cuda") + 0.5
            scale[torch.tensor(groups.counts, device="cuda") == 0] = float("nan")
            for accumulate, dtype in (
                (True, torch.float32), (False, torch.float32), (False, torch.bfloat16),
            ):  # fmt: skip
                start = torch.full((len(groups), m, n), float("nan"), device="cuda", dtype=dtype)
                start = start.fill_(0.5) if accumulate else start
                options = {
                    "padded": padded, "accumulate": accumulate,
                    "alpha": grouped.Alpha(scale, scale, 0.125),
                }  # fmt: skip
                want, got = (
                    grouped.inner_matmul(a, b, groups, out=start.clone(), **options, **how)
                    for how in ({"implementation": "reference"}, way)
                )
                what = f"{kind} {m}x{n} padded {padded} accumulate {accumulate}"
                assert bool(torch.isfinite(got).all()), what
                bound = "bf16_output" if dtype is torch.bfloat16 else tolerance
                assert_close(got, want, bound, what)


@pytest.mark.gpu
@each_counts
def test_products_of_torch(counts):
    """torch's own grouped product of bf16, which is taken where there are no scales."""
    groups = groups_of(COUNTS[counts], torch.device("cuda"))
    a = torch.randn(groups.rows + 5, 64, device="cuda").bfloat16()
    b = torch.randn(len(groups), 96, 64, device="cuda").bfloat16()
    for each in (b, b.transpose(1, 2).contiguous().transpose(1, 2)):
        options = {"rows": groups.rows + 5, "dtype": torch.bfloat16}
        got, want = (
            grouped.rows_matmul(a, each, groups, implementation=name, **options)
            for name in ("torch", "reference")
        )
        assert_close(got, want, "bf16_output", f"strides {each.stride()}")


@pytest.mark.gpu
@each_recipe
def test_nothing_waits_for_the_device(name):
    x, w, dy = data([3, 0, 77], "cuda")
    weight = torch.nn.Parameter(w)
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(w).float(), False
    flag = torch.zeros((), dtype=torch.bool, device="cuda")
    call = LinearCall(recipe=FAST[name], key=KEY, nonfinite=flag, main_grad=True)
    # Sign vectors are copied from the host once.
    grouped_linear(x.clone().requires_grad_(), weight, [3, 0, 77], call=call).backward(dy)
    call.weight_codes = WeightCodes()
    leaf = x.clone().requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_linear(leaf, weight, [40, 39, 1], call=call).backward(dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def fitting(**options):
    return LinearCall(**({"recipe": RECIPES["nvfp4"], "key": KEY} | options))


@each_recipe
def test_recipes_that_are_taken_together(name):
    assert grouped_cuda.recipe_reason(fitting(recipe=FAST[name])) is None


@pytest.mark.parametrize("name", sorted(SLOW))
def test_recipes_that_go_one_by_one(name):
    why = grouped_cuda.recipe_reason(fitting(recipe=RECIPES[name]))
    if name == "nvfp4_4over6":
        # Square tiles with a choice of scales: the weight's.
        assert "fprop.w is 'nvfp4 16x16 4over6_mse'" in why
    else:
        assert why is not None


class Cut(LocalComm):
    def __init__(self, origin):
        self.place = origin

    def origin(self, name):
        return self.place


def test_reasons(monkeypatch):
    """Each says what it is about; none looks at how many tokens an expert has."""
    x, w, _ = data([4], "cpu")
    weight = torch.nn.Parameter(w)
    assert "on cpu" in grouped_cuda.reason(x, weight, fitting())
    monkeypatch.setattr(grouped_cuda, "device_reason", lambda x: None)
    assert grouped_cuda.reason(x, weight, fitting()) is None
    assert grouped_cuda.reason(x[:0], weight, fitting()) is None
    assert "forced" in grouped_cuda.reason(x, weight, fitting(implementation="reference"))
    assert "observed" in grouped_cuda.reason(x, weight, fitting(observer=object()))
    assert "blocks of rows" in grouped_cuda.reason(x, weight, fitting(row_block=64))
    table = replace(KEY, table=KeyTable("cpu"))
    assert "device memory" in grouped_cuda.reason(x, weight, fitting(key=table))
    assert "checked at once" in grouped_cuda.reason(x, weight, fitting(check_finite=True))
    assert "bf16 only, got torch.float32" in grouped_cuda.reason(x.float(), weight, fitting())
    assert "(1, 64, 40)" in grouped_cuda.reason(x, weight[:, :, :40], fitting())
    assert "not contiguous" in grouped_cuda.reason(x, weight.transpose(1, 2), fitting())
    runs = Runs(rows=((4, 0),), columns=((32, 0), (32, 96)))
    for place in (runs, (8, 0), (0, 8)):
        assert "dgrad.dy lies at" in grouped_cuda.reason(x, weight, fitting(comm=Cut(place)))
    # Nothing random: places do not matter.
    nearest = fitting(recipe=RECIPES["fp8_tensorwise"], comm=Cut(runs))
    assert grouped_cuda.reason(x, weight, nearest) is None
    monkeypatch.setattr(grouped_cuda, "ENABLED", False)
    assert "ENABLED" in grouped_cuda.reason(x, weight, fitting())
