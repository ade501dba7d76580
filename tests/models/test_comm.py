# SPDX-License-Identifier: Apache-2.0
"""Where an operand lies in the whole, and which ranks share its amax; two ranks."""

import torch
import torch.distributed as dist

from fused_ops.formats import OperandSpec
from fused_ops.recipe import GemmRecipe
from models.comm import TensorParallelComm
from tests.distributed import run_distributed

OPERANDS = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")


def _places():
    """In each rank: origins and reduced amaxes of every operand, by kind of layer."""
    dist.init_process_group("gloo")
    group, rank = dist.group.WORLD, dist.get_rank()
    row = OperandSpec(format="nvfp4", row_scaled=True)
    tensor, by_row = GemmRecipe(name="t"), GemmRecipe(name="r", dgrad_dy=row, fprop_w=row)
    result = {}
    for kind in ("column", "row", "duplicated", "context"):
        groups = {"cp_group": group} if kind == "context" else {"tp_group": group}
        comm = TensorParallelComm(
            kind="column" if kind == "context" else kind,
            recipe=tensor,
            weight_shape=(48, 32),
            tokens=16,
            **groups,
        )
        result[kind] = {
            name: (
                comm.origin(name),
                float(comm.reduce_amax(name, torch.tensor(float(rank + 1)))),
            )
            for name in OPERANDS
        }
    comm = TensorParallelComm(kind="column", recipe=by_row, tp_group=group)
    amax = torch.tensor([1.0, 2.0]) if rank == 0 else torch.tensor([3.0, 0.0])
    result["rows"] = {
        n: comm.reduce_amax(n, amax.clone()).tolist() for n in ("dgrad.dy", "fprop.w")
    }
    shard = TensorParallelComm(kind="row", recipe=tensor, tp_group=group, amax_scope="shard")
    result["shard"] = float(shard.reduce_amax("fprop.x", torch.tensor(float(rank + 1))))
    return result


def test_origins_and_amaxes():
    first, second = run_distributed(_places, 2, timeout=240)
    at = {name: place for name, (place, _) in second["column"].items()}
    assert at["fprop.x"] == at["wgrad.x"] == (0, 0)
    assert at["fprop.w"] == at["dgrad.w"] == (48, 0)
    assert at["dgrad.dy"] == at["wgrad.dy"] == (0, 48)
    at = {name: place for name, (place, _) in second["row"].items()}
    assert at["fprop.x"] == at["fprop.w"] == at["dgrad.w"] == at["wgrad.x"] == (0, 32)
    assert at["dgrad.dy"] == at["wgrad.dy"] == (0, 0)
    for kind in ("duplicated", "context"):
        at = {name: place for name, (place, _) in second[kind].items()}
        assert at["fprop.x"] == at["dgrad.dy"] == at["wgrad.dy"] == (16, 0)
        assert at["fprop.w"] == (0, 0)
    assert all(place == (0, 0) for kind in ("column", "row") for place, _ in first[kind].values())

    shared = {
        "column": {"fprop.w", "dgrad.w", "dgrad.dy", "wgrad.dy"},
        "row": {"fprop.x", "wgrad.x", "fprop.w", "dgrad.w"},
        "duplicated": {"fprop.x", "wgrad.x", "dgrad.dy", "wgrad.dy"},
        "context": {"fprop.x", "wgrad.x", "dgrad.dy", "wgrad.dy"},
    }
    for kind, names in shared.items():
        for name in OPERANDS:
            assert second[kind][name][1] == 2.0
            assert first[kind][name][1] == (2.0 if name in names else 1.0), (kind, name)
    # dy's rows are tokens, of which both ranks hold all; w's rows are not the same rows.
    assert first["rows"] == {"dgrad.dy": [3.0, 2.0], "fprop.w": [1.0, 2.0]}
    assert (first["shard"], second["shard"]) == (1.0, 2.0)
