# SPDX-License-Identifier: Apache-2.0
"""What of a run depends on its layout whatever is done about amaxes and dither: said before it."""

from pretrain.pretrain_config import PretrainConfig

_DRAWN = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")


def layout_notes(config: PretrainConfig, world: int) -> list[str]:
    """Settings by which `world` processes train otherwise than one."""
    fields, parallel = config.model.megatron, config.parallel
    if world == 1:
        return []
    found = []
    drawn = [f"{name}={fields[name]}" for name in _DRAWN if fields.get(name)]
    if drawn:
        found.append(
            f"model.megatron: {', '.join(drawn)}: what is drawn follows each rank's own generator, "
            "so it depends on the layout; without, every layout trains the same"
        )
    if "E" not in config.model.pattern:
        return found
    tokens_are_cut = parallel.sequence_parallel or parallel.context_parallel_size > 1
    factor = fields.get("moe_expert_capacity_factor")
    if factor is not None and factor >= 0 and tokens_are_cut:
        found.append(
            f"model.megatron.moe_expert_capacity_factor={factor}: each rank drops what exceeds the "
            "capacity of its own tokens, so which are dropped depends on this layout; without a "
            "capacity nothing is dropped in any"
        )
    kinds = fields.get("moe_router_load_balancing_type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "sinkhorn" in kinds and tokens_are_cut:
        found.append(
            "model.megatron.moe_router_load_balancing_type sinkhorn balances the tokens of each "
            "rank by themselves, so which experts they go to depends on this layout; aux_loss, "
            "seq_aux_loss and quantile_balancing do not"
        )
    replicas = parallel.data_parallel_size(world)
    if "global_aux_loss" in kinds and replicas > 1:
        found.append(
            "model.megatron.moe_router_load_balancing_type global_aux_loss counts the tokens of "
            f"the micro-batches so far on all {replicas} data-parallel ranks, so the loss depends "
            "on how many there are; aux_loss and seq_aux_loss do not"
        )
    return found
