# SPDX-License-Identifier: Apache-2.0
import pytest

from tools import compile_kernels

pytest.importorskip("triton")


def test_a_kernel_compiles_without_a_gpu(capsys):
    assert compile_kernels.main(["--target", "sm_90", "--only", "amax_flat"]) == 0
    line = capsys.readouterr().out
    assert "amax_flat" in line
    assert "tensor core none" in line
    assert int(line.split("registers ")[1].split(",")[0]) > 8


def test_a_kernel_that_does_not_list_the_target(monkeypatch, capsys):
    other = compile_kernels.Variant("amax_flat", "x", {}, 4, targets=("sm_100",))
    monkeypatch.setattr(compile_kernels, "variants", lambda: [other])
    assert compile_kernels.main(["--target", "sm_90"]) == 0
    assert "not for this target" in capsys.readouterr().out


def test_a_failure_is_named_and_fails(monkeypatch, capsys):
    broken = compile_kernels.Variant("no_such_kernel", "x", {}, 4)
    monkeypatch.setattr(compile_kernels, "variants", lambda: [broken])
    assert compile_kernels.main(["--target", "sm_90"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_every_quantizer_is_compiled_in_both_directions():
    found = {(v.kernel, v.label) for v in compile_kernels.variants()}
    rows = {label for kernel, label in found if kernel == "quantize_rows"}
    assert rows == {label for kernel, label in found if kernel == "quantize_columns"}
    assert len(rows) >= 8


def test_a_kernel_that_needs_more_shared_memory_than_there_is_fails(monkeypatch, capsys):
    """It would crash at its first launch: sm_120 has 99 KiB where sm_90 has 227."""
    monkeypatch.setitem(compile_kernels.SHARED_MEMORY, "sm_120", -1)
    assert compile_kernels.main(["--target", "sm_120", "--only", "amax_flat"]) == 1
    assert "bytes of shared memory, and a program has -1 on sm_120" in capsys.readouterr().out


def test_kernels_of_experts_are_listed():
    """Both kinds of product on both kinds of cores, by descriptors and by pointers."""
    labels = [v.label for v in compile_kernels.variants() if v.op == "scaled_matmul"]
    for cores in ("bf16", "fp8"):
        for how in ("descriptors", "pointers"):
            assert sum(cores in label and how in label for label in labels) >= 3
    kernels = {v.kernel for v in compile_kernels.variants()}
    assert {"grouped_rows", "grouped_inner", "grouped_quantize", "grouped_requantize"} <= kernels
    assert {"grouped_amax", "grouped_cast_fp8"} <= kernels
