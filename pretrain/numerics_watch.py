# SPDX-License-Identifier: Apache-2.0
"""What one monitored step gathers: sums over operands, products, gradients and routers.

Everything stays on the device until `NumericsWatch.reduced`, which adds it over all ranks and waits
once. One micro-batch a rank is looked at.
"""

import contextlib
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from fused_ops.formats import Operand, QuantizedTensor
from fused_ops.keys import GEMMS, OPERANDS, TRANSPOSED, signs
from fused_ops.linear import LinearCall
from fused_ops.operand_error import (
    OPERAND_SUMS,
    PRODUCT_SUMS,
    Sample,
    product_sums,
    products_together,
    sums_together,
    take_sample,
)
from fused_ops.recipe import is_quantized
from models import micro_batch
from models.comm import TensorParallelComm
from models.precision import named_parts, unwrap
from pretrain.engine import Engine
from pretrain.numerics_sums import Batches, Table

_SMALL = 2**20
"""Samples and products of so many values may wait for others: their time is that of launches."""
_TOGETHER = 4 * _SMALL
"""Values of samples that are summed in one call, which holds some fifteen times as many in FP32 (a
product of samples: four times)."""
_WAITING = 64 * _SMALL
"""Values of all samples that wait: two to three bytes each."""


@dataclass
class _Product:
    """A GEMM's product that is to be taken: of its samples, exactly and as multiplied."""

    place: tuple[int, int]
    samples: tuple[Sample, Sample]
    decode: str
    partial: "_Partial | None"
    """Where other ranks have other parts of the sum."""


@dataclass
class _Partial:
    place: tuple[int, int]
    groups: list[dist.ProcessGroup]
    pair: Tensor | None = None


class NumericsWatch:
    """The sums of one step.

    Args:
        engine: what is trained.
        limits: rows and columns of an operand to look at; 0: all.
        experts: of each layer of experts, how many to look at.
        micro_batch: which of the rank's micro-batches to look at, from 0.
    """

    def __init__(
        self, engine: Engine, limits: tuple[int, int], experts: int, micro_batch: int = 0
    ) -> None:
        self.engine, self.limits, self.micro_batch = engine, limits, micro_batch
        self.names = [module.name for module in engine.plan.modules]
        number = len(self.names)
        device = engine.world.device
        self.amax = Table((number, len(OPERANDS), 1), device, torch.maximum)
        self.operands = Table((number, len(OPERANDS), len(OPERAND_SUMS)), device)
        self.products = Table((number, len(GEMMS), len(PRODUCT_SUMS)), device)
        self.zeros, self.values = Table((number, 1), device), [0] * number
        """Exact zeros of the weight's gradient, and how many values it has here."""
        config = engine.config
        self.router_names = router_names(engine)
        self.num_experts = config.num_moe_experts or 0
        # Of each router: tokens, their summed entropy, tokens of each expert.
        sums = len(self.router_names), 2 + self.num_experts
        self.routers = torch.zeros(sums, dtype=torch.float64, device=device)
        self.expert_stride = max(1, math.ceil(self.num_experts / max(experts, 1)))
        self._partial: list[_Partial] = []
        self._samples: Batches[tuple[tuple[int, int], Sample]] = Batches(
            self._sum_up, _TOGETHER, _WAITING
        )
        self._products: Batches[_Product] = Batches(self._multiply, 4 * _TOGETHER, _WAITING)

    def wants(self, number: int) -> bool:
        """Whether to look at the micro-batch with this number in the global batch, of which
        data-parallel ranks take turns (`pretrain.data.loader`)."""
        return number // self.engine.world.data_parallel_size == self.micro_batch

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Inside, the step's GEMMs, routers and gradients are seen."""
        modules = self.engine.plan.bound
        before = [module.observer for _, module in modules]
        index = {name: i for i, name in enumerate(self.names)}
        config = self.engine.config
        finalize = config.finalize_model_grads_func
        assert finalize is not None, "an engine has a function that finishes gradients"

        def finish(*arguments: Any, **options: Any) -> None:
            finalize(*arguments, **options)
            self._count_zeros(index)

        hooks = []
        try:
            for name, module in modules:
                module.observer = _LayerWatch(self, index[name])
            for name, router in routers(self.engine):
                place = self.router_names.index(name)
                hooks.append(router.register_forward_hook(_RouterWatch(self, place)))
            config.finalize_model_grads_func = finish
            yield
        finally:
            config.finalize_model_grads_func = finalize
            for hook in hooks:
                hook.remove()
            for (_, module), observer in zip(modules, before):
                module.observer = observer

    def add_operand(self, place: tuple[int, int], sample: Sample) -> None:
        """A quantized sample, to be summed with others where it may wait."""
        self._samples.add(_waits_as(sample), (place, sample), sample.plain.numel())

    def add_product(
        self,
        place: tuple[int, int],
        samples: tuple[Sample, Sample],
        decode: str,
        groups: list[dist.ProcessGroup],
    ) -> None:
        """The samples of a GEMM's operands; `groups` have other parts of the product's sum."""
        partial = _Partial(place, groups) if groups else None
        if partial is not None:
            self._partial.append(partial)  # in the order of calls, which is that of all ranks
        keys, plain = tuple(map(_waits_as, samples)), [sample.plain for sample in samples]
        is_large = len(plain[0]) * len(plain[1]) > _SMALL
        key = None if is_large or None in keys else (decode, *keys)
        size = sum(part.numel() for part in plain)
        self._products.add(key, _Product(place, samples, decode, partial), size)

    def _sum_up(self, found: Sequence[tuple[tuple[int, int], Sample]]) -> None:
        places, samples = zip(*found)
        self.operands.add(places, sums_together(samples))

    def _multiply(self, found: Sequence[_Product]) -> None:
        pairs = products_together([one.samples for one in found], found[0].decode)
        whole = [i for i, one in enumerate(found) if one.partial is None]
        for one, exact, computed in zip(found, *pairs):
            if one.partial is not None:
                one.partial.pair = torch.stack([exact, computed])
        if whole:
            sums = product_sums(
                *(side[whole] if len(whole) < len(found) else side for side in pairs)
            )
            self.products.add([found[i].place for i in whole], sums)

    def _count_zeros(self, index: dict[str, int]) -> None:
        for name, module in self.engine.plan.bound:
            for part in gradient_parts(self.engine, module.weight):
                self.zeros.add([(index[name],)], (part == 0).sum().view(1, 1))
                self.values[index[name]] += part.numel()

    def _finish_partial(self) -> None:
        """Adds up the products whose contraction is cut: one all-reduce a group."""
        by_group: dict[int, tuple[dist.ProcessGroup, list[Tensor]]] = {}
        pairs = [(one, cast(Tensor, one.pair)) for one in self._partial]
        for one, pair in pairs:
            for group in one.groups:
                by_group.setdefault(id(group), (group, []))[1].append(pair)
        for group, parts in by_group.values():
            flat = torch.cat([part.flatten() for part in parts])
            dist.all_reduce(flat, group=group)
            for part, whole in zip(parts, flat.split([part.numel() for part in parts])):
                part.copy_(whole.view(part.shape))
        for one, pair in pairs:
            self.products.add([one.place], product_sums(*pair).unsqueeze(0))
        self._partial = []

    def reduced(self) -> dict[str, list[Any]]:
        """All sums over all ranks, as nested lists of numbers. Collective; waits for the device."""
        self._samples.finish()
        self._products.finish()
        self._finish_partial()
        zeros = self.zeros.total()
        values = torch.tensor(self.values, dtype=zeros.dtype, device=zeros.device)
        tables = {
            "operands": self.operands.total(),
            "products": self.products.total(),
            "gradients": torch.stack([zeros.squeeze(1), values], 1),
            "routers": self.routers,
        }
        flat = torch.cat([table.flatten() for table in tables.values()])
        dist.all_reduce(flat)
        amax = self.amax.total().squeeze(-1)
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        whole = torch.cat([flat, amax.flatten()]).cpu()
        tables["amax"] = amax
        parts = whole.split([table.numel() for table in tables.values()])
        return {name: p.view(t.shape).tolist() for (name, t), p in zip(tables.items(), parts)}


def _waits_as(sample: Sample) -> Hashable | None:
    """What may be computed with it; None where it is large, or may change."""
    return sample.key if sample.is_copy and sample.plain.numel() <= _SMALL else None


class _LayerWatch:
    """The observer of one linear layer, or of one stack of experts."""

    def __init__(self, watch: NumericsWatch, index: int) -> None:
        self.watch, self.index = watch, index
        self._waiting: dict[tuple[str, int], tuple[str, Sample]] = {}

    def wants(self, number: int) -> bool:
        """Signature: `models.parallel_linear.ModuleObserver.wants`."""
        return self.watch.wants(number)

    @torch.no_grad()
    def observe(
        self, gemm: str, operand: str, tensor: Tensor, quantized: Operand, call: LinearCall
    ) -> None:
        """Signature: `fused_ops.linear.Observer.observe`."""
        watch, expert = self.watch, call.key.expert
        if tensor.numel() == 0 or expert % watch.expert_stride:
            return
        name = f"{gemm}.{operand}"
        place = (self.index, OPERANDS.index(name))
        amax = torch.linalg.vector_norm(tensor.detach(), math.inf)
        watch.amax.add([place], amax.view(1, 1))
        if not any(map(is_quantized, call.recipe.specs(gemm))):
            return
        assert isinstance(quantized, QuantizedTensor | Tensor), "an observed operand is not decoded"
        spec = call.spec(name)
        sample = take_sample(
            tensor.detach(),
            quantized,
            columns=name in TRANSPOSED,
            signs=signs(spec, call.key, gemm, tensor.device),
            limits=watch.limits,
        )
        if sample.is_quantized:
            watch.add_operand(place, sample)
        other = self._waiting.pop((gemm, expert), None)
        if other is None or other[0] == operand:
            self._waiting[gemm, expert] = operand, sample
            return
        left_first = operand in ("w", "x")
        samples = (other[1], sample) if left_first else (sample, other[1])
        comm = call.comm
        groups = comm.contraction_groups(gemm) if isinstance(comm, TensorParallelComm) else []
        watch.add_product((self.index, GEMMS.index(gemm)), samples, call.recipe.decode, groups)


class _RouterWatch:
    """A forward hook of a router: how sure it is, and where the tokens go."""

    def __init__(self, watch: NumericsWatch, place: int) -> None:
        self.watch, self.place = watch, place

    @torch.no_grad()
    def __call__(
        self, router: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, Tensor]
    ) -> None:
        if not self.watch.wants(micro_batch.current()):
            return
        logits = router.gating(inputs[0].detach()).float()
        logits = logits.reshape(-1, logits.shape[-1])
        if router.config.moe_router_score_function == "sigmoid":
            shares = torch.sigmoid(logits)
            shares = shares / shares.sum(-1, keepdim=True)
        else:
            shares = torch.softmax(logits, -1)
        entropy = torch.special.entr(shares).sum(dtype=torch.float64)
        tokens = torch.full_like(entropy, float(logits.shape[0]))
        load = outputs[1].reshape(-1, logits.shape[-1]).sum(0, dtype=torch.float64)
        self.watch.routers[self.place] += torch.cat([torch.stack([tokens, entropy]), load])


def routers(engine: Engine) -> Iterator[tuple[str, Any]]:
    """(global name, module) of this rank's routers."""
    for chunk in engine.chunks:
        for name, module in named_parts(unwrap(chunk)):
            if isinstance(module, Router):
                yield name, module


def router_names(engine: Engine) -> list[str]:
    """Names of the routers of the whole model in its order, alike on every rank. Collective."""
    if not engine.config.num_moe_experts:
        return []
    boxes: list[Any] = [None] * engine.world.size
    dist.all_gather_object(boxes, [name for name, _ in routers(engine)])
    names = dict.fromkeys(name for box in boxes for name in box)

    def place(name: str) -> tuple[bool, list[int]]:
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        return name.startswith("mtp."), numbers

    return sorted(names, key=place)


def gradient_parts(engine: Engine, weight: Any) -> Iterator[Tensor]:
    """The parts of a weight's gradient that this rank holds summed over the data-parallel ranks."""
    for chunk in engine.chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            if weight not in buffer.param_index_map:
                continue
            start, end, number = buffer.param_index_map[weight]
            bucket = buffer.buckets[number]
            low, high = 0, bucket.grad_data.numel()
            if chunk.ddp_config.use_distributed_optimizer:
                group = buffer.data_parallel_group
                size = high // group.size()
                low, high = group.rank() * size, (group.rank() + 1) * size
            first, last = max(start - bucket.offset, low), min(end - bucket.offset, high)
            if first < last:
                yield bucket.grad_data[first:last]
