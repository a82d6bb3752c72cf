"""Charts show sizes as areas, and values where they belong."""

import re

import pytest

from zeropoint.report.charts import Area, depth_chart, histogram, treemap

BOX = re.compile(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"><title>(.*?)</title>')


def boxes(chart: str) -> dict[str, tuple[float, ...]]:
    """Return place and size of each rectangle, by its title."""
    return {title: tuple(map(float, place)) for *place, title in BOX.findall(chart)}


def test_areas_are_sizes_and_fill_the_box() -> None:
    sizes = {"a": 8.0, "b": 4.0, "c": 2.0, "d": 1.0, "e": 1.0}
    found = boxes(treemap([Area(n, s, 0, n) for n, s in sizes.items()], scale=0.5, label="bytes").inline)
    whole = 300 * 150
    for name, (_, _, width, height) in found.items():
        assert width * height == pytest.approx(whole * sizes[name] / 16, rel=0.01)
    assert max(x + w for x, _, w, _ in found.values()) == pytest.approx(300, abs=0.2)
    assert max(y + h for _, y, _, h in found.values()) == pytest.approx(150, abs=0.2)


def test_equal_sizes_have_one_shape_and_what_is_empty_has_none() -> None:
    areas = [Area(str(n), float(n < 4), n, str(n)) for n in range(5)]
    found = boxes(treemap(areas, scale=1.0, label="bytes").inline)
    assert {place[2:] for place in found.values()} == {(300.0, 150.0)}
    assert len(found) == 4


def test_points_stand_at_their_depth_and_value() -> None:
    chart = depth_chart({"up": [(0, 0.0), (1, 0.5), (4, 1.0)]}, {"up": [(4, 0.25)]}, label="error").inline
    spots = [tuple(map(float, spot)) for spot in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', chart)]
    (left, bottom), (x1, middle), (right, top), (dashed_x, quarter) = spots
    assert x1 == pytest.approx(left + (right - left) / 4, abs=0.1)
    assert middle == pytest.approx((bottom + top) / 2, abs=0.1)
    assert (dashed_x, quarter) == pytest.approx((right, bottom + (top - bottom) / 4), abs=0.1)
    assert chart.count("stroke-dasharray") == 1
    assert "<title>up, 4: 0.25</title>" in chart


def test_bars_are_as_high_as_their_shares() -> None:
    heights = [float(h) for h in re.findall(r"v-([\d.]+)h", histogram([0.1, 0.4, 0.2], label="codes").inline)]
    assert heights == [6.0, 24.0, 12.0]
