# SPDX-License-Identifier: Apache-2.0
"""One step and many: accumulation, overflow, skipping, evaluation, repetition."""

import math

import pytest
import torch

import pretrain.train_step
from fused_ops import grouped_linear, linear
from fused_ops.main_grad import beta_of, sum_of
from pretrain.config import make_config
from pretrain.data.dataset import open_dataset, open_validation
from pretrain.data.loader import TrainLoader, ValidLoader
from pretrain.engine import build_engine
from pretrain.evaluate import evaluate, evaluate_sets
from pretrain.initialize import initialize
from pretrain.train_step import learning_rate, train_step
from tests.toy import make_toy, toy_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_toy(tmp_path_factory.mktemp("toy"))


class _Run:
    """An engine and its data, without the run around them."""

    def __init__(self, folder, pattern="*-", **sections):
        self.config = make_config(toy_config(folder, pattern, **sections))
        world = initialize(self.config.parallel, seed=self.config.run.seed)
        self.data = open_dataset(self.config.data, self.config.model.seq_length, seed=7)
        self.engine = build_engine(self.config, world, self.data.vocab_size)
        train = self.config.train
        self.loader = TrainLoader(self.data, train.global_batch_size, train.micro_batch_size)
        self.step = 0

    def steps(self, count):
        results = []
        for _ in range(count):
            batches = self.loader.step(self.step * self.config.train.global_batch_size)
            self.step += 1
            self.engine.precision_state.set_step(self.step)
            results.append(train_step(self.engine, batches))
        return results

    def validate(self):
        sets = open_validation(self.config.data, self.config.model.seq_length)
        loader = ValidLoader(sets[""], 8, 4)
        return evaluate(self.engine, loader.batches(2))

    def weights(self):
        named = self.engine.chunks[0].named_parameters()
        return {name: p.detach().clone() for name, p in named}


def _same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("pattern", ["*-", "M*E"])
def test_micro_batches_do_not_change_loss_and_gradient(folder, pattern):
    """The gradient is that of the mean over the tokens of the global batch."""
    whole = _Run(folder, pattern, train={"micro_batch_size": 8}).steps(3)
    parts = _Run(folder, pattern, train={"micro_batch_size": 2}).steps(3)
    for a, b in zip(whole, parts):
        # FP32 sums in another order; later steps carry it on.
        assert a.loss == pytest.approx(b.loss, rel=2e-6)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=2e-5)
    assert whole[2].loss < whole[0].loss


def test_a_vocabulary_larger_than_the_data_s_is_what_is_built(folder):
    """The table and the head have the rows that the run file asks for, padded; not the data's."""
    asked = {"vocab_size": 300, "make_vocab_size_divisible_by": 16}
    run = _Run(folder, "*-", model=asked)
    rows = {name.removeprefix("module."): len(w) for name, w in run.weights().items()}
    assert run.data.vocab_size == 128
    assert rows["embedding.word_embeddings.weight"] == rows["output_layer.weight"] == 304
    (result,) = run.steps(1)
    # Before it has learned anything, every one of the 304 entries is as likely as another.
    assert result.loss == pytest.approx(math.log(304), abs=0.3)
    assert result.loss > math.log(128) + 0.3


def test_the_gradient_is_the_slope_of_the_loss(folder):
    """Along its own direction the loss rises by the gradient's norm, by central difference.

    Without experts: the choice of experts jumps.
    """
    run = _Run(folder, "M*-", optimizer={"lr": 1e-20, "weight_decay": 0.0, "clip_grad": 0.0})
    batches = run.loader.step(0)
    norm = train_step(run.engine, batches).grad_norm
    parameters = list(run.engine.chunks[0].parameters())
    gradients = [p.main_grad.clone() for p in parameters]
    assert norm == pytest.approx(math.sqrt(sum(float(g.square().sum()) for g in gradients)))

    def loss_at(distance):
        with torch.no_grad():
            for p, g in zip(parameters, gradients):
                p.add_(g, alpha=distance / norm)
            value = evaluate(run.engine, [batches])
            for p, g in zip(parameters, gradients):
                p.sub_(g, alpha=distance / norm)
        return value

    # FP32 losses near 5 carry 5e-7 into a difference of about 0.02 * norm; curvature adds 1e-4.
    slope = (loss_at(0.01) - loss_at(-0.01)) / 0.02
    assert slope == pytest.approx(norm, rel=2e-3)


def test_the_first_micro_batch_need_not_be_added(folder, monkeypatch):
    """Written over the zeros it gives the bits of an addition, recomputation and all."""
    megatron = toy_config(folder, "M*E-")["model"]["megatron"]
    megatron |= {"recompute_granularity": "full", "recompute_method": "uniform"}
    megatron |= {"recompute_num_layers": 1}
    settings = {
        "model": {"megatron": megatron},
        "train": {"dtype": "bf16", "micro_batch_size": 4},
        "precision": {"recipe": "nvfp4_fast"},
    }
    found, betas = [], {True: [], False: []}
    for marks in (True, False):
        run = _Run(folder, "M*E-", **settings)
        parameters = dict(run.engine.chunks[0].named_parameters())
        with monkeypatch.context() as patch:
            if not marks:
                patch.setattr(pretrain.train_step, "mark_zeroed", lambda *arguments: None)
            for module in (linear, grouped_linear):
                patch.setattr(
                    module, "sum_of", lambda w, m=marks: betas[m].append(beta_of(w)) or sum_of(w)
                )
            results = run.steps(2)
        assert all(beta_of(p) == 1 for p in parameters.values())
        found.append((results, {n: p.main_grad.clone() for n, p in parameters.items()}))
        found[-1][1].update({f"{n} weight": p.detach() for n, p in parameters.items()})
    assert found[0][0] == found[1][0]
    assert _same(found[0][1], found[1][1])
    # Two micro-batches: the first of them written, the second added.
    assert betas[True].count(0) == betas[True].count(1) > 0
    assert betas[False] == [1] * len(betas[True])


def test_a_signal_during_a_step_ends_it(folder, monkeypatch):
    """Not the next one: an evaluation may lie between, longer than a scheduler waits."""
    run, received, prepare = _Run(folder), [], pretrain.train_step.prepare

    def during(engine, batch):
        received.append(True)
        return prepare(engine, batch)

    monkeypatch.setattr(pretrain.train_step, "prepare", during)
    assert train_step(run.engine, run.loader.step(0), lambda: bool(received)).stop
    assert not train_step(run.engine, run.loader.step(8), lambda: False).stop


def test_masked_tokens_do_not_count(folder):
    run, half = _Run(folder), _Run(folder)
    batches = [dict(b) for b in run.loader.step(0)]
    for batch in batches:
        batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    batches[0]["loss_mask"][0, :5] = 1
    result = train_step(run.engine, batches)
    assert result.tokens == 5
    with torch.no_grad():
        b = batches[0]
        model = half.engine.chunks[0].module
        losses = model(b["tokens"], b["position_ids"], None, labels=b["labels"])
    assert result.loss == pytest.approx(float(losses[0, :5].mean()), rel=1e-6)


def test_two_runs_are_bitwise_equal(folder):
    settings = {"train": {"dtype": "bf16"}, "precision": {"recipe": "nvfp4"}}
    first, second = _Run(folder, "M*E", **settings), None
    a = first.steps(3)
    weights = first.weights()
    second = _Run(folder, "M*E", **settings)
    assert second.steps(3) == a
    assert _same(second.weights(), weights)


def test_a_deeper_model_is_trained_after_another_one(folder):
    """megatron-core keeps losses of routers and predictions by layer, for the whole process."""
    losses = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
    found = []
    for pattern in ("E/-", "*-*E/-/-", "E/-"):
        megatron = toy_config(folder, pattern)["model"]["megatron"] | losses
        found.append(_Run(folder, pattern, model={"megatron": megatron}).steps(1)[0].loss)
    assert found[0] == found[2] != found[1]


def test_evaluation_leaves_no_trace(folder):
    settings = {
        "model": {"megatron": {**toy_config(folder)["model"]["megatron"], "hidden_dropout": 0.1}},
        "train": {"dtype": "bf16"},
        "precision": {"recipe": "nvfp4"},
    }
    plain = _Run(folder, **settings)
    expected = plain.steps(4)
    run = _Run(folder, **settings)
    results = run.steps(2)
    before = torch.get_rng_state()
    first, second = run.validate(), run.validate()
    assert torch.equal(torch.get_rng_state(), before)
    assert first == second, "deterministic"
    assert 3.0 < first < 6.0
    assert all(chunk.training for chunk in run.engine.chunks)
    assert results + run.steps(2) == expected


def test_fp16_skips_then_trains(folder):
    """An overflow leaves weights, moments and schedule alone, and halves the scale once."""
    run = _Run(
        folder,
        train={"dtype": "fp16", "steps": 40},
        optimizer={"loss_scale_hysteresis": 1, "warmup_steps": 10, "schedule": "wsd"},
    )
    optimizer, weights = run.engine.optimizer, run.weights()
    scales = [float(optimizer.get_loss_scale())]
    skipped = 0
    while not (result := run.steps(1)[0]).updated:
        skipped += 1
        assert math.isinf(result.grad_norm)
        assert _same(run.weights(), weights)
        assert [g["step"] for g in optimizer.param_groups] == [0] * len(optimizer.param_groups)
        assert result.lr == pytest.approx(3e-4)
        scales.append(float(optimizer.get_loss_scale()))
    assert 5 < skipped < 30
    assert scales == [2.0**32 / 2**i for i in range(skipped + 1)]
    exact = _Run(folder, train={"dtype": "fp32"})
    exact.step = skipped  # the same samples
    reference = exact.steps(1)[0]
    # Unscaled once: the norm is that of FP32 up to FP16's rounding of operands.
    assert result.grad_norm == pytest.approx(reference.grad_norm, rel=0.02)
    assert result.loss == pytest.approx(reference.loss, rel=2e-3)
    later = run.steps(10)
    assert all(r.updated for r in later)
    assert later[-1].loss < result.loss
    assert run.engine.scheduler.num_steps == 11


def test_the_scale_grows_after_its_window_and_its_counters_are_saved(folder):
    settings = {"initial_loss_scale": 1024.0, "loss_scale_window": 3}
    run = _Run(folder, train={"dtype": "fp16"}, optimizer=settings)
    run.steps(4)
    scaler = run.engine.optimizer.chained_optimizers[0].grad_scaler
    assert float(scaler.scale) == 2048.0
    state = run.engine.optimizer.chained_optimizers[0].state_dict()["grad_scaler"]
    assert (state["growth_tracker"], state["hysteresis_tracker"]) == (1, 2)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_step_that_meets_a_nonfinite_operand_is_skipped(folder, monkeypatch, dtype):
    """The flag alone decides: the codes of such an operand, and so the gradients, are finite."""
    run = _Run(folder, train={"dtype": dtype}, optimizer={"initial_loss_scale": 256.0})
    assert run.steps(1)[0].updated
    weights, original = run.weights(), pretrain.train_step.run_schedule

    def with_flag(engine, batches, forward_only):
        sums = original(engine, batches, forward_only)
        engine.precision_state.nonfinite.fill_(True)
        return sums

    monkeypatch.setattr(pretrain.train_step, "run_schedule", with_flag)
    result = run.steps(1)[0]
    assert (result.updated, result.nonfinite_operand) == (False, True)
    assert _same(run.weights(), weights)
    monkeypatch.undo()
    result = run.steps(1)[0]
    assert (result.updated, result.nonfinite_operand) == (True, False), "the flag is reset"


def test_a_gradient_that_is_not_finite_is_skipped(folder, monkeypatch):
    run = _Run(folder)
    run.steps(1)
    weights, original = run.weights(), pretrain.train_step.run_schedule

    def with_nan(engine, batches, forward_only):
        sums = original(engine, batches, forward_only)
        engine.chunks[0].buffers[0].grad_data[3] = math.nan
        return sums

    monkeypatch.setattr(pretrain.train_step, "run_schedule", with_nan)
    result = run.steps(1)[0]
    assert (result.updated, result.nonfinite_operand) == (False, False)
    assert math.isnan(result.grad_norm)
    assert _same(run.weights(), weights)
    assert run.engine.scheduler.num_steps == 1


def test_clipping_scales_the_whole_gradient(folder):
    free = _Run(folder, optimizer={"clip_grad": 0.0})
    clipped = _Run(folder, optimizer={"clip_grad": 1e-3})
    a, b = free.steps(1)[0], clipped.steps(1)[0]
    assert a.grad_norm == b.grad_norm, "reported before clipping"
    moments = [
        torch.cat([s["exp_avg"].flatten() for s in run.engine.optimizer.optimizer.state.values()])
        for run in (free, clipped)
    ]
    torch.testing.assert_close(moments[1], moments[0] * (1e-3 / a.grad_norm), rtol=1e-4, atol=0)
    assert float(moments[1].norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)  # (1 - beta1) * clip


def test_masters_are_fp32_and_groups_are_as_said(folder):
    run = _Run(folder, "M*E", train={"dtype": "bf16"})
    groups = run.engine.optimizer.param_groups
    for group in groups:
        assert all(p.dtype == torch.float32 for p in group["params"])
    decayed = sum(p.numel() for g in groups if g["wd_mult"] for p in g["params"])
    weights = run.weights()
    expected = sum(
        w.numel()
        for name, w in weights.items()
        if w.dim() > 1 and name.rsplit(".", 1)[-1] not in ("bias", "A_log", "D", "dt_bias")
    )
    assert decayed == expected
    assert sum(p.numel() for g in groups for p in g["params"]) == sum(
        w.numel() for w in weights.values()
    )
    assert learning_rate(run.engine.optimizer) > 0


def test_validation_with_nothing_quantized_leaves_no_trace(folder):
    """Its loss is that of a BF16 run with the same weights; training goes on bit for bit."""

    def both(run):
        sets = open_validation(run.config.data, run.config.model.seq_length)
        return evaluate_sets(
            run.engine, {"": lambda: ValidLoader(sets[""], 8, 4).batches(2)}, also_bf16=True
        )

    run = _Run(folder, "*E", precision={"recipe": "nvfp4"})
    run.steps(1)
    weights, found = run.engine.chunks[0].state_dict(), both(run)
    weights = {k: v.clone() for k, v in weights.items() if v is not None}
    later, end = run.steps(2), run.weights()
    other = _Run(folder, "*E", precision={"recipe": "nvfp4"})
    other.steps(1)
    assert other.validate() == found["val_loss"]
    assert other.steps(2) == later
    assert _same(other.weights(), end)
    plain = _Run(folder, "*E", precision={"recipe": "bf16"})
    plain.engine.chunks[0].load_state_dict(weights, strict=False)
    assert plain.validate() == found["val_loss_bf16"]
    assert 1e-4 < abs(found["val_loss"] - found["val_loss_bf16"]) < 0.1
    assert set(both(plain).values()) == {found["val_loss_bf16"]}
