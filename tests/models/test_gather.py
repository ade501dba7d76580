# SPDX-License-Identifier: Apache-2.0
"""Sequence-parallel gathers in codes give what gathers in BF16 give, bit for bit."""

import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from fused_ops import weight_operands
from fused_ops.formats import OperandSpec
from fused_ops.keys import StreamKey
from fused_ops.linear import LinearCall, Runs, linear
from fused_ops.recipe import RECIPES, GemmRecipe, get_recipe
from models.comm import TensorParallelComm
from models.config import ParallelConfig
from models.gather import TokenPart, packing_reason
from models.gather_bytes import gathers, plan_gathers
from models.gemms import GemmShape
from models.precision import PrecisionState, apply_precision
from models.precision_config import PrecisionConfig
from tests.distributed import run_distributed
from tests.models import toy

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
KINDS = ("column", "row")
PATTERN = "M-*E"
ROWS = GemmRecipe(
    name="row scales",
    fprop_x=OperandSpec(format="nvfp4", row_scaled=True),
    fprop_w=get_recipe("nvfp4").fprop_w,
    wgrad_x=OperandSpec(format="nvfp4", row_scaled=True),
    wgrad_dy=OperandSpec(format="nvfp4", rounding="stochastic"),
    dgrad_dy=OperandSpec(format="nvfp4", row_scaled=True, rounding="stochastic"),
    dgrad_w=OperandSpec(format="nvfp4", source="forward"),
)
FROM_CODES = replace(
    get_recipe("nvfp4_pow2"),
    name="from codes",
    wgrad_x=replace(get_recipe("nvfp4_pow2").wgrad_x, source="forward"),
)
LATE = get_recipe("nvfp4_fast").with_gemm("fprop", get_recipe("bf16"))
HIGH_WGRAD = get_recipe("nvfp4_fast").with_gemm("wgrad", get_recipe("bf16"))
LAYERS = [*RECIPES.values(), ROWS, FROM_CODES, LATE, HIGH_WGRAD]
SEQ, BATCH, IN, OUT = 256, 1, 64, 96
PART = SEQ // 2 * BATCH
TOYS = {
    "nvfp4": ("nvfp4", {"dtype": torch.bfloat16}),
    "nvfp4_fast": ("nvfp4_fast", {"dtype": torch.bfloat16}),
    "nvfp4_pow2": ("nvfp4_pow2", {"dtype": torch.bfloat16}),
    "nvfp4_fast in fp32": ("nvfp4_fast", {"dtype": torch.float32}),
    "latent attention": ("nvfp4_fast", {"dtype": torch.bfloat16, "pattern": "+"}),
    "recomputed": (
        "nvfp4_fast",
        {
            "dtype": torch.bfloat16,
            "pattern": "-",
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ),
}
OPTIONS = {
    "fp32 activations": {"dtype": torch.float32},
    "amaxes of shards": {"scope": "shard"},
    "parts of 248 tokens": {"seq": 248},
    "no tokens": {"seq": 0},
    "a frozen weight, parts of 24 tokens": {"seq": 48, "frozen": True},
}


def spread(*shape):
    """Rows of very different size, so that the amaxes of parts differ."""
    size = torch.exp2(torch.randint(-4, 5, (*shape[:-1], 1)).float())
    return (torch.randn(shape) * size).bfloat16()


def layer(recipe, kind, packed, dtype=torch.bfloat16, scope="layout_invariant", **sizes):
    """(y, dx, dw) of one layer on this rank, and the bytes that it received in gathers."""
    seq = sizes.get("seq", SEQ)
    torch.manual_seed(5)
    x, w, dy = spread(seq, BATCH, IN), spread(OUT, IN) * 0.02, spread(seq, BATCH, OUT) * 1e-3
    rank = dist.get_rank()
    mine = slice(rank * seq // 2, (rank + 1) * seq // 2)
    if kind == "column":
        x, w, dy = x[mine], w.chunk(2)[rank], dy.chunk(2, 2)[rank]
    else:
        x, w, dy = x.chunk(2, 2)[rank], w.chunk(2, 1)[rank], dy[mine]
    comm = TensorParallelComm(
        kind=kind,
        recipe=recipe,
        tp_group=dist.group.WORLD,
        gather_tokens=kind == "column",
        scatter_tokens=kind == "row",
        packed=packed,
        amax_scope=scope,
        weight_shape=tuple(w.shape),
        tokens=seq * BATCH,
    )
    call = LinearCall(recipe=recipe, key=StreamKey(seed=3, layer=9), comm=comm, delayed={})
    x = x.to(dtype).contiguous().requires_grad_()
    w = torch.nn.Parameter(w.to(dtype).contiguous(), requires_grad=not sizes.get("frozen"))
    received, gather = [], dist.all_gather_into_tensor

    def counted(output, part, **options):
        received.append(output.numel() * output.element_size() // 2)
        return gather(output, part, **options)

    dist.all_gather_into_tensor = counted
    try:
        y = linear(x, w, call=call)
        y.backward(dy.to(dtype))
    finally:
        dist.all_gather_into_tensor = gather
    dw = torch.zeros(0) if sizes.get("frozen") else w.grad
    return (y.detach(), x.grad, dw), received


def both(name, kind, **options):
    """What the two ways give, and the bytes of both."""
    recipe = next(r for r in LAYERS if r.name == name)
    plain, before = layer(recipe, kind, False, **options)
    packed, after = layer(recipe, kind, True, **options)
    same = [torch.equal(a, b) for a, b in zip(plain, packed)]
    return same, before, after


def train(recipe, communicate, dtype, pattern=PATTERN, **more):
    """One step of a toy: loss, gradients by name, bytes received here in gathers of linear layers.

    In BF16 those of row layers and of experts are megatron-core's, and not counted.
    """
    parallel = ParallelConfig(**TP2, **more.pop("parallel", {}))
    (chunk,), config = toy.make(pattern, parallel=parallel, dtype=dtype, **more)
    section = PrecisionConfig(recipe=recipe, communicate=communicate)
    plan = apply_precision([chunk], section, PrecisionState(seed=4))
    received, gather = [0], dist.all_gather_into_tensor

    def counted(output, part, **options):
        received[0] += output.numel() * output.element_size() // 2
        return gather(output, part, **options)

    dist.all_gather_into_tensor = counted
    try:
        loss = toy.step([chunk], config)
    finally:
        dist.all_gather_into_tensor = gather
    gradients = {name: p.main_grad.clone() for name, p in chunk.named_parameters()}
    return loss, gradients, received[0], plan_gathers(plan, 2)


def exchanges(kind, packed):
    """Names of the collectives of one layer, in order; gathers of codes and scales are one."""
    seen = []
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "_coalescing_manager")

    def noting(name, call):
        @functools.wraps(call)
        def noted(*args, **options):
            if name == "_coalescing_manager":
                seen.append("gather of codes")
            elif not dist.distributed_c10d._world.pg_coalesce_state:
                seen.append(name)
            return call(*args, **options)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(dist, name, noting(name, getattr(dist, name)))
        layer(get_recipe("nvfp4"), kind, packed)
    return seen


def rows_that_choose_forms(packed):
    """The rows by which a row layer with a frozen weight chooses the form of dgrad's operands."""
    asked, before = [], weight_operands.operand_form

    def noted(call, gemm, x, rows):
        asked.append((gemm, rows))
        return before(call, gemm, x, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_operands, "operand_form", noted)
        layer(get_recipe("nvfp4"), "row", packed, seq=48, frozen=True)
    return asked


def two_ranks():
    dist.init_process_group("gloo")
    said = {(kind, packed): exchanges(kind, packed) for kind in KINDS for packed in (False, True)}
    said["forms"] = {packed: rows_that_choose_forms(packed) for packed in (False, True)}
    for recipe in LAYERS:
        for kind in ("column", "row"):
            said[recipe.name, kind] = both(recipe.name, kind)
    for name, options in OPTIONS.items():
        for kind in ("column", "row"):
            said[name, kind] = both("nvfp4", kind, **options)
    for name, (recipe, options) in TOYS.items():
        said[name] = [train(recipe, how, **options) for how in ("bf16", "packed")]
    return said


def four_ranks():
    options = {"dtype": torch.bfloat16, "parallel": {"context_parallel_size": 2}}
    return [train("nvfp4_fast", how, **options) for how in ("bf16", "packed")]


@pytest.fixture(scope="module")
def said():
    return run_distributed(two_ranks, 2, timeout=500)


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("name", [recipe.name for recipe in LAYERS] + list(OPTIONS))
def test_a_layer_computes_the_same_bits(said, name, kind):
    """Output and gradients of x and w, each rank's own."""
    for rank in said:
        assert rank[name, kind][0] == [True, True, True]


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("recipe", LAYERS, ids=lambda recipe: recipe.name)
def test_what_moves_is_what_is_announced(said, recipe, kind):
    _, before, after = said[0][recipe.name, kind]
    name = "layers.0.mlp.linear_fc1" if kind == "column" else "layers.0.mlp.linear_fc2"
    shape = GemmShape(name=name, position=0, symbol="-", k=IN, n=OUT)
    told = gathers([shape], {name: recipe}, ranks=2, tokens=SEQ * BATCH, element_size=2)
    assert (told.high, told.packed) == (sum(before), sum(after))


def test_forms_do_not_depend_on_what_moves(said):
    """FP8 cores take rows in multiples of 16: 48 tokens are, and 24 of a rank's part are not."""
    for rank in said:
        assert rank["forms"][False] == [("dgrad", (48, IN // 2))]
        assert rank["forms"][True] == rank["forms"][False]
    _, before, after = said[0]["a frozen weight, parts of 24 tokens", "row"]
    assert sum(after) < sum(before), "codes moved"


def test_exchanges_of_a_layer(said):
    """The amaxes of two operands of one matrix go together, and so do codes and scales."""
    amax, codes, weights = "all_reduce", "gather of codes", ["all_reduce"]
    for rank in said:
        dx = "reduce_scatter_tensor"
        assert rank["column", False] == ["all_gather_into_tensor", *weights, amax, *weights, dx]
        assert rank["column", True] == [amax, codes, *weights, amax, codes, *weights, dx]
        assert rank["row", False] == [amax, *weights, dx, "all_gather_into_tensor", *weights]
        assert rank["row", True] == [amax, *weights, dx, amax, codes, codes, *weights]


def test_bytes_of_codes():
    """A value takes 4 bits and a sixteenth of an E4M3 scale, twice: 0.5625 of BF16's bytes."""
    shapes = [
        GemmShape(name="layers.0.mlp.linear_fc1", position=0, symbol="-", k=5120, n=20480),
        GemmShape(name="layers.0.mlp.linear_fc2", position=0, symbol="-", k=20480, n=5120),
    ]
    recipes = {shape.name: get_recipe("nvfp4_fast") for shape in shapes}
    sizes = {"ranks": 2, "tokens": 8192, "element_size": 2}
    found = gathers(shapes, recipes, **sizes)
    assert found.high == 2 * 4096 * 5120 * 2
    assert found.packed == found.high * 0.5625
    assert found.share == 0.5625
    assert found.reasons == {}
    assert found.lines("packed", "bf16") == [
        "sequence-parallel gathers of all layers bring a rank 45.0 MiB a micro-batch, 0.56 of the "
        "80.0 MiB in bf16"
    ]
    ragged = gathers(shapes, recipes, **{**sizes, "tokens": 8200})
    assert ragged.packed == ragged.high
    assert ragged.lines("packed", "bf16")[1:] == [
        "precision.communicate packed: gathers of 1 modules stay in bf16: wgrad.x has blocks of 16 "
        "tokens and a rank 4100 (first layers.0.mlp.linear_fc1)",
        "precision.communicate packed: gathers of 1 modules stay in bf16: wgrad.dy has blocks of "
        "16 tokens and a rank 4100 (first layers.0.mlp.linear_fc2)",
    ]


def test_gathers_that_stay(said):
    """In parts of 248 tokens, and where the recipe wants the tensor itself, BF16 moves."""
    for kind in ("column", "row"):
        _, before, after = said[0]["parts of 248 tokens", kind]
        assert before == after
    assert said[0][LATE.name, "column"][1:] == ([PART * IN * 2], [PART * IN * 2])
    moved = [PART * IN // 2, PART * IN // 16, PART * IN * 2]
    assert said[0][HIGH_WGRAD.name, "column"][2] == moved


@pytest.mark.parametrize("name", TOYS)
def test_a_model_trains_the_same(said, name):
    for rank in said:
        same_training(*rank[name])
        _, _, received, told = rank[name][1]
        again = toy.SEQ * 64 * 9 // 16 if name == "recomputed" else 0  # X by rows, once more
        assert received == toy.MICRO_BATCHES * (told.packed + again)
        assert told.packed < 0.6 * told.high
        assert told.reasons == {}


def same_training(plain, packed):
    assert plain[0] == packed[0]
    assert plain[1].keys() == packed[1].keys()
    for name, gradient in plain[1].items():
        assert torch.equal(gradient, packed[1][name]), name
        assert gradient.abs().max() > 0, name


@pytest.mark.slow
def test_pieces_of_a_sequence():
    """Context parallelism gives a rank two of them, and tensor parallelism cuts both."""
    for rank in run_distributed(four_ranks, 4, timeout=500):
        same_training(*rank)
        assert rank[1][3].reasons == {}


class Ranks:
    """A group of two ranks, of which this process is the second."""

    def size(self):
        return 2


def test_origins_of_a_part(monkeypatch):
    """The rows of the gathered operand that lie here, in each of its pieces."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    comm = TensorParallelComm(
        kind="row",
        recipe=get_recipe("nvfp4"),
        tp_group=Ranks(),
        scatter_tokens=True,
        weight_shape=(OUT, IN),
        tokens=128,
    )
    assert TokenPart(comm).origin("dgrad.dy") == (64, 0)
    sliced = TokenPart(replace(comm, cp_group=Ranks()))  # pieces 1 and 2 of four of 64 tokens
    assert sliced.origin("wgrad.dy") == Runs(rows=((64, 128),), columns=((OUT, 0),))
    third = TokenPart(replace(comm, cp_group=Ranks(), tokens=192))
    assert third.origin("dgrad.dy").rows == ((96, 192),)


def test_who_looks_at_operands_sees_whole_ones():
    """An observer, and a check that raises at once, are shown the gathered tensors."""

    class Parts(TensorParallelComm):
        def part(self, names):
            raise AssertionError("nothing may move as codes")

    class Watch:
        def __init__(self):
            self.seen = []

        def observe(self, gemm, operand, tensor, quantized, call):
            self.seen.append((gemm, operand))

    comm = Parts(kind="column", recipe=get_recipe("nvfp4"), weight_shape=(OUT, IN), tokens=32)
    x, w = torch.randn(32, IN, requires_grad=True), torch.nn.Parameter(torch.randn(OUT, IN))
    watch = Watch()
    for options in ({"observer": watch}, {"check_finite": True}):
        call = LinearCall(recipe=get_recipe("nvfp4"), comm=comm, **options)
        linear(x, w, call=call).sum().backward()
    assert len(watch.seen) == 6


def test_reasons():
    spec = get_recipe("nvfp4_v2").wgrad_dy
    assert packing_reason("wgrad.dy", spec, 256) is None
    assert packing_reason("wgrad.dy", spec, 64) == (
        "wgrad.dy has blocks of 128 tokens and a rank 64"
    )
    assert packing_reason("dgrad.dy", get_recipe("nvfp4").dgrad_dy, 63) is None
    tile = OperandSpec(format="nvfp4", block=(16, 16))
    assert packing_reason("fprop.x", tile, 24) == "fprop.x has blocks of 16 tokens and a rank 24"
    assert packing_reason("fprop.x", OperandSpec(), 64) == "fprop.x is not quantized"
