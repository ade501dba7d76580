# SPDX-License-Identifier: Apache-2.0
"""Where an operand lies in the whole, and which ranks share its amax."""

import pytest
import torch

from fused_ops.formats import OperandSpec
from fused_ops.recipe import GemmRecipe
from models import comm as module
from models.comm import TensorParallelComm

OPERANDS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")
OTHER = torch.tensor([1.0, 9.0])  # what the other rank holds


class Group:
    """Two ranks, of which this process is the second."""

    def size(self):
        return 2


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    """Collectives answered as the other rank would."""

    def all_reduce(tensor, op=None, group=None):
        assert op is module.dist.ReduceOp.MAX
        assert isinstance(group, Group)
        other = OTHER if tensor.dim() else OTHER[1]
        tensor.copy_(torch.maximum(tensor, other))

    monkeypatch.setattr(module.dist, "all_reduce", all_reduce)
    monkeypatch.setattr(module.dist, "get_rank", lambda group: 1)


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
        ("context", {"x": (16, 0), "w": (0, 0), "dy": (16, 0)}),
    ],
)
def test_origins(kind, places):
    for name in OPERANDS:
        assert make(kind).origin(name) == places[name.split(".")[1]], name


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
