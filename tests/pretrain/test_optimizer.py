# SPDX-License-Identifier: Apache-2.0
"""AdamW against torch's, schedules against closed forms, weight-decay groups, problems."""

import math

import pytest
import torch

from fused_ops.errors import ConfigError
from pretrain.adamw import AdamW
from pretrain.optimizer import (
    OptimizerConfig,
    OptimizerSetting,
    build_optimizer,
    build_scheduler,
    decays,
    has_muon,
)


def _parameters(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(17, 33), (5,), (64, 64), (1,)]
    return [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]


def _train(optimizer, parameters, steps, first=0):
    generator = torch.Generator().manual_seed(99)
    gradients = [[torch.randn(p.shape, generator=generator) for p in parameters] for _ in range(20)]
    for step in range(first, first + steps):
        for p, g in zip(parameters, gradients[step]):
            p.grad = g.clone()
        optimizer.step()


def test_adamw_is_torchs_adamw():
    settings = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    ours, theirs = _parameters(1), _parameters(1)
    _train(AdamW(ours, **settings), ours, 20)
    _train(torch.optim.AdamW(theirs, **settings, foreach=False), theirs, 20)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # FP32 sums in another order
    assert not torch.equal(ours[0], _parameters(1)[0]), "the weights moved"


def test_adamw_first_step_by_hand():
    # Bias correction makes the first step lr * sign(g) * |g| / (|g| + eps), after the decay.
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    p.grad = torch.tensor([0.5, -4.0])
    AdamW([p], lr=0.1, weight_decay=0.5, betas=(0.9, 0.99), eps=0.0).step()
    torch.testing.assert_close(p.detach(), torch.tensor([0.95 - 0.1, -1.9 + 0.1]))


def test_adamw_counts_steps_in_the_group_and_resumes_from_its_state():
    whole, halves = _parameters(2), _parameters(2)
    _train(AdamW(whole, lr=1e-2), whole, 10)
    first = AdamW(halves, lr=1e-2)
    _train(first, halves, 5)
    assert [g["step"] for g in first.param_groups] == [5]
    assert all(set(s) == {"exp_avg", "exp_avg_sq"} for s in first.state.values())
    second = AdamW(halves, lr=1e-2)
    second.load_state_dict(first.state_dict())
    _train(second, halves, 5, first=5)
    assert all(torch.equal(a, b) for a, b in zip(whole, halves))


def test_adamw_empty_groups_count_too():
    optimizer = AdamW([{"params": []}, {"params": _parameters(3)}])
    optimizer.step()
    assert [g["step"] for g in optimizer.param_groups] == [1, 1]


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", (96, 64), True),
        ("decoder.layers.1.mlp.experts.linear_fc1.weight", (4, 128, 64), True),
        ("embedding.word_embeddings.weight", (128, 64), True),
        ("output_layer.weight", (128, 64), True),
        ("decoder.layers.2.mixer.conv1d.weight", (192, 1, 4), True),
        ("decoder.layers.0.self_attention.linear_qkv.bias", (96,), False),
        ("decoder.layers.1.mlp.experts.linear_fc1.bias", (4, 128), False),
        ("decoder.layers.0.input_layernorm.weight", (64,), False),
        ("decoder.final_norm.weight", (64,), False),
        ("decoder.layers.0.self_attention.q_layernorm.weight", (16,), False),
        ("decoder.layers.2.mixer.A_log", (4,), False),
        ("decoder.layers.2.mixer.D", (4,), False),
        ("decoder.layers.2.mixer.D", (4, 16), False),
        ("decoder.layers.2.mixer.dt_bias", (4,), False),
    ],
)
def test_what_decays(name, shape, expected):
    assert decays(name, torch.empty(shape)) is expected


class _Groups:
    """What a scheduler sees of an optimizer."""

    def __init__(self):
        self.param_groups = [{"lr": 0.0, "wd_mult": 1.0}, {"lr": 0.0, "wd_mult": 0.0}]


def _rates(config, steps):
    groups = _Groups()
    scheduler = build_scheduler(config, steps, groups)
    rates = []
    for _ in range(steps):
        scheduler.step(1)
        rates.append(groups.param_groups[0]["lr"])
    return rates


SHAPES = {
    "linear": lambda r: 1 - r,
    "cosine": lambda r: 0.5 * (1 + math.cos(math.pi * r)),
    "minus_sqrt": lambda r: 1 - math.sqrt(r),
}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_wsd(shape):
    config = OptimizerConfig(
        lr=1e-2, min_lr=1e-3, warmup_steps=5, decay_fraction=0.25, decay_shape=shape
    )
    rates = _rates(config, 40)
    for n in range(1, 41):
        if n <= 5:
            expected = 1e-2 * n / 5
        elif n <= 30:
            expected = 1e-2
        else:
            expected = 1e-3 + 9e-3 * SHAPES[shape]((n - 30) / 11)
        assert rates[n - 1] == pytest.approx(expected, rel=1e-12), n
    assert rates[0] > 0, "no update is wasted at rate 0"
    assert rates[-1] > 1e-3


def test_cosine_with_a_warmup_fraction():
    rates = _rates(OptimizerConfig(lr=2.0, schedule="cosine", warmup_fraction=0.1), 50)
    for n in range(1, 51):
        expected = 2.0 * n / 5 if n <= 5 else 1.0 + math.cos(math.pi * (n - 5) / 46)
        assert rates[n - 1] == pytest.approx(expected, rel=1e-12), n


def test_constant_after_warmup():
    rates = _rates(OptimizerConfig(lr=1.0, schedule="constant", warmup_steps=4), 8)
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_a_skipped_update_does_not_advance_the_schedule_and_a_resume_continues_it():
    config = OptimizerConfig(lr=1.0, warmup_steps=10)
    groups = _Groups()
    scheduler = build_scheduler(config, 20, groups)
    scheduler.step(1)
    scheduler.step(-1)  # skipped
    scheduler.step(1)
    assert groups.param_groups[0]["lr"] == pytest.approx(0.1)
    scheduler.step(4)
    resumed = build_scheduler(config, 40, _Groups())  # a longer run
    resumed.load_state_dict(scheduler.state_dict())
    assert (resumed.num_steps, resumed.lr_decay_steps) == (5, 41)
    resumed.step(1)
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.6)


def test_weight_decay_follows_the_group():
    groups = _Groups()
    build_scheduler(OptimizerConfig(weight_decay=0.3), 10, groups).step(1)
    assert [g["weight_decay"] for g in groups.param_groups] == [0.3, 0.0]


def test_problems_are_found_together():
    config = OptimizerConfig(
        lr=-1.0,
        weight_decay=-0.1,
        betas=(0.9, 1.0),
        eps=0.0,
        clip_grad=-1.0,
        warmup_steps=20,
        warmup_fraction=0.5,
        decay_fraction=0.0,
        min_loss_scale=0.0,
        loss_scale_window=0,
    )
    text = "\n".join(config.problems(steps=10))
    for name in ("lr", "min_lr", "weight_decay", "betas", "eps", "clip_grad", "warmup_steps"):
        assert f"optimizer.{name} " in text, name
    for name in ("decay_fraction", "initial_loss_scale", "loss_scale_window"):
        assert f"optimizer.{name} " in text, name
    assert OptimizerConfig().problems(steps=1) == []


def test_warmup_and_decay_must_fit():
    config = OptimizerConfig(warmup_steps=6, decay_fraction=0.5)
    assert "must fit in the run" in config.problems(steps=10)[0]
    assert config.problems(steps=12) == []


@pytest.mark.skipif(has_muon(), reason="emerging-optimizers is installed")
def test_muon_without_its_package_is_refused_with_the_remedy():
    setting = OptimizerSetting(steps=1, params_dtype=torch.float32)
    with pytest.raises(ConfigError, match="pip install emerging-optimizers"):
        build_optimizer(OptimizerConfig(name="muon"), setting, [], None)
