# SPDX-License-Identifier: Apache-2.0
import json
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from fused_ops.errors import ConfigError
from pretrain.history import DROPPED_FILE, JsonlSink, cut_history, encode_row, read_metrics

ROOT = Path(__file__).resolve().parents[2]


def rows(*steps: int) -> list[dict]:
    return [{"step": s, "loss": 1.0 / s} for s in steps]


def write(path: Path, *steps: int, tail: bytes = b"") -> None:
    path.write_bytes(b"".join(map(encode_row, rows(*steps))) + tail)


def test_every_row_is_strict_json():
    given = {"step": 3, "loss": float("nan"), "grad_norm": math.inf, "low": -math.inf}
    given |= {"tensor": torch.tensor(2.5), "array": np.float32(1.5), "many": torch.tensor([1, 2])}

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    row = json.loads(encode_row(given), parse_constant=refuse)
    assert row["loss"] == "NaN"
    assert math.isnan(float(row["loss"]))
    assert float(row["grad_norm"]) == math.inf
    assert float(row["low"]) == -math.inf
    assert (row["tensor"], row["array"], row["many"]) == (2.5, 1.5, [1, 2])


@pytest.mark.parametrize("tail", [b'{"step": 4, "lo', b'{"step": 4, "loss": 0.2', b"\0\0\0", b"{}"])
def test_torn_last_line_is_repaired_on_resume(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, tail=tail)
    sink = JsonlSink(path, resumed_step=3)
    sink.write({"step": 4, "loss": 0.125})
    sink.close()
    assert read_metrics(path) == [*rows(1, 2, 3), {"step": 4, "loss": 0.125}]
    assert path.read_bytes().count(b"\n") == 4
    for line in path.read_text().splitlines():
        json.loads(line)


def test_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, tail=b'{"step": 3, "loss": 0.5}')
    cut_history(path, 3)
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]
    assert path.read_bytes().endswith(b"\n")


def test_rows_after_the_resumed_step_move_to_the_backup(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4, 5)
    assert cut_history(path, 3) == 2
    assert read_metrics(path) == rows(1, 2, 3)
    assert read_metrics(tmp_path / DROPPED_FILE) == rows(4, 5)
    before = path.stat()
    assert cut_history(path, 3) == 0
    assert path.stat().st_ino == before.st_ino, "a whole history is not rewritten"


def test_a_new_history_keeps_the_old_one_beside_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    JsonlSink(path, resumed_step=None).close()
    assert path.read_bytes() == b""
    assert read_metrics(tmp_path / DROPPED_FILE) == rows(1, 2)


def test_a_row_is_on_disk_when_the_process_is_killed(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from pretrain.history import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]))\n"
        "[sink.write({'step': s}) for s in range(1, 51)]\n"
        "os.kill(os.getpid(), 9)"
    )
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -9
    assert [r["step"] for r in read_metrics(path)] == list(range(1, 51))


def test_full_disk_costs_rows_and_nothing_else(tmp_path, caplog):
    """A file size limit stands in for the disk: writes are cut short, then refused."""
    code = """
import logging, resource, signal, sys
from pathlib import Path
from pretrain.history import JsonlSink
logging.basicConfig(format="%(levelname)s %(message)s")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sink = JsonlSink(Path(sys.argv[1]))
row = lambda s: {"step": s, "pad": "x" * 60}
for s in range(1, 6): sink.write(row(s))
resource.setrlimit(resource.RLIMIT_FSIZE, (sink._size + 30, resource.RLIM_INFINITY))
for s in range(6, 9): sink.write(row(s))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
for s in range(9, 11): sink.write(row(s))
sink.close()
print(sink.lost_rows)
"""
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", code, path], cwd=ROOT, timeout=60, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5, 9, 10]
    assert path.read_bytes().count(b"\n") == 7, "the torn row is cut off"
    assert done.stderr.count("training goes on") == 1
    assert "is written again; 3 rows were lost" in done.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"run folder must be writable.*choose another run\.dir"):
        JsonlSink(blocked / "run" / "metrics.jsonl")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write to a read-only folder")
def test_read_only_folder(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="must be writable"):
        JsonlSink(tmp_path / "metrics.jsonl")
