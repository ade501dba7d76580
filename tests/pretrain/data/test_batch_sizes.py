# SPDX-License-Identifier: Apache-2.0
"""Batch sizes that grow, and layouts that change under them: one sequence, each sample once."""

import pytest
from hypothesis import given, settings, strategies as st

from fused_ops.errors import ConfigError
from pretrain.data import DataConfig, TrainLoader, open_dataset
from pretrain.data.batch_sizes import BatchSizes, check_batch_sizes
from tests.pretrain.data.shard_folders import documents, write_folder

SEQ = 16


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    write_folder(folder, documents(30, seed=1))
    return open_dataset(DataConfig(train=str(folder)), SEQ, seed=5)


def test_a_size_holds_from_the_step_that_starts_at_its_sample():
    sizes = BatchSizes.of(12, [(0, 4), (10, 8), (28, 12)])
    consumed, taken = 0, []
    for _ in range(6):
        taken.append(sizes.at(consumed))
        consumed += taken[-1]
    assert taken == [4, 4, 4, 8, 8, 12]
    assert sizes.sizes == [4, 8, 12]
    # A step may pass over a phase as a whole.
    assert BatchSizes.of(5, [(0, 9), (1, 1), (2, 5)]).consumed_after(3) == 9 + 5 + 5


@settings(max_examples=60, deadline=None)
@given(
    phases=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), max_size=4),
    first=st.integers(1, 9),
    steps=st.integers(0, 60),
)
def test_samples_of_a_number_of_steps_without_replay(phases, first, steps):
    schedule, at = [(0, first)], 0
    for gap, size in phases:
        at += gap
        schedule.append((at, size))
    sizes, consumed = BatchSizes.of(schedule[-1][1], schedule), 0
    for _ in range(steps):
        consumed += sizes.at(consumed)
    assert sizes.consumed_after(steps) == consumed


def test_bad_schedules_are_named_all_at_once():
    with pytest.raises(ConfigError) as caught:
        BatchSizes.of(12, [(5, 0), (3, 8)])
    text = "\n".join(caught.value.problems)
    assert "must start at sample 0 and then ascend" in text
    assert "sizes of at least 1" in text
    assert "must end with train.global_batch_size=12; set that to 8" in text


@settings(max_examples=20, deadline=None)
@given(
    starts=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2]), st.integers(1, 5)),
        min_size=2,
        max_size=6,
    )
)
def test_any_sequence_of_starts_is_the_uninterrupted_run(dataset, starts):
    """(data-parallel ranks, micro-batch size, steps) of each start, with sizes that grow.

    The run is resumed from consumed samples alone, and is several epochs long.
    """
    sizes = BatchSizes.of(72, [(0, 24), (100, 48), (300, 72)])
    consumed, seen = 0, []
    for dp_size, micro, steps in starts:
        loaders = [TrainLoader(dataset, sizes, micro, rank, dp_size) for rank in range(dp_size)]
        for _ in range(steps):
            batches = [batch for loader in loaders for batch in loader.step(consumed)]
            batches.sort(key=lambda batch: batch["index"])
            for batch in batches:
                for row, sample in enumerate(batch["sample_ids"]):
                    seen.append((sample, batch["tokens"][row].tolist()))
            consumed += sizes.at(consumed)
    assert [sample for sample, _ in seen] == list(range(consumed))
    assert all(tokens == dataset.sample(i)[:-1].tolist() for i, tokens in seen)


def test_four_two_three_four_ranks_with_a_global_batch_of_twelve(dataset):
    """Over more than three epochs; the layout's other ranks read what their rank 0 reads."""
    per_epoch = dataset.orders[0].samples_per_epoch
    consumed, seen = 0, []
    while consumed < 3 * per_epoch + 12:
        for dp_size, micro in ((4, 3), (2, 2), (3, 1), (4, 1)):
            for rank in range(dp_size):
                batches = TrainLoader(dataset, 12, micro, rank, dp_size).step(consumed)
                seen += [(b["index"], micro, consumed, b["sample_ids"]) for b in batches]
            consumed += 12
    for index, micro, start, ids in seen:
        first = start + index * micro
        assert ids == list(range(first, first + micro))
    assert sorted(i for *_, ids in seen for i in ids) == list(range(consumed))


@pytest.mark.parametrize("dp_size", [5, 7, 8])
def test_ranks_that_do_not_divide_the_batch_are_refused_with_the_nearest(dataset, dp_size):
    below, above = 12 // dp_size * dp_size, -(-12 // dp_size) * dp_size
    said = f"got 12; the nearest valid sizes are {below} and {above}"
    with pytest.raises(ConfigError, match=said):
        TrainLoader(dataset, 12, 1, 0, dp_size)


def test_every_size_of_a_schedule_must_divide(dataset):
    sizes = BatchSizes.of(12, [(0, 6), (60, 12)])
    with pytest.raises(ConfigError, match="got 6; the nearest valid sizes are 4 and 8"):
        TrainLoader(dataset, sizes, 1, 0, 4)


def test_more_ranks_than_samples_of_a_step_or_an_epoch(dataset, tmp_path):
    with pytest.raises(ConfigError, match="got 3; the nearest valid size is 8"):
        check_batch_sizes(3, 2, 4)
    # An epoch of two samples and four ranks: the ring goes on, each rank has its own sample.
    write_folder(tmp_path, documents(1, seed=4, longest=60), num_shards=1)
    size = (open_dataset(DataConfig(train=str(tmp_path)), 4, 1).shards[0].tokens - 1) // 2
    small = open_dataset(DataConfig(train=str(tmp_path)), size, seed=1)
    assert small.orders[0].samples_per_epoch == 2
    ids = [TrainLoader(small, 4, 1, rank, 4).step(0)[0]["sample_ids"] for rank in range(4)]
    assert ids == [[0], [1], [2], [3]]
    starts = [small.place(i)[1] for i in range(4)]
    assert len(set(starts[:2])) == len(set(starts[2:])) == 2
