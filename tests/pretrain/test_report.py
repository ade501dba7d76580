# SPDX-License-Identifier: Apache-2.0
import base64
import re
import struct
from html.parser import HTMLParser

import pytest

from pretrain.history import encode_row
from pretrain.report.heat_map import HeatMap, render
from pretrain.report.numerics import cost
from pretrain.report.page import main, render_page, write_report
from pretrain.report.run_data import load_run
from tests.pretrain.run_folder import write_run

FILES = ("metrics.jsonl", "config.yaml", "environment.json", "precision.json")


class Text(HTMLParser):
    """Checks that tags nest, and collects tags, attributes and text."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, page: str):
        super().__init__()
        self.stack, self.tags, self.attributes, self.parts = [], [], [], []
        self.feed(page)
        assert not self.stack, self.stack

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.parts.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.parts))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "quickstart")


def test_page_shows_the_run(run):
    path = write_report(run)
    assert path == run / "report.html"
    page = Text(path.read_text())
    assert page.tags.count("svg") == 5, "loss for wide and narrow screens, and three more"
    assert "step 60 of 60" in page.text
    assert "first 8.250, lowest 5.125 at step 60" in page.text
    assert "5.225" in page.text, "mean of the last ten losses: 8 - 0.05 x 55.5"
    assert "layers.3.mlp.experts.linear_fc1" in page.text
    # 4 bits: all of 0.6, a third of 0.3; the rest and the output layer are BF16.
    assert "nvfp4 70.0 % bf16 30.0 %" in page.text
    assert "GEMM work in 4 bits 70 %" in page.text
    assert page.text.count("nvfp4 hadamard16") == 2
    assert "output_layer logits decide \u2013 10.0 % bf16 bf16 bf16" in page.text
    assert "norms elementwise \u2013 \u2013 \u2013 \u2013 \u2013" in page.text
    assert "step_00000030" in page.text
    assert "20 skip gradient norm 1.05" in page.text
    assert "3.12.1" in page.text


def test_page_needs_nothing_else(run):
    page = Text(write_report(run).read_text())
    assert not {"script", "iframe", "img", "object", "embed", "video"} & set(page.tags)
    assert not [a for a in page.attributes if a[0].startswith("on") or a[0] == "src"]
    assert [v for k, v in page.attributes if k == "href"] == ["data:,"]
    style = (run / "report.html").read_text()
    assert "url(" not in style
    assert "@import" not in style
    assert "http" not in style.replace("http-equiv", "")


def test_secrets_are_masked(run, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sesame-0123456")
    with open(run / "config.yaml", "a") as file:
        file.write("extra: {note: sesame-0123456}\n")
    page = write_report(run).read_text()
    assert "do-not-print-me" not in page
    assert "sesame-0123456" not in page
    assert "***" in page


def test_everything_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    run = write_run(tmp_path / "x", name=evil)
    for file in FILES[1:]:
        path = run / file
        path.write_text(
            path.read_text().replace("nvfp4", "<img src=x>").replace("2.11.0", "<script>")
        )
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 60, "event": "<script>", "why": "\\"><script>"}\n')
        file.write('{"step": 60, "val_loss/<script>": 3.0}\n')
    page = Text(write_report(run).read_text())
    assert not {"script", "img"} & set(page.tags)
    assert evil in page.text


@pytest.mark.parametrize("missing", FILES)
def test_a_missing_file_is_a_sentence(run, missing):
    (run / missing).unlink()
    page = Text(write_report(run).read_text())
    assert f"{missing} cannot be read (No such file or directory)" in page.text


@pytest.mark.parametrize("damaged", FILES)
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\0", b"[1, {", b"[1]", b'"x"', b"{}"])
def test_a_damaged_file_never_stops_the_page(run, damaged, content):
    (run / damaged).write_bytes(content)
    page = Text(write_report(run).read_text())
    assert "quickstart" in page.text


@pytest.mark.parametrize(
    "rows",
    [
        {"rows": "x"},
        {"rows": [{"fprop": None}, 3, {"name": ["a"], "dgrad": {"x": "nvfp4", "w": "fp8"}}]},
        {"rows": [{"module": "layers.0.a", "fprop": "nvfp4"}], "flops_share": {"nvfp4": "x"}},
    ],
)
def test_precision_rows_of_any_shape(run, rows):
    import json

    (run / "precision.json").write_text(json.dumps(rows))
    Text(write_report(run).read_text())


@pytest.mark.parametrize(
    "row",
    [
        '{"step": 61, "loss": "x", "lr": null, "tokens": [], "skipped": "?"}',
        '{"step": 61, "loss": "Infinity", "grad_norm": "NaN", "tokens": "NaN"}',
        '{"step": 61, "event": null}',
        '{"step": 61, "event": {"a": 1}, "val_loss": {}}',
        '{"step": "61", "loss": 1}',
    ],
)
def test_odd_rows(run, row):
    with open(run / "metrics.jsonl", "a") as file:
        file.write(row + "\n")
    page = Text(write_report(run).read_text())
    assert "nan," not in (run / "report.html").read_text()
    assert "of 60" in page.text


def test_empty_folder(tmp_path):
    page = Text(write_report(tmp_path).read_text())
    assert "no steps yet" in page.text
    assert page.text.count("no data yet") == 5


def test_long_runs_stay_small(tmp_path):
    run = write_run(tmp_path / "long", steps=20_000)
    page = render_page(load_run(run))
    assert len(page) < 600_000


def test_command_line(run, capsys, tmp_path):
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    assert "is not a folder; give a run's folder" in capsys.readouterr().err


def test_rows_of_a_map_are_named_by_their_layer():
    rows = [("layers.3.mlp.linear_fc1", [1.0]), ("layers.3.mlp.linear_fc2", [1.0])]
    drawn = render(HeatMap("", [1], [*rows, ("mtp.0.eh_proj", [None])]), (0.0, 1.0))
    assert re.findall("([^>]*)</text>", drawn) == ["3", "mtp.0", "1"]


def test_numerics_are_maps_of_layers_by_steps(run):
    """The worst cell is named; a damaged value is left out; nothing is drawn without figures."""
    assert "Numerics" not in render_page(load_run(run))
    rows = []
    for step in (100, 200):
        for layer in range(3):
            snr = 12.25 if (layer, step) == (1, 200) else 20.0
            operand = {"amax": 2.0**-layer, "snr_db": snr, "slope": 0.99, "flushed": "NaN"}
            name = f"layers.{layer}.mlp.linear_fc1"
            rows.append({"step": step, "module": name, "fprop.x": operand, "zero_gradients": 0.1})
        plain = {"amax": 0.0 if step == 100 else 8.0}
        rows.append({"step": step, "module": "mtp.0.eh_proj", "fprop.x": plain})
        router = {"entropy": 0.9, "max_load": 1.5, "idle": 0.0, "load": [1.0]}
        rows.append({"step": step, "router": "layers.1.mlp.router", **router})
    (run / "numerics.jsonl").write_bytes(b"".join(map(encode_row, rows)))
    page = Text(render_page(load_run(run)))
    text = page.text
    assert "farthest off: 12.25, layers.1.mlp.linear_fc1 fprop.x, step 200" in text
    assert "largest: 3, mtp.0.eh_proj fprop.x, step 200" in text, "an amax is not off"
    assert "layers.1.mlp.linear_fc1 last 12.25 lowest 12.25 at step 200" in text
    assert "layers.2.mlp.linear_fc1 last -2 lowest -2 at step 100" in text, "log2 of amax"
    assert "mtp.0.eh_proj last 3 lowest 3 at step 200" in text, "an amax of 0 has no logarithm"
    assert "Entropy of the router" in text
    assert "flushed to zero" not in text
    images = [
        value for name, value in page.attributes if name == "href" and value[:10] == "data:image"
    ]
    assert len(images) == 3 + 1 + 3, "amax, snr and slope, gradients, three figures of the router"
    sizes = [
        struct.unpack(">II", base64.b64decode(image.split(",")[1])[16:24]) for image in images[:2]
    ]
    assert sizes == [(2, 4), (2, 3)]


def test_the_cost_of_monitoring_is_told():
    """4 of 40 steps took 3 s where others took 1: 8 s more of 44 (the first tenth is left out)."""
    rows = [{"step": step} for step in (10, 20, 30, 40)]
    training = [{"step": s, "seconds": 3.0 if s % 10 == 0 else 1.0} for s in range(1, 41)]
    assert "took 3.00 times another one: monitoring was 18 %" in cost(rows, training)
    assert cost(rows, training[:9]) == ""
    assert cost([], training) == ""
