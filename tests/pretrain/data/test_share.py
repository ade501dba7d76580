# SPDX-License-Identifier: Apache-2.0
"""One rank of a replica reads; its tensor-, pipeline- and context-parallel ranks get the same."""

import os
from pathlib import Path

import pytest
import torch

from models.config import ParallelConfig
from pretrain.data import DataConfig, DataError, TrainLoader, ValidLoader, open_dataset
from pretrain.data.dataset import open_validation
from pretrain.data.loader import BatchOptions
from pretrain.data.share import DeviceTransfer, Share, SharedTrainLoader, SharedValidLoader
from pretrain.initialize import initialize, shut_down
from tests.distributed import run_distributed
from tests.pretrain.data.shard_folders import documents, write_folder

SEQ, MICRO, BATCH = 16, 2, 8
SHORT = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
}


def _values(batches):
    return [
        {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        for batch in batches
    ]


def _read_in(layouts, folder):
    """For each layout: what this rank is given, what it read itself, and an error of the reader."""
    found = []
    for layout in layouts:
        world = initialize(ParallelConfig(**layout))
        config = DataConfig(train=folder, valid=folder, isolate_documents=True)
        options = BatchOptions.of(config)
        dataset, valid = open_dataset(config, SEQ, seed=1), open_validation(config, SEQ)[""]
        read = _count_windows(dataset)
        place = (world.data_parallel_rank, world.data_parallel_size, options)
        share = Share(world.groups, world.device, MICRO, SEQ)
        loader = SharedTrainLoader(
            TrainLoader(dataset, BATCH, MICRO, *place, prefetch=True), share, world.device
        )
        steps = [_values(loader.step(consumed)) for consumed in (0, BATCH)]
        checks = SharedValidLoader(ValidLoader(valid, BATCH, MICRO, *place), share)
        steps += [_values(batches) for batches in checks.batches(2)]
        loader.close()
        dataset.window = _broken
        failing = SharedTrainLoader(TrainLoader(dataset, BATCH, MICRO, *place), share, world.device)
        try:
            failing.step(0)
            said = "no error"
        except DataError as error:
            said = str(error)
        ranks = [getattr(world.groups, name).rank() for name in ("dp", "tp", "pp", "cp")]
        found.append((ranks, steps, sorted(set(read)), said))
    shut_down()
    return found


def _count_windows(dataset):
    """The samples that are read from now on."""
    read, window = [], dataset.window

    def counted(sample):
        read.append(sample)
        return window(sample)

    dataset.window = counted
    return read


def _broken(sample):
    raise DataError("a shard vanished")


def expected(folder, rank, dp_size):
    config = DataConfig(train=folder, valid=folder, isolate_documents=True)
    options = BatchOptions.of(config)
    place = (BATCH, MICRO, rank, dp_size, options)
    loader = TrainLoader(open_dataset(config, SEQ, seed=1), *place)
    checks = ValidLoader(open_validation(config, SEQ)[""], *place)
    return [
        *(_values(loader.step(consumed)) for consumed in (0, BATCH)),
        *(_values(batches) for batches in checks.batches(2)),
    ]


def check(folder, world_size, layouts):
    """Runs the layouts in one start of processes and compares every rank with a plain loader."""
    write_folder(folder, documents(40, seed=1))
    results = run_distributed(_read_in, world_size, timeout=250, args=(layouts, str(folder)))
    for number, layout in enumerate(layouts):
        replica = 1
        for size in layout.values():
            replica *= size
        dp_size, readers = world_size // replica, 0
        plain = [expected(str(folder), rank, dp_size) for rank in range(dp_size)]
        for ranks, steps, read, said in (result[number] for result in results):
            assert steps == plain[ranks[0]], (layout, ranks)
            reads = ranks[1:] == [0, 0, 0]
            readers += reads
            assert bool(read) == reads, (layout, ranks, read)
            assert said == "a shard vanished"
        assert readers == dp_size


def test_each_kind_of_rank_gets_what_one_reads(tmp_path):
    check(tmp_path, 2, [{name: 2} for name in SHORT] + [{}])


@pytest.mark.slow
def test_all_kinds_together(tmp_path):
    first, second, third = SHORT
    check(tmp_path, 8, [{first: 2, second: 2, third: 2}])
    check(tmp_path / "four", 4, [{first: 2, third: 2}, {second: 2, third: 2}, {first: 2}])


def test_without_other_ranks_the_loaders_own_batches_come_back(tmp_path):
    assert "RANK" not in os.environ
    write_folder(Path(tmp_path), documents(20))
    world = initialize(ParallelConfig())
    loader = TrainLoader(open_dataset(DataConfig(train=str(tmp_path)), SEQ, seed=1), 4, 4)
    shared = SharedTrainLoader(loader, Share(world.groups, world.device, 4, SEQ), world.device)
    assert torch.equal(shared.step(0)[0]["tokens"], loader.step(0)[0]["tokens"])
    assert shared.sizes is loader.sizes


@pytest.mark.gpu
def test_batches_are_copied_to_the_device_while_it_computes(tmp_path):
    write_folder(tmp_path, documents(3000))
    device = torch.device("cuda", 0)
    config = DataConfig(train=str(tmp_path), isolate_documents=True, reset_position_ids=True)
    dataset = open_dataset(config, 512, seed=1)
    place = (dataset, 8, 2, 0, 1, BatchOptions.of(config))
    plain, ahead = TrainLoader(*place), TrainLoader(*place, prefetch=True)
    ahead.transfer = DeviceTransfer(device)
    work = torch.ones(4096, 4096, device=device)
    for consumed in range(0, 80, 8):
        batches = ahead.step(consumed)
        for _ in range(20):  # keeps the device busy while the next step is copied
            work = work @ work * 1e-4
        for one, two in zip(plain.step(consumed), batches, strict=True):
            for name, value in one.items():
                if isinstance(value, torch.Tensor):
                    assert two[name].device == device
                    assert torch.equal(two[name].cpu(), value)
                else:
                    assert two[name] == value
    ahead.close()


@pytest.mark.gpu
def test_replicas_share_on_gpus(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check(tmp_path, 2, [{name: 2} for name in SHORT] + [{}])
