# SPDX-License-Identifier: Apache-2.0
"""One test for each internal of megatron-core that the models lean on.

They fail when an upgrade moves the internal; the message says which place here depends on it.
"""

import inspect
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.hybrid import hybrid_model
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.ssm import mamba_mixer
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import multi_latent_attention, multi_token_prediction
from megatron.core.transformer.moe import experts, moe_layer

from models import mamba
from models.experts import GroupedLinear
from models.layer_specs import Stack
from models.mamba import MambaMixer, without_mamba_ssm
from models.norm import GroupNorm, Norm
from models.parallel_linear import ColumnParallelLinear, GemmModule, RowParallelLinear
from models.prediction import prediction_loss
from tests.models import toy


def seam(holds, place, what):
    assert holds, f"megatron-core moved a seam: {what}; adapt {place}"


@pytest.mark.parametrize(
    ("own", "upstream", "names"),
    [
        (
            ColumnParallelLinear,
            layers.ColumnParallelLinear,
            {"input", "weight", "bias", "allreduce_dgrad", "sequence_parallel"},
        ),
        (RowParallelLinear, layers.RowParallelLinear, {"input", "weight", "bias"}),
    ],
)
def test_forward_impl_is_called_for_the_gemm(own, upstream, names, monkeypatch):
    (chunk,), _ = toy.make("-")
    seen = []

    def record(self, *args, **kwargs):
        seen.append((args, set(kwargs)))
        return original(self, *args, **kwargs)

    original = own._forward_impl
    monkeypatch.setattr(own, "_forward_impl", record)
    toy.loss_of(chunk)
    where = "models/parallel_linear.py"
    seam("_forward_impl" in vars(upstream), where, f"{upstream.__name__}._forward_impl is gone")
    seam(len(seen) == 1, where, f"{upstream.__name__}.forward does not call _forward_impl once")
    seam(not seen[0][0], where, "_forward_impl gets positional arguments")
    seam(names <= seen[0][1], where, f"_forward_impl gets {seen[0][1]}, not {names}")


def test_quant_recipe_turns_on_the_first_micro_batch_mark():
    chunks, config = toy.make("M-*E")
    gemms = [m for m in chunks[0].modules() if isinstance(m, GemmModule)]
    assert len(gemms) == 8
    for module in gemms:
        module.is_first_microbatch = False
    chunks[0].set_is_first_microbatch()
    where = "models/config.py (quant_recipe) and GemmModule.is_first_microbatch"
    seam(all(m.is_first_microbatch for m in gemms), where, "set_is_first_microbatch marks no layer")
    toy.step(chunks, config)
    seam(not any(m.is_first_microbatch for m in gemms), where, "a layer did not take the mark")
    first = gemms[0]
    builds = []
    first.weight_codes.drop = lambda: builds.append(True)
    for _ in range(2):
        toy.step(chunks, config)
    seam(len(builds) == 2, where, "the schedule does not mark the first micro-batch of each step")


def test_final_norm_is_ours():
    (chunk,), _ = toy.make("*-/*-")
    where = "models/layer_specs.py Stack"
    parameters = inspect.signature(HybridStack.__init__).parameters
    seam("post_layer_norm" in parameters, where, "HybridStack has no post_layer_norm")
    seam(type(chunk.decoder) is Stack, where, "the decoder is not built from the spec's module")
    seam(type(chunk.decoder.final_norm) is Norm, where, "the final norm is not ours")
    names = {name for name, m in chunk.named_modules() if type(m).__name__ == "TENorm"}
    seam(not names, where, f"Transformer Engine's norm at {names}")


def test_mamba_mixer_can_be_built_without_mamba_ssm():
    where = "models/mamba.py without_mamba_ssm"
    for name in ("HAVE_MAMBA_SSM", "ExtendedRMSNorm", "causal_conv1d_fn"):
        seam(hasattr(mamba_mixer, name), where, f"mamba_mixer.{name} is gone")
    before = mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm
    (chunk,), _ = toy.make("M")
    mixer = chunk.decoder.layers[0].mixer
    seam(type(mixer) is MambaMixer, where, "the mixer is not built from the spec")
    seam(type(mixer.norm) is GroupNorm, where, "the mixer does not build ExtendedRMSNorm")
    assert (mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm) == before
    with without_mamba_ssm():
        assert mamba_mixer.HAVE_MAMBA_SSM
    for name in ("d_inner_local_tpcp", "nheads_local_tpcp", "ngroups_local_tpcp"):
        seam(
            hasattr(mixer.cp, name), "models/mamba.py _ssm_training", f"MambaContextParallel.{name}"
        )
    signature = inspect.signature(mamba_mixer.MambaMixer._ssm_training).parameters
    seam(
        list(signature)[:2] == ["self", "zxBCdt"],
        "models/mamba.py _ssm_training",
        f"_ssm_training takes {list(signature)}",
    )


def test_grouped_mlp_takes_our_linears():
    where = "models/experts.py GroupedLinear"
    wanted = set(inspect.signature(experts.GroupedLinearFc1Builder.__call__).parameters)
    have = set(inspect.signature(GroupedLinear.__init__).parameters)
    named = wanted - {"self", "num_local_experts", "input_size", "output_size"}
    seam(named <= have, where, f"the builder passes {named - have}")
    (chunk,), _ = toy.make("E")
    mlp = chunk.decoder.layers[0].mlp.experts
    seam(isinstance(mlp, experts.TEGroupedMLP), where, "experts are not a TEGroupedMLP")
    seam(isinstance(mlp.linear_fc1, GroupedLinear), where, "linear_fc1 is not ours")


def test_latent_projections_are_looked_up_in_the_module():
    where = "models/experts.py _latent_projection"
    source = inspect.getsource(moe_layer.MoELayer.__init__)
    seam("TELinear" in source, where, "MoELayer no longer builds TELinear")
    have = moe_layer.HAVE_TE
    (chunk,), _ = toy.make("E", moe_latent_size=32)
    mlp = chunk.decoder.layers[0].mlp
    seam(isinstance(mlp.fc1_latent_proj, GemmModule), where, "the projection is not ours")
    assert moe_layer.HAVE_TE is have


def test_latent_attention_accepts_only_its_own_down_projections():
    where = "models/attention.py MLASelfAttention"
    source = inspect.getsource(multi_latent_attention.MLASelfAttention.__init__)
    seam("Unsupported linear_q_down_proj" in source, where, "the white list is gone: use the spec")
    source = inspect.getsource(multi_latent_attention.MLASelfAttention.get_query_key_value_tensors)
    seam("self._qkv_down_projection(" in source, where, "_qkv_down_projection is not called")
    (chunk,), _ = toy.make("+")
    attention = chunk.decoder.layers[0].self_attention
    for name in ("linear_q_down_proj", "linear_kv_down_proj"):
        seam(
            type(getattr(attention, name)) is ColumnParallelLinear, where, f"{name} is not adopted"
        )


def test_the_loss_is_computed_by_one_method(monkeypatch):
    (chunk,), _ = toy.make("*-/*-")
    where = "models/hybrid_model.py compute_language_model_loss"
    calls = []
    own = type(chunk).compute_language_model_loss

    def record(self, labels, logits):
        calls.append(tuple(logits.shape))
        return own(self, labels, logits)

    monkeypatch.setattr(type(chunk), "compute_language_model_loss", record)
    toy.loss_of(chunk)
    seam(len(calls) == 2, where, f"called {len(calls)} times for a token and one prediction")
    seam(calls[0] == (toy.SEQ, 2, toy.VOCAB), where, f"logits are {calls[0]}, not [s, b, vocab]")
    seam("output_layer" in dict(chunk.named_modules()), where, "output_layer has another name")


def test_predictions_are_weighted_by_one_function():
    where = "models/prediction.py"
    source = inspect.getsource(hybrid_model.HybridModel.forward)
    seam("process_mtp_loss(" in source, where, "HybridModel.forward calls no process_mtp_loss")
    theirs = inspect.signature(hybrid_model.process_mtp_loss).parameters
    ours = set(inspect.signature(prediction_loss).parameters) - {"unused"}
    seam(ours <= set(theirs), where, f"process_mtp_loss lost {ours - set(theirs)}")
    rolls = inspect.getsource(multi_token_prediction.roll_tensor)
    called = "_roll_tensor_packed_seq(tensor, shifts, dims, packed_seq_params, cp_group)"
    seam(called in rolls, where, f"roll_tensor does not call {called}")
    layer = inspect.getsource(multi_token_prediction.MultiTokenPredictionLayer._get_embeddings)
    seam(layer.count("packed_seq_params=packed_seq_params") == 3, where, "documents are not passed")


def test_model_forward_passes_the_packed_object_through():
    parameters = inspect.signature(hybrid_model.HybridModel.forward).parameters
    where = "models/hybrid_model.py forward, models/documents.py"
    seam("packed_seq_params" in parameters, where, "HybridModel.forward has no packed_seq_params")


def test_gradients_are_added_to_main_grad_once():
    """The data-parallel hook leaves main_grad alone where our layers have added to it."""
    chunks, config = toy.make("*-")
    toy.step(chunks, config)
    where = "fused_ops/linear.py dummy_gradient"
    counted = 2 * toy.SEQ * toy.MICRO_BATCHES
    got = {n: p.main_grad.clone() for n, p in chunks[0].named_parameters()}
    flags = {n: p.grad_added_to_main_grad for n, p in chunks[0].named_parameters()}
    seam(any(flags.values()) and not all(flags.values()), where, f"grad_added_to_main_grad {flags}")
    (plain,), _ = toy.make("*-")
    plain.load_state_dict(chunks[0].state_dict())
    total = sum(toy.loss_of(plain, i).sum() for i in range(toy.MICRO_BATCHES)) / counted
    total.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_the_router_keeps_its_bias_in_fp32():
    fields = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    (chunk,), _ = toy.make("E", dtype=torch.bfloat16, **fields)
    chunk.bfloat16()
    toy.loss_of(chunk)
    bias = chunk.decoder.layers[0].mlp.router.expert_bias
    seam(bias.dtype is torch.float32, "models/config.py", "expert_bias was left in BF16")


@pytest.mark.parametrize("absent", [None, "causal_conv1d_fn", "HAVE_MAMBA_SSM"])
def test_the_fused_mixer_is_taken_where_all_of_it_is_installed(monkeypatch, absent):
    """mamba-ssm imports without causal-conv1d, and fails in the first step."""
    there = {"HAVE_MAMBA_SSM": True, "causal_conv1d_fn": object()}
    for name, value in there.items():
        gone = False if name == "HAVE_MAMBA_SSM" else None
        monkeypatch.setattr(mamba_mixer, name, gone if name == absent else value)
    monkeypatch.setattr(mamba, "chosen", lambda x: "mamba_ssm")
    assert mamba.takes_fused(SimpleNamespace(is_cuda=True)) is (absent is None)
    assert not mamba.takes_fused(SimpleNamespace(is_cuda=False))


def test_the_distributed_optimizer_collects_states_by_name():
    where, theirs = "pretrain/weight_paths.py", DistributedOptimizer
    keys = vars(theirs).get("optimizer_state_keys")
    seam(isinstance(keys, property), where, "optimizer_state_keys is no property")
    source = inspect.getsource(theirs.get_parameter_state_dp_zero)
    for name in ("self.optimizer_state_keys", "self._get_main_param_and_optimizer_states("):
        seam(name in source, where, f"get_parameter_state_dp_zero does not use {name}")
    source = inspect.getsource(theirs.sharded_param_state_fully_reshardable)
    seam("model_space_state[param_idx] = tensors" in source, where, "states are not by parameter")
    source = inspect.getsource(theirs._get_main_param_and_optimizer_states)
    for name in ("self.model_param_group_index_map", "self.optimizer.state["):
        seam(name in source, where, f"a master is not found by {name}")
    seam(hasattr(theirs, "_get_model_param_range_map"), where, "a master's range is not told")
