# SPDX-License-Identifier: Apache-2.0
"""Comparisons as pictures: PNG and HTML, in which no two rows look alike."""

import re

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pretrain.comparison import picture
from pretrain.comparison.compare import base_row, load_rows
from pretrain.comparison.picture import write_html, write_png
from pretrain.comparison.runs import Row
from pretrain.comparison.summary import summarize
from tests.pretrain.test_comparison import write_run


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    for name, gap, recipe in (("bf16", 0.0, "bf16"), ("v1", 0.01, "nvfp4")):
        write_run(place, name, 1, gap, recipe)
    return load_rows([place])


def test_pictures(rows, tmp_path):
    base = base_row(rows, "bf16")
    write_png(rows, base, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    lines = summarize(rows, base)
    write_html(rows, base, lines, ["<said>"], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert "&lt;said&gt;" in page
    assert page.count('role="img"') == 3, "both forwards and the training loss"
    assert "http" not in page.replace("http-equiv", "")


def test_no_two_rows_of_many_look_alike(rows, tmp_path, monkeypatch):
    """40 rows in 12 colours: the others differ in dashes, in both pictures and their keys."""
    base, many = _many(rows, 40)
    drawn, plot = [], Axes.plot

    def note(axis, *points, **options):
        drawn.append((options["color"], str(options["linestyle"]), options["label"]))
        return plot(axis, *points, **options)

    monkeypatch.setattr(Axes, "plot", note)
    write_png(many, base, tmp_path / "a.png", dpi=40)
    looks = {label: (colour, style) for colour, style, label in drawn}
    assert len(looks) == len(set(looks.values())) == 40
    assert looks["row 3"][1] == looks["row 11"][1] == "-"
    assert (looks["row 12"][0], looks["row 12"][1]) == (looks["row 0"][0], "(0, (4.0, 2.5))")

    write_html(many, base, summarize(many, base), [], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()

    def told(selector, what):
        found = re.findall(rf"^{selector} {{.*?{what}: (.*?);", page, re.MULTILINE)
        assert len(found) <= 1
        return found[0] if found else ""

    looks = [
        [told(rf"\.row{n}", "--c"), told(rf"\.curve\.row{n}", "stroke-dasharray")]
        for n in range(40)
    ]
    assert len(set(map(tuple, looks))) == 40
    for n in range(40):
        key = f'<polyline class="curve line row{n}" [^>]*/></svg>row {n} <b>'
        assert len(re.findall(key, page)) == 3, "dashed by the same rule as its curve"
    assert looks[0] == ["#2f6fde", ""]
    assert looks[12] == ["#2f6fde", "8 5"]
    assert looks[24] == ["#2f6fde", "8 5 1 5"]


def test_the_legend_of_many_rows_hides_no_curve(rows, tmp_path, monkeypatch):
    """Names as long as studies have them; few rows have theirs in a panel, where there is room."""
    base, many = _many(rows, 20)
    for number, row in enumerate(many):
        row.label = f"nvfp4_fast_tail_late_bf16_{number}" if number else row.label
    seen, save = [], Figure.savefig

    def note(figure, *place, **options):
        save(figure, *place, **options)
        legends = [axis.get_legend() for axis in figure.axes]
        panels = [axis.get_window_extent() for axis in figure.axes]
        seen.append((figure.legends, [one for one in legends if one], panels, figure.bbox))

    monkeypatch.setattr(Figure, "savefig", note)
    write_png(many, base, tmp_path / "many.png")
    write_png(many[:4], base, tmp_path / "few.png")
    [([legend], inside, panels, whole), few] = seen
    assert inside == []
    box = legend.get_window_extent()
    assert box.y1 < min(panel.y0 for panel in panels)
    assert 0 <= box.x0 < box.x1 <= whole.x1
    assert box.y0 >= 0
    assert (len(few[0]), len(few[1])) == (0, 1)


def test_no_two_dots_of_many_look_alike(rows, tmp_path, monkeypatch):
    """A row of one evaluation has no dashes: dots of one colour differ in shape, and keys show it,
    although the curves of another panel are too long for dots."""
    base, many = _many(rows, 64)
    whole, legend, looks = picture.curves, Figure.legend, {}

    def curves(*of):
        found = {kind: points[-1:] for kind, points in whole(*of).items()}
        return {**found, "training": 40 * found["training"]}

    def note(figure, handles, labels, **options):
        looks.update({k: (h.get_color(), str(h.get_marker())) for k, h in zip(labels, handles)})
        return legend(figure, handles, labels, **options)

    monkeypatch.setattr(picture, "curves", curves)
    monkeypatch.setattr(Figure, "legend", note)
    write_png(many, base, tmp_path / "a.png", dpi=40)
    assert len(looks) == len(set(looks.values())) == 64
    assert looks["row 11"][1] == "o"

    write_html(many, base, summarize(many, base), [], tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    colours = dict(re.findall(r"^\.row(\d+) { --c: (.*?);", page, re.MULTILINE))
    shown = re.findall(r'<(\w+) class="dot row(\d+)" ([^>]*)/></svg>row (\d+) <b>', page)
    assert len(shown) == 2 * 64, "the key of each row is its dot, in two charts"
    assert all(row == label for _, row, _, label in shown)
    looks = {row: (colours[row], kind, place) for kind, row, place, _ in shown}
    assert len(set(looks.values())) == 64, "keys lie alike: what differs is the shape"
    for row, corners in (("12", 3), ("24", 8), ("36", 4)):
        dots = re.findall(rf'<polygon class="dot row{row}" points="([^"]*)"', page)
        assert [len(set(points.split())) for points in dots] == 4 * [corners], "keys and charts"


def _many(rows, number):
    """The base, and it with as many rows of the same runs."""
    base = base_row(rows, "bf16")
    other = next(row for row in rows if row is not base)
    return base, [base, *(Row(f"row {place}", other.runs) for place in range(number))]
