# SPDX-License-Identifier: Apache-2.0
"""The AdamW that megatron-core is given: one implementation for CPU and GPU, so checkpoints move.

megatron-core takes Adam from Transformer Engine or apex, and falls back to torch's where neither is
installed. The fallback keeps one `step` tensor in every parameter's state, and three things then go
wrong with the distributed optimizer: a checkpoint does not load into a fresh optimizer, a fully
reshardable one cannot be saved, and one tensor shared by all states advances once per parameter
after a resume, silently. Here `step` is a number of the parameter group, as in the fused
optimizers, and `install` tells megatron-core to treat this class as one of those.

Reference: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101.
"""

from collections.abc import Iterable
from typing import Any

import megatron.core.optimizer
import megatron.core.optimizer.distrib_optimizer
import torch
from torch.optim.adamw import adamw


class AdamW(torch.optim.Optimizer):
    """AdamW over FP32 parameters: `exp_avg` and `exp_avg_sq` per parameter, `step` per group.

    The update is torch's fused kernel, which exists for CPU and CUDA. A group without parameters
    counts its steps too, so that `step` is equal on every rank whatever it owns.

    megatron-core passes `capturable` and `adam_w_mode`; the update is always decoupled.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        capturable: bool = False,
        adam_w_mode: bool = True,
    ) -> None:
        assert adam_w_mode, "this is AdamW: weight decay is decoupled"
        assert not capturable, "the step number is a Python number: CUDA graphs cannot replay it"
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "step": 0}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        assert closure is None, "closures are not supported"
        for group in self.param_groups:
            group["step"] += 1
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            steps = torch.full((len(params),), group["step"] - 1.0, device=params[0].device)
            beta1, beta2 = group["betas"]
            adamw(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                list(steps.unbind()),  # the kernel adds one to each before it is used
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def install() -> None:
    """Make megatron-core use `AdamW`, also where Transformer Engine or apex is installed."""
    optimizer = megatron.core.optimizer
    distributed = megatron.core.optimizer.distrib_optimizer
    for module, name in (
        (optimizer, "Adam"),
        (optimizer, "USING_PYTORCH_OPTIMIZER"),
        (distributed, "Adam"),
        (distributed, "HAVE_APEX_OR_TE"),
    ):
        assert hasattr(module, name), f"{module.__name__}.{name} is gone: made for 0.19.x"
    optimizer.Adam = AdamW
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.Adam = AdamW
    distributed.HAVE_APEX_OR_TE = True
