# SPDX-License-Identifier: Apache-2.0
"""Follows weights through updates, and puts those that oscillate onto their codes: OsciReset."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_ops.formats import OperandSpec
from fused_ops.weight_operands import follows_weight
from models.parallel_linear import GemmModule
from models.precision import PrecisionPlan, PrecisionState
from models.quantized_weight import forward_weight
from pretrain.oscillation_config import OscillationReset
from pretrain.weight_paths import PATHS, Master, WeightPaths

_SHOWN = 5
"""Layers that an event names."""


class Oscillation:
    """The reset of one run; what it does is defined in `OscillationReset`.

    Args:
        config: the section of the run file.
        steps: of the whole run.
        optimizer: megatron-core's, an AdamW.
        plan: of the model that is trained; names all linear layers in one order on every rank.
        state: says which step is computed.
    """

    def __init__(
        self,
        config: OscillationReset,
        steps: int,
        optimizer: Any,
        plan: PrecisionPlan,
        state: PrecisionState,
    ) -> None:
        self.config, self._begin, self._state = config, config.begin(steps), state
        self._layers: dict[str, GemmModule] = dict(plan.bound)
        self._plan = plan
        self._elements = {m.name: m.copies * m.k * m.n for m in plan.modules}
        self.paths = WeightPaths(optimizer, [m.weight for m in self._layers.values()])
        self.updates = 0
        """Made since this interval began; 0: the next one begins it, once the run is far enough."""
        self._specs: dict[str, OperandSpec] = {}
        self._before: list[tuple[Master, Tensor]] = []
        self._report: dict[str, Any] | None = None

    @contextmanager
    def around_update(self) -> Iterator[None]:
        """To be held around each update of the weights, and not entered where one is skipped.

        Before it weights are whole on every rank, and those that oscillate are reset. Collective.
        """
        if self.updates >= self.config.interval > self.config.window:
            self.updates = 0
        if self.updates > 0 or self._state.step > self._begin:
            self._measure()
            yield
            for master, before in self._before:
                master.state["weight_path"].add_((master.tensor - before).abs_())
            self._before = []
            self.updates += 1
        else:
            yield

    def _measure(self) -> None:
        """What an update needs to be done before it."""
        if self.updates > self.config.window:
            return
        if self.updates == 0:
            self._follow({n: m.recipe.fprop_w for n, m in self._layers.items()})
        elif any(self._layers[n].recipe.fprop_w != s for n, s in self._specs.items()):
            kept = self._specs.items()  # a schedule has made other codes of some weights
            self._follow({n: s for n, s in kept if self._layers[n].recipe.fprop_w == s})
        if self.updates == self.config.window:
            self._report = self._told({name: self._visit(name, True) for name in self._specs})
            self._follow({})
            if self.config.interval == self.config.window:
                self.updates = 0
                self._measure()
            return
        for name in self._specs:
            self._visit(name, False)
        followed = (self._master(name) for name in self._specs)
        self._before = [(m, m.tensor.detach().clone()) for m in followed if m is not None]

    def _visit(self, name: str, resets: bool) -> Tensor:
        """Adds to the quantized path of a weight, or begins it, and resets the weight if asked to.

        Returns:
            float64 [4] of this rank's part: elements, of them reset, both paths.
        """
        master, sums = self._master(name), self._zeros()
        if master is None:
            return sums
        quantized = forward_weight(self._layers[name], master.start, master.end)
        weight_path, path, last = (master.state[key].view(-1) for key in PATHS)
        if self.updates:
            path.add_((quantized - last).abs_())
        last.copy_(quantized)
        if resets:
            chosen = (path >= self.config.threshold * weight_path) & (weight_path > 0)
            flat = master.tensor.detach().view(-1)
            flat.copy_(torch.where(chosen, quantized, flat))
            sums[0] = path.numel()
            for place, each in enumerate((chosen, path, weight_path), 1):
                sums[place] = each.sum(dtype=torch.float64)
        return sums

    def _zeros(self) -> Tensor:
        return torch.zeros(4, dtype=torch.float64, device=self._state.nonfinite.device)

    def _master(self, name: str) -> Master | None:
        """This rank's part of a layer's weight; None where other ranks have all of it."""
        return self.paths.masters.get(self._layers[name].weight)

    def _follow(self, specs: Mapping[str, OperandSpec]) -> None:
        """Follow these layers, where their codes follow from the weight alone."""
        self._specs = {name: spec for name, spec in specs.items() if follows_weight(spec)}
        self.paths.follow([self._layers[name].weight for name in self._specs])

    # ---- what it says

    def _told(self, sums: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """The event of a window, from the sums of all ranks: collective."""
        table = torch.stack([sums.get(name, self._zeros()) for name in self._elements])
        dist.all_reduce(table)
        layers, reset, elements, paths = {}, 0.0, 0, [0.0, 0.0]
        for (name, size), (count, chosen, *lengths) in zip(self._elements.items(), table.tolist()):
            if count:  # a weight may lie on several ranks, whole: shares of it are what counts
                layers[name] = chosen / count
                reset, elements = reset + size * chosen / count, elements + size
                paths = [a + b * size / count for a, b in zip(paths, lengths)]
        if not layers:
            return None
        largest = sorted(layers, key=lambda name: -layers[name])[:_SHOWN]
        return {
            "share": float(f"{reset / elements:.4g}"),
            "path_ratio": float(f"{paths[0] / paths[1]:.4g}") if paths[1] else 0.0,
            "layers": {name: float(f"{layers[name]:.4g}") for name in largest},
        }

    def take_report(self) -> dict[str, Any] | None:
        """Of the window that has ended since the last call: `share` of followed elements that were
        reset, `path_ratio` (sum of quantized paths / sum of weight paths, of all elements), and the
        share in `layers` where it is largest. None: no window has."""
        report, self._report = self._report, None
        return report

    # ---- checkpoints

    @property
    def _within(self) -> bool:
        """Whether a window has begun, and its reset is still to come."""
        return 0 < self.updates <= self.config.window

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the paths; the same on every rank.

        `codes` {layer: label of its fprop.w}: what the paths within a window are of.
        """
        recipes = self._plan.recipes() if self._within else {}
        codes = {name: recipe.fprop_w.label for name, recipe in recipes.items()}
        return {"updates": self.updates, "codes": codes}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> list[str]:
        """Go on from a checkpoint whose paths are loaded already (`WeightPaths.expect`).

        Args:
            state: None: the run had no resets.

        Returns:
            What is worth saying.
        """
        self.updates, self._report = int((state or {}).get("updates", 0)), None
        layers, followed = self._layers.items(), self.paths.followed
        codes = (state or {}).get("codes", {})
        specs = {n: m.recipe.fprop_w for n, m in layers if m.weight in followed}
        held = {n: spec for n, spec in specs.items() if codes.get(n, spec.label) == spec.label}
        self._follow(held if self._within else {})
        if self.updates > self.config.interval:
            self.updates = 0
        if state is None:
            return ["optimizer.oscillation_reset is new: paths of weights begin at length 0"]
        return []


def left_out(state: Mapping[str, Any] | None) -> list[str]:
    """What a run without resets says to a checkpoint of one with them."""
    if not (state or {}).get("updates"):
        return []
    return ["optimizer.oscillation_reset is off: the checkpoint's interval under way is left out"]
