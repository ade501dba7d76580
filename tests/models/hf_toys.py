# SPDX-License-Identifier: Apache-2.0
"""Random toy models of every family, made and saved by transformers: the inputs of conversions.

Vocabularies are no multiple of the padding, there are 12 experts, 2 groups, and every parameter is
random (transformers starts norms at one and biases at zero, which would hide mistakes).
"""

import json
from pathlib import Path

import torch

VOCAB = 203
DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MOE = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
MAMBA = {"mamba_num_heads": 6, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
NEMOTRON = {
    **MAMBA,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "chunk_size": 16,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 28,
    "routed_scaling_factor": 2.5,
}
# name: (model_type, configuration)
TOYS = {
    "llama": ("llama", {**DENSE, "rope_parameters": LLAMA3_ROPE}),
    "llama_tied_bias": (
        "llama",
        {**DENSE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("mistral", {**DENSE, "sliding_window": 24, "head_dim": 16}),
    "qwen2": ("qwen2", {**DENSE, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen3": (
        "qwen3",
        {**DENSE, "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            **DENSE,
            **MOE,
            "head_dim": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
        },
    ),
    "qwen3_moe_unnormalized": ("qwen3_moe", {**DENSE, **MOE, "head_dim": 8}),
    "mixtral": ("mixtral", {**DENSE, "num_local_experts": 12, "num_experts_per_tok": 3}),
    "olmoe": ("olmoe", {**DENSE, "num_experts": 12, "num_experts_per_tok": 3}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **{k: v for k, v in DENSE.items() if k != "num_key_value_heads"},
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 24,
            "num_key_value_heads": 4,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **DENSE,
            "head_dim": 16,
            "num_local_experts": 12,
            "num_experts_per_tok": 3,
            "sliding_window": 24,
            "rope_parameters": YARN,
            "swiglu_limit": 7.0,
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mamba"]},
    ),
    "nemotron_3": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"]},
    ),
    "nemotron_3_tied": (
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["mamba", "moe", "attention"],
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_3_latent": (
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["mamba", "moe", "attention", "moe"],
            "moe_latent_size": 20,
            "layer_norm_epsilon": 1e-6,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 16,
            "n_groups": 2,
            "chunk_size": 16,
            "expand": 2,
        },
    ),
}


def make_toy(name: str, folder: Path, *, seed: int = 0, dtype: str = "float32", **changes) -> Path:
    """Save a random model of TOYS[name] to `folder`."""
    import transformers

    kind, values = TOYS[name]
    config = transformers.AutoConfig.for_model(kind, **{**values, **changes})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    randomize(model, seed)
    if config.tie_word_embeddings:  # not every class of transformers does
        with torch.no_grad():
            model.lm_head.weight.copy_(model.get_input_embeddings().weight)
    model.save_pretrained(folder)
    return Path(folder)


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Every parameter and buffer of weights away from its special start."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor):
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    for parameter_name, tensor in model.state_dict().items():
        last = parameter_name.rsplit(".", 1)[-1]
        if last == "A_log":
            tensor.copy_((noise(tensor).abs() * 2 + 0.5).log())
        elif last == "dt_bias":
            tensor.copy_(noise(tensor) - 2)
        elif last == "e_score_correction_bias":
            tensor.copy_(noise(tensor) * 0.1)
        elif tensor.dim() == 1 and last == "weight":
            tensor.copy_(1 + 0.3 * noise(tensor))
        elif tensor.dim() == 1 or "bias" in last:
            tensor.copy_(0.3 * noise(tensor))
        elif last == "weight" and tensor.dim() == 3:
            tensor.copy_(0.5 * noise(tensor))
        else:
            tensor.copy_(noise(tensor) * tensor.shape[-1] ** -0.5)


def edit_config(folder: Path, **changes) -> None:
    """Change values of a folder's config.json; None removes one."""
    path = Path(folder) / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
