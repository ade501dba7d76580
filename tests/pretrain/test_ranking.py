# SPDX-License-Identifier: Apache-2.0
"""Ranking layers: what is measured, what is chosen, and a plan that a run takes."""

import pytest
import torch
import yaml

from fused_ops.errors import ConfigError
from models.gemms import GemmShape
from pretrain.config import load_config, make_config, precision_plan
from pretrain.ranking.choose import flops_of, last_layers, scores, verify, within_gap, within_share
from pretrain.ranking.measure import (
    Damage,
    begin_scales,
    damage,
    each_alone,
    measure,
    quantized_modules,
)
from pretrain.ranking.opened import open_engine, read_batches
from pretrain.ranking.plan import plan_section
from pretrain.trainer import Trainer
from tests.toy import EOD, make_toy, toy_config
from tools.rank_layers import main

PRECISION = {"recipe": "nvfp4", "rules": [{"layers": "3", "recipe": "mxfp8"}]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run file and its checkpoints: a toy after some steps."""
    folder = make_toy(tmp_path_factory.mktemp("toy"))
    data = toy_config(folder, "*-*-", train={"steps": 20}, precision=PRECISION)
    Trainer(make_config(data)).run()
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    return path, folder / "runs" / "toy" / "checkpoints"


@pytest.fixture(scope="module")
def opened(trained):
    config = load_config(trained[0])
    engine, step = open_engine(config, trained[1])
    assert step == 20
    return engine, read_batches(config, 3)


def test_damage_is_that_of_loss_and_gradient(opened):
    """Against sums that are taken here; the plan's recipes come back, and nothing is learnt."""
    engine, batches = opened
    before = {n: p.detach().clone() for n, p in engine.chunks[0].named_parameters()}
    exact = measure(engine, batches[0], {})
    assert len(exact.losses) == 8
    again = damage(measure(engine, batches[0], {}), exact)
    assert again == Damage(0.0, 0.0, 0.0, 0.0)
    found = measure(engine, batches[0], engine.plan.recipes())
    whole = damage(found, exact)
    own, other = (torch.cat([g.flatten() for g in m.gradients]).double() for m in (found, exact))
    assert whole.gradient_error == pytest.approx(float((own - other).norm() / other.norm()))
    assert 0.05 < whole.gradient_error < 0.6
    assert whole.gradient_bias == pytest.approx(float((own - other) @ other / (other @ other)))
    changes = torch.tensor([found.losses[s] - exact.losses[s] for s in exact.losses])
    assert whole.loss_change == pytest.approx(float(changes.mean()), rel=1e-4)
    assert whole.loss_error == pytest.approx(float(changes.std() / 8**0.5), rel=1e-4)
    assert 0 < abs(whole.loss_change) < 0.2
    assert {m.recipe.name for m in engine.chunks[0].modules() if hasattr(m, "recipe")} == {
        *("nvfp4", "mxfp8")
    }
    assert all(torch.equal(p, before[n]) for n, p in engine.chunks[0].named_parameters())


def test_padding_of_the_last_batch_is_no_sample(opened):
    """A sample without a loss would count as one that no precision harms."""
    engine, batches = opened
    counted = {
        sample: float(mask.sum())
        for micro_batch in batches[2]
        for sample, mask in zip(micro_batch["sample_ids"], micro_batch["loss_mask"])
    }
    assert -1 in counted
    found = measure(engine, batches[2], {})
    assert found.losses.keys() == counted.keys() - {-1}
    assert min(found.losses.values()) > 0.5


def test_batches_are_those_that_the_run_validates_on(trained):
    """Document boundaries and masked ends too."""
    config = load_config(trained[0], ["data.eod_mask_loss=true", "data.reset_position_ids=true"])
    (batch,) = read_batches(config, 1)
    tokens = torch.cat([micro_batch["tokens"] for micro_batch in batch])
    masks = torch.cat([micro_batch["loss_mask"] for micro_batch in batch])
    positions = torch.cat([micro_batch["position_ids"] for micro_batch in batch])
    assert torch.equal(masks == 0, tokens == EOD)
    assert bool((masks == 0).any())
    assert bool((positions[:, 1:] == 0).any())


def test_one_gemm_alone_touches_what_it_should(opened):
    """A forward product changes the loss; products of gradients do not."""
    engine, batches = opened
    exact = measure(engine, batches[0], {})
    found = {(n, g): d for n, g, d in each_alone(engine, batches[0], exact, gemms=True)}
    names = quantized_modules(engine)
    assert len(names) == 8
    assert len(found) == 32
    for name in names:
        assert found[name, "fprop"].loss_change == found[name, "all"].loss_change != 0.0
        for gemm in ("dgrad", "wgrad"):
            assert found[name, gemm].loss_change == 0.0
            assert found[name, gemm].gradient_error > 0.0
        parts = sum(found[name, gemm].gradient_error ** 2 for gemm in ("fprop", "dgrad", "wgrad"))
        assert found[name, "all"].gradient_error ** 2 == pytest.approx(parts, rel=0.5)
    fc1 = found["layers.1.mlp.linear_fc1", "all"].gradient_error
    assert fc1 > 3 * found["layers.3.mlp.linear_fc1", "all"].gradient_error, "mxfp8 there"


def _scales(engine):
    """{operand of a layer: (amax in use, the amaxes noted)} of all that are delayed."""
    return {
        (module.gemm_name, slot): (float(scaling.amax), float(scaling.history.abs().sum()))
        for module in engine.chunks[0].modules()
        for slot, scaling in getattr(module, "delayed", {}).items()
    }


def test_delayed_scales_are_the_run_s_and_stay(tmp_path):
    """A run's own, in use at its end; without any, those of the first batch: not the scale 1."""
    folder = make_toy(tmp_path)
    delayed = toy_config(folder, "*-", train={"steps": 3}, precision={"recipe": "fp8_delayed"})
    trainer = Trainer(make_config(delayed))
    trainer.run()
    wanted = _scales(trainer.engine)
    assert len(wanted) == 4 * 5, "dgrad takes the codes of the forward's weight"
    checkpoints = folder / "runs" / "toy" / "checkpoints"
    config = make_config(delayed)
    engine, _ = open_engine(config, checkpoints)
    batch = read_batches(config, 1)[0]
    assert _scales(engine) == wanted
    begin_scales(engine, batch)
    exact = measure(engine, batch, {})
    own = damage(measure(engine, batch, engine.plan.recipes()), exact)
    assert len(list(each_alone(engine, batch, exact, gemms=True))) == 16
    assert _scales(engine) == wanted
    plain = make_config({**delayed, "precision": {"recipe": "nvfp4"}, "run": {
        **delayed["run"], "name": "plain"}})  # fmt: skip
    Trainer(plain).run()
    engine, _ = open_engine(config, folder / "runs" / "plain" / "checkpoints")
    assert _scales(engine) == {}
    unset = damage(measure(engine, batch, engine.plan.recipes()), measure(engine, batch, {}))
    assert _scales(engine) == {}, "a measurement begins nothing"
    begin_scales(engine, batch)
    begun = _scales(engine)
    assert begun.keys() == wanted.keys()
    for module in engine.chunks[0].modules():
        if getattr(module, "delayed", None):
            amax, _ = begun[module.gemm_name, "fprop.w.0"]
            assert amax == float(module.weight.abs().max())
    found = damage(measure(engine, batch, engine.plan.recipes()), measure(engine, batch, {}))
    assert _scales(engine) == begun
    assert found.gradient_error != unset.gradient_error
    assert 0.03 < own.gradient_error < 0.3, "8 bits: 4 bits have 0.2 to 0.6"
    assert 0.03 < found.gradient_error < 0.3


MODULES = [
    GemmShape(name=f"layers.{i}.mlp.linear_fc1", position=i, symbol="-", k=16, n=16 * (i + 1))
    for i in range(4)
]
NAMES = [module.name for module in MODULES]


def _damages(losses, errors):
    return {n: Damage(loss, 0.0, e, 0.0) for n, loss, e in zip(NAMES, losses, errors)}


def test_layers_are_chosen_for_their_flops():
    """FLOPs 1 2 3 4 of 10; loss shares .4 .5 .1 0, error shares 0 0 .5 .5."""
    damages = _damages([4e-3, 5e-3, 1e-3, -1.0], [0.0, 0.0, 1.0, 1.0])
    assert scores(damages, "loss")[NAMES[1]] == pytest.approx(0.5)
    assert scores(damages, "gradient")[NAMES[3]] == pytest.approx(0.5)
    assert scores(damages, "both")[NAMES[2]] == pytest.approx(0.3)
    by_loss = scores(damages, "loss")
    assert within_share(by_loss, MODULES, 0.3) == NAMES[:2]
    assert within_share(by_loss, MODULES, 0.45) == [NAMES[0], NAMES[1]]
    # .2 .25 .3 .25: most for the FLOPs first is layers 0 and 1, .45; most first is 2 and 0, .5.
    assert within_share(scores(damages, "both"), MODULES, 0.4) == [NAMES[2], NAMES[0]]
    # The one that does most fits; a small one before it, more for its FLOPs, would take its room.
    assert within_share(dict(zip(NAMES, [0.3, 0.0, 0.0, 0.7])), MODULES, 0.45) == [NAMES[3]]
    with pytest.raises(ConfigError, match=r"smallest has 0\.100"):
        within_share(by_loss, MODULES, 0.05)
    with pytest.raises(ConfigError, match="none does any on this batch"):
        within_share(dict.fromkeys(NAMES, 0.0), MODULES, 0.9)
    assert last_layers(NAMES, MODULES, 0.4) == [NAMES[3]]
    assert last_layers(NAMES, MODULES, 0.6) == [NAMES[3], NAMES[1]]
    predicting = GemmShape(name="mtp.0.eh_proj", position=None, symbol="-", k=16, n=16)
    last = last_layers([*NAMES, predicting.name], [*MODULES, predicting], 0.4)
    assert last == [NAMES[3]], "a prediction layer is no last layer"
    assert flops_of(NAMES[:2], MODULES) == pytest.approx(0.3)
    # All together lose twice what the layers lose alone: 20e-3.
    assert within_gap(by_loss, damages, MODULES, 0.02, 0.021) == []
    assert within_gap(by_loss, damages, MODULES, 0.02, 0.0121) == [NAMES[0]]
    assert within_gap(by_loss, damages, MODULES, 0.02, 0.002) == NAMES[:2]
    assert set(within_gap(by_loss, damages, MODULES, 0.02, 0.0)) >= set(NAMES[:3])


def test_the_verdict_says_which_is_better(opened):
    """Everything in BF16 beats nothing; the other way round it says that it does not."""
    engine, batches = opened
    names = quantized_modules(engine)
    better = verify(engine, batches[1:], names, [])
    assert better.plan.loss_change == 0.0
    assert better.last == better.none
    worse = verify(engine, batches[1:], [], names)
    assert worse.difference == -better.difference
    same = verify(engine, batches[1:], names[:1], names[:1])
    assert same.difference == 0.0
    assert "does not distinguishably beat" in same.text
    if better.difference + better.half < 0:
        assert "the plan beats" in better.text
        assert "does NOT beat" in worse.text


def test_command_line_writes_a_plan_that_a_run_takes(trained, tmp_path, capsys):
    config, checkpoints = map(str, trained)
    out = tmp_path / "plan.yaml"
    words = [config, checkpoints, "--output", str(out)]
    assert main([*words, "--bf16-share", "0.4", "--verify", "1"]) == 0
    said = capsys.readouterr().out
    assert "the last layers" in said
    assert "gradient error" in said
    data = yaml.safe_load(out.read_text())
    chosen = [rule["modules"] for rule in data["precision"]["rules"] if rule["recipe"] == "bf16"]
    assert 1 <= len(chosen) < 8
    run = yaml.safe_load(trained[0].read_text())
    plan = precision_plan(make_config({**run, **data}))
    assert {n for n, recipe in plan.recipes().items() if recipe.name == "bf16"} == set(chosen)
    assert {recipe.name for recipe in plan.recipes().values()} == {"bf16", "nvfp4", "mxfp8"}
    assert flops_of(chosen, plan.modules) <= 0.4
    assert main([*words, "--bf16-share", "1.4"]) == 2
    assert main([config, str(tmp_path), "--output", str(out)]) == 2
    assert main([*words, "precision.recipe=bf16", "precision.rules=[]"]) == 2
    errors = capsys.readouterr().err
    assert "between 0 and 1" in errors
    assert "holds none that is whole" in errors
    assert "nothing is quantized" in errors


LAYERS = "layers.{}.mlp.linear_fc{}"


@pytest.mark.parametrize(
    ("precision", "chosen"),
    [
        # A rule of the run that nothing is left for.
        (PRECISION, [LAYERS.format(3, 1), LAYERS.format(3, 2)]),
        # A named plan whose rules quantize, and come before a run's own.
        ({"plan": "nemotron3"}, ["layers.0.mixer.out_proj", "layers.2.mlp.linear_fc1"]),
        ({"plan": "nemotron3", "recipe": "mxfp8", "rules": [{"layers": "2", "recipe": "nvfp4"}]},
         ["layers.0.mixer.out_proj"]),
        # Other plans for forward and backward.
        ({"recipe": None, "phases": {"pretraining_forward": "fp8_paper",
                                     "pretraining_backward": "nemotron3"}},
         ["layers.0.mixer.out_proj"]),
        # A step that goes to fewer bits than BF16.
        ({"recipe": "nvfp4", "schedule": [{"from": 0.5, "recipe": "mxfp8"}]},
         ["layers.0.mixer.out_proj", "layers.2.mlp.linear_fc1"]),
    ],
)  # fmt: skip
def test_every_plan_loads_and_changes_the_chosen_layers_alone(tmp_path, precision, chosen):
    pattern = "*-*-" if precision is PRECISION else "M*-M*-"
    data = toy_config(make_toy(tmp_path), pattern, precision=precision)
    config = make_config(data)
    section = plan_section(config, chosen)
    written = yaml.safe_load(yaml.safe_dump({"precision": section}))
    before, after = precision_plan(config), precision_plan(make_config({**data, **written}))
    for name, recipe in before.recipes().items():
        assert after.recipes()[name].name == ("bf16" if name in chosen else recipe.name), name
    for number in range(len(before._stages)):
        changed = before._stages[number], after._stages[number]
        assert all(changed[1][n].name == r.name for n, r in changed[0].items() if n not in chosen)
        assert all(changed[1][n].name == "bf16" for n in chosen)


def test_a_gap_is_judged_on_other_batches(opened):
    engine, batches = opened
    names = quantized_modules(engine)
    judged = verify(engine, batches[1:], names, [])
    assert judged.gap(0.0).startswith("the plan keeps --max-gap: loss +0.00e+00")
    none = verify(engine, batches[1:], [], [])
    far, near = none.plan.loss_change + 1.0, none.plan.loss_change - 1.0
    assert none.gap(far).startswith("the plan keeps")
    assert none.gap(near).startswith("the plan does NOT keep")
    assert none.gap(none.plan.loss_change - 1e-9).startswith("whether the plan keeps")
    assert none.samples == len(
        {s for batch in batches[1:] for s in measure(engine, batch, {}).losses}
    )


def test_dropout_is_no_damage(tmp_path, trained):
    """The same neurons fall out in every measurement."""
    overrides = ["model.megatron.hidden_dropout=0.1", "model.megatron.attention_dropout=0.1"]
    config = load_config(trained[0], overrides)
    engine, _ = open_engine(config, trained[1])
    (batch,) = read_batches(config, 1)
    exact = measure(engine, batch, {})
    assert damage(measure(engine, batch, {}), exact) == Damage(0.0, 0.0, 0.0, 0.0)


def test_a_run_of_any_layout_is_ranked_in_one_process(trained, tmp_path, capsys):
    """The run file says how the run is laid out, and its plan keeps to what it trains."""
    words = [*map(str, trained), "--no-gemms", "--verify", "1", "--bf16-share", "0.4"]
    layout = [
        "model.pattern=*-|*-",
        "parallel.tensor_model_parallel_size=2",
        "parallel.sequence_parallel=true",
        "parallel.pipeline_model_parallel_size=2",
    ]
    found = []
    for name, overrides in (("one", []), ("many", layout)):
        out = tmp_path / name
        assert main([*words, *overrides, "--output", str(out)]) == 0
        found.append((capsys.readouterr().out.replace(str(out), ""), out.read_text()))
    assert found[0] == found[1]


def test_mistakes_are_said_before_the_work(trained, tmp_path, capsys):
    """Another model's checkpoint, a plan that cannot be written, no number."""
    words = [*map(str, trained), "--no-gemms"]
    plan = ["--output", str(tmp_path / "plan.yaml")]
    assert main([*words, *plan, "model.pattern=*-", "precision.rules=[]"]) == 2
    assert "holds 8 weights that this model has no place for" in capsys.readouterr().err
    assert main([*words, "--output", str(tmp_path), "--max-gap", "nan", "--verify", "-1"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    assert "--max-gap must be at least 0 per cent; got nan" in said[0]
    assert "(is a directory)" in said[2]
    assert main([*words, *plan, "--bf16-share", "0.01"]) == 2
    said = capsys.readouterr()
    assert "--bf16-share must leave room for a layer; got 0.01, and the smallest has" in said.err
    assert said.out == "", "nothing has been measured"
    assert not list(tmp_path.iterdir())
