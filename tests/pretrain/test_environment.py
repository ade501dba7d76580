# SPDX-License-Identifier: Apache-2.0
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from pretrain import environment
from pretrain.environment import (
    OPTIONAL,
    code_state,
    cudnn_shadow,
    describe_environment,
    git_state,
    report_absences,
    sources_digest,
    unseen_gpus,
    write_environment,
)


def test_environment_names_what_later_readers_ask_for(tmp_path):
    found = write_environment(tmp_path, {"seed": 1234, "wandb_api_key": "sesame"})
    assert json.loads((tmp_path / "environment.json").read_text()) == found
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["packages"]["megatron-core"].startswith("0.19.")
    assert set(found["optional_packages"]) == set(OPTIONAL)
    assert found["cpu"]
    assert found["cpu_count"] >= 1
    assert found["host_count"] == 1
    assert found["seed"] == 1234
    assert found["wandb_api_key"] == "***"
    assert list(tmp_path.iterdir()) == [tmp_path / "environment.json"]


def test_hosts_follow_from_the_launcher(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    found = describe_environment()
    assert (found["world_size"], found["host_count"]) == (16, 2)


def test_command_line_hides_secrets(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "open-sesame-42")
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "pretrain", "a=b open-sesame-42"])
    command = describe_environment()["command"]
    assert command.endswith("-m pretrain 'a=b ***'")


def test_one_line_for_each_absent_package(caplog, monkeypatch):
    find = environment.importlib.util.find_spec
    monkeypatch.setattr(
        environment.importlib.util,
        "find_spec",
        lambda name: None if name == "mamba_ssm" else (object() if name == "apex" else find(name)),
    )
    with caplog.at_level(logging.INFO):
        lines = report_absences()
    assert [r.getMessage() for r in caplog.records] == lines
    assert any(line.startswith("mamba-ssm is not installed: the reference scan") for line in lines)
    assert not [line for line in lines if line.startswith("apex")]


def test_git_state_tells_changed_code(tmp_path):
    assert git_state(tmp_path) is None

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-q", "-m", "a")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path)["dirty"] is True


def test_the_digest_of_sources_tells_any_change(tmp_path):
    """A copy without history is known by its bytes, wherever it lies; data beside it is none."""
    for place in ("a", "b"):
        (tmp_path / place / "models" / "deep").mkdir(parents=True)
        (tmp_path / place / "models" / "deep" / "x.py").write_text("x = 1\n")
    first, second = (sources_digest(tmp_path / place) for place in ("a", "b"))
    assert first == second == code_state(tmp_path / "a")["sources"]
    (tmp_path / "b" / "models" / "notes.txt").write_text("1")
    assert sources_digest(tmp_path / "b") == first
    (tmp_path / "b" / "models" / "deep" / "x.py").rename(tmp_path / "b" / "models" / "x.py")
    moved = sources_digest(tmp_path / "b")
    (tmp_path / "a" / "models" / "deep" / "x.py").write_text("x = 2\n")
    assert len({first, moved, sources_digest(tmp_path / "a")}) == 3


def test_cudnn_of_the_system_before_that_of_the_environment(tmp_path, monkeypatch):
    own = Path(sys.prefix) / "lib/nvidia/cudnn/lib/libcudnn.so.9"
    monkeypatch.setattr(environment, "_loaded_or_wheel_cudnn", lambda: [own])
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    assert cudnn_shadow() is None
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nonexistent:{tmp_path}")
    assert cudnn_shadow() is None
    (tmp_path / "libcudnn.so.9").write_text("")
    message = cudnn_shadow()
    assert f"{tmp_path}/libcudnn.so.9 comes before {own}" in message
    assert "remove its folder from LD_LIBRARY_PATH" in message
    assert f"cuDNN on {socket.gethostname()} shadows" in message


def test_gpus_that_torch_does_not_see(tmp_path, monkeypatch):
    """A run on the CPU beside them is said to be one; not where it was asked for."""
    monkeypatch.setattr(environment, "_DRIVER_GPUS", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert unseen_gpus("cpu") is None
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    assert unseen_gpus("cuda") is None
    message = unseen_gpus("cpu")
    assert message.startswith(f"{socket.gethostname()} has 2 GPUs and torch sees none")
    assert "nvidia-smi" in message
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert unseen_gpus("cpu") is None


def test_a_cpu_run_does_not_use_packages_for_gpus(tmp_path):
    """megatron-core would take gradient norms with Transformer Engine where it is installed."""
    for name in ("transformer_engine", "apex"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('needs a GPU')\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from pretrain import cpu_compat; assert cpu_compat.enable()\n"
        "from megatron.core.optimizer import clip_grads\n"
        "print(clip_grads.multi_tensor_applier.__module__)\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1].startswith("megatron.")
