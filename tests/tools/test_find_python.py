# SPDX-License-Identifier: Apache-2.0
"""The Makefile finds a Python that really runs, or says in one line what it looked for."""

import os
import stat
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "find_python.sh"


def find(path: str, home: Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["/bin/sh", str(SCRIPT)],
        env={"PATH": path, "HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )


def program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def real(path: Path) -> None:
    """A command that is this interpreter's base, from which environments can be made."""
    base = os.path.realpath(sys.executable)
    program(path, f'exec "{base}" "$@"')


def test_no_python_is_one_line_that_names_commands_and_folders(tmp_path):
    result = find("/nonexistent", tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().split("\n")) == 1
    assert "no Python >= 3.12" in result.stderr
    for looked in ("python3.12", "python3.13", "PATH", str(tmp_path / ".pyenv" / "versions")):
        assert looked in result.stderr


def test_a_shim_that_refuses_is_passed_over_for_pyenv(tmp_path):
    shims = tmp_path / "shims"
    program(shims / "python3.12", 'echo "pyenv: python3.12: command not found" >&2; exit 127')
    program(shims / "python3", "exit 1")
    real(tmp_path / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3")
    result = find(str(shims), tmp_path)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).exists()


def test_an_old_python_is_not_taken(tmp_path):
    # Says of itself that it is too old: the version check exits with 1.
    program(tmp_path / "bin" / "python3", "exit 1")
    assert find(str(tmp_path / "bin"), tmp_path).returncode == 2


def test_a_named_python_is_used_or_refused_by_name(tmp_path):
    real(tmp_path / "mine")
    assert find("/nonexistent", tmp_path, PYTHON=str(tmp_path / "mine")).returncode == 0
    refused = find("/nonexistent", tmp_path, PYTHON=str(tmp_path / "absent"))
    assert refused.returncode == 2
    assert f"PYTHON={tmp_path / 'absent'}" in refused.stderr
