# SPDX-License-Identifier: Apache-2.0
"""The command line of conversions: exit statuses, what it prints, files that travel."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.models import hf_toys
from tools import convert

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = hf_toys.make_toy("qwen2", tmp_path_factory.mktemp("toy") / "hf", dtype="bfloat16")
    (place / "tokenizer.json").write_text('{"model": {}}')
    (place / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (place / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 7}')
    hf_toys.edit_config(place, eos_token_id=7, a_key_of_nobody="kept")
    return place


@pytest.fixture(scope="module")
def checkpoints(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("imported") / "checkpoints"
    assert convert.main(["import", str(folder), str(place)]) == 0
    return place


def test_import_export_verify(folder, checkpoints, tmp_path, capsys):
    assert convert.main(["export", str(checkpoints), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "verified: one model" in said
    assert "26 tensors of the model folder compared" in said
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_text() == (folder / name).read_text()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["a_key_of_nobody"], config["eos_token_id"]) == ("kept", 7)
    assert config["dtype"] == "bfloat16"
    assert convert.main(["verify", str(checkpoints), str(tmp_path / "out")]) == 0
    assert convert.main(["export", str(checkpoints), str(tmp_path / "out")]) == 2
    assert "HF_DIR must be new or empty" in capsys.readouterr().err


def test_a_false_folder_is_exit_status_1(folder, checkpoints, tmp_path, capsys):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][5, 5] += 0.5
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    assert convert.main(["verify", str(checkpoints), str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "FAILED: model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight" in said
    assert "FAILED: logits: layer 0 is the first to diverge" in said
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert convert.main(["import", str(tmp_path), str(tmp_path / "new")]) == 1
    assert "model.norm.weight is needed" in capsys.readouterr().err


def test_mistakes_are_exit_status_2(folder, checkpoints, tmp_path, capsys):
    assert convert.main(["import", str(tmp_path), str(tmp_path / "c")]) == 2
    assert "HF_DIR must hold config.json" in capsys.readouterr().err
    assert convert.main(["import", str(folder), str(checkpoints)]) == 2
    assert "CKPT_DIR must be new" in capsys.readouterr().err
    assert convert.main(["export", str(tmp_path), str(tmp_path / "h")]) == 2
    assert "CKPT_DIR must hold a checkpoint" in capsys.readouterr().err
    for size in ("150", "0"):  # both are padded to the rows that there are
        more = ["--vocab-size", size]
        assert convert.main(["export", str(checkpoints), str(tmp_path / "h"), *more]) == 2
        assert "--vocab-size must be that of the checkpoint, 203" in capsys.readouterr().err
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    for pickle, says in ((None, "it holds none"), ("pytorch_model.bin", "is a pickle, which can")):
        if pickle is not None:
            (tmp_path / pickle).write_bytes(b"")
        assert convert.main(["import", str(tmp_path), str(tmp_path / "c")]) == 2
        assert says in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    save_file(load_file(folder / "model.safetensors"), tmp_path / "model.safetensors")
    assert convert.main(["import", str(tmp_path), str(tmp_path / "c")]) == 2
    assert "did you mean llama?" in capsys.readouterr().err


def test_any_json_is_no_config(folder, checkpoints, tmp_path, capsys):
    place = tmp_path / "hf"
    shutil.copytree(folder, place)
    values = json.loads((folder / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**values, "quantization_config": None}))
    assert convert.main(["verify", str(checkpoints), str(place)]) == 0
    foreign = {"quant_method": "compressed-tensors", "config_groups": {"group_1": {}}}
    for text, says in (
        ("[]", "must hold keys and values in braces; got '[]'"),
        ("{", "is not JSON"),
        (json.dumps({**values, "quantization_config": "nvfp4"}), "must be keys and values"),
    ):
        (place / "config.json").write_text(text)
        for command in (["inspect"], ["verify", str(checkpoints)]):
            assert convert.main([*command, str(place)]) == 2
            assert says in capsys.readouterr().err
    (place / "config.json").write_text(json.dumps({**values, "quantization_config": foreign}))
    assert convert.main(["verify", str(checkpoints), str(place)]) == 2
    assert "is not that of an export of ours" in capsys.readouterr().err


def test_nothing_of_the_users_is_in_the_way(folder, checkpoints, tmp_path, capsys, monkeypatch):
    def export(place):
        return convert.main(["export", str(checkpoints), str(place), "--no-verify"])

    (tmp_path / "file").write_text("mine")
    assert export(tmp_path / "file") == 2
    assert "HF_DIR must be a folder" in capsys.readouterr().err
    for suffix in ("part", "failed"):
        mine = tmp_path / f"{suffix}.{suffix}" / "thesis.txt"
        mine.parent.mkdir()
        mine.write_text("mine")
        assert export(tmp_path / suffix) == 2
        assert "which is no former export" in capsys.readouterr().err
        assert mine.read_text() == "mine"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert export(".") == 2
    assert "or the one you are in; got ." in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "empty.part").mkdir()
    (tmp_path / "empty.part" / "model.safetensors.part").write_text("of an export that was killed")
    assert export("link") == 0
    assert (tmp_path / "link" / "config.json").is_file()
    assert not list(tmp_path.glob("*.part/config.json"))
    # A run starts from the newest checkpoint of a folder: another model's, here.
    step = tmp_path / "run" / "step_00000007"
    shutil.copytree(checkpoints / "step_00000000", step)
    assert convert.main(["import", str(folder), str(tmp_path / "run")]) == 2
    assert "CKPT_DIR must be new" in capsys.readouterr().err
    assert os.listdir(tmp_path / "run") == [step.name]


def test_what_tells_of_other_weights_does_not_travel(folder, checkpoints, tmp_path):
    place = tmp_path / "hf"
    shutil.copytree(folder, place)
    (place / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    hf_toys.edit_config(place, auto_map={"AutoConfig": "configuration_x.XConfig"})
    assert convert.main(["import", str(place), str(tmp_path / "c"), "--no-verify"]) == 0
    out = [str(tmp_path / "c"), str(tmp_path / "out"), "--no-verify"]
    assert convert.main(["export", *out]) == 0
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    # A tokenizer from a folder in shards, whose index names files that this one has not.
    (place / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    (place / "tokenizer.json").write_text('{"of": "another"}')
    out = [str(checkpoints), str(tmp_path / "other"), "--no-verify", "--tokenizer", str(place)]
    assert convert.main(["export", *out]) == 0
    assert json.loads((tmp_path / "other" / "tokenizer.json").read_text()) == {"of": "another"}
    assert not list((tmp_path / "other").glob("*index.json"))
    assert not list((tmp_path / "other").glob("hf_quant*"))


@pytest.mark.parametrize("command", ["import", "export", "upcycle"])
def test_a_full_disk_is_said_and_leaves_nothing(folder, checkpoints, tmp_path, command, capsys):
    """A process may write files of 20 kB and no more: what the machine says has no name in it."""
    source = folder if command == "import" else checkpoints
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    more = ["--experts", "4"] if command == "upcycle" else []
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        status = convert.main([command, str(source), str(tmp_path / "new"), *more])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert status == 2
    said = capsys.readouterr().err
    assert f"error: {tmp_path / 'new'}: file too large; raise the limit" in said
    assert not list(tmp_path.rglob("*.distcp*")) + list(tmp_path.rglob("*.safetensors*"))


def test_inspect(folder, checkpoints, tmp_path, capsys):
    assert convert.main(["inspect", str(folder), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "26 tensors of bfloat16" in said
    assert "verified: whole" in said
    assert convert.main(["inspect", str(checkpoints), "--verify"]) == 0
    said = capsys.readouterr().out
    assert "decoder.layers.0.self_attention.linear_qkv.bias" in said
    assert "[64]" in said
    assert "step        0, holds model" in said
    assert "weights are stored in bf16; trained with bf16, no codes are stored" in said
    shard = next(checkpoints.rglob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    copy = tmp_path / "step_00000000"
    copy.mkdir()
    for path in shard.parent.iterdir():
        (copy / path.name).write_bytes(bytes(data) if path == shard else path.read_bytes())
    assert convert.main(["inspect", str(copy), "--verify"]) == 2
    assert "__0_0.distcp is damaged" in capsys.readouterr().err


def test_as_a_script_its_folder_shadows_nothing(folder, tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "convert.py"), "inspect", str(folder)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "family      qwen2 (Qwen2ForCausalLM)" in done.stdout
