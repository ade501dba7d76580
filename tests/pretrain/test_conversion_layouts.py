# SPDX-License-Identifier: Apache-2.0
"""One process imports; two load in any layout, agree with it, and save; one process exports."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.config import ParallelConfig, transformer_config
from models.hybrid_model import build_model
from pretrain.checkpoint.config import CheckpointConfig
from pretrain.checkpoint.manager import CheckpointManager
from pretrain.checkpoint.state import load_sharded
from pretrain.config_file import encode
from pretrain.conversion.exporting import ExportOptions, export_checkpoint
from pretrain.conversion.importing import ImportOptions, import_folder
from pretrain.conversion.opened import open_checkpoint
from pretrain.initialize import initialize
from tests.distributed import run_distributed
from tests.models import hf_toys

TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
# toy: (changes, layouts). One key-value head over two ranks; experts, groups and biases cut.
_BLOCKS = ["mamba", "moe", "attention", "moe"]
CASES = {
    "nemotron_3": ({"layers_block_type": _BLOCKS}, [TP, EP, PP]),
    "llama": ({"num_key_value_heads": 1}, [TP, PP]),
    "qwen2": ({}, [TP]),
    "olmoe": ({}, [TP]),
    "deepseek_v3": ({"num_hidden_layers": 2}, [TP, EP]),
    "gpt_oss": ({}, [EP, PP]),
}
LENGTH = 32


def staged(section, parallel):
    """Two stages of different lengths, the shorter one first."""
    if parallel.pipeline_model_parallel_size == 1:
        return section
    return dataclasses.replace(
        section, preset=None, pattern=f"{section.pattern[0]}|{section.pattern[1:]}"
    )


def _loss(checkpoint, parallel):
    """(chunks, mean loss of fixed tokens; None where a stage is elsewhere)."""
    world = initialize(parallel, seed=1)
    section = staged(checkpoint.section, parallel)
    config = transformer_config(section, parallel, params_dtype=torch.float32)
    chunks = build_model(section, config, world.groups, checkpoint.vocab_size)
    load_sharded(checkpoint.path, chunks, None)
    if parallel.pipeline_model_parallel_size > 1:
        return chunks, None
    ids = torch.randint(
        0, hf_toys.VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(3)
    )
    places = torch.arange(LENGTH).expand(2, -1).contiguous()
    with torch.no_grad():
        model = chunks[0].eval()
        loss = model(ids[:, :-1].contiguous(), places, None, labels=ids[:, 1:].contiguous())
    return chunks, float(loss.mean())


def _relay(folders: dict[str, str]) -> dict[str, float | None]:
    """In two processes: load each import in each layout, compute, save."""
    losses = {}
    for name, folder in folders.items():
        checkpoint = open_checkpoint(Path(folder) / "checkpoints")
        for number, layout in enumerate(CASES[name][1]):
            parallel = ParallelConfig(**layout)
            chunks, losses[f"{name} {number}"] = _loss(checkpoint, parallel)
            run = Path(folder) / f"layout{number}"
            manager = CheckpointManager(CheckpointConfig(), run, lock=False)
            model = staged(checkpoint.section, parallel)
            config = dataclasses.replace(checkpoint.config, parallel=parallel, model=model)
            manager.save(5, chunks, None, None, extra={}, resolved_config=encode(config))
            manager.close()
    return losses


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "names", [["nemotron_3"], pytest.param(list(CASES)[1:], marks=pytest.mark.slow)]
)
def test_any_layout_on_either_side(names, tmp_path):
    folders, alone = {}, {}
    for name in names:
        changes, layouts = CASES[name]
        folders[name] = str(tmp_path / name)
        folder = hf_toys.make_toy(name, tmp_path / name / "hf", **changes)
        options = ImportOptions(show=False, verify=False)
        import_folder(folder, tmp_path / name / "checkpoints", options)
        for number in range(len(layouts)):
            (tmp_path / name / f"layout{number}").mkdir()
        checkpoint = open_checkpoint(tmp_path / name / "checkpoints")
        alone[name] = _loss(checkpoint, ParallelConfig())[1]
    initialize(ParallelConfig())
    first, second = run_distributed(_relay, 2, timeout=400, args=(folders,))
    for case, loss in first.items():
        name, number = case.split()
        assert loss == second[case]
        if loss is not None:  # FP32 sums in another order
            assert abs(loss - alone[name]) < 2e-6 * alone[name], case
        checkpoint = open_checkpoint(tmp_path / name / f"layout{number}")
        assert checkpoint.step == 5
        pieces = [len(checkpoint.reader.pieces(n)) for n in checkpoint.reader]
        assert max(pieces) >= 2 or loss is None
        for carried in (tmp_path / name / "checkpoints").rglob("hf.config.json"):
            shutil.copyfile(carried, checkpoint.path / carried.name)
        out = tmp_path / name / f"out{number}"
        done = export_checkpoint(checkpoint, out, ExportOptions(show=False, verify=number == "0"))
        assert done.verdict is None or done.verdict.ok, done.verdict.problems
        before = load_file(tmp_path / name / "hf" / "model.safetensors")
        after = load_file(out / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before), case
