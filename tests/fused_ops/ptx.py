# SPDX-License-Identifier: Apache-2.0
"""The inline PTX of the quantizers in numpy, so that Triton's interpreter runs them truthfully.

The interpreter refuses inline assembly, rounds FP8 wrongly and does not fuse; here each snippet
is recognised by its text and computed, and the conversions are replaced by torch's.
"""

import importlib
import importlib.util
import sys

import numpy as np
import torch

from tests.fused_ops.kernels import interpret

MODULES = (
    "quantize.triton_block_kernels",
    "quantize.triton_fp8_kernels",
    "quantize.triton_kernels",
    "quantize.triton_wide_kernels",
    "quantize.triton_decode_kernels",
    "quantize.triton_amax_kernels",
    "quantize.triton_grouped_kernels",
    "scaled_matmul.triton_grouped_kernels",
    "scaled_matmul.triton_blockwise_kernels",
)


class _Results:
    def __init__(self, handles):
        self.handles = handles

    def get_result(self, index):
        return self.handles[index]


def _f32(handle):
    return handle.data.view(np.float32)


def _word(values):
    return np.ascontiguousarray(values).view(np.int32)


def _bf16(x):
    """Bits of fp32 rounded to bf16, nearest even."""
    bits = torch.from_numpy(np.array(x)).bfloat16().view(torch.int16).numpy()
    return bits.view(np.uint16).astype(np.uint32)


def _e4m3(x):
    """Bits of fp32 rounded to E4M3, nearest even, saturating."""
    t = torch.from_numpy(np.array(x))
    clamped = torch.where(t.isnan(), t, t.clamp(-448, 448))
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _e5m2(x):
    """Bits of fp32 rounded to E5M2, nearest even, saturating."""
    t = torch.from_numpy(np.array(x))
    clamped = torch.where(t.isnan(), t, t.clamp(-57344, 57344))
    return clamped.to(torch.float8_e5m2).view(torch.uint8).numpy()


def _toward_zero(exact):
    """fp64 -> fp32, rounded toward zero (exact >= 0)."""
    near = exact.astype(np.float32)
    return np.where(near > exact, np.nextafter(near, np.float32(0)), near)


def _code(t, u=None):
    """2**23 + E2M1 code of |t|: see _nearest_code and _stochastic_code."""
    a = np.abs(t).astype(np.float64)
    keep = np.float32 if u is None else _toward_zero
    one, two, four = (np.clip(a * 0.5 - n, 0, 1).astype(np.float32) for n in range(3))
    start = np.float64(2**23) if u is None else u.astype(np.float64)
    r = keep(one.astype(np.float64) * 4 + start)
    r = keep(two.astype(np.float64) * 2 + r)
    r = keep(four.astype(np.float64) + r)
    if u is not None:
        r = keep(r.astype(np.float64) + 2**23)
    return _word(np.asarray(r, dtype=np.float32))


def _snippet(asm, values):
    """What the assembly gives, as a list of arrays, or None for a store."""
    data = [v.data for v in values]
    if asm.startswith("ld.global.v4"):
        found = []
        for part in range(4):
            at = data[0].astype(np.uint64) + np.uint64(4 * part)
            mask = np.ones_like(at, dtype=bool)
            zero = np.zeros_like(at, dtype=np.int32)
            found.append(_memory().load(at, mask, zero, np.dtype(np.int32)))
        return found
    if "ld.global.b16" in asm or "ld.global.b32" in asm:
        kind = np.dtype(np.int16 if "b16" in asm else np.int32)
        at, mask = data[0].astype(np.uint64), data[1] != 0
        word = _memory().load(at, mask, np.zeros(at.shape, kind), kind).astype(np.int32)
        return [word << 16 if kind.itemsize == 2 else word]
    if "st.global.v4" in asm:
        for part in range(4):
            at = data[0].astype(np.uint64) + np.uint64(4 * part)
            _memory().store(at, data[1 + part].astype(np.int32), data[5] != 0)
        return [np.zeros_like(data[5])]
    if asm.startswith("mov."):
        return [data[0]]
    if "max.u16x2" in asm:
        halves = [np.ascontiguousarray(d).view(np.uint16) for d in np.broadcast_arrays(*data)]
        return [np.maximum(*halves).view(np.int32)]
    if "bf16x2" in asm:
        low, high = (_bf16(_f32(v)) for v in values)
        return [_word((low | (high << 16)).astype(np.uint32))]
    if "e4m3x2" in asm or "e5m2x2" in asm:
        encode = _e4m3 if "e4m3x2" in asm else _e5m2
        parts = [encode(_f32(v)).astype(np.uint32) << (8 * i) for i, v in enumerate(values)]
        return [_word(parts[0] | parts[1] | parts[2] | parts[3])]
    if "0x0073" in asm:
        tops = [(v.data.view(np.uint32) >> 24) << (8 * i) for i, v in enumerate(values)]
        return [_word(tops[0] | tops[1] | tops[2] | tops[3])]
    if "prmt.b32" in asm:
        byte = int(asm[asm.index("0x765") + 5])
        words = [d.view(np.uint32) for d in data]
        return [_word((words[1] & 0xFFFFFF00) | ((words[0] >> (8 * byte)) & 0xFF))]
    assert "abs.f32" in asm, f"unknown assembly {asm}"
    return [_code(*map(_f32, values))]


def _memory():
    from triton._C.libtriton import interpreter

    return interpreter


def emulate(monkeypatch):
    """Until the test ends, all Triton kernels of experts run on a CPU."""
    import triton.language as tl
    from triton.runtime import interpreter

    import fused_ops.quantize as package

    for name in MODULES:  # as they are otherwise, before any is seen by the interpreter alone
        importlib.import_module(f"fused_ops.{name}")
    interpret(monkeypatch, package)
    builder = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle

    def inline_asm(self, asm, constraints, values, types, is_pure, pack):
        shape = np.broadcast_shapes(*(v.data.shape for v in values))
        for v in values:
            v.data = np.ascontiguousarray(np.broadcast_to(v.data, shape))
        found = _snippet(asm.strip(), values)
        return _Results([handle(f, t.scalar) for f, t in zip(found, types)])

    def convert(original, self, src, target, *_mode):
        if target.scalar == tl.float8e4nv:
            return handle(_e4m3(src.data), target.scalar)
        if target.scalar == tl.float8e5:
            near = torch.from_numpy(np.array(src.data)).to(torch.float8_e5m2)
            return handle(near.view(torch.uint8).numpy(), target.scalar)
        if src.dtype.scalar == tl.float8e4nv and target.scalar == tl.float32:
            bytes_ = torch.from_numpy(src.data.view(np.uint8)).view(torch.float8_e4m3fn)
            return handle(bytes_.float().numpy(), target.scalar)
        if src.dtype.scalar == tl.float8e5 and target.scalar == tl.float32:
            bytes_ = torch.from_numpy(src.data.view(np.uint8)).view(torch.float8_e5m2)
            return handle(bytes_.float().numpy(), target.scalar)
        if src.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return handle(_bf16(src.data).astype(np.uint16), target.scalar)
        return original(self, src, target, *_mode)

    def fma(self, x, y, z):
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data
        return handle(exact.astype(z.data.dtype), z.dtype.scalar)

    monkeypatch.setattr(builder, "create_inline_asm", inline_asm)
    monkeypatch.setattr(
        tl.core.tuple, "__radd__", lambda self, other: (*other, *self.values), raising=False
    )
    for name in ("create_fp_to_fp", "create_fp_trunc", "create_fp_ext"):
        original = getattr(builder, name)
        monkeypatch.setattr(
            builder, name, lambda self, *args, original=original: convert(original, self, *args)
        )
    monkeypatch.setattr(builder, "create_fma", fma)
    for name in MODULES:
        full = f"fused_ops.{name}"
        spec = importlib.util.find_spec(full)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, full, module)
        spec.loader.exec_module(module)
        parent, _, child = full.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
