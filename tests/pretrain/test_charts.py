# SPDX-License-Identifier: Apache-2.0
import itertools
import re
from xml.etree import ElementTree

import pytest

from pretrain.report.charts import (
    Chart,
    Mark,
    Series,
    log_ticks,
    nice_ticks,
    number,
    render,
    smooth,
    thin,
)

LINE = [(float(i), 10.0 - i) for i in range(11)]


def tree(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def polyline(svg: str, name: str) -> list[tuple[float, float]]:
    points = re.search(rf'<polyline class="curve [a-z]+ {name}" points="([^"]+)"', svg)[1]
    return [tuple(map(float, p.split(","))) for p in points.split()]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (2.9, 8.7, [4, 6, 8]),
        (0, 0.0031, [0, 0.001, 0.002, 0.003]),
        (1, 150, [50, 100, 150]),
        (5, 5, [5]),
    ],
)
def test_nice_ticks(low, high, ticks):
    found = nice_ticks(low, high, 5)
    assert set(ticks) <= set(found)
    assert all(low <= t <= high for t in found)
    assert len(found) <= 8


def test_log_ticks():
    assert log_ticks(0.9, 2e4) == pytest.approx([1, 10, 100, 1000, 1e4])
    assert log_ticks(0.4, 12) == pytest.approx([0.5, 1, 2, 5, 10])
    assert len(log_ticks(3.1, 3.4)) >= 2
    assert len(log_ticks(1e-12, 1e12)) <= 8


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.003, "0.003"),
        (1.5e-4, "1.5e-4"),
        (6.584, "6.584"),
        (2305, "2\u202f305"),
        (307200, "307\u202fk"),
        (1.25e9, "1.25\u202fG"),
    ],
)
def test_number(value, text):
    assert number(value) == text


def test_smooth_is_the_centred_mean():
    points = [(0.0, 1.0), (1.0, 4.0), (2.0, 1.0), (3.0, 4.0)]
    assert smooth(points, 3) == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
    assert smooth(LINE, 5) == LINE, "a straight line stays"


def test_thin_keeps_ends_and_extremes():
    points = [(float(i), float(i % 7)) for i in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[8765] = (8765.0, -99.0)
    kept = thin(points, 500)
    assert len(kept) <= 520
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert {(4321.0, 99.0), (8765.0, -99.0)} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_curve_maps_values_to_the_plot():
    svg = render(Chart([Series("loss", "train", LINE)], "Loss"), 600, 300)
    points = polyline(svg, "train")
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    assert (xs[0], xs[-1]) == (62.0, 586.0)
    steps = [round(b - a, 1) for a, b in itertools.pairwise(xs)]
    assert set(steps) == {52.4}
    assert ys == sorted(ys), "a falling loss goes down the page"
    assert 14 < ys[0] < ys[-1] <= 266
    assert "step 10" in "".join(t.text for t in tree(svg).iter("title"))


def test_log_axis_spaces_decades_equally():
    chart = Chart([Series("norm", "train", [(0, 100.0), (1, 10.0), (2, 1.0)])], "Norm", log=None)
    ys = [y for _, y in polyline(render(chart, 600, 300), "train")]
    assert ys[1] - ys[0] == pytest.approx(ys[2] - ys[1], abs=0.2)


def test_one_spike_does_not_flatten_the_curve():
    points = [(float(i), 2.0 + (i % 5) / 10) for i in range(200)]
    points[100] = (100.0, 1e6)
    ys = [
        y
        for _, y in polyline(render(Chart([Series("l", "train", points)], "L"), 600, 300), "train")
    ]
    usual = [y for i, y in enumerate(ys) if i != 100]
    assert max(usual) - min(usual) > 100


@pytest.mark.parametrize("points", [[], [(3.0, 2.0)], [(1.0, 5.0), (2.0, 5.0)], [(0.0, 0.0)]])
def test_little_data_is_drawn(points):
    svg = render(Chart([Series("loss", "train", points)], "Loss", log=None), 400, 250)
    tree(svg)
    assert "nan" not in svg
    assert ("no data yet" in svg) == (not points)


def test_marks_levels_and_names_are_escaped():
    chart = Chart(
        [Series("<b>", "train", LINE)],
        "<i>",
        marks=[Mark(5, "<script>", "resume", "<u>"), Mark(99, "outside")],
        levels=[(6.5, "a & b")],
    )
    svg = render(chart, 600, 300)
    tree(svg)
    assert "<script>" not in svg
    assert "outside" not in svg
    assert "a &amp; b" in svg
