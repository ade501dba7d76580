# SPDX-License-Identifier: Apache-2.0
"""Preflight: problems with their remedies, and what it says of ranks, memory and time."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from fused_ops.quantize.implementations import QUANTIZE
from fused_ops.recipe import RECIPES, get_recipe, is_quantized
from fused_ops.scaled_matmul.hopper import on_fp8_cores
from models.config import ParallelConfig
from models.memory import rank_parameters
from models.throughput import DEVICES, product_kind
from pretrain.config import start_problems
from pretrain.preflight import GIB, fewest_processes, in_flight, preflight
from pretrain.preflight_text import render
from tests.toy import make_toy, toy_config

H200 = DEVICES["h200"]
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def run_file(tmp_path):
    """A run of the 12B hybrid on no data, with changes."""

    def write(**sections):
        data = {
            "run": {"dir": str(tmp_path / "runs")},
            "model": {"preset": "nvfp4-paper-12b"},
            "data": {"train": str(tmp_path / "none")},
            "train": {"steps": 50, "global_batch_size": 16},
            "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            "precision": {"recipe": "nvfp4", "plan": "nvfp4_paper"},
        }
        for name, changes in sections.items():
            data[name] = data.get(name, {}) | changes
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(data))
        return path

    return write


def test_the_12b_hybrid_on_four_gpus(run_file):
    found = preflight(run_file(), [], H200, 4)
    assert found.problems == []
    (memory,) = found.memory
    assert found.parameters.total == pytest.approx(12.31e9, rel=0.01)
    # TP2 x DP2: half of the weights; FP32 gradients; masters and moments of a half of those
    states = memory.parameters * (2 + 4 + 12 / 2)
    own = sum(memory.parts[name] for name in ("weights", "gradients", "optimizer"))
    assert own == pytest.approx(states, rel=1e-4)
    assert own / GIB == pytest.approx(68.8, abs=0.1)
    assert 80 < memory.total / GIB < 110
    assert found.step.limit == "products"
    text = render(found)
    for piece in (
        "no problem found",
        "with rank 0: tensor 0 1; data 0 2",
        "kept, operands: nvfp4",
        "measured: BF16",
        "400 TFLOP/s, attention (measured: 33 ms of the dense step",
        "30 TFLOP/s, scan (measured",
        "300 GB/s (ASSUMED",
        "GPU-hours",
    ):
        assert piece in text


def test_the_shipped_run_of_the_12b_hybrid_on_two_gpus():
    """It fits, and layers that are computed again leave their inputs alone."""
    shipped = ROOT / "examples" / "nvfp4-paper-12b.yaml"
    found = preflight(shipped, [], H200, 2)
    assert found.problems == []
    assert not found.config.checkpoint.at_end
    (memory,) = found.memory
    states = sum(memory.parts[name] for name in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(18 * memory.parameters, rel=1e-4)
    assert memory.total / GIB < 133
    # As it ran on two H200s, with the data's vocabulary: 123.9 GiB by nvidia-smi, 0.818 s a step.
    ran = ["precision.recipe=nvfp4_pow2", "precision.plan=null", "model.vocab_size=32768"]
    measured = preflight(shipped, ran, H200, 2)
    assert measured.parameters.total == pytest.approx(11.31e9, rel=1e-3)
    assert measured.memory[0].total / GIB == pytest.approx(123.9, rel=0.02)
    assert 0.818 / measured.step.total == pytest.approx(1.4, abs=0.05), "as the report says"
    again = [
        f"model.megatron.recompute_{name}"
        for name in ("granularity=full", "method=block", "num_layers=16")
    ]
    (less,) = preflight(shipped, again, H200, 2).memory
    # input and output of the scan and the gated output, on one of two ranks: 28 layers, then 20
    a_layer = 8192 * 2 * (2 * 10240 + 2 * 8 * 128 + 160 + 2 * 10240) / 2
    assert memory.parts["kept, mamba"] == 28 * a_layer
    assert less.parts["kept, mamba"] == 20 * a_layer
    assert less.parts["kept, inputs of layers"] == 16 * 8192 * 2 * 5120 / 2
    assert less.parts["kept, attention"] == memory.parts["kept, attention"] * 5 / 6


def test_ten_thousand_ranks_and_ten_trillion_tokens_fit_on_a_screen(run_file):
    steps = 10**13 // (10_240 * 8192)
    path = run_file(
        train={"steps": steps, "global_batch_size": 10_240},
        parallel={"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True},
    )
    found = preflight(path, [], DEVICES["gb300"], 10_240)
    text = render(found)
    assert found.problems == []
    assert len(text.splitlines()) < 50
    assert "10T tokens" in text
    assert "never run here" in text
    assert "data 0 2 4 .. 5118; pipeline 0 5120" in text
    hours = found.step.total * steps / 3600 * 10_240
    assert f"{hours:,.1f} GPU-hours" in text


def test_every_problem_at_once_with_its_remedy(run_file):
    path = run_file(
        model={"preset": "llama3-8b", "pattern": "*-" * 15, "seq_length": 1000},
        parallel={
            "tensor_model_parallel_size": 3,
            "pipeline_model_parallel_size": 4,
            "context_parallel_size": 3,
        },
        train={"micro_batch_size": 0},
    )
    found = preflight(path, ["train.micro_batch_size=1"], H200, 40)
    text = "\n".join(found.problems)
    for piece in (
        "30 layers, which 4 pipeline stages do not divide",
        "*-*-*-*-|*-*-*-*-|*-*-*-*|-*-*-*-; 28 or 32 layers",
        "the next one is 1008, the one before 990",
        "num_attention_heads (32) must be a multiple of the 3 processes",
        "the next one is 33, the one before 30",
        "the nearest such size is 2",
        "= 36; got 40; start 72, the one before 36",
    ):
        assert piece in text, piece
    assert found.memory == []


def test_one_number_of_processes_is_named_for_dense_layers_and_experts(run_file):
    """16 hold a copy of the dense layers, 24 one of the experts: 48 is a multiple of both."""
    path = run_file(
        model={"preset": "nemotron3-nano-30b-a3b", "megatron": {"num_moe_experts": 129}},
        parallel={
            "tensor_model_parallel_size": 4,
            "pipeline_model_parallel_size": 2,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 3,
        },
        train={"micro_batch_size": 2, "global_batch_size": 7},
    )
    text = "\n".join(preflight(path, [], H200, 50).problems)
    assert text.count("got 50; start 96, the one before 48 with torchrun") == 2
    assert "multiple of train.micro_batch_size=2; got 7; the next one is 8, the one before" in text
    exact = preflight(path, ["train.global_batch_size=6"], H200, 48).problems
    assert exact == [], exact


@pytest.mark.parametrize(
    ("sections", "world", "said"),
    [
        ({"train": {"global_batch_size": 9}}, 8, "the nearest valid sizes are 8 and 12"),
        ({"parallel": {"expert_model_parallel_size": 2}}, 4, "no experts to cut"),
        (
            {"parallel": {"virtual_pipeline_model_parallel_size": 2}},
            4,
            "needs a pipeline",
        ),
        ({"model": {"vocab_size": 100, "make_vocab_size_divisible_by": 5}}, 2, None),
        (
            {"model": {"vocab_size": 257, "make_vocab_size_divisible_by": 1}},
            2,
            "padded vocabulary (257) must be a multiple of the 2 processes",
        ),
        ({"model": {"pattern": "*-||*-"}}, 2, "a pipeline stage without layers"),
        ({"parallel": {"tensor_model_parallel_size": 0}}, None, "must be at least 1, got 0"),
        (
            {"model": {"pattern": "M-*-"}, "parallel": {"pipeline_model_parallel_size": 8}},
            16,
            "use at most 4 stages, or 8 layers",
        ),
        ({"train": {"micro_batch_size": 16, "global_batch_size": 64}}, 8, "a rank needs"),
        *[
            (
                {
                    "model": {
                        "pattern": "*-*-",
                        "megatron": {"microbatch_group_size_per_vp_stage": size},
                    },
                    "train": {"global_batch_size": 16, "micro_batch_size": 2},
                    "parallel": {
                        "pipeline_model_parallel_size": 2,
                        "virtual_pipeline_model_parallel_size": virtual,
                    },
                },
                4,
                said,
            )
            for size, virtual, said in (
                (1, 2, "stage 1 must lie between pipeline_model_parallel_size=2 and the 8"),
                (3, 2, None),
                (7, 2, "per_vp_stage 7 must lie between"),
                (9, 2, "set it to 2, or remove it"),
                (2, None, "needs parallel.virtual_pipeline_model_parallel_size of 2 or more"),
            )
        ],
    ],
)
def test_problems(run_file, sections, world, said):
    found = preflight(run_file(**sections), [], H200, world)
    if said is None:
        assert found.problems == []
    else:
        assert any(said in text for text in found.problems), found.problems


def test_what_makes_a_rank_smaller_can_be_set(run_file):
    """Every remedy of a rank that is too large, taken literally."""
    path = run_file(train={"micro_batch_size": 16, "global_batch_size": 64})
    (said,) = preflight(path, [], H200, 8).problems
    whole, ways = "model.megatron.recompute_granularity=full", said.partition("; try ")[2]
    assert f"train.micro_batch_size=1, {whole} with recompute_method=uniform and" in ways
    rest = re.findall(r"(recompute_(?:method|num_layers)=\w+)", ways)
    again = [whole, *(f"model.megatron.{field}" for field in rest)]
    less = preflight(path, ["train.micro_batch_size=1"], H200, 8)
    least = preflight(path, ["train.micro_batch_size=1", *again], H200, 8)
    assert less.problems == least.problems == []
    assert least.memory[0].total < 0.95 * less.memory[0].total


def test_data_and_checkpoints_are_looked_at(tmp_path):
    folder = make_toy(tmp_path)
    data = toy_config(folder, model={"vocab_size": 100})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(data))
    found = preflight(path, [], H200)
    said = "model.vocab_size must be at least the data's; got 100 and 128"
    assert any(said in text for text in found.problems)
    assert any("set it to 128" in p for p in start_problems(found.config, 1))
    assert preflight(path, ["model.vocab_size=128"], H200).problems == []
    open_vocab = preflight(path, ["model.vocab_size=null"], H200)
    assert open_vocab.shape.vocab_size == 128


def test_what_a_start_would_do_about_checkpoints_is_said(run_file, tmp_path):
    """A folder without checkpoints does not hide `load`, and a missing one is not passed over."""
    path, own = run_file(), [f"run.dir={tmp_path}", "run.name=own"]
    lost = [*own, f"checkpoint.load={tmp_path}/lost"]
    said = f"checkpoint.load is not checked: no whole checkpoint is in {tmp_path}/lost"
    (tmp_path / "own" / "checkpoints").mkdir(parents=True)
    assert said in preflight(path, lost, H200, 1).notes
    (tmp_path / "own" / "checkpoints").rmdir()
    assert said in preflight(path, lost, H200, 1).notes
    must = preflight(path, [*own, "checkpoint.resume=must"], H200, 1)
    assert any("resume=must: no whole checkpoint" in note for note in must.notes)
    (tmp_path / "own" / "checkpoints" / "step_00000003").mkdir(parents=True)
    never = preflight(path, [*own, "checkpoint.resume=never"], H200, 1)
    assert any("already holds checkpoints" in text for text in never.problems)


EXPERTS = {"hidden_size": 64, "num_attention_heads": 4, "num_moe_experts": 4, "moe_router_topk": 2}


@pytest.mark.parametrize(
    ("fields", "world", "said"),
    [
        ({"moe_expert_capacity_factor": 1.0}, 2, "capacity_factor=1.0: each rank drops"),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            2,
            "sinkhorn balances the tokens of each rank",
        ),
        (
            {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1},
            8,
            "micro-batches so far on all 4 data-parallel ranks",
        ),
        ({"hidden_dropout": 0.1, "moe_input_jitter_eps": 0.01}, 2, "hidden_dropout=0.1, moe_input"),
        # one replica; balancing that is the same in every layout
        ({"moe_router_load_balancing_type": "global_aux_loss"}, 2, None),
        ({"moe_router_load_balancing_type": "seq_aux_loss", "hidden_dropout": 0.0}, 8, None),
    ],
)
def test_what_depends_on_the_layout_is_noted(run_file, fields, world, said):
    """Measured with tools.parity's toy in FP32: such losses differ by 4e-5 to 1e-4 of their own."""
    model = {"preset": None, "pattern": "*E", "vocab_size": 256, "megatron": EXPERTS | fields}
    path = run_file(model=model, precision={"recipe": "nvfp4", "plan": None})
    notes = [note for note in preflight(path, [], H200, world).notes if "depends on" in note]
    assert len(notes) == (said is not None), notes
    assert said is None or said in notes[0]
    alone = ["parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false"]
    assert not [n for n in preflight(path, alone, H200, 1).notes if "depends on" in n]


def test_nothing_is_said_of_a_default_that_stands_in(run_file):
    found = preflight(run_file(), ["train.global_batch_size=0"], H200, 64)
    assert [text for text in found.problems if "global_batch_size" in text] == [
        "train.global_batch_size must be greater than or equal to 1; got 0"
    ]


def test_a_document_in_one_scale_with_others_is_noted(run_file):
    path = run_file(data={"isolate_documents": True})
    noted = [n for n in preflight(path, [], H200, 2).notes if "isolate_documents" in n]
    assert len(noted) == 1
    assert noted[0].startswith("data.isolate_documents: nvfp4 scale")
    local = preflight(path, ["precision.recipe=nvfp4_pow2"], H200, 2).notes
    assert not [n for n in local if "isolate_documents" in n]


@pytest.mark.parametrize(
    ("parallel", "overrides", "said"),
    [
        ({"tensor_model_parallel_size": 2}, [], None),
        # the decays of 160 heads are a part of their own: 40 on each of 4 ranks
        ({"tensor_model_parallel_size": 4}, [], "in_proj: dgrad contracts 160 over 4 ranks"),
        ({"context_parallel_size": 2}, ["model.seq_length=8200"], "model.seq_length 8256 would"),
    ],
)
def test_blocks_that_are_not_those_of_one_process_are_noted(run_file, parallel, overrides, said):
    found = preflight(run_file(parallel=parallel), overrides, H200, 4)
    noted = [note for note in found.notes if "not those of one process" in note]
    assert bool(noted) == (said is not None), noted
    assert said is None or said in noted[0]


def test_what_gathers_move(run_file):
    """In BF16 and in codes, in the notes, in the time of a step and in what a rank keeps."""
    path = run_file(parallel={"tensor_model_parallel_size": 2, "sequence_parallel": True})
    plain, packed = (
        preflight(path, ["precision.recipe=nvfp4_pow2", f"precision.communicate={how}"], H200, 2)
        for how in ("bf16", "packed")
    )
    (before,) = [note for note in plain.notes if "sequence-parallel gathers" in note]
    (after,) = [note for note in packed.notes if "sequence-parallel gathers" in note]
    assert before.endswith(after.split(" bring a rank ")[1].split(" a ")[0])
    # in_proj of the run file stays in BF16, and gathers X again in the backward
    assert "3,540.0 MiB a micro-batch, 0.66 of the 5,360.0 MiB" in after
    wire = "tensor-parallel communication"
    ratio = packed.step.parts[wire] / plain.step.parts[wire]
    assert ratio == pytest.approx((1 + 3540 / 5360) / 2, rel=1e-3)
    kept = "kept, operands: nvfp4"
    assert packed.memory[0].parts[kept] < plain.memory[0].parts[kept]
    whole = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
    path = run_file(parallel=whole)
    alone = preflight(path, ["precision.communicate=packed"], H200, 1).notes
    assert any("precision.communicate packed changes nothing here" in note for note in alone)


def test_latent_experts_move_latent_tokens(run_file):
    """Tokens are projected before they go to their experts."""
    model = {"preset": "nemotron3-super-120b-a12b"}
    parallel = {"expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}
    parallel |= {"pipeline_model_parallel_size": 8}
    path = run_file(model=model, parallel=parallel, train={"global_batch_size": 64})
    change = "model.megatron.moe_latent_size="
    latent, wide = (preflight(path, [f"{change}{n}"], H200, 128) for n in (1024, 4096))
    part = "expert-parallel communication"
    assert wide.step.parts[part] == pytest.approx(4 * latent.step.parts[part], rel=1e-12)


def test_fewest_processes():
    assert fewest_processes(ParallelConfig()) == 1
    experts = ParallelConfig(
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        expert_tensor_parallel_size=1,
        expert_model_parallel_size=3,
    )
    assert fewest_processes(experts) == 6


def test_micro_batches_in_flight():
    """1F1B holds one for each stage that is still to come; interleaved stages hold more."""
    plain = ParallelConfig(pipeline_model_parallel_size=4)
    assert [in_flight(plain, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(plain, 0, 2) == 2
    two = replace(plain, virtual_pipeline_model_parallel_size=2)
    assert [in_flight(two, stage, 8) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]


def test_stages_add_up_to_the_model(run_file):
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    parallel["pipeline_model_parallel_size"] = 2
    found = preflight(run_file(parallel=parallel), [], H200, 4)
    total = sum(memory.parameters for memory in found.memory)
    uncut = replace(found.shape, pattern=found.shape.pattern.replace("|", ""))
    whole = rank_parameters(uncut, ParallelConfig(), 0).total
    assert total == pytest.approx(whole / 2, rel=1e-3)
    assert "".join(memory.layers for memory in found.memory) == found.shape.pattern.replace("|", "")


@pytest.mark.parametrize(
    ("recipe", "decode", "kinds"),
    [
        ("bf16", "exact", ("high", "high", "high")),
        ("nvfp4", "exact", ("fp4_exact", "fp4_exact", "fp4_exact")),
        ("nvfp4_fast", "exact", ("fp4_exact", "fp8", "fp8")),
        ("nvfp4_fast", "fp8", ("fp8", "fp8", "fp8")),
        ("nvfp4_pow2", "exact", ("fp8", "fp8", "fp8")),
        ("fp8_tensorwise", "exact", ("fp8", "fp8", "fp8")),
        # Other blocks are decoded for BF16 cores.
        ("mxfp8", "exact", ("fp4_exact", "fp4_exact", "fp4_exact")),
        ("fp8_blockwise", "exact", ("fp4_exact", "fp4_exact", "fp4_exact")),
        ("fp8_blockwise", "fp8", ("fp8", "fp8", "fp8")),
        ("nvfp4_fast_a8", "fp8", ("fp8", "fp8", "fp8")),
        ("nvfp4_fast_a8", "exact", ("fp4_exact", "fp8", "fp8")),
        # Rows with scales of their own are rounded to E4M3 like others.
        ("nvfp4_fwd_mxfp8_bwd", "fp8", ("fp8", "fp4_exact", "fp4_exact")),
        ("nvfp4_fwd_mxfp8_bwd", "exact", ("fp4_exact", "fp4_exact", "fp4_exact")),
    ],
)
def test_which_rate_a_product_has(recipe, decode, kinds):
    spec = get_recipe(recipe)
    assert tuple(product_kind(spec, gemm, decode) for gemm in ("fprop", "dgrad", "wgrad")) == kinds


@pytest.mark.parametrize(
    ("recipe", "decode", "kinds"),
    [
        ("bf16", "exact", ("high", "high", "high")),
        ("nvfp4", "exact", ("nvfp4", "nvfp4", "nvfp4")),
        ("nvfp4_pow2", "fp8", ("nvfp4", "nvfp4", "nvfp4")),
        # What is rounded to E4M3 meets on FP8 cores; powers of two lose nothing as codes.
        ("nvfp4_fast", "fp8", ("fp8", "nvfp4", "nvfp4")),
        ("nvfp4_fast_a8", "exact", ("fp4_exact", "nvfp4", "nvfp4")),
        ("mxfp8", "exact", ("mxfp8", "mxfp8", "mxfp8")),
        ("nvfp4_fwd_mxfp8_bwd", "exact", ("nvfp4", "mxfp8", "mxfp8")),
        ("mxfp4", "exact", ("fp4_exact", "fp4_exact", "fp4_exact")),
        ("fp8_blockwise", "exact", ("fp4_exact", "fp4_exact", "fp4_exact")),
    ],
)
def test_which_rate_a_product_has_where_codes_are_multiplied(recipe, decode, kinds):
    spec = get_recipe(recipe)
    found = [product_kind(spec, gemm, decode, codes=True) for gemm in ("fprop", "dgrad", "wgrad")]
    assert tuple(found) == kinds
    assert set(found) <= DEVICES["b200"].products.keys()
    without = {product_kind(spec, gemm, decode) for gemm in ("fprop", "dgrad", "wgrad")}
    assert without <= DEVICES["h200"].products.keys()


@pytest.mark.parametrize("decode", ["exact", "fp8"])
@pytest.mark.parametrize("name", RECIPES)
def test_the_rate_is_that_of_the_cores_that_a_product_runs_on(name, decode):
    recipe = RECIPES[name]
    for gemm in ("fprop", "dgrad", "wgrad"):
        pair = recipe.specs(gemm)
        if not all(map(is_quantized, pair)) or pair[0].format == "fp8_blockwise":
            continue  # blocks are scaled by torch
        x = torch.randn(32, 128).bfloat16()
        a, b = (
            QUANTIZE(
                x,
                spec,
                implementation="reference",
                amax=torch.ones(32 if spec.row_scaled else ()),
                key=(0, 1),
            )
            for spec in pair
        )
        on_fp8 = on_fp8_cores(a, b, "fp8" if recipe.decode == "fp8" else decode)
        assert (product_kind(recipe, gemm, decode) == "fp8") == on_fp8, gemm
