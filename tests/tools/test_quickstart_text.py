# SPDX-License-Identifier: Apache-2.0
"""The quickstart's text: enough, deterministic, whole or absent."""

import json

import pytest

from tools import quickstart_text


@pytest.fixture(scope="module")
def gathered():
    return quickstart_text.gather()


def test_text_is_enough_and_of_three_kinds(gathered):
    lines, counts = gathered
    assert sum(map(len, lines)) > 8e6
    kinds = {json.loads(line)["source"].split("/")[0] for line in lines}
    assert kinds == {"python-topics", "python-docstrings", "python-library"}
    assert sum(counts[kind] for kind in kinds) == len(lines)


def test_text_is_the_same_again(gathered):
    assert quickstart_text.gather()[0] == gathered[0]


def test_near_duplicates_are_left_out():
    seen = quickstart_text.NearDuplicates()
    text = "\n".join(f"line {i}" for i in range(40))
    assert seen.is_new(text)
    assert not seen.is_new(text.replace("line 7", "changed"))
    assert not seen.is_new("  " + text.replace("\n", "\n\n  "))
    assert seen.is_new("\n".join(f"other {i}" for i in range(40)))


def test_a_file_is_kept_only_while_it_is_whole(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quickstart_text, "gather", lambda: ([b"{}\n"] * 3, {"python-topics": 3}))
    path = tmp_path / "new" / "text.jsonl"
    arguments = ["--output", str(path)]
    assert quickstart_text.main(arguments) == 0
    assert "3 python-topics" in capsys.readouterr().out
    assert quickstart_text.main(arguments) == 0
    assert "kept" in capsys.readouterr().out
    path.write_bytes(b"{}\n")
    assert quickstart_text.main(arguments) == 0
    assert path.read_bytes() == b"{}\n" * 3


def test_an_interrupted_write_leaves_nothing_under_the_name(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart_text, "gather", lambda: ([b"{}\n"] * 3, {}))
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    path = tmp_path / "text.jsonl"
    with pytest.raises(KeyboardInterrupt):
        quickstart_text.write(path)
    assert not path.exists()
    assert not quickstart_text.is_done(path)


def test_an_unwritable_place_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert quickstart_text.main(["--output", str(tmp_path / "file" / "text.jsonl")]) == 2
    assert "must be writable" in capsys.readouterr().err
