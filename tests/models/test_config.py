# SPDX-License-Identifier: Apache-2.0
"""The model and parallel sections: what is built from them, and every problem at once."""

import dataclasses
import sys

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from fused_ops.errors import ConfigError
from models.config import (
    ModelConfig,
    ParallelConfig,
    model_problems,
    padded_vocab_size,
    transformer_config,
)
from models.megatron_fields import _default, read_megatron
from models.pattern import parse_pattern, pattern_problems, staged_pattern
from models.presets import preset_names
from tests.models import toy
from tests.models.toy import megatron_fields

TP2SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
SCALING = {"type": "linear", "factor": 4.0}


def model(pattern="*-", **changes):
    section = {
        k: changes.pop(k)
        for k in list(changes)
        if k in {f.name for f in dataclasses.fields(ModelConfig)}
    }
    return ModelConfig(
        pattern=pattern, seq_length=32, megatron=megatron_fields(pattern, **changes), **section
    )


def only(problems, *parts):
    """Exactly one problem, and it says all of this."""
    assert len(problems) == 1, problems
    for part in parts:
        assert part in problems[0]


def test_what_follows_from_the_sections():
    parallel = ParallelConfig(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )
    config = transformer_config(model("M-*E/*E"), parallel, params_dtype=torch.bfloat16)
    assert type(config) is TransformerConfig
    assert (config.num_layers, config.mtp_num_layers) == (4, 1)
    assert (config.bf16, config.params_dtype, config.pipeline_dtype) == (
        True,
        torch.bfloat16,
        torch.bfloat16,
    )
    assert config.quant_recipe is not None
    assert config.gradient_accumulation_fusion is False
    # Batched p2p gives wrong gradients under the interleaved schedule.
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)
    plain = transformer_config(model(), ParallelConfig(), params_dtype=torch.float16)
    assert (plain.fp16, plain.bf16) == (True, False)
    assert (plain.overlap_p2p_comm, plain.batch_p2p_comm) == (False, True)
    latent = transformer_config(model("+-"), ParallelConfig())
    assert type(latent) is MLATransformerConfig
    assert latent.multi_latent_attention


def test_every_preset_makes_a_config():
    for name in preset_names():
        config = transformer_config(ModelConfig(preset=name), ParallelConfig())
        assert config.num_layers == len(parse_pattern(ModelConfig(preset=name).pattern).layers)


def test_keys_override_a_preset():
    name = preset_names()[0]
    changed = ModelConfig(preset=name, seq_length=77, megatron={"hidden_dropout": 0.25})
    assert changed.seq_length == 77
    assert changed.megatron["hidden_dropout"] == 0.25
    assert changed.megatron["hidden_size"] == ModelConfig(preset=name).megatron["hidden_size"]


def test_strings_become_values_of_the_right_type():
    config = transformer_config(model(layernorm_epsilon="1e-3"), ParallelConfig())
    assert config.layernorm_epsilon == 1e-3
    squared = model(activation_func="squared_relu", gated_linear_unit=False)
    relu = transformer_config(squared, ParallelConfig()).activation_func
    assert torch.equal(relu(torch.tensor([-2.0, 3.0])), torch.tensor([0.0, 9.0]))


def test_keys_of_the_model_section_are_sent_there():
    fields = {f.name for f in dataclasses.fields(ModelConfig)} - {"megatron"}
    for name in sorted(fields):
        section = ModelConfig(pattern="*-", megatron={**megatron_fields("*-"), name: 1})
        problems = model_problems(section, ParallelConfig())
        only(problems, f"model.megatron.{name}", f"set model.{name}")


def test_unknown_key_names_the_nearest():
    problems = model_problems(model(hiden_size=3), ParallelConfig())
    only(problems, "model.megatron.hiden_size", "did you mean hidden_size?")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("fp8", "e4m3", "no effect without Transformer Engine"),
        ("fp4_recipe", "nvfp4", "set `precision` instead"),
        ("first_last_layers_bf16", True, "set `precision` instead"),
        ("num_layers", 3, "model.pattern"),
        ("bf16", True, "train.dtype"),
        ("batch_p2p_comm", True, "pipeline schedule"),
        ("tensor_model_parallel_size", 2, "parallel.tensor_model_parallel_size"),
        ("gradient_accumulation_fusion", True, "apex"),
        ("init_method", "normal", "cannot be set in a file"),
        ("activation_func", "tanh", "silu, gelu, relu, squared_relu, quick_gelu; got 'tanh'"),
        ("hidden_size", "wide", "valid integer"),
        ("recompute_modules", ["moe_act", "mlp"], "moe_act cannot be recomputed"),
        ("recompute_modules", 3, "valid list"),
        ("qk_clip", True, "would change nothing here"),
        ("cp_comm_type", "a2a", "would change nothing here"),
        ("apply_residual_connection_post_layernorm", True, "would change nothing here"),
        # read by megatron-core, and without effect, a stack trace or worse all the same
        ("fp32_residual_connection", True, "needs layers of Transformer Engine"),
        ("mamba_training_ssm_states_dtype", "fp32", "would change nothing here"),
        ("config_logger_dir", "x", "would change nothing here"),
        ("flash_attention_version", 3, "would change nothing here"),
        ("gtp_weight_remat_size", 2, "would change nothing here"),
        ("num_microbatches_with_partial_activation_checkpoints", 2, "would change nothing here"),
        ("moe_router_topk_limited_devices", 2, "set moe_router_num_groups"),
        ("perform_initialization", False, "model.init_std"),
        # gate and up in turns: expert tensor parallelism would cut them as two halves
        ("moe_mlp_glu_interleave_size", 16, "needs layers of Transformer Engine"),
        ("mlp_chunks_for_training", 4, "recompute_modules [mlp]"),
        ("use_mup", True, "learning rates too"),
        ("heterogeneous_block_specs", True, "one symbol for each layer"),
        ("cuda_graph_impl", "local", "train.cuda_graph_impl decides it"),
        ("moe_enable_deepep", True, "moe_token_dispatcher_type"),
        ("multi_latent_attention", True, "'+' is such a layer"),
    ],
)
def test_refused_fields(key, value, says):
    fields = {**megatron_fields("*-"), key: value}
    problems = model_problems(ModelConfig(pattern="*-", megatron=fields), ParallelConfig())
    assert any(f"model.megatron.{key}" in p and says in p for p in problems), problems


def test_defaults_of_fields_that_change_nothing_are_no_problem():
    fields = {"qk_clip": False, "tp_comm_overlap_ag": True, "cuda_graph_impl": "none"}
    assert model_problems(model(**fields), ParallelConfig()) == []


# Read where a toy on one process does not come by: pipelines, YaRN, dispatchers of other packages,
# and what megatron-core's __post_init__ turns into other fields.
READ_ELSEWHERE = {
    "batch_p2p_sync", "microbatch_group_size_per_vp_stage", "variable_seq_lengths",
    "overlap_p2p_comm_warmup_flush",
    "beta_fast", "beta_slow", "mscale", "original_max_position_embeddings",
    "moe_flex_dispatcher_backend", "moe_flex_dispatcher_num_sms", "moe_deepep_num_sms",
    "moe_permute_fusion_into_hybridep", "moe_layer_recompute",
    "disable_bf16_reduced_precision_matmul", "embedding_init_method_std",
    "moe_router_quantile_balancing_ema", "clone_scatter_output_in_embedding", "moe_grouped_gemm",
}  # fmt: skip
TOYS = (
    ("M-*E", {"qk_layernorm": True, "moe_shared_expert_intermediate_size": 32}),
    ("+E/+-", {"qk_layernorm": True, "moe_latent_size": 32}),
    ("*E", {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}),
    ("*E", {"moe_token_dispatcher_type": "allgather", "moe_expert_capacity_factor": 1.0}),
    ("*-", {"window_size": [4, 0], "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    (
        "*-",
        {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
        },
    ),
    ("*-", {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}),
)


def test_every_field_that_is_accepted_is_read(monkeypatch):
    """A field that nothing reads is refused: a run that sets it would train something else."""
    names = {f.name for f in dataclasses.fields(MLATransformerConfig)}
    read = set()

    def note(self, name):
        if name in names:
            caller = sys._getframe(1).f_code.co_filename
            if not caller.endswith(("_config.py", "copy.py", "dataclasses.py")):
                read.add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(TransformerConfig, "__getattribute__", note, raising=False)
    for pattern, fields in TOYS:
        chunks, config = toy.make(pattern, **fields)
        toy.step(chunks, config)
    monkeypatch.undo()
    left = [name for name in names - read - READ_ELSEWHERE if not name.startswith("_")]
    values = (True, False, 3, 0.25, "local", ["x"], [1, 2])
    accepted = {
        name
        for name in left
        if not name.startswith(("moe_hybridep_", "moe_ncclep_"))  # packages of other dispatchers
        for value in values
        if value != _default(name, True)
        and type(value) is type(_default(name, True) or value)
        and not read_megatron({name: value}, (), multi_latent=True)[1]
    }
    assert "qk_clip" in left, "what is refused is not read"
    assert not accepted, "\n".join(sorted(accepted))


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("", "at least one layer"),
        ("/M", "at least one layer"),
        ("MX", "'X' is not a layer"),
        ("MG", "gated delta net"),
        ("D-", "sparse attention"),
        ("M||M", "stage without layers"),
        ("|M", "stage without layers"),
        ("M/", "after '/'"),
        ("M/*/M", "after '/'"),
        ("M/*|M", "after '/'"),
        ("*-+", "do not mix"),
        ("*-/+", "do not mix"),
    ],
)
def test_bad_patterns(pattern, says):
    assert any(says in p for p in pattern_problems(pattern)), pattern_problems(pattern)
    with pytest.raises(ConfigError):
        parse_pattern(pattern)


def test_a_cut_among_predictions_is_one_problem():
    (problem,) = pattern_problems("M/*|M")
    assert "the same layers for each predicted token, without '|'" in problem


def test_stages():
    assert staged_pattern(parse_pattern("M-*E/*"), 2) == "M-|*E/*"
    assert staged_pattern(parse_pattern("M-*E"), 2, 2) == "M|-|*|E"
    assert staged_pattern(parse_pattern("M-*|E"), 2) == "M-*|E"
    for pattern, pipeline, virtual, says in (
        ("M-*|E", 1, 1, "cut into 2 stages"),
        ("M-*|E", 4, 1, "use 3 '|', or none for equal stages"),
        ("M-*E-", 2, 1, "5 layers"),
        ("M-*E-", 2, 2, "place 3 '|'"),
    ):
        with pytest.raises(ConfigError) as error:
            staged_pattern(parse_pattern(pattern), pipeline, virtual)
        assert says in str(error.value)


@pytest.mark.parametrize(
    ("pattern", "changes", "layout", "says"),
    [
        ("*-", {}, {"tensor_model_parallel_size": 3}, "num_attention_heads (4)"),
        ("*-", {"num_query_groups": 3}, {}, "multiple of num_query_groups 3"),
        ("-", {"ffn_hidden_size": 97}, {"tensor_model_parallel_size": 2}, "next one is 98"),
        ("-", {}, {"sequence_parallel": True}, "tensor_model_parallel_size of 2 or more"),
        ("-", {}, {"virtual_pipeline_model_parallel_size": 2}, "needs a pipeline"),
        ("-", {}, {"tensor_model_parallel_size": 0}, "at least 1, got 0"),
        ("-", {}, {"expert_tensor_parallel_size": 2}, "_size 2 has no experts to cut"),
        (
            "-",
            {"seq_length": 33},
            {"context_parallel_size": 2},
            "the next one is 36, the one before 32",
        ),
        ("-", {}, {"overlap_param_gather": True}, "overlap_grad_reduce"),
        ("E", {"num_moe_experts": 3}, {"expert_model_parallel_size": 2}, "next one is 4"),
        ("E", {"moe_router_topk": 9}, {}, "moe_router_topk 9 is more than"),
        ("E", {}, {"tensor_model_parallel_size": 2}, "sequence_parallel"),
        ("E", {"num_moe_experts": None}, {}, "num_moe_experts is needed"),
        (
            "-",
            {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.1},
            {},
            "remove it from the run file, and with it moe_aux_loss_coeff, moe_router_topk",
        ),
        ("E", {"moe_router_enable_expert_bias": True}, {}, "sigmoid"),
        ("M", {"mamba_num_heads": 9}, {}, "multiple of mamba_num_groups 2"),
        ("M", {}, {"tensor_model_parallel_size": 4}, "mamba_num_groups (2)"),
        ("M", {}, {"context_parallel_size": 16}, "mamba heads (8)"),
        ("-", {"vocab_size": 100}, {"tensor_model_parallel_size": 3}, "padded vocabulary (128)"),
        ("+-", {"q_lora_rank": None, "qk_layernorm": True}, {}, "q_lora_rank"),
        ("+", {"q_lora_rank": 33}, {"tensor_model_parallel_size": 2}, "q_lora_rank (33)"),
        ("+", {"kv_lora_rank": 17}, {"tensor_model_parallel_size": 2}, "(17 + 8) must be a mult"),
        ("+", {"qk_layernorm": True}, {"tensor_model_parallel_size": 2}, "counts once for each"),
        ("+", {"qk_pos_emb_head_dim": 7}, {}, "qk_pos_emb_head_dim (7) must be even"),
        ("+", {"add_qkv_bias": True}, {}, "add_qkv_bias has no meaning"),
        (
            "-",
            {"ffn_hidden_size": None},
            {"tensor_model_parallel_size": 3},
            "ffn_hidden_size (256)",
        ),
        ("E", {"moe_shared_expert_intermediate_size": 33}, TP2SP, "intermediate_size (33) must"),
        ("E", {"add_bias_linear": True}, TP2SP, "expert tensor parallelism of 2"),
        ("E", {"add_bias_linear": True, "moe_latent_size": 8}, {}, "not go with moe_latent_size"),
        (
            "E",
            {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 32},
            {},
            "does not go with moe_shared_expert",
        ),
        ("E", {"moe_router_load_balancing_type": "aux"}, {}, "must be one of aux_loss,"),
        ("E", {"moe_router_load_balancing_type": "sinkhorn"}, {}, "balances without a loss"),
        ("E", {"moe_router_num_groups": 2}, {}, "go together; got 2 and None"),
        (
            "E",
            {"moe_router_num_groups": 4, "moe_router_group_topk": 1},
            {},
            "more than the 1 experts of moe_router_group_topk 1",
        ),
        ("E", {"moe_router_topk": 0}, {}, "moe_router_topk must be at least 1, got 0"),
        ("*", {"num_query_groups": 0}, {}, "num_query_groups must be at least 1, got 0"),
        ("*", {"hidden_size": -64}, {}, "hidden_size must be at least 1, got -64"),
        ("M", {"mamba_head_dim": 0}, {}, "mamba_head_dim must be at least 1, got 0"),
        ("*", {"kv_channels": 15}, {}, "kv_channels (15) must be even"),
        ("*", {"hidden_size": 66}, {}, "set kv_channels, such as 16"),
        ("*", {"softmax_type": "off-by-one"}, {}, "'off-by-one' is not built"),
        ("*", {"window_size": [3, 2]}, {}, "use [3, 0]"),
        ("*", {"window_size": [-1, 0]}, {}, "[-1, 0] would let a token see nothing"),
        (
            "*",
            {"hidden_dropout": 1.5},
            {},
            "hidden_dropout must be at least 0 and below 1",
        ),
        ("*", {"layernorm_epsilon": -1}, {}, "layernorm_epsilon must be at least 0, got -1"),
        ("*", {"softmax_scale": 0}, {}, "softmax_scale must be above 0, got 0"),
        ("E", {"moe_aux_loss_coeff": -0.1}, {}, "moe_aux_loss_coeff must be at least 0, got -0.1"),
        ("E", {"moe_apply_probs_on_input": True}, {}, "needs moe_router_topk 1, got 2"),
        (
            "E",
            {
                "moe_latent_size": 8,
                "moe_shared_expert_intermediate_size": 32,
                "moe_shared_expert_overlap": True,
            },
            {},
            "moe_shared_expert_overlap does not go with moe_latent_size",
        ),
        ("*/*", FULL | {"recompute_num_layers": 2}, {}, "does not go with multi-token prediction"),
    ],
)
def test_layouts_that_cannot_work(pattern, changes, layout, says):
    fields = {"seq_length": changes["seq_length"]} if "seq_length" in changes else {}
    rest = {k: v for k, v in changes.items() if k not in ("seq_length", "vocab_size")}
    section = ModelConfig(
        pattern=pattern,
        vocab_size=changes.get("vocab_size"),
        megatron=megatron_fields(pattern, **rest),
        **({"seq_length": 32} | fields),
    )
    problems = model_problems(section, ParallelConfig(**layout))
    assert any(says in p for p in problems), problems
    with pytest.raises(ConfigError):
        transformer_config(section, ParallelConfig(**layout))


def test_all_problems_at_once():
    section = ModelConfig(
        pattern="M-*|X", seq_length=33, megatron={"fp8": "e4m3", "hiden_size": 3, "num_layers": 2}
    )
    with pytest.raises(ConfigError) as error:
        transformer_config(section, ParallelConfig())
    assert len(error.value.problems) == 4, error.value.problems


@pytest.mark.parametrize(
    ("pattern", "section", "fields", "says"),
    [
        ("+-", {"rope_scaling": SCALING}, {}, "does not reach multi-latent attention"),
        ("*-", {"rope_scaling": SCALING, "position_embedding": "none"}, {}, "nothing to stretch"),
        ("*-", {"qk_norm_over": "all_heads"}, {}, "needs model.megatron.qk_layernorm"),
        (
            "*-",
            {"qk_norm_over": "all_heads"},
            {"qk_layernorm": True, "normalization": "LayerNorm"},
            "is a plain RMSNorm",
        ),
        ("*-", {"make_vocab_size_divisible_by": 0, "vocab_size": 9}, {}, "at least 1, got 0"),
        ("*-", {"rotary_percent": 1.5}, {}, "rotary_percent is a share"),
        (
            "*-",
            {"rotary_percent": 0.5, "position_embedding": "none"},
            {},
            "0.5 would change nothing here: position_embedding is none",
        ),
        ("+-", {"rotary_percent": 0.5}, {"rope_type": "yarn"}, "rope_type yarn rotates all"),
        ("+-", {"position_embedding": "none"}, {}, "has its own rotary part"),
        ("+-", {"qk_norm_over": "all_heads"}, {"qk_layernorm": True}, "all_heads does not reach"),
        ("+-", {}, {"softmax_scale": 0.5}, "softmax_scale would change nothing"),
        ("+-", {}, {"no_rope_freq": [1, 1]}, "no_rope_freq would change nothing"),
        ("+-", {}, {"num_query_groups": 2}, "num_query_groups would change nothing"),
        ("+-", {}, {"mscale": 2.0}, "mscale would change nothing here: it needs rope_type yarn"),
        ("*-", {}, {"window_attn_skip_freq": 2}, "needs window_size"),
        (
            "*-",
            {},
            {"gated_linear_unit": False, "activation_func_clamp_value": 7.0},
            "activation_func_clamp_value would change nothing here",
        ),
        ("*-", {}, {"recompute_num_layers": 1}, "needs recompute_granularity"),
        ("*E", {}, {"moe_shared_expert_gate": True}, "moe_shared_expert_gate would change nothing"),
        (
            "*E",
            {},
            {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1},
            "moe_aux_loss_coeff would change nothing",
        ),
        ("*E", {}, {"moe_token_drop_policy": "position"}, "needs moe_expert_capacity_factor"),
    ],
)
def test_settings_that_would_be_lost(pattern, section, fields, says):
    only(model_problems(model(pattern, **section, **fields), ParallelConfig()), says)


def test_a_tied_embedding_of_predictions_stays_on_one_stage():
    section, two = model("*-/*", tie_embeddings=True), {"pipeline_model_parallel_size": 2}
    only(model_problems(section, ParallelConfig(**two)), "tie_embeddings", "embedding twice")
    assert model_problems(section, ParallelConfig()) == []
    assert model_problems(model("*-/*"), ParallelConfig(**two)) == []


def test_megatron_core_s_own_refusals_are_config_errors():
    with pytest.raises(ConfigError, match="megatron-core refuses"):
        transformer_config(model(recompute_granularity="full"), ParallelConfig())


def test_vocabulary_is_padded_whatever_the_layout():
    section = model(make_vocab_size_divisible_by=128)
    assert [padded_vocab_size(section, v) for v in (1, 128, 129, 50257)] == [128, 128, 256, 50304]
