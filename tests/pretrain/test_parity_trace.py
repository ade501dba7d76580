# SPDX-License-Identifier: Apache-2.0
"""Every operand of every layer in two processes is one process's, and a fault in one is seen.

One start of two ranks trains the toy in each layout as it is, and then with a fault in it.
"""

import math
import re
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fused_ops import linear
from fused_ops.formats import OperandSpec
from fused_ops.quantize import quantize
from fused_ops.recipe import RECIPES, GemmRecipe
from models import operand_cuts
from models.comm import TensorParallelComm
from models.config import ParallelConfig
from models.operand_cuts import OperandCuts
from pretrain.initialize import initialize
from pretrain.parity import matrix
from pretrain.parity.layouts import parse_layout
from pretrain.parity.matrix import FIGURES, FP32_BOUNDS, Difference, Plan, Row, run
from pretrain.parity.orders import one_code_flipped
from pretrain.parity.toy import read_case
from pretrain.parity.trace import Found, Trace, check
from pretrain.parity.train import ONE_PROCESS, Trajectory, build, save_weights, train
from tests.distributed import run_distributed
from tools import parity

BOUND = FP32_BOUNDS["weight"]


def nvfp4(**fields):
    return OperandSpec(format="nvfp4", **fields)


def register():
    """Recipes of a run's own: row scales everywhere, and MS-EDEN in the backward."""
    nearest = nvfp4(row_scaled=True)
    dithered = replace(nearest, rounding="stochastic")
    rows = GemmRecipe(
        name="rows", fprop_x=nearest, fprop_w=nearest, dgrad_dy=dithered, dgrad_w=nearest,
        wgrad_dy=replace(dithered, hadamard=16), wgrad_x=replace(nearest, hadamard=16),
    )  # fmt: skip
    step, batch = {"hadamard": 16, "signs": "step"}, {"hadamard": 16, "signs": "micro_batch"}
    eden = GemmRecipe(
        name="eden", fprop_x=nvfp4(), fprop_w=nvfp4(), dgrad_dy=nvfp4(rounding="ms_eden", **step),
        dgrad_w=nvfp4(source="forward", **step), wgrad_dy=nvfp4(rounding="ms_eden", **batch),
        wgrad_x=nvfp4(**batch),
    )  # fmt: skip
    RECIPES.update(rows=rows, eden=eden)


# Recipe, layout and activations.
PLAIN = [
    ("rows", "tp2sp", "fp32"), ("eden", "cp2", "bf16"), ("nvfp4_fast_a8", "cp2", "fp32"),
]  # fmt: skip
MORE = [
    ("rows", "tp2", "fp32"), ("rows", "tp2sp", "bf16"), ("rows", "cp2", "fp32"),
    ("eden", "tp2sp", "fp32"),
]  # fmt: skip


@contextmanager
def changed(where, name, make):
    before = getattr(where, name)
    setattr(where, name, make(before))
    try:
        yield
    finally:
        setattr(where, name, before)


def at_start(operand):
    """The dither of an operand begins at the first row and column on every rank."""
    return changed(
        OperandCuts, "origin", lambda f: lambda s, n: (0, 0) if n == operand else f(s, n)
    )


def own_amax(operand):
    return changed(
        OperandCuts, "amax_groups", lambda f: lambda s, n: [] if n == operand else f(s, n)
    )


def one_dither(operand):
    """What is quantized lies elsewhere, and the trace is told where it ought to lie."""
    from fused_ops import operands

    class Moved:
        def __init__(self, comm):
            self.comm = comm

        def __getattr__(self, name):
            return getattr(self.comm, name)

        def origin(self, name):
            return (0, 0)

    def make(before):
        def quantize(call, name, *args, **options):
            if name == operand:
                call = replace(call, comm=Moved(call.comm))
            return before(call, name, *args, **options)

        return quantize

    return changed(operands, "quantize_operand", make)


def wrong_axis():
    """Row scales are shared where the ranks hold other rows, and not where they hold parts."""
    swapped = {"in": "out", "out": "in", "tokens": "tokens"}
    axes = {name: swapped[axis] for name, axis in operand_cuts._CONTRACTED.items()}
    return changed(operand_cuts, "_CONTRACTED", lambda before: {**before, **axes})


def no_sum():
    return changed(TensorParallelComm, "reduce_input_grad", lambda f: lambda s, dx: (dx, None))


AMAX, OTHER = "another amax", "are not those that one process"
COPIES = "the same place of the tensor and hold other values"
# What is wrong, in which layout, and what is said of which operand.
FAULTS = {
    "places of dgrad.dy": (lambda: at_start("dgrad.dy"), "tp2", "dgrad.dy", COPIES),
    "dither of wgrad.dy": (lambda: one_dither("wgrad.dy"), "tp2", "wgrad.dy", OTHER),
    "amax of fprop.x": (lambda: own_amax("fprop.x"), "tp2", "fprop.x", AMAX),
    "axis of row scales": (wrong_axis, "tp2", "fprop.w", AMAX),
    "sum of dgrad": (no_sum, "tp2", "dgrad.dy", COPIES),
}


def traced(case, layout, start):
    engine, trace = build(case, parse_layout(layout), "cpu"), Trace()
    trace.attach(engine)
    train(case, engine, Path(start))
    return trace


def two_ranks(starts, pattern, plain, faults):
    register()
    dist.init_process_group("gloo")
    said = {}
    for recipe, layout, dtype in plain:
        case = read_case(pattern, f"{recipe}:{dtype}", 1)
        said[recipe, layout, dtype] = traced(case, layout, starts[dtype]).pieces
    case = read_case(pattern, "rows:fp32", 1)
    for name in faults:
        fault, layout, *_ = FAULTS[name]
        with fault():
            said[name] = traced(case, layout, starts["fp32"]).pieces
    return said


def seen(folder, plain, faults=()):
    """What each rank saw, and what one process saw."""
    register()
    pattern = "M*"
    starts = {dtype: str(folder / dtype) for dtype in ("fp32", "bf16")}
    one = {}
    for recipe, dtype in dict.fromkeys((recipe, dtype) for recipe, _, dtype in plain):
        case, place = read_case(pattern, f"{recipe}:{dtype}", 1), starts[dtype]
        if not Path(place).exists():
            save_weights(build(case, ONE_PROCESS, "cpu"), Path(place))
        one[recipe, dtype] = traced(case, "dp1", place)
    arguments = (starts, pattern, plain, list(faults))
    return run_distributed(two_ranks, 2, timeout=500, args=arguments), one


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return seen(tmp_path_factory.mktemp("trace"), PLAIN, FAULTS)


@pytest.mark.parametrize("plain", PLAIN, ids=" ".join)
def test_ranks_quantize_as_one_process_would(said, plain):
    """Codes, scales and amaxes of in_proj, out_proj, qkv and proj: forward, both gradients.

    Samples are of several documents, which the layers keep apart.
    BF16 activations differ by their own rounding: codes are held to them, and they to nothing.
    """
    hold(said, plain)


@pytest.mark.slow
def test_ranks_of_other_layouts_do_too(tmp_path):
    found = seen(tmp_path, MORE)
    for plain in MORE:
        hold(found, plain)


def hold(said, plain):
    ranks, one = said
    recipe, _, dtype = plain
    bound = BOUND if dtype == "fp32" else math.inf
    found = check(one[recipe, dtype], [rank[plain] for rank in ranks], bound)
    assert found.fault == ""
    assert found.operands == 6 * 4 * 4, "operands, layers, micro-batches"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(said, fault):
    ranks, one = said
    found = check(one["rows", "fp32"], [rank[fault] for rank in ranks], BOUND)
    assert re.match(r"step 1, micro-batch \d, layers\.\d\.", found.fault), fault
    operand, words = FAULTS[fault][2:]
    assert operand in found.fault
    assert words in found.fault


def test_a_flip_is_no_fault(said):
    """The same tensor to FP32 order, and one code of it is another in one process's training."""
    _, one = said
    start = one["rows", "fp32"]
    assert check(start, [start.pieces], BOUND) == Found(operands=96)
    event = (1, 2, "layers.1.self_attention.linear_proj", "dgrad.dy")
    values = start.pieces[event].values.clone()
    values[5, 7] += 1
    pieces = {**start.pieces, event: replace(start.pieces[event], values=values)}
    found = check(Trace(pieces, start.calls), [start.pieces], BOUND)
    assert (found.operands, found.fault) == (96, "")
    assert found.first == (
        "step 1, micro-batch 2, layers.1.self_attention.linear_proj, dgrad.dy: "
        "1 of 8192 values, tensor off by 0.0e+00"
    )
    # The other way round the codes are not what the tensor gives.
    assert "1 of 8192 values on rank 0" in check(start, [pieces], BOUND).fault


def test_another_run_between_two_of_parity():
    """It has left groups of its own, and those of before are gone."""
    case = read_case("-", "fp32", 1)
    build(case, ONE_PROCESS, "cpu")
    initialize(ParallelConfig(), device="cpu", seed=1)
    assert build(case, ONE_PROCESS, "cpu").world.groups.tp.size() == 1


def test_one_code_becomes_its_neighbour():
    x = quantize(torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), nvfp4())
    w = torch.eye(64)
    before = linear.scaled_matmul
    plain = before(x, w, out_dtype=torch.float32)
    with one_code_flipped(0):
        first, second = (linear.scaled_matmul(x, w, out_dtype=torch.float32) for _ in range(2))
    assert linear.scaled_matmul is before
    assert int((first != plain).sum()) == 1
    assert torch.equal(second, plain)


BAND = Difference(**dict.fromkeys(FIGURES, 0.1))


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """A row out of its band whose ranks are said to have come to something."""

    class Ranks:
        def __init__(self, folder, processes, request):
            assert request["trace"]
            assert (processes, request["tasks"][0]["layout"]) == (2, "tp2")
            folder.mkdir()
            (folder / "seen.json").write_text('{"losses": [], "grad_norms": []}')

        def wait(self, timeout):
            pass

        def stop(self):
            pass

    def judge(update, again, found):
        case = read_case("*-", "nvfp4_fast:fp32", 1)
        out = Difference(**dict.fromkeys(FIGURES, update))
        band = Difference(**dict.fromkeys(FIGURES, 0.0))
        row = Row(case=case, layout=parse_layout("tp2"), difference=out, bound=band, band="orders")
        assert matrix._can_be_looked_at(row)
        found = Found(operands=9, **found)
        for name, value in {
            "Ranks": Ranks, "read_pieces": lambda *a: [], "check": lambda *a: found,
            "build": lambda *a: Engine(), "train": lambda *a: None, "weights_of": lambda *a: None,
            "compare": lambda *a: replace(out, update=again), "_again": lambda *a, **k: BAND,
        }.items():  # fmt: skip
            monkeypatch.setattr(matrix, name, value)
        reference = matrix._Reference(tmp_path, {}, Trajectory(losses=[], grad_norms=[]), {})
        plan = Plan(layouts=["tp2"], patterns=["*-"], recipes=[])
        return matrix._looked_at(row, reference, tmp_path, plan)

    class Engine:
        chunks = ()

    return judge


def test_a_flip_has_the_band_of_flips(judged):
    row = judged(0.2, 0.2, {"first": "step 1"})
    assert (row.passes, row.band, row.bound.update) == (True, "flips", pytest.approx(0.3))
    assert row.note == "9 operands are those of one process; the first flip: step 1"
    # What it prints: the reason stands under a row within this bound too.
    assert parity._lines(row)[1].endswith(row.note)


@pytest.mark.parametrize(
    ("update", "again", "found", "note"),
    [
        (0.4, 0.4, {"first": "step 1"}, "first flip: step 1"),  # more than flips do
        (0.2, 0.2, {"first": "step 1", "fault": "an amax"}, "an amax"),
        (0.2, 0.2, {}, "no code differs"),
        (0.2, 0.1, {"first": "step 1"}, "trained again, with whole operands"),
    ],
)
def test_what_is_out_of_bound_still(judged, update, again, found, note):
    row = judged(update, again, found)
    assert not row.passes
    assert note in row.note


def test_which_rows_are_looked_at():
    def row(pattern, recipe, **fields):
        out, band = (Difference(**dict.fromkeys(FIGURES, f)) for f in (1.0, 0.1))
        case = read_case(pattern, recipe, 1)
        fields = {"difference": out, "bound": band} | fields
        return matrix._can_be_looked_at(Row(case=case, layout=parse_layout("tp2"), **fields))

    assert row("M-*-", "nvfp4:fp32")
    assert not row("M-*-", "nvfp4:fp32", bound=Difference(**dict.fromkeys(FIGURES, 2.0)))
    assert not row("M-*-", "nvfp4:fp32", note="blocks are cut")
    assert not row("M-*E", "nvfp4:fp32")
    assert not row("M-*-", "nvfp4")
    assert not row("M-*-", "fp32")


@pytest.mark.slow
def test_flips_are_no_alarm():
    """Five orders of sums flip few codes; tensor-parallel ranks flip one in the first step."""
    plan = Plan(
        layouts=("tp2sp",), patterns=("*-*-",), recipes=("nvfp4_fast:fp32",), steps=2, timeout=240
    )
    (row,) = run(plan)
    assert row.passes
    assert row.band == "flips", "an order of sums that flips as much: take another seed"
    assert row.difference.update > 1e-3
