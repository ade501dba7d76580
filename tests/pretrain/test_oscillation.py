# SPDX-License-Identifier: Apache-2.0
"""Weights that oscillate are found and reset: element by element, over a run, and as it is told."""

import json
import math
from dataclasses import replace

import pytest
import torch
import yaml

from fused_ops.errors import ConfigError
from fused_ops.quantize import dequantize, quantize
from fused_ops.recipe import RECIPES
from models.config import ParallelConfig
from models.memory import path_bytes, sharing
from models.quantized_weight import forward_weight
from models.throughput import DEVICES
from pretrain.checkpoint.state import data_parallel_group, load_sharded, sharded_state
from pretrain.checkpoint.write import ShardWriter
from pretrain.config import make_config
from pretrain.engine import build_engine
from pretrain.initialize import initialize
from pretrain.oscillation_config import OscillationReset
from pretrain.parity.layouts import parse_layout
from pretrain.parity.toy import VOCAB, micro_batches, read_case, run_config
from pretrain.parity.train import IN_ORDER
from pretrain.preflight import preflight
from pretrain.train_step import train_step
from pretrain.weight_paths import PATHS
from tests.toy import toy_config

ULP = 2.0**-24  # largest relative error of one rounding to FP32


class Run:
    """An engine of the parity toy that resets weights, and its steps."""

    def __init__(self, case, reset=None, layout="dp1", **optimizer):
        config = run_config(case, parse_layout(layout))
        changes = {"oscillation_reset": reset and OscillationReset(**reset), **optimizer}
        self.case = case
        self.config = replace(config, optimizer=replace(config.optimizer, **changes))
        self.engine = build_engine(self.config, initialize(self.config.parallel, seed=11), VOCAB)
        self.step = 0

    def steps(self, count, refuse=lambda loss: False):
        results = []
        for _ in range(count):
            self.step += 1
            self.engine.precision_state.set_step(self.step)
            batches = micro_batches(self.case, self.step, 0, 1, IN_ORDER)[:1]
            results.append(train_step(self.engine, batches, refuse=refuse))
        return results

    @property
    def watch(self):
        return self.engine.oscillation

    def layers(self):
        """{global name: module} of linear layers."""
        return dict(self.engine.plan.bound)

    def states(self):
        """{name: paths} of the layers that have some."""
        found = {}
        for name, module in self.layers().items():
            state = self.watch.paths.masters[module.weight].state
            if PATHS[0] in state:
                found[name] = {key: state[key].flatten() for key in PATHS}
        return found

    def masters(self):
        """{name: FP32 copy of the flat master}."""
        masters = self.watch.paths.masters
        return {
            n: masters[m.weight].tensor.detach().flatten().clone() for n, m in self.layers().items()
        }

    def weights(self):
        return {n: p.detach().clone() for n, p in self.engine.chunks[0].named_parameters()}


def _write(run, name, master):
    """What an update does: a master, and the model's weight from it."""
    place = run.watch.paths.masters[run.layers()[name].weight]
    place.tensor.data.view(-1).copy_(master)
    place.part._copy_main_params_to_model_params()
    run.engine.precision_state.weights_changed()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_weight_that_hops_is_put_onto_its_code_and_one_that_drifts_is_not(dtype):
    """Of a row of a weight [256, 64] element 1 crosses the edge between the codes 2 and 3 at every
    update (quantized path 20 times the weight path), 2 climbs through five codes (about once), 3
    stays, 0 is the amax of all. All others stay too, and of a second layer nothing moves."""
    reset = {"from": 0, "interval": 20, "window": 8, "threshold": 16.0}
    run = Run(read_case("--", f"nvfp4:{dtype}", 8), reset)
    name = "layers.1.mlp.linear_fc1"
    module, start = run.layers()[name], run.masters()[name]
    start[:16] = torch.tensor([0.375] + [0.0] * 15)
    assert start[16:].abs().max() < 0.375

    def quantized():
        tensor, spec = module.weight.detach(), module.recipe.fprop_w
        return dequantize(quantize(tensor, spec, amax=tensor.abs().amax().float())).flatten()

    _write(run, name, start)
    unit = float(quantized()[0]) / 6  # what code 1 of this tile decodes to
    start[1:4] = torch.tensor([2.475, 0.2, 1.3]) * unit
    _write(run, name, start)
    run.engine.precision_state.set_step(1)
    path, elsewhere = start.clone(), run.masters()["layers.0.mlp.linear_fc1"]
    codes = []
    for update in range(8):
        with run.watch.around_update():
            codes.append((quantized()[1:4] / unit).round(decimals=2).tolist())
            path[1] = (2.525 if update % 2 == 0 else 2.475) * unit
            path[2] += 0.4 * unit
            _write(run, name, path)
    assert [code[0] for code in codes] == [2.0, 3.0] * 4
    assert [code[1] for code in codes] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0, 3.0, 3.0]
    assert run.watch.take_report() is None
    path[1] = 2.475 * unit
    expected = path.clone()
    expected[1] = quantized()[1]
    assert expected[1] == pytest.approx(2 * unit, rel=1e-6)
    with run.watch.around_update():
        assert torch.equal(run.masters()[name], expected)
        assert torch.equal(run.masters()["layers.0.mlp.linear_fc1"], elsewhere)
    report = run.watch.take_report()
    assert report["layers"][name] == pytest.approx(1 / (256 * 64), rel=1e-3)
    assert report["share"] == pytest.approx(1 / (2 * (256 + 128) * 64), rel=1e-3)
    # Element 1 makes 8 hops of 0.05 units, 2 eight of 0.4; codes 8 and 3 units.
    assert report["path_ratio"] == pytest.approx((8 + 3) / (8 * 0.05 + 8 * 0.4), rel=1e-2)
    assert run.watch.take_report() is None
    assert run.states() == {}


def test_a_range_of_a_weight_is_that_of_the_whole():
    """As data-parallel ranks cut it: within a matrix, and over the ends of experts."""
    run = Run(read_case("-E", "nvfp4_4over6", 1), {"from": 0})
    for name in ("layers.0.mlp.linear_fc2", "layers.1.mlp.experts.linear_fc1"):
        module = run.layers()[name]
        size = module.weight.numel()
        whole = forward_weight(module, 0, size)
        matrices = module.weight.detach().view(-1, *module.weight.shape[-2:])
        spec = module.recipe.fprop_w
        expected = [dequantize(quantize(w, spec, amax=w.abs().amax().float())) for w in matrices]
        assert torch.equal(whole, torch.cat([each.flatten() for each in expected]))
        for start, end in ((0, 100), (77, size), (size // 3, size // 3 * 2 + 5)):
            assert torch.equal(forward_weight(module, start, end), whole[start:end])


def _forward_codes(module):
    """What the layer's last forward pass multiplied with: fp32, flat, the matrices of a stack."""
    kept = module.weight_codes._entries
    experts = range(module.weight.shape[0]) if module.weight.dim() == 3 else [0]
    return torch.cat([dequantize(kept["fprop.w", e].codes).flatten() for e in experts])


def _watched_run(monkeypatch, case, reset, steps, **optimizer):
    """(run, masters before each update, masters after it, what each forward multiplied with)."""
    run = Run(case, reset, **optimizer)
    before, after, codes = [], [], []
    update = run.engine.optimizer.step_with_ready_grads

    def seen():
        before.append(run.masters())
        codes.append({n: _forward_codes(m) for n, m in run.layers().items()})
        result = update()
        after.append(run.masters())
        return result

    monkeypatch.setattr(run.engine.optimizer, "step_with_ready_grads", seen)
    run.steps(steps)
    return run, before, after, codes


def _paths(name, first, last, before, after, codes):
    """Paths of a layer over the updates first + 1 to last, in FP64 from what was recorded."""
    moved = [(after[u][name].double() - before[u][name].double()).abs() for u in range(first, last)]
    hops = [
        (codes[u][name].double() - codes[u - 1][name].double()).abs()
        for u in range(first + 1, last + 1)
    ]
    return sum(moved), sum(hops)


@pytest.mark.parametrize(
    ("pattern", "recipe"),
    [
        ("-E", "nvfp4_requant"),
        pytest.param("*-", "nvfp4", marks=pytest.mark.slow),
        pytest.param("-", "mxfp8:fp32", marks=pytest.mark.slow),
    ],
)
def test_paths_and_resets_are_those_of_what_was_multiplied(monkeypatch, pattern, recipe):
    """Measured behind 1 step over 4 updates, reset before the next one, measured again from the
    7th step on: against FP64 sums over recorded masters and the codes of the forward passes."""
    case = read_case(pattern, recipe, 8)
    reset = {"from": 0.01, "interval": 5, "window": 4, "threshold": 1.5}
    run, before, after, codes = _watched_run(monkeypatch, case, reset, 8)
    names = list(run.layers())
    assert len(names) == {"-E": 6, "*-": 4, "-": 2}[pattern]
    chosen = 0
    for name in names:
        # FP32: a rounding of each of 4 terms and of each sum.
        moved, hops = _paths(name, 1, 5, before, after, codes)
        near = (hops / moved.clamp_min(1e-30) / 1.5 - 1).abs() < 16 * ULP
        reset_there = (hops >= 1.5 * moved) & (moved > 0)
        kept = torch.where(reset_there, codes[5][name], after[4][name])
        assert torch.equal(before[5][name][~near], kept[~near]), name
        assert near.sum() < 3
        chosen += int(reset_there.sum())
        for update in (0, 1, 2, 3, 4, 6, 7):
            assert update == 0 or torch.equal(before[update][name], after[update - 1][name])
        moved, hops = _paths(name, 6, 7, before, after, codes)
        moved += (after[7][name].double() - before[7][name].double()).abs()
        state = run.states()[name]
        assert ((state["weight_path"].double() - moved).abs() <= 4 * ULP * moved).all(), name
        assert ((state["quantized_path"].double() - hops).abs() <= 4 * ULP * hops).all(), name
        assert torch.equal(state["last_quantized"], codes[7][name])
        assert hops.sum() > 0
    assert chosen > 100
    share = chosen / sum(m.weight.numel() for m in run.layers().values())
    assert run.watch.take_report()["share"] == pytest.approx(share, rel=1e-3)


def test_a_window_alone_changes_nothing_and_neither_do_skipped_steps():
    """Until the reset before the 4th update all bits are those of a run without; then they differ.
    A refused step in the middle counts for nothing."""
    case = read_case("-", "nvfp4", 6)
    plain = Run(case)
    reset = Run(case, {"from": 0, "interval": 3, "window": 3, "threshold": 1.5})
    assert plain.watch is None
    for run in (plain, reset):
        run.steps(2)
    held = {name: {k: v.clone() for k, v in s.items()} for name, s in reset.states().items()}
    assert len(held) == 2
    (refused,) = reset.steps(1, refuse=lambda loss: True)
    plain.steps(1, refuse=lambda loss: True)
    assert refused.refused
    assert reset.watch.updates == 2
    for name, state in reset.states().items():
        assert all(torch.equal(state[key], held[name][key]) for key in PATHS)
    assert plain.steps(1) == reset.steps(1)
    assert _equal(plain.weights(), reset.weights())
    assert reset.watch.take_report() is None
    assert plain.steps(1) == reset.steps(1)
    assert reset.watch.take_report()["share"] > 0.01
    assert not _equal(plain.weights(), reset.weights())
    # window = interval: the next window began with the codes from before the reset.
    assert reset.watch.updates == 1
    assert all(torch.any(state["weight_path"] > 0) for state in reset.states().values())


def _equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_masters_that_are_not_cut_give_the_same_bits(dtype):
    """Without the distributed optimizer, whose masters are whole: weights and paths."""
    case, found = read_case("-", f"nvfp4:{dtype}", 4), []
    for layout in ("dp1", "whole"):
        run = Run(case, {"from": 0, "interval": 3, "window": 2, "threshold": 1.5}, layout)
        losses = [result.loss for result in run.steps(4)]
        assert run.watch.take_report()["share"] > 0.01
        assert run.watch.updates == 1  # of the second interval
        found.append((losses, run.weights(), run.states()))
    (losses, weights, states), (others, other_weights, other_states) = found
    assert losses == others
    assert _equal(weights, other_weights)
    assert states.keys() == other_states.keys()
    assert all(_equal(states[name], other_states[name]) for name in states)
    assert len(states) == 2


def test_a_running_engine_goes_back_into_a_window(tmp_path):
    """As a rollback does: from the pause behind a reset to the middle of the window before it."""
    run = Run(read_case("-", "nvfp4", 6), {"from": 0, "interval": 5, "window": 3, "threshold": 1.5})
    run.steps(2)
    engine, stated = run.engine, run.watch.state_dict()
    state = sharded_state(engine.chunks, engine.optimizer)
    replicas = data_parallel_group(engine.chunks[0])
    ShardWriter(tmp_path, state, forked=False, replicas=replicas).done(wait=True)
    first, weights = run.steps(3), run.weights()
    assert run.states() == {}
    report = run.watch.take_report()
    load_sharded(tmp_path, engine.chunks, engine.optimizer, None, run.watch.paths)
    assert run.watch.load_state_dict(stated) == []
    assert len(run.states()) == 2
    engine.precision_state.weights_changed()
    engine.scheduler.step(-3)
    run.step = 2
    assert run.steps(3) == first
    assert _equal(run.weights(), weights)
    assert run.watch.take_report() == report


def test_layers_that_are_continued_with_other_codes_are_followed_no_longer(tmp_path):
    """Their paths are of codes that the run no longer multiplies (checkpoint.override)."""
    run = Run(read_case("-", "nvfp4", 6), {"from": 0, "interval": 5, "window": 3, "threshold": 1.5})
    run.steps(2)
    engine, (first, second) = run.engine, run.layers()
    stated = json.loads(json.dumps(run.watch.state_dict()))
    state = sharded_state(engine.chunks, engine.optimizer)
    replicas = data_parallel_group(engine.chunks[0])
    ShardWriter(tmp_path, state, forked=False, replicas=replicas).done(wait=True)
    engine.plan._hand_out({**engine.plan.recipes(), first: RECIPES["nvfp4_fast"]})
    load_sharded(tmp_path, engine.chunks, engine.optimizer, None, run.watch.paths)
    run.watch.load_state_dict(stated)
    assert set(run.states()) == {second}
    run.steps(3)
    assert run.watch.state_dict() == {"updates": 5, "codes": {}}
    assert set(run.watch.take_report()["layers"]) == {second}


def test_layers_that_a_schedule_raises_are_followed_no_longer():
    case = read_case("-", "nvfp4", 6)
    run = Run(case, {"from": 0, "interval": 4, "window": 3, "threshold": 1.5})
    first, second = run.layers()
    run.steps(2)
    assert set(run.states()) == {first, second}
    plan, high = run.engine.plan, RECIPES["bf16"]
    plan._hand_out({**plan.recipes(), first: high})
    run.steps(1)
    assert set(run.states()) == {second}
    before = run.masters()
    with run.watch.around_update():
        assert torch.equal(run.masters()[first], before[first])
        assert not torch.equal(run.masters()[second], before[second])
    assert set(run.watch.take_report()["layers"]) == {second}
    plan._hand_out({**plan.recipes(), first: RECIPES["mxfp8"], second: high})
    run.steps(1)
    assert set(run.states()) == {first}  # a new window, with what is quantized now


def test_the_memory_of_paths_is_told_before(tmp_path):
    """12 bytes an element of the weights in codes, in a window; over the ranks that share it."""
    run = Run(read_case("M-*E", "nvfp4", 6), {"from": 0})
    plan = run.engine.plan
    plan._hand_out({**plan.recipes(), "layers.0.mixer.in_proj": RECIPES["bf16"]})
    recipes = {**plan.recipes(), "layers.0.mixer.in_proj": RECIPES["bf16"]}
    run.engine.precision_state.set_step(1)
    with run.watch.around_update():
        held = sum(t.nbytes for state in run.states().values() for t in state.values())
    one = ParallelConfig()
    assert path_bytes(plan.modules, one, sharing(one, 1), recipes) == held
    assert held == 12 * sum(
        m.weight.numel() for n, m in run.layers().items() if n != "layers.0.mixer.in_proj"
    )
    wide = ParallelConfig(expert_model_parallel_size=4)
    experts = 12 * sum(m.weight.numel() for n, m in run.layers().items() if ".experts." in n)
    expected = (held - experts) / 16 + experts / 16  # a fourth of them, over four ranks
    assert path_bytes(plan.modules, wide, sharing(wide, 16), recipes) == expected
    data = toy_config(tmp_path, "*-", train={"steps": 400}, precision={"recipe": "nvfp4"})
    data["optimizer"]["oscillation_reset"] = {}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(data))
    found = preflight(tmp_path / "run.yaml", ["model.vocab_size=128"], DEVICES["h200"], 1)
    (memory,) = found.memory
    assert memory.parts["paths of weights"] == 12 * 64 * (128 + 64 + 256 + 128)


def _toy_problems(tmp_path, reset, **sections):
    optimizer = {"oscillation_reset": reset, **sections.pop("optimizer", {})}
    sections = {
        "train": {"steps": 400, "dtype": "bf16"},
        "precision": {"recipe": "nvfp4"},
    } | sections
    try:
        make_config(toy_config(tmp_path, "*-", optimizer=optimizer, **sections))
    except ConfigError as error:
        return error.problems
    return []


def test_settings_that_work(tmp_path):
    assert _toy_problems(tmp_path, {}) == []
    assert _toy_problems(tmp_path, {"from": 0.8725}) == []  # behind update 399
    assert _toy_problems(tmp_path, {"from": 0, "interval": 50, "window": 50}) == []
    late = [{"from": 0.9, "gemms": ["fprop"], "recipe": "bf16"}]
    assert _toy_problems(tmp_path, {}, precision={"recipe": "nvfp4", "schedule": late}) == []
    config = OscillationReset()
    assert (config.from_, config.interval, config.window, config.threshold) == (0.6, 200, 50, 16.0)
    assert config.begin(1000) == 600
    assert OscillationReset(**{"from": 0.07}).begin(100) == 7  # not 7.000000000000001, rounded up


@pytest.mark.parametrize(
    ("reset", "words"),
    [
        ({"from": 1.0}, "from must lie in [0, 1), a fraction of train.steps; got 1.0"),
        ({"from": -0.1}, "from must lie in [0, 1), a fraction of train.steps; got -0.1"),
        ({"interval": 0}, "interval must be positive; got 0"),
        ({"window": 0}, "window must be positive; got 0"),
        ({"window": 300}, "window must be at most interval=200; got 300"),
        ({"threshold": 1.0}, "threshold must be above 1"),
        ({"threshold": math.inf}, "threshold must be above 1"),
        ({"from": 0.875}, "put the first reset behind update 400 of train.steps=400"),
    ],
)
def test_settings_that_cannot_work_are_named(tmp_path, reset, words):
    (problem,) = _toy_problems(tmp_path, reset)
    assert problem.startswith("optimizer.oscillation_reset.")
    assert words in problem


def test_all_problems_come_at_once(tmp_path):
    found = _toy_problems(tmp_path, {"from": 2, "threshold": 0, "window": 201})
    assert len(found) == 3


DITHERED = {"format": "nvfp4", "rounding": "stochastic"}
ROTATED = {"format": "nvfp4", "hadamard": 16}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"precision": {"recipe": "bf16"}}, "in none of its windows (from=0.6 on) any layer does"),
        ({"precision": {"recipe": "fp8_delayed"}}, "has 'fp8_delayed'"),
        (
            {"precision": {"recipe": "own", "recipes": {"own": {"fprop_w": DITHERED}}}},
            "has 'nvfp4 1x16 stochastic'",
        ),
        (
            {
                "precision": {
                    "recipe": "own",
                    "recipes": {"own": {"fprop_w": ROTATED, "fprop_x": ROTATED}},
                }
            },
            "has 'nvfp4 1x16 hadamard16'",
        ),
        (
            {
                "precision": {
                    "recipe": "nvfp4",
                    "schedule": [{"from": 0.7, "gemms": ["fprop"], "recipe": "bf16"}],
                }
            },
            "begin before precision.schedule raises them all",
        ),
        ({"optimizer": {"name": "muon"}}, "needs the FP32 masters of optimizer.name=adamw"),
        (
            {"precision": {"recipe": "nvfp4", "backend": "transformer_engine"}},
            "quantizes weights as precision.backend=fused_ops does; got transformer_engine",
        ),
    ],
)
def test_runs_without_weights_to_reset_are_refused(tmp_path, sections, words):
    found = _toy_problems(tmp_path, {}, **sections)
    assert [problem for problem in found if words in problem], found
    assert all(problem.startswith("optimizer.oscillation_reset ") for problem in found)
