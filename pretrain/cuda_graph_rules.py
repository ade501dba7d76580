# SPDX-License-Identifier: Apache-2.0
"""What of a run cannot be recorded as a CUDA graph."""

from pretrain.pretrain_config import PretrainConfig


def cuda_graph_problems(config: PretrainConfig) -> list[str]:
    """Why the steps of this run cannot be recorded: each with what to change."""
    if config.train.cuda_graph_impl == "none":
        return []
    rule = "train.cuda_graph_impl=full_iteration"
    model, parallel, found = config.model, config.parallel, []
    if parallel.pipeline_model_parallel_size > 1:
        found.append(
            f"{rule} records the step of one stage; got parallel.pipeline_model_parallel_size="
            f"{parallel.pipeline_model_parallel_size}; set one of them back"
        )
    if parallel.overlap_grad_reduce:
        found.append(
            f"{rule} reduces gradients after the graph; got parallel.overlap_grad_reduce=true; set "
            "it to false"
        )
    for name in ("attention_dropout", "hidden_dropout"):
        # Without sequence parallelism hidden_dropout draws from torch's generator: graphs know it.
        rate = model.megatron.get(name, 0.0)
        if rate and (name == "attention_dropout" or parallel.sequence_parallel):
            found.append(
                f"{rule} cannot record draws from megatron-core's states of random numbers; got "
                f"model.megatron.{name}={rate}; set it to 0, or set train.cuda_graph_impl=none"
            )
    if "E" in model.pattern:
        found.append(
            f"{rule} needs shapes that never change, and experts have other numbers of tokens in "
            f"each step; got model.pattern={model.pattern!r}; set train.cuda_graph_impl=none"
        )
    if config.data.isolate_documents:
        found.append(
            f"{rule} needs shapes that never change, and data.isolate_documents=true has other "
            "documents in each step; set one of them back"
        )
    if config.train.dtype == "fp16":
        found.append(
            f"{rule} does not know of the loss scale of train.dtype=fp16; use bf16, or set "
            "train.cuda_graph_impl=none"
        )
    if config.precision.check_finite:
        found.append(
            f"{rule} cannot wait for the device, as precision.check_finite=true does in every "
            "operand; set one of them back (the step still looks for Inf and NaN)"
        )
    return found
