# SPDX-License-Identifier: Apache-2.0
"""Memory from the configuration against built models: states exactly, saved tensors within 10 %."""

import pytest
import torch

from fused_ops.recipe import get_recipe
from models.config import ParallelConfig
from models.memory import code_bytes, rank_parameters, sharing, state_bytes
from models.parallel_linear import GemmModule
from models.precision import model_shape
from models.saved import Layout, saved_bytes
from pretrain.checkpoint.state import unwrap
from pretrain.parity.toy import Case
from pretrain.parity.train import ONE_PROCESS, build
from tests.models import toy

SHARED = {"moe_shared_expert_intermediate_size": 32}
KINDS = [
    ("*-", {"qk_layernorm": True}),
    ("*-", {"normalization": "LayerNorm", "add_bias_linear": True}),
    ("*E", SHARED | {"moe_shared_expert_gate": True}),
    ("M-*E", SHARED | {"moe_latent_size": 32}),
    ("+-+E", {"qk_layernorm": True}),
    ("*-/*E", {}),
    ("*E", {"add_bias_linear": True, "softmax_type": "learnable"}),
    ("*-/*-/*-", {"mtp_use_repeated_layer": True}),
]


def shape_of(pattern, fields, **section):
    return model_shape(toy.section(pattern, fields, **section), params_dtype=torch.float32)


@pytest.mark.parametrize(("pattern", "fields"), KINDS)
def test_parameters_of_one_rank(pattern, fields):
    (chunk,), _ = toy.make(pattern, **fields)
    count = rank_parameters(shape_of(pattern, fields), ParallelConfig(), 0)
    experts = sum(p.numel() for n, p in chunk.named_parameters() if ".experts." in n)
    kept = sum(
        p.numel() for n, p in chunk.named_parameters() if n.endswith(("A_log", ".D", "dt_bias"))
    )
    assert count.total == sum(p.numel() for p in chunk.parameters())
    assert (count.experts, count.kept_fp32) == (experts, kept)


def test_tied_embeddings_of_one_rank():
    (chunk,), _ = toy.make("*-", model={"tie_embeddings": True})
    count = rank_parameters(shape_of("*-", {}, tie_embeddings=True), ParallelConfig(), 0)
    assert count.total == sum(p.numel() for p in chunk.parameters())


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4)])
def test_states_are_exact(dtype, size):
    """Weights, FP32 gradients, and masters and moments, in bytes."""
    case = Case(pattern="M-*E", recipe="nvfp4", dtype=dtype)
    engine = build(case, ONE_PROCESS, "cpu")
    model = unwrap(engine.chunks[0])
    for part in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        part.init_state_fn(part.optimizer, part.config)
    shape = model_shape_of(case)
    parameters = rank_parameters(shape, ParallelConfig(), 0)
    found = state_bytes(parameters, sharing(ParallelConfig(), 1), element_size=size)
    named = list(model.parameters())
    assert found["weights"] == sum(p.numel() * p.element_size() for p in named)
    assert found["gradients"] == sum(p.main_grad.numel() * 4 for p in named)
    assert found["optimizer"] == _optimizer_bytes(engine.optimizer, named)


def model_shape_of(case):
    from pretrain.parity.toy import run_config

    config = run_config(case, ONE_PROCESS)
    return model_shape(config.model, params_dtype=config.train.torch_dtype)


def _optimizer_bytes(optimizer, parameters):
    own = {p.data_ptr() for p in parameters}
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                moments = part.optimizer.state[master]
                total += sum(t.numel() * 4 for t in moments.values() if torch.is_tensor(t))
                # An FP32 weight is its own master: a view of it.
                shared = any(
                    p.data_ptr() <= master.data_ptr() < p.data_ptr() + p.nbytes for p in parameters
                )
                total += 0 if shared or master.data_ptr() in own else master.numel() * 4
    return total


def test_optimizer_states_are_spread_over_data_parallel_ranks():
    shape = shape_of("*E", {})
    parallel = ParallelConfig(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=4
    )
    parameters = rank_parameters(shape, parallel, 0)
    shared = sharing(parallel, 16)
    assert (shared.dense, shared.experts) == (8, 2)
    found = state_bytes(parameters, shared, element_size=2)
    assert found["optimizer"] == parameters.dense * 12 / 8 + parameters.experts * 12 / 2
    whole = sharing(ParallelConfig(use_distributed_optimizer=False), 16)
    assert (whole.dense, whole.experts) == (1, 1)


def _saved(chunk):
    """Bytes of what autograd holds after a forward pass, without weights."""
    weights = {t.untyped_storage().data_ptr() for t in (*chunk.parameters(), *chunk.buffers())}
    seen = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        toy.loss_of(chunk)
    return sum(size for size, _ in seen.values())


@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
@pytest.mark.parametrize("pattern", ["*-", "*-*-", "+-", "*E"])
def test_saved_tensors(pattern, recipe):
    """Of FP32 activations; the reference's norms keep the normalized input beside the input."""
    fields = {"qk_layernorm": True}
    (chunk,), config = toy.make(pattern, **fields)
    spec = get_recipe(recipe)
    for module in chunk.modules():
        if isinstance(module, GemmModule):
            module.recipe = spec
    shape = shape_of(pattern, fields)
    recipes = {m.name: spec for m in shape.modules()}
    parts = saved_bytes(shape.modules(), pattern, shape, recipes, Layout.of(ParallelConfig(), 4))
    norms = len(pattern) + 1
    head_norms = 0
    for symbol in pattern:
        if symbol == "*":
            head_norms += (config.num_attention_heads + config.num_query_groups) * 16
        elif symbol == "+":
            head_norms += config.q_lora_rank + config.kv_lora_rank
    # final norm, input of the head, logits; what the reference's norms keep besides
    rest = 4 * (2 * 64 + toy.VOCAB) + 4 * (norms * 64 + head_norms)
    tokens = 2 * toy.SEQ
    formula = tokens * (sum(parts.values()) + rest)
    assert formula == pytest.approx(_saved(chunk), rel=0.10)


def test_a_rank_keeps_its_own_codes_where_codes_move():
    """X of column layers: gathered codes of all tokens, or those of this rank's part of them."""
    shape = shape_of("-", {})
    parallel = ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True)
    kept = {}
    for recipe in ("nvfp4_fast", "bf16"):
        recipes = {m.name: get_recipe(recipe) for m in shape.modules()}
        for how in ("bf16", "packed"):
            layout = Layout.of(parallel, 2, how)
            parts = saved_bytes(shape.modules(), "-", shape, recipes, layout)
            kept[recipe, how] = sum(v for name, v in parts.items() if name.startswith("operands"))
    inner = shape.modules()[1].k / 2
    assert kept["nvfp4_fast", "bf16"] == (64 + inner) * 0.5625
    assert kept["nvfp4_fast", "packed"] == (32 + inner) * 0.5625
    assert kept["bf16", "packed"] == kept["bf16", "bf16"] == (32 + inner) * 2


def test_codes_of_weights():
    shape = shape_of("*-", {})
    recipes = {m.name: get_recipe("nvfp4") for m in shape.modules()}
    elements = sum(m.parameters for m in shape.modules())
    # one set of codes for both GEMMs, with a scale byte for each tile of 16 x 16
    expected = elements * (0.5 + 1 / 256)
    assert code_bytes(shape.modules(), ParallelConfig(), recipes) == expected
    recipes = {m.name: get_recipe("nvfp4_fast") for m in shape.modules()}
    # codes in blocks of 16 for fprop, what FP8 cores take for dgrad
    expected = elements * (0.5 + 1 / 16 + 1)
    assert code_bytes(shape.modules(), ParallelConfig(), recipes) == expected
    high = {name: get_recipe("bf16") for name in recipes}
    assert code_bytes(shape.modules(), ParallelConfig(), high) == 0
