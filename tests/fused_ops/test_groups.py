# SPDX-License-Identifier: Apache-2.0
"""Tables of groups of rows, keys of all experts, products of all groups: on a CPU."""

import pytest
import torch

from fused_ops.groups import HEIGHTS, Groups, groups_of, to_device
from fused_ops.keys import StreamKey
from fused_ops.scaled_matmul.grouped import Alpha, Tile, inner_matmul, rows_matmul
from fused_ops.testing import assert_close
from tests.fused_ops.ptx import emulate

CPU = torch.device("cpu")
RAGGED = [0, 1, 15, 16, 17, 200, 0, 64]


def test_places_of_groups():
    groups = Groups(RAGGED, CPU)
    assert (groups.rows, groups.blocks) == (313, 22)
    assert groups.place[:, 0].tolist() == [0, 0, 1, 16, 32, 49, 249, 249]
    assert groups.place[:, 1].tolist() == RAGGED
    assert groups.place[:, 2].tolist() == [0, 0, 1, 2, 3, 5, 18, 18]
    assert groups.ends.tolist() == [0, 1, 16, 32, 49, 249, 249, 313]


@pytest.mark.parametrize("counts", [RAGGED, [0, 0], [5], [0, 300, 0], [64] * 7])
def test_every_row_is_in_one_tile(counts):
    groups = Groups(counts, CPU)
    for level, height in enumerate(HEIGHTS):
        seen = torch.zeros(groups.rows, dtype=torch.int64)
        tiles = groups.tiles(height).tolist()
        assert len(tiles) == groups.tile_counts[height]
        for number, e in enumerate(tiles):
            start, count = groups.place[e, :2].tolist()
            first = (number - int(groups.place[e, 3 + level])) * height
            assert 0 <= first < count
            seen[start + first : start + min(first + height, count)] += 1
        assert bool((seen == 1).all())


def test_tables_are_built_once_a_dispatch():
    assert groups_of([3, 4], CPU) is groups_of((3, 4), CPU)
    assert groups_of([3, 4], CPU) is not groups_of([4, 3], CPU)


def test_words_keep_their_bits_and_begin_at_16_bytes():
    tables = [torch.tensor([2**32 - 1, 7, 2**31]), torch.zeros(0, dtype=torch.int64),
              torch.arange(6).view(3, 2)]  # fmt: skip
    first, empty, last = to_device(tables, CPU)
    assert first.tolist() == [-1, 7, -(2**31)]
    assert empty.numel() == 0
    assert last.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert (last.data_ptr() - first.data_ptr()) % 16 == 0


def test_keys_of_all_experts_are_those_of_each():
    from fused_ops.grouped_cuda import expert_keys

    key = StreamKey(seed=2**63 + 12345, step=17, micro_batch=3, layer=2**60 + 99, expert=8)
    names = ["dgrad.dy", "wgrad.dy", "fprop.x"]
    for name, keys in zip(names, expert_keys(key, names, 70, CPU)):
        words = (keys.long() & 0xFFFFFFFF).tolist()
        assert words == [list(key.with_expert(e).operand(name)) for e in range(70)]


def scales(groups):
    return Alpha(torch.rand(len(groups)) + 0.5, torch.rand(len(groups)) + 0.5, 0.25)


@pytest.mark.parametrize("described", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("turned", [False, True], ids=["b by k", "b by n"])
def test_products_of_ragged_rows(described, turned, monkeypatch):
    """The kernel in fp32 through the interpreter; its tails are poisoned before."""
    emulate(monkeypatch)
    from fused_ops.scaled_matmul import grouped

    groups = Groups([0, 70, 1, 0, 17], CPU)
    a, b = torch.randn(92, 80), torch.randn(5, 48, 80)
    a[88:] = float("nan")
    b = b.transpose(1, 2).contiguous().transpose(1, 2) if turned else b
    alpha, options = scales(groups), {"rows": 92, "dtype": torch.float32}
    want = rows_matmul(a, b, groups, alpha=alpha, **options)
    tile = Tile(64, 32, 32, 4, 1, described)
    got = grouped._triton_rows(a, b, groups, alpha=alpha, tile=tile, **options)
    assert_close(got[:88], want[:88], "fp32_sum", "rows")
    assert float(want[88:].abs().max()) == 0.0
    plain = grouped._triton_rows(a, b, groups, alpha=None, tile=tile, **options)
    assert_close(plain[:88], rows_matmul(a, b, groups, **options)[:88], "fp32_sum", "no alpha")


@pytest.mark.parametrize("described", [True, False], ids=["descriptors", "pointers"])
@pytest.mark.parametrize("padded", [False, True], ids=["tokens", "column layout"])
def test_products_along_ragged_tokens(described, padded, monkeypatch):
    """Neighbouring groups never enter a sum; groups without tokens give zeros or add nothing."""
    emulate(monkeypatch)
    from fused_ops.scaled_matmul import grouped

    groups = Groups([0, 40, 1, 0, 17], CPU)
    alpha, tokens = scales(groups), 16 * groups.blocks if padded else groups.rows
    alpha.a[0] = float("nan")  # what is not written for a group without tokens
    a, b = torch.randn(48, tokens), torch.randn(80, tokens)
    if not padded:
        a, b = (x.t().contiguous().t() for x in (a, b))
    for accumulate in (False, True):
        start = torch.full((5, 48, 80), 0.5 if accumulate else float("nan"))
        options = {"padded": padded, "accumulate": accumulate, "alpha": alpha}
        want = inner_matmul(a, b, groups, out=start.clone(), **options)
        tile = Tile(64, 128, 32, 4, 1, described)
        got = grouped._triton_inner(a, b, groups, out=start.clone(), tile=tile, **options)
        assert_close(got, want, "fp32_sum", f"accumulate {accumulate}")
        assert bool((got[0] == (0.5 if accumulate else 0.0)).all())
        assert bool((got[3] == (0.5 if accumulate else 0.0)).all())


def test_the_reference_of_products_is_one_by_one():
    groups = Groups([3, 0, 2], CPU)
    a, b, alpha = torch.randn(5, 16), torch.randn(3, 32, 16), scales(groups)
    y = rows_matmul(a, b, groups, rows=6, dtype=torch.float32, alpha=alpha)
    assert_close(y[3:5], (a[3:] @ b[2].t()) * alpha.a[2] * alpha.b[2] * 0.25, "fp32_sum")
    x = torch.randn(5, 32)
    out = torch.ones(3, 32, 16)
    inner_matmul(x.t(), a.t(), groups, out=out, padded=False, accumulate=True)
    assert_close(out[0], 1 + x[:3].t() @ a[:3], "fp32_sum")
    assert bool((out[1] == 1).all())
