# SPDX-License-Identifier: Apache-2.0
"""Steps as CUDA graphs: the same bits as without, and a refusal of what cannot be recorded."""

import contextlib
import json

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from fused_ops.errors import ConfigError
from pretrain import cuda_graph, recording
from pretrain.config import make_config
from pretrain.data.dataset import open_dataset
from pretrain.data.loader import TrainLoader
from pretrain.recording import NotRecordedError
from pretrain.train_step import train_step
from tests.distributed import run_distributed
from tests.pretrain.graph_ranks import TP2, TWO, compare, noted_graphs, run_steps
from tests.toy import make_toy, toy_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def graphs():
    """What was recorded, where there is no GPU to do it."""
    with noted_graphs() as made:
        yield made


TURNED = {"format": "nvfp4", "hadamard": 16, "signs": "micro_batch"}
RECIPES = {
    "nvfp4": {"recipe": "nvfp4"},
    "nvfp4_fast": {"recipe": "nvfp4_fast", "decode": "fp8"},
    "fp8_delayed": {"recipe": "fp8_delayed"},
    "resampled signs": {
        "recipe": "own",
        "recipes": {
            "own": {
                "base": "nvfp4",
                "wgrad_x": TURNED,
                "wgrad_dy": TURNED | {"rounding": "stochastic"},
            }
        },
    },
}


@pytest.mark.parametrize("name", RECIPES)
def test_the_same_bits_as_without(folder, graphs, name):
    """Each replay draws the dither and the signs of its own step and micro-batch."""
    sections = {"train": TWO, "precision": RECIPES[name]}
    _compare(folder, "*-", sections)
    assert len(graphs) == 1
    if not torch.cuda.is_available():
        assert graphs[0].replays == 6 - cuda_graph.WARM_UP


def _compare(folder, pattern, sections):
    plain = run_steps(folder, False, 6, pattern, **sections)
    recorded = run_steps(folder, True, 6, pattern, **sections)
    assert plain[0] == recorded[0]
    assert all(torch.equal(plain[1][n], recorded[1][n]) for n in plain[1])


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["*-", "M*-"])
@pytest.mark.parametrize("name", [*RECIPES, "bf16", "nvfp4_pow2", "fp8_tensorwise"])
def test_graphs_of_a_device_give_the_same_bits(folder, graphs, name, pattern):
    """With kernels that read two operands' keys from the table, in BF16."""
    precision = RECIPES.get(name, {"recipe": name})
    _compare(folder, pattern, {"train": TWO | {"dtype": "bf16"}, "precision": precision})
    assert len(graphs) == 1


def test_keys_that_are_not_renewed_are_seen(folder, graphs, monkeypatch):
    """The check can fail: without `refresh` each replay would draw what was recorded."""
    sections = {"train": TWO, "precision": RECIPES["nvfp4"]}
    plain = run_steps(folder, False, 5, **sections)
    monkeypatch.setattr(cuda_graph.KeyTable, "refresh", lambda self, seed, step: None)
    assert plain[0] != run_steps(folder, True, 5, **sections)[0]


def test_a_switch_of_precision_records_anew(folder, graphs):
    schedule = [{"from": 0.5, "gemms": ["fprop"], "recipe": "bf16"}]
    sections = {"train": TWO, "precision": {"recipe": "nvfp4", "schedule": schedule}}
    plain = run_steps(folder, False, 8, **sections)
    recorded = run_steps(folder, True, 8, **sections)
    assert plain[0] == recorded[0]
    assert len(graphs) == 2


def test_observed_steps_are_not_replayed(folder, graphs):
    """An observer is Python: a replay would not call it."""
    _, _, engine = run_steps(folder, True, 3, train=TWO, precision={"recipe": "nvfp4"})
    assert not engine.plan.is_observed
    module = next(m for m in engine.chunks[0].modules() if getattr(m, "gemm_name", ""))

    class Watch:
        seen = 0

        def wants(self, micro_batch):
            return True

        def observe(self, *arguments):
            self.seen += 1

    module.observer = Watch()
    assert engine.plan.is_observed
    batches = TrainLoader(open_dataset(make_config(toy_config(folder)).data, 64, seed=7), 8, 4)
    train_step(engine, batches.step(0))
    batches.close()
    assert module.observer.seen > 0


def test_what_cannot_be_recorded_is_refused_at_once(folder):
    values = toy_config(
        folder, "*E",
        train={"cuda_graph_impl": "full_iteration", "dtype": "fp16"},
        data={"isolate_documents": True},
        parallel={"overlap_grad_reduce": True},
        precision={"check_finite": True},
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    texts = [text for text in caught.value.problems if "cuda_graph_impl" in text]
    assert len(texts) == 5
    settings = "model.pattern isolate_documents overlap_grad_reduce fp16 check_finite"
    for word in settings.split():
        assert any(word in text for text in texts), word


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for what a machine without GPU says")
def test_a_machine_without_gpu_refuses(folder):
    values = toy_config(folder, train={"cuda_graph_impl": "full_iteration"})
    with pytest.raises(ConfigError, match="needs a GPU"):
        make_config(values, for_training=True)


# ---- two ranks


def two_ranks(folder):
    """On gloo, with stand-ins: what `compare` finds, and what ranks hear of a failure on one."""
    found = compare(folder, "nvfp4", "packed", "fp32", "-", launched="bf16")
    return found, failures(), states()


def failures():
    """What `record` says on this rank while the other cannot record, and whether it can then; how
    many graphs of this rank are ended with those errors still there."""
    heard, errors = [], []
    with fake_device() as ended:
        for culprit in (1, None, 0):
            try:
                heard.append(recording.record(lambda bad=culprit: work_of(bad))[1])
            except NotRecordedError as error:
                errors.append(error)
                heard.append(str(error))
        recording.free_graphs()
    if dist.get_rank() == 1:  # it comes when the other one has waited long enough
        dist.barrier()
    try:
        recording.agree(None, seconds=0.2)
    except NotRecordedError as error:
        heard.append(str(error))
    if dist.get_rank() == 0:
        dist.barrier()
    return heard, len(ended)


def work_of(culprit):
    if dist.get_rank() == culprit:
        raise ValueError("an item is read")
    return 5


@contextlib.contextmanager
def fake_device():
    """Recording without a device; like the device's, its end fails where something in it has.

    Gives the list of graphs that are ended meanwhile.
    """
    ended = []

    class Graph:
        def reset(self):
            ended.append(self)

    @contextlib.contextmanager
    def graph(recorded, stream, capture_error_mode):
        try:
            yield
        except ValueError as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", graph)
        for name in ("empty_cache", "synchronize", "current_stream"):
            patch.setattr(torch.cuda, name, lambda: None)
        yield ended


def states():
    """How often the generator's state is touched in a fork: while recording, and otherwise."""
    touched = [0]

    def touch(*args, **kwargs):
        touched[0] += 1
        return torch.zeros(16, dtype=torch.uint8)

    tracker, counts = get_cuda_rng_tracker(), []
    before = dict(tracker.get_states())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
            patch.setattr(recording.random_states, name, touch)
        for silence in (recording.leave_random_states(), contextlib.nullcontext()):
            touched[0] = 0
            with silence, tracker.fork():
                recording.random_states._set_all_rng_states(
                    *recording.random_states._get_all_rng_states()
                )
            counts.append(touched[0])
    tracker.set_states(before)
    return counts


@pytest.fixture(scope="module")
def said(folder):
    return run_distributed(two_ranks, 2, timeout=300, args=(folder,))


def test_ranks_that_share_layers(said):
    """With tensor and sequence parallelism and gathers of codes: the bits of launches that gather
    the tensors."""
    for same, recorded, losses in (rank[0] for rank in said):
        assert same
        assert recorded == 1
        assert losses == said[0][0][2]
        assert losses[-1] < losses[0]


def test_a_rank_that_cannot_record(said):
    """All ranks hear of it, with what went wrong first, and nobody waits."""
    for heard, _ in (rank[1] for rank in said):
        assert heard == ["rank 1: ValueError: an item is read", 5,
                         "rank 0: ValueError: an item is read",
                         "rank 1: it has not answered in 0.2 s"]  # fmt: skip


def test_graphs_that_no_rank_replays_are_ended(said):
    """Each rank has recorded one that the other could not, and the error still holds it."""
    for _, ended in (rank[1] for rank in said):
        assert ended == 1


def test_states_of_random_numbers_are_left_alone(said):
    """What a recorded stream forbids, and megatron-core does around the embedding and regions that
    are computed again."""
    for rank in said:
        while_recording, otherwise = rank[2]
        assert while_recording == 0
        assert otherwise > 4


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="two ranks need a GPU each: fewer than 2 are here"
)
def test_ranks_that_share_layers_on_gpus(folder):
    """NCCL's collectives are recorded with the kernels."""
    words = ["-m", "tests.pretrain.graph_ranks", str(folder)]
    text = run_distributed(words, 2, timeout=500)[0]
    line = next(line for line in text.splitlines() if line.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert len(found) == 7
    for name, ranks in found.items():
        for same, recorded, losses in ranks:
            assert same, name
            assert recorded == 1, name
            assert losses[-1] < losses[0], name


def test_dropout_cannot_be_recorded(folder):
    """Where its draws come from states that megatron-core keeps apart."""
    for name, parallel in (("attention_dropout", {}), ("hidden_dropout", TP2)):
        values = toy_config(
            folder, "*-", train={"cuda_graph_impl": "full_iteration"}, parallel=parallel
        )
        values["model"]["megatron"][name] = 0.1
        with pytest.raises(ConfigError, match=f"{name}=0.1; set it to 0"):
            make_config(values)
