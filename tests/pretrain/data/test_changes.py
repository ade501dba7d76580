# SPDX-License-Identifier: Apache-2.0
"""Data that changes midway: each source goes on, nothing twice, and what is lost is counted."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pretrain.data import DataConfig, DataError, SourceConfig, open_dataset
from pretrain.data.order import SourceOrder
from pretrain.data.tail import TailOrder
from tests.pretrain.data.shard_folders import documents, write_folder

SEQ = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("changes")
    for number, name in enumerate("abc"):
        write_folder(root / name, documents(60, seed=number))
    return root


def config(folders, weights, on_change="continue", **more):
    sources = [SourceConfig(path=str(folders / name), weight=w) for name, w in weights.items()]
    return DataConfig(train=sources, on_change=on_change, **more)


def draw(dataset, first, count):
    """(source path, first token) of samples."""
    places = [dataset.place(sample) for sample in range(first, first + count)]
    return [(str(dataset.shards[s].directory)[-1], start) for s, start in places]


def state_at(dataset, consumed):
    return json.loads(json.dumps(dataset.state_dict(consumed)))


def test_a_blend_that_changes_goes_on_in_every_source(folders):
    """Each source gives the samples that it gives alone, in sequence, over the change."""
    alone = {n: open_dataset(config(folders, {n: 1.0}), SEQ, seed=1) for n in "abc"}
    first = open_dataset(config(folders, {"a": 0.7, "b": 0.3}), SEQ, seed=1)
    found = draw(first, 0, 151)
    second = open_dataset(
        config(folders, {"a": 0.2, "b": 0.3, "c": 0.5}), SEQ, 1, state=state_at(first, 151)
    )
    found += draw(second, 151, 200)
    third = open_dataset(config(folders, {"b": 0.5, "c": 0.5}), SEQ, 1, state=state_at(second, 351))
    found += draw(third, 351, 100)
    # Back again: source a goes on where it was left two changes ago.
    fourth = open_dataset(config(folders, {"a": 1.0}), SEQ, 1, state=state_at(third, 451))
    found += draw(fourth, 451, 60)
    for name in "abc":
        mine = [start for source, start in found if source == name]
        assert mine == [start for _, start in draw(alone[name], 0, len(mine))]
    shares = [sum(source == name for source, _ in found[151:351]) for name in "abc"]
    assert np.abs(np.array(shares) - [40, 60, 100]).max() <= 2
    counts = {row["path"][-1]: row["samples"] for row in fourth.consumed(511)}
    assert counts["a"] == sum(source == "a" for source, _ in found)


def test_a_resume_after_the_change_is_the_same_sequence(folders):
    first = open_dataset(config(folders, {"a": 1.0}), SEQ, seed=1)
    changed = config(folders, {"a": 0.5, "b": 0.5})
    second = open_dataset(changed, 2 * SEQ, 1, state=state_at(first, 40))
    assert second.changes
    again = open_dataset(changed, 2 * SEQ, 1, state=state_at(second, 77))
    assert again.changes == []
    assert again.fingerprint == second.fingerprint != first.fingerprint
    assert draw(again, 77, 100) == draw(second, 77, 100)
    # The settings that made the change are not needed any more; another change is refused.
    refuse = config(folders, {"a": 0.5, "b": 0.5}, on_change="refuse")
    third = open_dataset(refuse, 2 * SEQ, 1, state=state_at(second, 77))
    assert third.check_state(state_at(second, 77)) == 77
    other = config(folders, {"a": 0.4, "b": 0.6}, on_change="refuse")
    fourth = open_dataset(other, 2 * SEQ, 1, state=state_at(second, 77))
    with pytest.raises(DataError, match=r"set data.on_change=continue"):
        fourth.check_state(state_at(second, 77))


def test_a_change_before_anything_was_read_is_a_start(folders):
    first = open_dataset(config(folders, {"a": 1.0}), SEQ, seed=1)
    changed = config(folders, {"b": 1.0})
    second = open_dataset(changed, SEQ, 1, state=state_at(first, 0))
    assert second.fingerprint == open_dataset(changed, SEQ, 1).fingerprint


def test_curricula_count_in_samples_of_the_run_over_a_change(folders):
    curve = {"a": [(0, 1.0), (100, 0.0)], "b": [(0, 0.0), (100, 1.0)]}
    first = open_dataset(config(folders, curve), SEQ, seed=1)
    curve["c"] = [(0, 0.0), (200, 4.0)]
    second = open_dataset(config(folders, curve), SEQ, 1, state=state_at(first, 90))
    assert {s for s, _ in draw(second, 90, 10)} == {"a"}
    assert {s for s, _ in draw(second, 100, 100)} == {"b"}
    assert sum(s == "c" for s, _ in draw(second, 200, 50)) == 40


def inputs(order, first, last):
    """How often each token of the stream is an input of samples [first, last)."""
    starts = order.starts(np.arange(first, last))
    where = (starts[:, None] + np.arange(order.geometry[0])) % order.tokens
    return np.bincount(where.ravel(), minlength=order.tokens)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_token_is_seen_twice_in_an_epoch_and_the_lost_ones_are_counted(data):
    """Up to three changes of the window's length within one epoch, and the epoch after them."""
    tokens = data.draw(st.integers(60, 1500))

    def order():
        return SourceOrder(
            tokens=tokens,
            seq_length=data.draw(st.integers(1, 50)),
            key=data.draw(st.integers(0, 2**64 - 1)),
            chunk_tokens=data.draw(st.integers(1, 300)),
            chunks_per_group=data.draw(st.integers(1, 5)),
        )

    current = order()
    epoch = data.draw(st.integers(0, 2))
    size = current.samples_per_epoch
    whole = size * current.geometry[0]
    index = epoch * size + data.draw(st.integers(1, size))
    seen, never = inputs(current, epoch * size, index), 0
    if index == (epoch + 1) * size:
        assert current.remaining(index).groups == []
        return
    for _ in range(data.draw(st.integers(1, 3))):
        tail = TailOrder(current, index, order())
        never += tail.never_tokens
        end = data.draw(st.integers(0, tail.tail_samples))
        seen += inputs(tail, 0, end)
        assert seen.max() <= 1
        current, index = tail, end
        if end == tail.tail_samples:
            break
    left = current.remaining(index)
    assert seen.sum() + never + left.tokens == whole
    assert left.epoch == epoch
    start, size = current.tail_samples, current.samples_per_epoch
    again = inputs(current, start, start + size)
    assert again.max() == 1
    assert again.sum() == size * current.geometry[0]
    assert current.epochs(start) == epoch + 1
    assert current.epochs(start + size) == epoch + 2


def test_a_longer_window_reads_what_is_left_of_the_epoch(folders):
    """512 windows of 16 in chunks of 64: after 128 of them, the rest in windows of 32."""
    first = SourceOrder(tokens=8193, seq_length=16, key=3, chunk_tokens=1024, chunks_per_group=2)
    then = SourceOrder(tokens=8193, seq_length=32, key=3, chunk_tokens=1024, chunks_per_group=2)
    tail = TailOrder(first, 128, then)
    # Six whole chunks are left: nothing is lost.
    assert (tail.tail_samples, tail.never_tokens) == (6 * 32, 0)
    seen = inputs(first, 0, 128) + inputs(tail, 0, tail.tail_samples)
    assert seen.max() == 1
    assert seen.sum() == 8192
    # In the middle of a group the gaps between what was read are too short for some windows.
    torn = TailOrder(first, 200, then)
    assert 0 < torn.never_tokens == (512 - 200) * 16 - torn.tail_samples * 32


def test_what_a_change_does_is_said_with_its_numbers(folders, tmp_path):
    write_folder(tmp_path / "a", documents(50, seed=9))
    (tmp_path / "b").symlink_to(folders / "b")
    first = open_dataset(config(tmp_path, {"a": 0.5, "b": 0.5}), SEQ, seed=1)
    write_folder(tmp_path / "a", documents(70, seed=10))
    write_folder(tmp_path / "d", documents(10, seed=11))
    changed = config(tmp_path, {"a": 0.4, "b": 0.4, "d": 0.2})
    second = open_dataset(changed, 2 * SEQ, 1, state=state_at(first, 60))
    said = "\n".join(second.changes)
    assert f"changes at sample 60; sequence length {SEQ} -> {2 * SEQ}" in said
    assert "/d: is new and starts at its beginning" in said
    assert re.search(r"/a: holds other data than before .* read is seen twice", said)
    assert re.search(r"/a: is no longer read, after 0\.\d+ epochs \(about 4\d\d tokens\)", said)
    order = second.orders[1]
    assert isinstance(order, TailOrder)
    assert order.never_tokens > 0
    assert f"of this epoch 0 tokens are seen twice and {order.never_tokens} never" in said
