# SPDX-License-Identifier: Apache-2.0
"""The order of samples: permutations, turns, locality, purity."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pretrain.data.order import Permutation, SourceOrder, derive_key


@pytest.mark.parametrize("size", [*range(1, 40), 63, 64, 65, 1000, 1023, 1024, 1025])
def test_permutation_is_one(size):
    for key in (0, 1, 2**64 - 1):
        image = Permutation(size, key)(np.arange(size))
        assert sorted(image.tolist()) == list(range(size))


def test_permutation_depends_on_key_and_not_on_neighbours():
    index = np.arange(1000)
    first, second = Permutation(1000, 1)(index), Permutation(1000, 2)(index)
    assert (first != second).mean() > 0.98
    alone = [int(Permutation(1000, 1)(np.array([i]))[0]) for i in range(1000)]
    assert alone == first.tolist()


def test_permutation_mixes():
    """Neighbours land apart, and no residue class or half is favoured (5 sigma bounds)."""
    size = 100_000
    image = Permutation(size, derive_key("mix"))(np.arange(size))
    correlation = np.corrcoef(np.arange(size), image)[0, 1]
    assert abs(correlation) < 5 / np.sqrt(size)
    neighbours = np.corrcoef(image[:-1], image[1:])[0, 1]
    assert abs(neighbours) < 5 / np.sqrt(size)
    table = np.histogram2d(np.arange(size), image, bins=10)[0]
    # 81 degrees of freedom, standard deviation sqrt(2 * 81) = 12.7.
    assert ((table - size / 100) ** 2 / (size / 100)).sum() < 81 + 5 * 12.7


def test_permutation_of_the_largest_size_stays_inside():
    size = 10**13 // 128
    image = Permutation(size, 5)(np.arange(10_000))
    assert image.min() >= 0
    assert image.max() < size
    assert np.unique(image).size == image.size


def order(tokens, seq_length, chunk_tokens=32, chunks_per_group=3, key=7):
    return SourceOrder(
        tokens=tokens,
        seq_length=seq_length,
        key=key,
        chunk_tokens=chunk_tokens,
        chunks_per_group=chunks_per_group,
    )


@settings(max_examples=50, deadline=None)
@given(
    tokens=st.integers(2, 300),
    seq_length=st.integers(1, 40),
    chunk_tokens=st.integers(1, 200),
    chunks_per_group=st.integers(1, 6),
    key=st.integers(0, 2**64 - 1),
)
def test_every_epoch_visits_each_window_once(
    tokens, seq_length, chunk_tokens, chunks_per_group, key
):
    if tokens < seq_length + 1:
        with pytest.raises(ValueError, match="at least one window"):
            order(tokens, seq_length, chunk_tokens, chunks_per_group, key)
        return
    one = order(tokens, seq_length, chunk_tokens, chunks_per_group, key)
    num_windows = tokens // seq_length
    starts = one.starts(np.arange(3 * num_windows)).reshape(3, num_windows)
    for epoch in range(3):
        expected = (one.turn(epoch) + seq_length * np.arange(num_windows)) % tokens
        assert sorted(starts[epoch].tolist()) == sorted(expected.tolist())


def test_inputs_of_an_epoch_do_not_overlap_and_miss_less_than_a_window():
    one = order(1000, 7)
    for epoch in range(4):
        starts = one.starts(epoch * 142 + np.arange(142))
        seen = (starts[:, None] + np.arange(7)).ravel() % 1000
        assert np.unique(seen).size == seen.size == 994


def test_epochs_differ_in_cuts_and_order():
    one = order(10_001, 10)
    cuts = {one.turn(epoch) % 10 for epoch in range(10)}
    assert len({one.turn(epoch) for epoch in range(10)}) == 10
    assert len(cuts) >= 5
    windows = one.samples_per_epoch
    first, second = (one.starts(e * windows + np.arange(windows)) - one.turn(e) for e in (0, 1))
    assert ((first % 10_001) != (second % 10_001)).mean() > 0.99


def test_samples_of_a_group_stay_in_its_chunks():
    one = order(100_000, 10, chunk_tokens=500, chunks_per_group=4)
    starts = (one.starts(np.arange(10_000)) - one.turn(0)) % 100_000
    chunks = starts // 500
    for group in range(50):
        assert np.unique(chunks[group * 200 : (group + 1) * 200]).size == 4
    # The chunks themselves are mixed: groups are not made of neighbours.
    assert np.abs(np.diff(np.unique(chunks[:200]))).max() > 1


def test_a_sample_is_a_function_of_its_number():
    one = order(5000, 13, chunk_tokens=130)
    index = np.random.default_rng(0).permutation(2000)
    assert (one.starts(index) == one.starts(np.arange(2000))[index]).all()
    assert (
        order(5000, 13, chunk_tokens=130, key=8).starts(index) != one.starts(index)
    ).mean() > 0.9
