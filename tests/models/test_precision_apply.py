# SPDX-License-Identifier: Apache-2.0
"""The built model has exactly the GEMMs of the table, in every layout, and computes as printed."""

import collections

import pytest
import torch
from pydantic import TypeAdapter

from fused_ops import grouped_linear, linear
from fused_ops.formats import QuantizedTensor
from models.config import ParallelConfig
from models.parallel_linear import GemmModule
from models.precision import PrecisionState, apply_precision, named_gemms, plan_precision
from models.precision_config import PrecisionConfig
from tests.distributed import run_distributed
from tests.models import toy

MIXED = {
    "recipe": "nvfp4",
    "rules": [
        {"layers": "0", "modules": "*.linear_proj", "recipe": "bf16"},
        {"layers": "mtp", "recipe": "mxfp8"},
        {"modules": "*.mixer.out_proj", "gemms": ["wgrad"], "recipe": "mxfp8"},
        {"layers": "3", "recipe": "nvfp4_fast"},
        {"modules": "*.shared_experts.*", "recipe": "fp8_blockwise"},
    ],
}
GEMMS = ("fprop", "dgrad", "wgrad")
FIELDS = {"moe_shared_expert_intermediate_size": 32}


def precision(section):
    return TypeAdapter(PrecisionConfig).validate_python(section)


class Recorder:
    """What each operand of one module really was."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def wants(self, micro_batch):
        return True

    def observe(self, gemm, operand, tensor, quantized, call):
        self.seen[self.name, gemm, operand].add(text(quantized))


def text(operand):
    if isinstance(operand, QuantizedTensor):
        return operand.spec.label
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[operand.dtype]


def test_a_real_step_computes_exactly_the_printed_formats(monkeypatch):
    pattern = "*-M-*E/*-"
    chunks, _ = toy.make(pattern, dtype=torch.bfloat16, **FIELDS)
    plan = apply_precision(chunks, precision(MIXED), PrecisionState(seed=1))
    seen = collections.defaultdict(set)
    for name, module in named_gemms(chunks[0]):
        module.observer = Recorder(name, seen)
    products = {place: collections.Counter() for place in (linear, grouped_linear)}
    for place, counter in products.items():
        monkeypatch.setattr(place, "scaled_matmul", counting(place.scaled_matmul, counter))
    toy.loss_of(chunks[0]).sum().backward()

    rows = [row for row in plan.table() if row["recipe"] != "always high"]
    printed = {
        (row["name"], gemm, operand): {label}
        for row in rows
        for gemm in GEMMS
        for operand, label in row[gemm].items()
    }
    assert dict(seen) == printed
    assert len(set().union(*printed.values())) > 8

    # The same from below: every product that was made, by its operands.
    dense, routed = (
        collections.Counter(
            tuple(row[gemm].values())
            for row in rows
            for gemm in GEMMS
            if (".mlp.experts." in row["name"]) is grouped
        )
        for grouped in (False, True)
    )
    made = products[linear] + products[grouped_linear]
    assert set(made) == set(dense) | set(routed)
    for pair in set(dense) - set(routed):
        assert made[pair] == dense[pair], pair


def counting(matmul, counter):
    def wrapped(a, b, **options):
        counter[text(a), text(b)] += 1
        return matmul(a, b, **options)

    return wrapped


def test_modules_carry_what_the_table_says():
    chunks, _ = toy.make("*-M-*E/*-", dtype=torch.bfloat16, **FIELDS)
    state = PrecisionState(seed=1)
    plan = apply_precision(chunks, precision({**MIXED, "check_finite": True}), state)
    found = dict(named_gemms(chunks[0]))
    assert set(found) == {module.name for module in plan.modules}
    for name, module in found.items():
        assert (module.gemm_name, module.recipe) == (name, plan.recipe(name))
        assert module.precision_state is state
    assert state.check_finite
    assert not isinstance(chunks[0].output_layer, GemmModule)


def test_the_table_of_a_built_model_is_the_dry_runs():
    chunks, _ = toy.make("*-M-*E/*-", dtype=torch.bfloat16, **FIELDS)
    plan = apply_precision(chunks, precision(MIXED), PrecisionState())
    unbuilt = plan_precision(toy.section("*-M-*E/*-", FIELDS), precision(MIXED))
    assert plan.table() == unbuilt.table()


def test_a_linear_layer_outside_the_table_is_an_error():
    chunks, _ = toy.make("*-", dtype=torch.bfloat16)
    chunks[0].decoder.layers[1].mlp.extra = torch.nn.Linear(4, 4)
    with pytest.raises(AssertionError, match=r"in the model but not in the table.*mlp\.extra"):
        apply_precision(chunks, precision({}), PrecisionState())


def test_a_missing_linear_layer_is_an_error():
    chunks, _ = toy.make("*-", dtype=torch.bfloat16)
    del chunks[0].decoder.layers[1].mlp.linear_fc2
    with pytest.raises(AssertionError, match=r"in the table but not in the model.*linear_fc2"):
        apply_precision(chunks, precision({}), PrecisionState())


def test_a_linear_layer_that_takes_no_recipe_is_an_error():
    chunks, _ = toy.make("*-", dtype=torch.bfloat16)
    mlp = chunks[0].decoder.layers[1].mlp
    mlp.linear_fc2 = torch.nn.Linear(96, 64)
    with pytest.raises(AssertionError, match=r"without a recipe of their own.*linear_fc2"):
        apply_precision(chunks, precision({}), PrecisionState())


STAGED = {
    "pp2": ({"pipeline_model_parallel_size": 2}, "*-M-|*EM-/*-"),
    "pp2 uneven": ({"pipeline_model_parallel_size": 2}, "*-M|-*EM-/*-"),
    "pp2 interleaved": (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        "*-|M-|*E|M-/*-",
    ),
}


def _stages():
    """In each rank: the table, and the names of the linear layers that this rank holds."""
    found = {}
    for name, (layout, pattern) in STAGED.items():
        chunks, _ = toy.make(
            pattern, parallel=ParallelConfig(**layout), dtype=torch.bfloat16, **FIELDS
        )
        plan = apply_precision(chunks, precision(MIXED), PrecisionState())
        here = {n: m.recipe.name for chunk in chunks for n, m in named_gemms(chunk)}
        found[name] = (plan.table(), plan.flops_share(), here)
    return found


def test_every_pipeline_layout_has_one_table():
    chunks, _ = toy.make("*-M-*EM-/*-", dtype=torch.bfloat16, **FIELDS)
    whole = apply_precision(chunks, precision(MIXED), PrecisionState())
    recipes = {name: whole.recipe(name).name for name in dict(named_gemms(chunks[0]))}
    first, second = run_distributed(_stages, 2, timeout=800)
    for name in STAGED:
        for table, share, _ in (first[name], second[name]):
            assert table == whole.table(), name
            assert share == whole.flops_share()
        here, there = first[name][2], second[name][2]
        assert here
        assert there
        assert not here.keys() & there.keys()
        assert {**here, **there} == recipes, name
