# SPDX-License-Identifier: Apache-2.0
"""Delayed FP8 scaling of a whole model: what its layers do together at the end of a step.

Each linear layer keeps the amax history of its own fp8_delayed operands. Once a step the amaxes
are reduced over the ranks that hold parts or copies of the layer, in one collective a group, and
every history moves on. The histories decide the next step's codes, so checkpoints hold them.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fused_ops.quantize import DelayedScaling

Modules = Sequence[tuple[str, Any]]


def end_step(modules: Modules, groups: Any) -> None:
    """Share this step's amaxes and choose the next step's scales.

    Args:
        modules: (global name, layer) of this process, in an order that its ranks agree on.
        groups: megatron-core's process groups; layers of experts know their own.
    """
    dense = [module for _, module in modules if not hasattr(module, "ep_group")]
    experts = [module for _, module in modules if hasattr(module, "ep_group")]
    _reduce(dense, (groups.tp, groups.dp_cp))
    if experts:
        _reduce(experts, (experts[0].tp_group, experts[0].edp_group))
    for _, module in modules:
        for scaling in module.delayed.values():
            scaling.update()


def _reduce(modules: Iterable[Any], groups: Sequence[dist.ProcessGroup]) -> None:
    scalings = [m.delayed[slot] for m in modules for slot in sorted(m.delayed)]
    if not scalings or all(group.size() == 1 for group in groups):
        return
    amaxes = torch.stack([scaling.history[0] for scaling in scalings])
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=group)
    for scaling, amax in zip(scalings, amaxes):
        scaling.history[0] = amax


@contextlib.contextmanager
def kept(modules: Modules, *, begin: bool = False) -> Iterator[None]:
    """Inside, amaxes are noted for nothing: at the end all histories are as they were.

    With `begin`, operands that had no history keep one whose scale is of what was noted.
    """
    before = {
        (name, slot): scaling.state_dict()
        for name, module in modules
        for slot, scaling in module.delayed.items()
    }
    try:
        yield
    finally:
        for name, module in modules:
            for slot, scaling in list(module.delayed.items()):
                if (name, slot) in before:
                    scaling.load_state_dict(before[name, slot])
                elif begin:
                    scaling.update()
                else:
                    del module.delayed[slot]


def missing(modules: Modules) -> list[str]:
    """Layers whose forward takes an fp8_delayed operand of which no amax is known: a forward pass
    alone notes none, and would scale by 1."""
    found = []
    for name, module in modules:
        wanted = [o for o in ("x", "w") if module.recipe.spec("fprop", o).format == "fp8_delayed"]
        known = {slot.split(".")[1] for slot in module.delayed if slot.startswith("fprop.")}
        if set(wanted) - known:
            found.append(name)
    return found


def state_dict(modules: Modules) -> dict[str, dict[str, Any]]:
    """Histories of all layers of the whole model by global name and operand; the same on all ranks.

    A collective over all processes. Empty where nothing is fp8_delayed.
    """
    own = {
        name: {slot: _on_cpu(scaling.state_dict()) for slot, scaling in module.delayed.items()}
        for name, module in modules
        if module.delayed
    }
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    parts: list[dict[str, dict[str, Any]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    whole: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name, slots in part.items():
            whole.setdefault(name, {}).update(slots)
    return whole


def load_state_dict(
    modules: Modules, state: Mapping[str, Mapping[str, Any]], device: torch.device
) -> None:
    """Take the histories of this process's layers from what `state_dict` gave, in any layout; an
    operand that had none then has none afterwards."""
    for name, module in modules:
        saved = state.get(name, {})
        for slot in module.delayed.keys() - saved.keys():
            del module.delayed[slot]
        for slot, stored in saved.items():
            gemm, operand, expert = slot.split(".")
            if not _is_local(module, int(expert)):
                continue
            spec = module.recipe.spec(gemm, operand)
            if spec.format != "fp8_delayed":
                continue
            if slot not in module.delayed:
                module.delayed[slot] = DelayedScaling(str(spec.element), device=device)
            module.delayed[slot].load_state_dict(stored)


def drop_unused(modules: Modules) -> None:
    """No history of operands that are not fp8_delayed now: a resumed run would have none either."""
    for _, module in modules:
        for slot in list(module.delayed):
            if module.recipe.spec(*slot.split(".")[:2]).format != "fp8_delayed":
                del module.delayed[slot]


def _is_local(module: Any, expert: int) -> bool:
    if not hasattr(module, "ep_group"):
        return True
    first = module.ep_group.rank() * module.num_local_experts
    return first <= expert < first + module.num_local_experts


def _on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cpu() for name, value in state.items()}
