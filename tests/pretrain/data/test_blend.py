# SPDX-License-Identifier: Apache-2.0
"""Blends: shares, prefixes, positions without replay."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from fused_ops.errors import ConfigError
from pretrain.data.blend import RESOLUTION, Blend, Mixture, resolve_weights


def test_weights_resolve_to_the_unit_sum():
    assert resolve_weights([1, 1]) == [RESOLUTION // 2, RESOLUTION // 2]
    assert resolve_weights([1, 1, 1]) == [349526, 349525, 349525]
    assert resolve_weights([0.001, 0.999]) == [1049, 1047527]
    assert resolve_weights([3, 0, 1]) == [786432, 0, 262144]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, -0.5], "not negative; source 1 has -0.5"),
        ([1, float("nan")], "finite"),
        ([0, 0], "one weight at least must be positive"),
        ([1, 1e-9], "at least 1/1048576 .* source 1 has 1e-09"),
    ],
)
def test_bad_weights_are_named(weights, message):
    with pytest.raises(ConfigError, match=message):
        resolve_weights(weights)


def drawn(mixture, count):
    source, index = mixture.locate(np.arange(count))
    return source, index


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 1000), min_size=1, max_size=60))
def test_every_prefix_is_off_by_less_than_two(weights):
    resolved = resolve_weights(weights)
    mixture, length = Mixture(resolved), 3000
    source, index = drawn(mixture, length)
    for number, units in enumerate(resolved):
        mine = source == number
        # Samples of a source come in order, each once.
        assert index[mine].tolist() == list(range(int(mine.sum())))
        counts = np.cumsum(mine)
        ideal = np.arange(1, length + 1) * units / RESOLUTION
        assert np.abs(counts - ideal).max() < 2


def test_one_large_and_many_small_sources():
    """Where rounding each source on its own would be off by tens of samples."""
    resolved = resolve_weights([100.0] + [1.0] * 100)
    source, _ = drawn(Mixture(resolved), 20_000)
    counts = np.cumsum(source == 0)
    assert np.abs(counts - np.arange(1, 20_001) * resolved[0] / RESOLUTION).max() < 2


def test_a_full_period_has_exactly_the_weights():
    resolved = resolve_weights([0.7, 0.001, 0.299])
    source, index = drawn(Mixture(resolved), RESOLUTION)
    assert np.bincount(source, minlength=3).tolist() == resolved
    assert [int(index[source == k].max()) + 1 for k in range(3)] == resolved


def test_positions_need_no_replay():
    mixture = Mixture(resolve_weights([5, 3, 1, 1]))
    far = 10**12
    source, index = mixture.locate(np.arange(far, far + 100))
    counts = mixture.counts(far)
    for number in range(4):
        mine = index[source == number]
        assert mine.tolist() == list(range(counts[number], counts[number] + mine.size))
        exact = Fraction(far * mixture.resolved[number], RESOLUTION)
        assert abs(counts[number] - exact) < 2


def test_a_source_of_weight_zero_is_never_drawn():
    source, _ = drawn(Mixture(resolve_weights([0.0, 1.0, 2.0])), 10_000)
    assert set(source.tolist()) == {1, 2}


def test_curriculum_changes_at_its_sample_and_counts_on():
    half, quarter = resolve_weights([1, 1]), resolve_weights([1, 3])
    blend = Blend([(0, half), (101, quarter)])
    source, index = blend.locate(np.arange(1000))
    assert abs(int((source[:101] == 0).sum()) - 50.5) < 1
    assert abs(int((source[101:] == 0).sum()) - 899 / 4) < 2
    for number in (0, 1):
        mine = index[source == number]
        assert mine.tolist() == list(range(mine.size))
        assert blend.counts(1000)[number] == mine.size


def departure(phases, length):
    """The largest departure of a source from its share, in samples, over all prefixes."""
    blend = Blend(phases)
    source, index = blend.locate(np.arange(length))
    weights = np.empty((length, len(phases[0][1])))
    for first, resolved in phases:
        weights[first:] = np.array(resolved) / RESOLUTION
    drawn_ = source[:, None] == np.arange(weights.shape[1])
    for number in range(weights.shape[1]):
        assert index[source == number].tolist() == list(range(int(drawn_[:, number].sum())))
    assert blend.counts(length).tolist() == drawn_.sum(0).tolist()
    return float(np.abs(np.cumsum(drawn_, 0) - np.cumsum(weights, 0)).max())


@pytest.mark.parametrize(
    ("phases", "length"),
    [
        # Two that change places at every sample: rounding each phase alone gives one of them all.
        ([(i, resolve_weights([0.5 + i % 2 / 9999, 0.5 - i % 2 / 9999])) for i in range(400)], 500),
        ([(100 * i, resolve_weights([5 + i, 30 - i % 7, 20 - i % 5])) for i in range(400)], 40_000),
        ([(7 * i, resolve_weights([1, 2 * (i % 3), 3 + i % 4, 9])) for i in range(300)], 3000),
    ],
)
def test_departures_do_not_add_up_over_a_curriculum(phases, length):
    assert departure(phases, length) < 2


@settings(max_examples=40, deadline=None)
@given(
    phases=st.lists(
        st.tuples(st.integers(1, 60), st.lists(st.integers(1, 100), min_size=3, max_size=3)),
        min_size=1,
        max_size=30,
    )
)
def test_any_curriculum_of_three_sources_stays_within_two(phases):
    firsts = np.cumsum([0] + [length for length, _ in phases]).tolist()
    named = [(first, resolve_weights(weights)) for first, (_, weights) in zip(firsts, phases)]
    assert departure(named, firsts[-1] + 200) <= 2


def test_phases_must_ascend_from_zero():
    with pytest.raises(ConfigError, match="start at sample 0"):
        Blend([(5, resolve_weights([1]))])
    with pytest.raises(ConfigError, match="ascend"):
        Blend([(0, resolve_weights([1])), (9, resolve_weights([1])), (3, resolve_weights([1]))])
