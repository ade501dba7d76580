# SPDX-License-Identifier: Apache-2.0
"""The model of a folder, run by transformers with one layer in memory at a time.

transformers is the judge of a conversion: it reads the files and computes by its own code. Layers
are filled as the forward pass reaches them and emptied behind it. The package is needed for proofs
only, and imported here only.
"""

import contextlib
import importlib.metadata
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fused_ops.errors import ConfigError
from models.conversion.safetensors import SafetensorsFolder

# Before it, Mamba-2 on a CPU was wrong beyond one chunk (transformers issue 47246).
MINIMUM = (5, 24)
NO_FLOOR = 1e-12
"""A time step that no softplus of BF16 values is below."""
_REMEDY = "install requirements-dev.txt, or pass --no-verify and go without the proof"


def judge_problem() -> str | None:
    """Why transformers cannot judge here; None when it can."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return f"the proof by logits needs the package transformers, which is absent: {_REMEDY}"
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < MINIMUM:
        wanted = ".".join(map(str, MINIMUM))
        return (
            f"the proof by logits needs transformers {wanted} or newer, got {version} (older ones "
            f"compute Mamba-2 wrongly on a CPU): {_REMEDY}"
        )
    return None


class Judge:
    """A model folder in transformers, in FP32 on the CPU.

    Args:
        folder: of the model.
        source: its tensors.
        rounded: for a tensor's name the dtype to round it to first (that of a checkpoint which
            holds fewer bits), or None.
    """

    def __init__(
        self,
        folder: Path,
        source: SafetensorsFolder,
        rounded: Callable[[str], torch.dtype | None] = lambda name: None,
    ) -> None:
        if (problem := judge_problem()) is not None:
            raise ConfigError(problem)
        import transformers

        self._source, self._rounded = source, rounded
        with _quiet():
            config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
            if hasattr(config, "quantization_config"):
                del config.quantization_config
            config._attn_implementation = "eager"
            config._experts_implementation = "eager"
            config.use_cache = False
            self.notes = _lift_time_step_floor(config)
            with torch.device("meta"):
                self.model = transformers.AutoModelForCausalLM.from_config(
                    config, dtype=torch.float32, attn_implementation="eager"
                )
        self.model.eval().requires_grad_(False)
        base = self.model.base_model
        if hasattr(base, "rotary_emb"):
            base.rotary_emb = type(base.rotary_emb)(config)
        self.layers = base.layers
        self._base = base
        self._names = self._by_module()

    def _by_module(self) -> dict[str, list[str]]:
        """Names on disk, by the layer ("layers.3") that they belong to; "" for the rest."""
        found: dict[str, list[str]] = {"": []}
        for name in self._source:
            words = name.split(".")
            where = ""
            if "layers" in words and words[0] in ("model", "backbone"):
                number = words[words.index("layers") + 1]
                if int(number) >= len(self.layers):
                    continue  # prediction layers, which transformers does not build
                where = number
            elif words[0] == "mtp":
                continue
            found.setdefault(where, []).append(name)
        return found

    def _load(self, names: list[str]) -> None:
        """Fill the parameters that these tensors make, by transformers' own conversion."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        state = {}
        for name in names:
            tensor, dtype = self._source.read(name), self._rounded(name)
            state[name] = tensor.to(dtype or tensor.dtype).float()
        with _quiet():
            settings = LoadStateDictConfig(
                weight_mapping=get_model_conversion_mapping(self.model),  # type: ignore[arg-type]
                dtype=torch.float32,
            )
            # Values are in memory already: a pool of threads for each layer only costs.
            with mock.patch.dict(os.environ, {"HF_DEACTIVATE_ASYNC_LOAD": "1"}):
                found, _ = convert_and_load_state_dict_in_model(self.model, state, settings)
        wrong = [*found.mismatched_keys, *found.conversion_errors, *found.error_msgs]
        if wrong:
            raise ConfigError(f"transformers cannot load {wrong[0]} of the model folder")

    def _check_filled(self, module: torch.nn.Module, what: str) -> None:
        empty = [
            name
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
            if tensor.is_meta
        ]
        if empty:
            raise ConfigError(
                f"transformers finds no values for {empty[0]} of {what} in the model folder"
            )

    @torch.no_grad()
    def run(self, ids: Tensor, after: Callable[[int, Tensor], None]) -> Tensor:
        """Logits fp32 [batch, tokens, vocabulary] of int64 [batch, tokens].

        `after(-1, x)` is called with the embedded tokens, `after(n, x)` behind layer n; x is
        [batch, tokens, hidden].
        """
        self._load(self._names[""])
        self.model.tie_weights()
        hooks = []
        for number, layer in enumerate(self.layers):
            hooks.append(layer.register_forward_pre_hook(self._fill_hook(number)))
            hooks.append(layer.register_forward_hook(self._after_hook(number, after)))
        embedding = self.model.get_input_embeddings()
        hooks.append(embedding.register_forward_hook(lambda m, i, out: after(-1, out)))
        try:
            with _quiet():
                return self.model(input_ids=ids, use_cache=False).logits.float()
        finally:
            for hook in hooks:
                hook.remove()

    def _fill_hook(self, number: int) -> Callable[..., None]:
        def fill(module: torch.nn.Module, *unused: Any) -> None:
            self._load(self._names.get(str(number), []))
            self._check_filled(module, f"layer {number}")

        return fill

    @staticmethod
    def _after_hook(number: int, after: Callable[[int, Tensor], None]) -> Callable[..., None]:
        def empty(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            module.to("meta")
            after(number, output[0] if isinstance(output, tuple) else output)

        return empty


def _lift_time_step_floor(config: Any) -> list[str]:
    """transformers' Nemotron-H raises time steps to `time_step_min`, which elsewhere is the least
    that training starts from: the kernels of mamba-ssm and megatron-core do not."""
    floor = getattr(config, "time_step_min", 0.0)
    if config.model_type != "nemotron_h" or floor <= NO_FLOOR:
        return []
    config.time_step_min = NO_FLOOR
    return [
        f"transformers would raise Mamba time steps to time_step_min={floor:g}, the models' own "
        "kernels do not: it was judged without"
    ]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers' progress bars and advice kept off the screen."""
    from transformers.utils import logging as theirs

    before, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.ERROR)
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(before)
        if bars:
            theirs.enable_progress_bar()


def chunk_of(config: Mapping[str, Any]) -> int:
    """Tokens of a Mamba chunk in a folder's config.json; a proof must be longer."""
    return int(config.get("chunk_size") or config.get("mamba_chunk_size") or 64)
