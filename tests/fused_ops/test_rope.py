# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding against rotations of complex numbers, and kernels against references."""

from functools import partial

import pytest
import torch

import fused_ops.rope
from fused_ops.rope import rope, split_rope, triton_backend
from tests.fused_ops import kernels


def angles(length, rotary):
    half = torch.outer(torch.arange(length).float(), 100.0 ** -torch.linspace(0, 1, rotary // 2))
    return torch.cat([half, half], -1)[:, None, None]


def turned(x, angles):
    """Features i and i + rotary / 2 as one complex number, times exp(i angle)."""
    rotary = angles.shape[-1]
    a, b = x[..., :rotary].chunk(2, -1)
    half = angles[..., : rotary // 2].to(x.dtype)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(half), half)
    return torch.cat([z.real, z.imag, x[..., rotary:]], -1)


@pytest.mark.parametrize("rotary", [8, 4])
def test_values_and_gradients(rotary):
    x, turns = torch.randn(5, 2, 3, 8), angles(5, rotary)
    got = kernels.run(lambda x: rope(x, turns), (x,))
    want = kernels.run(lambda x: turned(x, turns), (x.double(),))
    for a, b in zip([*got[0], *got[1]], [*want[0], *want[1]]):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)
    assert torch.equal(rope(x, turns)[0], x[0])  # position 0
    torch.testing.assert_close(rope(x, turns).norm(dim=-1), x.norm(dim=-1))


def test_products_depend_on_distances_alone():
    query, key = torch.randn(1, 1, 1, 16).expand(9, 1, 1, 16), torch.randn(1, 1, 1, 16)
    a, b = rope(query, angles(9, 16)), rope(key.expand(9, 1, 1, 16), angles(9, 16))
    scores = a[:, 0, 0] @ b[:, 0, 0].T
    for distance in range(-8, 9):
        line = scores.diagonal(distance)
        torch.testing.assert_close(line, line[:1].expand_as(line), rtol=1e-5, atol=1e-5)


def test_split():
    mixed = torch.randn(3, 2, 2 * (3 + 2) * 4)
    heads = mixed.view(3, 2, 2, 5, 4)
    query, key, value = split_rope(mixed, None, 3, 4)
    assert torch.equal(query, heads[:, :, :, :3].reshape(3, 2, 6, 4))
    assert torch.equal(key, heads[:, :, :, 3])
    assert torch.equal(value, heads[:, :, :, 4])
    turns = angles(3, 4)
    for got, want in zip(
        split_rope(mixed, turns, 3, 4), (rope(query, turns), rope(key, turns), value)
    ):
        assert torch.equal(got, want)


def test_bf16_rounds_once():
    x, turns = torch.randn(6, 1, 2, 8).bfloat16(), angles(6, 8)
    assert torch.equal(rope(x, turns), rope(x.float(), turns).bfloat16())


def split(mixed, turns, *, queries, implementation):
    return split_rope(mixed, turns, queries, 8, implementation=implementation)


@pytest.mark.parametrize("place", kernels.PLACES)
@pytest.mark.parametrize("rotary", [8, 6, None])
def test_kernels(rotary, place, monkeypatch):
    if place[0] == "cpu":
        kernels.interpret(monkeypatch, fused_ops.rope)
    kernels.poison(monkeypatch)
    monkeypatch.setattr(triton_backend, "HEADS", 4)
    turns = None if rotary is None else angles(2, rotary).to(place[0])
    for batch, groups, queries in ((2, 2, 1), (1, 1, 4)):
        mixed = torch.randn(2, batch, groups * (queries + 2) * 8)
        op = partial(split, turns=turns, queries=queries)
        kernels.compare(op, (mixed,), place, f"{groups} groups")
    if turns is None:
        return
    x = torch.randn(2, 2, 6, 8)
    kernels.compare(partial(rope, angles=turns), (x,), place, "rope")
    # Slices, as of a split tensor, and gradients that are transposed.
    kernels.compare(lambda x, **o: rope(x[:, :, 1:4], turns, **o), (x,), place, "a slice")
    kernels.compare(
        lambda x, **o: rope(x, turns, **o).permute(3, 2, 1, 0).contiguous(), (x,), place, "permuted"
    )


def test_the_table_is_made_once_and_not_after_a_change():
    turns = angles(4, 8)
    first = triton_backend.table(turns)
    assert triton_backend.table(turns)[0] is first[0]
    turns.mul_(2.0)
    again = triton_backend.table(turns)
    assert again[0] is not first[0]
    torch.testing.assert_close(again[0], turns[:, 0, 0, :4].cos())
    with torch.inference_mode():
        other = angles(4, 8)
        torch.testing.assert_close(triton_backend.table(other)[1], other[:, 0, 0, :4].sin())


@pytest.mark.gpu
def test_kernels_at_real_size():
    turns = angles(8192, 128).cuda()
    mixed = torch.randn(8192, 1, 6144).bfloat16()

    def op(mixed, *, implementation):
        return split_rope(mixed, turns, 4, 128, implementation=implementation)

    kernels.twice_the_same(op, (mixed,))
    kernels.compare(op, (mixed,), ("cuda", torch.bfloat16, "bf16_output"))


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"\[3, 1, 1, rotary\] with an even rotary <= 8"):
        rope(torch.randn(3, 1, 2, 8), angles(4, 8))
    with pytest.raises(ValueError, match="even rotary <= 8"):
        rope(torch.randn(3, 1, 2, 8), angles(3, 10))
    with pytest.raises(ValueError, match="mixed must be"):
        split_rope(torch.randn(3, 1, 20), None, 2, 8)
