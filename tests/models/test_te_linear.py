# SPDX-License-Identifier: Apache-2.0
"""precision.backend: transformer_engine. Without the package a stand-in takes its place."""

import contextlib
import sys
import types

import pytest
import torch

from fused_ops.errors import ConfigError
from models import te_linear
from pretrain.config import make_config
from pretrain.data.dataset import open_dataset
from pretrain.data.loader import TrainLoader
from pretrain.engine import build_engine
from pretrain.initialize import initialize
from pretrain.train_step import train_step
from tests.toy import make_toy, toy_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


def _losses(folder, steps=3, pattern="M*-", **sections):
    config = make_config(toy_config(folder, pattern, **sections))
    world = initialize(config.parallel, seed=config.run.seed)
    data = open_dataset(config.data, config.model.seq_length, seed=7)
    engine = build_engine(config, world, data.vocab_size)
    loader = TrainLoader(data, config.train.global_batch_size, config.train.micro_batch_size)
    found = []
    for step in range(1, steps + 1):
        engine.precision_state.set_step(step)
        result = train_step(engine, loader.step((step - 1) * 8))
        found.append((result.loss, result.grad_norm))
    loader.close()
    return found, engine


def _standin(monkeypatch, seen):
    """transformer_engine as far as it is used: a linear layer, a context and names of recipes."""

    class Linear(torch.nn.Module):
        def __init__(self, in_features, out_features, **options):
            super().__init__()
            weight = torch.empty(out_features, in_features, device="meta")
            self.weight = torch.nn.Parameter(weight)
            assert options["device"] == "meta"

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight)

    @contextlib.contextmanager
    def autocast(enabled, recipe):
        seen.append((enabled, type(recipe).__name__))
        yield

    package, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("pytorch")
    common, recipe = types.ModuleType("common"), types.ModuleType("recipe")
    pytorch.Linear, pytorch.autocast = Linear, autocast
    for name in filter(None, te_linear.RECIPES.values()):
        setattr(recipe, name, type(name, (), {}))
    package.pytorch, package.common, common.recipe = pytorch, common, recipe
    for name, module in (
        ("", package), (".pytorch", pytorch), (".common", common), (".common.recipe", recipe),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, "transformer_engine" + name, module)


def test_each_layer_computes_with_its_own_weight_and_scaling(folder, monkeypatch):
    """Losses and gradients of plain products, and for each call the scaling that the plan gives."""
    ours, _ = _losses(folder, pattern="*-")
    seen = []
    _standin(monkeypatch, seen)
    precision = {
        "backend": "transformer_engine", "recipe": "fp8_tensorwise",
        "rules": [{"layers": "last 1", "recipe": "bf16"}],
    }  # fmt: skip
    theirs, engine = _losses(folder, pattern="*-", precision=precision)
    for a, b in zip(ours, theirs):
        assert a == pytest.approx(b, rel=2e-6)
    # Attention's two in FP8, those of the MLP (the last layer) in BF16.
    assert [name for _, name in seen[:4]] == ["Float8CurrentScaling"] * 2 + ["NoneType"] * 2
    assert [enabled for enabled, _ in seen[:4]] == [True, True, False, False]
    keys = engine.chunks[0].state_dict().keys()
    assert not [key for key in keys if "_other" in key]


def test_what_it_cannot_compute_is_refused(folder):
    values = toy_config(
        folder, "*E",
        precision={
            "backend": "transformer_engine", "recipe": "nvfp4_fast", "communicate": "packed",
        },
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        make_config(values)
    for text in (
        "the plan has 'nvfp4_fast'",
        "has no experts here; the model has layers.1.mlp.experts.linear_fc1",
        "precision.communicate=packed moves this project's codes",
    ):
        assert any(text in problem for problem in caught.value.problems), text


def test_features_that_its_kernels_do_not_take_are_refused(folder):
    values = toy_config(
        folder, "M-", precision={"backend": "transformer_engine", "recipe": "fp8_tensorwise"}
    )
    with pytest.raises(ConfigError, match=r"multiples of 16; layers.0.mixer.in_proj has 64 to 324"):
        make_config(values)


def test_the_package_must_be_there(folder, monkeypatch):
    monkeypatch.setattr(te_linear.importlib.util, "find_spec", lambda name: None)
    values = toy_config(folder, precision={"backend": "transformer_engine"})
    with pytest.raises(ConfigError, match="transformer-engine, which is not installed"):
        make_config(values, for_training=True)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8_tensorwise", "fp8_blockwise"])
def test_both_back_ends_train_alike_on_a_gpu(folder, recipe):
    """Same weights, same data; BF16 sums in another order, FP8 operands alike."""
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    toy = {"pattern": "*-", "train": {"dtype": "bf16"}}
    ours, _ = _losses(folder, **toy, precision={"recipe": recipe})
    chosen = {"recipe": recipe, "backend": "transformer_engine"}
    theirs, _ = _losses(folder, **toy, precision=chosen)
    for (loss, norm), (other, other_norm) in zip(ours, theirs):
        assert other == pytest.approx(loss, rel=5e-3)
        assert other_norm == pytest.approx(norm, rel=5e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_gpu_without_the_format_is_refused(folder, recipe):
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("this GPU has the format")
    (problem,) = te_linear.machine_problems([recipe])
    assert "needs another GPU" in problem
