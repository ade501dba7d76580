# SPDX-License-Identifier: Apache-2.0
"""Cached passes against the full forward pass, for every kind of layer; which token comes next."""

import math

import pytest
import torch

from fused_ops.errors import ConfigError
from models.generation import cached_model
from models.generation.cached_model import CachedModel, shared_over_tokens
from models.generation.sampling import Request, Sampling, choose, generate
from models.precision import PrecisionState, apply_precision
from models.precision_config import PrecisionConfig
from tests.models import toy

# Longer than a chunk of the Mamba scan (64) and no multiple of it.
LENGTHS = (70, 33, 5)
ROW_SCALED, POW2 = "nvfp4_fwd_mxfp8_bwd", "nvfp4_pow2"
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"type": "llama3", "factor": 4.0, "original_max_position_embeddings": 16}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": 48,
}
KINDS = {
    "attention, grouped queries": ("*-", {}, {}),
    "norms of queries and keys": ("*-", {}, {"qk_layernorm": True}),
    "gate of attention": ("*-", {}, {"attention_output_gate": True}),
    "no positions": ("*-", {"position_embedding": "none"}, {}),
    "positions in some layers": ("*-*-", {}, {"no_rope_freq": [0, 0, 1, 0]}),
    "half of a head rotated": ("*-", {"rotary_percent": 0.5}, {"rotary_interleaved": True}),
    "yarn": ("*-", {"rope_scaling": YARN}, {}),
    "llama3 scaling": ("*-", {"rope_scaling": LLAMA3}, {}),
    "windows": ("*-*-", {}, {"window_size": [7, 0], "window_attn_skip_freq": 2}),
    "sinks and windows": ("*-", {}, {"softmax_type": "learnable", "window_size": [7, 0]}),
    "latent attention": ("+-", {}, {}),
    "latent attention, yarn": ("+-", {}, {"rope_type": "yarn", "rotary_scaling_factor": 4.0}),
    "mamba": ("M-", {}, {}),
    "experts": ("*E", {}, {}),
    "sigmoid router, bias, shared expert": ("*E", {}, SIGMOID),
    "latent experts": ("*E", {}, {"moe_latent_size": 32}),
    "squared relu": ("M-", {}, {"gated_linear_unit": False, "activation_func": "squared_relu"}),
    "biases, layer norm": ("*-", {}, {"add_bias_linear": True, "normalization": "LayerNorm"}),
    "tied output": ("*-", {"tie_embeddings": True}, {}),
    "prediction layers": ("*-M-/*-", {}, {}),
    "hybrid": ("M-M*M-E", {}, {}),
}


def build(pattern, recipe="bf16", model=None, **fields):
    torch.manual_seed(0)
    chunks, _ = toy.make(pattern, model=model, **fields)
    apply_precision(chunks, PrecisionConfig(recipe=recipe), PrecisionState())
    return chunks[0].eval()


def sequences(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, toy.VOCAB, (n,), generator=generator) for n in lengths]


@torch.no_grad()
def full(model, ids):
    return model(ids[None], torch.arange(len(ids))[None], None)[0].float()


def cached(model, ids, sizes, **options):
    """Logits of all tokens, in pieces of these sizes and then one token at a time."""
    running = CachedModel(model, len(ids), **options)
    place, found = [0] * len(ids), [[] for _ in ids]
    for size in [*sizes, *[1] * max(map(len, ids))]:
        active = [i for i, s in enumerate(ids) if place[i] < len(s)]
        if not active:
            break
        pieces = [ids[i][place[i] : place[i] + size] for i in active]
        for i, piece, logits in zip(active, pieces, running.forward(pieces, active)):
            place[i] += len(piece)
            found[i].append(logits)
    return [torch.cat(rows) for rows in found]


def assert_same(model, sizes, bound=1e-4, lengths=LENGTHS):
    ids = sequences(lengths)
    for logits, s in zip(cached(model, ids, sizes), ids):
        expected = full(model, s)
        error = (logits - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < bound, f"at tokens {torch.nonzero(error >= bound).flatten().tolist()}"


# All at once; a prompt and then tokens; chunks of a prompt, and then tokens.
CUTS = {"whole": [100], "decode": [63], "chunks": [3, 41, 1, 1, 22]}


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_full_forward_pass_in_fp32(kind):
    pattern, section, fields = KINDS[kind]
    model = build(pattern, model=section, **fields)
    for sizes in CUTS.values():
        assert_same(model, sizes)


@pytest.mark.parametrize(
    ("recipe", "pattern"),
    [(r, p) for r in (ROW_SCALED, POW2) for p in ("*-", "M-", "+-", "*E", "M*-E")]
    + [("mxfp8", "M*-E")],
)
def test_equals_the_full_forward_pass_in_nvfp4(recipe, pattern):
    """A token's codes depend on the token alone, so that the same 1e-4 holds."""
    model = build(pattern, recipe)
    assert shared_over_tokens(model) == []
    high = build(pattern)
    ids = sequences()[0]
    assert (full(model, ids) - full(high, ids)).norm() > 0.005 * full(high, ids).norm()
    for sizes in CUTS.values():
        assert_same(model, sizes)


@pytest.mark.parametrize("kind", ["hybrid", "latent attention, yarn", "sinks and windows"])
def test_bf16_is_as_near_to_fp32_as_the_full_pass(kind):
    """BF16 rounds after every layer, so that passes with other sums differ; neither is worse."""
    pattern, section, fields = KINDS[kind]
    ids = sequences()
    exact = build(pattern, model=section, **fields)
    for parameter in exact.parameters():
        parameter.data = parameter.data.bfloat16().to(parameter.dtype)
    model = build(pattern, model=section, dtype=torch.bfloat16, **fields)
    model.load_state_dict(exact.state_dict())
    for logits, s in zip(cached(model, ids, [3, 41]), ids):
        wanted = full(exact, s)
        own = (full(model, s) - wanted).norm()
        assert (logits - wanted).norm() < 1.3 * own
        assert own > 1e-4 * wanted.norm()


def test_windows_sinks_and_scaling_are_really_there():
    """Each of these settings moves the logits: else the comparison above would say nothing."""
    ids = sequences()[0]
    plain = full(build("*-*-"), ids)
    for name in ("windows", "yarn", "llama3 scaling", "no positions", "positions in some layers"):
        _, section, fields = KINDS[name]
        changed = full(build("*-*-", model=section, **fields), ids)
        assert (changed - plain).norm() > 1e-3 * plain.norm(), name


def test_a_tensor_amax_couples_tokens_and_is_named():
    model = build("*-", "nvfp4")
    assert "layers.0.self_attention.linear_qkv" in shared_over_tokens(model)
    with pytest.raises(AssertionError, match="at tokens"):
        assert_same(model, [3])


def test_a_cleared_slot_starts_again():
    model, ids = build("M*-"), sequences((40, 9))
    running = CachedModel(model, 2)
    first = running.forward(ids)
    running.forward([ids[1]], [0])
    running.cache.clear([0])
    again = running.forward([ids[0]], [0])[0]
    torch.testing.assert_close(again, first[0], rtol=0, atol=1e-6 * float(first[0].abs().max()))
    assert running.cache.lengths == [40, 9]
    assert running.cache.nbytes > 0


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", ROW_SCALED, POW2])
@pytest.mark.parametrize("pattern", ["*-", "M*-E", "+E"])
def test_a_sequence_does_not_depend_on_its_batch_by_one_bit(recipe, pattern):
    """Prefill of ragged prompts and decoding, alone and beside others, at other places."""
    model = build(pattern, recipe)
    ids = sequences((21, 1, 14, 2, 3))
    beside = cached(model, ids, [11], batch_invariant=True)
    for i, s in enumerate(ids):
        alone = cached(model, [s], [11], batch_invariant=True)[0]
        assert torch.equal(alone, beside[i]), f"sequence {i}"
    fewer = cached(model, [ids[3], ids[0]], [11], batch_invariant=True)
    assert torch.equal(fewer[0], beside[3])
    assert torch.equal(fewer[1], beside[0])


@pytest.mark.parametrize("pattern", ["M-", "*E"])
def test_nor_where_power_of_two_scales_leave_their_range(pattern):
    """Squared activations reach below the 14 binades of one shift: each token has its own."""
    fields = {"gated_linear_unit": False, "activation_func": "squared_relu"}
    model = build(pattern, POW2, **fields)
    for name, module in model.named_modules():
        with torch.no_grad():
            if name.endswith("linear_fc1"):
                module.weight *= 8
                module.weight[..., :32, :] *= 2e-3
            elif name.endswith("linear_fc2"):
                module.weight[..., :32] *= 1000
    ids = sequences((21, 1, 14, 2, 3))
    beside = cached(model, ids, [11], batch_invariant=True)
    shared = cached(model, ids, [11])
    for i, s in enumerate(ids):
        assert torch.equal(cached(model, [s], [11], batch_invariant=True)[0], beside[i])
        torch.testing.assert_close(beside[i], shared[i], rtol=0.02, atol=0.02)
    assert any(
        (cached(model, [s], [11])[0] - shared[i]).abs().max() > 1e-4 for i, s in enumerate(ids)
    ), "one shift for all tokens is not enough here"


def test_batch_invariance_can_fail(monkeypatch):
    """With one amax for a tensor it does not hold, nor with GEMMs of as many rows as there are."""
    ids = sequences((17, 1, 14))

    def holds(model):
        beside = cached(model, ids, [11], batch_invariant=True)
        alone = [cached(model, [s], [11], batch_invariant=True)[0] for s in ids]
        return all(map(torch.equal, beside, alone))

    with pytest.raises(ConfigError, match=r"4 linear layers \(layers.0.self"):
        CachedModel(build("*-", "nvfp4"), 1, batch_invariant=True)
    monkeypatch.setattr(cached_model, "shared_over_tokens", lambda model: [])
    assert not holds(build("*-", "nvfp4"))
    model = build("*-", ROW_SCALED)
    assert holds(model)
    monkeypatch.setattr(cached_model, "ROW_BLOCK", None)
    monkeypatch.setattr(cached_model, "in_row_blocks", lambda function, x: function(x))
    assert not holds(model)


def test_the_arithmetic_of_training_is_left_as_it_was():
    model = build("*E", ROW_SCALED)
    ids = sequences((20, 3))
    before = full(model, ids[0])
    cached(model, ids, [18], batch_invariant=True)
    assert torch.equal(full(model, ids[0]), before)


def test_refused_models_say_why():
    with pytest.raises(ConfigError, match="moe_expert_capacity_factor"):
        CachedModel(build("*E", moe_expert_capacity_factor=1.0), 1)


LOGITS = torch.tensor([0.0, 3.0, 2.0, 1.0])


def draws(sampling, count=2000):
    generator = torch.Generator().manual_seed(sampling.seed)
    picked = [choose(LOGITS, sampling, generator) for _ in range(count)]
    return torch.bincount(torch.tensor(picked), minlength=4) / count


def test_temperature_zero_takes_the_likeliest():
    assert draws(Sampling(temperature=0), 20).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-30, 1e-7])
def test_temperature_next_to_zero_takes_the_likeliest_too(temperature):
    for top_k in (0, 2):
        found = draws(Sampling(temperature=temperature, top_k=top_k), 20)
        assert found.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_said(temperature):
    request = Request([[1]], 1, Sampling(temperature=temperature))
    with pytest.raises(ConfigError, match="sequence 0 hold Inf or NaN"):
        request.next(0, torch.tensor([1.0, math.nan, 0.0]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_scales_the_logits(temperature):
    expected = (LOGITS / temperature).softmax(0)
    # Four standard deviations of a share of 2000 draws.
    bound = 4 * math.sqrt(0.25 / 2000)
    found = draws(Sampling(temperature=temperature, top_k=0, seed=1))
    assert (found - expected).abs().max() < bound


def test_top_k_and_top_p_leave_the_others_out():
    found = draws(Sampling(temperature=1.0, top_k=2))
    assert found[0] == found[3] == 0
    assert abs(found[1] - torch.tensor([3.0, 2.0]).softmax(0)[0]) < 0.04
    # Shares are .032 .644 .237 .087: two reach 0.8, one does not.
    found = draws(Sampling(temperature=1.0, top_k=0, top_p=0.8))
    assert found[0] == found[3] == 0
    assert abs(found[1] - 0.644 / (0.644 + 0.237)) < 0.04
    assert draws(Sampling(temperature=1.0, top_k=0, top_p=0.1), 50).tolist() == [0, 1, 0, 0]


def continued(model, prompts, count, sampling, stop=(), **options):
    found = [[] for _ in prompts]
    request = Request(prompts, count, sampling, stop, vocab_size=toy.VOCAB, prefill_tokens=16)
    for tokens in generate(CachedModel(model, len(prompts), **options), request):
        for index, token in tokens:
            found[index].append(token)
    return found


def test_greedy_tokens_are_those_of_full_passes_and_end_where_they_must():
    model = build("M*-E")
    prompts = [s.tolist() for s in sequences((20, 7, 1))]
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(full(model, torch.tensor(ids))[-1, : toy.VOCAB].argmax()))
        expected.append(ids[len(prompt) :])
    greedy = Sampling(temperature=0)
    assert continued(model, prompts, 12, greedy) == expected
    # A token that one sequence reaches midway ends it, and the others go on.
    stop = next(t for t in expected[0][3:] if t not in expected[0][:3])
    cut = [row[: row.index(stop)] if stop in row else row for row in expected]
    assert continued(model, prompts, 12, greedy, stop={stop}) == cut
    assert len(cut[0]) < 12


def test_samples_do_not_depend_on_the_batch():
    model = build("*-", POW2)
    prompts = [s.tolist() for s in sequences((20, 7, 1))]
    sampling = Sampling(temperature=1.0, top_k=0, seed=5)
    together = continued(model, prompts, 8, sampling, batch_invariant=True)
    first = continued(model, prompts[:1], 8, sampling, batch_invariant=True)
    assert together[0] == first[0]
    assert together != continued(model, prompts, 8, Sampling(1.0, 0, seed=6))
