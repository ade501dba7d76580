# SPDX-License-Identifier: Apache-2.0
"""Batches: elastic in ranks and micro-batch size, document boundaries, validation."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from fused_ops.errors import ConfigError
from pretrain.data import (
    DataConfig,
    DataError,
    SourceConfig,
    TrainLoader,
    ValidLoader,
    open_dataset,
    open_validation,
)
from pretrain.data.batch_sizes import check_batch_sizes
from pretrain.data.dataset import open_both
from pretrain.data.loader import BatchOptions
from tests.pretrain.data.shard_folders import EOD, VOCAB, documents, write_folder

SEQ = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    write_folder(root / "a", documents(30, seed=1))
    write_folder(root / "b", documents(20, seed=2), num_shards=1)
    write_folder(root / "valid", documents(7, seed=3), num_shards=2)
    return root


def config(folders, **settings_):
    sources = [
        SourceConfig(path=str(folders / "a"), weight=0.7),
        SourceConfig(path=str(folders / "b"), weight=0.3),
    ]
    return DataConfig(train=sources, valid=str(folders / "valid"), **settings_)


@pytest.fixture(scope="module")
def dataset(folders):
    return open_dataset(config(folders), SEQ, seed=5)


def step_samples(dataset, consumed, global_batch, micro_batch, dp_size):
    """Sample ids of a step in the order of micro-batch numbers, over all ranks."""
    found = {}
    for rank in range(dp_size):
        loader = TrainLoader(dataset, global_batch, micro_batch, rank, dp_size)
        for batch in loader.step(consumed):
            assert batch["index"] not in found
            found[batch["index"]] = batch
    assert sorted(found) == list(range(global_batch // micro_batch))
    return [found[index] for index in sorted(found)]


def test_ranks_and_micro_batches_do_not_change_the_sequence(dataset):
    """4 -> 2 -> 3 -> 4 ranks over several epochs: each sample once, in sequence, same tokens."""
    expected, seen, consumed = 0, [], 0
    per_epoch = min(order.samples_per_epoch for order in dataset.orders)
    layouts = [(4, 3), (2, 1), (3, 2), (4, 1), (1, 12), (6, 2), (12, 1)]
    while consumed < 4 * per_epoch:
        dp_size, micro = layouts[(consumed // 12) % len(layouts)]
        for batch in step_samples(dataset, consumed, 12, micro, dp_size):
            for row, sample in enumerate(batch["sample_ids"]):
                assert sample == expected
                expected += 1
                window = dataset.sample(sample)
                assert (batch["tokens"][row].numpy() == window[:-1]).all()
                assert (batch["labels"][row].numpy() == window[1:]).all()
                seen.append(window[:-1])
        consumed += 12
    assert expected == consumed == len(seen)


@settings(max_examples=40, deadline=None)
@given(
    plan=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=6
    )
)
def test_any_plan_of_layouts_sees_each_sample_once(dataset, plan):
    """(ranks, micro-batch size, micro-batches a rank) may change at every step: also a ramp."""
    consumed, ids = 0, []
    for dp_size, micro, per_rank in plan:
        size = dp_size * micro * per_rank
        for batch in step_samples(dataset, consumed, size, micro, dp_size):
            ids += batch["sample_ids"]
        consumed += size
    assert ids == list(range(consumed))


def test_every_epoch_of_a_source_holds_its_stream(folders):
    only = DataConfig(train=str(folders / "a"))
    dataset = open_dataset(only, SEQ, seed=1)
    windows = dataset.orders[0].samples_per_epoch
    whole = np.bincount(dataset.shards[0].window(0, dataset.shards[0].tokens), minlength=VOCAB)
    for epoch in (0, 1):
        inputs = [dataset.sample(epoch * windows + i)[:-1] for i in range(windows)]
        counts = np.bincount(np.concatenate(inputs), minlength=VOCAB)
        missing = whole - counts
        assert missing.min() >= 0
        assert missing.sum() == dataset.shards[0].tokens % SEQ


def test_a_second_opening_gives_the_same_and_other_settings_another_sequence(folders, dataset):
    again = open_dataset(config(folders), SEQ, seed=5)
    assert again.fingerprint == dataset.fingerprint
    order = np.random.default_rng(0).permutation(300)
    assert all((again.sample(int(i)) == dataset.sample(int(i))).all() for i in order)
    other = open_dataset(config(folders), SEQ, seed=6)
    assert other.fingerprint != dataset.fingerprint
    assert any((other.sample(i) != dataset.sample(i)).any() for i in range(5))
    assert open_dataset(config(folders, seed=5), SEQ, seed=99).fingerprint == dataset.fingerprint


def test_state_is_one_integer_and_a_fingerprint(folders, dataset):
    state = dataset.state_dict(1234)
    assert dataset.check_state(state) == 1234
    with pytest.raises(DataError, match=r"same sequence of samples"):
        open_dataset(config(folders), SEQ + 1, seed=5).check_state(state)


def test_moving_a_folder_does_not_change_the_sequence(tmp_path):
    write_folder(tmp_path / "one", documents(20))
    first = open_dataset(DataConfig(train=str(tmp_path / "one")), SEQ, seed=1)
    samples = [first.sample(i).tolist() for i in range(20)]
    (tmp_path / "one").rename(tmp_path / "two")
    second = open_dataset(DataConfig(train=str(tmp_path / "two")), SEQ, seed=1)
    assert second.fingerprint == first.fingerprint
    assert [second.sample(i).tolist() for i in range(20)] == samples


def test_prefetch_gives_the_same_batches(dataset):
    plain = TrainLoader(dataset, 8, 2, 1, 2)
    ahead = TrainLoader(dataset, 8, 2, 1, 2, prefetch=True)
    for consumed in (0, 8, 16, 80, 88, 0):
        for one, two in zip(plain.step(consumed), ahead.step(consumed), strict=True):
            assert one["sample_ids"] == two["sample_ids"]
            assert torch.equal(one["tokens"], two["tokens"])
    ahead.close()


def test_a_prepared_step_is_read_once_and_a_changed_one_again(dataset, monkeypatch):
    made, make = [], TrainLoader._make
    monkeypatch.setattr(
        TrainLoader, "_make", lambda self, *step: (made.append(step), make(self, *step))[1]
    )
    plain, ahead = TrainLoader(dataset, 8, 2), TrainLoader(dataset, 8, 2, prefetch=True)
    plain.prepare(8)  # nothing to do it in
    assert made == []
    ahead.prepare(8)
    ahead.leave_out([])
    assert [b["sample_ids"] for b in ahead.step(8)] == [[8, 9], [10, 11], [12, 13], [14, 15]]
    ahead.close()
    assert made.count((8, 8)) == 1
    ahead = TrainLoader(dataset, 8, 2, prefetch=True)
    ahead.prepare(8)
    ahead.leave_out([(9, 9)])
    assert [b["sample_ids"] for b in ahead.step(8)] == [[8, 10], [11, 12], [13, 14], [15, 16]]
    ahead.prepare(0)  # not the step that is then asked for
    assert [b["sample_ids"][0] for b in ahead.step(24)] == [24, 26, 28, 30]
    ahead.close()


def test_prefetch_reports_damage_at_the_step_that_needs_it(tmp_path):
    write_folder(tmp_path, documents(30), num_shards=1)
    loader = TrainLoader(
        open_dataset(DataConfig(train=str(tmp_path)), SEQ, seed=1), 4, 4, prefetch=True
    )
    loader.step(0)
    with open(tmp_path / "shard_00000.bin", "r+b") as stream:
        stream.truncate(0)
    with pytest.raises(DataError, match="now ends at byte"):
        [loader.step(consumed) for consumed in range(4, 40, 4)]
    loader.close()


@pytest.mark.parametrize(
    ("global_batch", "micro", "dp_size", "nearest"),
    [(10, 1, 4, "8 and 12"), (12, 5, 1, "10 and 15"), (3, 2, 4, "size is 8")],
)
def test_a_global_batch_that_does_not_divide_names_the_nearest(
    dataset, global_batch, micro, dp_size, nearest
):
    with pytest.raises(ConfigError, match=nearest):
        TrainLoader(dataset, global_batch, micro, 0, dp_size)
    assert check_batch_sizes(12, 3, 2) == 2


def test_document_boundaries_follow_the_end_ids(folders):
    settings_ = {"isolate_documents": True, "reset_position_ids": True, "eod_mask_loss": True}
    dataset = open_dataset(config(folders, **settings_), SEQ, seed=5)
    loader = TrainLoader(dataset, 6, 3, options=BatchOptions(**settings_))
    for batch in (b for consumed in range(0, 120, 6) for b in loader.step(consumed)):
        flat, bounds = batch["tokens"].flatten(), batch["cu_seqlens"]
        assert bounds.dtype == torch.int32
        starts = set(range(0, 3 * SEQ, SEQ))
        starts |= {int(i) + 1 for i in torch.nonzero(flat == EOD).flatten() if (int(i) + 1) % SEQ}
        assert bounds.tolist() == [*sorted(starts), 3 * SEQ]
        positions = [p for a, b in pairwise(bounds) for p in range(int(b - a))]
        assert batch["position_ids"].flatten().tolist() == positions
        assert torch.equal(batch["loss_mask"], (batch["tokens"] != EOD).float())


def test_plain_batches_have_plain_positions(dataset):
    batch = TrainLoader(dataset, 2, 2).step(0)[0]
    assert batch["cu_seqlens"] is None
    assert batch["position_ids"].tolist() == [list(range(SEQ))] * 2
    assert batch["loss_mask"].tolist() == [[1.0] * SEQ] * 2


@pytest.mark.parametrize(("global_batch", "micro", "dp_size"), [(4, 2, 1), (6, 1, 3), (8, 2, 2)])
def test_validation_holds_every_token_once(folders, global_batch, micro, dp_size):
    source = open_validation(config(folders), SEQ)[""]
    stream = source.shards.window(0, source.shards.tokens)
    found = {}
    lengths = set()
    for rank in range(dp_size):
        loader = ValidLoader(source, global_batch, micro, rank, dp_size)
        batches = list(loader.batches())
        lengths.add((len(batches), *(len(batch) for batch in batches)))
        for batch in (b for step in batches for b in step):
            for row, sample in enumerate(batch["sample_ids"]):
                mask = batch["loss_mask"][row].bool()
                if sample < 0:
                    assert not mask.any()
                    continue
                assert sample not in found
                found[sample] = batch["labels"][row][mask].tolist()
                at = sample * SEQ
                inputs = batch["tokens"][row][mask].tolist()
                assert inputs == stream[at : at + len(inputs)].tolist()
    assert len(lengths) == 1
    labels = [token for sample in sorted(found) for token in found[sample]]
    assert labels == stream[1:].tolist()


def test_validation_takes_the_first_batches(folders):
    source = open_validation(config(folders), SEQ)[""]
    loader = ValidLoader(source, 4, 2)
    steps = list(loader.batches(2))
    assert [b["sample_ids"] for step in steps for b in step] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(list(loader.batches(10_000))) == len(loader)


def test_named_validation_sets(folders):
    both = DataConfig(
        train=str(folders / "a"),
        valid={"near": str(folders / "valid"), "far": str(folders / "b")},
    )
    assert list(open_validation(both, SEQ)) == ["near", "far"]
    assert open_validation(DataConfig(train=str(folders / "a")), SEQ) == {}


def test_all_problems_of_the_sources_come_at_once(tmp_path):
    """Those that are not there, those that are too short, and the weights of them."""
    for name, tokens in (("short", 3), ("single", 1)):
        write_folder(tmp_path / name, [np.arange(tokens)], num_shards=1)
    gone, short, other, single = (str(tmp_path / n) for n in ("gone", "short", "other", "single"))
    bad = DataConfig(
        train=[SourceConfig(path=gone), SourceConfig(path=short, weight=-1)],
        valid={"near": other, "far": single},
    )
    with pytest.raises(ConfigError) as caught:
        open_both(bad, SEQ, seed=1)
    said = (
        f"a data folder must exist; there is no {gone}",
        rf"{short}: a source must hold .* seq_length \+ 1 = 17 tokens; it holds 3",
        f"a weight must be finite and not negative; {short} has -1",
        f"a data folder must exist; there is no {other}",
        f"validation data must hold at least 2 tokens; {single} has 1: give",
    )
    assert len(caught.value.problems) == len(said)
    for found, pattern in zip(caught.value.problems, said):
        assert re.search(pattern, found), found


def test_sources_must_fit_together_and_the_model(folders, tmp_path):
    write_folder(tmp_path / "small", documents(20, vocab=50), vocab=50)
    mixed = DataConfig(
        train=[SourceConfig(path=str(folders / "a")), SourceConfig(path=str(tmp_path / "small"))]
    )
    with pytest.raises(DataError, match=r"agree on vocabulary size"):
        open_dataset(mixed, SEQ, seed=1)
    with pytest.raises(DataError, match=r"model.vocab_size must be at least .* it is 999"):
        open_dataset(config(folders), SEQ, seed=1, vocab_size=999)
    assert open_dataset(config(folders), SEQ, seed=1, vocab_size=1024).vocab_size == VOCAB


def test_data_shorter_than_a_window_is_refused(tmp_path):
    write_folder(tmp_path, [np.array([1, 2, 0])], num_shards=1)
    with pytest.raises(DataError, match=r"seq_length \+ 1 = 17 tokens; it holds 3"):
        open_dataset(DataConfig(train=str(tmp_path)), SEQ, seed=1)
    # A window as long as the data is a sample; validation pads.
    assert sorted(open_dataset(DataConfig(train=str(tmp_path)), 2, seed=1).sample(0)) == [0, 1, 2]


def test_a_document_longer_than_the_sequence_goes_on_in_the_next_window(tmp_path):
    text = np.append(np.arange(1, 200), EOD)
    write_folder(tmp_path, [text], num_shards=1)
    source = open_validation(DataConfig(train="", valid=str(tmp_path)), SEQ)[""]
    loader = ValidLoader(source, 13, 13, options=BatchOptions(isolate_documents=True))
    (batch,) = next(loader.batches())
    assert batch["cu_seqlens"].tolist() == [SEQ * i for i in range(14)]


def test_a_curriculum_changes_the_shares(folders):
    curve = DataConfig(
        train=[
            SourceConfig(path=str(folders / "a"), weight=[(0, 1.0), (100, 0.0)]),
            SourceConfig(path=str(folders / "b"), weight=[(0, 0.0), (100, 1.0)]),
        ]
    )
    dataset = open_dataset(curve, SEQ, seed=1)
    assert [dataset.place(i)[0] for i in range(98, 102)] == [0, 0, 1, 1]
    assert [row["samples"] for row in dataset.consumed(150)] == [100, 50]
