# SPDX-License-Identifier: Apache-2.0
"""What goes wrong between two ranks: empty experts, masked ranks, cut heads, document bounds.

One start of two processes does everything; each test looks at its own part of what they say.
"""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from fused_ops.formats import OperandSpec
from fused_ops.grouped_linear import grouped_linear
from fused_ops.linear import LinearCall
from fused_ops.recipe import GemmRecipe, get_recipe
from models import prediction
from models.comm import TensorParallelComm
from models.config import ParallelConfig
from models.parallel_linear import GemmModule
from tests.distributed import run_distributed
from tests.models import toy

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP2 = {"context_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
BIASED = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
}
GATED = {"num_query_groups": 1, "attention_output_gate": True, "qk_layernorm": True}
WIDE = {"hidden_size": 192, "ffn_hidden_size": 224}
# Layouts whose loss is compared with that of one process: (pattern, layout, fields).
SAME_LOSS = {
    "heads fewer than ranks, gated": ("*", TP2, GATED),
    "an uneven pipeline": ("M-M|*M-E", PP2, {}),
    "allgather dispatch": ("E", EP2, {"moe_token_dispatcher_type": "allgather"}),
    "shards of 96": ("*-", TP2, WIDE),
    "shards of 96 in nvfp4_fast": ("*-", TP2, WIDE),
}
# Recipes that scale each token by itself, with the dtype of weights and activations.
LOCAL = (
    ("bf16", torch.float32),
    ("bf16", torch.bfloat16),
    ("mxfp8", torch.bfloat16),
    ("nvfp4_pow2", torch.bfloat16),
    ("nvfp4_fwd_mxfp8_bwd", torch.bfloat16),
)
ROWS = OperandSpec(format="nvfp4", row_scaled=True)
ROW_SCALES = GemmRecipe(
    name="rows",
    fprop_x=ROWS,
    fprop_w=ROWS,
    dgrad_dy=ROWS,
    dgrad_w=ROWS,
    wgrad_dy=ROWS,
    wgrad_x=ROWS,
)
CAPACITY = {"moe_expert_capacity_factor": 1.0}
CUT = 13


def give(chunk, recipe):
    for module in chunk.modules():
        if isinstance(module, GemmModule):
            module.recipe = get_recipe(recipe)


def recipe_of(name):
    return name.rsplit(" in ", 1)[1] if " in " in name else "bf16"


def _whole(pattern, fields):
    return toy.make(pattern.replace("|", ""), **fields)


@contextmanager
def predictions():
    """Gathers the losses of multi-token prediction, which nothing returns, for each depth."""
    found, before = [], prediction.MTPLossAutoScaler

    class Recorder:
        @staticmethod
        def apply(states, loss):
            found.append(loss)
            return states

    prediction.MTPLossAutoScaler = Recorder
    try:
        yield found
    finally:
        prediction.MTPLossAutoScaler = before


def isolation(pattern, recipe, dtype, parallel=None):
    """Which positions of this rank change when the first document does, in order."""
    (chunk,), _ = toy.make(pattern, parallel=parallel, dtype=dtype)
    chunk.to(dtype)
    give(chunk, recipe)
    tokens, labels = toy.batch(0)
    bounds = torch.tensor([0, CUT, toy.SEQ, toy.SEQ + CUT, 2 * toy.SEQ])
    other = tokens.clone()
    other[:, :CUT] = (other[:, :CUT] + 7) % toy.VOCAB

    def losses(ids):
        parts = [own(t) for t in (ids, toy.positions(), labels)]
        mask = torch.ones_like(parts[0], dtype=torch.float32)
        with torch.no_grad(), predictions() as ahead:
            main = chunk(
                parts[0], parts[1], None, labels=parts[2], loss_mask=mask, cu_seqlens=bounds
            )
            return ahead[0] if ahead else main

    def own(tensor):
        if parallel is None:
            return tensor
        rank, size = torch.distributed.get_rank(), 2
        pieces = tensor.chunk(2 * size, 1)
        return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], 1).contiguous()

    changed = (losses(tokens) != losses(other)).any(0)
    return own(toy.positions())[0][changed].tolist()


def forced(recipe, topk):
    """Three steps with every token at the first rank's experts: losses and gradients."""
    parallel = ParallelConfig(**EP2)
    chunks, config = toy.make("E-", parallel=parallel, moe_router_topk=topk, **BIASED)
    give(chunks[0], recipe)
    router = chunks[0].decoder.layers[0].mlp.router
    high = [9.0, 0.0, -9.0, -9.0] if topk == 1 else [9.0, 9.0, -9.0, -9.0]
    losses, used = [], []
    for _ in range(3):
        router.expert_bias.copy_(torch.tensor(high))
        losses.append(toy.step(chunks, config))
        gradients = {n: p.main_grad for n, p in chunks[0].named_parameters()}
        assert all(g.isfinite().all() for g in gradients.values())
        weight = next(g for n, g in gradients.items() if n.endswith("experts.linear_fc1.weight"))
        used.append(weight.abs().amax((1, 2)).gt(0).tolist())
    return losses, used


def one_token(parallel):
    """One token on each rank, forward and backward."""
    (chunk,), _ = toy.make("E", parallel=parallel)
    give(chunk, "nvfp4")
    layer = chunk.decoder.layers[0].mlp
    torch.manual_seed(3)
    x = torch.randn(1, 1, 64, requires_grad=True)
    y, _ = layer(x)
    y.square().sum().backward()
    return y.detach(), x.grad


def uneven_experts(rank=None):
    """Two experts whose tokens lie on two ranks, 48 and none of the first on this one and 16 of the
    second; row scales: (y, dx, dw) of all tokens of an expert, or of a rank's."""
    torch.manual_seed(4)
    x, dy = torch.randn(80, 32), torch.randn(80, 64)
    weight = torch.nn.Parameter(torch.randn(2, 64, 32))
    places, counts, group = slice(0, 80), [48, 32], None
    if rank is not None:
        group = torch.distributed.group.WORLD
        # Of the first expert all, and of the second half; or the rest.
        places, counts = ((slice(0, 64), [48, 16]), (slice(64, 80), [0, 16]))[rank]
    comm = TensorParallelComm(
        kind="column",
        recipe=ROW_SCALES,
        expert_group=group,
        weight_shape=(64, 32),
        tokens=sum(counts),
    )
    call = LinearCall(recipe=ROW_SCALES, comm=comm)
    x = x[places].clone().requires_grad_()
    y = grouped_linear(x, weight, counts, call=call)
    y.backward(dy[places])
    return y.detach(), x.grad, weight.grad


def masked_rank():
    """Context parallelism with labels on one rank alone: (loss, all gradients finite)."""
    chunks, config = toy.make("M*", parallel=ParallelConfig(**CP2))
    return _masked(chunks, config, torch.distributed.get_rank())


def _masked(chunks, config, rank):
    quarters = torch.arange(toy.SEQ) // (toy.SEQ // 4)
    mask = ((quarters == 0) | (quarters == 3)).float().expand(2, -1)
    before = toy.label_mask
    toy.label_mask = mask
    try:
        loss = toy.step(chunks, config)
    finally:
        toy.label_mask = before
    gradients = [p.main_grad for p in chunks[0].parameters()]
    return loss, all(g.isfinite().all() for g in gradients)


def _both(weights, folder):
    """What each of two ranks says."""
    said = {"losses": {}, "isolation": {}, "forced": {}}
    for name, (pattern, layout, fields) in SAME_LOSS.items():
        chunks, config = toy.make(pattern, parallel=ParallelConfig(**layout), **fields)
        toy.load(chunks, f"{weights}/{name}")
        for chunk in chunks:
            give(chunk, recipe_of(name))
        said["losses"][name] = toy.step(chunks, config)
    for recipe, topk in (("bf16", 2), ("nvfp4", 2), ("nvfp4", 1)):
        said["forced"][recipe, topk] = forced(recipe, topk)
    said["one token"] = one_token(ParallelConfig(**EP2))
    said["uneven"] = uneven_experts(torch.distributed.get_rank())
    for recipe, dtype in LOCAL:
        said["isolation"][recipe, str(dtype)] = isolation(
            "M*", recipe, dtype, ParallelConfig(**CP2)
        )
    said["isolation"]["prediction"] = isolation(
        "M*/*", "bf16", torch.float32, ParallelConfig(**CP2)
    )
    said["isolation"]["latent"] = isolation("+", "bf16", torch.float32, ParallelConfig(**CP2))
    said["masked"] = masked_rank()
    chunks, config = toy.make("E", parallel=ParallelConfig(**TP2), **CAPACITY)
    said["capacity"] = toy.step(chunks, config)
    chunks, config = toy.make("M-*-", parallel=ParallelConfig(**TP2))
    toy.load(chunks, f"{weights}/reshard")
    toy.save(chunks, f"{folder}/reshard")
    toy.step(chunks, config)
    said["norm"] = chunks[0].decoder.final_norm.weight.main_grad.clone()
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """(what both ranks say, losses of one process, the folder of checkpoints)."""
    folder = tmp_path_factory.mktemp("two")
    losses = {}
    for name, (pattern, _, fields) in SAME_LOSS.items():
        chunks, config = _whole(pattern, fields)
        toy.save(chunks, folder / "weights" / name)
        give(chunks[0], recipe_of(name))
        losses[name] = toy.step(chunks, config)
    chunks, _ = toy.make("M-*-")
    toy.save(chunks, folder / "weights" / "reshard")
    args = (str(folder / "weights"), str(folder))
    return run_distributed(_both, 2, timeout=600, args=args), losses, folder


@pytest.mark.parametrize("name", SAME_LOSS)
def test_the_loss_of_one_process(said, name):
    ranks, losses, _ = said
    for rank in ranks:
        assert rank["losses"][name] == pytest.approx(losses[name], abs=1e-5)


@pytest.mark.parametrize("case", [("bf16", 2), ("nvfp4", 2), ("nvfp4", 1)])
def test_a_rank_whose_experts_get_no_token(said, case):
    """No hang, nothing that is not finite, and no gradient for experts without tokens."""
    first, second = (rank["forced"][case] for rank in said[0])
    assert first[0] == second[0]
    assert all(0 < loss < 10 for loss in first[0])
    assert first[1] == [[True, case[1] == 2]] * 3
    assert second[1] == [[False, False]] * 3


def test_one_token_on_each_rank(said):
    alone, gradient = one_token(None)
    for rank in said[0]:
        y, dx = rank["one token"]
        assert dx.isfinite().all()
        # The experts of this rank have other weights than those of one process: only sizes agree.
        assert 0.1 < float(y.norm() / alone.norm()) < 10
        assert 0.01 < float(dx.norm() / gradient.norm()) < 100


def test_row_scales_of_an_expert_that_a_rank_has_no_token_of(said):
    """The amaxes of wgrad's rows are of all ranks' tokens, also of a rank that has none."""
    (y, dx, dw), expected = said[0][0]["uneven"], uneven_experts()
    second = said[0][1]["uneven"]
    assert torch.equal(torch.cat([y, second[0]]), expected[0])
    assert torch.equal(torch.cat([dx, second[1]]), expected[1])
    torch.testing.assert_close(dw + second[2], expected[2], rtol=1e-5, atol=1e-4)
    assert not second[2][0].any()


@pytest.mark.parametrize("case", [(r, str(d)) for r, d in LOCAL] + ["latent"], ids=str)
def test_documents_under_context_parallelism(said, case):
    """Changing the first 13 tokens changes nothing after them, on any rank, by one bit."""
    first, second = (rank["isolation"][case] for rank in said[0])
    assert first, "the first document is on rank 0, and must change"
    assert max(first + second) < CUT


def test_predictions_under_context_parallelism(said):
    """The last token of a document has nothing ahead of it; nothing behind the cut changes."""
    first, second = (rank["isolation"]["prediction"] for rank in said[0])
    assert sorted(first + second) == list(range(CUT - 1))


def test_a_capacity_that_ranks_fill_differently(said):
    """Ranks drop different numbers of tokens, and gather what is left: it trains on gloo too."""
    first, second = (rank["capacity"] for rank in said[0])
    assert first == second
    chunks, config = toy.make("E", **CAPACITY)
    assert first == pytest.approx(toy.step(chunks, config), abs=0.1)


def test_a_rank_whose_labels_are_all_masked(said):
    chunks, config = toy.make("M*")
    loss, finite = _masked(chunks, config, 0)
    assert finite
    for rank in said[0]:
        assert rank["masked"] == (pytest.approx(loss, rel=1e-5), True)


def test_gradients_of_norms_are_the_same_on_all_tensor_parallel_ranks(said):
    first, second = (rank["norm"] for rank in said[0])
    assert torch.equal(first, second)
    assert first.abs().max() > 0


def test_there_and_back_is_bitwise(said):
    """A hybrid of one process, loaded and saved by two tensor-parallel ranks."""
    chunks, _ = toy.make("M-*-")
    before = {n: p.clone() for n, p in chunks[0].named_parameters()}
    toy.load(chunks, said[2] / "weights" / "reshard")
    start = {n: p.clone() for n, p in chunks[0].named_parameters()}
    assert any(not torch.equal(before[n], start[n]) for n in start) or before.keys() == start.keys()
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.zero_()
    toy.load(chunks, said[2] / "reshard")
    for name, parameter in chunks[0].named_parameters():
        assert torch.equal(parameter, start[name]), name


@pytest.mark.parametrize("pattern", ["M*", "+"])
@pytest.mark.parametrize("case", LOCAL, ids=lambda case: f"{case[0]} {case[1]}")
def test_documents_in_one_process(case, pattern):
    changed = isolation(pattern, *case)
    assert changed
    assert max(changed) < CUT


def test_a_scale_for_all_tokens_couples_documents():
    """The equality above is not a triviality, and the per-tensor recipe cannot promise it."""
    assert max(isolation("M*", "nvfp4", torch.bfloat16)) >= CUT


def test_every_recipe_here_scales_tokens_by_themselves():
    for name, _ in LOCAL:
        spec = get_recipe(name).fprop_x
        assert spec.row_scaled or not spec.needs_amax
    assert replace(get_recipe("nvfp4").fprop_x, row_scaled=True).row_scaled
