# SPDX-License-Identifier: Apache-2.0
"""Where an operand lies in the whole, and which ranks share its amax."""

from dataclasses import replace

import pytest
import torch

from fused_ops.formats import OperandSpec
from fused_ops.linear import Runs
from fused_ops.recipe import GemmRecipe
from models import comm as module
from models.comm import TensorParallelComm

OPERANDS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
OTHER = torch.tensor([1.0, 9.0])  # what the other rank holds


class Group:
    """Two ranks, of which this process is the second."""

    def __init__(self, size=2, rank=1):
        self.number, self.rank = size, rank

    def size(self):
        return self.number


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    """Collectives answered as the other rank would."""

    def all_reduce(tensor, op=None, group=None):
        assert op is module.dist.ReduceOp.MAX
        assert isinstance(group, Group)
        other = OTHER if tensor.dim() else OTHER[1]
        tensor.copy_(torch.maximum(tensor, other))

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(module.dist, "get_rank", lambda group: group.rank)


def make(kind, recipe=None, **changes):
    groups = {"cp_group": Group()} if kind == "context" else {"tp_group": Group()}
    return TensorParallelComm(
        kind="column" if kind == "context" else kind,
        recipe=recipe or GemmRecipe(name="tensor scales"),
        weight_shape=(48, 32),
        tokens=16,
        **groups,
        **changes,
    )


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("column", {"x": (0, 0), "w": (48, 0), "dy": (0, 48)}),
        ("row", {"x": (0, 32), "w": (0, 32), "dy": (0, 0)}),
        ("duplicated", {"x": (16, 0), "w": (0, 0), "dy": (16, 0)}),
    ],
)
def test_origins(kind, places):
    for name in OPERANDS:
        assert make(kind).origin(name) == places[name.split(".")[1]], name


ZIGZAG = ((8, 8), (8, 16))  # the second and third quarter of 32 tokens


def test_context_parallel_tokens_are_two_runs():
    comm = make("context")
    assert comm.origin("dgrad.w") == (0, 0)
    assert comm.origin("dgrad.dy") == Runs(rows=ZIGZAG, columns=((48, 0),))
    assert comm.origin("fprop.x") == Runs(rows=ZIGZAG, columns=((32, 0),))


def test_runs_that_cut_a_block_count_as_one():
    """wgrad's blocks lie along the tokens: 16 of them are no two pieces of 8."""
    spec = OperandSpec(format="nvfp4", rounding="stochastic")
    comm = make("context", GemmRecipe(name="sr", dgrad_dy=spec, wgrad_dy=spec))
    assert comm.origin("wgrad.dy") == (16, 0)
    assert comm.origin("dgrad.dy") == Runs(rows=ZIGZAG, columns=((48, 0),))
    wide = replace(comm, tokens=64)
    assert wide.origin("wgrad.dy").rows == ((32, 32), (32, 64))


def test_dither_begins_with_a_block_on_every_rank():
    """Shards that are no multiples of 16 lie apart as if they were padded to them."""
    spec = OperandSpec(format="nvfp4", rounding="stochastic")
    recipe = GemmRecipe(name="sr", dgrad_dy=spec)
    comm = replace(make("column", recipe), weight_shape=(40, 32))
    assert comm.origin("dgrad.dy") == (0, 48)
    assert comm.origin("wgrad.dy") == (0, 40)  # there the output is not contracted
    parts = replace(comm, segments=(16, 24))
    assert parts.origin("dgrad.dy").columns == ((16, 16), (24, 64))
    merged = replace(comm, segments=(24, 16))  # a block would lie across both
    assert merged.origin("dgrad.dy") == (0, 48)


def test_duplicated_layers_hold_a_part_of_a_zigzag_cut():
    """The second half of a context-parallel rank's tokens is its second piece."""
    comm = replace(make("duplicated"), cp_group=Group())
    assert comm.origin("dgrad.dy") == (32, 0)
    first = replace(comm, tp_group=Group(rank=0))
    assert first.origin("dgrad.dy") == (16, 0)
    across = replace(comm, tp_group=Group(3), tokens=8)  # tokens 8 to 15 of 24 in pieces of 12
    assert across.origin("dgrad.dy").rows == ((4, 20), (4, 24))


def test_parts_of_the_output_have_their_own_places():
    """Gate and up; z, x, B, C and dt: each is cut over the ranks by itself."""
    comm = make("column", segments=(24, 24))
    assert comm.origin("dgrad.dy") == Runs(rows=((16, 0),), columns=((24, 24), (24, 72)))
    assert comm.origin("fprop.w") == Runs(rows=((24, 24), (24, 72)), columns=((32, 0),))
    assert comm.origin("fprop.x") == (0, 0)
    mamba = make("column", segments=(16, 16, 8, 4, 4))
    starts = (16, 48, 72, 84, 92)
    assert mamba.origin("wgrad.dy").columns == tuple(zip((16, 16, 8, 4, 4), starts))


def test_tokens_of_an_expert_on_other_ranks_share_an_amax_and_no_row():
    comm = replace(make("row"), tp_group=None, expert_group=Group())
    assert float(comm.reduce_amax("wgrad.x", torch.tensor(5.0))) == 9.0
    assert float(comm.reduce_amax("fprop.w", torch.tensor(5.0))) == 5.0
    row, column = comm.origin("dgrad.dy")
    assert (row, column) == (1 << 24, 0)


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        ("column", {"fprop.w", "dgrad.w", "dgrad.dy", "wgrad.dy"}),
        ("row", {"fprop.x", "wgrad.x", "fprop.w", "dgrad.w"}),
        ("duplicated", {"fprop.x", "wgrad.x", "dgrad.dy", "wgrad.dy"}),
        ("context", {"fprop.x", "wgrad.x", "dgrad.dy", "wgrad.dy"}),
    ],
)
def test_amaxes_are_shared_where_an_operand_is_cut(kind, shared):
    for name in OPERANDS:
        amax = float(make(kind).reduce_amax(name, torch.tensor(5.0)))
        assert amax == (9.0 if name in shared else 5.0), name
        own = make(kind, amax_scope="shard").reduce_amax(name, torch.tensor(5.0))
        assert float(own) == 5.0


def test_row_scales_are_shared_only_along_the_cut_axis_that_is_contracted():
    row = OperandSpec(format="nvfp4", row_scaled=True)
    comm = make("column", GemmRecipe(name="row scales", dgrad_dy=row, fprop_w=row))
    amax = torch.tensor([5.0, 5.0])
    # Both ranks hold all tokens of dy, and different rows of w.
    assert comm.reduce_amax("dgrad.dy", amax.clone()).tolist() == [5.0, 9.0]
    assert comm.reduce_amax("fprop.w", amax.clone()).tolist() == [5.0, 5.0]


def test_nothing_is_asked_of_other_ranks_without_groups():
    comm = TensorParallelComm(kind="row", recipe=GemmRecipe(name="t"), weight_shape=(48, 32))
    x = torch.randn(4, 2, 32)
    assert comm.gather_input(x) is x
    assert comm.reduce_input_grad(x) == (x, None)
    assert comm.origin("fprop.x") == (0, 0)
