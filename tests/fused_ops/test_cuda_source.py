# SPDX-License-Identifier: Apache-2.0
"""The CUDA source compiles for every GPU it is meant for, and uses what each of them has."""

import subprocess

import pytest
import torch

from fused_ops import cases
from fused_ops.formats import OperandSpec
from fused_ops.quantize import cuda_backend, reference

NEAREST = OperandSpec(format="nvfp4"), OperandSpec(format="nvfp4", hadamard=16)
FAST = (
    OperandSpec(format="nvfp4", scale="pow2", rounding="stochastic"),
    OperandSpec(format="nvfp4", scale="pow2", rounding="stochastic", hadamard=16),
)
X = (
    OperandSpec(format="nvfp4", choice="4over6_mse"),
    OperandSpec(format="nvfp4", scale="pow2", choice="better_of_two", hadamard=16),
)


def compile_to(folder, target, pair, forms, kind):
    """The compiler's log and output for one pair: assembly ("ptx") or machine code ("cubin")."""
    nvcc = cuda_backend.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc is not installed: nothing can compile the CUDA source here")
    macros = cuda_backend.pair_macros(*pair, forms, True)
    out = folder / f"pair.{kind}"
    flags = [f for f in cuda_backend.nvcc_flags(target, macros) if not f.startswith("-gencode")]
    number = target.removeprefix("sm_")
    arch = f"compute_{number}a" if kind == "ptx" else f"sm_{number}a"
    command = [nvcc, "-std=c++17", f"-arch={arch}", *flags, f"-{kind}", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, "-o", str(out), str(cuda_backend.SOURCE)],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stderr, out.read_bytes()


@pytest.mark.parametrize("target", cuda_backend.TARGETS)
@pytest.mark.parametrize("pair", [FAST, X], ids=["dy", "x"])
def test_every_target_compiles_without_spills(target, pair, tmp_path):
    forms = ("fp8", "fp8") if pair is FAST else ("fp8", "codes")
    log, code = compile_to(tmp_path, target, pair, forms, "cubin")
    assert len(code) > 4096
    assert "0 bytes spill stores" in log


@pytest.mark.parametrize("target", cuda_backend.TARGETS)
def test_blackwell_converts_by_itself(target, tmp_path):
    _, assembly = compile_to(tmp_path, target, NEAREST, ("codes", "codes"), "ptx")
    assert (b"e2m1x2" in assembly) is (target != "sm_90")
    assert b"fma.rn" in assembly or target != "sm_90"


def test_a_pair_is_described_by_its_macros():
    macros = cuda_backend.pair_macros(*X, ("fp8", "codes"), False)
    assert {"-DR_CHOICE=1", "-DR_NUMERATOR=1536.0f", "-DR_FORM=1", "-DR_SHIFT=2"} <= set(macros)
    assert {"-DC_POW2=true", "-DC_SR=false", "-DC_HADAMARD=true", "-DC_SIGNS=-1"} <= set(macros)
    mask = sum(1 << i for i, sign in enumerate(_fixed_signs()) if sign < 0)
    assert mask == cuda_backend.FIXED_SIGNS_MASK


def test_a_kind_has_its_tile(monkeypatch):
    kind, tile = ("nearest", "e4m3", "bf16"), cuda_backend.TILE | {"rows": 128, "blocks": 2}
    forms, x = ("bf16", "codes"), torch.zeros(16, 16, dtype=torch.bfloat16)
    before = cuda_backend.pair_macros(*NEAREST, forms, True)
    assert "-DTILE_ROWS=64" in before
    assert cuda_backend.pair_macros(*NEAREST, forms, True) is before, "no launch makes them again"
    monkeypatch.setattr(cuda_backend, "TILES", {kind: tile})
    monkeypatch.setattr(cuda_backend, "pair_supports", lambda *args: "asked")
    assert cuda_backend.kind_of(NEAREST[0], forms) == kind
    assert "-DTILE_ROWS=128" in cuda_backend.pair_macros(*NEAREST, forms, True)
    assert "-DTILE_ROWS=64" in cuda_backend.pair_macros(*FAST, forms, True)
    assert "-DTILE_ROWS=32" in cuda_backend.pair_macros(*FAST, forms, True, tile | {"rows": 32})
    assert cuda_backend.preferred(x, *NEAREST, forms=forms) == "asked"
    assert "Triton is faster" in cuda_backend.preferred(x, *NEAREST)
    assert cuda_backend.preferred(x, *FAST) == "asked"


def _fixed_signs():
    from fused_ops.quantize.hadamard import FIXED_SIGNS

    return FIXED_SIGNS


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3), (12, 0), (12, 1), (8, 9)])
def test_a_device_that_the_source_is_not_for_gets_triton_with_a_reason(
    capability, caplog, monkeypatch
):
    """sm_120 and sm_121 lack the conversion with stochastic rounding, and most shared memory."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda_backend._target_reason.cache_clear()
    caplog.set_level("INFO", cuda_backend.__name__)
    target = f"sm_{capability[0]}{capability[1]}"
    reason = cuda_backend._target_reason(torch.device("cuda", 0))
    cuda_backend._target_reason.cache_clear()
    if target in cuda_backend.TARGETS:
        assert reason is None
        assert not caplog.messages
    else:
        assert reason == f"the CUDA source is for sm_90, sm_100, sm_103, the device is {target}"
        assert caplog.messages == [reason + ": Triton quantizes instead, the same bytes"]


def test_the_device_is_asked_for_before_anything_is_built(monkeypatch):
    monkeypatch.setattr(cuda_backend.triton_backend, "pair_supports", lambda *_a, **_k: None)
    monkeypatch.setattr(cuda_backend, "_missing", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))
    x = torch.zeros(16, 16, dtype=torch.bfloat16)
    assert "the device is sm_120" in cuda_backend.preferred(x, *FAST)
    cuda_backend._target_reason.cache_clear()


@pytest.mark.parametrize("fault", [None, "codes", "small rows", "no build"])
def test_a_build_is_trusted_when_its_bytes_are_tritons(monkeypatch, caplog, fault):
    """It is compiled on the user's machine: other bytes, or none, and Triton is taken instead."""
    x, calls = cases.make_input("gaussian", (64, 96), 4), []
    amax = x.abs().max().float()
    arguments = {"amaxes": (amax, 4 * amax), "keys": ((1, 2), (3, 4))}

    def built(sample, row, column, **arguments):
        calls.append(sample.shape)
        if fault == "no build":
            raise RuntimeError("nvcc fatal: Unsupported gpu architecture\nand more")
        first, second = reference.quantize_pair(sample, row, column, **arguments)
        if fault == "codes" or (fault == "small rows" and sample[1].abs().max() < amax * 2.0**-9):
            second.codes[-1, -1] ^= 1
        return first, second

    monkeypatch.setattr(cuda_backend, "_compared", {})
    monkeypatch.setattr(cuda_backend, "pair_supports", lambda *args: None)
    monkeypatch.setattr(cuda_backend, "quantize_pair", built)
    monkeypatch.setattr(cuda_backend.triton_backend, "quantize_pair", reference.quantize_pair)
    said = {None: None, "no build": "could not be built: nvcc fatal"}.get(fault, "other bytes than")
    for _ in range(2):
        reason = cuda_backend.preferred(x, *FAST, **arguments)
        assert reason is None if said is None else said in reason
    assert len(calls) == (1 if fault == "no build" else 2)
    assert len(caplog.records) == (said is not None)


def test_a_comparison_without_memory_says_nothing_of_the_build(monkeypatch, caplog):
    """Triton takes that call alone: the next one compares again, and trusts the build."""
    x, left = cases.make_input("gaussian", (64, 96), 4), [0, 1, 4]
    amax = x.abs().max().float()
    arguments = {"amaxes": (amax, 4 * amax), "keys": ((1, 2), (3, 4))}

    def quantize_pair(sample, row, column, **arguments):
        if not left[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB.")
        left[0] -= 1
        return reference.quantize_pair(sample, row, column, **arguments)

    monkeypatch.setattr(cuda_backend, "_compared", {})
    monkeypatch.setattr(cuda_backend, "pair_supports", lambda *args: None)
    monkeypatch.setattr(cuda_backend, "quantize_pair", quantize_pair)
    monkeypatch.setattr(cuda_backend.triton_backend, "quantize_pair", quantize_pair)
    for _ in range(2):
        reason = cuda_backend.preferred(x, *FAST, **arguments)
        assert reason == "no memory was left to compare the build with Triton: a later call does"
        del left[0]
    assert cuda_backend.preferred(x, *FAST, **arguments) is None
    assert not caplog.records
