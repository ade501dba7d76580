# SPDX-License-Identifier: Apache-2.0
"""Steps as CUDA graphs: the same bits as without, and a refusal of what cannot be recorded.

Without a GPU a stand-in replays the work as a graph would: with the step's number, the tensors and
all Python values as they were when it was recorded.
"""

import pytest
import torch

from fused_ops.errors import ConfigError
from pretrain import cuda_graph
from pretrain.config import make_config
from pretrain.data.dataset import open_dataset
from pretrain.data.loader import TrainLoader
from pretrain.engine import build_engine
from pretrain.initialize import initialize
from pretrain.train_step import record_steps, train_step
from tests.toy import make_toy, toy_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


class _Standin:
    """Work that is done again as it was recorded."""

    def __init__(self, engine, work, place):
        self.engine, self.work, self.place = engine, work, place
        self.step = engine.precision_state.step
        self.replays = 0

    def replay(self):
        state, now = self.engine.precision_state, self.engine.precision_state.step
        state.step = self.step
        try:
            self.place.copy_(self.work())
        finally:
            state.step = now
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch):
    """What was recorded, where there is no GPU to do it."""
    made = []
    if torch.cuda.is_available():
        original = cuda_graph.record

        def noted(work):
            recorded, place = original(work)
            made.append(recorded)
            return recorded, place

        monkeypatch.setattr(cuda_graph, "record", noted)
        return made

    def on_device(self):
        def work():
            return self._with_table(lambda: self.work(self._batches))

        place = torch.zeros(2, dtype=torch.float64)
        made.append(_Standin(self.engine, work, place))
        return made[-1], place

    monkeypatch.setattr(cuda_graph.StepGraph, "_record_on_device", on_device)
    return made


def _run(folder, graph, steps, pattern="*-", **sections):
    config = make_config(toy_config(folder, pattern, **sections))
    world = initialize(config.parallel, seed=config.run.seed)
    data = open_dataset(config.data, config.model.seq_length, seed=7)
    cuda_graph.leave_default_stream()
    engine = build_engine(config, world, data.vocab_size)
    if graph:
        record_steps(engine)
    size = config.train.global_batch_size
    loader = TrainLoader(data, size, config.train.micro_batch_size)
    results = []
    for step in range(1, steps + 1):
        engine.plan.update((step - 1) * size)
        engine.precision_state.set_step(step)
        results.append(train_step(engine, loader.step((step - 1) * size)))
    loader.close()
    weights = {n: p.detach().clone() for n, p in engine.chunks[0].named_parameters()}
    return [(r.loss, r.grad_norm, r.tokens) for r in results], weights, engine


TWO = {"micro_batch_size": 4, "steps": 8}
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
    plain = _run(folder, False, 6, pattern, **sections)
    recorded = _run(folder, True, 6, pattern, **sections)
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
    plain = _run(folder, False, 5, **sections)
    monkeypatch.setattr(cuda_graph.KeyTable, "refresh", lambda self, seed, step: None)
    assert plain[0] != _run(folder, True, 5, **sections)[0]


def test_a_switch_of_precision_records_anew(folder, graphs):
    schedule = [{"from": 0.5, "gemms": ["fprop"], "recipe": "bf16"}]
    sections = {"train": TWO, "precision": {"recipe": "nvfp4", "schedule": schedule}}
    plain = _run(folder, False, 8, **sections)
    recorded = _run(folder, True, 8, **sections)
    assert plain[0] == recorded[0]
    assert len(graphs) == 2


def test_observed_steps_are_not_replayed(folder, graphs):
    """An observer is Python: a replay would not call it."""
    _, _, engine = _run(folder, True, 3, train=TWO, precision={"recipe": "nvfp4"})
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
