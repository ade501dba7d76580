# SPDX-License-Identifier: Apache-2.0
"""Conversions of a model of 2 GB, in a process that never holds more than a few of its tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.conversion.safetensors import SafetensorsWriter, TensorSpec
from tests.models import hf_toys

ROOT = Path(__file__).resolve().parents[2]
_PROGRAM = """
import sys
from pathlib import Path
from tools.convert import main
status = main(sys.argv[1:])
# Not getrusage: its peak outlives exec, and counts what the program that started this one had.
(line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")]
print("PEAK", int(line.split()[1]) * 1024)
sys.exit(status)
"""
HIDDEN, FFN, LAYERS, VOCAB, EXPERTS = 1024, 2816, 12, 16001, 24


def run(*words) -> int:
    """Peak resident bytes of the command line in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout.split("PEAK ")[1])


def large_folder(small: Path, large: Path) -> int:
    """A folder like `small` with every tensor enlarged; its bytes."""
    import transformers

    values = hf_toys.TOYS["qwen3_moe"][1] | {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "moe_intermediate_size": FFN // 2,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "head_dim": 128,
        "num_experts": EXPERTS,
    }
    config = transformers.AutoConfig.for_model("qwen3_moe", **values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    large.mkdir()
    config.dtype = "bfloat16"
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(large)
    specs = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")) and tensor.dim() == 3:
            parts = ["down"] if name.endswith("down_proj") else ["gate", "up"]
            rows = tensor.shape[1] // len(parts)
            for expert in range(tensor.shape[0]):
                for part in parts:
                    at = name.rsplit(".", 1)[0] + f".{expert}.{part}_proj.weight"
                    specs[at] = TensorSpec((rows, tensor.shape[2]), torch.bfloat16)
        else:
            specs[name] = TensorSpec(tuple(tensor.shape), torch.bfloat16)
    writer = SafetensorsWriter(large, specs, max_file_bytes=10**9)
    generator = torch.Generator().manual_seed(0)
    for name, spec in specs.items():
        noise = torch.randn(spec.shape, generator=generator) * spec.shape[-1] ** -0.5
        writer.write(name, (noise + (1.0 if len(spec.shape) == 1 else 0.0)).bfloat16())
    assert len(writer.finish()) >= 3, "several files and their index"
    return sum(spec.nbytes for spec in specs.values())


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_peak_memory_does_not_grow_with_the_model(tmp_path):
    small = hf_toys.make_toy("qwen3_moe", tmp_path / "small", dtype="bfloat16")
    base = run("import", small, tmp_path / "c_small")
    total = large_folder(small, tmp_path / "large")
    assert 1.9e9 < total < 2.6e9, total
    largest = VOCAB * HIDDEN * 2
    without = ["--no-verify"]
    peaks = {
        "import": run("import", tmp_path / "large", tmp_path / "c", *without),
        "export": run("export", tmp_path / "c", tmp_path / "out", *without),
    }
    print({name: (peak - base) / 2**20 for name, peak in peaks.items()}, base / 2**20)
    for name, peak in peaks.items():
        # A tensor, what it becomes, and what is on its way to the disk.
        assert peak - base < 4 * largest, (name, peak, base)
    # The proof has a layer in FP32 on either side, and transformers' embedding and head.
    layer = EXPERTS * 3 * HIDDEN * (FFN // 2) * 4
    peak = run("verify", tmp_path / "c", tmp_path / "out")
    print("verify", (peak - base) / 2**20)
    assert peak - base < 4 * largest + 4 * layer, (peak, base)
    index = json.loads((tmp_path / "large" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
